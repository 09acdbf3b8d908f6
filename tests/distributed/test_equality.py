"""Loss, gradients, weights, codes, gradient norm and generated texts of a model on every mesh are those of one
process."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference.generation import Continuation, Request, Sampling, Settings, generate, logits_of_all_ids
from megatron_fp4.parallel.data_parallel import gathered_parameters
from megatron_fp4.precision.rng import StepState
from tests.distributed.hybrid import LAYOUTS, ONE, RECIPES, Layout, Result, launch_each, sharded_model, train
from tests.models.builders import relative_error
from tests.training.harness import alone, launch

pytestmark = pytest.mark.slow

PRECISIONS = {"fp32": 2, "nvfp4": 1}  # -> steps
MESHES = ["tp2_without_sequence_parallel", "dp2", "tp2_dp2", "tp2_dp2_each", "hsdp2_dp2"]
# Each step of generation has one token per prompt: three tokens, or one. With sequence parallelism, two ranks cannot
# share them evenly without padding.
PROMPTS = ([5], [1, 2, 3], list(range(40)))
SETTINGS = (Settings(9), Settings(9, Sampling(0.9, 0.9, seed=3), stop=11))


@pytest.fixture(scope="module")
def many() -> dict[tuple[Layout, str], list[Result]]:
    """(layout, precision) -> the results of each rank."""
    layouts = [ONE, *(LAYOUTS[name] for name in MESHES)]
    found = launch_each(train, *((layout, *steps) for layout in layouts for steps in PRECISIONS.items()))
    return {(layout, precision): results for (layout, precision, _), results in found.items()}


@pytest.fixture(scope="module")
def one(many) -> dict[str, Result]:
    return {precision: many[ONE, precision][0] for precision in PRECISIONS}


@pytest.mark.parametrize("layout", MESHES)
def test_in_fp32_every_mesh_has_the_results_of_one_process(layout, one, many):
    """Losses, norms, gradients and weights; ranks have the same bits."""
    expected, ranks = one["fp32"], many[LAYOUTS[layout], "fp32"]
    assert {name.rpartition(".")[2] for name in expected.gradients} == {"weight", "bias", "A_log", "D", "dt_bias"}
    assert all(gradient.norm() > 1e-6 for gradient in expected.gradients.values())
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
        assert rank.norms == pytest.approx(expected.norms, rel=1e-5)
        assert_gradients_equal(rank, expected, 1e-5)
        for name, weight in rank.weights.items():
            assert relative_error(weight, expected.weights[name]) < 1e-5, name
        assert (rank.losses, rank.norms) == (ranks[0].losses, ranks[0].norms)
        assert all(torch.equal(rank.weights[name], weight) for name, weight in ranks[0].weights.items())


@pytest.mark.parametrize("layout", MESHES)
def test_in_nvfp4_losses_and_data_parallel_codes_are_those_of_one_process(layout, one, many):
    """(test_linear_codes.py compares the codes of tensor-parallel ranks, from equal inputs.)"""
    expected, tensor = one["nvfp4"], LAYOUTS[layout].tensor
    assert abs(expected.losses[0] - one["fp32"].losses[0]) > 1e-4
    for rank in many[LAYOUTS[layout], "nvfp4"]:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-3 if tensor > 1 else 1e-6)
        if tensor == 1:
            assert_codes_equal(rank, expected)
            assert_gradients_equal(rank, expected)


def test_three_ranks_have_the_codes_of_one():
    """Three and six are not powers of two, so a division in another place would round, and change codes."""
    one = launch(train, 1, replace(ONE, num_micro_batches=6), "nvfp4", 1)[0]
    for rank in launch(train, 3, Layout(3, num_micro_batches=6), "nvfp4", 1):
        assert rank.losses == pytest.approx(one.losses, rel=1e-6)
        assert_codes_equal(rank, one)
        assert_gradients_equal(rank, one)


def assert_codes_equal(rank: Result, one: Result) -> None:
    """The same bits. Equal gradients do not show this: a change of the smallest code of in_proj changes no gradient by
    1e-6."""
    assert rank.codes and all(len(gemms) == 8 * 3 for gemms in rank.codes.values())
    torch.testing.assert_close(rank.codes, {key: one.codes[key] for key in rank.codes}, rtol=0, atol=0)


def assert_gradients_equal(rank: Result, one: Result, tolerance: float = 1e-6) -> None:
    """They may differ by the order of sums over micro-batches."""
    assert rank.gradients.keys() == one.gradients.keys()
    for name, gradient in rank.gradients.items():
        assert relative_error(gradient, one.gradients[name]) < tolerance, name


def texts(rank: int, layout: Layout) -> tuple[list[list[Continuation]], Tensor]:
    """Continuations of all prompts together and of one alone, in both settings; and logits after the prompts."""
    mesh = layout.mesh()
    model = sharded_model(layout, mesh, RECIPES["fp32"], StepState(seed=0))
    requests = [Request(prompt) for prompt in PROMPTS]
    cache = model.new_cache(3, 40)
    with torch.no_grad(), gathered_parameters(model):
        generated = [generate(model, part, settings) for settings in SETTINGS for part in (requests, requests[:1])]
        tokens = torch.tensor([prompt + [0] * (40 - len(prompt)) for prompt in PROMPTS])
        logits = model(tokens, cache=cache, counts=[len(prompt) for prompt in PROMPTS])
    return generated, logits_of_all_ids(logits, mesh)


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_texts_on_a_mesh_are_those_of_one_process(name: str) -> None:
    with alone():
        expected, expected_logits = texts(0, ONE)
    assert len({tuple(text.tokens) for part in expected for text in part}) > 4
    for generated, logits in launch(texts, LAYOUTS[name].world, LAYOUTS[name]):
        assert generated == expected
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
