"""Whether stochastic rounding to NVFP4 is fair, by the statistics of some draws: those of native kernels are their own.

A value between two neighbours on the E2M1 grid goes up with a probability that is its position between them. Its excess
is whether it went up (0 or 1) less that probability. Over some draws of an operand:

    bias           the mean excess: of all values, and of those at positions in each of eight bins
    spread         the variance of one element's excess, as a share of a fair draw's
    sums           the variance of sums over a row, a column and a block of 16: draws that elements share, or that
                   repeat, make it larger than that of independent ones, and draws that balance each other smaller
    dependence     of two operands of one tensor: the excess of elements that might have the same draw is uncorrelated
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

_DRAWS = 16
# Largest deviations beyond six standard errors; eight random bits alone may have a bias of 1/512.
_BIAS, _BIN_BIAS, _SPREAD, _SUMS, _CORRELATION = 0.004, 0.01, 0.03, 0.1, 0.02
_NUM_BINS = 8
# Rows and columns of the corner in which two launches of unequal grids number their threads alike.
_CORNER = 128

_SUMS_OVER: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda excess: excess.sum(1),
    "columns": lambda excess: excess.sum(0),
    "blocks": lambda excess: excess.unflatten(1, (-1, 16)).sum(2),
}


def _corners(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (min(*sizes, _CORNER) for sizes in zip(one.shape, other.shape, strict=True))
    return one[:rows, :columns], other[:rows, :columns]


# What two operands [n, k] and [k, n] of one tensor might share: one generator's state in two launches, which count by
# place or by index, or one draw for both copies of an element.
_PAIRED_BY: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "place": _corners,
    "index": lambda one, other: (one.flatten(), other.flatten()),
    "element": lambda one, other: (one, other.t()),
}


@dataclass(frozen=True)
class Fairness:
    """fault: what is unfair, or an empty string. bias: the mean excess, fair: 0. spread: fair: 1."""

    fault: str
    bias: float = 0.0
    spread: float = 1.0


def fairness(
    rows: Mapping[OperandSlot, Tensor], draw: Callable[[int], Mapping[OperandSlot, BackendOperand]], recipe: Recipe
) -> dict[str, Fairness]:
    """By its label, how fair each of one or two NVFP4 operands of a tensor is, and what the draws of two share.

    rows: what each is made from: [n, k], and of the transposed tensor [k, n]. draw: makes them by the draws of a
    number, the same again for the same number.
    """
    operands = {slot: _Excess(x, recipe[slot]) for slot, x in rows.items()}
    together = dict.fromkeys(_PAIRED_BY, 0.0)
    first: dict[OperandSlot, Tensor] = {}
    for number in range(_DRAWS):
        made = draw(number)
        latest = {slot: of.add(made[slot]) for slot, of in operands.items()}
        first = first or latest
        if len(rows) == 2:
            for what, paired in _PAIRED_BY.items():
                one, other = paired(*latest.values())
                together[what] += float((one * other).sum())
    again, found = draw(0), {}
    for slot, of in operands.items():
        fault = of.fault()
        if torch.equal(first[slot], latest[slot]):
            fault = "two draws are the same"
        elif not torch.equal(first[slot], of.excess(again[slot])):
            fault = "the same key gives other draws"
        found[slot.name] = Fairness(fault, of.bias, of.spread)
    if len(rows) == 2:
        found[" and ".join(found)] = Fairness(_dependence(together, *(of.variance for of in operands.values())))
    return found


def grid_positions(rows: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    """FP32 [n, k]: where `rows` [n, k] lie on the E2M1 grid of their blocks. scales: FP32 [n, k / 16]; amax: of all."""
    encode = (scales * encode_tensor_scale(amax).reciprocal()).reciprocal().clamp(max=FP32_MAX)
    return (rows.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2)


class _Excess:
    """The excess of an operand's draws, added up. high: FP32 [n, k], the neighbour above each value in magnitude;
    position: FP64 [n, k], from below (0) to above (1); variance: FP64 [n, k], of the excess of a fair draw."""

    def __init__(self, rows: Tensor, operand: Operand) -> None:
        reference = quantize_nvfp4(rows, operand.block)
        self.scales = reference.scales.to(torch.float32)
        scaled = grid_positions(rows, self.scales, reference.amax).clamp_(-E2M1_MAX, E2M1_MAX)
        low = round_e2m1_stochastic(scaled, torch.zeros_like(scaled))
        self.high = round_e2m1_stochastic(scaled, torch.full_like(scaled, 1 - 2.0**-22))
        gap = (self.high - low).abs()
        self.between = gap > 0
        self.position = torch.where(self.between, (scaled - low).abs() / gap.clamp(min=0.5), 0.0).to(torch.float64)
        self.variance = self.position * (1 - self.position)
        self.total, self.sums = torch.zeros_like(self.position), dict.fromkeys(_SUMS_OVER, 0.0)

    def excess(self, made: BackendOperand) -> Tensor:
        """FP64 [n, k] of one draw; 0 where there is nothing to round."""
        values = made.unpacked().to(torch.float32).unflatten(-1, (-1, 16)) / self.scales[..., None]
        ups = (values.flatten(-2) == self.high).to(torch.float64)
        return torch.where(self.between, ups - self.position, 0.0)

    def add(self, made: BackendOperand) -> Tensor:
        """The excess of the next of `_DRAWS` draws, taken in."""
        excess = self.excess(made)
        self.total += excess
        for what, add in _SUMS_OVER.items():
            self.sums[what] += float(add(excess).square().sum())
        return excess

    @property
    def bias(self) -> float:
        """Mean excess of a draw."""
        return float(self.total[self.between].mean()) / _DRAWS

    @property
    def spread(self) -> float:
        """Over independent draws the squared sum has their number times the fair variance."""
        return float(self.total.square().sum() / (_DRAWS * self.variance.sum()))

    def fault(self) -> str:
        """What is beyond its limit, or an empty string."""
        excess, variance = (t[self.between] for t in (self.total / _DRAWS, self.variance))
        bins = (self.position[self.between] * _NUM_BINS).long()
        limits = {"": (_BIAS, bins >= 0)}
        limits |= {f" at positions {i / 8:g} to {(i + 1) / 8:g}": (_BIN_BIAS, bins == i) for i in range(_NUM_BINS)}
        for where, (limit, inside) in limits.items():
            if inside.any():
                bias = float(excess[inside].mean())
                noise = 6 * float(variance[inside].sum() / _DRAWS) ** 0.5 / int(inside.sum())
                if not abs(bias) <= limit + noise:
                    return f"goes up too often by {bias:+.4f} of a spacing{where}"
        if not abs(self.spread - 1) <= _SPREAD + 6 * (2 / excess.numel()) ** 0.5:
            return f"its spread is {self.spread:.3f} of a fair draw's"
        fair, everywhere = float(variance.sum()), torch.full_like(self.total, float(self.total.mean()) / _DRAWS)
        for what, add in _SUMS_OVER.items():
            common = float(add(everywhere).square().sum())  # what a bias adds
            share = (self.sums[what] / _DRAWS - common) / fair
            noise = 6 * (2 * float(add(self.variance).square().sum()) / _DRAWS) ** 0.5 / fair
            if not abs(share - 1) <= _SUMS + noise:
                return f"sums over {what} have {share:.3f} of the variance of independent draws"
        return ""


def _dependence(together: Mapping[str, float], one: Tensor, other: Tensor) -> str:
    """together: sums of products of both operands' excess, by how they are paired. one, other: their variances."""
    for what, paired in _PAIRED_BY.items():
        a, b = paired(one, other)
        scale, noise = _DRAWS * float((a * b).sqrt().sum()), 6 * (_DRAWS * float((a * b).sum())) ** 0.5
        if not abs(together[what]) <= _CORRELATION * scale + noise:
            return f"go together at the same {what}: correlation {together[what] / scale:+.3f}"
    return ""
