"""4-bit weights in square blocks: quantized in parts by rows, gathered and kept as codes.

A weight [rows, columns] in 16x16 blocks (MXFP4: 32x32), rounded to nearest, has the same codes along both dimensions,
so one packed copy serves fprop and dgrad:

    codes   uint8 [rows, columns / 2]        two E2M1 codes in a byte, the even column in the low nibble
    scales  uint8 [rows, columns / block]    the block's E4M3 (MXFP4: UE8M0) scale, repeated for each of its rows

This takes 0.5625 (0.53) bytes an element, besides NVFP4's one FP32 scale of the tensor.

A *part* is a range of whole rows of the weight, which may start and end anywhere. Codes and scales of all parts,
concatenated, are those of the weight. To quantize its rows, a part also needs the largest magnitude of each of its
blocks, some of whose rows another rank may hold, and that of the tensor. So there are three passes:

    block_maxima     a part's rows -> the largest magnitude of each of its blocks, from these rows alone
                     (then ranks exchange the maxima of blocks that they share, and that of the tensor)
    quantize_rows    a part's rows and the maxima -> codes and scales
    unpack_rows      codes and scales -> `code * scale` in BF16, which is exact

By PyTorch or by the kernels of `kernels/square_blocks.py`, the numbers are bit for bit those of `encode_nvfp4` and
`encode_mxfp4` for the whole weight. Only where an MXFP4 block is not finite may codes differ, whose values are NaN.

A weight may consist of equal groups of rows (the heads of a packed projection). Each group is padded with zeros to
whole blocks, so that no block belongs to two groups. The padding is never stored; `unpack_rows` adds it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Kernel, launch
from megatron_fp4.quantization.microscaling import encode_mxfp4
from megatron_fp4.quantization.nvfp4 import encode_nvfp4
from megatron_fp4.quantization.rounding import E2M1_VALUES
from megatron_fp4.quantization.tensor import QuantizedTensor, block_amax, scale_values

Rows = TypeVar("Rows", int, Tensor)
BLOCKS = {"nvfp4": 16, "mxfp4": 32}

_U8, _I32, _F32 = torch.uint8, torch.int32, torch.float32
_MAXIMA = Kernel("square_blocks.maxima_kernel", types=(None, _F32, *([1] * 6)))
_QUANTIZE = Kernel("square_blocks.quantize_kernel", types=(None, _F32, _F32, _U8, _U8, *([1] * 6)))
_UNPACK = Kernel("square_blocks.unpack_kernel", types=(_U8, _U8, _I32, *([1] * 4)))
# Columns of a program.
_COLUMNS, _UNPACK_COLUMNS = 512, 2048


@dataclass(frozen=True)
class RowBlocks:
    """A part of a weight, and the blocks that its rows belong to. Blocks are numbered over the whole weight.

    format: a key of `BLOCKS`. group_rows, padded_group_rows: rows of a group without and with padding.
    first, end: the part's first row in the weight, and the one after its last.
    """

    format: str
    group_rows: int
    padded_group_rows: int
    first: int
    end: int

    @property
    def block(self) -> int:
        return BLOCKS[self.format]

    @property
    def blocks_per_group(self) -> int:
        return self.padded_group_rows // self.block

    def block_of(self, row: Rows) -> Rows:
        """The number of the block of `row`, or of each row."""
        return row // self.group_rows * self.blocks_per_group + row % self.group_rows // self.block

    @property
    def first_block(self) -> int:
        return self.block_of(self.first)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the part has rows of; 0 for a part without rows."""
        return self.block_of(self.end - 1) - self.first_block + 1 if self.end > self.first else 0

    def local_blocks(self, device: torch.device) -> Tensor:
        """int64 [rows]: the number of each row's block, counted from `first_block`."""
        return self.block_of(torch.arange(self.first, self.end, device=device)) - self.first_block


