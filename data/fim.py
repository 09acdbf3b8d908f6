"""Fill-in-the-middle (Bavarian et al. 2022): some documents of a source are rearranged, so that a left-to-right model
learns to fill a gap between what is before and behind it.

A document's tokens are cut at two random places into prefix, middle and suffix, and become one of

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle      (the paper's variant 2, as Megatron has it)

It is done to samples as they are served (the paper's "context level"): what a sample has of a document is the document.
The token that ends a document stays at its end. Places are between tokens, so nothing is tokenized anew, and a model
that is to be asked with cuts within a word has not seen such.

Each rearranged document is three tokens longer, and a sample keeps its length: as many tokens are cut off its end, and
are not trained on in that epoch. Which documents, which form and where is a function of (seed, source, sample,
document): the same at any number of ranks and workers, and other in each epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from data.orders import Window
from data.samples import Growth, Samples

_WORD = 1 << 64


@dataclass(frozen=True)
class FimTokens:
    """How often, and the ids of its tokens.

    rate: of documents, from 0 to 1, that are rearranged; spm_rate: of these, the share in SPM. end: the token that ends
    a document.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    end: int


class FillInTheMiddle:
    """`source` with some documents of each sample rearranged; it has what the source has."""

    def __init__(self, source: Samples, tokens: FimTokens) -> None:
        self.source = source
        self.tokens = tokens
        self.name, self.stream, self.order = source.name, source.stream, source.order
        self.seq_length, self.seed, self.num_samples = source.seq_length, source.seed, source.num_samples

    def epochs(self, sample: int) -> float:
        """How often the samples [0, sample) have gone through the source."""
        return self.source.epochs(sample)

    def sample(self, sample: int) -> np.ndarray:
        """Sample k, rearranged: int64 [seq_length + 1]."""
        return self.sample_and_documents(sample).tokens

    def sample_and_documents(self, sample: int) -> Window:
        """`sample`, and int32 [seq_length + 1]: which document of the sample each token belongs to, from 0."""
        tokens, documents = self.source.sample_and_documents(sample)
        assert documents is not None
        return rearranged(tokens, documents, self.tokens, f"{self.seed}/{self.name!r}/{sample}")

    def description(self) -> dict[str, Any]:
        """The source's, and how it is rearranged."""
        return {**self.source.description(), "fim": asdict(self.tokens)}

    def replaces(self, saved: Mapping[str, Any]) -> str | None:
        """What of a checkpoint's `description` is otherwise now, in words."""
        if saved.get("fim") != asdict(self.tokens):
            return f"had {_spelled(saved.get('fim'))} and now has {_spelled(asdict(self.tokens))}"
        return self.source.replaces(saved)

    def grown(self, growth: Sequence[Growth]) -> FillInTheMiddle:
        """The same with another history."""
        return FillInTheMiddle(self.source.grown(growth), self.tokens)


def rearranged(tokens: np.ndarray, documents: np.ndarray, fim: FimTokens, key: str) -> Window:
    """A sample with some of its documents rearranged, and cut to its length.

    tokens: int64 [n]. documents: int32 [n], ascending from 0. key: what the draws are a function of.
    """
    if fim.rate == 0:
        return Window(tokens, documents)
    parts: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    borders = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(tokens)]
    for document, (start, end) in enumerate(pairwise(borders)):
        found = _document(tokens[start:end], fim, f"{key}/{document}")
        parts += found
        numbers.append(np.full(sum(map(len, found)), document, dtype=np.int32))
    return Window(np.concatenate(parts)[: len(tokens)], np.concatenate(numbers)[: len(tokens)])


def _document(tokens: np.ndarray, fim: FimTokens, key: str) -> list[np.ndarray]:
    """One document, in the pieces of what it becomes."""
    digest = hashlib.blake2b(key.encode(), digest_size=32, person=b"fim").digest()
    whether, spm, *places = (int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(4))
    ended = tokens[-1] == fim.end
    text = tokens[:-1] if ended else tokens
    if whether >= fim.rate * _WORD or not len(text):
        return [tokens]
    # Either place may be the beginning or the end, and both the same, so that any part may be empty.
    first, second = sorted(place * (len(text) + 1) >> 64 for place in places)
    before, gap, behind = text[:first], text[first:second], text[second:]
    prefix, middle, suffix = (np.array([token], dtype=tokens.dtype) for token in (fim.prefix, fim.middle, fim.suffix))
    if spm < fim.spm_rate * _WORD:
        pieces = [prefix, suffix, behind, middle, before, gap]
    else:
        pieces = [prefix, before, suffix, behind, middle, gap]
    return [*pieces, tokens[-1:]] if ended else pieces


def _spelled(fim: Mapping[str, Any] | None) -> str:
    return "no data.fim" if fim is None else "data.fim " + ", ".join(f"{key} {value}" for key, value in fim.items())
