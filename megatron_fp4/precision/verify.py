"""Operands and products of any backend beside the reference: in comparable parts, where they differ, and how far.

A zero's sign is free: no product sees it, the emulation does not keep it, and hardware that rounds to E2M1 keeps the
sign of a number that becomes zero (code 8), of an exact -0.0 perhaps as well, where the reference has code 0. Only
where a backend promises our own bytes (`bytes_fault`) is it not.

Whether stochastic rounding to E2M1 is fair, by its statistics: the draws of native kernels are their own.

An operand that a backend made of a run's own tensor, against the reference quantizer.

The emulation's draws are functions of keys, so its operands must be the reference's bit for bit, stochastic ones
included. Transformer Engine's are too where they are rounded to nearest without a transform. Its draws are its own:
there every code must be one of its value's two neighbours. And behind a Hadamard transform two correct sums of a run's
values may round to neighbouring BF16 numbers (the self-test's samples avoid that): there amax may be off by one such
step, a block scale by one E4M3 step, and codes must follow from values within one step, under the operand's own scales.

Whether a backend computes what its recipe says: compared with the reference in `megatron_fp4.quantization`.

    python -m megatron_fp4.precision.verify [--shape TOKENS,INPUTS,OUTPUTS ...]

and, before the first step of a run whose backend is not emulated, for the shapes and recipes of its own plan.
Native kernels were wrong before in ways that a loss curve shows late or never: stochastic rounding that returned zeros
on one GPU generation, scales blocked along the wrong dimension. For each linear's shape and recipe:

    codes      every operand, rounded to nearest: codes, block scales and tensor maximum, bit for bit but for the sign
               of a zero
    rounding   operands that round stochastically: scales and maximum bit for bit, every value one of the two
               neighbours, mean within 0.01 of a spacing for values anywhere between them, spread that of a fair draw,
               not the same draws twice, the same again for the same key
    scales     operands by MS-EDEN: bit for bit, with their draws
    draws      where two operands of one tensor round stochastically, their draws are independent
    maximum    where ranks share a tensor's maximum: every operand is scaled by that of all of them
    products   fprop, dgrad and wgrad at full size from the backend's own operands, against FP64 on 256 rows
    bytes      of the backend `torch` in place of `rounding`, since its draws are the reference's: codes, block scales
               and tensor scale of every operand as its GEMM reads them, bit for bit
    poison     NaN and inf in x, W or dy reach the products

The tensors are random, with outlier columns, one block of zeros and rows that are a hundred times smaller. Their values
are multiples of one power of two, so that a Hadamard transform is exact in FP32 in any order of summation: on other
values two correct transforms may differ in the last bit of BF16, and then in a code.

In a run, every N steps: one linear computed again by the reference.

    recheck = Recheck(interval, linears, device)
    with recheck.watching(step):
        result = train_step(...)
    rechecked = recheck.collect()           # None unless the step was due

The self-test before the first step meets random tensors on a fresh machine. This meets the run's own, on a machine
that may have begun to compute wrongly. In the due step a watcher stands between the linear and its backend. Of the
step's first micro-batch it compares every operand as the linear really used it (values or codes, scales, maxima) with
the reference quantizer's (`operand_fault`), and rows of the three products with FP64 (`product_errors`). It changes
nothing: it draws from no generator and writes no tensor of the run, so losses and weights keep their bits.

The linears take turns in the plan's order: which one is due is a function of the step alone, the same on all ranks and
after a resume. Each data-parallel rank checks it on its own micro-batch, each tensor-parallel rank on its own shard; a
fault on one rank is known to all.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision import torch_scaled_mm
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Backend, BackendOperand, MakeOperand, OperandRequest, RowGroups
from megatron_fp4.precision.backend_support import BACKENDS, first_refusal, refused_here
from megatron_fp4.precision.emulated import shared_amax, transform_signs
from megatron_fp4.precision.linear import LinearCall, LinearContext
from megatron_fp4.precision.overlapped import Gather
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import SLOTS, SLOTS_OF, Gemm, Operand, OperandSlot, Recipe, rounded_to_nearest
from megatron_fp4.precision.reference import quantized
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.elements import (
    E2M1_MAX,
    E2M1_VALUES,
    FP32_MAX,
    e2m1_values,
    round_e2m1_stochastic,
    unpack_codes,
)
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale, quantize_nvfp4
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.quantization.tensor import NVFP4Tensor, QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_fp4.precision.backend import BackendOperand, OperandRequest
    from megatron_fp4.precision.linear import LinearContext
    from megatron_fp4.precision.torch_scaled_mm import PackedOperand


# Elements that are compared at once, in whole blocks of every format: bounds the memory of the reference.
_CHUNK_ELEMENTS, _CHUNK_ROWS = 2**22, 128


def actual_parts(made: BackendOperand, rows: slice) -> dict[str, Tensor]:
    """An operand in comparable parts: codes and scales of native operands, values of emulated ones."""
    return parts_by_rows(made)(rows)


def parts_by_rows(made: BackendOperand) -> Callable[[slice], dict[str, Tensor]]:
    """`actual_parts` of an operand that is decoded once, as a function of the rows."""
    if made.decoded is not None:
        decoded = made.decoded()
        return lambda rows: _code_parts(decoded, rows)
    values, scale = made.unpacked(), made.scale
    whole = {} if scale is None else {"tensor scale": scale}
    return lambda rows: {"values": values[rows].to(torch.float32) + 0.0} | whole


def _code_parts(right: QuantizedTensor, rows: slice) -> dict[str, Tensor]:
    parts = {"codes": right.codes[rows], "scales": right.scales[rows]}
    if isinstance(right, NVFP4Tensor):
        parts |= {"codes": unsigned_zeros(parts["codes"]), "amax": right.amax}
    return parts


def unsigned_zeros(codes: Tensor) -> Tensor:
    """Packed E2M1 codes (uint8, two a byte) with code 8, the negative zero, as code 0."""
    low = torch.where((codes & 0x0F) == 0x08, codes & 0xF0, codes)
    return torch.where((low & 0xF0) == 0x80, low & 0x0F, low)


def expected_parts(right: QuantizedTensor, made: BackendOperand) -> dict[str, Tensor]:
    """The reference in the parts that `actual_parts` has of `made`."""
    if made.decoded is not None:
        return _code_parts(right, slice(None))
    scale = {"tensor scale": right.decode_scale()} if isinstance(right, NVFP4Tensor) else {}
    return {"values": right.block_values() + 0.0} | scale


def bytes_fault(made: PackedOperand, rows: Tensor, request: OperandRequest) -> str:
    """What of an operand differs from the reference of `rows` [n, k] (after the transform), draws included."""
    amax = rows.abs().amax().to(torch.float32)
    codes, scales = made.plain()

    def expected(chunk: slice) -> dict[str, Tensor]:
        right = quantized(rows[chunk], request.operand, further(request.key, chunk.start), amax)
        parts = {"codes": right.codes, "scales": right.scales.view(scales.dtype)}
        return parts | ({"tensor scale": right.decode_scale()} if isinstance(right, NVFP4Tensor) else {})

    def actual(chunk: slice) -> dict[str, Tensor]:
        parts = {"codes": codes[chunk], "scales": scales[chunk]}
        return parts | ({} if made.scale is None else {"tensor scale": made.scale})

    return parts_fault(rows, actual, expected)


def further(key: RoundingKey | None, rows: int) -> RoundingKey | None:
    """The draws of a tensor from its row `rows` on."""
    return None if key is None else replace(key, row_offset=key.row_offset + rows)


def row_chunks(rows: Tensor) -> Iterator[slice]:
    """The rows of a matrix, some at a time: whole blocks of every format."""
    size = max(_CHUNK_ROWS, _CHUNK_ELEMENTS // rows.shape[1] // _CHUNK_ROWS * _CHUNK_ROWS)
    return (slice(start, start + size) for start in range(0, rows.shape[0], size))


def parts_fault(
    rows: Tensor,
    actual: Callable[[slice], Mapping[str, Tensor]],
    expected: Callable[[slice], Mapping[str, Tensor]],
) -> str:
    """The first part in which an operand of `rows` [n, k] is not the reference, and where; empty if there is none.

    actual, expected: parts of the given rows; those that are expected are compared.
    """
    for chunk in row_chunks(rows):
        found = actual(chunk)
        for part, right in expected(chunk).items():
            if fault := difference(found[part], right, chunk.start):
                return f"{part} {fault}"
    return ""


def difference(actual: Tensor, expected: Tensor, first_row: int = 0) -> str:
    """Where two tensors differ in any bit, in words; empty if nowhere."""
    if actual.shape != expected.shape:
        return f"have shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    unequal = _bits(actual) != _bits(expected)
    if not unequal.any():
        return ""
    at = unequal.nonzero()[0].tolist()
    found, right = actual[tuple(at)].to(torch.float32).item(), expected[tuple(at)].to(torch.float32).item()
    where = [at[0] + first_row, *at[1:]] if at else "the tensor"
    return f"differ in {int(unequal.sum())} of {unequal.numel()}, first at {where}: {found:g} instead of {right:g}"


def _bits(t: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return t.contiguous().view(sizes[t.element_size()])


# ----------------------------------------------------------------------------------------------------------- products

# Largest relative error of a product (Frobenius norm), and of one element in units of the root mean square: BF16
# rounds by 2^-9; Hopper's FP8 tensor cores add 128 products with 14 bits.
PRODUCT_ERROR = {torch.bfloat16: 4e-3, torch.float32: 1e-3}
ELEMENT_ERROR = {torch.bfloat16: 0.05, torch.float32: 0.01}
_ROWS = 256
_PRODUCT_ELEMENTS = 2**24


@dataclass(frozen=True)
class ProductErrors:
    """How far rows of a product are from FP64.

    total: relative, Frobenius norm. worst: of one element, in units of the root mean square of all. peak: the largest
    element in these units. condition: how much larger sums of magnitudes are than sums of random signs would have them
    (1 or less where nothing cancels beyond that); computed only for products beyond the plain bounds.
    """

    total: float
    worst: float
    peak: float
    condition: float
    dtype: torch.dtype

    @property
    def fault(self) -> str:
        """What is beyond the bounds, or an empty string. NaN passes no comparison, and so is a fault."""
        if self._within(max(1.0, self.condition)):
            return ""
        return f"relative error {self.total:.2e}, worst element {self.worst:.2e} of the root mean square"

    def _within(self, factor: float) -> bool:
        element = factor * ELEMENT_ERROR[self.dtype] + 2**-8 * self.peak
        return self.total <= factor * PRODUCT_ERROR[self.dtype] and self.worst <= element


def product_rows(product: Tensor, count: int = _ROWS) -> Tensor:
    """Evenly spaced rows of a product, `count` at most."""
    return torch.linspace(0, product.shape[0] - 1, min(count, product.shape[0]), device=product.device).long()


def product_errors(
    product: Tensor,
    a: BackendOperand,
    b: BackendOperand,
    rows: Tensor,
    *,
    left_rows: Tensor | None = None,
    cancelling: bool = False,
) -> ProductErrors:
    """`rows` of the product a b^T against FP64 on the operands' own values.

    left_rows: of a that these are; None: the same. cancelling: the tensors are a run's, and sums may cancel further
    than those of random numbers.
    """
    left, right = a.unpacked()[rows if left_rows is None else left_rows].to(torch.float64), b.unpacked()
    scale = math.prod(1.0 if made.scale is None else made.scale.to(torch.float64) for made in (a, b))
    expected = _in_fp64(left, right) * scale
    if product.shape[1] != expected.shape[1]:
        return ProductErrors(math.inf, math.inf, 0.0, 1.0, product.dtype)
    finite = expected.isfinite()
    if not finite.all():
        # A step that is not finite is for others to handle; here NaN and inf must only not disappear.
        lost = math.inf if product[rows][~finite].isfinite().any() else 0.0
        return ProductErrors(lost, lost, 0.0, 1.0, product.dtype)
    error = product[rows].to(torch.float64) - expected
    norm, root = expected.norm().item(), expected.square().mean().sqrt().item()
    if norm == 0:
        total = worst = 0.0 if not error.any() else math.inf
        return ProductErrors(total, worst, 0.0, 1.0, product.dtype)
    total, worst = error.norm().item() / norm, error.abs().amax().item() / root
    found = ProductErrors(total, worst, expected.abs().amax().item() / root, 1.0, product.dtype)
    if not cancelling or not found.fault:
        return found
    magnitudes = (_in_fp64(left.abs(), right.abs()) * scale).norm().item()
    return replace(found, condition=magnitudes / norm / left.shape[1] ** 0.5)


def _in_fp64(left: Tensor, right: Tensor) -> Tensor:
    """left right^T for FP64 [m, k] and [n, k] of any type, converted piece by piece."""
    size = max(1, _PRODUCT_ELEMENTS // right.shape[1])
    return torch.cat([left @ part.to(torch.float64).t() for part in right.split(size)], dim=1)


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
    rows: Mapping[OperandSlot, Tensor], draw: Callable[[int], Mapping[OperandSlot, BackendOperand]], recipe: Recipe
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


# One step of BF16 where it is widest, relative; and what FP32 sums of 16 may be off near zero, in units of the E2M1
# grid, whose largest value is that of the tile.
_BF16_STEP, _NEAR_ZERO = 2.0**-7, 2.0**-14


def operand_fault(made: BackendOperand, rows: Tensor, request: OperandRequest, group: ProcessGroup | None) -> str:
    """What of the operand `made` differs from the reference, or an empty string.

    rows: [n, k], what it was made of, before the transform. group: ranks that share the tensor's maximum; then a
    collective of theirs (nvfp4).
    """
    operand = request.operand
    signs = None
    if request.rht:
        signs = transform_signs(request.rht, request.signs, request.signs_key, rows.device)

    def source(chunk: slice) -> Tensor:
        part = rows[chunk]
        return part if signs is None else random_hadamard_transform(part.to(torch.bfloat16), request.rht, signs)

    amax = functools.reduce(torch.maximum, (source(chunk).abs().amax() for chunk in row_chunks(rows))).to(torch.float32)
    amax = shared_amax(amax, group) if format_of(operand.format).tensor_scale else amax
    if not amax.isfinite():
        return "" if _poisoned(made) else "is finite although it was made of NaN or inf"
    if made.decoded is not None and (request.key is not None or request.rht):
        decoded = made.decoded()
        assert isinstance(decoded, NVFP4Tensor)
        faults = (_native_fault(decoded, chunk, source(chunk), request, amax) for chunk in row_chunks(rows))
        return next(filter(None, faults), "")

    def expected(chunk: slice) -> dict[str, Tensor]:
        return expected_parts(quantized(source(chunk), operand, further(request.key, chunk.start), amax), made)

    return parts_fault(rows, parts_by_rows(made), expected)


def _poisoned(made: BackendOperand) -> bool:
    return any(part is not None and not bool(part.isfinite().all()) for part in (made.scale, made.unpacked()))


def _native_fault(decoded: NVFP4Tensor, chunk: slice, source: Tensor, request: OperandRequest, amax: Tensor) -> str:
    """Codes with Transformer Engine's draws or behind its transform, which exist in NVFP4 alone."""
    step = _BF16_STEP if request.rht else 0.0
    if not (decoded.amax - amax).abs() <= step * amax:
        return f"amax is {decoded.amax.item():g} instead of {amax.item():g}"
    right = quantized(source, request.operand, None, decoded.amax)
    scales = decoded.scales[chunk]
    assert isinstance(right, NVFP4Tensor)
    apart = (scales.view(torch.uint8).to(torch.int16) - right.scales.view(torch.uint8).to(torch.int16)).abs()
    if (apart > (1 if request.rht else 0)).any():
        return f"scales {difference(scales, right.scales, chunk.start)}"

    scales = scales.to(torch.float32)
    codes = e2m1_values(unpack_codes(decoded.codes[chunk]))
    encode = (scales * encode_tensor_scale(decoded.amax).reciprocal()).reciprocal().clamp(max=FP32_MAX)
    positions = (source.to(torch.float32).unflatten(-1, (-1, 16)) * encode[..., None]).flatten(-2)
    slack = positions.abs() * step + (_NEAR_ZERO if request.rht else 0.0)
    lowest, highest = ((positions + side).clamp(-E2M1_MAX, E2M1_MAX) for side in (-slack, slack))
    if request.key is None:
        least, most = _nearest(lowest, up=False), _nearest(highest, up=True)
    else:
        least, most = _neighbour(lowest, up=False), _neighbour(highest, up=True)
    # Under a scale of zero the codes do not show.
    strangers = ((codes < least) | (codes > most)) & (scales > 0).repeat_interleave(16, dim=1)
    if not strangers.any():
        return ""
    row, column = strangers.nonzero()[0].tolist()
    return (
        f"codes differ in {int(strangers.sum())} of {strangers.numel()}, first at {[row + chunk.start, column]}: "
        f"{codes[row, column].item():g} for {positions[row, column].item():g}"
    )


