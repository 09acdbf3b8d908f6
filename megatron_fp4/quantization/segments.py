"""Rows of a tensor in segments, each of which is quantized as a tensor of its own: the tokens of each expert.

A segment of an expert is what one micro-batch of one source rank sends it: it has its own tensor scale, its own groups
of 16 rows for transforms and blocks along tokens, and its own padding with zeros. So its codes are those of a lone
linear that gets these tokens alone, wherever the segment lies, and however many ranks share the experts.

Draws depend on a row's position in the global tensor [tokens * experts, features], of which a micro-batch computes the
rows of the chosen experts. Tokens are numbered over all micro-batches of a step (`Place`), so the key leaves the
micro-batch out. Within a segment tokens ascend. So two blocks of 16 rows begin at positions that are at least 16 apart,
and never share a draw, although MS-EDEN's draw belongs to 16 positions. Padding is numbered down from 2^40.

    counts  2, 0, 3    of rows, by segment              x  a0 a1 c0 c1 c2
    padded to 4        a0 a1 .  .  c0 c1 c2 .  .  .  .  .     then up to `padded_rows`, which the counts do not change

Nothing here waits for the device but `sizes`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

_PADDING_POSITIONS = 2**40
TILE_ROWS = 128  # of a grouped GEMM


@dataclass(frozen=True, eq=False)
class Segments:
    """counts: int64 [segments], of rows; each segment follows the one before. rows: of the tensor; the rest are zeros.

    positions: int64 [rows], where each row lies in the global tensor, ascending within a segment; None: rows follow
    each other from `first`. multiple: segments are padded to it. equal: all segments have this number of rows, a
    multiple of `multiple`; 0: any number. sources: consecutive segments that belong to one expert.
    """

    counts: Tensor
    rows: int
    positions: Tensor | None = None
    multiple: int = 1
    equal: int = 0
    sources: int = 1
    first: int = 0
    _padded_to: dict[int, Self] = field(default_factory=dict, repr=False)

    @classmethod
    def of_experts(cls, counts: Tensor, tokens: Tensor, first: int = 0, num_experts: int | None = None) -> Self:
        """The rows that experts compute.

        counts: int64 [experts] or [experts, sources]. tokens: int64 [rows], the number of each row's token among all
        micro-batches of the step (micro-batch * tokens of a micro-batch + token), ascending within a segment.
        first, num_experts: the first of these experts, and the number of all (None: there are no others).
        """
        experts, rows = len(counts), len(tokens)
        ends = counts.view(experts, -1).sum(1).cumsum(0)
        expert_of = torch.searchsorted(ends, torch.arange(rows, device=counts.device), right=True)
        positions = tokens * (num_experts or experts) + (first + expert_of)
        return cls(counts.flatten(), rows, positions, sources=counts.numel() // experts)

    @classmethod
    def of_equal(cls, count: int, num_segments: int, device: torch.device, first: int = 0) -> Self:
        """Segments of `count` rows each, whose positions follow each other from `first`: the matrices of a weight."""
        return cls(torch.full((num_segments,), count, device=device), count * num_segments, equal=count, first=first)

    def padded_to(self, multiple: int) -> Self:
        """The same segments, each padded to a multiple of `multiple` rows."""
        assert not self.equal or self.equal % multiple == 0, f"{self.equal} rows are not a multiple of {multiple}"
        if multiple not in self._padded_to:
            self._padded_to[multiple] = replace(self, multiple=multiple, _padded_to={})
        return self._padded_to[multiple]

    @functools.cached_property
    def by_expert(self) -> Self:
        """The same rows with one segment for each expert."""
        return replace(self, counts=self.counts.view(-1, self.sources).sum(1), sources=1, _padded_to={})

    @property
    def num_experts(self) -> int:
        return len(self.counts) // self.sources

    @functools.cached_property
    def padded_rows(self) -> int:
        """Rows with padding: as many as any counts of this sum can need."""
        if self.equal:
            return self.rows
        # A segment without rows needs no padding, and one with rows at most multiple - 1.
        return (self.rows + len(self.counts) * (self.multiple - 1)) // self.multiple * self.multiple

    @functools.cached_property
    def starts(self) -> Tensor:
        """int64 [segments + 1]: the first row of each segment, and the end of the last."""
        return _starts(self.counts)

    @functools.cached_property
    def padded_starts(self) -> Tensor:
        """`starts` with the padding."""
        if self.multiple == 1:
            return self.starts
        return _starts((self.counts + (self.multiple - 1)) // self.multiple * self.multiple)

    @functools.cached_property
    def segment_of(self) -> Tensor:
        """int64 [padded_rows]: each row's segment; the number of segments for rows after all of them."""
        row = torch.arange(self.padded_rows, device=self.counts.device)
        return torch.searchsorted(self.padded_starts[1:], row, right=True)

    @functools.cached_property
    def unpadded_row(self) -> Tensor:
        """int64 [padded_rows]: the row without padding; -1 for padding."""
        row, segment = torch.arange(self.padded_rows, device=self.counts.device), self.segment_of
        within = row - self.padded_starts[segment]
        counts = torch.cat((self.counts, self.counts.new_zeros(1)))
        return torch.where(within < counts[segment], self.starts[segment] + within, -1)

    def pad(self, x: Tensor) -> Tensor:
        """[rows, columns] -> [padded_rows, columns], with zeros as padding."""
        if self.padded_rows == self.rows or not self.rows:
            return x if self.padded_rows == self.rows else x.new_zeros(self.padded_rows, *x.shape[1:])
        padded = x.index_select(0, self.unpadded_row.clamp(min=0))
        return padded.masked_fill_((self.unpadded_row < 0)[:, None], 0)  # not a product: a row may have NaN

    @functools.cached_property
    def padded_positions(self) -> Tensor | int:
        """int64 [padded_rows], or the first row's position if the others follow."""
        if self.positions is None:
            return self.first
        if self.multiple == 1:
            return self.positions
        row = torch.arange(self.padded_rows, device=self.counts.device)
        padding = _PADDING_POSITIONS - self.multiple + row % self.multiple
        if not self.rows:
            return padding
        return torch.where(self.unpadded_row < 0, padding, self.positions[self.unpadded_row.clamp(min=0)])

    @functools.cached_property
    def counts_and_rest(self) -> Tensor:
        """int64 [segments + 1]: `counts`, and the rows after all segments."""
        return torch.cat((self.counts, self.rows - self.starts[-1:]))

    @functools.cached_property
    def tiles(self) -> tuple[Tensor, Tensor]:
        """Every segment's rows, and the rows after all of them, in tiles of at most `TILE_ROWS` rows of one segment:
        the number of each tile's segment, and its first row within it. As many tiles as any counts can need: beyond the
        last one, the first row is not below the count. int64 [tiles], contiguous."""
        counts = self.counts_and_rest
        starts = _starts((counts + (TILE_ROWS - 1)) // TILE_ROWS)
        tile = torch.arange(self.rows // TILE_ROWS + len(counts), device=counts.device)
        segment = torch.searchsorted(starts[1:], tile, right=True).clamp(max=len(counts) - 1)
        return segment, (tile - starts[segment]) * TILE_ROWS

    def counts_on_host(self) -> list[int]:
        """`counts` as numbers."""
        return [self.equal] * len(self.counts) if self.equal else self.counts.tolist()

    @functools.cached_property
    def sizes(self) -> list[tuple[slice, slice]]:
        """The rows of each segment without and with padding. Waits for the device, unless they are `equal`."""
        found, start, padded_start = [], 0, 0
        for count in self.counts_on_host():
            padded = -(-count // self.multiple) * self.multiple
            found.append((slice(start, start + count), slice(padded_start, padded_start + padded)))
            start, padded_start = start + count, padded_start + padded
        return found


def _starts(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))
