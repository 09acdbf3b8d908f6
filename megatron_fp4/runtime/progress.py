"""What each rank is doing, in `run.dir/ranks`, so that others can name a rank that stops; and when a rank ends itself.

The loop says where it is (`Progress.at`, a tuple written). A thread writes that every few seconds to
`ranks/rank_00003.json`, one small write, whether or not anything changed: a process that is stopped or gone shows by
its file not being rewritten. On a thousand ranks each writes every 20 seconds, 50 small writes a second in all.

When a rank has not moved for half of `parallel.timeout_seconds`, its thread appends where all its threads stand to
`ranks/rank_00003.stack`. The lowest rank that waits then reads what the others wrote and prints one diagnosis
(diagnosis.py). It comes at half time because NCCL's watchdog aborts a process without Python: there is no later
moment. When a collective fails with an exception, gloo's way, the diagnosis is added to that.

Collectives fail after `parallel.timeout_seconds`. A disk that hangs may fail no collective: all ranks read it, or the
save in the background does. So a rank also ends itself, with the state `hung` in `state.json`, an exit code with which
schedulers start again and the system call in stderr, where
    its main thread stands in one call on a file for 0.9 of that time: before the ranks that wait for it give up,
    another thread, such as that of a save, stands in one for six times that time: meanwhile training gets on,
    its main thread shows no sign of life for six times that time, whatever for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from megatron_fp4.runtime.diagnosis import BlockedThreads, Report, diagnose, is_lowest_waiting, line_of, report_path
from megatron_fp4.runtime.errors import ExitCode

T = TypeVar("T")

FOLDER = "ranks"
# Of `parallel.timeout_seconds`: until a rank says what it sees, and until it ends itself.
_SPEAK, _BLOCKED, _WITHOUT_LIFE = 0.5, 0.9, 6.0
_STATE_SECONDS = 10.0
_RECORD_BYTES = 1024
# What gloo's and NCCL's errors say when the fault may be another rank's.
_OF_OTHERS = ("timed out", "timeout", "connection", "gloo", "nccl")


class Place(NamedTuple):
    """Where a rank is. step: that of metrics.jsonl, 0 before the first. order: of the phase within the step, the same
    on all ranks. since: `time.time()` of the last sign of life there."""

    step: int
    phase: str
    order: int
    since: float


class Observer(Protocol):
    """Who wants to hear of every phase as it begins, and of the wait for a step's data (`StepResult.data_wait`)."""

    def at(self, step: int, phase: str) -> None:
        """As `Progress.at`."""


