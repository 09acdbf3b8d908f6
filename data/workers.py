"""A rank's loader workers: processes that read micro-batches ahead of it, and a thread that makes tensors of them.

A worker is a child of the rank in a fresh interpreter, not a fork of it: a rank has threads, locks and a GPU context,
none of which survives a fork well, and handlers that save checkpoints on signals, which a worker must not have. It
imports no torch. Worker w of W reads the micro-batches w, w + W, w + 2W, ... of the rank, each into the next of its
slots in memory that both see. Workers keep nothing: they are ended by SIGKILL, by the rank or, if that is killed, by
the kernel.

    wanted   pipe from the rank: a byte for each slot that is free again; its end means that the rank is gone
    ready    pipe to the rank: a byte for each micro-batch read, READY or, for the last, FAILED
    memory   the slots, int32, then ERROR_BYTES for what went wrong: a pickled (exception, its traceback as text)
    task     a file with the pickled Task

A message is one byte of a pipe that only the worker holds. So whenever it dies, the rank reads the pipe's end, never
half a message. A micro-batch in a slot is tokens [micro_batch_size, seq_length + 1], and where documents are masked
their numbers, as large.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Generic, NamedTuple, NoReturn, TypeVar

import numpy as np

from data.order import Samples
from data.schedule import PhaseSchedule, PhaseSpan

READY, FAILED = b"+", b"!"
ERROR_BYTES = 1 << 16
# Of a worker that reads side by side.
_THREADS = 24
# A sample that takes longer has waited for its disk or store; so many micro-batches after it are read side by side.
_SLOW_SECONDS, _SIDE_BY_SIDE = 1e-3, 1024
_LONG_TEXT = 8000  # characters
_SECONDS_TO_DIE = 10.0
# What launchers, schedulers and terminals send to every process of a job: the rank answers, its workers continue.
_LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class SlotContent(NamedTuple):
    """Views of a slot, int32 [micro_batch_size, seq_length + 1]; documents is None where they are joined."""

    tokens: np.ndarray
    documents: np.ndarray | None


@dataclass
class RankMicroBatches:
    """The micro-batches of data-parallel rank dp_rank of dp_size in the steps [start_step, end_step), by number from 0.
    consecutive: neighbours of a global batch, not every dp_size-th of it. masked: with the numbers of their documents.
    """

    schedule: PhaseSchedule
    sources: Mapping[str, Samples]
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    consecutive: bool
    masked: bool
    start_step: int
    end_step: int

    def __post_init__(self) -> None:
        # Of each phase that the steps touch: its first sample, and how many micro-batches the rank has before.
        self._spans, self._firsts, counts = [], [], []
        for span in self.schedule.spans:
            first, end = max(self.start_step, span.first_step), min(self.end_step, span.end_step)
            if first < end:
                self._spans.append(span)
                self._firsts.append(self.schedule.samples_before(first))
                counts.append((end - first) * self._in_step(span))
        self._starts = list(accumulate(counts, initial=0))
        self._seq_length = next(iter(self.sources.values())).seq_length

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def slot_size(self) -> int:
        """How many int32 a slot holds."""
        return self.micro_batch_size * (self._seq_length + 1) * (2 if self.masked else 1)

    def index(self, number: int) -> int:
        """Which micro-batch of its global batch number `number` is."""
        span, first = self._place(number)
        return (first - span.start) % span.batch_size // self.micro_batch_size

    def sequence_length(self, number: int) -> int:
        """Of the sequences that the samples of number `number` are cut into."""
        return self._place(number)[0].sequence_length or self._seq_length

    def _place(self, number: int) -> tuple[PhaseSpan, int]:
        """Its phase, and its first sample."""
        part = bisect_right(self._starts, number) - 1
        span, in_step = self._spans[part], self._in_step(self._spans[part])
        step, turn = divmod(number - self._starts[part], in_step)
        index = self.dp_rank * in_step + turn if self.consecutive else turn * self.dp_size + self.dp_rank
        return span, self._firsts[part] + step * span.batch_size + index * self.micro_batch_size

    def _in_step(self, span: PhaseSpan) -> int:
        return span.batch_size // (self.micro_batch_size * self.dp_size)

    def content(self, slot: np.ndarray) -> SlotContent:
        """`slot`, int32 [slot_size], as what it holds."""
        parts = slot.reshape(-1, self.micro_batch_size, self._seq_length + 1)
        return SlotContent(parts[0], parts[1] if self.masked else None)

    def reads(self, number: int, slot: np.ndarray) -> list[Callable[[], None]]:
        """Calls that read micro-batch `number` into `slot`, int32 [slot_size], a row each, in any order and by any
        thread. They raise what the sources raise."""
        content = self.content(slot)
        _, first = self._place(number)
        places = [self.schedule.locate(first + row) for row in range(self.micro_batch_size)]
        return [partial(self._read, content, row, *place[1:]) for row, place in enumerate(places)]

    def _read(self, content: SlotContent, row: int, source: str, ordinal: int) -> None:
        content.tokens[row], numbers = self.sources[source].sample(ordinal, self.masked)
        if content.documents is not None:
            content.documents[row] = numbers


class Task(NamedTuple):
    """What a worker has to do."""

    micro_batches: RankMicroBatches
    worker: int
    num_workers: int
    num_slots: int

    def slots(self, memory: mmap.mmap) -> np.ndarray:
        """The slots in a worker's memory: int32 [num_slots, slot_size]."""
        count = self.num_slots * self.micro_batches.slot_size
        return np.frombuffer(memory, np.int32, count).reshape(self.num_slots, -1)


