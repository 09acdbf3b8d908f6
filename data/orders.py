"""In which order a stream of documents becomes samples: windows of seq_length + 1 tokens, shuffled.

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
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from data.bundle import TokenSource
from data.documents import document_numbers
from data.permutation import Permutation, shuffled

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
