"""Which samples each of a rank's micro-batches holds, and reading them; without torch, since loader workers do that.

A micro-batch travels as int32 in one piece of memory, a slot: tokens [micro_batch_size, seq_length + 1], of which
inputs and targets are two views, and where documents are masked their numbers, as large. Widening to int64 is left to
the rank, so that a quarter of the bytes travel.

The program of a loader worker: reads micro-batches ahead of its rank into memory that both see.

The rank (`prefetch.py`) starts it as a process of its own, by exec: it shares no lock, handler or GPU context with the
rank, whatever multiprocessing's start method is, and imports neither torch nor the rank's main program. Worker w of W
reads the micro-batches w, w + W, w + 2W, ... of the rank, each into the next of its slots.

    wanted   pipe from the rank: a byte for each slot that is free again; its end means that the rank is gone
    ready    pipe to the rank: a byte for each micro-batch read, READY or, for the last, FAILED
    memory   the slots, int32, then ERROR_BYTES for what went wrong: a pickled (exception, its traceback as text)
    task     a file with the pickled Task
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import signal
import struct
import sys
import traceback
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple, NoReturn

import numpy as np

from data.order import Samples
from data.schedule import PhaseSchedule, PhaseSpan


class SlotContent(NamedTuple):
    """Views of a slot, int32 [micro_batch_size, seq_length + 1]; documents is None where they are joined."""

    tokens: np.ndarray
    documents: np.ndarray | None


class RankMicroBatches:
    """The micro-batches of data-parallel rank dp_rank of dp_size in the steps [start_step, end_step), by number from 0.

    masked: with the numbers of their documents. Pickles as what it was made of, so `sources` has to pickle, and small:
    see `bundle.TokenSource`.
    """

    def __init__(
        self,
        schedule: PhaseSchedule,
        sources: Mapping[str, Samples],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        start_step: int,
        end_step: int,
        masked: bool = False,
    ) -> None:
        self._schedule = schedule
        self._sources = dict(sources)
        self._size = micro_batch_size
        self._masked = masked
        # The first sample of each micro-batch, for each phase that the steps touch.
        self._spans, self._firsts = [], []
        for span in schedule.spans:
            first, end = max(start_step, span.first_step), min(end_step, span.end_step)
            if first < end:
                samples = schedule.samples_before(first), schedule.samples_before(end)
                self._spans.append(span)
                self._firsts.append(
                    range(samples[0] + dp_rank * micro_batch_size, samples[1], micro_batch_size * dp_size)
                )
        self._starts = list(accumulate(map(len, self._firsts), initial=0))
        self._seq_length = next(iter(self._sources.values())).seq_length

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def slot_size(self) -> int:
        """How many int32 a slot holds."""
        return self._size * (self._seq_length + 1) * (2 if self._masked else 1)

    def index(self, number: int) -> int:
        """Which micro-batch of its global batch number `number` is."""
        span, first = self._place(number)
        return (first - span.start) % span.batch_size // self._size

    def sequence_length(self, number: int) -> int:
        """Of the sequences that the samples of number `number` are cut into."""
        return self._place(number)[0].sequence_length or self._seq_length

    def _place(self, number: int) -> tuple[PhaseSpan, int]:
        """Its phase, and its first sample."""
        part = bisect_right(self._starts, number) - 1
        return self._spans[part], self._firsts[part][number - self._starts[part]]

    def content(self, slot: np.ndarray) -> SlotContent:
        """`slot`, int32 [slot_size], as what it holds."""
        parts = slot.reshape(-1, self._size, self._seq_length + 1)
        return SlotContent(parts[0], parts[1] if self._masked else None)

    def read_into(self, number: int, slot: np.ndarray) -> None:
        """Read micro-batch `number` into `slot`, int32 [slot_size]. Raises what the sources raise."""
        tokens, documents = self.content(slot)
        _, first = self._place(number)
        for row in range(self._size):
            _, name, ordinal = self._schedule.locate(first + row)
            source = self._sources[name]
            if documents is None:
                tokens[row] = source.sample(ordinal)
            else:
                tokens[row], documents[row] = source.sample_and_documents(ordinal)


READY, FAILED = b"+", b"!"
ERROR_BYTES = 1 << 16
_LONG_TEXT = 8000  # characters
_LENGTH = struct.Struct("<Q")

# What launchers, schedulers and terminals send to every process of a job: the rank answers, its workers continue.
LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Task(NamedTuple):
    """What a worker has to do."""

    micro_batches: RankMicroBatches
    worker: int
    num_workers: int
    num_slots: int


def memory_bytes(micro_batches: RankMicroBatches, num_slots: int) -> int:
    """Size of the memory that a worker shares with its rank."""
    return num_slots * micro_batches.slot_size * 4 + ERROR_BYTES


def slots_of(memory: mmap.mmap, micro_batches: RankMicroBatches, num_slots: int) -> np.ndarray:
    """The slots in a worker's memory: int32 [num_slots, slot_size]."""
    count = num_slots * micro_batches.slot_size
    return np.frombuffer(memory, np.int32, count).reshape(num_slots, -1)


def write_error(memory: mmap.mmap, error: BaseException) -> None:
    """Leave `error` in a worker's memory for its rank."""
    text = "".join(traceback.format_exception(error))
    text = text if len(text) <= _LONG_TEXT else f"{text[: _LONG_TEXT // 2]}\n...\n{text[-_LONG_TEXT // 2 :]}"
    try:
        content = pickle.dumps((error, text))
        pickle.loads(content)  # some exceptions pickle and do not unpickle
    except Exception:
        content = b""
    if not 0 < len(content) <= ERROR_BYTES - _LENGTH.size:
        content = pickle.dumps((RuntimeError(f"{type(error).__name__}: {str(error)[:1000]}"), text))
    end = len(memory)
    memory[end - ERROR_BYTES : end - ERROR_BYTES + _LENGTH.size + len(content)] = _LENGTH.pack(len(content)) + content


def read_error(memory: mmap.mmap) -> tuple[Exception, str]:
    """What `write_error` left: the error and the worker's traceback."""
    start = len(memory) - ERROR_BYTES
    (length,) = _LENGTH.unpack(memory[start : start + _LENGTH.size])
    return pickle.loads(memory[start + _LENGTH.size : start + _LENGTH.size + length])


def work(task: Task, memory: mmap.mmap, wanted: int, ready: int) -> None:
    """Read all micro-batches of `task`, never more than its slots ahead; returns early when the rank is gone."""
    micro_batches, free = task.micro_batches, task.num_slots
    slots = slots_of(memory, micro_batches, task.num_slots)
    for turn, number in enumerate(range(task.worker, len(micro_batches), task.num_workers)):
        if free == 0:
            free = len(os.read(wanted, 4096))
            if free == 0:
                return
        micro_batches.read_into(number, slots[turn % task.num_slots])
        free -= 1
        os.write(ready, READY)


def main(rank_pid: int, task_file: int, memory_file: int, wanted: int, ready: int) -> NoReturn:
    """Work until all is read or the rank is gone. The numbers are a process id and file descriptors."""
    # The rank may be killed without a chance to end its workers: then the kernel does it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != rank_pid:  # it was before the line above
        os._exit(1)
    for number in LEFT_TO_THE_RANK:  # held back since before the exec
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_RANK)
    memory = mmap.mmap(memory_file, 0)
    try:
        with open(task_file, "rb") as file:
            task = pickle.load(file)
        work(task, memory, wanted, ready)
    except BrokenPipeError:  # the rank has closed the pipe
        os._exit(1)
    except Exception as error:
        write_error(memory, error)
        os.write(ready, FAILED)
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
