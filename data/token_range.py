"""A stretch of a source as a source."""

from __future__ import annotations

import numpy as np

from data.bundle import TokenSource


class TokenRange:
    """The sequences [first, end) of `stream`; each of them counts as a document."""

    def __init__(self, stream: TokenSource, first: int, end: int) -> None:
        self.stream, self._first = stream, first
        self.num_documents = self.num_sequences = end - first
        borders = stream.sequence_offsets(first, end)
        self._start = int(borders[0])
        self.num_tokens = int(borders[-1]) - self._start

    def __str__(self) -> str:
        return f"{self.stream}, sequences [{self._first}, {self._first + self.num_sequences})"

    @property
    def parts(self) -> list[TokenSource]:
        """Itself."""
        return [self]

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stretch. Raises IndexError when the slice leaves it."""
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(f"tokens [{start}, {start + length}) are outside {self}, which has {self.num_tokens}")
        return self.stream.tokens(self._start + start, length)

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the sequences [first, last) begin in the stretch, and where the last one ends: int64
        [last - first + 1].

        Raises IndexError off the end.
        """
        if not 0 <= first <= last <= self.num_sequences:
            raise IndexError(f"sequences [{first}, {last}) are outside {self}, which has {self.num_sequences}")
        return self.stream.sequence_offsets(self._first + first, self._first + last) - self._start

    document_offsets = sequence_offsets

    def identity(self) -> str:
        """That of the source, and which sequences."""
        return f"range-1:{self._first}-{self._first + self.num_sequences} of {self.stream.identity()}"

    def same_identity(self, saved: str) -> bool:
        """Whether `saved` is of this very stretch."""
        return saved == self.identity()
