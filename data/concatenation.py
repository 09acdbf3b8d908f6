"""Several datasets in a row as one stream of tokens: a corpus of a thousand shards needs no merging."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeVar

import numpy as np

from data.bundle import TokenSource

_SCHEME = "parts-1"
# A store answers after tens of milliseconds; local disks answer several at a time, too.
_THREADS = 32

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """function of each item, in order, by threads that are gone afterwards. The first error is raised."""
    items = list(items)
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class Concatenation:
    """`parts`, one after the other, as one `TokenSource`; a part that is there twice counts twice.

    Documents and tokens are numbered through all parts. A lookup takes the logarithm of their number. Raises ValueError
    without parts.
    """

    def __init__(self, parts: Sequence[TokenSource]) -> None:
        if not parts:
            raise ValueError("a source of no files has no tokens; name at least one")
        self.parts = list(parts)
        """In the order of the stream."""
        self._token_starts = list(accumulate((part.num_tokens for part in parts), initial=0))
        self._document_starts = list(accumulate((part.num_documents for part in parts), initial=0))

    @property
    def num_tokens(self) -> int:
        return self._token_starts[-1]

    @property
    def num_documents(self) -> int:
        return self._document_starts[-1]

    def __str__(self) -> str:
        return f"{self.parts[0]} and {len(self.parts) - 1} more"

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream, across the borders of parts: integers [length].

        Raises IndexError when the slice leaves the stream, and what the parts raise.
        """
        end = start + length
        if start < 0 or length < 0 or end > self.num_tokens:
            raise IndexError(f"tokens [{start}, {end}) are outside {self}, which has {self.num_tokens}")
        part = self._part_of(self._token_starts, start)
        begin = self._token_starts[part]
        if end <= self._token_starts[part + 1]:
            return self.parts[part].tokens(start - begin, length)
        pieces: list[np.ndarray] = []
        while start < end:
            stop = min(end, self._token_starts[part + 1])
            pieces.append(self.parts[part].tokens(start - self._token_starts[part], stop - start))
            start, part = stop, part + 1
        return np.concatenate(pieces)

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin in the stream, and where the last one ends: int64 [last - first + 1].

        Raises IndexError off the end, and what the parts raise.
        """
        return self._offsets("documents", self._document_starts, first, last)

    @cached_property
    def _sequence_starts(self) -> list[int]:
        return list(accumulate((part.num_sequences for part in self.parts), initial=0))

    @property
    def num_sequences(self) -> int:
        return self._sequence_starts[-1]

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        """The same of sequences."""
        return self._offsets("sequences", self._sequence_starts, first, last)

    def _offsets(
        self, units: Literal["documents", "sequences"], starts: list[int], first: int, last: int
    ) -> np.ndarray:
        if not 0 <= first <= last <= starts[-1]:
            raise IndexError(f"{units} [{first}, {last}) are outside {self}, which has {starts[-1]}")
        part = self._part_of(starts, first)
        pieces: list[np.ndarray] = []
        while True:
            begin, end, of = starts[part], starts[part + 1], self.parts[part]
            stop = min(last, end)
            find = of.document_offsets if units == "documents" else of.sequence_offsets
            offsets = find(first - begin, stop - begin) + self._token_starts[part]
            if stop == last:
                return np.concatenate([*pieces, offsets]) if pieces else offsets
            # Its end is the beginning of the next part.
            pieces.append(offsets[:-1])
            first, part = stop, part + 1

    def identity(self) -> str:
        """`parts-1:` and a sha256 of the parts' sizes and identities in order."""
        digest = hashlib.sha256()
        for part, identity in zip(self.parts, self.part_identities(), strict=True):
            digest.update(f"{part.num_tokens} {identity}\n".encode())
        return f"{_SCHEME}:{digest.hexdigest()}"

    def part_identities(self) -> list[str]:
        """The identity of each part; of one that is there several times it is found once."""
        different = {id(part): part for part in self.parts}
        identities = dict(zip(different, side_by_side(lambda part: part.identity(), different.values()), strict=True))
        return [identities[id(part)] for part in self.parts]

    def same_identity(self, saved: str) -> bool:
        """Whether `saved`, of a checkpoint, is of this very list of parts."""
        return saved == self.identity()

    def _part_of(self, starts: list[int], position: int) -> int:
        """The part that has this token or document; the last one for the very end."""
        return min(bisect_right(starts, position), len(self.parts)) - 1
