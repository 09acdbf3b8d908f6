"""The norm of all gradients, with the same bits on any number of ranks (`parallel.reproducible`).

FSDP shards parameters by rows, so one rank has all elements of a row. It adds up their squares in an order that depends
only on the number of columns. The sum over rows is exact, so its order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_fp4.parallel.reproducible import tree_sum


@torch.no_grad()
def exact_norm_share(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """This rank's share of the squared L2 norm of all ranks' `gradients`, rounded so that a sum of shares is exact:
    0-dim FP64 on `device`, not finite if an element is not. A collective.

    As in reproducible summation (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013): a sum of
    FP64 integers below 2^53 is exact in any order. All ranks first compute the sum approximately. Rows are scaled by
    the power of two that brings this sum below 2^51, and rounded to integers. The last bits of the approximate sum
    depend on the mesh; the scale depends on it only if they cross a power of two, estimated once in 10^13 steps.
    """
    rows = row_squares(gradients, device)
    rough = rows.sum()
    dist.all_reduce(rough)
    power = (50 - torch.frexp(rough).exponent.to(torch.int64)).clamp(-1022, 1023)
    scale = ((power + 1023) << 52).view(torch.float64)  # 2^power; torch.ldexp may compute it in FP32
    return torch.where(rough.isfinite(), (rows * scale).round().sum() / scale, rough)


def row_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of every row of every gradient [rows, ...], FP64. Each element of a vector is a row."""
    empty = torch.zeros(0, device=device)
    of_vectors = torch.cat([empty, *(gradient.flatten() for gradient in gradients if gradient.ndim < 2)])
    matrices = [gradient.flatten(1) for gradient in gradients if gradient.ndim > 1]
    if device.type == "cuda":
        from megatron_fp4.training.exact_norm_triton import sum_row_squares

        of_matrices = [sum_row_squares(matrix) for matrix in matrices if matrix.numel()]
    else:
        of_matrices = [_sum_columns(matrix.double().square()) for matrix in matrices if matrix.numel()]
    return torch.cat([of_vectors.double().square(), *of_matrices])


def _sum_columns(squares: Tensor) -> Tensor:
    """[rows, columns] -> [rows], as a tree. The order of `Tensor.sum` depends on the number of rows."""
    columns = squares.shape[1]
    return tree_sum(pad(squares, (0, (1 << (columns - 1).bit_length()) - columns)).T)
