"""What each rank is doing, in `run.dir/ranks`; who holds up a run; and when a rank ends itself.

The loop says where it is (`Progress.at`, a tuple written). A thread writes that every few seconds to
`ranks/rank_00003.json`, one small write, whether or not anything changed: a process that is stopped or gone shows by
its file not being rewritten. On a thousand ranks each writes every 20 seconds, 50 small writes a second in all.

When a rank has not moved for half of `parallel.timeout_seconds`, its thread appends where all its threads stand to
`ranks/rank_00003.stack`, and the first such rank of a step prints one diagnosis. Suspected is a rank that failed; whose
process, on this host, is stopped or gone; whose file is no longer rewritten; or that is at an earlier place than
others. It comes at half time because NCCL's watchdog aborts a process without Python: there is no later moment. When a
collective fails with an exception, gloo's way, the diagnosis is added to that.

Collectives fail after `parallel.timeout_seconds`. A disk that hangs may fail no collective: all ranks read it, or the
save in the background does. So a rank also ends itself, with the state `hung` in `state.json`, an exit code with which
schedulers start again and the system call in stderr, where
    its main thread stands in one call on a file for 0.9 of that time: before the ranks that wait for it give up,
    another thread, such as that of a save, stands in one for six times that time: meanwhile training gets on,
    its main thread shows no sign of life for six times that time, whatever for.
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
# Of `parallel.timeout_seconds`: until a rank says what it sees; until it ends itself, for a call of the main thread on
# a file, for one of another thread, and without a sign of life.
_SPEAK, _BLOCKED, _BLOCKED_BESIDE, _WITHOUT_LIFE = 0.5, 0.9, 6.0, 6.0
_STATE_SECONDS = 10.0
_RECORD_BYTES = 1024
# Of the ranks with one and the same fault, so many are described one by one.
_NAMED = 8
# Errors of a rank that waited for another one.
_OF_OTHERS = re.compile(r"gloo|nccl|timed out|timeout|connection", re.IGNORECASE)


class Place(NamedTuple):
    """Where a rank is. step: that of metrics.jsonl, 0 before the first. order: of the phase within the step, the same
    on all ranks. since: `time.time()` of the last sign of life there."""

    step: int
    phase: str
    order: int
    since: float


class Progress:
    """Where this rank is; watched and written down inside `with progress.watched(...)`.

    observer: told step and phase as each begins. on_hang: told step and reason before the process ends itself.
    """

    def __init__(self) -> None:
        self.observer: Callable[[int, str], None] | None = None
        self.place = Place(0, "start", 0, time.time())
        self.on_hang: Callable[[int, str], None] | None = None

    def at(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step` (as in metrics.jsonl, from 1; 0: before the first). All ranks say the same
        phases in the same order."""
        order = self.place.order + 1 if step == self.place.step else 0
        self.place = Place(step, phase, order, time.time())
        if self.observer is not None:
            self.observer(step, phase)

    def alive(self) -> None:
        """This rank gets on within its phase."""
        self.place = self.place._replace(since=time.time())

    def loading(self, batches: Iterable[T], first_step: int) -> Iterator[T]:
        """`batches`, one a step from `first_step` on, with the phase `data` while each is waited for."""
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
    """Switch NCCL's flight recorder on by torch's environment variables, unless they are set; before the process group
    is made: the last collectives of each rank, written to the run's folder when one times out. NCCL ends a process in
    C++ then. `torchfrtrace` of torch reads the files and says which rank did not join which collective."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((run_dir / FOLDER / "nccl_trace_rank_").absolute()))


class _Watch:
    def __init__(self, progress: Progress, folder: Path, timeout_seconds: float) -> None:
        self._progress, self._folder, self._timeout = progress, folder, timeout_seconds
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # Often enough to be told from a stopped one in time, seldom enough for a shared disk.
        self.interval = min(max(5.0, self._world_size / 50), timeout_seconds / 20)
        self._start = self._error = ""
        self._diagnosed: Place | None = None
        self._end = threading.Event()
        # Two: writing the place may hang with the disk, and what sees that must not.
        self._threads = [
            threading.Thread(target=run, name=run.__name__.strip("_"), daemon=True)
            for run in (self._progress_loop, self._limits_loop)
        ]

    def __enter__(self) -> None:
        if self._rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Of an earlier start, maybe with more ranks.
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
        """`diagnose`; waits for some intervals if that is what it takes to tell a waiting rank from one that is
        gone."""
        return diagnose(self._folder, self._report(), self._world_size, wait=lambda: time.sleep(2.5 * self.interval))

    def _progress_loop(self) -> None:
        while not self._end.wait(self.interval):
            self._write()
            place = self._progress.place
            if time.time() - place.since >= _SPEAK * self._timeout and place != self._diagnosed:
                self._diagnosed = place
                try:
                    self._print_diagnosis(place)
                except OSError as error:  # a dying disk must not end the run from here
                    print(f"pretrain.py: no diagnosis of a hang: {error}", file=sys.stderr, flush=True)

    def _print_diagnosis(self, place: Place) -> None:
        with (self._folder / f"rank_{self._rank:05d}.stack").open("a") as file:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"{now} process {os.getpid()}: step {place.step}, {place.phase}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
            print(file=file)
        self._write()
        self._end.wait(2.5 * self.interval)  # the others come to the same point, and a stopped one shows
        if self._progress.place != place or self._end.is_set():
            return  # it has moved
        try:
            (self._folder / f"diagnosis_{place.step:08d}").touch(exist_ok=False)
        except FileExistsError:  # another rank was the first, which speaks for all
            return
        text = self.diagnosis() or "all ranks are there and alive: slow work, or a collective that never ends"
        print(
            f"pretrain.py: rank {self._rank} has been in step {place.step}, {place.phase}, for "
            f"{time.time() - place.since:.0f} s (collectives fail after {self._timeout:.0f} s).\n{text}\n"
            f"Where threads stand: {self._folder}/*.stack",
            file=sys.stderr,
            flush=True,
        )

    def _limits_loop(self) -> None:
        blocked, main = BlockedThreads(), os.getpid()
        while not self._end.wait(self.interval):
            for thread, call, seconds in blocked.look():
                if seconds >= (_BLOCKED if thread == main else _BLOCKED_BESIDE) * self._timeout:
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
        step, phase, order, since = self._progress.place
        host, pid = socket.gethostname(), os.getpid()
        return Report(self._start, self._rank, host, pid, step, phase, order, since, time.time(), self._error)

    def _write(self) -> None:
        content = json.dumps(self._report()._asdict()).ljust(_RECORD_BYTES).encode()
        try:
            # In place and of one length: one write, nothing for the disk to make or rename; closed, so that network
            # disks show it to other hosts.
            descriptor = os.open(report_path(self._folder, self._rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(descriptor, content, 0)
            finally:
                os.close(descriptor)
        except OSError:
            pass  # a full disk is for the checkpoints to report


# Who holds up a run, from what the ranks wrote


class Report(NamedTuple):
    """What a rank writes about itself. start: the same on all ranks of one start of the run. step, phase, order, since:
    its Place. time: of writing. error: the exception it ended with, or ""."""

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
    """What `rank` wrote in this start; None if it wrote nothing yet or it cannot be read."""
    for _ in range(3):  # it may be in the middle of being written
        try:
            report = Report(**json.loads(report_path(folder, rank).read_text()))
        except (OSError, ValueError, TypeError):
            time.sleep(0.01)
        else:
            return report if report.start == start else None
    return None


def diagnose(folder: Path, mine: Report, world_size: int, wait: Callable[[], None]) -> str:
    """Who is behind, stopped, gone or failed, and where the others are, in a few lines; "" if none is suspected.

    wait: lets so much time pass that every rank that is alive writes again; called only if none failed or stopped
    visibly on this host.
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
                suspects[rank] = "its process writes nothing any more: stopped, gone, or its host is"
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
    """What is certain at once: exceptions, and the processes of this host."""
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
        return f"  rank {rank}: nothing is known of it: it never came as far as this, or its host is gone"
    heard, there = max(0.0, time.time() - report.time), max(0.0, report.time - report.since)
    return (
        f"  rank {rank} (process {report.pid} on {report.host}): {fault}; last heard of {heard:.0f} s ago: "
        f"{report.where}, for {there:.0f} s"
    )


