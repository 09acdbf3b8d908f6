"""Streams of tokens, of which samples are cut: what every kind of data gives a run.

A sample is a piece of a stream of documents laid end to end. Its documents are numbered from 0, in the order in which
they come, a document of which the sample holds only a part included. Empty documents have no number.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:  # loader workers do without
    from data.tokenizer import TextTokenizer


class TokenSource(Protocol):
    """One stream of tokens: documents laid end to end, from which samples are cut (order.py).

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
        """A line for each source of each split, of more than 24 for the first ones: documents and tokens; and for each
        file that is there twice."""
        splits = {"train": self.train, "validation": self.validation}
        lines = [
            f"{split:<10} {name:<12} {source.num_documents:>10,} documents {source.num_tokens:>14,} tokens"
            + (f" in {len(source.parts):,} files" if len(source.parts) > 1 else "")
            for split, sources in splits.items()
            for name, source in list(sources.items())[:24]
        ]
        more = {split: len(sources) - 24 for split, sources in splits.items() if len(sources) > 24}
        lines += [f"{split:<10} and {count:,} more" for split, count in more.items()]
        return "\n".join([*lines, *self.repeated()])

    def repeated(self) -> list[str]:
        """A line for each file that two sources have, or training and validation, wherever its copies lie."""
        users: dict[str, dict[str, str]] = {}
        for key, sources in (("data.sources", self.train), ("data.validation", self.validation)):
            for name, source in sources.items():
                for part in source.parts:
                    users.setdefault(part.identity(), {})[f"{key}.{name}"] = str(part)
        found = []
        for of in (of for of in users.values() if len(of) > 1):
            is_held_out = len({user.split(".")[1] for user in of}) > 1
            why = "its loss is of text that is trained on" if is_held_out else "its epochs are counted for each"
            named = " and ".join(f"{user} ({path})" for user, path in list(of.items())[:3])
            found.append(f"warning: {named} read the same tokens; {why}")
        return found[:8] + ([f"warning: and {len(found) - 8} more files are read twice"] if len(found) > 8 else [])


def document_numbers(source: TokenSource, start: int, length: int) -> np.ndarray:
    """The number, from 0, of the document of each of the tokens [start, start + length) of a stream: int32 [length].

    Looks at O(log documents) documents to find the first, and at those that begin here.
    """

    def offset(document: int) -> int:
        return int(source.document_offsets(document, document)[0])

    begins = np.zeros(length, dtype=np.int32)
    # Documents that begin after the first token, in blocks, up to one that begins after the last.
    block, end = 16, source.num_documents
    document = bisect_right(range(end + 1), start, key=offset)
    while document < end:
        offsets = source.document_offsets(document, min(document + block, end)) - start
        begins[offsets[offsets < length]] = 1
        if offsets[-1] >= length:
            break
        document, block = document + block, 4 * block
    return begins.cumsum(dtype=np.int32)


_SCHEME = "parts-1"
# A store answers after tens of milliseconds; local disks answer several at a time, too.
_THREADS = 32

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """function of each item, in order, by threads that are gone afterwards. The first error is raised."""
    items = list(items)
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class Concatenation:
    """`parts`, one after the other, as one `TokenSource`; a part that is there twice counts twice.

    Documents and tokens are numbered through all parts. A lookup takes the logarithm of their number. Raises ValueError
    without parts.
    """

    def __init__(self, parts: Sequence[TokenSource]) -> None:
        if not parts:
            raise ValueError("a source of no files has no tokens; name at least one")
        self.parts = list(parts)
        """In the order of the stream."""
        self._token_starts = list(accumulate((part.num_tokens for part in parts), initial=0))
        self._document_starts = list(accumulate((part.num_documents for part in parts), initial=0))

    @property
    def num_tokens(self) -> int:
        return self._token_starts[-1]

    @property
    def num_documents(self) -> int:
        return self._document_starts[-1]

    def __str__(self) -> str:
        return f"{self.parts[0]} and {len(self.parts) - 1} more"

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream, across the borders of parts: integers [length].

        Raises IndexError when the slice leaves the stream, and what the parts raise.
        """
        end = start + length
        if start < 0 or length < 0 or end > self.num_tokens:
            raise IndexError(f"tokens [{start}, {end}) are outside {self}, which has {self.num_tokens}")
        part = self._part_of(self._token_starts, start)
        begin = self._token_starts[part]
        if end <= self._token_starts[part + 1]:
            return self.parts[part].tokens(start - begin, length)
        pieces: list[np.ndarray] = []
        while start < end:
            stop = min(end, self._token_starts[part + 1])
            pieces.append(self.parts[part].tokens(start - self._token_starts[part], stop - start))
            start, part = stop, part + 1
        return np.concatenate(pieces)

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin in the stream, and where the last one ends: int64 [last - first + 1].

        Raises IndexError off the end, and what the parts raise.
        """
        return self._offsets("documents", self._document_starts, first, last)

    @cached_property
    def _sequence_starts(self) -> list[int]:
        return list(accumulate((part.num_sequences for part in self.parts), initial=0))

    @property
    def num_sequences(self) -> int:
        return self._sequence_starts[-1]

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        """The same of sequences."""
        return self._offsets("sequences", self._sequence_starts, first, last)

    def _offsets(
        self, units: Literal["documents", "sequences"], starts: list[int], first: int, last: int
    ) -> np.ndarray:
        if not 0 <= first <= last <= starts[-1]:
            raise IndexError(f"{units} [{first}, {last}) are outside {self}, which has {starts[-1]}")
        part = self._part_of(starts, first)
        pieces: list[np.ndarray] = []
        while True:
            begin, end, of = starts[part], starts[part + 1], self.parts[part]
            stop = min(last, end)
            find = of.document_offsets if units == "documents" else of.sequence_offsets
            offsets = find(first - begin, stop - begin) + self._token_starts[part]
            if stop == last:
                return np.concatenate([*pieces, offsets]) if pieces else offsets
            # Its end is the beginning of the next part.
            pieces.append(offsets[:-1])
            first, part = stop, part + 1

    def identity(self) -> str:
        """`parts-1:` and a sha256 of the parts' sizes and identities in order."""
        digest = hashlib.sha256()
        for part, identity in zip(self.parts, self.part_identities(), strict=True):
            digest.update(f"{part.num_tokens} {identity}\n".encode())
        return f"{_SCHEME}:{digest.hexdigest()}"

    def part_identities(self) -> list[str]:
        """The identity of each part; of one that is there several times it is found once."""
        different = {id(part): part for part in self.parts}
        identities = dict(zip(different, side_by_side(lambda part: part.identity(), different.values()), strict=True))
        return [identities[id(part)] for part in self.parts]

    def _part_of(self, starts: list[int], position: int) -> int:
        """The part that has this token or document; the last one for the very end."""
        return min(bisect_right(starts, position), len(self.parts)) - 1


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
