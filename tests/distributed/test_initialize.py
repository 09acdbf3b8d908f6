"""The weights of a checkpoint, and nothing else of it, on any mesh."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exchange.weights_only import write_weights_only
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.config.schema import Config, OptimizerConfig
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import build_optimizer, optimizer_state
from tests.distributed.hybrid import MODEL, RECIPES, Layout, micro_batches, sharded_model, whole
from tests.training.harness import launch, train_step

pytestmark = pytest.mark.slow

ONE, TP2, DP2 = Layout(1), Layout(2, tensor=2), Layout(2, reshard=True)
IDENTITY = run_identity(Config(model=MODEL), {"tokenizer": "one"})


def trained(rank: int, layout: Layout, root: str) -> dict[str, Tensor]:
    """Two checkpoints of a run of two steps; the last weights, whole."""
    mesh, step_state = layout.mesh(), StepState(seed=0)
    model = sharded_model(layout, mesh, RECIPES["fp32"], step_state)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    checkpointer = Checkpointer(Path(root), mesh, keep=0, identity=IDENTITY)
    for step in range(2):
        train_step(model, optimizer, micro_batches(step, mesh), mesh, step_state, step=step, lr=1e-3, clip_norm=1.0)
        checkpointer.save(step + 1, model, optimizer, {}, consumed_samples=0, consumed_tokens=0)
    return {name: whole(value) for name, value in model.state_dict().items()}


def initialized(rank: int, layout: Layout, given: str, root: str, harm: str) -> tuple[str, dict[str, Tensor], bool]:
    """A start from `given`: what was said, the weights after it, and whether everything else is as before.

    harm: a file of which rank 1 alone reads another byte.
    """
    mesh, step_state = layout.mesh(), StepState(seed=0)
    model = sharded_model(layout, mesh, RECIPES["fp32"], step_state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    checkpointer = Checkpointer(Path(root), mesh, keep=0, identity=IDENTITY)
    generator = torch.get_rng_state()
    if harm and rank == 1:
        private = Path(root).with_name("private")
        shutil.copytree(given, private)
        content = bytearray((private / harm).read_bytes())
        content[len(content) // 2] ^= 1
        (private / harm).write_bytes(content)
        real = files.open_plain
        files.open_plain = lambda path: real(private / path.name)  # type: ignore[assignment]
    try:
        begun = checkpointer.initialize(given, model, step_state, resumed=False, allow_mismatch=False)
        said = f"{begun.path} {begun.step}" if begun else ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    fresh = not any(whole(value).any() for value in optimizer_state(model, optimizer).values())
    fresh &= torch.equal(generator, torch.get_rng_state()) and not list(Path(root).glob("*"))
    return said, {name: whole(value) for name, value in model.state_dict().items()}, fresh


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a run on two tensor-parallel ranks, and its last weights."""
    run_dir = tmp_path_factory.mktemp("source")
    return run_dir, launch(trained, 2, TP2, str(run_dir / "checkpoints"))[0]


@pytest.fixture(scope="module")
def imported(source: tuple[Path, dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of these weights and nothing else."""
    folder = tmp_path_factory.mktemp("imported") / "model"
    write_weights_only(folder, Config(model=MODEL), source[1].items(), imported={"from": "a test"}, tokenizer="one")
    return folder


@pytest.mark.parametrize(("kind", "layout"), [("run", ONE), ("import", TP2), ("run", DP2)])
def test_weights_have_the_bits_of_their_source(
    source: tuple[Path, dict[str, Tensor]], imported: Path, kind: str, layout: Layout, tmp_path: Path
) -> None:
    """On every mesh, of a run's newest checkpoint and of an import; moments and generators are those of a new run."""
    run_dir, weights = source
    given = run_dir if kind == "run" else imported
    for said, found, fresh in launch(initialized, layout.world, layout, str(given), str(tmp_path / "own"), ""):
        assert said == (f"{run_dir}/checkpoints/step_00000002 2" if kind == "run" else f"{imported} 0")
        assert fresh and found.keys() == weights.keys() and len(weights) > 15
        for name, value in weights.items():
            assert torch.equal(found[name], value), name


def test_what_one_rank_alone_finds_damaged_is_not_passed_over(
    source: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    given = source[0] / "checkpoints" / "step_00000002"
    for said, _, _ in launch(initialized, 2, TP2, str(given), str(tmp_path / "own"), "__1_0.distcp"):
        assert said.startswith("CheckpointError: ") and "finds it whole" in said and "says rank 1: " in said
