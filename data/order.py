"""The samples of one source: sample k is a pure function of (seed, source name, order, k).

A sample is a window of seq_length + 1 tokens. Its last token is also the first token of the next window, so each epoch
trains on every token as a target exactly once, except the first token and the rest after the last full window. Its
order is a function of (key, epoch): it needs no index on disk and does not depend on the length of the run.

`WindowOrder` cuts the stream in its stored order. That is one read per sample, but documents keep their neighbours.

`DocumentOrder` shuffles the documents first, so each epoch has other neighbours and other cuts. A corpus of up to
16,384 documents is shuffled at once. A larger one is cut into runs with the same number of tokens, about a thousand
documents each (a document that crosses a border becomes two). 16 runs, drawn from the whole corpus, form a group, and
the documents within a group are shuffled. The stream of an epoch is its groups one after the other; its windows are
shuffled within the group in which they begin. Only the index entries of the current group are read.

A source may get more files during a run. The rest of its current epoch and the windows of the new files, mixed evenly,
then form one epoch; after it come epochs over all files. Checkpoints save the history (`Growth`).
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
from data.storage import lock_or_timeout, map_in_threads

_NUM_ROUNDS = 6
_MASK = (1 << 64) - 1


Bits = TypeVar("Bits", int, np.ndarray)


def _mix(value: Bits) -> Bits:
    """The finalizer of splitmix64: every input bit reaches every output bit. 64 bits to 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A permutation of [0, size) that is a function of (size, key), the same on every machine."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(key.encode("utf-8"), digest_size=8 * _NUM_ROUNDS).digest()
        self._round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
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
    """The numbers [0, size), sorted by a hash of the number and `key`: int64 [size]."""
    seed = np.frombuffer(hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest(), dtype="<u8")
    # splitmix64: the states are equally spaced and the finalizer is a bijection, so no two numbers have the same hash.
    states = seed + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.argsort(_mix(states), kind="stable")


_GROUP_DOCUMENTS, _RUN_DOCUMENTS, _RUNS_IN_GROUP = 1 << 14, 1 << 10, 16


class Window(NamedTuple):
    """tokens: integers [seq_length + 1]. documents: int32 [seq_length + 1], for each token the number of its document
    in the window, from 0; None if they were not requested."""

    tokens: np.ndarray
    documents: np.ndarray | None


