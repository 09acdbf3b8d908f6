"""Which samples each of a rank's micro-batches holds, and reading them; without torch, since loader workers do that.

A micro-batch travels as int32 in one piece of memory, a slot: tokens [micro_batch_size, seq_length + 1], of which
inputs and targets are two views, and where documents are masked their numbers, as large. Widening to int64 is left to
the rank, so that a quarter of the bytes travel.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from data.phases import PhaseSchedule, PhaseSpan
from data.samples import Samples


class SlotContent(NamedTuple):
    """Views of a slot, int32 [micro_batch_size, seq_length + 1]; documents is None where they are joined."""

    tokens: np.ndarray
    documents: np.ndarray | None


class RankMicroBatches:
    """The micro-batches of data-parallel rank dp_rank of dp_size in the steps [start_step, end_step), by number from 0.

    masked: with the numbers of their documents. Pickles as what it was made of, so `sources` has to pickle, and small:
    see `bundle.TokenSource`.
    """

    def __init__(
        self,
        schedule: PhaseSchedule,
        sources: Mapping[str, Samples],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        start_step: int,
        end_step: int,
        masked: bool = False,
    ) -> None:
        self._schedule = schedule
        self._sources = dict(sources)
        self._size = micro_batch_size
        self._masked = masked
        # The first sample of each micro-batch, for each phase that the steps touch.
        self._spans, self._firsts = [], []
        for span in schedule.spans:
            first, end = max(start_step, span.first_step), min(end_step, span.end_step)
            if first < end:
                samples = schedule.samples_before(first), schedule.samples_before(end)
                self._spans.append(span)
                self._firsts.append(
                    range(samples[0] + dp_rank * micro_batch_size, samples[1], micro_batch_size * dp_size)
                )
        self._starts = list(accumulate(map(len, self._firsts), initial=0))
        self._seq_length = next(iter(self._sources.values())).seq_length

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def slot_size(self) -> int:
        """How many int32 a slot holds."""
        return self._size * (self._seq_length + 1) * (2 if self._masked else 1)

    def index(self, number: int) -> int:
        """Which micro-batch of its global batch number `number` is."""
        span, first = self._place(number)
        return (first - span.start) % span.batch_size // self._size

    def sequence_length(self, number: int) -> int:
        """Of the sequences that the samples of number `number` are cut into."""
        return self._place(number)[0].sequence_length or self._seq_length

    def _place(self, number: int) -> tuple[PhaseSpan, int]:
        """Its phase, and its first sample."""
        part = bisect_right(self._starts, number) - 1
        return self._spans[part], self._firsts[part][number - self._starts[part]]

    def content(self, slot: np.ndarray) -> SlotContent:
        """`slot`, int32 [slot_size], as what it holds."""
        parts = slot.reshape(-1, self._size, self._seq_length + 1)
        return SlotContent(parts[0], parts[1] if self._masked else None)

    def read_into(self, number: int, slot: np.ndarray) -> None:
        """Read micro-batch `number` into `slot`, int32 [slot_size]. Raises what the sources raise."""
        tokens, documents = self.content(slot)
        _, first = self._place(number)
        for row in range(self._size):
            _, name, ordinal = self._schedule.locate(first + row)
            source = self._sources[name]
            if documents is None:
                tokens[row] = source.sample(ordinal)
            else:
                tokens[row], documents[row] = source.sample_and_documents(ordinal)