# --- the rank's side


class LoaderError(RuntimeError):
    """A loader worker died, or none delivers any more."""


class WorkerTracebackError(Exception):
    """The cause of an error that a worker met: where it was there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Gives `make(number, content)` of the micro-batches 0, 1, 2, ..., read ahead by num_workers processes.

    make: called in another thread; must copy what it keeps of `content`. num_slots: micro-batches that wait in the
    memory of each worker; num_ahead: results of `make` that wait. To be made in the main thread: the kernel takes the
    end of the thread that makes it for the end of the rank.
    """

    def __init__(
        self,
        micro_batches: RankMicroBatches,
        make: Callable[[int, SlotContent], T],
        num_workers: int,
        num_slots: int,
        num_ahead: int,
    ) -> None:
        self._micro_batches, self._make = micro_batches, make
        self._workers: list[_Worker] = []
        # No signal may meet a worker before it ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
        try:
            for worker in range(num_workers):
                self._workers.append(_Worker(Task(micro_batches, worker, num_workers, num_slots)))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pids = [worker.process.pid for worker in self._workers]
        self._made: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(num_ahead)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def next(self, timeout_seconds: float) -> T:
        """The next result, waited for up to timeout_seconds (0: for ever). Raises LoaderError, which says how the
        workers stand, or what reading raised in a worker."""
        try:
            made = self._made.get(timeout=timeout_seconds or None)
        except queue.Empty:
            states = "; ".join(f"{worker} {worker.state()}" for worker in self._workers)
            raise LoaderError(
                f"nothing for {timeout_seconds:.0f} s: {states}; if they run, the disk is slow, or raise "
                "parallel.timeout_seconds"
            ) from None
        if isinstance(made, Exception):
            raise made
        self._room.release()
        return made

    def close(self) -> None:
        """End the workers and the thread."""
        self._closed = True
        self._room.release()
        for worker in self._workers:
            worker.given_up = True
            worker.process.kill()
        self._thread.join()
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk cannot even be killed
                worker.process.wait(_SECONDS_TO_DIE)
            os.close(worker.ready)
            os.close(worker.wanted)

    def _run(self) -> None:
        try:
            for number in range(len(self._micro_batches)):
                self._room.acquire()
                if self._closed:
                    return
                self._made.put(self._receive(number))
        except Exception as error:
            self._made.put(error)

    def _receive(self, number: int) -> T:
        """Micro-batch `number`, each in its turn; its slot is the worker's again afterwards."""
        turn, index = divmod(number, len(self._workers))
        worker = self._workers[index]
        if not (message := worker.message()):
            raise LoaderError(f"{worker} {worker.end(0.0 if worker.given_up else _SECONDS_TO_DIE)}")
        if message == FAILED:
            error, text = pickle.loads(worker.memory[-ERROR_BYTES:])
            raise error from WorkerTracebackError(f"in {worker}:\n{text}")
        made = self._make(number, self._micro_batches.content(worker.slots[turn % len(worker.slots)]))
        with contextlib.suppress(BrokenPipeError):  # it has read its last, or is dead, which the next read shows
            os.write(worker.wanted, b"+")
        return made


