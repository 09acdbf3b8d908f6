"""Softmax statistics and gradient of the loss over rows of logits on an NVIDIA GPU.

Each kernel reads the logits once; the gradient overwrites them. One program handles one row (a token), in blocks of
`_BLOCK` columns. All arithmetic is FP32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_OPTIONS = {"num_warps": 16, "enable_fp_fusion": True}


def row_statistics(logits_tv: Tensor, index_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum), and the logit at `index_t` (0 if outside) of each row, FP32 [tokens].

    logits_tv: BF16 or FP32 [tokens, vocab], contiguous. index_t: int64 [tokens].
    """
    rows, words = logits_tv.shape
    assert logits_tv.is_contiguous() and index_t.is_contiguous()
    statistics = torch.empty(3, rows, dtype=torch.float32, device=logits_tv.device)
    with torch.cuda.device(logits_tv.device):
        _statistics_kernel[(rows,)](logits_tv, index_t, statistics, rows, words, BLOCK=_BLOCK, **_OPTIONS)
    return statistics[0], statistics[1], statistics[2]


def to_gradient_(logits_tv: Tensor, index_t: Tensor, maximum_t: Tensor, total_t: Tensor) -> None:
    """Overwrite logits with exp(logit - maximum) / total - onehot(index)."""
    rows, words = logits_tv.shape
    assert logits_tv.is_contiguous() and maximum_t.is_contiguous() and total_t.is_contiguous()
    with torch.cuda.device(logits_tv.device):
        _gradient_kernel[(rows,)](logits_tv, index_t, maximum_t, total_t, words, BLOCK=_BLOCK, **_OPTIONS)


@triton.jit
def _statistics_kernel(logits_ptr, index_ptr, statistics_ptr, rows, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * words
    maximum = -float("inf")
    # One sum per lane of the block: only the end needs a sum over lanes.
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, words, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        logits = tl.load(start + columns, mask=columns < words, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(logits, 0))
        total = total * tl.exp(maximum - higher) + tl.exp(logits - higher)
        maximum = higher
    index = tl.load(index_ptr + row)
    target = tl.load(start + index, mask=(index >= 0) & (index < words), other=0.0).to(tl.float32)
    tl.store(statistics_ptr + row, maximum)
    tl.store(statistics_ptr + rows + row, tl.sum(total, 0))
    tl.store(statistics_ptr + 2 * rows + row, target)


@triton.jit
def _gradient_kernel(logits_ptr, index_ptr, maximum_ptr, total_ptr, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * words
    index = tl.load(index_ptr + row)
    maximum = tl.load(maximum_ptr + row)
    inverse = 1.0 / tl.load(total_ptr + row)
    for first in range(0, words, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < words
        logits = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.exp(logits - maximum) * inverse - tl.where(columns == index, 1.0, 0.0)
        tl.store(start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=mask)