def _grid(device: torch.device) -> Tensor:
    return torch.tensor([*(-value for value in E2M1_VALUES[:0:-1]), *E2M1_VALUES], device=device)


def _neighbour(positions: Tensor, up: bool) -> Tensor:
    """The E2M1 value at or above (`up`), or at or below, FP32 |positions| <= 6."""
    grid = _grid(positions.device)
    index = torch.searchsorted(grid, positions.contiguous(), right=not up) - (0 if up else 1)
    return grid[index.clamp(0, grid.numel() - 1)]


def _nearest(positions: Tensor, up: bool) -> Tensor:
    """The nearest E2M1 value of FP32 |positions| <= 6, of two equally near the one above (`up`) or below."""
    grid = _grid(positions.device)
    return grid[torch.searchsorted((grid[1:] + grid[:-1]) / 2, positions.contiguous(), right=up)]


_DRAWS = 16
_DRAW_ELEMENTS = 2**21


class SelfTestError(RuntimeError):
    """A backend computes something else than the reference."""


@dataclass(frozen=True)
class Case:
    """The local shape of a linear on this rank (output features unpadded) and its recipe.

    in_shards, out_shards: ranks among which input or output features are sharded; None: not sharded.
    """

    tokens: int
    inputs: int
    outputs: int
    num_groups: int
    recipe: Recipe
    in_shards: dist.ProcessGroup | None = None
    out_shards: dist.ProcessGroup | None = None

    def __str__(self) -> str:
        return f"{self.recipe.name}, {self.tokens} tokens, {self.inputs} -> {self.outputs}"


