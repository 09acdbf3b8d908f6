"""The samples of one source: sample k, for any k, is a pure function of (seed, source name, order, k).

An epoch visits every window of the source once, in one of the orders of `orders.py`; k beyond it goes on to the next
epoch, which has another order. Unlike Megatron's order this one does not depend on how long the run is.

A source may get more files while a run is under way. Then what its present epoch has left and the windows of the new
files, evenly mixed, are one epoch: nothing of it comes twice and nothing is left out. After that come epochs over all.
The checkpoint keeps when how many files there were (`Growth`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from data.bundle import TokenSource, check_ids
from data.concatenation import Concatenation
from data.orders import DocumentOrder, Order, Window, WindowOrder, num_windows

ORDERS: dict[str, type[DocumentOrder | WindowOrder]] = {"documents": DocumentOrder, "windows": WindowOrder}


class Samples(Protocol):
    """The samples of one source by ordinal, as loader, fingerprint and plan ask for them. SampleSource says what each
    member is; a wrapper such as fim.FillInTheMiddle has them too."""

    @property
    def name(self) -> str: ...
    @property
    def stream(self) -> TokenSource: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def order(self) -> str: ...
    @property
    def num_samples(self) -> int: ...
    def epochs(self, sample: int) -> float: ...
    def sample(self, sample: int) -> np.ndarray: ...
    def sample_and_documents(self, sample: int) -> Window: ...
    def description(self) -> dict[str, Any]: ...
    def replaces(self, saved: Mapping[str, Any]) -> str | None: ...
    def grown(self, growth: Sequence[Growth]) -> Samples: ...


class Growth(NamedTuple):
    """From sample `sample` of a source on it has `files` files."""

    sample: int
    files: int


class Place(NamedTuple):
    """Where a sample is: `position` of `epoch` of an order."""

    order: Order
    epoch: int
    position: int


class _Stage(Protocol):
    """A source between two growths."""

    def place(self, sample: int) -> Place: ...

    def epochs(self, sample: int) -> float:
        """How many epochs the samples [0, sample) are."""

    def left(self, sample: int) -> int:
        """How many samples its present epoch has from `sample` on."""


class _Epochs:
    """One epoch after the other, from sample `first` on, after `epochs` earlier ones."""

    def __init__(self, order: Order, first: int = 0, epochs: int = 0) -> None:
        self._order, self._first, self._epochs = order, first, epochs

    def place(self, sample: int) -> Place:
        epoch, position = divmod(sample - self._first, self._order.num_windows)
        return Place(self._order, self._epochs + epoch, position)

    def epochs(self, sample: int) -> float:
        return self._epochs + (sample - self._first) / self._order.num_windows

    def left(self, sample: int) -> int:
        return self._order.num_windows - (sample - self._first) % self._order.num_windows


class _Joined:
    """What an epoch had left when files were added at sample `first`, mixed with these; then epochs over all files."""

    def __init__(self, before: _Stage, first: int, added: Order, all_files: Order) -> None:
        self._before, self._first, self._added = before, first, added
        self._old = before.left(first)
        self._mixed = self._old + added.num_windows
        self._began = before.epochs(first)
        self._after = _Epochs(all_files, first + self._mixed, int(self._began) + 1)

    def place(self, sample: int) -> Place:
        position = sample - self._first
        if position < 0:
            return self._before.place(sample)
        if position >= self._mixed:
            return self._after.place(sample)
        old = position * self._old // self._mixed  # of those before
        if (position + 1) * self._old // self._mixed > old:
            return self._before.place(self._first + old)
        return Place(self._added, 0, position - old)

    def epochs(self, sample: int) -> float:
        if sample < self._first:
            return self._before.epochs(sample)
        if sample - self._first >= self._mixed:
            return self._after.epochs(sample)
        return self._began + (int(self._began) + 1 - self._began) * (sample - self._first) / self._mixed

    def left(self, sample: int) -> int:
        position = sample - self._first
        if position < 0:
            return self._before.left(sample)
        return self._after.left(sample) if position >= self._mixed else self._mixed - position


class SampleSource:
    """A named token stream cut into shuffled samples.

    vocab_size is the model's: a token id beyond it is refused here, with the source's name, rather than in an
    embedding kernel. order: a key of ORDERS. growth: when it got its files, if that was not at the beginning.

    Raises ValueError for a bad seq_length or order, a stream shorter than one sample, or a growth that does not end
    with all its files.
    """

    def __init__(
        self,
        name: str,
        stream: TokenSource,
        seq_length: int,
        seed: int,
        vocab_size: int,
        order: str = "documents",
        growth: Sequence[Growth] = (),
    ) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length must be positive, got {seq_length}")
        if order not in ORDERS:
            raise ValueError(f"data.order={order} is not known; choose one of {', '.join(ORDERS)}")
        self.name = name
        self.stream = stream
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        self.order = order
        self.growth = [Growth(*entry) for entry in growth] or [Growth(0, len(stream.parts))]
        self.num_samples = num_windows(stream.num_tokens, seq_length)
        if self.num_samples == 0:
            raise ValueError(
                f"source {name!r} ({stream}) has {stream.num_tokens} tokens, fewer than one sample "
                f"of seq_length + 1 = {seq_length + 1}; shorten the sequence or add text"
            )
        if self.growth[0].sample != 0 or self.growth[-1].files != len(stream.parts):
            raise ValueError(f"source {name!r} has {len(stream.parts)} files, and the history {self.growth}")
        self._stage = self._grow()

    def _grow(self) -> _Stage:
        first, *later = self.growth
        stage: _Stage = _Epochs(self._order_of(0, first.files))
        files = first.files
        for growth in later:
            added, everything = self._order_of(files, growth.files), self._order_of(0, growth.files)
            stage, files = _Joined(stage, growth.sample, added, everything), growth.files
        return stage

    def _order_of(self, first: int, end: int) -> Order:
        """The order of its files [first, end)."""
        # repr() keeps a name with a separator in it from colliding with another (seed, name, epoch).
        key = f"{self.seed}/{self.name!r}"
        whole = (first, end) == (0, len(self.stream.parts))
        stream = self.stream if whole else Concatenation(self.stream.parts[first:end])
        if (first, end) != (0, self.growth[0].files):
            key += f"/files {first} to {end}"
        return ORDERS[self.order](stream, self.seq_length, key)

    def grown(self, growth: Sequence[Growth]) -> SampleSource:
        """The same with another history."""
        return SampleSource(self.name, self.stream, self.seq_length, self.seed, self.vocab_size, self.order, growth)

    def place(self, sample: int) -> Place:
        """Where sample k is. Raises IndexError for a negative k."""
        if sample < 0:
            raise IndexError(f"sample {sample} of source {self.name!r} is negative")
        return self._stage.place(sample)

    def epochs(self, sample: int) -> float:
        """How often the samples [0, sample) have gone through the source."""
        return self._stage.epochs(sample)

    def sample(self, sample: int) -> np.ndarray:
        """Sample k of the source over the whole run: int64 [seq_length + 1].

        Raises ValueError for a token id outside the model's vocabulary.
        """
        return self._window(sample, documents=False).tokens

    def sample_and_documents(self, sample: int) -> Window:
        """`sample`, and int32 [seq_length + 1]: which document of the sample each token belongs to, from 0."""
        return self._window(sample, documents=True)

    def _window(self, sample: int, documents: bool) -> Window:
        order, epoch, position = self.place(sample)
        tokens, numbers = order.window(epoch, position, documents)
        tokens = tokens.astype(np.int64, copy=False)
        check_ids(f"source {self.name!r}", self.stream, tokens, self.vocab_size)
        return Window(tokens, numbers)

    def description(self) -> dict[str, Any]:
        """What a checkpoint keeps to recognise this source: tokens and identity of each file, wherever it lies, and
        from which sample on it had how many of them."""
        return described(self.stream.parts, self.growth)

    def replaces(self, saved: Mapping[str, Any]) -> str | None:
        """What of a checkpoint's `description` this source does not have any more, in words.

        More files behind those that it had replace nothing.
        """
        return replaced_file(self.stream.parts, saved["files"])


def described(parts: Sequence[TokenSource], growth: Sequence[Growth]) -> dict[str, Any]:
    """What a checkpoint keeps of a source's files: JSON."""
    return {
        "files": [[part.num_tokens, part.identity()] for part in parts],
        "growth": [list(entry) for entry in growth],
    }


def replaced_file(parts: Sequence[TokenSource], files: Sequence[Sequence[Any]]) -> str | None:
    """The first of a checkpoint's files (tokens, identity) that the source does not have any more, in words."""
    for number, (num_tokens, identity) in enumerate(files):
        if number >= len(parts):
            return f"had {len(files)} files and now has {len(parts)}; files may only be added, at the end"
        part = parts[number]
        if part.num_tokens != num_tokens or not part.same_identity(identity):
            which = f", file {number + 1} of {len(files)}," if len(files) > 1 else ""
            return (
                f"({part}){which} had {num_tokens} tokens (identity {_short(identity)}) and now has "
                f"{part.num_tokens} (identity {_short(part.identity())}); new files go behind those that it had"
            )
    return None


def _short(identity: str) -> str:
    return identity.rpartition(":")[2][:12]
