"""A rank's loader workers: processes that read micro-batches ahead of time, and a thread that makes tensors of them.

A worker is a child process with a new interpreter, not a fork of the rank: a rank has threads, locks and a GPU context,
which a fork can break, and signal handlers that save checkpoints, which a worker must not have. A worker does not
import torch. It gets the rank's `row_readers` pickled in a file. Through a pipe it gets the first sample of every W-th
micro-batch. Through a second pipe it answers with a Window.

Workers have no state to save, so they are killed with SIGKILL: by the rank or, if the rank was killed, by the kernel.
Only the worker has its end of the second pipe open, so when it dies the rank reads end-of-file.
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

# How many samples a worker reads at once. Each waits for the disk or store once per document.
_READING_THREADS = 24
_EXIT_SECONDS = 10.0
# Launchers, schedulers and terminals send these to every process of a job. Workers ignore them; the rank handles them.
_SIGNALS_FOR_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

RowReaders = list[Callable[[], Window]]


def row_readers(
    schedule: PhaseSchedule, sources: Mapping[str, Samples], micro_batch_size: int, masked: bool, first: int
) -> RowReaders:
    """Functions that read the rows of the micro-batch that begins with global sample `first`, callable in any order
    and thread. They raise what the sources raise. masked: whether to number the documents."""
    places = [schedule.locate(first + row) for row in range(micro_batch_size)]
    return [partial(sources[at.source].sample, at.ordinal, masked) for at in places]


def stack_rows(rows: Sequence[Window]) -> Window:
    """The rows as one Window: tokens and documents int32 [rows, seq_length + 1]."""
    tokens = np.stack([row.tokens for row in rows], dtype=np.int32, casting="same_kind")
    numbers = [row.documents for row in rows if row.documents is not None]
    return Window(tokens, np.stack(numbers) if numbers else None)


# --- the rank's side


class LoaderError(RuntimeError):
    """A loader worker died."""


T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Results of `make(first, window)` for the micro-batches that begin with the samples `firsts`, in this order, read
    by num_workers processes up to num_ahead micro-batches ahead.

    make: is called in another thread. Create a Prefetcher in the main thread, with which the kernel ends workers.
    """

    def __init__(
        self,
        reads: Callable[[int], RowReaders],
        firsts: Iterator[int],
        make: Callable[[int, Window], T],
        num_workers: int,
        num_ahead: int,
    ) -> None:
        self._firsts, self._make = firsts, make
        self._workers: list[_Worker] = []
        # Blocked until the worker ignores these signals itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_FOR_THE_RANK)
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
        """The next result. Waits up to timeout_seconds (0: without limit), then raises TimeoutError with the state of
        each worker. Raises LoaderError, or what reading raised in a worker."""
        try:
            made = self._made.get(timeout=timeout_seconds or None)
        except queue.Empty:
            states = "; ".join(f"{worker} {worker.state()}" for worker in self._workers)
            raise TimeoutError(
                f"nothing for {timeout_seconds:.0f} s: {states}; a worker that runs waits for a slow disk: use a "
                "faster one, or raise parallel.timeout_seconds"
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
        self._thread.join(_EXIT_SECONDS)
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a read from a broken disk
                worker.process.wait(_EXIT_SECONDS)
            worker.wanted.close()
            worker.answers.close()

    def _ask(self) -> None:
        if (first := next(self._firsts, None)) is not None:
            worker = next(self._turns)
            with contextlib.suppress(BrokenPipeError):  # it is dead; `answer` reports that
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

    def __init__(self, number: int, reads: Callable[[int], RowReaders]) -> None:
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
        """The next answer; waits as long as the worker lives. Raises LoaderError, or what reading raised."""
        ended = False
        while not self.answers.poll(0 if ended else 1.0):
            # End-of-file may not come: a process forked at the wrong moment has the pipe open too, and a worker that
            # hangs in a read from a broken disk does not end when it is killed.
            if ended or self.given_up:
                raise self._lost()
            ended = self.process.poll() is not None  # poll once more: its last answer may be in the pipe
        try:
            found = self.answers.recv()
        except (EOFError, OSError):  # OSError: it died while it wrote an answer
            raise self._lost() from None
        if isinstance(found, Exception):
            found.add_note(f"Raised in {self}.")
            raise found
        return found

    def _lost(self) -> LoaderError:
        return LoaderError(f"{self} {self.end(0.0 if self.given_up else _EXIT_SECONDS)}")

    def end(self, seconds: float) -> str:
        """How the process ended, as text. Waits up to `seconds` for its end."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "has closed its pipe but still runs"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        why = " (often because the host ran out of memory: see its kernel log)" if name == "SIGKILL" else ""
        return f"is dead: killed by signal {-code}, {name}{why}"

    def state(self) -> str:
        if self.process.poll() is not None:
            return self.end(0.0)
        letters = set()
        for thread in Path(f"/proc/{self.process.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError, IndexError):
                letters.add(thread.read_text().rsplit(")", 1)[1].split()[0])
        if letters & {"T", "t"}:
            return f"is stopped (`kill -CONT {self.process.pid}` continues it)"
        return "waits for a disk" if "D" in letters else "runs"


# --- the worker


def main(rank_pid: int, task: int, wanted: int, answers: int) -> NoReturn:
    """Read micro-batches until the rank ends."""
    # If the rank is killed, the kernel kills this process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != rank_pid:  # the rank ended before the line above
        os._exit(1)
    for number in _SIGNALS_FOR_THE_RANK:  # blocked since the start of this process
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS_FOR_THE_RANK)
    to_rank = Connection(answers, readable=False)
    try:
        with open(task, "rb") as file:
            reads = pickle.load(file)
        _work(reads, Connection(wanted, writable=False), to_rank)
    except BrokenPipeError:  # the rank closed the pipe
        os._exit(1)
    except Exception as error:
        to_rank.send(_picklable(error))
    os._exit(0)


def _work(reads: Callable[[int], RowReaders], wanted: Connection, answers: Connection) -> None:
    """Read the requested micro-batches and answer in their order, until the rank closes the pipe."""
    pool = ThreadPoolExecutor(_READING_THREADS)
    reading: deque[list[Future[Window]]] = deque()
    while True:
        while reading and (sum(map(len, reading)) >= _READING_THREADS or not wanted.poll()):
            answers.send(stack_rows([row.result() for row in reading.popleft()]))
        try:
            first = wanted.recv()
        except EOFError:
            return
        reading.append([pool.submit(read) for read in reads(first)])


def _picklable(error: Exception) -> Exception:
    """The error with its traceback as a note; a RuntimeError with the same text if it cannot be pickled."""
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # some exceptions can be pickled but not unpickled
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(where)
    return error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
