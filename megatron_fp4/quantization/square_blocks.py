"""4-bit weights in square blocks, quantized by rows and kept as codes: what of a weight is gathered and kept.

A weight [rows, columns] in 16x16 blocks (MXFP4: 32x32), rounded to nearest, has the same codes along both dimensions,
so one packed copy serves fprop and dgrad:

    codes   uint8 [rows, columns / 2]        two E2M1 codes a byte, the even column in the low nibble
    scales  uint8 [rows, columns / block]    the block's E4M3 (MXFP4: UE8M0) scale, repeated in each of its rows

0.5625 (0.53) bytes an element, besides NVFP4's one FP32 scale of the tensor. Rows are whole: those of several parts of
a weight, laid one behind another, are those of the weight. Parts may begin anywhere: what a row needs besides itself is
the largest magnitude of its block, whose other rows another rank may hold, and that of the tensor. So it goes in
three passes,

    block_maxima     a part's rows -> the largest magnitude of each of its blocks, of its own rows alone
                     (ranks exchange the maxima of blocks that they share, and that of the tensor)
    quantize_rows    a part's rows and the maxima -> codes and scales
    unpack_rows      codes and scales -> `code * scale` in BF16, which is exact

and the numbers are bit for bit those of `quantize_nvfp4` and `quantize_mxfp4` of the whole.

Blocks are counted in padded rows: a weight may consist of equal groups of rows (the heads of a packed projection), each
padded with zeros to whole blocks, so that no block lies in two groups. The padding is never stored; `unpack_rows` puts
it in.

Here is the reference in PyTorch; on an NVIDIA GPU `square_blocks_cuda.py` does the same. What it does not do:
stochastic rounding, transforms, four-over-six (whose choice sums errors over a block).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.quantization.elements import E2M1_VALUES
from megatron_fp4.quantization.mxfp4 import encode_mxfp4
from megatron_fp4.quantization.nvfp4 import encode_nvfp4
from megatron_fp4.quantization.tensor import block_amax, scale_values

BLOCKS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True)
class RowBlocks:
    """Which block each row of a part of a weight belongs to.

    format: of `BLOCKS`. group_rows, padded_group_rows: rows of a group without and with padding.
    first, end: the part's rows in the weight's; blocks have numbers in the whole weight.
    """

    format: str
    group_rows: int
    padded_group_rows: int
    first: int
    end: int

    @property
    def block(self) -> int:
        """Rows and columns of a block."""
        return BLOCKS[self.format]

    @property
    def blocks_per_group(self) -> int:
        """Padding included."""
        return self.padded_group_rows // self.block

    def block_of(self, row: int) -> int:
        """The number of the block that `row` is in."""
        group, inside = divmod(row, self.group_rows)
        return group * self.blocks_per_group + inside // self.block

    @property
    def first_block(self) -> int:
        """Of the part's first row."""
        return self.block_of(self.first)

    @property
    def num_blocks(self) -> int:
        """From the part's first row to its last; 0 without rows."""
        return self.block_of(self.end - 1) - self.first_block + 1 if self.end > self.first else 0

    def local_blocks(self, device: torch.device) -> Tensor:
        """int64 [rows]: of each row, its block counted from the part's first."""
        row = torch.arange(self.first, self.end, device=device)
        group, inside = row // self.group_rows, row % self.group_rows
        return group * self.blocks_per_group + inside // self.block - self.first_block


def block_maxima(x: Tensor, blocks: RowBlocks) -> Tensor:
    """FP32 [blocks, columns / block]: the largest magnitude of each block among the part's rows `x` [rows, columns].

    x counts as rounded to BF16 already, or is FP32 of a run in FP32. NaN wins over every number.
    """
    shape = (blocks.num_blocks, x.shape[1] // blocks.block)
    maxima = torch.zeros(shape, dtype=torch.float32, device=x.device)
    if not shape[0]:
        return maxima
    of_rows = block_amax(x.to(torch.float32), (1, blocks.block))
    index = blocks.local_blocks(x.device)[:, None].expand_as(of_rows)
    return maxima.scatter_reduce_(0, index, of_rows, "amax")


def quantize_rows(x: Tensor, blocks: RowBlocks, maxima: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of the part's rows `x` [rows, columns], as the top of this file has them.

    maxima: FP32 as `block_maxima` makes them, of all of a block's rows. amax: FP32 0-dim, of the tensor; None for
    MXFP4.
    """
    rows, of_rows = x.to(torch.float32), maxima[blocks.local_blocks(x.device)]
    if blocks.format == "nvfp4":
        encoded = encode_nvfp4(rows, (16, 16), None, amax=amax, maxima=of_rows)
    else:
        encoded = encode_mxfp4(rows, (32, 32), None, maxima=of_rows)
    return encoded.codes(), encoded.scales.view(torch.uint8)


def unpack_rows(codes: Tensor, scales: Tensor, blocks: RowBlocks) -> Tensor:
    """BF16 `code * scale` [padded rows, columns] of whole groups of rows, zeros where padding is."""
    table = _pairs_of_codes(codes.device)
    pairs = table[codes.to(torch.int32)].flatten(-2)  # FP32 [rows, columns]
    if blocks.format == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
    factors = scale_values(scales)
    values = pairs.unflatten(-1, (factors.shape[-1], -1)).mul_(factors[..., None]).flatten(-2).to(torch.bfloat16)
    extra = blocks.padded_group_rows - blocks.group_rows
    if not extra:
        return values
    return torch.nn.functional.pad(values.unflatten(0, (-1, blocks.group_rows)), (0, 0, 0, extra)).flatten(0, 1)


@functools.cache
def _pairs_of_codes(device: torch.device) -> Tensor:
    """FP32 [256, 2]: the values of both codes of every byte."""
    values = torch.tensor((*E2M1_VALUES, *(0.0 - v for v in E2M1_VALUES)))  # of either zero +0
    byte = torch.arange(256)
    return torch.stack((values[byte & 0xF], values[byte >> 4]), -1).to(device)
