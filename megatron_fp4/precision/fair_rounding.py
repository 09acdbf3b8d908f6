"""Whether stochastic rounding to E2M1 is fair, by its statistics: the draws of native kernels are their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.precision.backend import BackendOperand
from megatron_fp4.precision.comparison import actual_parts, difference, expected_parts
from megatron_fp4.precision.recipe import Operand, Place, Recipe
from megatron_fp4.quantization.elements import E2M1_MAX, FP32_MAX, round_e2m1_stochastic
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale, quantize_nvfp4
from megatron_fp4.quantization.tensor import NVFP4Tensor

# Largest deviations: of the share rounded up from the position, for positions in one of eight bins and over all; and
# of the spread from a fair draw's. Eight random bits alone may err by 1/512.
_BIN_BIAS, _BIAS, _SPREAD = 0.01, 0.004, 0.03
_NUM_BINS = 8
# Largest correlation of two operands' draws; how many draws it is taken over; and the sizes of the corner in which two
# launches of unequal grids number their threads alike.
_CORRELATION, _PAIRED_DRAWS, _PAIRED = 0.02, 4, 128


@dataclass(frozen=True)
class Draws:
    """make: the operand [n, k] of draw 0, 1, ...; the same again for the same number. count: of draws to take."""

    make: Callable[[int], BackendOperand]
    count: int


@dataclass(frozen=True)
class _Grid:
    """Where the values [n, k] of a tensor lie on the E2M1 grid of their blocks, whose scales are FP32 [n, k / 16].

    low, high: the neighbours. between: whether they differ. position: FP64, from low (0) to high (1).
    """

    scales: Tensor
    low: Tensor
    high: Tensor
    between: Tensor
    position: Tensor

    @staticmethod
    def of(rows: Tensor, reference: NVFP4Tensor) -> _Grid:
        scales = reference.scales.to(torch.float32)
        encode = (scales * encode_tensor_scale(reference.amax).reciprocal()).reciprocal().clamp(max=FP32_MAX)
        scaled = (rows.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2)
        scaled.clamp_(-E2M1_MAX, E2M1_MAX)
        low = round_e2m1_stochastic(scaled, torch.zeros_like(scaled))
        high = round_e2m1_stochastic(scaled, torch.full_like(scaled, 1 - 2.0**-22))
        gap = (high - low).abs()
        position = torch.where(gap > 0, (scaled - low).abs() / gap.clamp(min=0.5), 0.0).to(torch.float64)
        return _Grid(scales, low, high, gap > 0, position)

    def excess(self, made: BackendOperand) -> tuple[Tensor, Tensor]:
        """FP64 [n, k]: whether each value went up, less its chance; and the variance of that in a fair draw."""
        ups = (grid_values(made, self.scales) == self.high).to(torch.float64)
        return torch.where(self.between, ups - self.position, 0.0), self.position * (1 - self.position)


def rounding_faults(rows: Tensor, draws: Draws, operand: Operand) -> str:
    """What is unfair about an `operand` made from `rows` [n, k], or an empty string.

    Only NVFP4 has native stochastic rounding; of other formats nothing is tested here.
    """
    if operand.format != "nvfp4":
        return ""
    first = draws.make(0)
    exact = quantize_nvfp4(rows, operand.block)
    grid = _Grid.of(rows, exact)
    low, high, between, scales = grid.low, grid.high, grid.between, grid.scales

    ups = torch.zeros_like(grid.position[between])
    made = first
    for number in range(draws.count):
        made = first if number == 0 else draws.make(number)
        if fault := _scale_fault(made, exact):
            return fault
        codes = grid_values(made, scales)
        if codes.shape != low.shape:
            return f"has shape {tuple(codes.shape)} instead of {tuple(low.shape)}"
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
    return _unfairness(ups, grid.position[between], draws.count)


def fairness(rows: Tensor, draws: Draws, operand: Operand) -> tuple[float, float]:
    """Of NVFP4 draws made from `rows` [n, k]: how often values go up beyond their chance, in spacings (fair: 0); and
    the variance of that as a share of a fair draw's (fair: 1)."""
    grid = _Grid.of(rows, quantize_nvfp4(rows, operand.block))
    total, variance = torch.zeros_like(grid.position), torch.zeros_like(grid.position)
    for number in range(draws.count):
        excess, variance = grid.excess(draws.make(number))
        total += excess
    bias = total[grid.between].mean() / draws.count
    return float(bias), float(total.square().sum() / (draws.count * variance[grid.between].sum()))


def _scale_fault(made: BackendOperand, exact: NVFP4Tensor) -> str:
    """Scales and maximum are no matter of chance."""
    expected = expected_parts(exact, made)
    actual = actual_parts(made, slice(None))
    for part, value in expected.items():
        if part not in ("codes", "values") and (fault := difference(actual[part], value)):
            return f"{part} {fault}"
    return ""


def dependence_fault(
    rows: Mapping[Place, Tensor], draw: Callable[[int], Mapping[Place, BackendOperand]], recipe: Recipe
) -> str:
    """What the draws of two operands of one tensor have in common, or an empty string.

    rows: what each operand is made from: [n, k], and of the transposed tensor [k, n]. draw: both of
    draw 0, 1, ...

    Independent draws are uncorrelated whichever elements are paired. Three pairings show what kernels might share: the
    same place in both outputs, by row and column or by index (one state of a generator for two launches), and the same
    element of the tensor (one draw for both).
    """
    (first, rows_first), (second, rows_second) = rows.items()
    operands = (recipe[first], recipe[second])
    if any(operand.format != "nvfp4" for operand in operands):
        return ""
    grids = [_Grid.of(x, quantize_nvfp4(x, op.block)) for x, op in zip(rows.values(), operands, strict=True)]
    num_rows, num_columns = (min(*sizes, _PAIRED) for sizes in zip(rows_first.shape, rows_second.shape, strict=True))
    sums = {what: [0.0, 0.0, 0.0] for what in ("place", "index", "element")}
    for number in range(_PAIRED_DRAWS):
        made = draw(number)
        excess, variance = grids[0].excess(made[first])
        other, other_variance = grids[1].excess(made[second])
        here = (slice(num_rows), slice(num_columns))
        pairs = {
            "place": (excess[here], other[here], variance[here], other_variance[here]),
            "index": tuple(t.reshape(-1) for t in (excess, other, variance, other_variance)),
            "element": (excess, other.t(), variance, other_variance.t()),
        }
        for what, (a, b, a_variance, b_variance) in pairs.items():
            fair = a_variance * b_variance
            for i, value in enumerate(((a * b).sum(), fair.sqrt().sum(), fair.sum())):
                sums[what][i] += float(value)
    for what, (together, scale, noise) in sums.items():
        if not abs(together) <= _CORRELATION * scale + 6 * noise**0.5:
            return f"go together at the same {what}: correlation {together / scale:+.3f}"
    return ""


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


def grid_values(made: BackendOperand, scales: Tensor) -> Tensor:
    """FP32 [n, k] values on the E2M1 grid of an operand, native or emulated; `scales`: its FP32 block scales."""
    if made.decoded is not None:
        decoded = made.decoded()
        values, scales = decoded.block_values(), decoded.scales.to(torch.float32)  # type: ignore[union-attr]
    else:
        values = made.unpacked().to(torch.float32)
    quotient = values.unflatten(-1, (-1, 16)) / scales[..., None]
    return torch.nan_to_num(quotient, nan=0.0).flatten(-2)