@dataclass(frozen=True)
class Finding:
    """One comparison: what was compared, what differs (empty: nothing), and of products the relative error."""

    case: Case
    what: str
    fault: str
    measured: float | None = None

    def __str__(self) -> str:
        return f"{self.case}: {self.what}: {self.fault or 'as the reference'}"


def cases_of(plans: Iterable[Plan], linears: Mapping[str, LinearContext], tokens: int) -> list[Case]:
    """The different quantized linears of the plans, as this rank computes them. tokens: of a micro-batch."""
    cases: dict[Case, None] = {}
    for plan in plans:
        for row in plan.rows:
            context, linear = linears[row.linear.name], row.linear
            if row.recipe.quantized:
                inputs = linear.in_features // _size(context.in_shards)
                outputs = linear.out_features // _size(context.out_shards)
                shards = (context.in_shards, context.out_shards)
                cases[Case(tokens, inputs, outputs, context.num_groups, row.recipe, *shards)] = None
    return list(cases)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def require(backend: Backend, cases: Iterable[Case], device: torch.device) -> str:
    """Test `backend` on this rank's device; returns a line for the log. A collective.

    Raises SelfTestError on all ranks if any rank found a fault, with its own faults where there are some.
    """
    findings = [finding for case in cases for finding in _findings(backend, case, device)]
    faults = [str(finding) for finding in findings if finding.fault]
    count = torch.tensor(len(faults), device=device)
    dist.all_reduce(count)
    if faults:
        heading = f"self-test of the backend {backend.name} on {device}, without which precision.backend=emulated does:"
        raise SelfTestError("\n  ".join((heading, *faults)))
    if count.item():
        raise SelfTestError(f"self-test of the backend {backend.name}: faults on other ranks, none on this one")
    return f"self-test of {backend.name}: {len(findings)} comparisons with the reference, no difference"


