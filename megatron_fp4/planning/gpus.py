"""The GPUs that a plan can be for, and the time that each takes to train on one token.

    GEMM        FLOPs / (reached share * peak); the peak is FP4's if both operands are E2M1, FP8's if both are
                quantized, else BF16's
    quantizers  bytes / (reached share * bandwidth): each pass reads 2 bytes an element, and the last writes the codes
    the rest    as in BF16: training FLOPs / (mfu * BF16 peak), without the linears

Emulated GEMMs take BF16's time. Quantizing weights is left out, because it happens once a step. These are bounds from
data sheets and assumed shares, not measurements: nothing here ran on Blackwell. tests/planning/test_gpus.py compares
them with what others measured on Blackwell.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_fp4.precision.plan import LinearShape, Plan
from megatron_fp4.precision.recipe import SLOTS_OF, Gemm, Operand, Recipe
from megatron_fp4.quantization.formats import format_of

# The share of the peak that large GEMMs reach. BF16: measured on an H200 (790 of 989 TFLOP/s). FP4: from a linear in
# NVIDIA's documentation of Transformer Engine (3.48 times BF16 on a B300, 4096 wide, operands quantized before).
_REACHED = {"bf16": 0.8, "fp8": 0.75, "fp4": 0.5}
_BANDWIDTH_REACHED = 0.9
# Time of a cast with four over six over that of a plain cast: from Transformer Engine's pull request 2972.
_FOUR_OVER_SIX = 7.0


@dataclass(frozen=True)
class Gpu:
    """Numbers from the GPU's data sheet.

    bf16, fp8, fp4: dense TFLOP/s (0: no such tensor cores). bandwidth: of its memory, TB/s. memory: GiB that torch
    reports; seen on an H100 and an H200, for the others a little below the data sheet. links: GB/s that it sends to
    other GPUs of its host: two thirds of the data sheet's, as measured on H200s.
    """

    bf16: float
    fp8: float
    fp4: float
    bandwidth: float
    memory: float
    links: float
    watts: float


GPUS = {
    "h100": Gpu(989, 1979, 0, 3.35, 79, 300, 700),
    "h200": Gpu(989, 1979, 0, 4.8, 139, 300, 700),
    "b200": Gpu(2250, 4500, 9000, 8.0, 177, 600, 1000),
    "gb200": Gpu(2500, 5000, 10000, 8.0, 183, 600, 1200),
    "gb300": Gpu(2500, 5000, 15000, 8.0, 275, 600, 1400),
    "rtx_pro_6000": Gpu(504, 1007, 2015, 1.79, 94, 40, 600),
}


def seconds_of_a_token(gpu: Gpu, plan: Plan, training_flops: float, mfu: float, emulated: Collection[str]) -> float:
    """Seconds that one GPU trains on one token.

    training_flops: FLOPs of a token, forward and backward. mfu: the share of the BF16 peak that training in BF16
    reaches. emulated: the linears whose codes tensor cores do not multiply.
    """
    bf16 = gpu.bf16 * 1e12
    linears = 3 * plan.linear_flops_per_token / (_REACHED["bf16"] * bf16)
    rest = max(0.0, training_flops / (mfu * bf16) - linears)
    rows = ((row.linear, row.recipe, row.linear.name not in emulated) for row in plan.rows)
    return rest + sum(_seconds_of_linear(gpu, *row) for row in rows)


def multiplies_codes(gpu: Gpu, plan: Plan) -> bool:
    """Whether the GPU has tensor cores for the codes of every GEMM of the plan."""
    return all(_rate(gpu, gemm) > 0 for row in plan.rows for gemm in row.recipe.gemms.values())


def _seconds_of_linear(gpu: Gpu, linear: LinearShape, recipe: Recipe, native: bool) -> float:
    rates = [_rate(gpu, gemm if native else Gemm()) for gemm in recipe.gemms.values()]
    gemms = sum(linear.flops_per_token / rate for rate in rates)
    of_tokens = {"activation": linear.in_features, "gradient": linear.out_features}
    moved = sum(size * _bytes_moved([recipe[slot] for slot in SLOTS_OF[name]]) for name, size in of_tokens.items())
    return gemms + moved / (_BANDWIDTH_REACHED * gpu.bandwidth * 1e12)


def _rate(gpu: Gpu, gemm: Gemm) -> float:
    kind = "fp4" if all(operand.in_4_bits for operand in gemm.operands) else "fp8"
    kind = kind if all(operand.quantized for operand in gemm.operands) else "bf16"
    return float(_REACHED[kind] * getattr(gpu, kind) * 1e12)


def _bytes_moved(uses: list[Operand]) -> float:
    """Bytes moved to quantize one element of a BF16 tensor for the GEMMs that use the tensor.

    One pass writes both operands. If a format has a tensor scale, an earlier pass finds the largest value."""
    quantized = [use for use in uses if use.quantized]
    if not quantized:
        return 0.0
    largest = 2.0 if any(format_of(use.format).tensor_scale for use in quantized) else 0.0
    cast = 2.0 + sum((0.5 if use.in_4_bits else 1.0) + 1 / max(use.block) for use in quantized)
    return largest + cast * (_FOUR_OVER_SIX if any(use.four_over_six for use in quantized) else 1.0)
