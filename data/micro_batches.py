"""Which samples each of a rank's micro-batches holds, and reading them; without torch, since loader workers do that.

A micro-batch travels as int32 in one piece of memory, a slot: tokens [micro_batch_size, seq_length + 1], of which
inputs and targets are two views, and where documents are masked their numbers, as large. Widening to int64 is left to
the rank, so that a quarter of the bytes travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from data.phases import PhaseSchedule
from data.samples import SampleSource


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
        sources: Mapping[str, SampleSource],
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
        self._firsts = range(
            start_step * schedule.global_batch_size + dp_rank * micro_batch_size,
            end_step * schedule.global_batch_size,
            micro_batch_size * dp_size,
        )
        self._seq_length = next(iter(self._sources.values())).seq_length

    def __len__(self) -> int:
        return len(self._firsts)

    @property
    def slot_size(self) -> int:
        """How many int32 a slot holds."""
        return self._size * (self._seq_length + 1) * (2 if self._masked else 1)

    def index(self, number: int) -> int:
        """Which micro-batch of its global batch number `number` is."""
        return self._firsts[number] % self._schedule.global_batch_size // self._size

    def content(self, slot: np.ndarray) -> SlotContent:
        """`slot`, int32 [slot_size], as what it holds."""
        parts = slot.reshape(-1, self._size, self._seq_length + 1)
        return SlotContent(parts[0], parts[1] if self._masked else None)

    def read_into(self, number: int, slot: np.ndarray) -> None:
        """Read micro-batch `number` into `slot`, int32 [slot_size]. Raises what the sources raise."""
        tokens, documents = self.content(slot)
        for row in range(self._size):
            _, name, ordinal = self._schedule.locate(self._firsts[number] + row)
            source = self._sources[name]
            if documents is None:
                tokens[row] = source.sample(ordinal)
            else:
                tokens[row], documents[row] = source.sample_and_documents(ordinal)