def _findings(backend: Backend, case: Case, device: torch.device) -> list[Finding]:
    try:
        return list(check(backend, case, device))
    except (RuntimeError, ValueError) as error:  # what a kernel that this chip cannot run ends in
        return [Finding(case, "kernels", f"failed: {str(error).splitlines()[0]}")]


def check(backend: Backend, case: Case, device: torch.device) -> Iterator[Finding]:
    """All comparisons for one case; a collective of the case's groups."""
    x, w, dy = sample_tensors(case, device)
    recipe = rounded_to_nearest(case.recipe)
    call = LinearCall(_context(backend, replace(case, recipe=recipe)), w, x)
    tensors = {"activation": call.pad_tokens(x), "weight": call.pad_rows(w), "gradient": call.pad(dy)}
    made = {}
    for slot, make, source in _makers(call, tensors):
        made[slot] = make()
        if recipe[slot].quantized:
            rows = transformed(source, call, slot)
            yield Finding(case, f"{slot.name} codes", _codes_fault(made[slot], rows, recipe[slot], _amax(rows)))
    for name, gemm in recipe.gemms.items():
        if gemm.quantized:
            left, right = (made[slot] for slot in SLOTS if slot.gemm == name)
            product = backend.gemm(left, right, torch.float32 if name == "wgrad" else torch.bfloat16)
            errors = product_errors(product, left, right, product_rows(product))
            yield Finding(case, f"{name} product", errors.fault, errors.total)
    if isinstance(backend, torch_scaled_mm.TorchBackend):
        yield from _byte_findings(backend, case, tensors)
    else:
        yield from _rounding_findings(backend, case, tensors)
        yield from _corrected_findings(backend, case, tensors)
    yield from _maximum_findings(backend, case, tensors)
    yield Finding(case, "NaN and inf", _poison_fault(backend, case, x, w, dy))