def block_maxima(
    x: Tensor, blocks: RowBlocks, out: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """FP32 [num_blocks, columns / block]: the largest magnitude of each block in the part's rows `x` [rows, columns].

    x is first rounded to `dtype`. out: a tensor for the result. A block with NaN has the maximum NaN.
    """
    shape = (blocks.num_blocks, x.shape[1] // blocks.block)
    if _by_kernels(x, dtype):
        maxima = torch.empty(shape, device=x.device) if out is None else out
        if blocks.num_blocks:
            x = aligned(x)
            _launch_on_rows(_MAXIMA, x, blocks, (x, maxima))
        return maxima
    maxima = torch.zeros(shape, dtype=torch.float32, device=x.device) if out is None else out.zero_()
    if not blocks.num_blocks:
        return maxima
    row_maxima = block_amax(x.to(dtype).to(torch.float32), (1, blocks.block))
    index = blocks.local_blocks(x.device)[:, None].expand_as(row_maxima)
    return maxima.scatter_reduce_(0, index, row_maxima, "amax")


def quantize_rows(
    x: Tensor,
    blocks: RowBlocks,
    maxima: Tensor,
    amax: Tensor | None,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the part's rows `x` [rows, columns], as described at the top of this file.

    x is first rounded to `dtype`. maxima: FP32, as from `block_maxima`, but of all rows of each block. amax: FP32
    0-dim, of the tensor; None for MXFP4. out: contiguous codes and scales, whose first rows are overwritten.
    """
    if out is None:
        rows, columns = x.shape
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
        out = codes, torch.empty(rows, columns // blocks.block, dtype=torch.uint8, device=x.device)
    if _by_kernels(x, dtype):
        if blocks.num_blocks:
            x = aligned(x)
            _launch_on_rows(_QUANTIZE, x, blocks, (x, maxima, maxima if amax is None else amax, *out))
        return out
    values, row_maxima = x.to(dtype).to(torch.float32), maxima[blocks.local_blocks(x.device)]
    encoded: QuantizedTensor
    if blocks.format == "nvfp4":
        encoded = encode_nvfp4(values, (16, 16), None, amax=amax, maxima=row_maxima)
    else:
        encoded = encode_mxfp4(values, (32, 32), None, maxima=row_maxima)
    for source, destination in zip((encoded.codes, encoded.scales.view(torch.uint8)), out, strict=True):
        destination[: len(source)].copy_(source)
    return out


def unpack_rows(codes: Tensor, scales: Tensor, blocks: RowBlocks) -> Tensor:
    """BF16 `code * scale` [padded rows, columns] of whole groups of rows, with zeros as padding.

    codes, scales: contiguous.
    """
    if cuda.gpu.available(codes.device):
        shape = (codes.shape[0] // blocks.group_rows, blocks.group_rows, -1)
        return unpack_by_kernel(codes.view(shape), scales.view(shape), blocks.padded_group_rows)
    elements = _values_of_bytes(codes.device)[codes.to(torch.int32)].flatten(-2)  # FP32 [rows, columns]
    if blocks.format == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
    factors = scale_values(scales)
    values = elements.unflatten(-1, (factors.shape[-1], -1)).mul_(factors[..., None]).flatten(-2).to(torch.bfloat16)
    padding = blocks.padded_group_rows - blocks.group_rows
    if not padding:
        return values
    return torch.nn.functional.pad(values.unflatten(0, (-1, blocks.group_rows)), (0, 0, 0, padding)).flatten(0, 1)


def _by_kernels(x: Tensor, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and cuda.gpu.available(x.device)


def unpack_by_kernel(codes: Tensor, scales: Tensor, padded_rows: int) -> Tensor:
    """BF16 `code * scale` [groups * padded_rows, columns] of codes [groups, rows, columns / 2] and scales [groups,
    rows, columns / block], each group contiguous. Blocks may also have one row."""
    num_groups, rows, width = codes.shape
    pairs, block = padded_rows * width, 2 * width // scales.shape[2]
    values = torch.empty(num_groups * padded_rows, 2 * width, dtype=torch.bfloat16, device=codes.device)
    grid = (-(-pairs // (_UNPACK_COLUMNS // 2)), num_groups)
    sizes = (rows * 2 * width // block, 2 * pairs // block, codes.stride(0) * 2 // block, scales.stride(0))
    launch(_UNPACK, grid, (codes, scales, values, *sizes), {"BLOCK": block, "BLOCKS": _UNPACK_COLUMNS // block})
    return values


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy if kernels cannot load 16 bytes of `x` at a time."""
    x = x.contiguous()
    return x if cuda.gpu.aligned(x) else x.clone()


def _launch_on_rows(kernel: Kernel, x: Tensor, blocks: RowBlocks, tensors: tuple[Tensor, ...]) -> None:
    """Launch a program for each of the part's blocks of rows and each `_COLUMNS` columns."""
    column_blocks, per_program = x.shape[1] // blocks.block, _COLUMNS // blocks.block
    grid = (-(-column_blocks // per_program) * blocks.num_blocks,)
    rows = (blocks.first, blocks.end, blocks.group_rows, blocks.blocks_per_group, blocks.first_block)
    constants = {"BLOCK": blocks.block, "FP32": x.dtype == torch.float32, "BLOCKS": per_program}
    launch(kernel, grid, (*tensors, column_blocks, *rows), constants)


@functools.cache
def _values_of_bytes(device: torch.device) -> Tensor:
    """FP32 [256, 2]: the values of both codes of every byte."""
    values = torch.tensor((*E2M1_VALUES, *(0.0 - v for v in E2M1_VALUES)))  # both zeros become +0
    byte = torch.arange(256)
    return torch.stack((values[byte & 0xF], values[byte >> 4]), -1).to(device)
