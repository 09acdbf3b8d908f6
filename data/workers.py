"""A rank's loader workers: processes that read micro-batches ahead of it, and a thread that makes tensors of them.

A worker is a child of the rank in a fresh interpreter, not a fork of it: a rank has threads, locks and a GPU context,
none of which survives a fork well, and handlers that save checkpoints on signals, which a worker must not have. It
imports no torch. It gets the rank's `row_reads` pickled in a file, and by a pipe the first samples of the micro-batches
to read, each of W workers every W-th; by another it answers each with a Window, or with the exception that it met.

Workers keep nothing: they are ended by SIGKILL, by the rank or, if that is killed, by the kernel. A worker alone holds
its end of the pipe, so when it dies, whenever that is, the rank reads the pipe's end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import numpy as np

from data.order import Samples, Window
from data.schedule import PhaseSchedule

# Samples that a worker reads side by side: each waits for its disk or store once for each of its documents.
_SIDE_BY_SIDE = 24
_SECONDS_TO_DIE = 10.0
# What launchers, schedulers and terminals send to every process of a job: the rank answers, its workers continue.
_LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

RowReads = list[Callable[[], Window]]


def row_reads(
    schedule: PhaseSchedule, sources: Mapping[str, Samples], micro_batch_size: int, masked: bool, first: int
) -> RowReads:
    """Calls that read the rows of the micro-batch from global sample `first` on, in any order and by any thread. They
    raise what the sources raise. masked: with the numbers of documents."""
    places = [schedule.locate(first + row) for row in range(micro_batch_size)]
    return [partial(sources[at.source].sample, at.ordinal, masked) for at in places]


def stacked(rows: Sequence[Window]) -> Window:
    """A micro-batch of its rows: int32 [rows, seq_length + 1]."""
    tokens = np.stack([row.tokens for row in rows], dtype=np.int32, casting="same_kind")
    numbers = [row.documents for row in rows if row.documents is not None]
    return Window(tokens, np.stack(numbers) if numbers else None)


# --- the rank's side


class LoaderError(RuntimeError):
    """A loader worker died, or none delivers any more."""


T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Gives `make(first, window)` of the micro-batches that begin with the samples `firsts`, in their order, read by
    num_workers processes up to num_ahead micro-batches ahead.

    make: called in another thread. To be made in the main thread: the kernel takes the end of the thread that makes it
    for the end of the rank.
    """

    def __init__(
        self,
        reads: Callable[[int], RowReads],
        firsts: Iterator[int],
        make: Callable[[int, Window], T],
        num_workers: int,
        num_ahead: int,
    ) -> None:
        self._firsts, self._make = firsts, make
        self._workers: list[_Worker] = []
        # No signal may meet a worker before it ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
        try:
            for worker in range(num_workers):
                self._workers.append(_Worker(worker, reads))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pids = [worker.process.pid for worker in self._workers]
        self._turns = cycle(self._workers)
        self._asked: queue.SimpleQueue[tuple[_Worker, int] | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()
        for _ in range(num_ahead):
            self._ask()

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
        self._ask()
        return made

    def close(self) -> None:
        """End the workers and the thread."""
        for worker in self._workers:
            worker.given_up = True
            worker.process.kill()
        self._asked.put(None)
        self._thread.join(_SECONDS_TO_DIE)
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk cannot even be killed
                worker.process.wait(_SECONDS_TO_DIE)
            worker.wanted.close()
            worker.answers.close()

    def _ask(self) -> None:
        """Ask for one more micro-batch, if there is one."""
        if (first := next(self._firsts, None)) is not None:
            worker = next(self._turns)
            with contextlib.suppress(BrokenPipeError):  # it is dead, which its next answer shows
                worker.wanted.send(first)
            self._asked.put((worker, first))

    def _run(self) -> None:
        try:
            while (asked := self._asked.get()) is not None:
                worker, first = asked
                self._made.put(self._make(first, worker.answer()))
        except Exception as error:
            self._made.put(error)


class _Worker:
    """The rank's side of one worker."""

    def __init__(self, number: int, reads: Callable[[int], RowReads]) -> None:
        self._number = number
        self.given_up = False
        theirs_wanted, self.wanted = Pipe(duplex=False)
        self.answers, theirs_answers = Pipe(duplex=False)
        with theirs_wanted, theirs_answers, open(os.memfd_create("loader"), "w+b") as task:
            pickle.dump(reads, task)
            task.seek(0)
            files = task.fileno(), theirs_wanted.fileno(), theirs_answers.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.workers", str(os.getpid()), *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )

    def __str__(self) -> str:
        return f"worker {self._number} (process {self.process.pid})"

    def answer(self) -> Window:
        """Its next one, waited for as long as it lives. Raises LoaderError, or what it has met."""
        ended = False
        while not self.answers.poll(0 if ended else 1.0):
            # A process that was forked while the pipe was made holds it, too; and a worker that waits for a dead disk
            # does not end when it is killed.
            if ended or self.given_up:
                raise self._lost()
            ended = self.process.poll() is not None  # what it wrote before is in the pipe now
        try:
            found = self.answers.recv()
        except (EOFError, OSError):  # the latter in the middle of an answer
            raise self._lost() from None
        if isinstance(found, Exception):
            found.add_note(f"It met this in {self}.")
            raise found
        return found

    def _lost(self) -> LoaderError:
        return LoaderError(f"{self} {self.end(0.0 if self.given_up else _SECONDS_TO_DIE)}")

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


def main(rank_pid: int, task: int, wanted: int, answers: int) -> NoReturn:
    """Read until the rank is gone."""
    # The rank may be killed without a chance to end its workers: then the kernel does it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != rank_pid:  # it was before the line above
        os._exit(1)
    for number in _LEFT_TO_THE_RANK:  # held back since before the exec
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_RANK)
    to_rank = Connection(answers, readable=False)
    try:
        with open(task, "rb") as file:
            reads = pickle.load(file)
        _work(reads, Connection(wanted, writable=False), to_rank)
    except BrokenPipeError:  # the rank has closed it
        os._exit(1)
    except Exception as error:
        to_rank.send(_as_sent(error))
    os._exit(0)


def _work(reads: Callable[[int], RowReads], wanted: Connection, answers: Connection) -> None:
    """Read the micro-batches that are asked for, and answer in their order, until the rank is gone."""
    pool = ThreadPoolExecutor(_SIDE_BY_SIDE)
    reading: deque[list[Future[Window]]] = deque()
    while True:
        while reading and (sum(map(len, reading)) >= _SIDE_BY_SIDE or not wanted.poll()):
            answers.send(stacked([row.result() for row in reading.popleft()]))
        try:
            first = wanted.recv()
        except EOFError:
            return
        reading.append([pool.submit(read) for read in reads(first)])


def _as_sent(error: Exception) -> Exception:
    """The error, its traceback as a note; a RuntimeError of its words if it does not pickle."""
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # some exceptions pickle and do not unpickle
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(where)
    return error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