def _context(backend: Backend, case: Case, step: int = 0) -> LinearContext:
    return LinearContext("selftest", case.recipe, StepState(seed=7, step=step), backend, case.num_groups)


def _makers(call: LinearCall, tensors: Mapping[str, Tensor]) -> Iterator[tuple[OperandSlot, MakeOperand, Tensor]]:
    """Both operands of each tensor (by its name in `SLOTS_OF`): what makes it, and the rows that it is made of,
    [n, k], before the transform."""
    for name, tensor in tensors.items():
        makers = call.prepare(*SLOTS_OF[name], tensor)
        for slot, make in zip(SLOTS_OF[name], makers, strict=True):
            assert make is not None
            yield slot, make, tensor.t() if slot.transposed else tensor


def sample_tensors(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, inputs], W [outputs, inputs] and dy [tokens, outputs] in BF16, the same every time."""
    generator = torch.Generator(device).manual_seed(case.tokens + 3 * case.inputs + 7 * case.outputs)

    def draw(rows: int, columns: int, exponent: int) -> Tensor:
        t = torch.randn(rows, columns, generator=generator, device=device)
        t[:, ::67] *= 20
        t[1::31] *= 1e-2
        t[:16, :16] = 0
        # Below 2^7.5 in units of 2^-11, and BF16 rounds to coarser ones: sums of 16 have at most 23 bits.
        return ((t * 2.0**11).round() * 2.0 ** (exponent - 11)).to(torch.bfloat16)

    return draw(case.tokens, case.inputs, 0), draw(case.outputs, case.inputs, -5), draw(case.tokens, case.outputs, -13)


# ------------------------------------------------------------------------------------------------------------- codes


def transformed(x: Tensor, call: LinearCall, slot: OperandSlot) -> Tensor:
    """`x` [n, k] as the operand at `slot` is quantized: after the transform, if its GEMM has one."""
    size = call.recipe.gemms[slot.gemm].rht
    return random_hadamard_transform(x, size, call.signs(slot.gemm)) if size else x


def _amax(rows: Tensor) -> Tensor:
    return rows.abs().amax().to(torch.float32)


def _codes_fault(made: BackendOperand, rows: Tensor, operand: Operand, amax: Tensor) -> str:
    """What of an operand differs from the reference of `rows` [n, k]; of a stochastic one only what is no draw."""
    drawn = ("codes", "values") if operand.rounding == "stochastic" else ()

    def expected(chunk: slice) -> dict[str, Tensor]:
        parts = expected_parts(quantized(rows[chunk], operand, None, amax), made)
        return {part: value for part, value in parts.items() if part not in drawn}

    return parts_fault(rows, parts_by_rows(made), expected)


def _maximum_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands of a tensor whose maximum is shared; each rank's is half as large as that of the one before."""
    context = replace(_context(backend, case), num_groups=1, in_shards=case.in_shards, out_shards=case.out_shards)
    call = LinearCall(context, tensors["weight"], tensors["activation"])
    for name in tensors:
        group = context.amax_group(name)
        if group is None:
            continue
        tensor = tensors[name] * 2.0 ** -dist.get_rank(group)
        for slot, make, source in _makers(call, {name: tensor}):
            if case.recipe[slot].format == "nvfp4":
                rows = transformed(source, call, slot)
                amax = _amax(rows)
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
                fault = _codes_fault(make(), rows, case.recipe[slot], amax)
                yield Finding(case, f"{slot.name} of {_size(group)} ranks", fault)


