"""What every tokenizer does, whatever file it comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

END_OF_DOCUMENT = "<|endoftext|>"


class TextTokenizer(ABC):
    """Text to token ids and back. It pickles, so that a process that tokenizes gets its own.

    kind: how its file is written; name: where it came from, for errors and records. eod_token, eod_id: what ends a
    document. bos_token: what the file itself says begins one, None if it does not say.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, eod_token: str, eod_id: int, bos_token: str | None) -> None:
        self.name = name
        self.eod_token = eod_token
        self.eod_id = eod_id
        self.bos_token = bos_token

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest id of all tokens, special ones included, plus one: ids may have gaps."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin or end of a document, even where the text spells such a token out."""

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """What `encode_batch` gives, as int32 [its number of ids] each."""
        return [np.array(ids, dtype=np.int32) for ids in self.encode_batch(texts)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of a token by its name; None if there is no such token."""

    @abstractmethod
    def byte_lengths(self) -> np.ndarray | None:
        """Bytes of UTF-8 text that each token stands for: int64 [vocab_size]; 0 of special tokens and gaps.

        The tokens of a text sum to its bytes, or nearly so where the tokenizer changes text before it cuts it (spaces
        that it puts in front, unknown characters). None if a token alone does not say.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of what it was read from: equal fingerprints encode every text equally."""

    def id_of(self, token: str) -> int:
        """The id of a token by its name. Raises ValueError if there is no such token."""
        found = self.token_id(token)
        if found is None:
            raise ValueError(f"{self.name} has no token {token!r}; name one that it has")
        return found


def end_of_document(name: str, found: int | None, token: str, others: Sequence[str]) -> int:
    """The id `found` of the end-of-document token. Raises ValueError, with the other special tokens, if it is None."""
    if found is None:
        has = f" (its special tokens: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''})" if others else ""
        raise ValueError(f"{name} has no token {token!r} to end a document; name the one that it has{has}")
    return found