class _Worker:
    """The rank's side of one worker."""

    def __init__(self, task: Task) -> None:
        self._number = task.worker
        self.given_up = False
        with contextlib.ExitStack() as stack:
            memory, task_file = (stack.enter_context(open(os.memfd_create("loader"), "w+b")) for _ in range(2))
            os.ftruncate(memory.fileno(), task.num_slots * task.micro_batches.slot_size * 4 + ERROR_BYTES)
            self.memory = mmap.mmap(memory.fileno(), 0)
            self.slots = task.slots(self.memory)
            pickle.dump(task, task_file)
            task_file.seek(0)
            theirs_wanted, self.wanted = os.pipe()
            self.ready, theirs_ready = os.pipe()
            for descriptor in (theirs_wanted, theirs_ready):
                stack.callback(os.close, descriptor)
            files = (task_file.fileno(), memory.fileno(), theirs_wanted, theirs_ready)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.workers", str(os.getpid()), *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )

    def __str__(self) -> str:
        return f"worker {self._number} (process {self.process.pid})"

    def message(self) -> bytes:
        """Its next message, waited for as long as it lives; b"" if there will be none."""
        poll = select.poll()
        poll.register(self.ready, select.POLLIN)
        ended = False
        while not poll.poll(0 if ended else 1000):
            # A process that was forked while the pipe was made holds it, too; and a worker that waits for a dead disk
            # does not end when it is killed.
            if ended or self.given_up:
                return b""
            ended = self.process.poll() is not None  # what it wrote before is in the pipe now
        return os.read(self.ready, 1)

    def end(self, seconds: float) -> str:
        """How its process ended, in words, waiting up to `seconds` for that."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "has closed its pipe, but lives"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        why = " (often because the host had no memory left: look into its kernel log)" * (name == "SIGKILL")
        return f"is dead: killed by signal {-code}, {name}{why}"

    def state(self) -> str:
        """How it stands, in words."""
        if self.process.poll() is not None:
            return self.end(0.0)
        letters = set()
        for thread in Path(f"/proc/{self.process.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError, IndexError):
                letters.add(thread.read_text().rsplit(")", 1)[1].split()[0])
        if letters & {"T", "t"}:
            return f"is stopped, `kill -CONT {self.process.pid}` lets it continue"
        return "waits for a disk" if "D" in letters else "runs"


# --- the worker


def main(rank_pid: int, task_file: int, memory_file: int, wanted: int, ready: int) -> NoReturn:
    """Read until all is read or the rank is gone."""
    # The rank may be killed without a chance to end its workers: then the kernel does it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != rank_pid:  # it was before the line above
        os._exit(1)
    for number in _LEFT_TO_THE_RANK:  # held back since before the exec
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_RANK)
    memory = mmap.mmap(memory_file, 0)
    try:
        with open(task_file, "rb") as file:
            task = pickle.load(file)
        _work(task, memory, wanted, ready)
    except BrokenPipeError:  # the rank has closed it
        os._exit(1)
    except Exception as error:
        content = _pickled(error)
        start = len(memory) - ERROR_BYTES
        memory[start : start + len(content)] = content
        os.write(ready, FAILED)
    os._exit(0)


def _work(task: Task, memory: mmap.mmap, wanted: int, ready: int) -> None:
    """Read all micro-batches of `task`, never more than its slots ahead; returns early when the rank is gone.

    A sample waits for its disk or store once for each of its documents. After two slow micro-batches (one may have
    waited for a core), the next are read side by side; quick ones, which would wait for Python's lock, are not.
    """
    micro_batches, free, slots = task.micro_batches, task.num_slots, task.slots(memory)
    pool = ThreadPoolExecutor(_THREADS)
    reading: deque[list[Future[None]]] = deque()
    alone, was_slow = 0, False  # the next turn whose micro-batch is read alone; of the last such one

    def deliver(left: int) -> None:
        """Wait until no more than `left` micro-batches are being read."""
        while len(reading) > left:
            for row in reading.popleft():
                row.result()
            os.write(ready, READY)

    for turn, number in enumerate(range(task.worker, len(micro_batches), task.num_workers)):
        while free == 0:
            if reading and not select.select([wanted], [], [], 0)[0]:
                deliver(len(reading) - 1)
            elif not (free := len(os.read(wanted, 4096))):
                return
        free -= 1
        reads = micro_batches.reads(number, slots[turn % task.num_slots])
        if turn < alone:
            reading.append([pool.submit(read) for read in reads])
            deliver(_THREADS // len(reads))
            continue
        deliver(0)
        began = time.perf_counter()
        for read in reads:
            read()
        slow = time.perf_counter() - began > _SLOW_SECONDS * len(reads)
        if slow and was_slow:
            alone = turn + _SIDE_BY_SIDE
        was_slow = slow
        os.write(ready, READY)
    deliver(0)


def _pickled(error: Exception) -> bytes:
    """(error, its traceback as text) in at most ERROR_BYTES."""
    text = "".join(traceback.format_exception(error))
    text = text if len(text) <= _LONG_TEXT else f"{text[: _LONG_TEXT // 2]}\n...\n{text[-_LONG_TEXT // 2 :]}"
    try:
        content = pickle.dumps((error, text))
        pickle.loads(content)  # some exceptions pickle and do not unpickle
    except Exception:
        content = b""
    if 0 < len(content) <= ERROR_BYTES:
        return content
    return pickle.dumps((RuntimeError(f"{type(error).__name__}: {str(error)[:1000]}"), text))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