def _poison_fault(backend: Backend, case: Case, x: Tensor, w: Tensor, dy: Tensor) -> str:
    """NaN and inf in each tensor must show in both products that it is in."""
    for value in (float("nan"), float("inf")):
        for broken, reached in ((0, (0, 2)), (1, (0, 1)), (2, (1, 2))):
            given = [t.clone() for t in (x, w, dy)]
            given[broken][5, 7] = value
            call = LinearCall(_context(backend, case), given[1], given[0])
            w_fprop, w_dgrad = call.weight_operands()
            makers = call.prepare(*SLOTS_OF["activation"], call.pad_tokens(given[0]))
            gradients = call.prepare(*SLOTS_OF["gradient"], call.pad(given[2]))
            assert makers[0] and makers[1] and gradients[0] and gradients[1]
            products = (
                backend.gemm(makers[0](), w_fprop, torch.bfloat16),
                backend.gemm(gradients[0](), call.dgrad_weight(w_dgrad), torch.bfloat16),
                backend.gemm(gradients[1](), makers[1](), torch.float32),
            )
            for index in reached:
                if products[index].isfinite().all():
                    return f"{value} in {('x', 'W', 'dy')[broken]} disappears in {('fprop', 'dgrad', 'wgrad')[index]}"
    return ""


# ---------------------------------------------------------------------------------------------- stochastic rounding


def _rounding_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands that round stochastically, by the statistics of some draws."""
    ungrouped = replace(case, num_groups=1)
    for name, slots in SLOTS_OF.items():
        stochastic = [slot for slot in slots if case.recipe[slot].rounding == "stochastic"]
        if not stochastic:
            continue
        tensor = tensors[name]
        count = max(128, min(tensor.shape[0], _DRAW_ELEMENTS // tensor.shape[1] // 128 * 128))
        tensor = tensor[: min(count, tensor.shape[0])]

        def draw(step: int, name: str = name, tensor: Tensor = tensor) -> dict[OperandSlot, BackendOperand]:
            call = LinearCall(_context(backend, ungrouped, step), tensors["weight"], tensor)
            return {slot: make() for slot, make, _ in _makers(call, {name: tensor})}

        call = LinearCall(_context(backend, ungrouped), tensors["weight"], tensor)
        sources = {slot: tensor.t() if slot.transposed else tensor for slot in stochastic}
        rows = {slot: transformed(source, call, slot).contiguous() for slot, source in sources.items()}
        for slot in stochastic:

            def make(
                step: int, slot: OperandSlot = slot, draw: Callable[[int], dict[OperandSlot, BackendOperand]] = draw
            ) -> BackendOperand:
                return draw(step)[slot]

            fault = rounding_faults(rows[slot], Draws(make, _DRAWS), case.recipe[slot])
            yield Finding(case, f"{slot.name} rounding", fault)
        if len(stochastic) == 2:
            what = " and ".join(slot.name for slot in slots)
            yield Finding(case, f"{what} draws", dependence_fault(rows, draw, case.recipe))


def _corrected_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Operands by MS-EDEN, which only backends with our own draws make, against the reference with the same key."""
    call = LinearCall(_context(backend, case), tensors["weight"], tensors["activation"])
    for slot, make, source in _makers(call, tensors):
        if case.recipe[slot].rounding == "ms_eden":
            yield Finding(case, f"{slot.name} scales", operand_fault(make(), source, call.request(slot), None))


