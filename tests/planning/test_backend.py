"""The planning backend allocates what the fused kernels' own code allocates, byte by byte."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp4.planning.backend import PlanningBackend
from megatron_fp4.planning.ledger import Ledger
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import LinearNumerics, quantized_linear
from megatron_fp4.precision.recipe import Operand, Recipe
from tests.planning.gpu_path import without_launches
from tests.planning.test_stand_ins import CASES, recipe

NVFP4, MXFP8, FP8 = Operand("nvfp4", (1, 16)), Operand("mxfp8", (1, 32)), Operand("fp8", (1, 128))
RECIPES = {
    **{name: case[0] for name, case in CASES.items()},
    "nemotron 3": recipe("nvfp4_nemotron_3"),
    "fresh signs": recipe("nvfp4", rht_signs="fresh", fprop_rht=16, dgrad_rht=16),
    "codes of fprop": recipe(
        "nvfp4", wgrad_activation=Operand("nvfp4", (1, 16), reuse_fprop=True), wgrad_gradient=NVFP4, wgrad_rht=0
    ),
    "several formats": Recipe("mixed", NVFP4, Operand("mxfp4", (32, 32)), MXFP8, NVFP4, FP8, NVFP4),
    "one side": Recipe("one side", Operand(), NVFP4, Operand(), MXFP8, FP8, Operand()),
    "stochastic FP8": recipe("fp8_block", wgrad_gradient=replace(FP8, rounding="stochastic")),
}


def history(backend: Backend, recipe: Recipe, dtype: torch.dtype, micro_batches: int = 2) -> list[tuple[int, int]]:
    """Bytes alive and at the peak before, between and after the passes of a linear, from its second step on."""
    clock, seen = RunClock(seed=0), []
    numerics = LinearNumerics(name="linear", recipe=recipe, clock=clock, backend=backend)
    with FakeTensorMode(), Ledger(lambda: 0) as ledger:
        weight = nn.Parameter(torch.empty(384, 256, dtype=dtype))
        for _ in range(micro_batches):
            x = torch.empty(200, 256, dtype=dtype, requires_grad=True)  # padded to whole blocks
            y = quantized_linear(x, weight, numerics)
            seen.append((ledger.live_bytes, ledger.peak_bytes))
            ledger.restart_peak()
            y.backward(torch.empty_like(y))
            del y
            seen.append((ledger.live_bytes, ledger.peak_bytes))
            ledger.restart_peak()
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_both_passes(name: str, dtype: torch.dtype) -> None:
    def measured(backend: Backend, around: Any) -> list[tuple[int, int]]:
        with around:
            return history(backend, RECIPES[name], dtype)

    assert measured(PlanningBackend(), nullcontext()) == measured(EMULATED, without_launches())
