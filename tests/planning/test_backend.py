"""The planning backend allocates what linears need on a GPU, counted by hand, and what the fused kernels' own code
allocates, byte by byte."""

from __future__ import annotations

from dataclasses import replace
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
TOKENS, IN, OUT = 1024, 512, 2048
X, Y, W = TOKENS * IN, TOKENS * OUT, OUT * IN  # elements
SMALL = 64 * 1024  # maxima, hashes of rows and columns, tensor scales: everything that is no matrix


def recipe(name: str, **changes: object) -> Recipe:
    return changed(recipe_from_config(compose_config([f"precision={name}"], CONFIGS).precision), **changes)


def power_of_two() -> Recipe:
    operands = recipe("fp8_block").operands.items()
    return recipe("fp8_block", **{place.name: replace(op, power_of_two_scales=True) for place, op in operands})


FOUR_OVER_SIX = Operand("nvfp4", (16, 16), four_over_six=True)
# Name -> recipe, bytes of the weight's operands, bytes of x that wait for wgrad, bytes of x as wgrad's operand.
CASES = {
    "bf16": (recipe("bf16"), 0, 0, 0),
    # Of W one copy for both passes and of x another: half a byte an element and an E4M3 scale for 16.
    "nvfp4": (recipe("nvfp4"), W // 2 + W // 16, X // 2 + X // 16, 2 * X),
    "nvfp4_all_the_way": (recipe("nvfp4_all_the_way"), 4 * W, X // 2 + X // 16, 2 * X),
    # Weights by PyTorch, everything else by the kernels.
    "four_over_six": (
        recipe("nvfp4", fprop_weight=FOUR_OVER_SIX, dgrad_weight=FOUR_OVER_SIX), 2 * W, X // 2 + X // 16, 2 * X
    ),
    "mxfp4": (recipe("mxfp4"), 4 * W, X // 2 + X // 32, 2 * X),
    # The two weights in BF16; of x one byte, and a scale for 32.
    "mxfp8": (recipe("mxfp8"), 4 * W, X + X // 32, 2 * X),
    # E4M3 codes as BF16 with FP32 scales; of x one byte, and a scale for 128.
    "fp8": (recipe("fp8_block"), 2 * W + W // 4096, X + X // 32, 2 * X),
    "fp8_power_of_two": (power_of_two(), 2 * W, 2 * X, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_linear(name: str) -> None:
    recipe, weights, kept, wgrad_operand = CASES[name]
    with planned_gpu() as backend, FakeTensorMode(), Ledger(lambda: 0) as ledger:
        context = LinearContext(name="linear", recipe=recipe, step_state=StepState(seed=0), backend=backend)
        x = torch.empty(TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
        weight = nn.Parameter(torch.empty(OUT, IN, dtype=torch.bfloat16))
        before = ledger.live_bytes
        y = quantized_linear(x, weight, context)
        assert ledger.live_bytes - before == pytest.approx(2 * Y + weights + kept, abs=SMALL)

        dy = torch.empty_like(y)
        ledger.restart_peak()
        before = ledger.live_bytes
        y.backward(dy)
        # dx beside dy for dgrad; then dx and dW beside dy for wgrad and x for wgrad: dy is made twice, in turns.
        quantized = 2 * Y if recipe.quantized else 0
        most = max(quantized + 2 * X, 2 * X + quantized + wgrad_operand + 4 * W)
        assert ledger.peak_bytes - before == pytest.approx(most, abs=SMALL)
        assert weight.grad is not None and weight.grad.dtype == torch.float32


NVFP4, MXFP8, FP8 = Operand("nvfp4", (1, 16)), Operand("mxfp8", (1, 32)), Operand("fp8", (1, 128))
RECIPES = {
    **{name: case[0] for name, case in CASES.items()},
    "nemotron 3": recipe("nvfp4_nemotron_3"),
    "quartet 2": recipe("nvfp4_quartet2"),
    "four over six": recipe("nvfp4_4over6_1x16"),
    "fresh signs": recipe("nvfp4", rht_signs="fresh", fprop_rht=16, dgrad_rht=16),
    "codes of fprop": recipe(
        "nvfp4", wgrad_activation=Operand("nvfp4", (1, 16), source="codes"), wgrad_gradient=NVFP4, wgrad_rht=0
    ),
    "several formats": Recipe("mixed", Gemm(NVFP4, Operand("mxfp4", (32, 32))), Gemm(MXFP8, NVFP4), Gemm(FP8, NVFP4)),
    "one side": Recipe("one side", Gemm(Operand(), NVFP4), Gemm(Operand(), MXFP8), Gemm(FP8, Operand())),
    "stochastic FP8": recipe("fp8_block", wgrad_gradient=replace(FP8, rounding="stochastic")),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_both_passes(name: str, dtype: torch.dtype) -> None:
    with planned_gpu() as backend:
        planned = history(backend, RECIPES[name], dtype)
    with without_launches():
        assert planned == history(EMULATED, RECIPES[name], dtype)
