"""Record what each rank is doing in `run.dir/ranks`, diagnose which rank holds up a run, and end a rank that hangs.

The training loop reports its place (`Progress.at`, which sets a tuple). Every few seconds a thread writes the place to
`ranks/rank_00003.json`, whether or not it changed; if a process is stopped or gone, its file is no longer rewritten. On
a thousand ranks each writes every 20 seconds: 50 small writes a second in all.

When a rank has been in one place for half of `parallel.timeout_seconds`, its thread appends the stacks of all threads
to `ranks/rank_00003.stack`, and the first such rank of a step prints one diagnosis. It suspects a rank that failed, a
rank whose process on this host is stopped or gone, a rank whose file is no longer rewritten, and a rank in an earlier
place than the others. The diagnosis comes at half the timeout because NCCL's watchdog aborts the process without
running Python. If a collective fails with an exception, as gloo's do, the diagnosis is added to the exception.

Collectives fail after `parallel.timeout_seconds`. A disk that hangs need not make a collective fail: all ranks may read
from it, or only the save in the background. So a rank ends itself, with the state `hung` in `state.json`, an exit code
after which schedulers start the run again, and the system call on stderr, if

    its main thread is in one system call on a file for 0.9 of the timeout, before other ranks stop waiting for it,
    another thread, such as that of a save, is in one for six times the timeout, while training continues,
    its main thread shows no sign of life for six times the timeout, for any reason.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from megatron_fp4.runtime.errors import ExitCode

T = TypeVar("T")

FOLDER = "ranks"
# Multiples of `parallel.timeout_seconds`: until a rank prints a diagnosis; until it ends itself because of a system
# call of the main thread, of another thread, or without a sign of life.
_SPEAK, _BLOCKED, _BLOCKED_BESIDE, _WITHOUT_LIFE = 0.5, 0.9, 6.0, 6.0
_STATE_SECONDS = 10.0
_RECORD_BYTES = 1024
# The most suspected ranks that a diagnosis describes one by one.
_NAMED = 8
# Errors that mean that the rank waited for another one.
_OF_OTHERS = re.compile(r"gloo|nccl|timed out|timeout|connection", re.IGNORECASE)


class Place(NamedTuple):
    """What a rank is doing. step: as in metrics.jsonl, 0 before the first. order: the phase's number within the step,
    the same on all ranks. since: `time.time()` of the last sign of life in this phase."""

    step: int
    phase: str
    order: int
    since: float


class Progress:
    """The place of this rank; watched and written inside `with progress.watched(...)`.

    observer: called with step and phase when a phase begins. on_hang: called with step and reason before the process
    ends itself.
    """

    def __init__(self) -> None:
        self.observer: Callable[[int, str], None] | None = None
        self.place = Place(0, "start", 0, time.time())
        self.on_hang: Callable[[int, str], None] | None = None

    def at(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step` (as in metrics.jsonl, from 1; 0: before the first). All ranks report the
        same phases in the same order."""
        order = self.place.order + 1 if step == self.place.step else 0
        self.place = Place(step, phase, order, time.time())
        if self.observer is not None:
            self.observer(step, phase)

    def alive(self) -> None:
        """This rank makes progress within its phase."""
        self.place = self.place._replace(since=time.time())

    def loading(self, batches: Iterable[T], first_step: int) -> Iterator[T]:
        """Yield `batches`, one for each step from `first_step` on. The phase is `data` while this rank waits for
        one."""
        iterator = iter(batches)
        for step in itertools.count(first_step):
            self.at(step, "data")
            if (batch := next(iterator, None)) is None:
                return
            yield batch

    def watched(self, run_dir: Path, timeout_seconds: float) -> _Watch:
        """A context in which this rank's place is written to `run_dir`. A collective when entered."""
        return _Watch(self, run_dir / FOLDER, timeout_seconds)


