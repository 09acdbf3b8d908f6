"""Whether stochastic rounding to E2M1 is fair, by its statistics: the draws of native kernels are their own.

A value between two neighbours goes up with a probability that is its position between them. Of an operand that is drawn
several times, these are tested:

    bias           how often values go up beyond their chance: over all, and for positions in each of eight bins
    spread         the variance of one element over the draws, as a share of a fair draw's
    sums           the variance of sums over a row, a column and a block of 16: draws that elements share, or that
                   repeat, make it larger than that of independent ones, and draws that balance each other smaller
    dependence     of two operands of one tensor: elements that might have the same draw are uncorrelated
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.precision.backend import BackendOperand
from megatron_fp4.precision.recipe import Operand, OperandSlot, Recipe
from megatron_fp4.quantization.elements import E2M1_MAX, FP32_MAX, round_e2m1_stochastic
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale, quantize_nvfp4

# Largest deviations: of the share rounded up from the position, for positions in one of eight bins and over all; of
# the spread from a fair draw's, and of the variance of sums. Eight random bits alone may err by 1/512.
_BIN_BIAS, _BIAS, _SPREAD, _SUMS = 0.01, 0.004, 0.03, 0.1
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

    high: the neighbour above. between: whether it differs from that below. position: FP64, from below (0) to above (1).
    """

    scales: Tensor
    high: Tensor
    between: Tensor
    position: Tensor

    @staticmethod
    def of(rows: Tensor, operand: Operand) -> _Grid:
        reference = quantize_nvfp4(rows, operand.block)
        scales = reference.scales.to(torch.float32)
        encode = (scales * encode_tensor_scale(reference.amax).reciprocal()).reciprocal().clamp(max=FP32_MAX)
        scaled = (rows.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2)
        scaled.clamp_(-E2M1_MAX, E2M1_MAX)
        low = round_e2m1_stochastic(scaled, torch.zeros_like(scaled))
        high = round_e2m1_stochastic(scaled, torch.full_like(scaled, 1 - 2.0**-22))
        gap = (high - low).abs()
        position = torch.where(gap > 0, (scaled - low).abs() / gap.clamp(min=0.5), 0.0).to(torch.float64)
        return _Grid(scales, high, gap > 0, position)

    @property
    def variance(self) -> Tensor:
        """FP64 [n, k]: of whether each value goes up, in a fair draw."""
        return self.position * (1 - self.position)

    def values(self, made: BackendOperand) -> Tensor:
        """FP32 [n, k] values on the E2M1 grid of an operand."""
        values, scales = made.unpacked().to(torch.float32), self.scales
        if made.decoded is not None:
            scales = made.decoded().scales.to(torch.float32)
        return torch.nan_to_num(values.unflatten(-1, (-1, 16)) / scales[..., None], nan=0.0).flatten(-2)

    def excess(self, made: BackendOperand) -> Tensor:
        """FP64 [n, k]: whether each value went up, less its chance."""
        ups = (self.values(made) == self.high).to(torch.float64)
        return torch.where(self.between, ups - self.position, 0.0)


def rounding_faults(rows: Tensor, draws: Draws, operand: Operand) -> str:
    """What is unfair about an `operand` made from `rows` [n, k], or an empty string.

    Only NVFP4 has native stochastic rounding; of other formats nothing is tested here.
    """
    if operand.format != "nvfp4":
        return ""
    grid = _Grid.of(rows, operand)
    made = first = grid.values(draws.make(0))
    total, sums = torch.zeros_like(grid.position), dict.fromkeys(_SUMS_OVER, 0.0)
    for number in range(draws.count):
        operand_made = draws.make(number)
        made, excess = grid.values(operand_made), grid.excess(operand_made)
        total += excess
        for what, add in _SUMS_OVER.items():
            sums[what] += float(add(excess).square().sum())
    if torch.equal(first, made):
        return "two draws are the same"
    if not torch.equal(first, grid.values(draws.make(0))):
        return "the same key gives other draws"
    return _unfairness(total[grid.between], grid.position[grid.between], draws.count) or _dependent_sums(
        sums, total, grid.variance, draws.count
    )


_SUMS_OVER: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda excess: excess.sum(1),
    "columns": lambda excess: excess.sum(0),
    "blocks": lambda excess: excess.unflatten(1, (-1, 16)).sum(2),
}


def _dependent_sums(sums: Mapping[str, float], total: Tensor, variance: Tensor, count: int) -> str:
    """sums: of squared sums over rows, columns or blocks, of `count` draws. total: of the excess of all draws."""
    fair, bias = float(variance.sum()), float(total.mean()) / count
    for what, add in _SUMS_OVER.items():
        lengths = add(torch.full_like(variance, bias))
        share = (sums[what] / count - float(lengths.square().sum())) / fair  # without what a common bias adds
        noise = 6 * (2 * float(add(variance).square().sum()) / count) ** 0.5 / fair
        if not abs(share - 1) <= _SUMS + noise:
            return f"sums over {what} have {share:.3f} of the variance of independent draws"
    return ""


def _unfairness(total: Tensor, position: Tensor, count: int) -> str:
    """total: excess of `count` draws, for each value; position: of the value between its neighbours, 0..1."""
    excess = total / count
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


def fairness(rows: Tensor, draws: Draws, operand: Operand) -> tuple[float, float]:
    """Of NVFP4 draws made from `rows` [n, k]: how often values go up beyond their chance, in spacings (fair: 0); and
    the variance of that as a share of a fair draw's (fair: 1)."""
    grid = _Grid.of(rows, operand)
    total = torch.zeros_like(grid.position)
    for number in range(draws.count):
        total += grid.excess(draws.make(number))
    bias = total[grid.between].mean() / draws.count
    return float(bias), float(total.square().sum() / (draws.count * grid.variance[grid.between].sum()))


def dependence_fault(
    rows: Mapping[OperandSlot, Tensor], draw: Callable[[int], Mapping[OperandSlot, BackendOperand]], recipe: Recipe
) -> str:
    """What the draws of two operands of one tensor have in common, or an empty string.

    rows: what each operand is made from: [n, k], and of the transposed tensor [k, n]. draw: both of draw 0, 1, ...

    Independent draws are uncorrelated whichever elements are paired. Three pairings show what kernels might share: the
    same place in both outputs, by row and column or by index (one state of a generator for two launches), and the same
    element of the tensor (one draw for both).
    """
    (first, rows_first), (second, rows_second) = rows.items()
    if any(recipe[slot].format != "nvfp4" for slot in rows):
        return ""
    grids = [_Grid.of(x, recipe[slot]) for slot, x in rows.items()]
    num_rows, num_columns = (min(*sizes, _PAIRED) for sizes in zip(rows_first.shape, rows_second.shape, strict=True))
    here = (slice(num_rows), slice(num_columns))
    variance, other_variance = (grid.variance * grid.between for grid in grids)
    sums = {what: [0.0, 0.0, 0.0] for what in ("place", "index", "element")}
    for number in range(_PAIRED_DRAWS):
        made = draw(number)
        excess, other = grids[0].excess(made[first]), grids[1].excess(made[second])
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
