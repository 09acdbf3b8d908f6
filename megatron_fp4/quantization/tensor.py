"""What quantization returns: codes and scales, how they decode, and the order in which a tensor core reads scales.

That order is cuBLAS's 128 x 4 tiles of 512 bytes. Scales [rows, columns] are padded with zeros to whole tiles of 128
rows x 4 columns. The tiles lie one after another, those along the columns first; within a tile the four columns of a
row are contiguous, and the rows r, r + 32, r + 64 and r + 96 follow each other (`SWIZZLE_32_4_4` in PyTorch; cuBLAS
documentation, "1D block scaling factors layout"):

    byte of (r, c) = ((r // 128) * C / 4 + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4

C being the padded number of columns. It is the layout of NVFP4's E4M3 scales (k / 16 columns) and of MX formats' UE8M0
scales (k / 32 columns) alike.
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
    """Codes under block scales, without a tensor scale: MXFP4, MXFP8, FP8.

    elements: codes, E2M1 as uint8 [..., cols / 2], low nibble = even column, or E4M3 as float8_e4m3fn [..., cols]; or
        FP32 values on the E2M1 grid [..., cols], which `codes` packs when asked: PyTorch's GEMMs need values alone.
    scales: [..., cols / columns of a block], replicated over the rows of a block: FP32, E4M3 as float8_e4m3fn, or UE8M0
        as uint8, biased exponents of which 255 is NaN.
    block: elements that share a scale, (rows, columns).
    negative: of FP32 elements, where a code's sign bit is set, which a value of zero does not show; else None.
    exact: a dtype that holds every `code * block scale` exactly.
    """

    elements: Tensor
    scales: Tensor
    block: tuple[int, int]
    negative: Tensor | None = None
    exact: torch.dtype = torch.bfloat16

    @cached_property
    def codes(self) -> Tensor:
        """E2M1 packed, or E4M3."""
        return self.elements if self.negative is None else pack_codes(e2m1_codes(self.elements, self.negative))

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that was quantized."""
        per_byte = 2 if self.elements.dtype == torch.uint8 else 1
        return torch.Size((*self.elements.shape[:-1], self.elements.shape[-1] * per_byte))

    def reshaped(self, lead: Sequence[int]) -> Self:
        """The same with the dimensions `lead` in front of the last."""
        negative = None if self.negative is None else self.negative.reshape(*lead, -1)
        elements, scales = (part.reshape(*lead, -1) for part in (self.elements, self.scales))
        return replace(self, elements=elements, scales=scales, negative=negative)

    def transposed(self) -> QuantizedTensor:
        """Rows and columns exchanged, [rows, cols] of square blocks under scales of one byte: their codes are the same
        along both dimensions."""
        block = self.block[0]
        assert self.block == (block, block), "the scales of other blocks lie along the dot product"
        # Of a block's rows under one scale the first, for the columns that they become.
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
        """FP32 factor from `block_values` to real values; None for 1."""
        return None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Real values."""
        return self.block_values().to(dtype)


@dataclass(frozen=True, kw_only=True)
class NVFP4Tensor(QuantizedTensor):
    """E2M1 codes under E4M3 block scales under one FP32 tensor scale.

    amax: FP32, 0-dim, the largest magnitude of the whole tensor; [rows, 1] where rows are of several tensors. NaN or
        inf poisons everything that is decoded.
    scale_max: what the largest block scale was mapped to: 448, or 256 for four-over-six.
    """

    amax: Tensor
    scale_max: float = E4M3_MAX

    def decode_scale(self) -> Tensor:
        """FP32 factor of the shape of `amax` from `block_values` to real values: amax / (6 * scale_max).

        Below an amax of some 3e-35 it is subnormal and has fewer digits, below 2e-42 it is 0.
        """
        return tensor_decode_scale(self.amax, self.scale_max)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Real values `e2m1 * scale * amax / 2688`, computed in FP32, left to right."""
        room = headroom(self.amax)
        divisor = torch.full_like(self.amax, E2M1_MAX * self.scale_max) * room
        return (self.block_values() * (self.amax * room) / divisor).to(dtype)


def scale_values(scales: Tensor) -> Tensor:
    """FP32 values of block scales as they are stored: FP32, E4M3, or UE8M0 (as uint8 too)."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return ue8m0_values(scales.view(torch.uint8))
    return scales.to(torch.float32)


def scale_blocks(values: Tensor, factors: Tensor) -> Tensor:
    """FP32 `values` [..., cols] times the factor of their block, FP32 [..., cols / block columns]."""
    return (values.unflatten(-1, (factors.shape[-1], -1)) * factors[..., None]).flatten(-2)


def tensor_decode_scale(amax: Tensor, scale_max: float) -> Tensor:
    """FP32 factor from NVFP4's `code * block scale` to real values: amax / (6 * scale_max)."""
    # Divided by a tensor: on CUDA a division by a Python number is a product with its reciprocal.
    return amax / torch.full_like(amax, E2M1_MAX * scale_max)


def all_reduce_maxima(bits: Tensor, group: dist.ProcessGroup) -> None:
    """Replace FP32 maxima by the largest of `group`'s ranks, in place.

    bits: theirs, int32, without a sign: as integers NaN is the largest of all; as floats a reduction may lose it.
    """
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)


def headroom(amax: Tensor) -> Tensor:
    """2^-12 where `amax` is so large that `e2m1 * scale * amax` could overflow, else 1; NaN counts as small.

    On both sides of the division by 2688 < 2^12 it moves no bit of what does not overflow: no factor becomes subnormal.
    """
    return torch.where(amax > 2.0**100, torch.full_like(amax, 2.0**-12), torch.ones_like(amax))


def block_amax(rows: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of FP32 [rows, cols], replicated over a block's rows: [rows, cols / block[1]].

    NaN wins over every number.
    """
    amax = rows.abs().unflatten(-1, (-1, block[1]))
    while amax.shape[-1] > 1:  # by halves: several times faster on a CPU than a reduction over so few elements
        half = amax.shape[-1] // 2
        amax = torch.maximum(amax[..., :half], amax[..., half:])
    amax = amax[..., 0]
    if block[0] > 1:
        amax = amax.unflatten(0, (-1, block[0])).amax(1).repeat_interleave(block[0], dim=0)
    return amax


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales [rows, columns] of a dtype of one byte, in tiles: the same dtype, flat, padding included."""
    rows, columns = scales.shape
    assert scales.element_size() == 1
    padding = (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)
    tiles = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = tiles.view(-1, 4, TILE_ROWS // 4, tiles.shape[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle_scales`: the first `rows` x `columns` of the tiles."""
    row_tiles, column_tiles = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles = swizzled.view(torch.uint8).view(row_tiles, column_tiles, TILE_ROWS // 4, 4, TILE_COLUMNS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, -1)
    return padded[:rows, :columns].contiguous().view(swizzled.dtype)
