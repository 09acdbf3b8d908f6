"""Operands and products of any backend beside the reference: in comparable parts, where they differ, and how far.

A zero's sign is free: no product sees it, the emulation does not keep it, and hardware that rounds to E2M1 keeps the
sign of a number that becomes zero (code 8), of an exact -0.0 perhaps as well, where the reference has code 0. Only
where a backend promises our own bytes (`bytes_fault`) is it not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fp4.precision.reference import quantized
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.quantization.tensor import NVFP4Tensor, QuantizedTensor

# Elements that are compared at once, in whole blocks of every format: bounds the memory of the reference.
_CHUNK_ELEMENTS, _CHUNK_ROWS = 2**22, 128

if TYPE_CHECKING:
    from megatron_fp4.precision.backend import BackendOperand, OperandRequest
    from megatron_fp4.precision.torch_scaled_mm import PackedOperand


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
