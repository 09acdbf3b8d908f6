"""Codes and block scales of an operand side by side in one buffer: ranks send each other one message, not two.

A tensor of several ranks' slices is then [ranks, codes | scales], and codes and scales are views of it whose first
dimension is the rank; the kernels that unpack them read them where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def new_pair(
    codes: tuple[Sequence[int], torch.dtype], scales: tuple[Sequence[int], torch.dtype], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Uninitialized codes and scales of these shapes and dtypes in one buffer; both begin on 16 bytes if the codes are
    whole 16 bytes."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in (codes, scales)]
    buffer = torch.empty(1, sum(sizes), dtype=torch.uint8, device=device)
    first, second = split_messages(buffer, codes, scales)
    return first[0], second[0]


def message_of(codes: Tensor, scales: Tensor) -> Tensor:
    """uint8 [1, bytes]: contiguous codes and scales one behind the other, without a copy if `new_pair` made them."""
    first, second = (part.view(torch.uint8).flatten() for part in (codes, scales))
    size = first.numel() + second.numel()
    neighbours = second.storage_offset() == first.storage_offset() + first.numel()
    if neighbours and first.untyped_storage()._cdata == second.untyped_storage()._cdata:
        return first.as_strided((1, size), (size, 1))
    return torch.cat((first, second))[None]


def split_messages(
    messages: Tensor, codes: tuple[Sequence[int], torch.dtype], scales: tuple[Sequence[int], torch.dtype]
) -> tuple[Tensor, Tensor]:
    """Codes and scales [ranks, ...] as views of uint8 [ranks, bytes], of which each row is a `message_of`.

    codes, scales: shape and dtype on one rank.
    """
    parts, start = [], 0
    for shape, dtype in (codes, scales):
        end = start + math.prod(shape) * dtype.itemsize
        parts.append(messages[:, start:end].view(dtype).unflatten(1, tuple(shape)))
        start = end
    return parts[0], parts[1]