def _ranks(ranks: list[int]) -> str:
    """`ranks 0-2, 5`: ascending numbers, neighbours together."""
    known = {*ranks}
    firsts, lasts = ([rank for rank in ranks if rank + step not in known] for step in (-1, 1))
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))
    return f"rank{'' if words.isdigit() else 's'} {words}"


def state_of_process(pid: int) -> str | None:
    """What is wrong with a process of this host: stopped or gone; None if it runs."""
    if not Path("/proc/self/stat").exists():  # another operating system
        return None
    try:
        # The first field after the name, which may itself hold a parenthesis.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped by a debugger", "Z": "gone", "X": "gone"}.get(letter)


# What threads of this process wait for

# System calls of Linux that may wait for a disk or a pipe, by number.
_CALLS = {
    "x86_64": {0: "read", 1: "write", 2: "open", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 73: "flock"}
    | {74: "fsync", 75: "fdatasync", 77: "ftruncate", 82: "rename", 83: "mkdir", 87: "unlink", 257: "openat"}
    | {4: "stat", 5: "fstat", 84: "rmdir", 262: "newfstatat", 263: "unlinkat", 264: "renameat", 316: "renameat2"},
    "aarch64": {63: "read", 64: "write", 67: "pread64", 68: "pwrite64", 82: "fsync", 83: "fdatasync", 46: "ftruncate"}
    | {56: "openat", 34: "mkdirat", 35: "unlinkat", 38: "renameat", 276: "renameat2", 79: "newfstatat", 80: "fstat"},
}
# Of those, the ones whose first argument is a file descriptor.
_OF_DESCRIPTORS = re.compile(r"p?(read|write)(64|v)?|f(data)?sync|ftruncate|flock")


