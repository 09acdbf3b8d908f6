"""The planning backend allocates what the fused kernels' own code allocates, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp4.config.compose import compose_config
from megatron_fp4.planning.dry_run import Ledger, planned_gpu
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import Gemm, Operand, Recipe, recipe_from_config
from megatron_fp4.precision.rng import StepState
from tests.planning.gpu_path import without_launches
from tests.recipes import changed

CONFIGS = Path(__file__).parents[2] / "configs"


def recipe(name: str, **changes: object) -> Recipe:
    return changed(recipe_from_config(compose_config([f"precision={name}"], CONFIGS).precision), **changes)


NVFP4, MXFP8, FP8 = Operand("nvfp4", (1, 16)), Operand("mxfp8", (1, 32)), Operand("fp8", (1, 128))
RECIPES = {
    **{name: recipe(name) for name in ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block")},
    "quartet 2": recipe("nvfp4_quartet2"),
    "four over six": recipe("nvfp4_4over6_1x16"),
    "fresh signs": recipe("nvfp4", rht_signs="fresh", fprop_rht=16, dgrad_rht=16),
    "codes of fprop": recipe(
        "nvfp4", wgrad_activation=Operand("nvfp4", (1, 16), source="codes"), wgrad_gradient=NVFP4, wgrad_rht=0
    ),
    "several formats": Recipe("mixed", Gemm(NVFP4, Operand("mxfp4", (32, 32))), Gemm(MXFP8, NVFP4), Gemm(FP8, NVFP4)),
    "one side": Recipe("one side", Gemm(Operand(), NVFP4), Gemm(Operand(), MXFP8), Gemm(FP8, Operand())),
}


def history(backend: Backend, recipe: Recipe, dtype: torch.dtype, micro_batches: int = 2) -> list[tuple[int, int]]:
    """Bytes alive and at the peak before, between and after the passes of a linear, from its second step on."""
    step_state, seen = StepState(seed=0), []
    context = LinearContext(name="linear", recipe=recipe, step_state=step_state, backend=backend)
    with FakeTensorMode(), Ledger(lambda: 0) as ledger:
        weight = nn.Parameter(torch.empty(384, 256, dtype=dtype))
        for _ in range(micro_batches):
            x = torch.empty(200, 256, dtype=dtype, requires_grad=True)  # padded to whole blocks
            y = quantized_linear(x, weight, context)
            seen.append((ledger.live_bytes, ledger.peak_bytes))
            ledger.restart_peak()
            y.backward(torch.empty_like(y))
            del y
            seen.append((ledger.live_bytes, ledger.peak_bytes))
            ledger.restart_peak()
    return seen


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_both_passes(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32) if name == "nvfp4" else (torch.bfloat16,):
        with planned_gpu() as backend:
            planned = history(backend, RECIPES[name], dtype)
        with without_launches():
            assert planned == history(EMULATED, RECIPES[name], dtype)
