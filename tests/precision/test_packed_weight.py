"""Linears that keep their weight as codes, here by the reference, against linears that keep values."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron_fp4.precision import emulated
from megatron_fp4.precision.emulated import PackedWeight
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import Gemm, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from tests.distributed.hybrid import NVFP4

_MXFP4, _MXFP4_WEIGHT = Operand("mxfp4", (1, 32)), Operand("mxfp4", (32, 32))
RECIPES = {
    "nvfp4": NVFP4,
    "mxfp4": Recipe("mxfp4", Gemm(_MXFP4, _MXFP4_WEIGHT), Gemm(_MXFP4, _MXFP4_WEIGHT), Gemm(_MXFP4, _MXFP4)),
}


def results(recipe: Recipe, groups: int, codes: bool) -> tuple[Tensor, ...]:
    """y, dx and dW of two micro-batches."""
    generator = torch.Generator().manual_seed(groups)
    rows = 50 * groups
    weight = nn.Parameter(torch.randn(rows, 64, generator=generator))
    context = LinearContext(name="linear", recipe=recipe, step_state=StepState(seed=1), num_groups=groups)
    found: list[Tensor] = []
    with mock.patch.object(emulated, "keeps_codes", lambda device: codes):
        for _ in range(2):
            x = torch.randn(40, 64, generator=generator).bfloat16().requires_grad_()
            y = quantized_linear(x, weight, context)
            y.backward(torch.randn(y.shape, generator=generator).bfloat16())
            assert x.grad is not None and context.weight_cache is not None
            assert isinstance(context.weight_cache[1].values, PackedWeight) == codes  # type: ignore[attr-defined]
            found += [y.detach(), x.grad]
    assert weight.grad is not None
    return (*found, weight.grad)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("groups", [1, 3])
def test_codes_have_the_results_of_values(name: str, groups: int) -> None:
    packed, values = (results(RECIPES[name], groups, codes) for codes in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(packed, values, strict=True))
