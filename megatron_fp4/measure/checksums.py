"""Checksums of the bits of tensors, computed where the tensors are, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDTH = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """int64 [3] on the tensor's device, modulo 2**64: the sum of its bits as integers, and two sums in which each
    counts by its place. One number that changes always shows in the first, two that are exchanged in the others.

    Sums of integers are exact in any order. Large tensors are read twice and not copied.
    """
    bits = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    whole = bits.numel() // _WIDTH * _WIDTH
    rows, rest = bits[:whole].view(-1, _WIDTH), bits[whole:].to(torch.int64)
    of_columns, of_rows = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)
    return torch.stack(
        (
            of_rows.sum() + rest.sum(),
            _weighted(of_columns) + _weighted(rest),
            _weighted(of_rows) - rest.sum(),
        )
    )


def _weighted(numbers: Tensor) -> Tensor:
    """The sum of each number times its place, from 1."""
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
