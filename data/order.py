"""A shuffle that needs no memory: a keyed permutation of [0, size), evaluated one index at a time.

A stored shuffle of N samples costs 8 N bytes in every process and has to be built before the first step and
again at each restart. A Feistel network is a bijection on an even number of bits whatever its round function
is; when size is not a power of four, an output outside [0, size) is fed in again until it falls inside
("cycle walking": following a cycle of a bijection from a point inside must come back inside; Black and
Rogaway 2002, section 4). The domain is less than 4 * size, so that takes fewer than four steps on average.

In which order a stream of documents becomes samples: windows of seq_length + 1 tokens, shuffled.

Both orders are functions of (stream, key, epoch, position) and need no index on disk. Each window shares its last token
with the first of the next, so that every token but an epoch's first is a target exactly once an epoch, but for what is
left behind the last whole window (Megatron's cut).

`WindowOrder` cuts the stream as it lies: one read a sample, but a window's documents are neighbours in the corpus,
in every epoch.

`DocumentOrder` shuffles the documents first, so that an epoch has other neighbours and other cuts than the one before.
Shuffling 10^9 documents at once would need an index of 8 GB for every epoch. So it is done in two steps: runs of
neighbouring documents are shuffled over the whole corpus, and the documents of some of these runs among themselves,
which makes a group; at most 32,768 runs, at least 16 in a group. A corpus of up to 16,384 documents is one group. The
epoch's stream is the groups' one after the other, and its windows are shuffled within the group where they begin.

The samples of one source: sample k, for any k, is a pure function of (seed, source name, order, k).

An epoch visits every window of the source once, in one of the orders of `orders.py`; k beyond it goes on to the next
epoch, which has another order. Unlike Megatron's order this one does not depend on how long the run is.

A source may get more files while a run is under way. Then what its present epoch has left and the windows of the new
files, evenly mixed, are one epoch: nothing of it comes twice and nothing is left out. After that come epochs over all.
The checkpoint keeps when how many files there were (`Growth`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from data.token_source import Concatenation, TokenSource, check_ids, document_numbers

_NUM_ROUNDS = 6
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit reaches every output bit. 64 bits to 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A bijection of [0, size) chosen by `key`; equal (size, key) give equal permutations on every machine.

    Raises ValueError when size is not positive.
    """

    def __init__(self, size: int, key: str) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs a positive size, got {size}")
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(key.encode("utf-8"), digest_size=8 * _NUM_ROUNDS).digest()
        self._round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where `index` goes. Raises IndexError outside [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside a permutation of {self.size}")
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
    """The numbers [0, size) in an order chosen by `key`, int64 [size]: sorted by a hash of each.

    For orders that are used whole; equal arguments give equal orders on every machine.
    """
    seed = np.frombuffer(hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest(), dtype="<u8")
    # splitmix64: its state takes equal steps, its finalizer is a bijection, so no two numbers get the same hash.
    value = seed + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(value ^ (value >> np.uint64(31)), kind="stable")


_GROUP_DOCUMENTS = 1 << 14
_MAX_RUNS = 1 << 15
_MIN_RUN = 64
_MIN_RUNS_IN_GROUP = 16
# Of all sources of a process: 24 bytes each.
_KEPT_DOCUMENTS = 1 << 20


class Window(NamedTuple):
    """tokens: integers [seq_length + 1]. documents: int32 [seq_length + 1], the number of each token's document within
    the window, from 0; None if nobody asked for it."""

    tokens: np.ndarray
    documents: np.ndarray | None


class Order(Protocol):
    """Epochs of num_windows windows each."""

    num_windows: int

    def window(self, epoch: int, position: int, documents: bool = False) -> Window:
        """The window at `position` of an epoch, with its documents if so asked."""


def num_windows(num_tokens: int, seq_length: int) -> int:
    """How many windows of seq_length + 1 tokens, overlapping by one, a stream of num_tokens holds."""
    return max(0, (num_tokens - 1) // seq_length)


@lru_cache(maxsize=64)
def _permutation(size: int, key: str) -> Permutation:
    # Samples of one epoch follow one another; the cache saves hashing the same key for each of them.
    return Permutation(size, key)


class WindowOrder:
    """The windows of the stream itself, shuffled; `key` tells it from other orders."""

    def __init__(self, stream: TokenSource, seq_length: int, key: str) -> None:
        self.num_windows = num_windows(stream.num_tokens, seq_length)
        self._stream, self._seq_length, self._key = stream, seq_length, key

    def place(self, epoch: int, position: int) -> int:
        """Which window of the stream comes at `position`."""
        return _permutation(self.num_windows, f"{self._key}/{epoch}")(position)

    def window(self, epoch: int, position: int, documents: bool = False) -> Window:
        start = self.place(epoch, position) * self._seq_length
        length = self._seq_length + 1
        numbers = document_numbers(self._stream, start, length) if documents else None
        return Window(self._stream.tokens(start, length), numbers)


class _Group(NamedTuple):
    """Documents in the order of an epoch: where each begins in the stream of the files, and where it ends in that of
    the group. int64 [documents]."""

    starts: np.ndarray
    ends: np.ndarray


class _Epoch(NamedTuple):
    """runs: the runs of documents in the order of the epoch. group_starts: tokens, [groups + 1]. first_windows: the
    first window that begins in each group, [groups + 1]."""

    runs: np.ndarray
    group_starts: np.ndarray
    first_windows: np.ndarray


class _Kept:
    """The latest results of a function of this process, as long as their documents together are not too many."""

    def __init__(self, documents: int) -> None:
        self._left = documents
        self._kept: OrderedDict[Hashable, _Group] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _Group]) -> _Group:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = make()
        self._left -= len(made.starts)
        while self._left < 0 and len(self._kept) > 1:
            self._left += len(self._kept.popitem(last=False)[1].starts)
        self._kept[key] = made
        return made


