"""GPUs that a plan can be for, and how long a token takes to train on one: linears by the rates of its tensor cores,
quantizers by the bytes that they move, everything else as in BF16.

    BF16        training FLOPs / (mfu * peak)                   everything together
    a GEMM      FLOPs / (share of the peak of its operands)     both E2M1: FP4's; both quantized: FP8's; else BF16's
    quantizers  2 bytes an element read, as often as its formats need, and the codes written

Emulated GEMMs take BF16's time. Quantizing weights is left out: it is done once a step. These are bounds of the
hardware with a few shares, not measurements: nothing here ran on Blackwell. tests/planning/test_gpus.py compares them
with what others measured there.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp4.precision.plan import LinearShape, Plan
from megatron_fp4.precision.recipe import SLOTS_OF, Gemm, Operand, Recipe
from megatron_fp4.quantization.formats import format_of

# Of the peak that large GEMMs reach: BF16's is measured on an H200 (790 of 989 TFLOP/s); FP4's is from a linear of
# NVIDIA's documentation of Transformer Engine (3.48 times BF16 on a B300, 4096 wide, its operands quantized before).
_REACHED = {"bf16": 0.8, "fp8": 0.75, "fp4": 0.5}
_BANDWIDTH_REACHED = 0.9
# Casts of four over six, in plain ones: of Transformer Engine's kernels, by their authors (pull request 2972).
_FOUR_OVER_SIX = 7.0


@dataclass(frozen=True)
class Gpu:
    """Of its data sheet: dense TFLOP/s by the operands' width (0: none), TB/s of its memory. memory: GiB that torch
    finds, seen on an H100 and an H200, of the others a little below the data sheet. links: GB/s that it sends to others
    of its host, two thirds of the data sheet's, as measured on H200s."""

    bf16: float
    fp8: float
    fp4: float
    bandwidth: float
    memory: float
    links: float


GPUS = {
    "h100": Gpu(989, 1979, 0, 3.35, 79, 300),
    "h200": Gpu(989, 1979, 0, 4.8, 139, 300),
    "b200": Gpu(2250, 4500, 9000, 8.0, 177, 600),
    "gb200": Gpu(2500, 5000, 10000, 8.0, 183, 600),
    "gb300": Gpu(2500, 5000, 15000, 8.0, 275, 600),
    "rtx_pro_6000": Gpu(504, 1007, 2015, 1.79, 94, 40),
}


def seconds_of_a_token(gpu: Gpu, plan: Plan, training_flops: float, mfu: float, native: bool) -> float:
    """Of training on one GPU.

    training_flops: of a token, forward and backward. mfu: the share of the BF16 peak that BF16 training reaches.
    native: whether tensor cores multiply the codes.
    """
    bf16 = gpu.bf16 * 1e12
    linears = 3 * plan.linear_flops_per_token / (_REACHED["bf16"] * bf16)
    rest = max(0.0, training_flops / (mfu * bf16) - linears)
    return rest + sum(_seconds_of_linear(gpu, row.linear, row.recipe, native) for row in plan.rows)


def computes(gpu: Gpu, plan: Plan) -> bool:
    """Whether the GPU has tensor cores for the codes of every GEMM."""
    return all(_rate(gpu, gemm) > 0 for row in plan.rows for gemm in row.recipe.gemms.values())


def _seconds_of_linear(gpu: Gpu, linear: LinearShape, recipe: Recipe, native: bool) -> float:
    rates = [_rate(gpu, gemm if native else Gemm()) for gemm in recipe.gemms.values()]
    gemms = sum(linear.flops_per_token / rate for rate in rates)
    of_tokens = {"activation": linear.in_features, "gradient": linear.out_features}
    moved = sum(size * _bytes_moved([recipe[slot] for slot in SLOTS_OF[name]]) for name, size in of_tokens.items())
    return gemms + moved / (_BANDWIDTH_REACHED * gpu.bandwidth * 1e12)


def _rate(gpu: Gpu, gemm: Gemm) -> float:
    """FLOP/s that a large GEMM reaches."""
    kind = "fp4" if all(operand.in_4_bits for operand in gemm.operands) else "fp8"
    kind = kind if all(operand.quantized for operand in gemm.operands) else "bf16"
    return float(_REACHED[kind] * getattr(gpu, kind) * 1e12)


def _bytes_moved(uses: list[Operand]) -> float:
    """To quantize an element of a BF16 tensor for the GEMMs that it is an operand of: one pass writes both, after one
    that finds the largest value if a format has a tensor scale."""
    quantized = [use for use in uses if use.quantized]
    if not quantized:
        return 0.0
    largest = 2.0 if any(format_of(use.format).tensor_scale for use in quantized) else 0.0
    cast = 2.0 + sum((0.5 if use.in_4_bits else 1.0) + 1 / max(use.block) for use in quantized)
    return largest + cast * (_FOUR_OVER_SIX if any(use.four_over_six for use in quantized) else 1.0)
