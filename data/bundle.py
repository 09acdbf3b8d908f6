"""What every kind of data gives a run: streams of tokens by source name, and the tokenizer that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data.tokenizers.interface import TextTokenizer


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
        """How many documents it was made of."""

    @property
    def num_sequences(self) -> int:
        """What Megatron shuffles: the sequences of the `.idx`, of which a document is one or more, or none if empty."""

    @property
    def parts(self) -> Sequence[TokenSource]:
        """The sources that it consists of, in order; itself alone if it is one piece."""

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream, integers [length], the same at every call."""

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin in the stream, and where the last one ends, in tokens: int64
        [last - first + 1], ascending."""

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        """The same of the sequences [first, last)."""

    def identity(self) -> str:
        """A name that two sources share only if they hold the same tokens; checkpoints keep it."""

    def same_identity(self, saved: str) -> bool:
        """Whether an identity that a checkpoint kept is this source's, also one of an older way of naming it."""


def check_ids(what: str, stream: TokenSource, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError for a token id outside the model's vocabulary, rather than in an embedding kernel.

    what: what messages call the source.
    """
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} ({stream}) holds token ids {low} to {high}, outside the model's vocabulary of {vocab_size}: it "
            "was made with another tokenizer; raise model.vocab_size or prepare the data again"
        )


@dataclass(frozen=True)
class DataBundle:
    """Opened sources by name, and the tokenizer that made them if it is known."""

    train: Mapping[str, TokenSource]
    validation: Mapping[str, TokenSource]
    tokenizer: TextTokenizer | None

    def summary(self) -> str:
        """A line for each source of each split, of more than 24 for the first ones: documents and tokens."""
        splits = {"train": self.train, "validation": self.validation}
        lines = [
            f"{split:<10} {name:<12} {source.num_documents:>10,} documents {source.num_tokens:>14,} tokens"
            + (f" in {len(source.parts):,} files" if len(source.parts) > 1 else "")
            for split, sources in splits.items()
            for name, source in list(sources.items())[:24]
        ]
        more = {split: len(sources) - 24 for split, sources in splits.items() if len(sources) > 24}
        return "\n".join([*lines, *(f"{split:<10} and {count:,} more" for split, count in more.items())])
