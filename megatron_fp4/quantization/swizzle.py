"""The order in which a Blackwell tensor core reads block scales: cuBLAS's 128 x 4 tiles of 512 bytes.

Scales [rows, columns] are padded with zeros to whole tiles of 128 rows x 4 columns. The tiles lie one after another,
those along the columns first; within a tile the four columns of a row are contiguous, and the rows r, r + 32, r + 64
and r + 96 follow each other (`SWIZZLE_32_4_4` in PyTorch; cuBLAS documentation, "1D block scaling factors layout"):

    byte of (r, c) = ((r // 128) * C / 4 + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4

C being the padded number of columns. It is the layout of NVFP4's E4M3 scales (k / 16 columns) and of MX formats' UE8M0
scales (k / 32 columns) alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 128, 4


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales [rows, columns] of a dtype of one byte, in tiles: the same dtype, flat, of `swizzled_size`."""
    _check(scales)
    rows, columns = scales.shape
    padding = (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)
    tiles = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = tiles.view(-1, 4, TILE_ROWS // 4, tiles.shape[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle_scales`: the first `rows` x `columns` of the tiles; ValueError for another size."""
    if swizzled.dim() != 1 or swizzled.numel() != swizzled_size(rows, columns):
        raise ValueError(
            f"unswizzle_scales: shape {tuple(swizzled.shape)} is not that of {rows} x {columns} scales in tiles, "
            f"({swizzled_size(rows, columns)},)"
        )
    tiles = swizzled.view(torch.uint8).view(-(-rows // TILE_ROWS), -1, TILE_ROWS // 4, 4, TILE_COLUMNS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(tiles.shape[0] * TILE_ROWS, -1)
    return padded[:rows, :columns].contiguous().view(swizzled.dtype)


def swizzled_size(rows: int, columns: int) -> int:
    """How many scales the tiles of [rows, columns] hold, padding included."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def _check(scales: Tensor) -> None:
    if scales.dim() != 2 or scales.element_size() != 1 or not scales.numel():
        raise ValueError(
            f"swizzle_scales: {scales.dtype} of shape {tuple(scales.shape)} is no matrix of one-byte block scales; "
            "pass E4M3 or UE8M0 scales [rows, k / block]"
        )
