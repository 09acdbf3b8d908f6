"""Quantized tensors: codes and scales, how they are decoded, and the order in which tensor cores read the scales.

Tensor cores read scales in cuBLAS's tiles of 128 rows x 4 columns, 512 bytes. Scales [rows, columns] are padded with
zeros to whole tiles. The tiles follow each other, along the columns first. Within a tile the four columns of a row are
contiguous, and rows r, r + 32, r + 64 and r + 96 follow each other (`SWIZZLE_32_4_4` in PyTorch; cuBLAS documentation,
"1D block scaling factors layout"):

    byte of (r, c) = ((r // 128) * C / 4 + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4

C is the padded number of columns. NVFP4's E4M3 scales (k / 16 columns) and the UE8M0 scales (k / 32) have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.quantization.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_codes,
    e2m1_values,
    pack_codes,
    ue8m0_values,
    unpack_codes,
)

TILE_ROWS, TILE_COLUMNS = 128, 4


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes with block scales and without a tensor scale: MXFP4, MXFP8, FP8.

    elements: codes, E2M1 as uint8 [..., cols / 2], low nibble = even column, or E4M3 as float8_e4m3fn [..., cols]; or
        FP32 values on the E2M1 grid [..., cols], which `codes` packs on request: PyTorch's GEMMs need only the values.
    scales: [..., cols / columns of a block], repeated for the rows of a block: FP32, E4M3 as float8_e4m3fn, or UE8M0
        as uint8 (biased exponents; 255 is NaN).
    block: (rows, columns) of the elements that share a scale.
    negative: bool, where codes have the sign bit set, if `elements` are FP32 (zeros there have lost their sign); None
        if `elements` are codes.
    exact: a dtype that holds every `code * block scale` exactly.
    """

    elements: Tensor
    scales: Tensor
    block: tuple[int, int]
    negative: Tensor | None = None
    exact: torch.dtype = torch.bfloat16

    @cached_property
    def codes(self) -> Tensor:
        """E2M1 codes, packed, or E4M3 codes."""
        return self.elements if self.negative is None else pack_codes(e2m1_codes(self.elements, self.negative))

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that was quantized."""
        codes_per_element = 2 if self.elements.dtype == torch.uint8 else 1
        return torch.Size((*self.elements.shape[:-1], self.elements.shape[-1] * codes_per_element))

    def reshaped(self, leading: Sequence[int]) -> Self:
        """The same tensor with all dimensions but the last reshaped to `leading`."""
        negative = None if self.negative is None else self.negative.reshape(*leading, -1)
        elements, scales = (part.reshape(*leading, -1) for part in (self.elements, self.scales))
        return replace(self, elements=elements, scales=scales, negative=negative)

    def transposed(self) -> QuantizedTensor:
        """The transpose of a [rows, cols] tensor in square blocks with scales of one byte."""
        block = self.block[0]
        assert self.block == (block, block), "only square blocks have the same codes along both dimensions"
        # One row of scales for each block; transposed, it is repeated for each of the block's new rows.
        scales = self.scales.view(torch.uint8)[::block].t().repeat_interleave(block, dim=0).view(self.scales.dtype)
        packed = self.codes.dtype == torch.uint8
        codes = pack_codes(unpack_codes(self.codes).t()) if packed else self.codes.t()
        return QuantizedTensor(codes, scales, self.block)

    def block_values(self) -> Tensor:
        """FP32 `code * block scale`."""
        packed = self.elements.dtype == torch.uint8
        elements = e2m1_values(unpack_codes(self.elements)) if packed else self.elements.to(torch.float32)
        return scale_blocks(elements, scale_values(self.scales))

    def decode_scale(self) -> Tensor | None:
        """FP32 factor from `block_values` to real values; None means 1."""
        return None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Real values, computed in FP32 and rounded to `dtype`."""
        values, factor = self.block_values(), self.decode_scale()
        return (values if factor is None else values * factor).to(dtype)


