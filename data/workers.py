"""How loader workers live and die: never a checkpoint of their own, never outliving the rank that made them.

A worker is forked from a rank that has handlers which save a checkpoint on SIGTERM or SIGUSR1, and launchers
send those signals to the whole process group. A worker must neither run the handlers nor die of the signal,
because the rank still has a step to finish. Yet at the end multiprocessing stops workers by SIGTERM and waits
for them, so a worker may not ignore it always: the rank sets `released` first. A rank that is killed cannot
do so; then the kernel kills its workers.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path
from types import FrameType

# What launchers, schedulers and terminals send to every process of a job; SIGTERM is handled apart.
_LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block the signals around a fork, so that a worker meets none before `WorkerSetup` ran in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_LEFT_TO_THE_RANK, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerSetup:
    """The `worker_init_fn` of one set of workers; made in the rank, called in each worker.

    The rank must make the workers in a thread that outlives them (the main thread does): the kernel takes the
    end of that thread for the end of the rank.
    """

    def __init__(self, num_workers: int) -> None:
        self._rank_pid = os.getpid()
        self._released = RawValue(ctypes.c_bool, False)
        self._pids = RawArray(ctypes.c_int, max(1, num_workers))
        self._processes: dict[int | None, BaseProcess] = {}

    def started(self) -> None:
        """In the rank, when the workers have been started."""
        self._processes = {process.pid: process for process in multiprocessing.active_children()}

    def release(self) -> None:
        """In the rank: from now on SIGTERM ends the workers."""
        self._released.value = True

    def kill(self) -> None:
        """In the rank: end the workers, stopped ones too."""
        for pid in self._pids:
            if pid and Path(f"/proc/{pid}/stat").exists() and _parent(pid) == os.getpid():
                os.kill(pid, signal.SIGKILL)

    def dead(self, seconds: float) -> bool:
        """In the rank: whether a worker died, which may show only a moment after its sockets closed. Waits for that up
        to `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if any(pid and _death(pid) is not None for pid in self._pids):
                    return True
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
            except RuntimeError:  # from DataLoader's handler of SIGCHLD, wherever the rank is when a worker dies
                return True

    def in_words(self) -> str:
        """In the rank: how each worker that does not simply run stands, with what to do about it."""
        found = []
        for worker, pid in enumerate(self._pids):
            # multiprocessing may have been first to fetch the exit code, and then has it.
            code = self._processes[pid].exitcode if pid in self._processes else None
            if code is not None:
                found.append(f"worker {worker} (process {pid}) {_ending(code)}")
                continue
            state = _process_state(pid) if pid else "never started"
            if state == "stopped":
                found.append(f"worker {worker} (process {pid}) is stopped, `kill -CONT {pid}` lets it go on")
            elif state != "runs":
                found.append(f"worker {worker} (process {pid}) {state}")
        pids = ", ".join(str(pid) for pid in self._pids)
        slow = f"all of them run (processes {pids}), so reading the data takes this long: look at its disk"
        return "; ".join(found) or f"{slow}, or raise parallel.timeout_seconds"

    def __call__(self, worker: int) -> None:
        """In worker number `worker`: tie its life to the rank's and let go of the rank's signal handlers."""
        self._pids[worker] = os.getpid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self._rank_pid:  # the rank died before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in _LEFT_TO_THE_RANK:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_LEFT_TO_THE_RANK, signal.SIGTERM))

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._released.value:
            os._exit(0)


class DeliveryWatch:
    """Ends workers that deliver nothing for `seconds` (0: never) while the rank waits inside `with watch:`.

    DataLoader's own timeout does not do: a worker that is stopped between announcing a batch and handing over its
    memory leaves the rank in a read that has none. When the workers are killed the rank's wait ends with an exception.
    """

    def __init__(self, setup: WorkerSetup, seconds: float) -> None:
        self.found: str | None = None
        """How the workers stood when they were ended; None if they were not."""
        self._setup = setup
        self._seconds = seconds
        self._deadline = math.inf
        self._closed = threading.Event()
        if seconds > 0:
            threading.Thread(target=self._run, name="loader watch", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def __enter__(self) -> None:
        self._deadline = time.monotonic() + self._seconds if self._seconds > 0 else math.inf

    def __exit__(self, *error: object) -> None:
        self._deadline = math.inf

    def _run(self) -> None:
        while not self._closed.wait(min(1.0, self._seconds / 10)):
            if time.monotonic() >= self._deadline:
                self.found = self._setup.in_words()
                self._setup.kill()
                return


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _death(pid: int) -> str | None:
    """How the child `pid` ended, in words; None if it lives."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "is gone, and nobody kept how it ended"
    if end is None:
        return None
    return _ending(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


def _ending(code: int) -> str:
    """An exit code in words; a negative one is that of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    why = " (often because the host had no memory left: look into its kernel log)" * (name == "SIGKILL")
    return f"is dead: killed by signal {-code}, {name}{why}"


def _process_state(pid: int) -> str:
    """What the child `pid` does, in words."""
    if (end := _death(pid)) is not None:
        return end
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "is gone, and nobody kept how it ended"
    if letter in "Tt":
        return "stopped"
    return "waits for a disk" if letter == "D" else "runs"
