"""Stochastic rounding inside the linear, seen from outside.

An identity matrix is quantized without error, and so is its Hadamard transform (all magnitudes equal). As the other
operand of a GEMM it shows what became of this one: dx = dy W shows the quantized dy for W = 1, dW = dy^T x shows it
for x = 1.
"""

from dataclasses import replace

import numpy as np
import torch

from megatron_fp4.precision.recipe import Recipe
from tests.precision import reference as ref
from tests.recipes import changed

SIZE = 64
PLAIN = changed(ref.NVFP4, wgrad_rht=0)


def shown(dy: torch.Tensor, recipe: Recipe, **coordinates: int | str) -> tuple[np.ndarray, np.ndarray]:
    """What dgrad and wgrad made of dy: [tokens, out] as dgrad saw it, and its transpose as wgrad saw it."""
    context = ref.context_of(recipe)
    context.name = str(coordinates.pop("name", context.name))
    for name, value in coordinates.items():
        setattr(context.step_state, name, value)
    _, dx, dw = ref.run(torch.eye(SIZE), torch.eye(SIZE), dy, context)
    return ref.double(dx), ref.double(dw)


def gradient_between_codes(fraction: float = 0.6) -> torch.Tensor:
    """Every block along either dimension has one 6, and all else lies between the codes 0 and 0.5."""
    index = torch.arange(SIZE)
    dy = torch.full((SIZE, SIZE), 0.5 * fraction)
    dy[(index[:, None] + index) % 16 == 0] = 6.0
    return dy


def rounded_up(values: np.ndarray) -> np.ndarray:
    """For `gradient_between_codes`: which elements went up, as 0 and 1; the 6s left out."""
    assert set(np.unique(values.round(6))) <= {0.0, 0.5, 6.0}
    index = np.arange(SIZE)
    between = (index[:, None] + index) % 16 != 0
    return (values > 0.25)[between].astype(float)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In units of its standard error."""
    return float(np.corrcoef(a, b)[0, 1] * len(a) ** 0.5)


def test_both_gemms_round_up_equally_often_but_independently():
    """dy is quantized twice; the two roundings agree as often as two independent draws do."""
    dy = gradient_between_codes()
    agreement = []
    for step in range(8):
        in_dgrad, in_wgrad = shown(dy, PLAIN, step=step)
        up = rounded_up(in_dgrad), rounded_up(in_wgrad.T)
        for mine in up:
            assert abs(mine.mean() - 0.6) < 4 * (0.24 / len(mine)) ** 0.5
        assert abs(correlation(*up)) < 4
        assert abs(correlation(rounded_up(in_dgrad), rounded_up(in_wgrad))) < 4
        agreement.append((up[0] == up[1]).mean())
    assert abs(np.mean(agreement) - (0.36 + 0.16)) < 4 * (0.52 * 0.48 / (8 * SIZE * SIZE)) ** 0.5


def test_draws_differ_with_every_coordinate_of_the_run():
    dy = gradient_between_codes()
    here = shown(dy, PLAIN)
    for other in ({"step": 1}, {"micro_batch": 1}, {"seed": 2}, {"name": "blocks.1.mixer.in_proj"}):
        for mine, theirs in zip(here, shown(dy, PLAIN, **other), strict=True):
            assert not np.array_equal(mine, theirs)
            assert abs(correlation(rounded_up(mine), rounded_up(theirs))) < 4


def test_the_backward_pass_uses_the_coordinates_of_its_forward_pass():
    """With several micro-batches in flight the StepState has moved on when the gradient arrives."""
    dy = gradient_between_codes()
    context = ref.context_of(PLAIN)
    x, w = torch.eye(SIZE).requires_grad_(), torch.eye(SIZE).requires_grad_()
    y = ref.quantized_linear(x, w, context)
    context.step_state.micro_batch, context.step_state.step = 5, 6
    y.backward(dy)
    assert np.array_equal(ref.double(x.grad), shown(dy, PLAIN)[0])
    assert np.array_equal(ref.double(w.grad), shown(dy, PLAIN)[1])


def test_signs_and_scales_of_ms_eden_are_those_of_the_forward_pass():
    """What is made of forward codes in the backward pass takes its signs and draws from its own micro-batch."""
    x, w, dy = ref.tensors(128, 128, 128)
    expected = ref.run(x, w, dy, ref.context_of(ref.QUARTET2))
    context = ref.context_of(ref.QUARTET2)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = ref.quantized_linear(x, w, context)
    context.step_state.micro_batch, context.step_state.step = 5, 6
    y.backward(dy)
    assert torch.equal(x.grad, expected[1]) and torch.equal(w.grad, expected[2])
    # And other ones in every other: kept codes of the weight are the same, what is made of them is not.
    again = ref.run(x, w, dy, context)
    assert torch.equal(again[0], expected[0])
    assert not torch.equal(again[1], expected[1]) and not torch.equal(again[2], expected[2])


def test_fresh_signs_change_with_the_call_and_fixed_ones_do_not():
    operands = ref.tensors(128, 128, 128)
    for signs, same in (("fixed", True), ("none", True), ("fresh", False)):
        context, results = ref.context_of(ref.nearest(replace(ref.NVFP4, rht_signs=signs))), []
        for context.step_state.step, context.step_state.micro_batch in ((0, 0), (0, 1), (1, 0)):
            results.append(ref.run(*operands, context)[2])
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert torch.equal(results[one], results[other]) == same