@dataclass(frozen=True, kw_only=True)
class NVFP4Tensor(QuantizedTensor):
    """E2M1 codes with E4M3 block scales and one FP32 tensor scale.

    amax: FP32 0-dim, the largest magnitude of the tensor. If it is NaN or inf, no value is decoded to a finite number.
    scale_max: what the largest block scale was mapped to: 448, or 256 for four over six.
    """

    amax: Tensor
    scale_max: float = E4M3_MAX

    def decode_scale(self) -> Tensor:
        """FP32 factor, of the shape of `amax`, from `block_values` to real values: amax / (6 * scale_max).

        If amax is below about 3e-35, the factor is subnormal and less precise; if it is below 2e-42, the factor is 0.
        """
        return tensor_decode_scale(self.amax, self.scale_max)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Real values `e2m1 * scale * amax / (6 * scale_max)`, computed in FP32 from left to right."""
        guard = overflow_guard(self.amax)
        divisor = torch.full_like(self.amax, E2M1_MAX * self.scale_max) * guard
        return (self.block_values() * (self.amax * guard) / divisor).to(dtype)


def scale_values(scales: Tensor) -> Tensor:
    """FP32 values of stored block scales: FP32, E4M3, or UE8M0 (also as uint8)."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return ue8m0_values(scales.view(torch.uint8))
    return scales.to(torch.float32)


def scale_blocks(values: Tensor, factors: Tensor) -> Tensor:
    """FP32 `values` [..., cols] times the factors of their blocks, FP32 [..., cols / block columns]."""
    return (values.unflatten(-1, (factors.shape[-1], -1)) * factors[..., None]).flatten(-2)


def tensor_decode_scale(
    amax: Tensor, scale_max: float, code_max: float = E2M1_MAX, out: Tensor | None = None
) -> Tensor:
    """FP32 factor from NVFP4's `code * block scale` to real values: amax / (code_max * scale_max)."""
    # The divisor is a tensor, because on CUDA PyTorch divides by a Python number by multiplying with its reciprocal.
    return torch.div(amax, torch.full_like(amax, code_max * scale_max), out=out)


def all_reduce_maxima(bits: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
    """All-reduce FP32 maxima over each of `groups`, in place.

    bits: int32, the bits of non-negative FP32 numbers. These compare like the numbers, and NaN is the largest; a
        floating-point reduction may lose NaN.
    """
    for group in groups:
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)


def overflow_guard(amax: Tensor) -> Tensor:
    """2^-12 where `amax` is so large that `e2m1 * scale * amax` could overflow, else 1; 1 for NaN.

    The dividend and the divisor, 2688 < 2^12, are multiplied by it. That changes no bit of a result that does not
    overflow, because no factor becomes subnormal.
    """
    return torch.where(amax > 2.0**100, torch.full_like(amax, 2.0**-12), torch.ones_like(amax))


def block_amax(rows: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of FP32 [rows, cols], repeated for a block's rows: [rows, cols / block[1]]; NaN
    if the block has one."""
    amax = rows.abs().unflatten(-1, (-1, block[1]))
    while amax.shape[-1] > 1:  # halving is several times faster on a CPU than a reduction over so few elements
        half = amax.shape[-1] // 2
        amax = torch.maximum(amax[..., :half], amax[..., half:])
    amax = amax[..., 0]
    if block[0] > 1:
        amax = amax.unflatten(0, (-1, block[0])).amax(1).repeat_interleave(block[0], dim=0)
    return amax


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales [rows, columns], of a dtype of one byte, in tiles: flat, with padding, of the same dtype."""
    rows, columns = scales.shape
    assert scales.element_size() == 1
    padding = (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)
    tiles = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = tiles.view(-1, 4, TILE_ROWS // 4, tiles.shape[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle_scales`: the first `rows` x `columns` scales of the tiles."""
    row_tiles, column_tiles = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles = swizzled.view(torch.uint8).view(row_tiles, column_tiles, TILE_ROWS // 4, 4, TILE_COLUMNS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, -1)
    return padded[:rows, :columns].contiguous().view(swizzled.dtype)
