"""`parallel.reproducible`: losses, norms, weights and moments have the same bits on any power of two of ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pretrain
from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.parallel.reproducible import exact_norm_share, leaf_size, tree_all_reduce, tree_sum
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.callbacks.numerics import Switch
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.step import ALONE, accumulate
from megatron_fp4.training.trainer import Callback, Trainer
from models import provider as models
from tests.spiked_run import small_corpus
from tests.test_pretrain import SMALL
from tests.training.harness import alone, launch, toy, toy_batches, whole

pytestmark = pytest.mark.slow

STEPS = 3
EIGHT = ["train.global_batch_size=8", "train.micro_batch_size=1", "train.sequence_length=32", f"train.steps={STEPS}"]
EIGHT += ["model.pattern=M*-", "data.num_workers=0", "validation.num_samples=1", "parallel.reproducible=true"]
BATCHES = {
    "eight, not all targets count": ["data.documents=masked", "data.boundary_loss=false", "precision.switch.when=1"],
    "six, leaves of three": ["train.global_batch_size=6"],
}
ONCE, REPLICAS = "parallel.reduce_gradients=once", "parallel.replicate=2"
RUNS = [  # ranks, batch, mesh
    *((1, batch, ONCE) for batch in BATCHES),
    (2, "six, leaves of three", REPLICAS),
    (4, "eight, not all targets count", f"parallel.reduce_gradients=each {REPLICAS} parallel.reshard=true"),
]
Bits = tuple[list[tuple[float, float]], dict[str, Tensor]]


def trained(
    overrides: list[str],
    folder: Path,
    first: int = 0,
    last: int = STEPS,
    device: str = "cpu",
    callbacks: Sequence[Callback] = (),
) -> tuple[Trainer, list[tuple[float, float]]]:
    """Train the steps [first, last) from the checkpoint of `first` in `folder`, and save `last`. Returns losses and
    norms with the trainer."""
    config = compose_config([*SMALL, *EIGHT, *overrides, f"run.dir={folder}"], pretrain.CONFIGS)
    mesh = build_mesh(config.parallel, torch.device(device))
    trainer = Trainer(config, models, data, [*callbacks, Switch()], mesh, quiet=True)
    if first:
        trainer.begin_from(trainer.checkpointer.folder(first))
    else:
        trainer.initialize()
        trainer.begin(0)
    numbers = [(step.result.loss, step.result.grad_norm) for step in trainer.steps(first, last)]
    trainer.save(last, last=True)
    trainer.checkpointer.finish()
    return trainer, numbers


def train(overrides: list[str], folder: Path, first: int = 0, last: int = STEPS) -> Bits:
    """Losses and norms of `trained`, and the weights and moments after it."""
    trainer, numbers = trained(overrides, folder, first, last)
    tensors = {**dict(trainer.model.named_parameters()), **optimizer_state(trainer.model, trainer.optimizer)}
    return numbers, {name: whole(tensor) for name, tensor in tensors.items()}


def train_all(rank: int, ranks: int, step: int, corpus: list[str], folder: Path) -> dict[tuple[int, str, str], Bits]:
    """The runs of `RUNS` on this number of ranks; step `step` of a run that changes its number of ranks; and a run that
    is not reproducible."""
    results = {
        (num_ranks, batch, mesh): train([*corpus, *BATCHES[batch], *mesh.split()], folder / f"{ranks}_{number}")
        for number, (num_ranks, batch, mesh) in enumerate(RUNS)
        if num_ranks == ranks
    }
    eight = [*corpus, *BATCHES["eight, not all targets count"]]
    results[ranks, "changing", ""] = train(eight, folder / "changing", step, step + 1)
    if ranks < 4:
        results[ranks, "not", ""] = train([*corpus, "parallel.reproducible=false"], folder / f"not_{ranks}", last=1)
    return results


def assert_equal(actual: Bits, expected: Bits) -> None:
    assert actual[0] == expected[0]
    assert actual[1].keys() == expected[1].keys() and len(expected[1]) > 50
    for name, tensor in expected[1].items():
        assert torch.equal(actual[1][name], tensor), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, str], list[Bits]]:
    """The results of each run on each rank."""
    folder, results = tmp_path_factory.mktemp("runs"), {}
    corpus = small_corpus(folder)
    for step, ranks in enumerate((1, 4, 2)):
        by_rank = launch(train_all, ranks, ranks, step, corpus, folder)
        results |= {name: [one_rank[name] for one_rank in by_rank] for name in by_rank[0]}
    return results


@pytest.mark.parametrize(("ranks", "batch", "mesh"), [run for run in RUNS if run[0] > 1])
def test_every_mesh_computes_the_run_of_one_rank(runs, ranks, batch, mesh) -> None:
    (expected,) = runs[1, batch, ONCE]
    assert len({loss for loss, _ in expected[0]}) == STEPS
    for actual in runs[ranks, batch, mesh]:
        assert_equal(actual, expected)


def test_a_run_may_change_its_number_of_ranks(runs) -> None:
    """It begins on one rank, continues on four and ends on two."""
    (expected,) = runs[1, "eight, not all targets count", ONCE]
    numbers = [runs[ranks, "changing", ""][0][0][0] for ranks in (1, 4, 2)]
    assert_equal((numbers, runs[2, "changing", ""][1][1]), expected)


def test_runs_that_are_not_reproducible_differ_between_meshes(runs) -> None:
    """Otherwise the tests above would show nothing."""
    (_, one), (_, two) = (runs[ranks, "not", ""][0] for ranks in (1, 2))
    assert any(not torch.equal(tensor, one[name]) for name, tensor in two.items())


def test_the_tree_adds_neighbours_first() -> None:
    assert [leaf_size(number) for number in (1, 2, 3, 8, 12, 768)] == [1, 1, 3, 1, 3, 3]
    a, b, c, d = parts = torch.randn(4, 100_000)
    assert torch.equal(tree_sum(parts), (a + b) + (c + d))
    assert not torch.equal(tree_sum(parts), a + b + c + d)


def _all_reduced(rank: int, cases: list[Tensor]) -> list[Tensor]:
    tensors = [parts[rank].clone() for parts in cases]
    for tensor in tensors:
        tree_all_reduce(tensor, dist.group.WORLD)
    return tensors


def test_an_all_reduce_of_any_size_is_the_tree_sum() -> None:
    cases = [torch.randn(4, size) for size in (1, 7, 1000)]
    for sums in launch(_all_reduced, 4, cases):
        assert all(torch.equal(actual, tree_sum(parts)) for actual, parts in zip(sums, cases, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0, math.inf, math.nan])
def test_the_norm_does_not_depend_on_the_order_of_elements(scale: float) -> None:
    """It has the accuracy of FP32, for gradients of many magnitudes, and stays non-finite if an element is."""
    elements = torch.randn(4096) * torch.randn(4096).mul(4).exp()
    elements = elements * scale if math.isfinite(scale) else elements.index_fill(0, torch.tensor(7), scale)
    with alone():
        orders = (elements[torch.randperm(len(elements))] for _ in range(5))
        shares = [float(exact_norm_share(part.split([1, 95, 1000, 3000]), torch.device("cpu"))) for part in orders]
    if not math.isfinite(scale):
        assert not any(map(math.isfinite, shares))
        return
    assert len({*shares}) == 1
    assert shares[0] == pytest.approx(math.fsum(x**2 for x in elements.tolist()), rel=2**-23, abs=0)


def test_a_single_micro_batch_has_a_loss_whatever_its_index() -> None:
    """Measurements compute micro-batches that are not part of a global batch."""
    with alone() as mesh:
        mesh = replace(mesh, reproducible=True)
        model, _ = toy(mesh)
        batch = replace(toy_batches(0, mesh)[0], index=3)
        (loss,) = accumulate(model, [batch], mesh, StepState(seed=0), global_batch=ALONE)
        assert math.isfinite(float(loss))