_GROUPS = _Kept(_KEPT_DOCUMENTS)


class DocumentOrder:
    """The documents of the stream, shuffled, and the windows of what comes of it, shuffled; see above.

    The first window of an epoch reads where each run of documents begins; each group, its documents' lengths.
    """

    def __init__(self, stream: TokenSource, seq_length: int, key: str) -> None:
        self.num_windows = num_windows(stream.num_tokens, seq_length)
        self._stream, self._seq_length, self._key = stream, seq_length, key
        documents = stream.num_documents
        if documents <= _GROUP_DOCUMENTS:
            self._run, self._runs_in_group = documents, 1
        else:
            self._run = max(_MIN_RUN, -(-documents // _MAX_RUNS))
            self._runs_in_group = max(_MIN_RUNS_IN_GROUP, _GROUP_DOCUMENTS // self._run)
        self._num_runs = -(-documents // self._run)
        self._run_starts: np.ndarray | None = None
        self._epoch: tuple[int, _Epoch] | None = None
        self._token = object()  # tells this order's groups from others' in _GROUPS; a copy gets its own

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run_starts": None, "_epoch": None, "_token": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _token=object())

    def window(self, epoch: int, position: int, documents: bool = False) -> Window:
        layout = self._layout(epoch)
        group = int(np.searchsorted(layout.first_windows, position, side="right")) - 1
        first, end = layout.first_windows[group : group + 2].tolist()
        window = first + _permutation(end - first, f"{self._key}/{epoch}/windows {group}")(position - first)
        offset = window * self._seq_length - int(layout.group_starts[group])
        tokens, lengths = self._cut(epoch, group, offset, self._seq_length + 1)
        numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths) if documents else None
        return Window(tokens, numbers)

    def _cut(self, epoch: int, group: int, offset: int, length: int) -> tuple[np.ndarray, list[int]]:
        """`length` tokens from `offset` of a group on, into the groups behind it if need be; and how many tokens each
        document gives of them."""
        tokens, lengths = np.empty(length, dtype=np.int64), []
        filled = 0
        while filled < length:
            starts, ends = self._group(epoch, group)
            first = int(np.searchsorted(ends, offset, side="right"))
            last = int(np.searchsorted(ends, offset + length - filled)) + 1
            begin = int(ends[first - 1]) if first else 0
            for start, end in zip(starts[first:last].tolist(), ends[first:last].tolist(), strict=True):
                take = min(end - offset, length - filled)
                if take:  # else a document without tokens
                    tokens[filled : filled + take] = self._stream.tokens(start + offset - begin, take)
                    lengths.append(take)
                    filled += take
                begin = offset = end
            group, offset = group + 1, 0
        return tokens, lengths

    def _layout(self, epoch: int) -> _Epoch:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._lay_out(epoch)
        return self._epoch[1]

    def _lay_out(self, epoch: int) -> _Epoch:
        stream, every = self._stream, self._runs_in_group
        if self._run_starts is None:
            firsts = range(0, stream.num_documents, self._run)
            starts = [int(stream.document_offsets(first, first)[0]) for first in firsts]
            self._run_starts = np.array([*starts, stream.num_tokens], dtype=np.int64)
        runs = shuffled(self._num_runs, f"{self._key}/{epoch}/runs")
        run_ends = np.cumsum(np.diff(self._run_starts)[runs])
        group_starts = np.concatenate(([0], run_ends[every - 1 :: every]))
        if group_starts[-1] != stream.num_tokens or len(group_starts) == 1:
            group_starts = np.append(group_starts, stream.num_tokens)
        first_windows = np.minimum(-(-group_starts // self._seq_length), self.num_windows)
        first_windows[-1] = self.num_windows
        return _Epoch(runs, group_starts, first_windows)

    def _group(self, epoch: int, group: int) -> _Group:
        return _GROUPS.get((self._token, epoch, group), lambda: self._shuffle_group(epoch, group))

    def _shuffle_group(self, epoch: int, group: int) -> _Group:
        first = group * self._runs_in_group
        starts, lengths = [], []
        for run in self._layout(epoch).runs[first : first + self._runs_in_group].tolist():
            begin = run * self._run
            offsets = self._stream.document_offsets(begin, min(begin + self._run, self._stream.num_documents))
            starts.append(offsets[:-1])
            lengths.append(np.diff(offsets))
        all_starts = np.concatenate(starts)
        order = shuffled(len(all_starts), f"{self._key}/{epoch}/documents {group}")
        return _Group(all_starts[order], np.cumsum(np.concatenate(lengths)[order]))


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
        if part.num_tokens != num_tokens or part.identity() != identity:
            which = f", file {number + 1} of {len(files)}," if len(files) > 1 else ""
            return (
                f"({part}){which} had {num_tokens} tokens (identity {_short(identity)}) and now has "
                f"{part.num_tokens} (identity {_short(part.identity())}); new files go behind those that it had"
            )
    return None


def _short(identity: str) -> str:
    return identity.rpartition(":")[2][:12]
