"""What every kind of data gives a run: streams of tokens by source name, and the tokenizer that made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data.tokenizer import TextTokenizer


class TokenSource(Protocol):
    """One stream of tokens: documents laid end to end, from which samples are cut (`samples.py`).

    Loader workers get it by pickling, so what is large should be opened again rather than copied. `str()` of it says in
    error messages where the tokens come from, such as the path of a file.
    """

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""

    @property
    def num_documents(self) -> int:
        """How many documents it was made of; only shown to the user."""

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream, integers [length], the same at every call."""

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin in the stream, and where the last of them ends: int64
        [last - first + 1], ascending. `first` may be `last`: one offset."""

    def identity(self) -> str:
        """A name that two sources share only if they hold the same tokens; checkpoints keep it."""


@dataclass(frozen=True)
class DataBundle:
    """Opened sources by name, and the tokenizer that made them if it is known."""

    train: Mapping[str, TokenSource]
    validation: Mapping[str, TokenSource]
    tokenizer: TextTokenizer | None

    def summary(self) -> str:
        """One line for each split of each source: documents and tokens."""
        splits = {"train": self.train, "validation": self.validation}
        return "\n".join(
            f"{split:<10} {name:<12} {source.num_documents:>10,} documents {source.num_tokens:>14,} tokens"
            for split, sources in splits.items()
            for name, source in sources.items()
        )
