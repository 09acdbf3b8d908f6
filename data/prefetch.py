"""A rank's loader workers: how they are started, how they stand, and how they end.

A worker (`worker_process.py`) is a child of the rank in a fresh interpreter, not a fork of it: a rank has threads,
locks and a GPU context by then, none of which survives a fork well, and handlers that save checkpoints on signals,
which a worker must not have. So multiprocessing's start method does not matter. Workers keep nothing: they are ended
by SIGKILL. A rank that is killed cannot do that; then the kernel does.

Every message of a worker is one byte of a pipe that only it holds. So whenever it dies, be it between any two
instructions, the rank reads the pipe's end, never half a message and never an error of its own.

Micro-batches prepared ahead of the rank: workers read them, a thread of the rank makes tensors of them.

Making tensors (widening, page-locked memory) is in a thread, so that the step finds them ready. At most `num_ahead`
wait there, and num_slots a worker in the memory shared with it: `shared_bytes` says how much that is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from data.worker_process import (
    FAILED,
    LEFT_TO_THE_RANK,
    RankMicroBatches,
    SlotContent,
    Task,
    memory_bytes,
    read_error,
    slots_of,
)

# A worker that is killed closes its pipe a moment before it can be asked for its exit code.
_SECONDS_TO_DIE = 10.0


class WorkerDiedError(RuntimeError):
    """A worker ended without having done its work."""


class WorkerTracebackError(Exception):
    """The cause of an error that a worker met: where it was there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class LoaderWorkers:
    """`num_workers` processes that read `micro_batches` ahead of this rank, `num_slots` each.

    To be made in a thread that outlives them (the main thread does): the kernel takes the end of that thread for the
    end of the rank. `receive` may be called in any one thread, `close` in any.
    """

    def __init__(self, micro_batches: RankMicroBatches, num_workers: int, num_slots: int) -> None:
        self._micro_batches = micro_batches
        self._workers: list[_Worker] = []
        with _signals_held_back():
            for worker in range(num_workers):
                self._workers.append(_Worker(Task(micro_batches, worker, num_workers, num_slots)))

    @contextmanager
    def receive(self, number: int) -> Iterator[SlotContent]:
        """Micro-batch `number`, each in its turn; the memory is the worker's again afterwards.

        Raises the exception that reading it raised in the worker, or WorkerDiedError.
        """
        turn, index = divmod(number, len(self._workers))
        worker = self._workers[index]
        if not (message := worker.message()):
            raise WorkerDiedError(f"{worker} {worker.end(0.0 if worker.given_up else _SECONDS_TO_DIE)}")
        if message == FAILED:
            error, text = read_error(worker.memory)
            raise error from WorkerTracebackError(f"in {worker}:\n{text}")
        yield self._micro_batches.content(worker.slots[turn % len(worker.slots)])
        with contextlib.suppress(BrokenPipeError):  # it has read its last, or is dead, which the next read shows
            os.write(worker.wanted, b"+")

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def in_words(self) -> str:
        """How each worker that does not simply run stands, with what to do about it."""
        found = [(worker, worker.state()) for worker in self._workers]
        states = "; ".join(f"{worker} {state}" for worker, state in found if state)
        pids = ", ".join(map(str, self.pids))
        slow = f"all of them run (processes {pids}), so reading the data takes this long: look at its disk"
        return states or f"{slow}, or raise parallel.timeout_seconds"

    def kill(self) -> None:
        """End the workers; whoever waits in `receive` gets WorkerDiedError."""
        for worker in self._workers:
            worker.given_up = True
            worker.process.kill()

    def close(self) -> None:
        """End the workers and close their pipes, after the last `receive`."""
        self.kill()
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk cannot even be killed
                worker.process.wait(_SECONDS_TO_DIE)
            os.close(worker.ready)
            os.close(worker.wanted)
        self._workers = []


class _Worker:
    """The rank's side of one worker."""

    def __init__(self, task: Task) -> None:
        self._number = task.worker
        self.given_up = False
        with contextlib.ExitStack() as stack:
            memory = stack.enter_context(_shared_file())
            os.ftruncate(memory.fileno(), memory_bytes(task.micro_batches, task.num_slots))
            self.memory = mmap.mmap(memory.fileno(), 0)
            self.slots = slots_of(self.memory, task.micro_batches, task.num_slots)
            task_file = stack.enter_context(_shared_file())
            pickle.dump(task, task_file)
            task_file.seek(0)
            theirs_wanted, self.wanted = os.pipe()
            self.ready, theirs_ready = os.pipe()
            for descriptor in (theirs_wanted, theirs_ready):
                stack.callback(os.close, descriptor)
            files = (task_file.fileno(), memory.fileno(), theirs_wanted, theirs_ready)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.worker_process", str(os.getpid()), *map(str, files)],
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
            if self.given_up:  # one that waits for a dead disk does not even end when it is killed
                return b""
            # The pipe's end says so at once, unless a process that was forked while it was made holds it too.
            if ended:
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
        """How it stands, in words; "" if it runs, or has done its work."""
        if self.process.poll():
            return self.end(0.0)
        try:
            letter = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            return ""
        if letter in "Tt":
            return f"is stopped, `kill -CONT {self.process.pid}` lets it continue"
        return "waits for a disk" if letter == "D" else ""


def _shared_file() -> tempfile._TemporaryFileWrapper[bytes]:
    """An empty file without a name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("loader"), "w+b")  # type: ignore[return-value]
    return tempfile.TemporaryFile()  # type: ignore[return-value]


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block the signals while workers start, so that none meets them before they ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RANK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


T = TypeVar("T")


class DeliveryTimeout(TimeoutError):
    """Nothing was delivered for too long."""


class Prefetcher(Generic[T]):
    """Gives `make(number, content)` of the micro-batches 0, 1, 2, ..., prepared ahead by num_workers processes.

    make: called in another thread; must copy what it keeps of `content`. num_ahead: how many of its results may wait.
    To be made in a thread that outlives it, as the main thread does (see LoaderWorkers).
    """

    def __init__(
        self,
        micro_batches: RankMicroBatches,
        make: Callable[[int, SlotContent], T],
        num_workers: int,
        num_slots: int,
        num_ahead: int,
    ) -> None:
        self._workers = LoaderWorkers(micro_batches, num_workers, num_slots)
        self._made: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(num_ahead)
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(len(micro_batches), make), name="loader", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._workers.pids

    def next(self, timeout_seconds: float) -> T:
        """The next result, waited for up to timeout_seconds (0: for ever).

        Raises DeliveryTimeout, which says how the workers stand, WorkerDiedError, or what reading raised in a worker.
        """
        try:
            made = self._made.get(timeout=timeout_seconds or None)
        except queue.Empty:
            raise DeliveryTimeout(self._workers.in_words()) from None
        if isinstance(made, Exception):
            raise made
        self._room.release()
        return made

    def close(self) -> None:
        """End the workers and the thread."""
        self._closed = True
        self._room.release()
        self._workers.kill()
        self._thread.join()
        self._workers.close()

    def _run(self, count: int, make: Callable[[int, SlotContent], T]) -> None:
        try:
            for number in range(count):
                self._room.acquire()
                if self._closed:
                    return
                with self._workers.receive(number) as content:
                    made = make(number, content)
                self._made.put(made)
        except Exception as error:
            self._made.put(error)
