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
from data.tokenizer import is_tokenizer, load_tokenizer
from data.tokenizers.interface import TextTokenizer

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


def fim_tokens(key: str, given: Any, tokenizer: TextTokenizer | None) -> FimTokens:
    """The settings of one source, with its tokens as the tokenizer knows them.

    given: `FimConfig` of the configuration's schema; key: what messages call it. Raises ValueError without a tokenizer,
    or for tokens that it does not have or that are not three.
    """
    if tokenizer is None:
        raise ValueError(f"{key} names its tokens, and there is no tokenizer that knows them; give data.tokenizer")
    names = {"prefix": given.prefix, "middle": given.middle, "suffix": given.suffix}
    ids = {part: tokenizer.token_id(token) for part, token in names.items()}
    for part, number in ids.items():
        if number is None:
            raise ValueError(
                f"{key}.{part}={names[part]} is no token of {tokenizer.name}; name one that it has, or add it there "
                "before the corpus is tokenized"
            )
    if len({*ids.values(), tokenizer.eod_id}) < 4:
        raise ValueError(f"{key}: prefix, middle, suffix and the end of a document have to be four tokens, not {names}")
    return FimTokens(given.rate, given.spm_rate, end=tokenizer.eod_id, **ids)  # type: ignore[arg-type]


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


def check_fim(data: Any) -> None:
    """Raise ValueError for sources in a configuration's `data.fim` from which no phase draws, or tokens that the
    tokenizer does not have."""
    if not data.fim:
        return
    if data.kind == "builtin":
        raise ValueError(
            f"data.fim={', '.join(data.fim)}: the tokenizer of the built-in corpus has no tokens for it; choose "
            "data=indexed with a tokenizer that has"
        )
    drawn = {name for phase in data.phases if phase.blend != "tokens" for name, weight in phase.blend.items() if weight}
    if any(phase.blend == "tokens" for phase in data.phases):
        drawn |= set(data.sources)
    for name in data.fim:
        if drawn and name not in drawn:
            raise ValueError(
                f"data.fim.{name} has no effect: no phase draws from {name}, only from {', '.join(sorted(drawn))}"
            )
    # A path that leads nowhere has its own message.
    tokenizer = load_tokenizer(data.tokenizer, data.eod_token) if is_tokenizer(data.tokenizer or "") else None
    for name, given in data.fim.items():
        if tokenizer is not None or data.tokenizer is None:
            fim_tokens(f"data.fim.{name}", given, tokenizer)


def with_fim(
    sources: Mapping[str, Samples], given: Mapping[str, Any], tokenizer: TextTokenizer | None
) -> dict[str, Samples]:
    """The sources, those in `given` (`data.fim` of a configuration) rearranged.

    Raises ValueError for a name that is no source, and as fim_tokens does.
    """
    missing = [name for name in given if name not in sources]
    if missing:
        raise ValueError(f"data.fim names {', '.join(missing)}, and the sources are {', '.join(sources)}")
    found = dict(sources)
    for name, settings in given.items():
        found[name] = FillInTheMiddle(sources[name], fim_tokens(f"data.fim.{name}", settings, tokenizer))
    return found
