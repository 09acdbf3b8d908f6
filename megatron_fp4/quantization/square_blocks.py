"""4-bit weights in square blocks, quantized by rows and kept as codes: what of a weight is gathered and kept.

A weight [rows, columns] in 16x16 blocks (MXFP4: 32x32), rounded to nearest, has the same codes along both dimensions,
so one packed copy serves fprop and dgrad:

    codes   uint8 [rows, columns / 2]        two E2M1 codes a byte, the even column in the low nibble
    scales  uint8 [rows, columns / block]    the block's E4M3 (MXFP4: UE8M0) scale, repeated in each of its rows

0.5625 (0.53) bytes an element, besides NVFP4's one FP32 scale of the tensor. Rows are whole: those of several parts of
a weight, laid one after another, are those of the weight. Parts may begin anywhere: what a row needs besides itself is
the largest magnitude of its block, whose other rows another rank may hold, and that of the tensor. So there are
three passes,

    block_maxima     a part's rows -> the largest magnitude of each of its blocks, of its own rows alone
                     (ranks exchange the maxima of blocks that they share, and that of the tensor)
    quantize_rows    a part's rows and the maxima -> codes and scales
    unpack_rows      codes and scales -> `code * scale` in BF16, which is exact

and the numbers are bit for bit those of `encode_nvfp4` and `encode_mxfp4` of the whole, by PyTorch or by the kernels of
`kernels/square_blocks.py`. Blocks are counted in padded rows: a weight may consist of equal groups of rows (the heads
of a packed projection), each padded with zeros to whole blocks, so that no block lies in two groups. The padding is
never stored; `unpack_rows` puts it in.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Kernel, launch
from megatron_fp4.quantization.microscaling import encode_mxfp4
from megatron_fp4.quantization.nvfp4 import encode_nvfp4
from megatron_fp4.quantization.rounding import E2M1_VALUES
from megatron_fp4.quantization.tensor import QuantizedTensor, block_amax, scale_values

BLOCKS = {"nvfp4": 16, "mxfp4": 32}

_U8, _I32, _F32 = torch.uint8, torch.int32, torch.float32
_MAXIMA = Kernel("square_blocks.maxima_kernel", types=(None, _F32, *([1] * 7)))
_QUANTIZE = Kernel("square_blocks.quantize_kernel", types=(None, _F32, _F32, _U8, _U8, *([1] * 7)))
_UNPACK = Kernel("square_blocks.unpack_kernel", types=(_U8, _U8, _I32, *([1] * 4)))
# Columns that a program does side by side.
_COLUMNS, _UNPACK_COLUMNS = 512, 2048


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
        """Blocks of a padded group."""
        return self.padded_group_rows // self.block

    def block_of(self, row: int) -> int:
        """The number of the block that `row` is in."""
        group, inside = divmod(row, self.group_rows)
        return group * self.blocks_per_group + inside // self.block

    @property
    def first_block(self) -> int:
        """The block of the part's first row."""
        return self.block_of(self.first)

    @property
    def num_blocks(self) -> int:
        """Blocks that the part's rows lie in; 0 without rows."""
        return self.block_of(self.end - 1) - self.first_block + 1 if self.end > self.first else 0

    def local_blocks(self, device: torch.device) -> Tensor:
        """int64 [rows]: of each row, its block counted from the part's first."""
        row = torch.arange(self.first, self.end, device=device)
        group, inside = row // self.group_rows, row % self.group_rows
        return group * self.blocks_per_group + inside // self.block - self.first_block


