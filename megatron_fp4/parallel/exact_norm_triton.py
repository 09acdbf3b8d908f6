"""The kernel of `exact_norm_share` (reproducible.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 8, 512  # size of a tile: 32 sums in FP64 for each of 128 threads


def sum_row_squares(matrix: Tensor) -> Tensor:
    """[rows, columns], FP32 -> [rows], FP64. A row's sum does not depend on the other rows."""
    matrix = matrix.contiguous()
    sums = torch.empty(len(matrix), dtype=torch.float64, device=matrix.device)
    _sum_row_squares_kernel[(triton.cdiv(len(matrix), ROWS),)](
        matrix, sums, *matrix.shape, ROWS, COLUMNS, num_warps=4, enable_fp_fusion=False
    )
    return sums


# Alignment differs between ranks; a kernel specialized on it might have another order of sums.
@triton.jit(do_not_specialize=["x_ptr", "out_ptr", "num_rows", "num_columns"])
def _sum_row_squares_kernel(x_ptr, out_ptr, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    sums = tl.zeros([ROWS, COLUMNS], tl.float64)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (columns < num_columns)[None, :]
        x = tl.load(x_ptr + rows[:, None] * num_columns + columns[None, :], mask, 0.0).to(tl.float64)
        sums += x * x
    tl.store(out_ptr + rows, tl.sum(sums, 1), inside)