def record_collectives(run_dir: Path) -> None:
    """Switch on NCCL's flight recorder by torch's environment variables, unless these are set. Call it before the
    process group is made.

    When a collective times out, NCCL ends the process in C++; the recorder then writes the last collectives of each
    rank to the run's folder. torch's `torchfrtrace` reads these files and finds which rank did not join which
    collective.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((run_dir / FOLDER / "nccl_trace_rank_").absolute()))


class _Watch:
    def __init__(self, progress: Progress, folder: Path, timeout_seconds: float) -> None:
        self._progress, self._folder, self._timeout = progress, folder, timeout_seconds
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # Often enough to notice a stopped rank in time, rarely enough for a shared disk.
        self.interval = min(max(5.0, self._world_size / 50), timeout_seconds / 20)
        self._start = self._error = ""
        self._diagnosed: Place | None = None
        self._end = threading.Event()
        # Two threads: writing the place may hang with the disk, and the thread that notices this must not hang too.
        self._threads = [
            threading.Thread(target=run, name=run.__name__.strip("_"), daemon=True)
            for run in (self._progress_loop, self._limits_loop)
        ]

    def __enter__(self) -> None:
        if self._rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Files of an earlier start, maybe with more ranks.
            for old in [*self._folder.glob("rank_*.json"), *self._folder.glob("diagnosis_*")]:
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
        of_others = isinstance(error, RuntimeError) and _OF_OTHERS.search(str(error))
        speaks = self._world_size > 1 and (self._rank == 0 or self._world_size <= 64)
        if error is not None and of_others and speaks and (found := self.diagnosis()):
            error.add_note(found)

    def diagnosis(self) -> str:
        """`diagnose`, which may wait some intervals to tell a waiting rank from one that is gone."""
        return diagnose(self._folder, self._report(), self._world_size, wait=lambda: time.sleep(2.5 * self.interval))

    def _progress_loop(self) -> None:
        while not self._end.wait(self.interval):
            self._write()
            place = self._progress.place
            if time.time() - place.since >= _SPEAK * self._timeout and place != self._diagnosed:
                self._diagnosed = place
                try:
                    self._print_diagnosis(place)
                except OSError as error:  # a failing disk must not end the run here
                    print(f"pretrain.py: no diagnosis of a hang: {error}", file=sys.stderr, flush=True)

    def _print_diagnosis(self, place: Place) -> None:
        with (self._folder / f"rank_{self._rank:05d}.stack").open("a") as file:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"{now} process {os.getpid()}: step {place.step}, {place.phase}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
            print(file=file)
        self._write()
        self._end.wait(2.5 * self.interval)  # until all ranks that are alive have written
        if self._progress.place != place or self._end.is_set():
            return  # it has moved
        try:
            (self._folder / f"diagnosis_{place.step:08d}").touch(exist_ok=False)
        except FileExistsError:  # another rank was first, and prints
            return
        text = self.diagnosis() or "all ranks are alive: slow work, or a collective that never ends"
        print(
            f"pretrain.py: rank {self._rank} has been in step {place.step}, {place.phase}, for "
            f"{time.time() - place.since:.0f} s (collectives fail after {self._timeout:.0f} s).\n{text}\n"
            f"The stacks of all threads: {self._folder}/*.stack",
            file=sys.stderr,
            flush=True,
        )

    def _limits_loop(self) -> None:
        blocked, main = BlockedThreads(), os.getpid()
        while not self._end.wait(self.interval):
            for thread, call, seconds in blocked.look():
                if seconds >= (_BLOCKED if thread == main else _BLOCKED_BESIDE) * self._timeout:
                    self._end_hung(f"{line_of(thread)} is in the system call `{call}`", seconds)
            seconds = time.time() - self._progress.place.since
            if seconds >= _WITHOUT_LIFE * self._timeout:
                self._end_hung(f"no sign of life of {line_of(main)}", seconds)

    def _end_hung(self, what: str, seconds: float) -> None:
        step, phase, _, _ = self._progress.place
        reason = (
            f"rank {self._rank} on {socket.gethostname()} hangs in step {step}, {phase}: {what} for {seconds:.0f} s"
        )
        print(f"pretrain.py: {reason}; ending", file=sys.stderr, flush=True)
        if self._progress.on_hang is not None:  # in a thread: it writes state.json, whose disk may hang too
            writes = threading.Thread(target=self._progress.on_hang, args=(step, reason), daemon=True)
            writes.start()
            writes.join(_STATE_SECONDS)
        os._exit(ExitCode.HUNG)

    def _report(self) -> Report:
        step, phase, order, since = self._progress.place
        host, pid = socket.gethostname(), os.getpid()
        return Report(self._start, self._rank, host, pid, step, phase, order, since, time.time(), self._error)

    def _write(self) -> None:
        content = json.dumps(self._report()._asdict()).ljust(_RECORD_BYTES).encode()
        try:
            # Written in place, always with the same length: one write, and no file to create or rename. Closed, so that
            # network file systems show it to other hosts.
            descriptor = os.open(report_path(self._folder, self._rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(descriptor, content, 0)
            finally:
                os.close(descriptor)
        except OSError:
            pass  # saving a checkpoint reports a full disk


# Which rank holds up a run, from the files of all ranks


class Report(NamedTuple):
    """The content of a rank's file. start: identifies the start of the run, the same on all ranks. step, phase, order,
    since: its Place. time: of writing. error: the exception that it ended with, or ""."""

    start: str
    rank: int
    host: str
    pid: int
    step: int
    phase: str
    order: int
    since: float
    time: float
    error: str

    @property
    def where(self) -> str:
        """Its place in words."""
        return f"step {self.step}, {self.phase}" if self.step else f"before the first step, {self.phase}"


def report_path(folder: Path, rank: int) -> Path:
    """The file of `rank`."""
    return folder / f"rank_{rank:05d}.json"


def read_report(folder: Path, rank: int, start: str) -> Report | None:
    """The report of `rank` in this start; None if there is none yet or it cannot be read."""
    for _ in range(3):  # the rank may be writing it right now
        try:
            report = Report(**json.loads(report_path(folder, rank).read_text()))
        except (OSError, ValueError, TypeError):
            time.sleep(0.01)
        else:
            return report if report.start == start else None
    return None


def diagnose(folder: Path, mine: Report, world_size: int, wait: Callable[[], None]) -> str:
    """A few lines about the ranks that are behind, stopped, gone or failed, and where the others wait; "" if no rank is
    suspected.

    wait: waits until every rank that is alive has written again. Called only if no rank has visibly failed or stopped
    on this host.
    """

    def read() -> dict[int, Report | None]:
        reports = {rank: read_report(folder, rank, mine.start) for rank in range(world_size)}
        return {**reports, mine.rank: mine}

    reports = read()
    suspects = _visible(reports)
    if not suspects:
        wait()
        before, reports = reports, read()
        suspects = _visible(reports)
        for rank in reports.keys() - suspects.keys() - {mine.rank}:
            if reports[rank] is None or reports[rank] == before[rank]:
                suspects[rank] = "its process no longer writes: stopped or gone, or its host is gone"
    present = [report for report in reports.values() if report is not None]
    furthest = max((report.step, report.order) for report in present)
    waiting = defaultdict(list)
    for report in present:
        if report.rank in suspects:
            continue
        if not report.error and (report.step, report.order) < furthest:
            suspects[report.rank] = "behind the others"
        else:
            waiting[report.where].append(report.rank)
    if not suspects:
        return ""
    described, more = sorted(suspects)[:_NAMED], sorted(suspects)[_NAMED:]
    lines = ["The run is held up by", *(_described(reports[rank], rank, suspects[rank]) for rank in described)]
    if more:
        lines.append(f"  and {len(more)} more: {_ranks(more)}")
    lines += [f"  waiting: {_ranks(ranks)} in {where}" for where, ranks in sorted(waiting.items())]
    return "\n".join(lines)


def _visible(reports: dict[int, Report | None]) -> dict[int, str]:
    """The faults that are certain at once: exceptions, and stopped or gone processes on this host."""
    found = {}
    for rank, report in reports.items():
        if report is None:
            continue
        if report.error:
            if not _OF_OTHERS.search(report.error):
                found[rank] = f"failed: {report.error}"
        elif report.host == socket.gethostname() and (state := state_of_process(report.pid)) is not None:
            remedy = f" (`kill -CONT {report.pid}` resumes it)" if state == "stopped" else ""
            found[rank] = f"its process is {state}{remedy}"
    return found


def _described(report: Report | None, rank: int, fault: str) -> str:
    if report is None:
        return f"  rank {rank}: it has written nothing yet, or its host is gone"
    heard, there = max(0.0, time.time() - report.time), max(0.0, report.time - report.since)
    return (
        f"  rank {rank} (process {report.pid} on {report.host}): {fault}; its last report, {heard:.0f} s ago: "
        f"{report.where}, for {there:.0f} s"
    )


def _ranks(ranks: list[int]) -> str:
    """`ranks 0-2, 5`: ascending numbers, with ranges."""
    known = {*ranks}
    firsts, lasts = ([rank for rank in ranks if rank + step not in known] for step in (-1, 1))
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))
    return f"rank{'' if words.isdigit() else 's'} {words}"


def state_of_process(pid: int) -> str | None:
    """`stopped` or `gone`: the fault of a process on this host; None if it runs."""
    if not Path("/proc/self/stat").exists():  # another operating system
        return None
    try:
        # The first field after the name, which may itself hold a parenthesis.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped by a debugger", "Z": "gone", "X": "gone"}.get(letter)


# What threads of this process wait for

# Linux system calls that may wait for a disk or a pipe, by number.
_CALLS = {
    "x86_64": {0: "read", 1: "write", 2: "open", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 73: "flock"}
    | {74: "fsync", 75: "fdatasync", 77: "ftruncate", 82: "rename", 83: "mkdir", 87: "unlink", 257: "openat"}
    | {4: "stat", 5: "fstat", 84: "rmdir", 262: "newfstatat", 263: "unlinkat", 264: "renameat", 316: "renameat2"},
    "aarch64": {63: "read", 64: "write", 67: "pread64", 68: "pwrite64", 82: "fsync", 83: "fdatasync", 46: "ftruncate"}
    | {56: "openat", 34: "mkdirat", 35: "unlinkat", 38: "renameat", 276: "renameat2", 79: "newfstatat", 80: "fstat"},
}
# Those whose first argument is a file descriptor.
_OF_DESCRIPTORS = re.compile(r"p?(read|write)(64|v)?|f(data)?sync|ftruncate|flock")


class BlockedThreads:
    """Finds threads of this process that stay in one system call on a file."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, ...], float] = {}

    def look(self) -> list[tuple[int, str, float]]:
        """(native thread id, system call, seconds since an earlier look first saw it) of each. Call it regularly."""
        now, seen, found = time.monotonic(), {}, []
        for task in Path("/proc/self/task").glob("*"):
            try:
                call, signature = _file_call(task)
            except (OSError, ValueError, IndexError):  # the thread has just ended, or the system has no such files
                continue
            if call:
                key = (task.name, *signature)
                seen[key] = self._since.get(key, now)
                found.append((int(task.name), call, now - seen[key]))
        self._since = seen
        return found


