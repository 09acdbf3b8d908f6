"""4-bit weights in square blocks on an NVIDIA GPU: the three passes of `square_blocks.py` by their kernels.

Where the kernels do not run, `cuda.gpu.available` says so, the reference does the same in PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization import cuda, square_blocks
from megatron_fp4.quantization.cuda import launch
from megatron_fp4.quantization.square_blocks import RowBlocks

# Columns that a program does side by side.
_COLUMNS, _UNPACK_COLUMNS = 512, 2048


def block_maxima(x: Tensor, blocks: RowBlocks, out: Tensor | None = None) -> Tensor:
    """`square_blocks.block_maxima` of BF16 rows, or of FP32 rows that count as rounded to BF16.

    out: FP32, to write it into.
    """
    if not cuda.gpu.available(x.device):
        made = square_blocks.block_maxima(x.to(torch.bfloat16), blocks)
        return made if out is None else out.copy_(made)
    shape = (blocks.num_blocks, x.shape[1] // blocks.block)
    maxima = torch.empty(shape, device=x.device) if out is None else out
    if blocks.num_blocks:
        x = _aligned(x)
        _launch("maxima", x, blocks, (x, maxima))
    return maxima


def quantize_rows(
    x: Tensor,
    blocks: RowBlocks,
    maxima: Tensor,
    amax: Tensor | None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`square_blocks.quantize_rows` of BF16 rows, or of FP32 rows that count as rounded to BF16.

    out: contiguous codes and scales, of which the first rows are written.
    """
    if not cuda.gpu.available(x.device):
        made = square_blocks.quantize_rows(x.to(torch.bfloat16), blocks, maxima, amax)
        if out is None:
            return made
        for part, whole in zip(made, out, strict=True):
            whole[: len(part)].copy_(part)
        return out
    num_groups = x.shape[1] // blocks.block
    if out is None:
        codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
        out = codes, torch.empty(x.shape[0], num_groups, dtype=torch.uint8, device=x.device)
    if blocks.num_blocks:
        x = _aligned(x)
        _launch("quantize", x, blocks, (x, maxima, maxima if amax is None else amax, *out))
    return out


def unpack_rows(codes: Tensor, scales: Tensor, blocks: RowBlocks) -> Tensor:
    """`square_blocks.unpack_rows` of contiguous codes and scales."""
    if not cuda.gpu.available(codes.device):
        return square_blocks.unpack_rows(codes, scales, blocks)
    groups = (codes.shape[0] // blocks.group_rows, blocks.group_rows, -1)
    return _unpacked(codes.view(groups), scales.view(groups), blocks.padded_group_rows, blocks.block)


def unpack_parts(codes: Tensor, scales: Tensor) -> Tensor:
    """BF16 `code * scale` [parts x rows, columns] of codes [parts, rows, columns / 2] and scales [parts, rows,
    columns / block] as in `square_blocks.py`, each part in one piece; blocks may be of single rows."""
    parts, rows, width = codes.shape
    block = 2 * width // scales.shape[2]
    if cuda.gpu.available(codes.device):
        return _unpacked(codes, scales, rows, block)
    form = next(name for name, size in square_blocks.BLOCKS.items() if size == block)
    whole = RowBlocks(form, parts * rows, parts * rows, 0, parts * rows)
    return square_blocks.unpack_rows(codes.flatten(0, 1), scales.flatten(0, 1), whole)


def _unpacked(codes: Tensor, scales: Tensor, padded_rows: int, block: int) -> Tensor:
    """codes, scales: [groups, rows, ...], a group in one piece; padded_rows: of a group in what is returned."""
    (num_groups, rows, width), per_program = codes.shape, _UNPACK_COLUMNS // block
    pairs = padded_rows * width
    values = torch.empty(num_groups * padded_rows, 2 * width, dtype=torch.bfloat16, device=codes.device)
    grid = (-(-pairs // (_UNPACK_COLUMNS // 2)), num_groups)
    sizes = (rows * 2 * width // block, 2 * pairs // block, codes.stride(0) * 2 // block, scales.stride(0))
    arguments = (codes, scales, values, *sizes)
    launch("triton_square_blocks.unpack_kernel", grid, arguments, {"BLOCK": block, "GROUPS": per_program})
    return values


def _aligned(x: Tensor) -> Tensor:
    """The kernels load 16 bytes at a time."""
    x = x.contiguous()
    return x if cuda.gpu.aligned(x) else x.clone()


def _launch(kernel: str, x: Tensor, blocks: RowBlocks, tensors: tuple[Tensor, ...]) -> None:
    """A program for each of the part's blocks of rows and each `_COLUMNS` columns."""
    num_groups, groups = x.shape[1] // blocks.block, _COLUMNS // blocks.block
    grid = (-(-num_groups // groups) * blocks.num_blocks,)
    rows = (blocks.first, blocks.end, blocks.group_rows, blocks.blocks_per_group, blocks.first_block, blocks.num_blocks)
    constants = {"BLOCK": blocks.block, "FP32": x.dtype == torch.float32, "GROUPS": groups}
    launch(f"triton_square_blocks.{kernel}_kernel", grid, (*tensors, num_groups, *rows), constants)
