"""The linears of several experts against a lone linear for each segment, bit for bit."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.measure import diagnostics
from megatron_fp4.measure.diagnostics import Probe
from megatron_fp4.precision.backend import RowGroups, block_alignment
from megatron_fp4.precision.linear import grouped_linear, quantized_linear
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.rounding import ALL, Place, Span
from megatron_fp4.quantization.segments import Segments
from tests.precision import reference as ref

INPUTS, OUTPUTS = 128, 256
# Of experts, or of [sources, experts]: one without tokens, one whose segments need no padding, one token.
COUNTS = {"experts": [37, 0, 16, 1], "sources": [[3, 0, 32, 0], [17, 0, 0, 130]]}


@dataclass
class Lone(LinearContext):
    """The linear of one expert. tokens: positions of its tokens with padding. first: its first row in the weight."""

    tokens: Tensor | None = None
    first: int = 0

    def place(self, tensor: str, tokens: Span = ALL, groups: RowGroups | None = None) -> Place:
        if tensor == "weight":
            return Place(Span(self.first))
        assert self.tokens is not None
        return Place(Span(self.tokens))


def of_experts(counts: Tensor, rest: int = 0, first: int = 5000) -> Tensor:
    """Positions of rows of tokens from `first` on: ascending in every segment, not contiguous. rest: rows after all."""
    draws = torch.Generator().manual_seed(3)
    numbers = [torch.randperm(1024, generator=draws)[:count].sort().values for count in counts.flatten().tolist()]
    experts = torch.arange(4).repeat(counts.numel() // 4).repeat_interleave(counts.flatten())
    return torch.cat(((first + torch.cat(numbers)) * 4 + experts, torch.zeros(rest, dtype=torch.int64)))


def tensors(counts: Tensor, rest: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and dy. Experts have tokens and weights of other sizes, so that the scale of another gives other codes."""
    x, _, dy = ref.tensors(int(counts.sum()) + rest, INPUTS, OUTPUTS, dtype=torch.bfloat16)
    sizes = torch.tensor([1.0, 3.0, 0.2, 7.0]).repeat(counts.numel() // 4).repeat_interleave(counts.flatten())
    sizes = torch.cat((sizes, torch.full((rest,), 100.0)))[:, None]
    w = torch.stack([ref.tensors(1, INPUTS, OUTPUTS, seed)[1] * (1 + seed) for seed in range(4)])
    return (x * sizes).bfloat16(), w, (dy * sizes).bfloat16()


def lone_linears(
    x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe, counts: list[list[int]], at: Tensor, probe: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dW of a `quantized_linear` for each segment."""
    multiple, start = block_alignment(recipe).tokens, 0
    y, dx, dw = (
        torch.zeros(shape, dtype=dtype)
        for shape, dtype in ((dy.shape, dy.dtype), (x.shape, x.dtype), (w.shape, torch.float32))
    )
    weights = [of.clone().requires_grad_() for of in w]
    for of in counts:
        for expert, (count, weight) in enumerate(zip(of, weights, strict=True)):
            rows, padding = slice(start, start + count), torch.arange(2**40 - multiple, 2**40)
            start += count
            if not count:
                continue
            positions = at[rows]
            if count % multiple:
                positions = torch.cat((positions, padding[count % multiple :]))
            context = Lone("experts", recipe, StepState(seed=1, step=4), tokens=positions, first=expert * OUTPUTS)
            context.probe = probe
            given = x[rows].clone().requires_grad_()
            y[rows] = (out := quantized_linear(given, weight, context)).detach()
            out.backward(dy[rows])
            dx[rows] = given.grad
    for expert, weight in enumerate(weights):
        if weight.grad is not None:
            dw[expert] = weight.grad
    return y, dx, dw


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("name", ref.RECIPES)
def test_codes_and_products_are_those_of_a_lone_linear_for_each_segment(name: str, counts: list) -> None:
    recipe, counted = ref.RECIPES[name], torch.tensor(counts)
    (x, w, dy), at, results = tensors(counted), of_experts(counted), []
    for keeps_input in (False, True):
        context = LinearContext("experts", recipe, StepState(seed=1, step=4, micro_batch=2), keeps_input=keeps_input)
        inputs, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = grouped_linear(inputs, weight, context, Segments.of_experts(counted, at))
        y.backward(dy)
        assert weight.grad is not None
        results.append((y.detach(), inputs.grad, weight.grad))
    expected = lone_linears(x, w, dy, recipe, counted.view(-1, 4).tolist(), at)
    for found in results:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4, codes quantized again", "quartet 2"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_probe_measures_what_it_measures_at_lone_linears(name: str, sampled: bool, monkeypatch) -> None:
    if sampled:
        for constant, value in (("LARGE", 1024), ("SAMPLE", 1024), ("_BAND_ROWS", 16)):
            monkeypatch.setattr(diagnostics, constant, value)
    counts = torch.tensor(COUNTS["experts"])
    (x, w, dy), at, recipe = tensors(counts), of_experts(counts), ref.RECIPES[name]
    grouped, lone = Probe(), Probe(once=False)
    context = LinearContext("experts", recipe, StepState(seed=1, step=4), probe=grouped)
    grouped_linear(x.requires_grad_(), w.requires_grad_(), context, Segments.of_experts(counts, at)).backward(dy)
    lone_linears(x.detach(), w.detach(), dy, recipe, counts.view(-1, 4).tolist(), at, lone)
    assert grouped._sums.keys() == lone._sums.keys() and {part for _, part in grouped._sums} >= {
        "fprop",
        "dgrad",
        "wgrad",
    }
    for part, sums in lone._sums.items():
        assert torch.equal(grouped._sums[part], sums)


def test_later_micro_batches_add_to_the_gradient_in_place_and_no_tokens_change_nothing() -> None:
    counts = torch.tensor(COUNTS["experts"])
    (x, w, dy), weight = tensors(counts), tensors(counts)[1].requires_grad_()
    context = LinearContext("experts", ref.NVFP4, StepState(seed=1))
    gradients = []
    for rows, at in (
        (slice(None), of_experts(counts)),
        (slice(None), of_experts(counts, first=9000)),
        (slice(0), counts[:0]),
    ):
        for of in (weight, w.clone().requires_grad_()):
            segments = Segments.of_experts(counts if len(at) else counts * 0, at)
            grouped_linear(x[rows].requires_grad_(), of, context, segments).backward(dy[rows])
            assert of.grad is not None
        gradients.append((of.grad, weight.grad.data_ptr()))  # type: ignore[union-attr]
    (first, address), (second, same), (none, still) = gradients
    assert address == same == still and not none.any() and not torch.equal(first, second)
    assert weight.grad is not None and torch.equal(weight.grad, first + second)
