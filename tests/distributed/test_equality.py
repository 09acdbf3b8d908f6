"""One model on every mesh: loss, gradients, weights, codes and the gradient norm are those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distributed.hybrid import (
    LAYOUTS,
    ONE,
    Layout,
    Result,
    relative_error,
    train,
)
from tests.training.harness import launch

pytestmark = pytest.mark.slow

PRECISIONS = ["fp32", "nvfp4"]


def _train_all(rank: int, layouts: list[Layout]) -> list[Result]:
    """Every layout in every precision, in one launch."""
    return [train(rank, layout, precision) for layout in layouts for precision in PRECISIONS]


@pytest.fixture(scope="module")
def one() -> dict[str, Result]:
    return dict(zip(PRECISIONS, launch(_train_all, 1, [ONE])[0], strict=True))


@pytest.fixture(scope="module")
def many() -> dict[tuple[str, str], list[Result]]:
    """(layout, precision) -> what each rank saw."""
    results: dict[tuple[str, str], list[Result]] = {}
    for world in sorted({layout.world for layout in LAYOUTS.values()}):
        layouts = {name: layout for name, layout in LAYOUTS.items() if layout.world == world}
        ranks = launch(_train_all, world, list(layouts.values()), seconds=300.0)
        keys = [(name, precision) for name in layouts for precision in PRECISIONS]
        results |= dict(zip(keys, map(list, zip(*ranks, strict=True)), strict=True))
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_fp32_every_mesh_is_one_process(layout, one, many):
    """Losses, norms, gradients and weights; and ranks agree bit for bit."""
    expected, (first, *_) = one["fp32"], many[layout, "fp32"]
    for rank in many[layout, "fp32"]:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
        assert rank.norms == pytest.approx(expected.norms, rel=1e-5)
        assert rank.gradients.keys() == expected.gradients.keys()
        for found, wanted in ((rank.gradients, expected.gradients), (rank.weights, expected.weights)):
            for name, tensor in found.items():
                assert relative_error(tensor, wanted[name]) < 1e-5, name
        assert (rank.losses, rank.norms) == (first.losses, first.norms)
        assert all(torch.equal(rank.weights[name], weight) for name, weight in first.weights.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_nvfp4_losses_and_the_codes_of_weights(layout, one, many):
    first = 1e-3 if LAYOUTS[layout].tensor > 1 else 1e-6
    for rank in many[layout, "nvfp4"]:
        assert rank.losses[0] == pytest.approx(one["nvfp4"].losses[0], rel=first)
        assert rank.losses == pytest.approx(one["nvfp4"].losses, rel=1e-3)
    ranks = sorted(many[layout, "nvfp4"], key=lambda rank: rank.tp_rank)
    checked = 0
    for micro_batch, linear, gemm in one["nvfp4"].codes:
        holders = [rank for rank in ranks if (micro_batch, linear, gemm) in rank.codes]
        assert [rank.tp_rank for rank in holders] == list(range(LAYOUTS[layout].tensor))
        if gemm == "wgrad":
            continue
        *_, values, scale = one["nvfp4"].codes[micro_batch, linear, gemm]
        parts = [rank.codes[micro_batch, linear, gemm] for rank in holders]
        # fprop's weight is [out, in], dgrad's [in, out]; out is sharded in the projections into a block.
        sharded = int(linear.endswith(("out_proj", "down_proj"))) ^ int(gemm == "dgrad")
        assert torch.equal(torch.cat([part[2] for part in parts], sharded), values), (linear, gemm)
        assert all(torch.equal(part[3], scale) for part in parts), (linear, gemm)
        checked += 1
    assert checked == ONE.num_micro_batches * 6 * 2


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.tensor == 1])
def test_every_code_of_the_first_step_under_data_parallelism(layout, one, many):
    """(Sums over tensor-parallel ranks round differently: test_linear_codes.py gives linears equal inputs.)"""
    assert_codes_equal(many[layout, "nvfp4"], one["nvfp4"], ONE.num_micro_batches)


def test_every_code_of_the_first_step_on_three_ranks():
    """Three and six are no powers of two: a division in another place would round, and move codes."""
    layout = Layout(3, num_micro_batches=6)
    one = launch(train, 1, replace(ONE, num_micro_batches=6), "nvfp4", 1)[0]
    three = launch(train, 3, layout, "nvfp4", 1)
    assert_codes_equal(three, one, 6)
    for rank in three:
        assert rank.losses == pytest.approx(one.losses, rel=1e-6)
        assert rank.norms == pytest.approx(one.norms, rel=1e-5)
        for name, gradient in rank.gradients.items():
            assert relative_error(gradient, one.gradients[name]) < 1e-5, name


def _once_and_each(rank: int, layout: Layout) -> list[Result]:
    """Two steps with gradients reduced once a step, and after each micro-batch."""
    return [train(rank, replace(layout, reduce=reduce), "nvfp4", 2) for reduce in ("once", "each")]


@pytest.mark.parametrize("name", ["tp2_dp2", "hsdp2_dp2"])
def test_reducing_after_each_micro_batch_changes_only_the_order_of_sums(name):
    layout = replace(LAYOUTS[name], num_micro_batches=8)
    differ = False
    for once, each in launch(_once_and_each, layout.world, layout):
        assert each.losses[0] == once.losses[0]
        assert each.losses[1] == pytest.approx(once.losses[1], rel=1e-3)
        assert each.norms[0] == pytest.approx(once.norms[0], rel=1e-5)
        assert each.gradients.keys() == once.gradients.keys()
        for parameter, gradient in each.gradients.items():
            assert relative_error(gradient, once.gradients[parameter]) < 1e-5, parameter
            differ |= not torch.equal(gradient, once.gradients[parameter])
    assert differ  # or the setting did nothing


def assert_codes_equal(ranks: list[Result], one: Result, num_micro_batches: int) -> None:
    """Both operands and both tensor scales of all GEMMs of a step, bit for bit."""
    codes = {key: value for rank in ranks for key, value in rank.codes.items()}
    assert codes.keys() == one.codes.keys()
    assert len(codes) == num_micro_batches * 6 * 3
    for key, found in codes.items():
        assert all(torch.equal(a, b) for a, b in zip(found, one.codes[key], strict=True)), key


def test_the_comparisons_compare_something(one):
    gradients = one["fp32"].gradients
    assert {name.rpartition(".")[2] for name in gradients} == {"weight", "bias", "A_log", "D", "dt_bias"}
    assert all(gradient.norm() > 1e-6 for gradient in gradients.values())
    assert abs(one["nvfp4"].losses[0] - one["fp32"].losses[0]) > 1e-4
    for name, weight in one["nvfp4"].weights.items():
        assert relative_error(weight, one["fp32"].weights[name]) > 1e-4, name
