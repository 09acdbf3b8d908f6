"""Streams for tests: the token at place i is `first` + i, so that a token says where it lies. No torch, since loader
workers import them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

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


class SteeredStream(CountingStream):
    """One document of 500 tokens.

    log: a file that gets a byte for each reading. fails_at: that token cannot be read, by `error`. blocks: reading
    waits for ever, after the log.
    """

    def __init__(
        self,
        log: Path | None = None,
        fails_at: int | None = None,
        error: Exception | None = None,
        blocks: bool = False,
    ) -> None:
        super().__init__([500])
        self.log, self.fails_at, self.error, self.blocks = log, fails_at, error, blocks

    def tokens(self, start: int, length: int) -> np.ndarray:
        if self.log is not None:
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, b"+")
            os.close(descriptor)
        while self.blocks:
            time.sleep(60)
        if self.error is not None and self.fails_at is not None and start <= self.fails_at < start + length:
            raise self.error
        return super().tokens(start, length)

    def readings(self) -> int:
        """How many readings there were, by the log."""
        return self.log.stat().st_size if self.log is not None and self.log.exists() else 0


class SlowStream(CountingStream):
    """Documents of 3 tokens, each read in so many seconds. log: a file that gets a byte for each time that more reads
    are under way than ever. fails_at: that token cannot be read."""

    lock, under_way, most = threading.Lock(), 0, 0

    def __init__(self, log: Path, seconds: float, fails_at: int = -1) -> None:
        super().__init__([3] * 1000)
        self.log, self.seconds, self.fails_at = log, seconds, fails_at

    def tokens(self, start: int, length: int) -> np.ndarray:
        of = SlowStream
        with of.lock:
            of.under_way += 1
            if of.under_way > of.most:
                of.most = of.under_way
                self.log.write_bytes(b"+" * of.most)
        time.sleep(self.seconds)
        with of.lock:
            of.under_way -= 1
        if start <= self.fails_at < start + length:
            raise ValueError(f"token {self.fails_at} cannot be read")
        return super().tokens(start, length)
