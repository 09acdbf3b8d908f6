"""Token streams for tests, whose token at position i is `first` + i, and files of documents. Without torch, since
loader workers import this module."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data.indexed import IndexedDataset, write_dataset


def write(
    prefix: Path, documents: Iterable[Sequence[int] | np.ndarray], dtype: type[np.integer] = np.uint16
) -> IndexedDataset:
    """Write the documents as a pair of files and open it."""
    write_dataset(prefix, documents, dtype)
    return IndexedDataset(prefix)


def document(dataset: IndexedDataset, number: int) -> list[int]:
    """All tokens of one document."""
    start, end = dataset.document_offsets(number, number + 1).tolist()
    return dataset.tokens(start, end - start).tolist()


def write_random(prefix: Path, num_tokens: int = 500) -> IndexedDataset:
    """A dataset of random documents with random lengths; another name gives other documents."""
    rng = np.random.default_rng([num_tokens, *prefix.name.encode()])
    borders = np.cumsum(rng.integers(1, 60, num_tokens))
    return write(prefix, np.split(rng.integers(0, 1000, num_tokens), borders[borders < num_tokens]))


class CountingStream:
    """A token source of documents of the given lengths."""

    def __init__(self, lengths: Sequence[int], name: str = "stream", first: int = 0) -> None:
        self.offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self.document = np.repeat(np.arange(len(lengths)), lengths)
        self.num_documents, self.num_tokens = len(lengths), int(self.offsets[-1])
        self.name, self.first = name, first

    @property
    def parts(self) -> list[CountingStream]:
        return [self]

    def __str__(self) -> str:
        return self.name

    def tokens(self, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= self.num_tokens
        return np.arange(start, start + length) + self.first

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        assert 0 <= first <= last <= self.num_documents
        return self.offsets[first : last + 1]

    def identity(self) -> str:
        return f"{self.name}:{self.num_tokens}"


class SlowStream(CountingStream):
    """A stream that is slow or fails. log: a file that gets a + when a read begins and a - when it ends. seconds: the
    time of each read. error: raised by reads of the token at position fails_at."""

    def __init__(
        self,
        lengths: Sequence[int] = (500,),
        log: Path | None = None,
        seconds: float = 0.0,
        fails_at: int = -1,
        error: Exception | None = None,
    ) -> None:
        super().__init__(lengths)
        self.log, self.seconds, self.fails_at, self.error = log, seconds, fails_at, error

    def tokens(self, start: int, length: int) -> np.ndarray:
        self._note(b"+")
        time.sleep(self.seconds)
        self._note(b"-")
        if self.error is not None and start <= self.fails_at < start + length:
            raise self.error
        return super().tokens(start, length)

    def _note(self, what: bytes) -> None:
        if self.log is not None:
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, what)
            os.close(descriptor)

    def num_reads(self) -> int:
        """How many reads have begun, according to the log."""
        return self.log.read_bytes().count(b"+") if self.log is not None and self.log.exists() else 0


class PicklesOnce(Exception):
    """An exception that can be pickled on its way to the worker, but not on its way back."""

    def __reduce__(self) -> tuple[type[PicklesOnce], tuple[str]]:
        assert self.args != ("sent",)
        return PicklesOnce, ("sent",)
