"""The samples of one source: sample k, for any k, is a pure function of (seed, source name, order, k).

A sample is a window of seq_length + 1 tokens, which shares its last token with the first of the next, so that every
token but an epoch's first is a target exactly once an epoch, except what is left after the last whole window. Each
epoch visits every window once, in an order of its own, which is a function of (key, epoch) and needs no index on disk.
It does not depend on how long the run is.

`WindowOrder` cuts the stream as it lies: one read a sample, but a window's documents are neighbours in the corpus in
every epoch.

`DocumentOrder` shuffles the documents first, so that each epoch has other neighbours and other cuts. Up to 16,384
documents are shuffled at once. A larger corpus is cut into runs of equally many tokens, some thousand documents (a
document across a border becomes two); 16 runs, drawn over the whole corpus, make a group, and the documents of a group
are shuffled. The epoch's stream is its groups one after the other, and its windows are shuffled within the group where
they begin. Where a group begins is arithmetic, so only the index entries of the group in use are read.

A source may get more files during a run. Then what its epoch has left and the windows of the new files, evenly mixed,
are one epoch; after that come epochs over all files. The checkpoint keeps the samples from which on there were how many
files (`Growth`).
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data.indexed import Concatenation, TokenSource, check_ids, document_numbers, documents_after
from data.storage import in_turn, side_by_side

_NUM_ROUNDS = 6
_MASK = (1 << 64) - 1


Bits = TypeVar("Bits", int, np.ndarray)


def _mix(value: Bits) -> Bits:
    """The finalizer of splitmix64: every input bit reaches every output bit. 64 bits to 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A bijection of [0, size) chosen by `key`; equal (size, key) give equal permutations on every machine."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(key.encode("utf-8"), digest_size=8 * _NUM_ROUNDS).digest()
        self._round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where `index` goes."""
        assert 0 <= index < self.size, (index, self.size)
        value = self._feistel(index)
        while value >= self.size:
            value = self._feistel(value)
        return value

    def _feistel(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix((right + key) & _MASK) & self._half_mask)
        return (left << self._half_bits) | right


def shuffled(size: int, key: str) -> np.ndarray:
    """The numbers [0, size) sorted by a hash of each and of `key`, int64 [size]: for orders that are used whole."""
    seed = np.frombuffer(hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest(), dtype="<u8")
    # splitmix64: its state takes equal steps, its finalizer is a bijection, so no two numbers get the same hash.
    states = seed + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.argsort(_mix(states), kind="stable")


_GROUP_DOCUMENTS, _RUN_DOCUMENTS, _RUNS_IN_GROUP = 1 << 14, 1 << 10, 16


class Window(NamedTuple):
    """tokens: integers [seq_length + 1]. documents: int32 [seq_length + 1], the number of each token's document within
    the window, from 0; None if not asked for."""

    tokens: np.ndarray
    documents: np.ndarray | None


def num_windows(num_tokens: int, seq_length: int) -> int:
    """How many windows of seq_length + 1 tokens, overlapping by one, a stream of num_tokens holds."""
    return max(0, (num_tokens - 1) // seq_length)


# Samples of one epoch follow one another: the key of each source need not be hashed for each of them.
_permutation = lru_cache(maxsize=1024)(Permutation)


class WindowOrder:
    """The windows of the stream itself, shuffled; num_windows in an epoch."""

    def __init__(self, stream: TokenSource, seq_length: int, key: str) -> None:
        self.num_windows = num_windows(stream.num_tokens, seq_length)
        self._stream, self._seq_length, self._key = stream, seq_length, key

    def window(self, epoch: int, position: int, documents: bool) -> Window:
        """The window at `position` of an epoch, with its documents if so asked."""
        start = _permutation(self.num_windows, f"{self._key}/{epoch}")(position) * self._seq_length
        length = self._seq_length + 1
        numbers = document_numbers(self._stream, start, length) if documents else None
        return Window(self._stream.tokens(start, length), numbers)


_ONE_SHUFFLES = threading.Lock()


class DocumentOrder:
    """The shuffled windows of the stream of shuffled documents; num_windows in an epoch."""

    def __init__(self, stream: TokenSource, seq_length: int, key: str) -> None:
        self.num_windows = num_windows(stream.num_tokens, seq_length)
        self._stream, self._seq_length, self._key = stream, seq_length, key
        self._run = stream.num_tokens  # tokens
        if stream.num_documents > _GROUP_DOCUMENTS:
            self._run = -(-stream.num_tokens * _RUN_DOCUMENTS // stream.num_documents)
        self._num_runs = max(1, stream.num_tokens // self._run)  # whole ones; what is left goes to the last group
        self._num_groups = max(1, self._num_runs // _RUNS_IN_GROUP)

    def window(self, epoch: int, position: int, documents: bool) -> Window:
        """The window at `position` of an epoch, with its documents if so asked."""
        group = min(position * self._seq_length // (self._run * _RUNS_IN_GROUP), self._num_groups - 1)
        while position < self._first_window(group):
            group -= 1
        while position >= self._first_window(group + 1):
            group += 1
        first, end = self._first_window(group), self._first_window(group + 1)
        window = first + _permutation(end - first, f"{self._key}/{epoch}/windows {group}")(position - first)
        offset = window * self._seq_length - self._group_start(group)
        tokens, lengths = self._cut(epoch, group, offset, self._seq_length + 1)
        numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths) if documents else None
        return Window(tokens, numbers)

    def _group_start(self, group: int) -> int:
        """The token of the epoch's stream with which a group begins."""
        return self._stream.num_tokens if group == self._num_groups else group * _RUNS_IN_GROUP * self._run

    def _first_window(self, group: int) -> int:
        """The first window that begins in a group."""
        if group == self._num_groups:
            return self.num_windows
        return min(-(-self._group_start(group) // self._seq_length), self.num_windows)

    def _cut(self, epoch: int, group: int, offset: int, length: int) -> tuple[np.ndarray, list[int]]:
        """`length` tokens from `offset` of a group on, into the groups after it if need be; and how many tokens each
        document gives of them."""
        pieces: list[np.ndarray] = []
        left = length
        while left:
            with in_turn(_ONE_SHUFFLES):
                starts, ends = _shuffled_group(self, epoch, group)
            # Which, unlike numpy's search, does not hand Python's lock to another thread.
            first, last = bisect_right(ends, offset), bisect_left(ends, offset + left) + 1
            begin = int(ends[first - 1]) if first else 0
            for start, end in zip(starts[first:last].tolist(), ends[first:last].tolist(), strict=True):
                take = min(end - offset, left)
                if take:  # else a document without tokens
                    pieces.append(self._stream.tokens(start + offset - begin, take))
                    left -= take
                begin = offset = end
            group, offset = group + 1, 0
        return np.concatenate(pieces), list(map(len, pieces))

    def shuffle_group(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of a group in the order of an epoch: where each begins in the files, and where it ends in the
        group, int64 [documents] each."""
        begin, last = group * _RUNS_IN_GROUP, group + 1 == self._num_groups
        end = self._num_runs if last else begin + _RUNS_IN_GROUP
        runs = [_permutation(self._num_runs, f"{self._key}/{epoch}/runs")(place) for place in range(begin, end)]
        spans = [(run * self._run, (run + 1) * self._run) for run in runs]
        if last and self._num_runs * self._run < self._stream.num_tokens:
            spans.append((self._num_runs * self._run, self._stream.num_tokens))
        # Reads that wait for a disk or a store wait together.
        offsets = side_by_side(lambda span: _documents_within(self._stream, *span), spans)
        starts = np.concatenate([of[:-1] for of in offsets])
        lengths = np.concatenate([np.diff(of) for of in offsets])
        order = shuffled(len(starts), f"{self._key}/{epoch}/documents {group}")
        return starts[order], np.cumsum(lengths[order])


# Of all sources of a process, 300 kB each: every source of a blend has a group under way.
_shuffled_group = lru_cache(maxsize=512)(DocumentOrder.shuffle_group)


def _documents_within(stream: TokenSource, first: int, end: int) -> np.ndarray:
    """Where the documents begin that lie in the tokens [first, end), the first one cut there, and the end: int64."""
    if (first, end) == (0, stream.num_tokens):
        return stream.document_offsets(0, stream.num_documents)
    return np.concatenate([[first], documents_after(stream, first, end, 2 * _RUN_DOCUMENTS), [end]])


Order = WindowOrder | DocumentOrder
ORDERS: dict[str, type[Order]] = {"documents": DocumentOrder, "windows": WindowOrder}


class Growth(NamedTuple):
    """From sample `sample` of a source on it has `files` files."""

    sample: int
    files: int


class Place(NamedTuple):
    """Where a sample is: `position` of `epoch` of an order."""

    order: Order
    epoch: int
    position: int


class _Stage:
    """A source from sample `first` on, when it got files, until it gets more: first the windows that the epoch before
    has left, evenly mixed with those of the files that were added; then epochs of `order`, over all files."""

    def __init__(self, order: Order, first: int = 0, before: _Stage | None = None, added: Order | None = None) -> None:
        self._order, self._first, self._before, self._added = order, first, before, added
        self._old = self._mixed = self._first_epoch = 0
        self._began = 0.0
        if before is not None and added is not None:
            self._old = before.left(first)
            self._mixed = self._old + added.num_windows
            self._began = before.epochs(first)
            self._first_epoch = int(self._began) + 1

    def place(self, sample: int) -> Place:
        """Where a sample is."""
        position = sample - self._first
        if position >= self._mixed:
            epoch, position = divmod(position - self._mixed, self._order.num_windows)
            return Place(self._order, self._first_epoch + epoch, position)
        assert self._before is not None and self._added is not None
        if position < 0:
            return self._before.place(sample)
        old = position * self._old // self._mixed  # of those before
        if (position + 1) * self._old // self._mixed > old:
            return self._before.place(self._first + old)
        return Place(self._added, 0, position - old)

    def epochs(self, sample: int) -> float:
        """How many epochs the samples [0, sample) are."""
        position = sample - self._first
        if position < 0 and self._before is not None:
            return self._before.epochs(sample)
        if position < self._mixed:
            return self._began + (self._first_epoch - self._began) * position / self._mixed
        return self._first_epoch + (position - self._mixed) / self._order.num_windows

    def left(self, sample: int) -> int:
        """How many samples its present epoch has from `sample` on, which is not before the stage."""
        position = sample - self._first
        if position < self._mixed:
            return self._mixed - position
        return self._order.num_windows - (position - self._mixed) % self._order.num_windows


class Samples:
    """The samples of one source by ordinal, which counts over the whole run; num_samples in an epoch.

    tokens: how many of the stream's are used; None: all. Raises ValueError if they are fewer than one sample.
    """

    order: str

    def __init__(
        self, name: str, stream: TokenSource, seq_length: int, seed: int, vocab_size: int, tokens: int | None = None
    ) -> None:
        self.name, self.stream, self.seq_length, self.seed = name, stream, seq_length, seed
        self.vocab_size = vocab_size
        self.growth = [Growth(0, len(stream.parts))]
        tokens = stream.num_tokens if tokens is None else tokens
        self.num_samples = num_windows(tokens, seq_length)
        if self.num_samples == 0:
            raise ValueError(
                f"source {name!r} ({stream}) has {tokens} tokens to train on, fewer than one sample of seq_length + 1 "
                f"= {seq_length + 1}; shorten the sequence or add text"
            )

    def sample(self, sample: int, documents: bool = False) -> Window:
        """Sample k as int64 tokens, with its documents if so asked. Raises ValueError for a token id outside the
        model's vocabulary, rather than in an embedding kernel."""
        tokens, numbers = self._read(sample, documents)
        check_ids(f"source {self.name!r}", self.stream, tokens, self.vocab_size)
        return Window(tokens.astype(np.int64, copy=False), numbers)

    def _read(self, sample: int, documents: bool) -> Window:
        raise NotImplementedError

    def epochs(self, sample: int) -> float:
        """How often the samples [0, sample) have gone through the source."""
        return sample / self.num_samples

    def description(self) -> dict[str, Any]:
        """What a checkpoint keeps to recognise this source: tokens and identity of each file, wherever it lies, and
        from which sample on it had how many of them."""
        return {
            "files": [[part.num_tokens, part.identity()] for part in self.stream.parts],
            "growth": [list(entry) for entry in self.growth],
        }

    def replaces(self, saved: Mapping[str, Any]) -> str | None:
        """What of a checkpoint's `description` this source does not have any more, in words; None if it has all.

        More files after those that it had replace nothing.
        """
        files, parts = saved["files"], self.stream.parts
        if len(files) > len(parts):
            return f"had {len(files)} files and now has {len(parts)}; files may only be added, at the end"
        for number, ((num_tokens, identity), part) in enumerate(zip(files, parts, strict=False), start=1):
            if part.num_tokens != num_tokens or part.identity() != identity:
                which = f", file {number} of {len(files)}," if len(files) > 1 else ""
                was, now = (of.rpartition(":")[2][:12] for of in (identity, part.identity()))
                return (
                    f"({part}){which} had {num_tokens} tokens (identity {was}) and now has {part.num_tokens} "
                    f"(identity {now}); new files go after those that it had"
                )
        return None

    def grown(self, growth: Sequence[Growth]) -> Samples:
        """The same source, whose files came as `growth` says; others than SampleSource do not grow."""
        assert len(growth) == 1
        return self


class SampleSource(Samples):
    """A token stream cut into shuffled samples. order: a key of ORDERS. growth: when it got its files."""

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
        super().__init__(name, stream, seq_length, seed, vocab_size)
        self.order = order
        self.growth = list(growth) or self.growth
        assert self.growth[0].sample == 0 and self.growth[-1].files == len(stream.parts), self.growth
        files = self.growth[0].files
        self._stage = _Stage(self._order_of(0, files))
        for sample, more in self.growth[1:]:
            self._stage = _Stage(self._order_of(0, more), sample, self._stage, self._order_of(files, more))
            files = more

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
        return SampleSource(self.name, self.stream, self.seq_length, self.seed, self.vocab_size, self.order, growth)

    def place(self, sample: int) -> Place:
        """Where sample k is."""
        return self._stage.place(sample)

    def _read(self, sample: int, documents: bool) -> Window:
        order, epoch, position = self.place(sample)
        return order.window(epoch, position, documents)

    def epochs(self, sample: int) -> float:
        return self._stage.epochs(sample)