def block_maxima(
    x: Tensor, blocks: RowBlocks, out: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """FP32 [blocks, columns / block]: the largest magnitude of each block among the part's rows `x` [rows, columns].

    x counts as rounded to `dtype`. out: to write it into. NaN wins over every number.
    """
    shape = (blocks.num_blocks, x.shape[1] // blocks.block)
    if _by_kernels(x, dtype):
        maxima = torch.empty(shape, device=x.device) if out is None else out
        if blocks.num_blocks:
            x = aligned(x)
            _launch(_MAXIMA, x, blocks, (x, maxima))
        return maxima
    maxima = torch.zeros(shape, dtype=torch.float32, device=x.device) if out is None else out.zero_()
    if not blocks.num_blocks:
        return maxima
    of_rows = block_amax(x.to(dtype).to(torch.float32), (1, blocks.block))
    index = blocks.local_blocks(x.device)[:, None].expand_as(of_rows)
    return maxima.scatter_reduce_(0, index, of_rows, "amax")


def quantize_rows(
    x: Tensor,
    blocks: RowBlocks,
    maxima: Tensor,
    amax: Tensor | None,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the part's rows `x` [rows, columns], as the top of this file has them.

    x counts as rounded to `dtype`. maxima: FP32 as `block_maxima` makes them, of all of a block's rows. amax: FP32
    0-dim, of the tensor; None for MXFP4. out: contiguous codes and scales, of which the first rows are written.
    """
    if out is None:
        rows, columns = x.shape
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
        out = codes, torch.empty(rows, columns // blocks.block, dtype=torch.uint8, device=x.device)
    if _by_kernels(x, dtype):
        if blocks.num_blocks:
            x = aligned(x)
            _launch(_QUANTIZE, x, blocks, (x, maxima, maxima if amax is None else amax, *out))
        return out
    values, of_rows = x.to(dtype).to(torch.float32), maxima[blocks.local_blocks(x.device)]
    encoded: QuantizedTensor
    if blocks.format == "nvfp4":
        encoded = encode_nvfp4(values, (16, 16), None, amax=amax, maxima=of_rows)
    else:
        encoded = encode_mxfp4(values, (32, 32), None, maxima=of_rows)
    for made, whole in zip((encoded.codes, encoded.scales.view(torch.uint8)), out, strict=True):
        whole[: len(made)].copy_(made)
    return out


def unpack_rows(codes: Tensor, scales: Tensor, blocks: RowBlocks) -> Tensor:
    """BF16 `code * scale` [padded rows, columns] of whole groups of rows, zeros where padding is.

    codes, scales: contiguous.
    """
    if cuda.gpu.available(codes.device):
        groups = (codes.shape[0] // blocks.group_rows, blocks.group_rows, -1)
        return _unpacked(codes.view(groups), scales.view(groups), blocks.padded_group_rows, blocks.block)
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


def unpack_parts(codes: Tensor, scales: Tensor) -> Tensor:
    """BF16 `code * scale` [parts x rows, columns] of codes [parts, rows, columns / 2] and scales [parts, rows,
    columns / block], each part in one piece; blocks may be of single rows."""
    parts, rows, width = codes.shape
    block = 2 * width // scales.shape[2]
    if cuda.gpu.available(codes.device):
        return _unpacked(codes, scales, rows, block)
    form = next(name for name, size in BLOCKS.items() if size == block)
    whole = RowBlocks(form, parts * rows, parts * rows, 0, parts * rows)
    return unpack_rows(codes.flatten(0, 1), scales.flatten(0, 1), whole)


def _by_kernels(x: Tensor, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and cuda.gpu.available(x.device)


def _unpacked(codes: Tensor, scales: Tensor, padded_rows: int, block: int) -> Tensor:
    """codes, scales: [groups, rows, ...], a group in one piece; padded_rows: of a group in what is returned."""
    (num_groups, rows, width), per_program = codes.shape, _UNPACK_COLUMNS // block
    pairs = padded_rows * width
    values = torch.empty(num_groups * padded_rows, 2 * width, dtype=torch.bfloat16, device=codes.device)
    grid = (-(-pairs // (_UNPACK_COLUMNS // 2)), num_groups)
    sizes = (rows * 2 * width // block, 2 * pairs // block, codes.stride(0) * 2 // block, scales.stride(0))
    arguments = (codes, scales, values, *sizes)
    launch(_UNPACK, grid, arguments, {"BLOCK": block, "GROUPS": per_program})
    return values


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy where kernels cannot load 16 bytes at a time."""
    x = x.contiguous()
    return x if cuda.gpu.aligned(x) else x.clone()


def _launch(kernel: Kernel, x: Tensor, blocks: RowBlocks, tensors: tuple[Tensor, ...]) -> None:
    """Launch a program for each of the part's blocks of rows and each `_COLUMNS` columns."""
    num_groups, groups = x.shape[1] // blocks.block, _COLUMNS // blocks.block
    grid = (-(-num_groups // groups) * blocks.num_blocks,)
    rows = (blocks.first, blocks.end, blocks.group_rows, blocks.blocks_per_group, blocks.first_block, blocks.num_blocks)
    constants = {"BLOCK": blocks.block, "FP32": x.dtype == torch.float32, "GROUPS": groups}
    launch(kernel, grid, (*tensors, num_groups, *rows), constants)


@functools.cache
def _pairs_of_codes(device: torch.device) -> Tensor:
    """FP32 [256, 2]: the values of both codes of every byte."""
    values = torch.tensor((*E2M1_VALUES, *(0.0 - v for v in E2M1_VALUES)))  # of either zero +0
    byte = torch.arange(256)
    return torch.stack((values[byte & 0xF], values[byte >> 4]), -1).to(device)
