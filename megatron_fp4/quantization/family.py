"""The family of formats of which the papers try members: elements, block scales and FP32 scales by name. Emulated only.

A name is ELEMENT_SCALE (`e2m1_e5m2`), ELEMENT_SCALE_SCOPE (`e2m1_e4m3_row`) or ELEMENT_SCOPE (`e5m2_tensor`):

    ELEMENT  a code       e2m1 and e1m2 (INT4's grid -7..7, halved) in 4 bits; e3m2 and e2m3 in 6; e4m3 and e5m2 in 8
    SCALE    of a block   e1m6, e2m5, e3m4, e4m3, e5m2, e6m1 and e8m0 (arXiv 2505.19115, Fig. 1), e5m3; never negative
    SCOPE    that shares an FP32 scale: the `tensor`, a `row` of the operand, `128` elements along the dot product, or
             a `column`, one element of each dot product (Smooth-SwiGLU, arXiv 2409.12517: x of the down projection)

EeMm has e exponent and m mantissa bits, the bias 2^(e-1) - 1 and subnormals (`GRIDS`). max(F) is the largest value of a
format, round rounds to nearest, ties to the even code, and saturates. A is the largest magnitude of the scope, a that
of the block. All arithmetic is FP32, from left to right, in the order of NVFP4 (nvfp4.py) or, without a scope, MXFP4:

    S      = min(max(ELEMENT) * max(SCALE) / A, FLT_MAX), or 1 where that is 0
    scale  = round(a * (S * (1 / max(ELEMENT))))    without a scope: round(a / max(ELEMENT)); e8m0 rounds up
    encode = min(1 / (scale * (1 / S)), FLT_MAX)    without a scope S is 1
    code   = round(clamp(x * encode, -max(ELEMENT), max(ELEMENT))), or stochastically
    value  = code * scale * (A / (max(ELEMENT) * max(SCALE)))

Without SCALE there is one scale, as in fp8.py: encode = max(ELEMENT) / A, value = code * (1 / encode). With the scope
`column`, x * S takes the place of x, a is its maximum, and scale and encode are those without a scope.

So e2m1_e4m3_tensor in blocks of 16 has NVFP4's codes and e2m1_e8m0 in blocks of 32 MXFP4's; neither has their kernels,
and no tensor core multiplies the others. Where A or a is NaN or inf, no value that it scales is finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.rounding import FP32_MAX, RoundingKey, rounding_draws, to_ue8m0_up, ue8m0_values
from megatron_fp4.quantization.tensor import QuantizedTensor, block_amax, scale_blocks, tensor_decode_scale

SIZES = (8, 16, 32, 64, 128)


class Grid(NamedTuple):
    """The values of EeMm. exponent, mantissa: bits. largest: the largest value; every format but e5m2, which is IEEE's,
    uses all exponents, and those of 8 bits have no value for the last code."""

    exponent: int
    mantissa: int
    largest: float

    def round(self, values: Tensor, key: RoundingKey | None = None) -> Tensor:
        """FP32 `values` [rows, cols], at most `largest`, on the grid: to nearest, or by the draws of `key`; NaN stays
        NaN."""
        binade = (values.view(torch.int32) & 0x7F800000).view(torch.float32)
        # Subnormals are as far apart as the smallest normal numbers.
        spacing = binade.clamp(min=2.0 ** (2 - 2 ** (self.exponent - 1))) * 2.0**-self.mantissa
        if key is None:
            return torch.round(values / spacing) * spacing
        draws = rounding_draws(key, values.shape[0], values.shape[1], values.device)
        return torch.copysign(torch.floor((values.abs() / spacing).add_(draws)) * spacing, values)


GRIDS = {
    "e2m1": Grid(2, 1, 6.0),
    "e1m2": Grid(1, 2, 3.5),
    "e3m2": Grid(3, 2, 28.0),
    "e2m3": Grid(2, 3, 7.5),
    "e1m6": Grid(1, 6, 3.9375),
    "e2m5": Grid(2, 5, 7.75),
    "e3m4": Grid(3, 4, 30.0),
    "e4m3": Grid(4, 3, 448.0),
    "e5m2": Grid(5, 2, 57344.0),
    "e6m1": Grid(6, 1, 2.0**32),
    "e5m3": Grid(5, 3, 114688.0),
    "e8m0": Grid(8, 0, 2.0**127),
}


class Member(NamedTuple):
    """A format of the family. scale, scope: empty if it has none."""

    element: str
    scale: str = ""
    scope: str = ""

    @property
    def name(self) -> str:
        return "_".join(part for part in self if part)

    @property
    def largest(self) -> float:
        return GRIDS[self.element].largest

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """The blocks that can share a scale. Without block scales, one block for what GEMMs of codes require: 16; it is
        square if the tensor and its transpose have the same codes."""
        if not self.scale:
            return ((16 if self.scope == "tensor" else 1, 16),)
        squares = () if self.scope in ("row", "column", "128") else tuple((size, size) for size in SIZES)
        return (*((1, size) for size in SIZES), *squares)

    @property
    def exact(self) -> torch.dtype:
        """The dtype that holds every `code * block scale`."""
        bits = GRIDS[self.element].mantissa + 1 + (GRIDS[self.scale].mantissa + 1 if self.scale else 0)
        return torch.bfloat16 if bits <= 8 and self.scope in ("", "tensor") else torch.float32

    def encode(
        self, rows: Tensor, block: tuple[int, int], key: RoundingKey | None, *, amax: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize FP32 [rows, cols]. key: None rounds to nearest. amax: as `amax_of_scope`; None: of `rows`."""
        element = GRIDS[self.element]
        amax = amax_of_scope(rows, self.scope) if amax is None else amax
        if not self.scale:
            assert amax is not None
            encode = encode_tensor_scale(amax, 1.0, element.largest)
            decode = torch.where(torch.isfinite(amax), encode.reciprocal(), float("nan"))
            encode = encode * torch.ones_like(rows[:, :1])
            scales = torch.ones_like(encode)
        else:
            grid, inverse = GRIDS[self.scale], None
            if amax is not None:
                tensor_scale = encode_tensor_scale(amax, grid.largest, element.largest)
                decode = tensor_decode_scale(amax, grid.largest, element.largest)
            if self.scope == "column":
                rows = rows * tensor_scale
            maxima = block_amax(rows, block)
            if self.scope in ("", "column"):
                wanted = maxima / torch.full_like(maxima, element.largest)
            else:
                if self.scope == "128":
                    tensor_scale, decode = (t.repeat_interleave(128 // block[1], dim=1) for t in (tensor_scale, decode))
                factor = tensor_scale * torch.full_like(tensor_scale, element.largest).reciprocal()
                wanted, inverse = maxima * factor, tensor_scale.reciprocal()
            if self.scale == "e8m0":
                scales = ue8m0_values(to_ue8m0_up(wanted))
            else:
                scales = grid.round(wanted.clamp(max=grid.largest))
                scales = torch.where(torch.isfinite(maxima), scales, float("nan"))
            encode = (scales if inverse is None else scales * inverse).reciprocal().clamp(max=FP32_MAX)
        codes = element.round(scale_blocks(rows, encode).clamp_(-element.largest, element.largest), key)
        if amax is None or self.scope == "tensor":
            return FamilyTensor(codes, scales, block, exact=self.exact, factor=None if amax is None else decode)
        if self.scope == "column":
            scales = scales.repeat_interleave(rows.shape[1] // scales.shape[1], dim=1)
        return FamilyTensor(codes, scales * decode, block, exact=self.exact)


@dataclass(frozen=True, kw_only=True)
class FamilyTensor(QuantizedTensor):
    """elements: FP32 values on the element's grid. scales: FP32, the FP32 scale of a row, a column (then one for each
    element) or 128 elements included. factor: that of the tensor, FP32 0-dim; None: 1."""

    factor: Tensor | None = None

    def decode_scale(self) -> Tensor | None:
        return self.factor


def amax_of_scope(rows: Tensor, scope: str) -> Tensor | None:
    """The largest magnitude of FP32 [rows, cols] in each scope: 0-dim for `tensor`, [rows, 1] for `row`, [1, cols]
    for `column`, [rows, cols / 128] for `128`; None without a scope."""
    if scope == "128":
        return block_amax(rows, (1, 128))
    if scope in ("row", "column"):
        return rows.abs().amax(int(scope == "row"), keepdim=True)
    return rows.abs().amax() if scope else None


def members() -> Iterator[Member]:
    """All formats of the family. e8m0 reaches every FP32 number, so it needs no FP32 scale."""
    for element in ("e2m1", "e1m2"):
        for scale in ("e1m6", "e2m5", "e3m4", "e4m3", "e5m2", "e6m1", "e5m3", "e8m0"):
            yield Member(element, scale)
            if scale != "e8m0":
                yield from (Member(element, scale, scope) for scope in ("tensor", "row", "column", "128"))
    yield from (Member(element, "e8m0") for element in ("e3m2", "e2m3"))
    yield from (Member(element, "", scope) for element in ("e4m3", "e5m2") for scope in ("tensor", "row", "column"))