def _file_call(task: Path) -> tuple[str, list[str]]:
    """The system call on a file that a thread is in, such as `fsync /runs/a/x`, or "". Also a signature of it, which
    changes when the thread runs."""
    call = (task / "syscall").read_text().split()
    switches = [line.split()[1] for line in (task / "status").read_text().splitlines() if "ctxt_switches" in line]
    if call[0] == "-1":  # no system call; but a page fault of mapped memory waits for the disk too
        waits = (task / "stat").read_text().rpartition(")")[2].split()[0] == "D"
        return "a page fault" if waits else "", switches
    name = _CALLS.get(os.uname().machine, {}).get(int(call[0]), "") if call[0] != "running" else ""
    if _OF_DESCRIPTORS.fullmatch(name):
        path = os.readlink(f"/proc/self/fd/{int(call[1], 16)}")
        name = f"{name} {path}" if path.startswith("/") and not path.startswith("/dev/") else ""
    return name, [*call, *switches]


def line_of(native_id: int) -> str:
    """The thread's name and the line of Python that it runs."""
    for thread in threading.enumerate():
        if thread.native_id == native_id and (frame := sys._current_frames().get(thread.ident or 0)) is not None:
            last = traceback.extract_stack(frame)[-1]
            return f"thread {thread.name}, {last.name} in {Path(last.filename).name}:{last.lineno}"
    return f"thread {native_id}"