def num_windows(num_tokens: int, seq_length: int) -> int:
    """How many windows of seq_length + 1 tokens, overlapping by one, a stream of num_tokens holds."""
    return max(0, (num_tokens - 1) // seq_length)


# Consecutive samples are of the same epoch, so the key is hashed once for all of them.
_permutation = lru_cache(maxsize=1024)(Permutation)


class WindowOrder:
    """Shuffled windows of the stream in its stored order; num_windows in an epoch."""

    def __init__(self, stream: TokenSource, seq_length: int, key: str) -> None:
        self.num_windows = num_windows(stream.num_tokens, seq_length)
        self._stream, self._seq_length, self._key = stream, seq_length, key

    def window(self, epoch: int, position: int, documents: bool) -> Window:
        """The window at `position` of an epoch. documents: whether to number its documents."""
        start = _permutation(self.num_windows, f"{self._key}/{epoch}")(position) * self._seq_length
        length = self._seq_length + 1
        numbers = document_numbers(self._stream, start, length) if documents else None
        return Window(self._stream.tokens(start, length), numbers)


_SHUFFLE_LOCK = threading.Lock()


class DocumentOrder:
    """Shuffled windows of the stream of shuffled documents; num_windows in an epoch."""

    def __init__(self, stream: TokenSource, seq_length: int, key: str) -> None:
        self.num_windows = num_windows(stream.num_tokens, seq_length)
        self._stream, self._seq_length, self._key = stream, seq_length, key
        self._run = stream.num_tokens  # tokens
        if stream.num_documents > _GROUP_DOCUMENTS:
            self._run = -(-stream.num_tokens * _RUN_DOCUMENTS // stream.num_documents)
        self._num_runs = max(1, stream.num_tokens // self._run)  # full runs; the rest belongs to the last group
        self._num_groups = max(1, self._num_runs // _RUNS_IN_GROUP)

    def window(self, epoch: int, position: int, documents: bool) -> Window:
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
        return self._stream.num_tokens if group == self._num_groups else group * _RUNS_IN_GROUP * self._run

    def _first_window(self, group: int) -> int:
        if group == self._num_groups:
            return self.num_windows
        return min(-(-self._group_start(group) // self._seq_length), self.num_windows)

    def _cut(self, epoch: int, group: int, offset: int, length: int) -> tuple[np.ndarray, list[int]]:
        """`length` tokens from `offset` in a group, also of the next groups; and how many each document has."""
        pieces: list[np.ndarray] = []
        left = length
        while left:
            with lock_or_timeout(_SHUFFLE_LOCK):
                starts, ends = _shuffled_group(self, epoch, group)
            # Unlike numpy's searchsorted, bisect does not release the GIL.
            first, last = bisect_right(ends, offset), bisect_left(ends, offset + left) + 1
            begin = int(ends[first - 1]) if first else 0
            for start, end in zip(starts[first:last].tolist(), ends[first:last].tolist(), strict=True):
                take = min(end - offset, left)
                if take:  # a document may have no tokens
                    pieces.append(self._stream.tokens(start + offset - begin, take))
                    left -= take
                begin = offset = end
            group, offset = group + 1, 0
        return np.concatenate(pieces), list(map(len, pieces))

    def shuffle_group(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of a group in the order of an epoch, two int64 [documents]: the first token of each in the
        source, and its end in the group."""
        begin, last = group * _RUNS_IN_GROUP, group + 1 == self._num_groups
        end = self._num_runs if last else begin + _RUNS_IN_GROUP
        runs = [_permutation(self._num_runs, f"{self._key}/{epoch}/runs")(place) for place in range(begin, end)]
        spans = [(run * self._run, (run + 1) * self._run) for run in runs]
        if last and self._num_runs * self._run < self._stream.num_tokens:
            spans.append((self._num_runs * self._run, self._stream.num_tokens))
        # In threads, so that the reads wait for the disk or store at the same time.
        offsets = map_in_threads(lambda span: _document_starts(self._stream, *span), spans)
        starts = np.concatenate([of[:-1] for of in offsets])
        lengths = np.concatenate([np.diff(of) for of in offsets])
        order = shuffled(len(starts), f"{self._key}/{epoch}/documents {group}")
        return starts[order], np.cumsum(lengths[order])


# For all sources of a process: each source of a blend has one current group, of 300 kB.
_shuffled_group = lru_cache(maxsize=512)(DocumentOrder.shuffle_group)


def _document_starts(stream: TokenSource, first: int, end: int) -> np.ndarray:
    """Where the documents in the tokens [first, end) begin, and `end`: int64. The first one begins at `first`."""
    if (first, end) == (0, stream.num_tokens):
        return stream.document_offsets(0, stream.num_documents)
    return np.concatenate([[first], documents_after(stream, first, end, 2 * _RUN_DOCUMENTS), [end]])


Order = WindowOrder | DocumentOrder
ORDERS: dict[str, type[Order]] = {"documents": DocumentOrder, "windows": WindowOrder}


class Growth(NamedTuple):
    """The source has `files` files from its sample `sample`."""

    sample: int
    files: int


class SamplePlace(NamedTuple):
    """The place of a sample: the position in an epoch of an order."""

    order: Order
    epoch: int
    position: int


class _Stage:
    """The samples of a source from sample `first` on, until it gets more files: first the rest of the epoch of the
    stage `before`, mixed with new windows (`added`); then epochs of `order`, over all files.

    num_left: samples of that rest. num_mixed: with the new windows. epochs_before: epochs up to `first`.
    """

    def __init__(self, order: Order, first: int = 0, before: _Stage | None = None, added: Order | None = None) -> None:
        self._order, self._first, self._before, self._added = order, first, before, added
        self._num_left = self._num_mixed = self._first_epoch = 0
        self._epochs_before = 0.0
        if before is not None and added is not None:
            self._num_left = before.left(first)
            self._num_mixed = self._num_left + added.num_windows
            self._epochs_before = before.epochs(first)
            self._first_epoch = int(self._epochs_before) + 1

    def place(self, sample: int) -> SamplePlace:
        position = sample - self._first
        if position >= self._num_mixed:
            epoch, position = divmod(position - self._num_mixed, self._order.num_windows)
            return SamplePlace(self._order, self._first_epoch + epoch, position)
        assert self._before is not None and self._added is not None
        if position < 0:
            return self._before.place(sample)
        of_rest = position * self._num_left // self._num_mixed  # how many of the samples so far are of the rest
        if (position + 1) * self._num_left // self._num_mixed > of_rest:
            return self._before.place(self._first + of_rest)
        return SamplePlace(self._added, 0, position - of_rest)

    def epochs(self, sample: int) -> float:
        """How many epochs the samples [0, sample) make."""
        position = sample - self._first
        if position < 0 and self._before is not None:
            return self._before.epochs(sample)
        if position < self._num_mixed:
            return self._epochs_before + (self._first_epoch - self._epochs_before) * position / self._num_mixed
        return self._first_epoch + (position - self._num_mixed) / self._order.num_windows

    def left(self, sample: int) -> int:
        """How many samples the current epoch has left at `sample`, which must be in this stage."""
        position = sample - self._first
        if position < self._num_mixed:
            return self._num_mixed - position
        return self._order.num_windows - (position - self._num_mixed) % self._order.num_windows


class Samples:
    """The samples of one source, numbered over the whole run; num_samples in an epoch.

    tokens: how many tokens of the stream are used; None: all. Raises ValueError if they do not make one sample.
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
        """The sample with int64 tokens. documents: whether to number its documents. Raises TokenIdError for an
        id that the model does not have."""
        tokens, numbers = self._read(sample, documents)
        check_ids(f"source {self.name!r}", self.stream, tokens, self.vocab_size)
        return Window(tokens.astype(np.int64, copy=False), numbers)

    def _read(self, sample: int, documents: bool) -> Window:
        raise NotImplementedError

    def epochs(self, sample: int) -> float:
        """How many epochs over the source the samples [0, sample) make."""
        return sample / self.num_samples

    def description(self) -> dict[str, Any]:
        """What a checkpoint saves to recognize this source: tokens and identity of each file, without its path, and
        from which sample the source had how many files."""
        return {
            "files": [[part.num_tokens, part.identity()] for part in self.stream.parts],
            "growth": [list(entry) for entry in self.growth],
        }

    def mismatch(self, saved: Mapping[str, Any]) -> str | None:
        """How this source differs from the `description` in a checkpoint, as text; None if it does not."""
        files, parts = saved["files"], self.stream.parts
        if len(files) > len(parts):
            return f"had {len(files)} files and now has {len(parts)}; files may only be added, at the end"
        for number, ((num_tokens, identity), part) in enumerate(zip(files, parts, strict=False), start=1):
            if part.num_tokens != num_tokens or part.identity() != identity:
                which = f", file {number} of {len(files)}," if len(files) > 1 else ""
                was, now = (of.rpartition(":")[2][:12] for of in (identity, part.identity()))
                return (
                    f"({part}){which} had {num_tokens} tokens (identity {was}) and now has {part.num_tokens} "
                    f"(identity {now}); add new files after the old ones"
                )
        return None

    def with_growth(self, growth: Sequence[Growth]) -> Samples:
        """The same source with this history of its files; only a SampleSource can get more files."""
        assert len(growth) == 1
        return self


class SampleSource(Samples):
    """A token stream cut into shuffled samples. order: a key of ORDERS. growth: when the source got its files."""

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
        # repr(), because a name with "/" in it could otherwise give the key of another (seed, name, epoch).
        key = f"{self.seed}/{self.name!r}"
        whole = (first, end) == (0, len(self.stream.parts))
        stream = self.stream if whole else Concatenation(self.stream.parts[first:end])
        if (first, end) != (0, self.growth[0].files):
            key += f"/files {first} to {end}"
        return ORDERS[self.order](stream, self.seq_length, key)

    def with_growth(self, growth: Sequence[Growth]) -> SampleSource:
        return SampleSource(self.name, self.stream, self.seq_length, self.seed, self.vocab_size, self.order, growth)

    def place(self, sample: int) -> SamplePlace:
        return self._stage.place(sample)

    def _read(self, sample: int, documents: bool) -> Window:
        order, epoch, position = self.place(sample)
        return order.window(epoch, position, documents)

    def epochs(self, sample: int) -> float:
        return self._stage.epochs(sample)
