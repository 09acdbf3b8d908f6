"""Positions of tokens: the documents of training rows, the new tokens in generation, and RoPE.

With `data.documents=masked` no token sees another document of its row: attention is limited to the document, Mamba-2's
state and convolution restart at its first token, and positions (RoPE) count from there.

    numbers      int32 [b, s]        Mamba-2's scan and convolution, plain and fused (the kernels' `seq_idx`)
    positions    int64 [b, s]        RoPE: the position of a token in its document
    begins, ends int32 [b, s]        attention in tiles: the document's first token, and the token after its last one
    boundaries   int32 [n + 1]       FlashAttention: where documents begin among the b * s tokens, and b * s
    mask         bool [b, 1, s, s]   attention in plain PyTorch

Each is computed when it is first used, once for all blocks. Rows are independent samples: a document that continues
from one row into the next counts as two.

Shapes: b batch, s sequence (in generation: columns), n documents in all rows together, h heads, d head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

_CONV_CHUNK = 64  # tokens per chunk of causal-conv1d's kernel for channels as the inner dimension


class _Positions:
    """Tokens with known positions. RoPE's tables for these are computed once for all blocks."""

    positions: Tensor  # int64 [b, s]

    def __init__(self) -> None:
        self._tables: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}

    def rope_tables(self, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles of every token, FP32 [b, s, head_dim / 2]."""
        if (head_dim, base) not in self._tables:
            self._tables[head_dim, base] = rope_at(self.positions, head_dim, base)
        return self._tables[head_dim, base]


class Documents(_Positions):
    """numbers_bs: int32, the number of each token's document; not negative, and ascending in a row.

    count: number of documents in all rows together; without it, computing `boundaries` is a host sync.
    """

    def __init__(self, numbers_bs: Tensor, count: int | None = None) -> None:
        super().__init__()
        assert numbers_bs.dtype == torch.int32 and numbers_bs.ndim == 2, "kernels need int32 [batch, sequence]"
        # causal-conv1d's forward kernel always reads the numbers of a complete last chunk, even after the end of the
        # last row (its issue 67). It does not use those, but their memory must exist.
        extra = -numbers_bs.shape[1] % _CONV_CHUNK
        flat = F.pad(numbers_bs.flatten(), (0, extra)) if extra else numbers_bs.contiguous()
        self.numbers = flat[: numbers_bs.numel()].view(numbers_bs.shape) if extra else flat
        self._count = count

    @cached_property
    def begins(self) -> Tensor:
        """int32 [b, s], the index in its row of the first token of each token's document."""
        # Rows ascend, so the first index with a number is the beginning of its document.
        return torch.searchsorted(self.numbers, self.numbers, out_int32=True)

    @cached_property
    def ends(self) -> Tensor:
        """int32 [b, s], the index in its row after the last token of each token's document."""
        return torch.searchsorted(self.numbers, self.numbers, out_int32=True, right=True)

    @cached_property
    def positions(self) -> Tensor:  # type: ignore[override]
        """int64 [b, s], from 0 in each document."""
        return torch.arange(self.numbers.shape[1], device=self.numbers.device) - self.begins

    @cached_property
    def boundaries(self) -> Tensor:
        """int32 [n + 1], ascending from 0 to b * s."""
        # The index of each token's document among those of all rows. `nonzero` instead of a search would be a sync.
        index = (self.positions == 0).flatten().cumsum(0) - 1
        count = int(index[-1]) + 1 if self._count is None else self._count
        return torch.searchsorted(index, torch.arange(count + 1, device=index.device), out_int32=True)

    @cached_property
    def mask(self) -> Tensor:
        """bool [b, 1, s, s]: whether a query (row) sees a key (column)."""
        same = self.numbers[:, None, :, None] == self.numbers[:, None, None, :]
        return same.tril_()


class NewTokens(_Positions):
    """The new tokens of a call in generation. before: the number of earlier tokens of each row.

    counts: int64 [b], how many of the `length` columns of each row are tokens; the others are padding. positions: int64
    [b, s], the position of each token in its text. valid: bool [b, s], false for padding. last: int64 [b], the index of
    each row's last token among the b * s columns (without tokens, its first). end: the longest text's length.
    """

    def __init__(self, before: Sequence[int], counts: Sequence[int], length: int, device: torch.device) -> None:
        super().__init__()
        self.length, self.end = length, max(b + n for b, n in zip(before, counts, strict=True))
        # One tensor, so one copy to the device.
        before_b, self.counts = torch.tensor([before, counts], dtype=torch.int64, device=device)
        column = torch.arange(length, device=device)
        self.positions = before_b[:, None] + column
        self.valid = column < self.counts[:, None]
        self.last = torch.arange(len(counts), device=device) * length + (self.counts - 1).clamp_(min=0)


@functools.lru_cache(maxsize=4)
def rope_tables(sequence_length: int, head_dim: int, base: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """RoPE (arXiv:2104.09864): cosine and sine of every angle, FP32 [sequence, head_dim / 2].

    angle[position, i] = position * base^(-2 i / head_dim), in radians. The tables are cached: do not write to them.
    """
    return rope_at(torch.arange(sequence_length, device=device), head_dim, base)


def rope_at(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """`rope_tables` of given `positions` (int64, any shape): FP32 [*positions, head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = positions.to(torch.float32)[..., None] * base**-exponent
    return angle.cos(), angle.sin()


def apply_rope(x_bshd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) by the angle of its position. Computed in the tables' dtype, returned in x's.

    cos_sd, sin_sd: [sequence, head_dim / 2] for all rows, or [batch, sequence, head_dim / 2].
    """
    first, second = x_bshd.to(cos_sd.dtype).chunk(2, -1)
    cos, sin = cos_sd.unsqueeze(-2), sin_sd.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_bshd.dtype)
