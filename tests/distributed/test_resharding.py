"""A checkpoint loaded on another mesh: weights, moments and logits of a resumed run; only the weights of a new run."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.config.schema import Config, OptimizerConfig
from megatron_fp4.parallel.data_parallel import gathered_parameters
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import build_optimizer, optimizer_state
from tests.distributed.hybrid import MODEL, RECIPES, Layout, micro_batches, sharded_model, whole
from tests.models.builders import relative_error
from tests.training.harness import launch, train_step

pytestmark = pytest.mark.slow

ONE, TP2, DP2, HSDP2 = Layout(1), Layout(2, tensor=2), Layout(2, reshard=True), Layout(4, tensor=2, replicate=2)
IDENTITY = run_identity(Config(model=MODEL), {"tokenizer": "one"})


class Run(NamedTuple):
    """A run's folder, its logits of a fixed batch, and its whole weights and moments."""

    folder: Path
    logits: Tensor
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]

    def checkpoint(self) -> str:
        return str(self.folder / "checkpoints" / "step_00000002")


def run(rank: int, layout: Layout, source: str | None, folder: str, steps: int) -> Run:
    """Load `source`, train `steps` steps, save in `folder`."""
    mesh, step_state = layout.mesh(), StepState(seed=0)
    model = sharded_model(layout, mesh, RECIPES["fp32"], step_state)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    checkpointer = Checkpointer(Path(folder, "checkpoints"), mesh, keep=0, identity=IDENTITY)
    done = 0
    if source is not None:
        with torch.no_grad():  # so that equal weights must come from the checkpoint
            for parameter in model.parameters():
                parameter.zero_()
        resumed = checkpointer.resume(source, model, optimizer, step_state, allow_mismatch=False)
        assert resumed is not None
        done = resumed.step
    for step in range(done, done + steps):
        train_step(model, optimizer, micro_batches(step, mesh), mesh, step_state, step=step)
    checkpointer.save(done + steps, model, optimizer, {}, consumed_samples=0, consumed_tokens=0)
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    moments = {name: whole(value) for name, value in optimizer_state(model, optimizer).items()}
    tokens = torch.randint(MODEL.vocab_size, (2, 32), generator=torch.Generator().manual_seed(9))
    with torch.no_grad(), gathered_parameters(model):
        logits = model(tokens).contiguous()
    parts = [torch.empty_like(logits) for _ in range(mesh.tensor.size)]
    dist.all_gather(parts, logits, group=mesh.tensor.group)
    return Run(Path(folder), torch.cat(parts, -1), weights, moments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps on one rank."""
    return launch(run, 1, ONE, None, str(tmp_path_factory.mktemp("one")), 2)[0]


@pytest.fixture(scope="module")
def sharded(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """The checkpoint of `trained`, loaded and saved by two tensor-parallel ranks."""
    return launch(run, 2, TP2, trained.checkpoint(), str(tmp_path_factory.mktemp("two")), 0)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() and len(actual) > 15
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


def test_loading_on_two_and_four_ranks_and_back_keeps_all_bits(trained: Run, sharded: list[Run], tmp_path) -> None:
    replicas = launch(run, 4, HSDP2, sharded[0].checkpoint(), str(tmp_path / "four"), 0)
    data_parallel = launch(run, 2, DP2, replicas[0].checkpoint(), str(tmp_path / "two"), 0)
    (back,) = launch(run, 1, ONE, data_parallel[0].checkpoint(), str(tmp_path / "one"), 0)
    for one in (*sharded, *replicas, *data_parallel, back):
        assert_equal(one.weights, trained.weights)
        assert_equal(one.moments, trained.moments)
        assert relative_error(one.logits, trained.logits) < 1e-6
    for one in (*data_parallel, back):
        assert torch.equal(one.logits, trained.logits)