class BlockedThreads:
    """Threads of this process that stand in one system call on a file: the same call, and not run since."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, ...], float] = {}

    def look(self) -> list[tuple[int, str, float]]:
        """(native thread id, call, seconds since it was first seen so) of each; to be called now and then."""
        now, seen, found = time.monotonic(), {}, []
        for task in Path("/proc/self/task").glob("*"):
            try:
                call, signature = _file_call(task)
            except (OSError, ValueError, IndexError):  # it has just ended, or this system does not say
                continue
            if call:
                key = (task.name, *signature)
                seen[key] = self._since.get(key, now)
                found.append((int(task.name), call, now - seen[key]))
        self._since = seen
        return found


def _file_call(task: Path) -> tuple[str, list[str]]:
    """The call on a file that a thread is in, such as `fsync /runs/a/x`, or "", and what differs if it ran between."""
    call = (task / "syscall").read_text().split()
    switches = [line.split()[1] for line in (task / "status").read_text().splitlines() if "ctxt_switches" in line]
    if call[0] == "-1":  # no call: reading mapped memory, which a disk has to fill
        waits = (task / "stat").read_text().rpartition(")")[2].split()[0] == "D"
        return "a page fault" if waits else "", switches
    name = _CALLS.get(os.uname().machine, {}).get(int(call[0]), "") if call[0] != "running" else ""
    if _OF_DESCRIPTORS.fullmatch(name):
        path = os.readlink(f"/proc/self/fd/{int(call[1], 16)}")
        name = f"{name} {path}" if path.startswith("/") and not path.startswith("/dev/") else ""
    return name, [*call, *switches]


def line_of(native_id: int) -> str:
    """Which thread of this process that is, and the line of Python where it stands."""
    for thread in threading.enumerate():
        if thread.native_id == native_id and (frame := sys._current_frames().get(thread.ident or 0)) is not None:
            last = traceback.extract_stack(frame)[-1]
            return f"thread {thread.name}, {last.name} in {Path(last.filename).name}:{last.lineno}"
    return f"thread {native_id}"
