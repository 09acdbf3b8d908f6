"""Whether stochastic rounding to E2M1 is fair, by its statistics: the draws of native kernels are their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.precision.recipe import Operand, Recipe
from megatron_fp4.precision.transformer_engine import NativeOperand
from megatron_fp4.quantization.formats import E2M1_MAX, FP32_MAX, round_e2m1_stochastic
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale, quantize_nvfp4

# Largest deviations: of the share rounded up from the position, for positions in one of eight bins and over all; and
# of the spread from a fair draw's. Eight random bits alone may err by 1/512.
_BIN_BIAS, _BIAS, _SPREAD = 0.01, 0.004, 0.03
_NUM_BINS = 8


@dataclass(frozen=True)
class Draws:
    """make: the operand [n, k] of draw 0, 1, ...; the same again for the same number. count: of draws to take."""

    make: Callable[[int], object]
    count: int


def rounding_faults(rows: Tensor, draws: Draws, recipe: Recipe, name: str) -> str:
    """What is unfair about the operand `name` of `recipe` made from `rows` [n, k], or an empty string.

    Only NVFP4 has native stochastic rounding; of other formats nothing is tested here.
    """
    operand: Operand = getattr(recipe, name)
    if operand.format != "nvfp4":
        return ""
    first = draws.make(0)
    reference = quantize_nvfp4(rows, operand.block)
    scales = reference.scales.to(torch.float32)
    encode = (scales * encode_tensor_scale(reference.amax).reciprocal()).reciprocal().clamp(max=FP32_MAX)
    scaled = (rows.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2).clamp(-E2M1_MAX, E2M1_MAX)
    low = round_e2m1_stochastic(scaled, torch.zeros_like(scaled))
    high = round_e2m1_stochastic(scaled, torch.full_like(scaled, 1 - 2.0**-22))
    gap = (high - low).abs()
    between = gap > 0
    position = torch.where(between, (scaled - low).abs() / gap.clamp(min=0.5), 0.0)[between].to(torch.float64)

    ups = torch.zeros_like(position)
    made = first
    for number in range(draws.count):
        made = first if number == 0 else draws.make(number)
        codes = grid_values(made, scales)
        if codes.shape != scaled.shape:
            return f"has shape {tuple(codes.shape)} instead of {tuple(scaled.shape)}"
        if not codes.any():
            return "every code is zero"
        strangers = (codes != low) & (codes != high) & (scales > 0).repeat_interleave(16, dim=1)
        if strangers.any():
            return f"{int(strangers.sum())} of {codes.numel()} codes are neither neighbour of their value"
        ups += (codes[between] == high[between]).to(torch.float64)
    if torch.equal(grid_values(first, scales), grid_values(made, scales)):
        return "two draws are the same"
    if not torch.equal(grid_values(first, scales), grid_values(draws.make(0), scales)):
        return "the same key gives other draws"
    return _unfairness(ups, position, draws.count)


def _unfairness(ups: Tensor, position: Tensor, count: int) -> str:
    """ups: how many of `count` draws went up, for each value; position: of the value between its neighbours, 0..1."""
    excess = ups / count - position
    fair = position * (1 - position)
    noise = 6 * float(fair.sum() / count) ** 0.5 / excess.numel()
    bias = float(excess.mean())
    if not abs(bias) <= _BIAS + noise:
        return f"goes up too often by {bias:+.4f} of a spacing"
    for index in range(_NUM_BINS):
        inside = (position * _NUM_BINS).long() == index
        if inside.any():
            bias = float(excess[inside].mean())
            noise = 6 * float(fair[inside].sum() / count) ** 0.5 / int(inside.sum())
            if not abs(bias) <= _BIN_BIAS + noise:
                return f"goes up too often by {bias:+.4f} at positions {index / 8:g} to {(index + 1) / 8:g}"
    # Over independent draws the squared excess is the fair variance over their number.
    spread = float(excess.square().sum() * count / fair.sum())
    if not abs(spread - 1) <= _SPREAD + 6 * (2 / excess.numel()) ** 0.5:
        return f"its spread is {spread:.3f} of a fair draw's"
    return ""


def grid_values(made: object, scales: Tensor) -> Tensor:
    """FP32 [n, k] values on the E2M1 grid of an operand, native or emulated; `scales`: its FP32 block scales."""
    if isinstance(made, NativeOperand):
        decoded = made.decoded()
        values, scales = decoded.block_values(), decoded.scales.to(torch.float32)  # type: ignore[union-attr]
    else:
        values = made.unpacked().to(torch.float32)  # type: ignore[attr-defined]
    quotient = values.unflatten(-1, (-1, 16)) / scales[..., None]
    return torch.nan_to_num(quotient, nan=0.0).flatten(-2)
