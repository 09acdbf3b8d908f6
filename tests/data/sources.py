"""Token sources that tests steer. Without torch, since loader workers import them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class Counted:
    """The stream 0, 1, 2, ..., one document.

    log: a file that gets a byte for each reading. fails_at: that token cannot be read, by `error`, None for a
    TwoArgumentsError; blocks: reading waits for ever, after the log.
    """

    num_tokens: int = 500
    log: Path | None = None
    fails_at: int | None = None
    error: Exception | None = None
    blocks: bool = False

    num_documents = 1

    @property
    def parts(self) -> list[Counted]:
        return [self]

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        return np.array([0, self.num_tokens])[first : last + 1]

    def tokens(self, start: int, length: int) -> np.ndarray:
        if self.log is not None:
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, b"+")
            os.close(descriptor)
        while self.blocks:
            time.sleep(60)
        if self.fails_at is not None and start <= self.fails_at < start + length:
            raise self.error or TwoArgumentsError("this", "that")
        return np.arange(start, start + length)

    def readings(self) -> int:
        """How many readings there were, by the log."""
        return self.log.stat().st_size if self.log is not None and self.log.exists() else 0

    def identity(self) -> str:
        return f"counted {self.num_tokens}"


class TwoArgumentsError(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")
