"""Rows of a tensor in segments, each of which is quantized as a tensor of its own: the tokens of each expert.

A segment of an expert is what one micro-batch of one source rank sends it: it has its own tensor scale, its own groups
of 16 rows for transforms and blocks along tokens, and its own padding with zeros. So its codes are those of a lone
linear that gets these tokens alone, wherever the segment lies, and however many ranks share the experts.

Draws depend on a row's position in the global tensor [tokens * experts, features], of which a micro-batch computes the
rows of the chosen experts. Tokens are numbered over all micro-batches of a step (`Place`), so the key leaves the
micro-batch out. Within a segment tokens ascend. So two blocks of 16 rows begin at positions that are at least 16 apart,
and never share a draw, although MS-EDEN's draw belongs to 16 positions. Padding is numbered down from 2^40.

Segments are sorted by source, and those of a source by expert, as messages bring them.

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
    each other from `first`. multiple: segments are padded to it, a power of two. equal: all segments have this number
    of rows, a multiple of `multiple`; 0: any number. sources: how many segments each expert has. order: int64 [rows],
    which row of the tensor is at each place of these segments; None: the same.
    """

    counts: Tensor
    rows: int
    positions: Tensor | None = None
    multiple: int = 1
    equal: int = 0
    sources: int = 1
    order: Tensor | None = None
    first: int = 0
    _padded_to: dict[int, Self] = field(default_factory=dict, repr=False)

    @classmethod
    def of_experts(cls, counts: Tensor, positions: Tensor) -> Self:
        """The rows that experts compute.

        counts: int64 [experts] or [sources, experts]. positions: int64 [rows], token * number of all experts + expert;
        tokens are numbered over all micro-batches of the step (micro-batch * tokens of a micro-batch + token).
        """
        return cls(counts.flatten(), len(positions), positions, sources=counts.numel() // counts.shape[-1])

    @classmethod
    def of_equal(cls, count: int, num_segments: int, device: torch.device, first: int = 0) -> Self:
        """Segments of `count` rows each, whose positions follow each other from `first`: the matrices of a weight."""
        return cls(torch.full((num_segments,), count, device=device), count * num_segments, equal=count, first=first)

    def padded_to(self, multiple: int) -> Self:
        """The same segments, each padded to a multiple of `multiple` rows."""
        assert not self.equal or self.equal % multiple == 0, f"{self.equal} rows are not a multiple of {multiple}"
        assert multiple & (multiple - 1) == 0, f"{multiple} is not a power of two"
        if multiple not in self._padded_to:
            self._padded_to[multiple] = replace(self, multiple=multiple, _padded_to={})
        return self._padded_to[multiple]

    @functools.cached_property
    def by_expert(self) -> Self:
        """The same rows in another order, with one segment for each expert."""
        if self.sources == 1:
            return self
        assert self.multiple == 1 and self.positions is not None
        counts, segment = self.counts.view(self.sources, -1).sum(0), self.segment_of
        expert = segment % len(counts) + segment // len(self.counts) * len(counts)  # rows after all segments stay there
        order = expert.argsort(stable=True)
        positions = self.positions[order]
        return replace(self, counts=counts, positions=positions, sources=1, order=order, _padded_to={})

    def sort(self, x: Tensor) -> Tensor:
        """[rows, ...] as they come -> in the order of these segments."""
        return x if self.order is None else x[self.order]

    def unsort(self, x: Tensor) -> Tensor:
        """What `sort` was given."""
        return x if self.order is None else x[self._place]

    @functools.cached_property
    def _place(self) -> Tensor:
        assert self.order is not None
        return self.order.argsort()

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
    def _bounds(self) -> Tensor:
        """int64 [3, segments + 2]: the first row of each segment, and twice the end of the last; without padding, with
        it, and if segments were padded to tiles. All at once, because a launch takes the host longer than the GPU."""
        counts = torch.nn.functional.pad(self.counts, (1, 1))
        padded = ((counts + (multiple - 1)) & -multiple for multiple in (self.multiple, TILE_ROWS))
        return torch.stack((counts, *padded)).cumsum(1)

    @property
    def starts(self) -> Tensor:
        """int64 [segments + 1]: the first row of each segment, and the end of the last."""
        return self._bounds[0, :-1]

    @property
    def padded_starts(self) -> Tensor:
        return self._bounds[1, :-1]

    @functools.cached_property
    def _row(self) -> Tensor:
        return torch.arange(self.padded_rows, device=self.counts.device)

    @functools.cached_property
    def segment_of(self) -> Tensor:
        """int64 [padded_rows]: each row's segment; the number of segments for rows after all of them."""
        return torch.searchsorted(self.padded_starts[1:], self._row, right=True)

    @functools.cached_property
    def unpadded_row(self) -> Tensor:
        """int64 [padded_rows]: the row without padding; -1 for padding."""
        row = self._row + (self.starts - self.padded_starts)[self.segment_of]
        return row.masked_fill_(row >= self._bounds[0, 1:][self.segment_of], -1)

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
        first = _PADDING_POSITIONS - self.multiple
        padding, row = torch.arange(first, _PADDING_POSITIONS, device=self.counts.device), self.unpadded_row
        if not self.rows:
            return padding.repeat(self.padded_rows // self.multiple)
        row = row.view(-1, self.multiple)
        return torch.where(row < 0, padding, self.positions[row]).flatten()  # of -1 it takes the last one

    @functools.cached_property
    def tiles(self) -> tuple[Tensor, Tensor]:
        """Every segment's rows, and the rows after all of them, in tiles of at most `TILE_ROWS` rows of one segment:
        the number of each tile's segment, int64 [tiles], and the first row of each segment, int64 [segments + 1], if
        all tiles were full. As many tiles as any counts can need: those after the last one have no rows."""
        starts, count = self._bounds[2, :-1], self.rows // TILE_ROWS + len(self.counts) + 1
        row = torch.arange(0, count * TILE_ROWS, TILE_ROWS, device=starts.device)
        return torch.searchsorted(starts[1:], row, right=True), starts

    def counts_on_host(self) -> list[int]:
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
