"""Means over groups of tokens and what is left without them, by the kernel of `kernels/group_means.py` on a GPU.

Where the kernel does not run, and for what it does not make (FP32, a last group that is shorter), the reference does
the same in PyTorch, on any device, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Kernel, launch
from megatron_fp4.quantization.group_means import group_means, without_means

_COLUMNS = 128  # of a program
_SPLIT = Kernel("group_means.split_kernel")


def split_means(x: Tensor, size: int, *, only_means: bool = False) -> tuple[Tensor, Tensor]:
    """`group_means` of x [tokens, features], and x `without_means`; or, with `only_means`, x itself for the second."""
    whole = x.shape[0] and x.shape[0] % size == 0
    if not (whole and x.dtype == torch.bfloat16 and cuda.gpu.available(x.device)):
        means = group_means(x, size)
        return means, x if only_means else without_means(x, means, size)
    x = x.contiguous()
    groups, features = x.shape[0] // size, x.shape[1]
    means, rest = x.new_empty(groups, features), x if only_means else torch.empty_like(x)
    grid = (groups * -(-features // _COLUMNS),)
    constants = {"SIZE": size, "COLUMNS": _COLUMNS, "REST": not only_means}
    launch(_SPLIT, grid, (x, means, rest, features, 1 / size), constants)
    return means, rest
