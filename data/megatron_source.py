"""The samples of one source in Megatron's order, read through indices on disk that all processes map into memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.bundle import TokenSource, check_ids
from data.megatron_indices import DatasetIndices, split_range
from data.orders import Window, num_windows
from data.samples import Growth, described, replaced_file

_LOOK_BACK = 1 << 14


class Piece(NamedTuple):
    """`length` tokens of a sequence from `offset` on."""

    sequence: int
    offset: int
    length: int


class _Stored:
    """A folder of arrays, mapped into memory when first needed; loader workers get its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[type[_Stored], tuple[Path]]:
        return type(self), (self.folder,)

    def load(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")


class StoredDataset(_Stored):
    """The indices of a dataset."""

    @cached_property
    def indices(self) -> DatasetIndices:
        return DatasetIndices(*(self.load(name) for name in DatasetIndices._fields))

    @property
    def num_samples(self) -> int:
        return len(self.indices.shuffle_index)


class StoredBlend(_Stored):
    """The indices of a blend."""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(datasets, their samples) at each sample of the blend."""
        return self.load("dataset_index"), self.load("dataset_sample_index")

    @cached_property
    def counts(self) -> list[int]:
        """Of all samples, by dataset."""
        return self.load("counts").tolist()

    def at(self, position: int) -> tuple[int, int]:
        return int(self.arrays[0][position]), int(self.arrays[1][position])

    def before(self, position: int) -> list[int]:
        """How many samples of each dataset come before a position: looks back until all have been met."""
        datasets, samples = self.arrays
        counts: dict[int, int] = {}
        end = position
        while end > 0 and len(counts) < len(self.counts):
            start = max(0, end - _LOOK_BACK)
            for dataset, back in zip(*np.unique(datasets[start:end][::-1], return_index=True), strict=True):
                counts.setdefault(int(dataset), int(samples[end - 1 - back]) + 1)
            end = start
        return [counts.get(dataset, 0) for dataset in range(len(self.counts))]


class MegatronSource:
    """The samples of one source by ordinal, which counts through the indices of all phases in turn.

    Built by MegatronOrder. It has what a SampleSource has.
    """

    order = "megatron"

    def __init__(
        self,
        name: str,
        stream: TokenSource,
        seq_length: int,
        seed: int,
        vocab_size: int,
        split: Sequence[float] | None = None,
    ) -> None:
        self.name = name
        self.stream = stream
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        self._stored: list[StoredDataset] = []
        self._bases: list[int] = []
        self.num_ordinals = 0
        first, end = split_range(split, 0, stream.num_sequences)
        borders = stream.sequence_offsets(first, end)
        self.num_samples = num_windows(int(borders[-1] - borders[0]), seq_length)
        """Of an epoch."""

    def add(self, stored: StoredDataset) -> int:
        """Append the indices of a phase; returns the ordinal of their first sample."""
        base = self.num_ordinals
        self._stored.append(stored)
        self._bases.append(base)
        self.num_ordinals += stored.num_samples
        return base

    def pieces(self, ordinal: int) -> list[Piece]:
        """What sample `ordinal` is made of, in order. Raises IndexError outside the indices."""
        if not 0 <= ordinal < self.num_ordinals:
            raise IndexError(f"sample {ordinal} of source {self.name!r} is outside its {self.num_ordinals}")
        place = bisect_right(self._bases, ordinal) - 1
        document_index, sample_index, shuffle_index = self._stored[place].indices
        sample = int(shuffle_index[ordinal - self._bases[place]])
        (begin, offset), (end, end_offset) = sample_index[sample : sample + 2].tolist()
        pieces = []
        for position in range(begin, end + 1):
            sequence = int(document_index[position])
            if position == end:
                length = end_offset + 1 - offset
            else:
                borders = self.stream.sequence_offsets(sequence, sequence + 1)
                length = int(borders[1] - borders[0]) - offset
            if length:
                pieces.append(Piece(sequence, offset, length))
            offset = 0
        return pieces

    def sample(self, sample: int) -> np.ndarray:
        """Sample `sample`: int64 [seq_length + 1]. Raises ValueError for a token id outside the model's vocabulary."""
        return self._read(self.pieces(sample))

    def sample_and_documents(self, sample: int) -> Window:
        """`sample`, and int32 [seq_length + 1]: which sequence of the sample each token belongs to, from 0."""
        pieces = self.pieces(sample)
        numbers = np.repeat(np.arange(len(pieces), dtype=np.int32), [piece.length for piece in pieces])
        return Window(self._read(pieces), numbers)

    def _read(self, pieces: Sequence[Piece]) -> np.ndarray:
        starts = [int(self.stream.sequence_offsets(p.sequence, p.sequence + 1)[0]) + p.offset for p in pieces]
        parts = [self.stream.tokens(start, p.length) for start, p in zip(starts, pieces, strict=True)]
        tokens = np.concatenate(parts).astype(np.int64)
        assert len(tokens) == self.seq_length + 1, (self.name, len(tokens))
        check_ids(f"source {self.name!r}", self.stream, tokens, self.vocab_size)
        return tokens

    def epochs(self, sample: int) -> float:
        """How often so many of its samples go through the source."""
        return sample / self.num_samples

    def description(self) -> dict[str, Any]:
        """What a checkpoint keeps to recognise this source, as a SampleSource says it."""
        return described(self.stream.parts, [Growth(0, len(self.stream.parts))])

    def replaces(self, saved: Mapping[str, Any]) -> str | None:
        """What a checkpoint's `description` has otherwise, in words. More files are another order here."""
        if (now := len(self.stream.parts)) > len(saved["files"]):
            return f"had {len(saved['files'])} files and now has {now}; with data.order=megatron none can be added"
        return replaced_file(self.stream.parts, saved["files"])

    def grown(self, growth: Sequence[Any]) -> MegatronSource:
        """Itself: it has the files that it had."""
        assert len(growth) == 1
        return self
