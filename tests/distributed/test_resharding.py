"""A checkpoint of one mesh on another: the same weights, moments and logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.config.schema import OptimizerConfig
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import build_optimizer, optimizer_state
from tests.distributed.hybrid import MODEL, RECIPES, Layout, micro_batches, relative_error, sharded_model, whole
from tests.training.harness import launch, train_step

pytestmark = pytest.mark.slow

ONE, TP2, DP2 = Layout(1), Layout(2, tensor=2), Layout(2, reshard=True)


def run(rank: int, layout: Layout, source: str | None, target: str, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Load `source`, train `steps` steps, save to `target`; logits of a fixed batch, and weights and moments whole."""
    mesh, step_state = layout.mesh(), StepState(seed=0)
    model = sharded_model(layout, mesh, RECIPES["fp32"], step_state)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    checkpointer = Checkpointer(Path(target), mesh, keep=0, identity={})
    done = 0
    if source is not None:
        with torch.no_grad():  # what is loaded must not be what was there before
            for parameter in model.parameters():
                parameter.zero_()
        resumed = checkpointer.resume(source, model, optimizer, step_state, allow_mismatch=False)
        assert resumed is not None
        done = resumed.step
    for step in range(done, done + steps):
        train_step(model, optimizer, micro_batches(step, mesh), mesh, step_state, step=step, lr=1e-3, clip_norm=1.0)
    checkpointer.save(done + steps, model, optimizer, {}, consumed_samples=0, consumed_tokens=0)
    state = {n: whole(v) for n, v in {**model.state_dict(), **optimizer_state(model, optimizer)}.items()}
    tokens = torch.randint(MODEL.vocab_size, (2, 32), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        logits = model(tokens).contiguous()
    parts = [torch.empty_like(logits) for _ in range(mesh.tp_size)]
    dist.all_gather(parts, logits, group=mesh.tp_group)
    return torch.cat(parts, -1), state


def checkpoint(root: Path, step: int) -> str:
    return str(root / f"step_{step:08d}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, dict[str, Tensor]]:
    root = tmp_path_factory.mktemp("one")
    return (root, *launch(run, 1, ONE, None, str(root), 2)[0])


def assert_equal_state(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


def test_one_rank_to_two_tensor_parallel_ranks_and_back(trained, tmp_path):
    root, logits, state = trained
    for sharded_logits, sharded_state in launch(run, 2, TP2, checkpoint(root, 2), str(tmp_path / "two"), 0):
        assert_equal_state(sharded_state, state)
        assert relative_error(sharded_logits, logits) < 1e-6
    back_logits, back_state = launch(run, 1, ONE, checkpoint(tmp_path / "two", 2), str(tmp_path / "one"), 0)[0]
    assert_equal_state(back_state, state)
    assert torch.equal(back_logits, logits)


def test_one_rank_to_two_data_parallel_ranks(trained, tmp_path):
    root, logits, state = trained
    for sharded_logits, sharded_state in launch(run, 2, DP2, checkpoint(root, 2), str(tmp_path), 0):
        assert_equal_state(sharded_state, state)
        assert torch.equal(sharded_logits, logits)


def test_two_tensor_parallel_ranks_go_on_as_one_would(trained, tmp_path):
    root, *_ = trained
    _, expected = launch(run, 1, ONE, checkpoint(root, 2), str(tmp_path / "one"), 2)[0]
    _, state = launch(run, 2, TP2, checkpoint(root, 2), str(tmp_path / "two"), 2)[0]
    for name in dict.fromkeys(n for n in expected if not n.endswith((".step", ".exp_avg", ".exp_avg_sq"))):
        assert relative_error(state[name], expected[name]) < 1e-5, name