def _byte_findings(backend: Backend, case: Case, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Every operand against the reference with the same key."""
    call = LinearCall(_context(backend, case), tensors["weight"], tensors["activation"])
    for slot, make, source in _makers(call, tensors):
        made = make()
        if isinstance(made, torch_scaled_mm.PackedOperand):
            fault = bytes_fault(made, transformed(source, call, slot), call.request(slot))
            yield Finding(case, f"{slot.name} bytes", fault)


# ----------------------------------------------------------------------------------------------------------- command

_X, _W, _DY = Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16)), Operand("nvfp4", (1, 16), "stochastic")
_M8 = Operand("mxfp8", (1, 32))
_F8, _F8_W = Operand("fp8", (1, 128)), Operand("fp8", (128, 128))
_F8P, _F8P_W = replace(_F8, power_of_two_scales=True), replace(_F8_W, power_of_two_scales=True)
RECIPES = (
    Recipe("nvfp4", Gemm(_X, _W), Gemm(_DY, _W), Gemm(_DY, _X, 16)),
    Recipe("fp8_block", Gemm(_F8, _F8_W), Gemm(_F8, _F8_W), Gemm(_F8, _F8)),
    Recipe("fp8_block, powers of two", Gemm(_F8P, _F8P_W), Gemm(_F8P, _F8P_W), Gemm(_F8P, _F8P)),
    Recipe("mxfp8", Gemm(_M8, _M8), Gemm(_M8, _M8), Gemm(_M8, _M8)),
)
SHAPES = [[1024, 512, 2048], [512, 2048, 512], [256, 1024, 1280]]


def main(arguments: list[str]) -> int:
    """Test what this machine can run, and say what it cannot; returns the exit code."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m megatron_fp4.precision.verify", description=description)
    shape = "tokens, input and output features, each a multiple of 128"
    parser.add_argument("--shape", action="append", metavar="TOKENS,INPUTS,OUTPUTS", help=shape)
    options = parser.parse_args(arguments)
    shapes = [[int(size) for size in given.split(",")] for given in options.shape or ()] or SHAPES
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    print(f"device: {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'}")
    for name, value in te.environment().items():
        print(f"set for Transformer Engine: {name}={value}")
    num_faults = 0
    for recipe in RECIPES:
        for backend_name in BACKENDS:
            reason = _untestable(recipe, backend_name, device)
            if reason is not None:
                print(f"{recipe.name}, {backend_name}: not tested: {reason}")
                continue
            backend = BACKENDS[backend_name]()
            findings = [f for n, k, m in shapes for f in check(backend, Case(n, k, m, 1, recipe), device)]
            faults = [finding for finding in findings if finding.fault]
            num_faults += len(faults)
            print(f"{recipe.name}, {backend_name}: {len(findings)} comparisons, {len(faults)} faults")
            for finding in faults:
                print(f"  {finding}")
    return 1 if num_faults else 0


def _untestable(recipe: Recipe, backend_name: str, device: torch.device) -> str | None:
    if backend_name != "emulated" and device.type != "cuda":
        return "there is no CUDA device"
    if refusal := first_refusal(backend_name, {"precision": recipe}, "bfloat16"):
        return f"it cannot do {refusal.problem}"
    if backend_name == "transformer_engine" and (variable := te.fast_math_variable()):
        return f"{variable} is set"
    return refused_here(backend_name, [recipe], device.type)


if __name__ == "__main__":
    from megatron_fp4.runtime.closed_pipe import end_without_reader

    end_without_reader()
    sys.exit(main(sys.argv[1:]))


# Of each product, other ones at each of a linear's turns.
_PRODUCT_ROWS = 64


class RecheckError(SelfTestError):
    """A linear of a running run computed something else than the reference; the message is the same on all ranks."""


@dataclass(frozen=True)
class Rechecked:
    """One linear in one step (from 0). comparisons: on this rank. faults: of all ranks, the same on all."""

    linear: str
    step: int
    comparisons: int
    faults: list[str]

    def __str__(self) -> str:
        what = f"{self.linear} in step {self.step + 1}"
        if not self.faults:
            return f"recheck of {what}: {self.comparisons} comparisons with the reference, no difference"
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"recheck of {what}: {self.faults[0]}{more}"


