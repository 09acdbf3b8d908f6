"""Streams for tests of orders: the token at place i is `first` + i, so that a token says where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class CountingStream:
    """A token source of documents of the given lengths; counts what is read of it."""

    def __init__(self, lengths: Sequence[int], name: str = "stream", first: int = 0) -> None:
        self.offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self.document = np.repeat(np.arange(len(lengths)), lengths)
        self.num_documents, self.num_tokens = len(lengths), int(self.offsets[-1])
        self.name, self.first, self.reads = name, first, 0

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
        self.reads += last - first + 1
        return self.offsets[first : last + 1]

    def identity(self) -> str:
        return f"{self.name}:{self.num_tokens}"
