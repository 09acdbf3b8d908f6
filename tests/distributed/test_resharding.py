"""A checkpoint means the same on every mesh: weights and moments of a run that resumes from one mesh to another."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.config.schema import Config, OptimizerConfig
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import build_optimizer, optimizer_state
from tests.distributed.hybrid import MODEL, ONE, RECIPES, Layout, controlled_model, masked_micro_batches
from tests.distributed.test_expert_parallel import CONFIG, TENSOR
from tests.training.harness import launch, train_step, whole

pytestmark = pytest.mark.slow(seconds=10)

EXPERTS = [Layout(4, expert=2), *TENSOR, Layout(4, expert=4), ONE]
OTHERS = [ONE, Layout(2, tensor=2), Layout(4, tensor=2, replicate=2), Layout(2, reshard=True), ONE]


def resumed(rank: int, layout: Layout, pattern: str, source: str | None, folder: str) -> dict[str, Tensor]:
    """Weights and moments after a resume from `source` (None: after a step), saved in `folder`."""
    mesh, step_state, config = layout.mesh(), StepState(seed=0), replace(CONFIG, pattern=pattern)
    model, _ = controlled_model(mesh, RECIPES["fp32"], step_state, config, reshard=layout.reshard)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    identity = run_identity(Config(model=config), {"tokenizer": "one"})
    checkpointer = Checkpointer(Path(folder, "checkpoints"), mesh, keep=0, identity=identity)
    if source is None:
        train_step(model, optimizer, masked_micro_batches(0, mesh), mesh, step_state, step=0)
    else:
        with torch.no_grad():  # so that equal weights must come from the checkpoint
            for parameter in model.parameters():
                parameter.zero_()
        assert checkpointer.resume(source, model, optimizer, step_state, allow_mismatch=False) is not None
    checkpointer.save(1, model, optimizer, {}, consumed_samples=0, consumed_tokens=0)
    tensors = {**model.state_dict(), **optimizer_state(model, optimizer)}
    return {name: whole(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("pattern", "layouts"), [("ME", EXPERTS), (MODEL.pattern, OTHERS)], ids=["experts", "others"])
def test_a_checkpoint_keeps_its_bits_from_mesh_to_mesh(tmp_path: Path, pattern: str, layouts: list[Layout]) -> None:
    expected, source = dict[str, Tensor](), None
    for index, layout in enumerate(layouts):
        for tensors in launch(resumed, layout.world, layout, pattern, source, str(tmp_path / str(index))):
            expected = expected or tensors
            torch.testing.assert_close(tensors, expected, rtol=0, atol=0)
        source = str(tmp_path / str(index) / "checkpoints" / "step_00000001")
    moments = [moment for name, moment in expected.items() if name.endswith("weight.exp_avg")]
    assert len(moments) > 7 and all(moment.any() for moment in moments)