class Progress:
    """Where this rank is; watched and written down inside `with progress.watched(...)`.

    on_hang: told the step and the reason before the process ends itself.
    """

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.place = Place(0, "start", 0, time.time())
        self.on_hang: Callable[[int, str], None] | None = None

    def at(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step` (as in metrics.jsonl, from 1; 0: before the first). All ranks say the same
        phases in the same order."""
        order = self.place.order + 1 if step == self.place.step else 0
        self.place = Place(step, phase, order, time.time())
        if self.observer is not None:
            self.observer.at(step, phase)

    def alive(self) -> None:
        """This rank gets on within its phase."""
        self.place = self.place._replace(since=time.time())

    def loading(self, batches: Iterable[T], first_step: int) -> Iterator[T]:
        """`batches`, one a step from `first_step` on, with the phase `data` while each is waited for."""
        iterator = iter(batches)
        step = first_step
        while True:
            self.at(step, "data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch
            step += 1

    def watched(self, run_dir: Path, timeout_seconds: float) -> _Watch:
        """A context in which this rank's place is written to `run_dir`. A collective when entered."""
        return _Watch(self, run_dir / FOLDER, timeout_seconds)


def record_collectives(run_dir: Path) -> None:
    """Switch NCCL's flight recorder on by torch's environment variables, unless they are set; before the process group
    is made: the last collectives of each rank, written to the run's folder when one times out. NCCL ends a process in
    C++ then. `torchfrtrace` of torch reads the files and says which rank did not join which collective."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((run_dir / FOLDER / "nccl_trace_rank_").absolute()))


class _Watch:
    def __init__(self, progress: Progress, folder: Path, timeout_seconds: float) -> None:
        self._progress = progress
        self._folder = folder
        self._timeout = timeout_seconds
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # Often enough to be told from a stopped one in time, seldom enough for a shared disk.
        self.interval = min(max(5.0, self._world_size / 50), timeout_seconds / 20)
        self._start = ""
        self._beat = 0
        self._error = ""
        self._diagnosed: Place | None = None
        self._end = threading.Event()
        self._lock = threading.Lock()
        # Two: writing the place may hang with the disk, and what sees that must not.
        self._threads = [
            threading.Thread(target=run, name=run.__name__.strip("_"), daemon=True)
            for run in (self._progress_loop, self._limits_loop)
        ]

    def __enter__(self) -> None:
        if self._rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.glob("rank_*.json"):  # of an earlier start, maybe with more ranks
                old.unlink(missing_ok=True)
        start = [f"{time.time():.3f} {os.getpid()}"]
        dist.broadcast_object_list(start)
        self._start = start[0]
        self._write()
        for thread in self._threads:
            thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._error = f"{type(error).__name__}: {error}"[:400] if error is not None else ""
        self._write()
        if error is None:
            return
        of_others = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_OTHERS)
        speaks = self._world_size > 1 and (self._rank == 0 or self._world_size <= 64)
        if of_others and speaks and (found := self.diagnosis()):
            error.add_note(found)

    def diagnosis(self) -> str:
        """Who is behind, stopped, gone or failed, and where the others are, in a few lines; "" if nothing stands out.

        Waits for some intervals if that is what it takes to tell a waiting rank from one that is gone.
        """
        return diagnose(self._folder, self._report(), self._world_size, wait=lambda: time.sleep(2.5 * self.interval))

    def _progress_loop(self) -> None:
        while not self._end.wait(self.interval):
            self._write()
            place = self._progress.place
            if time.time() - place.since >= _SPEAK * self._timeout and place != self._diagnosed:
                self._diagnosed = place
                self._print_diagnosis(place)

    def _print_diagnosis(self, place: Place) -> None:
        try:
            stack = self._folder / f"rank_{self._rank:05d}.stack"
            with stack.open("a") as file:
                file.write(
                    f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: step {place.step}, {place.phase}\n"
                )
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
            self._write()
            self._end.wait(2.5 * self.interval)  # the others come to the same point, and a stopped one shows
            if self._progress.place != place or self._end.is_set():
                return  # it has moved
            if is_lowest_waiting(self._folder, self._report(), _SPEAK * self._timeout, self.interval):
                text = self.diagnosis() or "all ranks are there and alive: slow work, or a collective that never ends"
                seconds = time.time() - place.since
                print(
                    f"pretrain.py: rank {self._rank} has been in step {place.step}, {place.phase}, for {seconds:.0f} s "
                    f"(collectives fail after {self._timeout:.0f} s).\n{text}\n"
                    f"Where threads stand: {stack.parent}/*.stack",
                    file=sys.stderr,
                    flush=True,
                )
        except OSError as error:  # a dying disk must not end the run from here
            print(f"pretrain.py: no diagnosis of a hang: {error}", file=sys.stderr, flush=True)

    def _limits_loop(self) -> None:
        blocked, main = BlockedThreads(), os.getpid()
        while not self._end.wait(self.interval):
            for thread, call, seconds in blocked.look():
                if seconds >= (_BLOCKED if thread == main else _WITHOUT_LIFE) * self._timeout:
                    self._end_hung(f"{line_of(thread)} stands in the system call `{call}`", seconds)
            seconds = time.time() - self._progress.place.since
            if seconds >= _WITHOUT_LIFE * self._timeout:
                self._end_hung(f"no sign of life of {line_of(main)}", seconds)

    def _end_hung(self, what: str, seconds: float) -> None:
        step, phase, _, _ = self._progress.place
        reason = (
            f"rank {self._rank} on {socket.gethostname()} hangs in step {step}, {phase}: {what} for {seconds:.0f} s"
        )
        print(f"pretrain.py: {reason}; ending", file=sys.stderr, flush=True)
        if self._progress.on_hang is not None:  # in a thread: the disk with state.json may be what hangs
            writes = threading.Thread(target=self._progress.on_hang, args=(step, reason), daemon=True)
            writes.start()
            writes.join(_STATE_SECONDS)
        os._exit(ExitCode.HUNG)

    def _report(self) -> Report:
        place = self._progress.place
        return Report(
            start=self._start,
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=place.step,
            phase=place.phase,
            order=place.order,
            since=place.since,
            time=time.time(),
            beat=self._beat,
            error=self._error,
        )

    def _write(self) -> None:
        with self._lock:
            self._beat += 1
            text = json.dumps(self._report()._asdict())
            try:
                # In place and of one length: one write, nothing for the disk to make or rename; closed, so that network
                # disks show it to other hosts.
                descriptor = os.open(
                    report_path(self._folder, self._rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644
                )
                try:
                    os.pwrite(descriptor, text.ljust(_RECORD_BYTES).encode(), 0)
                finally:
                    os.close(descriptor)
            except OSError:
                pass  # a full disk is for the checkpoints to report