class Recheck:
    """Rechecks `linears` (name -> context, in the plan's order, the same on all ranks) every `interval` steps; 0:
    never. device: of this rank."""

    def __init__(self, interval: int, linears: Mapping[str, LinearContext], device: torch.device) -> None:
        self.interval, self.device = interval, device
        self._linears = dict(linears)
        self._watcher: _Watcher | None = None

    def due(self, step: int) -> tuple[str, int] | None:
        """The linear to recheck in `step` (from 0) and how many turns it had before; None if none is due."""
        names = [name for name, context in self._linears.items() if context.recipe.quantized]
        if not self.interval or step % self.interval or not names:
            return None
        turn, index = divmod(step // self.interval, len(names))
        return names[index], turn

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """A context for the training step `step`, in which a linear is watched if one is due."""
        due = self.due(step)
        if due is None:
            yield
            return
        context, turn = self._linears[due[0]], due[1]
        backend = context.backend
        # Codes that were kept from before would not be seen being made; made again they are the same.
        context.weight_cache = None
        self._watcher = _Watcher(backend, context, step, turn)
        context.backend = cast(Backend, self._watcher)
        try:
            yield
        finally:
            context.backend = backend

    def collect(self) -> Rechecked | None:
        """What the step found, over all ranks; None if none was due. A collective after a due step."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return None
        assert watcher.comparisons, f"nothing of {watcher.context.name} was seen"
        count = torch.tensor(len(watcher.faults), device=self.device)
        dist.all_reduce(count)
        faults: list[str] = []
        if count.item():
            mine = [f"rank {dist.get_rank()}: {fault}" for fault in watcher.faults]
            of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(of_ranks, mine)
            faults = [fault for found in of_ranks for fault in found]
        return Rechecked(watcher.context.name, watcher.step, watcher.comparisons, faults)


@dataclass
class _Watcher:
    """A linear's backend for one step: does what the backend does, and looks at the first operand of each name."""

    backend: Backend
    context: LinearContext
    step: int
    turn: int
    faults: list[str] = field(default_factory=list)
    comparisons: int = 0
    _seen: set[str] = field(default_factory=set)
    _left_sides: list[tuple[Any, str]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def operands(
        self, x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None, **settings: Any
    ) -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
        """The backend's operands, compared when they are made."""
        makers = self.backend.operands(x, columns, rows, **settings)

        def watched(maker: Callable[[], Any], request: OperandRequest) -> Any:
            made, slot = maker(), request.slot
            assert slot is not None
            if slot.side == "left":
                self._left_sides.append((made, f"{slot.gemm} product"))
            # Later micro-batches come by too, and recomputed blocks twice.
            if made.quantized and slot.name not in self._seen:
                rounded = x.to(settings["dtype"])
                source = rounded.t() if slot.transposed else rounded
                self._note(slot.name, operand_fault(made, source, request, settings.get("amax_group")))
            return made

        return (
            None if makers[0] is None or columns is None else functools.partial(watched, makers[0], columns),
            None if makers[1] is None or rows is None else functools.partial(watched, makers[1], rows),
        )

    def gathered(self, operand: Any, gather: Gather, *, transposed: bool) -> Callable[[], Any]:
        """The backend's; the operand of all tokens is that of the same GEMM."""
        name = next((name for made, name in self._left_sides if made is operand), None)
        self._left_sides = [(made, name) for made, name in self._left_sides if made is not operand]
        wait = self.backend.gathered(operand, gather, transposed=transposed)

        def joined() -> Any:
            whole = wait()
            if name is not None:
                self._left_sides.append((whole, name))
            return whole

        return joined

    def packs_shards(self, request: OperandRequest) -> bool:
        """The weight is to be seen."""
        return False

    def packed_weight(self, w: Tensor, request: OperandRequest, **settings: Any) -> Any:
        """The backend's, compared: of BF16, like every linear's weight that is packed."""
        made = self.backend.packed_weight(w, request, **settings)
        if made is not None:
            group_rows, padded = settings["rows"]
            groups = w.to(torch.bfloat16).unflatten(0, (-1, group_rows))
            source = torch.nn.functional.pad(groups, (0, 0, 0, padded - group_rows)).flatten(0, 1)
            assert request.slot is not None
            self._note(request.slot.name, operand_fault(made, source, request, settings["amax_group"]))
        return made

    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, rows: RowGroups | None = None
    ) -> Tensor:
        """The backend's product, compared; which GEMM it is, the left side knows."""
        product = self.backend.gemm(a, b, out_dtype, total, rows)
        name = next((name for made, name in self._left_sides if made is a), None)
        self._left_sides = [(made, name) for made, name in self._left_sides if made is not a]
        if total is None and name is not None and name not in self._seen and (a.quantized or b.quantized):
            size, count = product.shape[0], min(_PRODUCT_ROWS, product.shape[0])
            chosen = (torch.arange(count, device=product.device) * size // count + self.turn) % size
            of_left = chosen if rows is None else rows.padded_indices(chosen)
            self._note(name, product_errors(product, a, b, chosen, left_rows=of_left, cancelling=True).fault)
        return product

    def _note(self, what: str, fault: str) -> None:
        self._seen.add(what)
        self.comparisons += 1
        if fault:
            self.faults.append(f"{what}: {fault}")
