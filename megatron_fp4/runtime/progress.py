"""Record what each rank is doing in `run.dir/ranks`, diagnose which rank holds up a run, and end a rank that hangs.

The training loop reports its place (`Progress.at`, which sets a tuple). Every few seconds a thread writes the place to
`ranks/rank_00003.json`, whether or not it changed; if a process is stopped or gone, its file is no longer rewritten. On
a thousand ranks each writes every 20 seconds: 50 small writes a second in all.

When a rank has been in one place for half of `parallel.timeout_seconds`, its thread appends the stacks of all threads
to `ranks/rank_00003.stack`, and the first such rank of a step prints one diagnosis. It suspects a rank that failed, a
rank whose process on this host is stopped or gone, a rank whose file is no longer rewritten, and a rank in an earlier
place than the others. The diagnosis comes at half the timeout because NCCL's watchdog aborts the process without
running Python. If a collective fails with an exception, as gloo's do, the diagnosis is added to the exception.

Collectives fail after `parallel.timeout_seconds`. A disk that hangs need not make a collective fail: all ranks may wait
for it, or only the save in the background. So each section (the work of the main thread between two calls of `at`, and
work `beside` it) has a limit, whatever it waits for. A section moves if the kernel runs its thread or a thread of a
pool; a thread that waits for a disk, a lock or a child process does not run. A rank ends itself, with the state `hung`
in `state.json` and an exit code after which schedulers start the run again, if

    its main thread does not run for 0.9 of the timeout, before other ranks stop waiting for it,
    a save in the background does not move for 5.4 times the timeout, or 0.9 if training waits for it,
    its main thread neither begins a section nor calls `alive` for six times the timeout, even if it runs.

A thread inside a function of torch computes, or waits for a device or for other ranks, whose own limits hold. So only
the last limit counts for it, and the timeout of collectives. A call that keeps Python's lock for ever (a page fault of
mapped memory, for example) stops this thread too; nothing here sees it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import thread as pools
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from megatron_fp4.config.errors import hidden
from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.precision import messages
from megatron_fp4.runtime.errors import ExitCode

T = TypeVar("T")

FOLDER = "ranks"
# Multiples of `parallel.timeout_seconds`: until a rank prints a diagnosis; until it ends itself because the main thread
# does not run, because work beside it does not move, or because the main thread shows no progress.
_SPEAK, _STILL, _STILL_BESIDE, _WITHOUT_PROGRESS = 0.5, 0.9, 5.4, 6.0
# At most so many seconds between two looks at the sections.
_LOOK_SECONDS = 1.0
_STATE_SECONDS = 10.0
_RECORD_BYTES = 1024
# The most suspected ranks that a diagnosis describes one by one.
_NAMED = 8
# In the text of an error: the rank waited for another one.
_WAITED = re.compile(r"gloo|nccl|timed out|timeout|connection", re.IGNORECASE)


class Place(NamedTuple):
    """What a rank is doing. step: as in metrics.jsonl, 0 before the first. order: the phase's number within the step,
    the same on all ranks. since: `time.monotonic()` of the last progress in this phase."""

    step: int
    phase: str
    order: int
    since: float


class Section(NamedTuple):
    """Work that has a limit. moved: a number that changes when the work moves; None if others have to move first.
    where: says what it waits for."""

    step: int
    phase: str
    moved: Callable[[], float | None]
    where: Callable[[], str]


class Progress:
    """The place of this rank; has limits inside `with progress.limited()`, is written inside `with progress.watched()`.

    observer: called with step and phase when a phase begins. on_hang: called with step and reason before the process
    ends itself. timeout_seconds: `parallel.timeout_seconds`, once it is known.
    """

    def __init__(self, timeout_seconds: float = ParallelConfig().timeout_seconds) -> None:
        self.observer: Callable[[int, str], None] | None = None
        self.place = Place(0, "start", 0, time.monotonic())
        self.on_hang: Callable[[int, str], None] | None = None
        self.timeout_seconds = timeout_seconds
        self._beside: dict[str, Section] = {}

    def at(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step` (as in metrics.jsonl, from 1; 0: before the first). All ranks report the
        same phases in the same order."""
        order = self.place.order + 1 if step == self.place.step else 0
        self.place = Place(step, phase, order, time.monotonic())
        if self.observer is not None:
            self.observer(step, phase)

    def alive(self) -> None:
        """This rank makes progress within its phase, or what it waits for does."""
        self.place = self.place._replace(since=time.monotonic())

    @contextlib.contextmanager
    def beside(self, section: Section) -> Iterator[None]:
        """Inside, `section` has a limit beside the main thread's."""
        self._beside[section.phase] = section
        try:
            yield
        finally:
            del self._beside[section.phase]

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Inside, the process ends itself when a section of this thread or beside it makes no progress."""
        end, main = threading.Event(), threading.current_thread()
        threading.Thread(target=self._limits_loop, args=(main, end), name="limits", daemon=True).start()
        try:
            yield
        finally:
            end.set()

    def _limits_loop(self, main: threading.Thread, end: threading.Event) -> None:
        seen: dict[str, tuple[object, float]] = {}  # of each section: what it showed last, and since when
        looked = time.monotonic()
        while not end.wait(interval := min(_LOOK_SECONDS, self.timeout_seconds / 20)):
            now, timeout, (step, phase, _, since) = time.monotonic(), self.timeout_seconds, self.place
            if now - looked > 10 * interval:  # this process was stopped, and nothing in it could move
                seen.clear()
                self.alive()
                since = now
            looked, training = now, section_of(main, step, phase)
            training_waits = now - since >= _STILL * timeout
            for name, section in {"": training, **self._beside}.items():
                moved = section.moved()
                shown = (section.step, moved, since if section is training else None)
                if moved is None or name not in seen or seen[name][0] != shown:
                    seen[name] = shown, now
                still, is_short = now - seen[name][1], section is training or training_waits
                if still >= (_STILL if is_short else _STILL_BESIDE) * timeout:
                    self._end_hung(section.step, section.phase, still, section.where())
            if now - since >= _WITHOUT_PROGRESS * timeout:
                self._end_hung(step, phase, now - since, training.where())

    def _end_hung(self, step: int, phase: str, seconds: float, why: str) -> NoReturn:
        rank = f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"
        place = f"{'in ' if step else ''}{_words(step, phase)}"
        reason = f"{rank} hangs {place}: no progress for {seconds:.0f} s; {why}"

        def say() -> None:
            print(f"pretrain.py: {reason}; ending", file=sys.stderr, flush=True)
            if self.on_hang is not None:
                self.on_hang(step, reason)

        saying = threading.Thread(target=say, daemon=True)  # stderr and state.json may be on a disk that hangs too
        saying.start()
        saying.join(_STATE_SECONDS)
        os._exit(ExitCode.HUNG)

    def loading(self, batches: Iterable[T], first_step: int) -> Iterator[T]:
        """Yield `batches`, one for each step from `first_step` on. The phase is `data` while this rank waits for
        one. A TimeoutError of a run's batches ends the process."""
        iterator = iter(batches)
        for step in itertools.count(first_step):
            self.at(step, "data")
            try:
                batch = next(iterator, None)
            except TimeoutError as error:
                if self.on_hang is None:
                    raise
                self._end_hung(step, "data", time.monotonic() - self.place.since, str(error))
            if batch is None:
                return
            yield batch

    def watched(self, run_dir: Path) -> _Watch:
        """A context in which this rank's place is written to `run_dir`. A collective when entered."""
        return _Watch(self, run_dir / FOLDER)


def record_collectives(run_dir: Path) -> None:
    """Switch on NCCL's flight recorder, unless it is set. Call it before the process group is made.

    When a collective times out, NCCL ends the process in C++; the recorder then writes the last collectives of each
    rank to the run's folder. torch's `torchfrtrace` reads these files and finds which rank did not join which
    collective.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((run_dir / FOLDER / "nccl_trace_rank_").absolute()))


class _Watch:
    def __init__(self, progress: Progress, folder: Path) -> None:
        self._progress, self._folder, self._timeout = progress, folder, progress.timeout_seconds
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # Often enough to notice a stopped rank in time, rarely enough for a shared disk.
        self.interval = min(max(5.0, self._world_size / 50), self._timeout / 20)
        self._start = self._error = ""
        self._diagnosed: Place | None = None
        self._end = threading.Event()
        # Not the thread of the limits: writing the place may hang with the disk.
        self._thread = threading.Thread(target=self._progress_loop, name="progress", daemon=True)

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
        self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end.set()
        self._error = hidden(f"{type(error).__name__}: {error}")[:400] if error is not None else ""
        self._write()
        speaks = self._world_size > 1 and (self._rank == 0 or self._world_size <= 64)
        if speaks and isinstance(error, RuntimeError) and _WAITED.search(str(error)) and (text := self.diagnosis()):
            error.add_note(text)

    def diagnosis(self) -> str:
        """`diagnose`, which may wait some intervals to tell a waiting rank from one that is gone."""
        return diagnose(self._folder, self._report(), self._world_size, wait=lambda: time.sleep(2.5 * self.interval))

    def _progress_loop(self) -> None:
        while not self._end.wait(self.interval):
            self._write()
            place = self._progress.place
            if time.monotonic() - place.since >= _SPEAK * self._timeout and place != self._diagnosed:
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
            return
        try:
            (self._folder / f"diagnosis_{place.step:08d}").touch(exist_ok=False)
        except FileExistsError:  # another rank was first, and prints
            return
        text = self.diagnosis() or "all ranks are alive: slow work, or a collective that never ends"
        print(
            f"pretrain.py: rank {self._rank} has been in step {place.step}, {place.phase}, for "
            f"{time.monotonic() - place.since:.0f} s (collectives fail after {self._timeout:.0f} s).\n{text}\n"
            f"The stacks of all threads: {self._folder}/*.stack",
            file=sys.stderr,
            flush=True,
        )

    def _report(self) -> Report:
        step, phase, order, since = self._progress.place
        host, pid = socket.gethostname(), os.getpid()
        seconds = time.monotonic() - since
        return Report(self._start, self._rank, host, pid, step, phase, order, seconds, time.time(), self._error)

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
    """The content of a rank's file. start: identifies the start of the run, the same on all ranks. step, phase, order:
    its Place. seconds: since its last progress. time: of writing. error: the exception that it ended with, or ""."""

    start: str
    rank: int
    host: str
    pid: int
    step: int
    phase: str
    order: int
    seconds: float
    time: float
    error: str

    @property
    def where(self) -> str:
        return _words(self.step, self.phase)


def _words(step: int, phase: str) -> str:
    return f"step {step}, {phase}" if step else f"before the first step, {phase}"


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

    wait: waits until every rank that is alive has written again. Not called if a rank visibly failed or stopped here.
    """

    def read() -> dict[int, Report | None]:
        reports = {rank: read_report(folder, rank, mine.start) for rank in range(world_size)}
        return {**reports, mine.rank: mine}

    reports = read()
    suspects = _certain_faults(reports)
    if not suspects:
        wait()
        before, reports = reports, read()
        suspects = _certain_faults(reports)
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


def _certain_faults(reports: dict[int, Report | None]) -> dict[int, str]:
    """The faults that are certain at once: exceptions, and stopped or gone processes on this host."""
    faults = {}
    for rank, report in reports.items():
        if report is None:
            continue
        if report.error:
            if not _WAITED.search(report.error):
                faults[rank] = f"failed: {report.error}"
        elif report.host == socket.gethostname() and (state := state_of_process(report.pid)) is not None:
            remedy = f" (`kill -CONT {report.pid}` resumes it)" if state == "stopped" else ""
            faults[rank] = f"its process is {state}{remedy}"
    return faults


def _described(report: Report | None, rank: int, fault: str) -> str:
    if report is None:
        return f"  rank {rank}: it has written nothing yet, or its host is gone"
    heard = max(0.0, time.time() - report.time)
    return (
        f"  rank {rank} (process {report.pid} on {report.host}): {fault}; its last report, {heard:.0f} s ago: "
        f"{report.where}, for {report.seconds:.0f} s"
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


# Whether threads and processes move, and what they wait for


def section_of(thread: threading.Thread, step: int, phase: str) -> Section:
    """`thread` works on `phase` of `step`."""

    def moved() -> float | None:
        frame = sys._current_frames().get(thread.ident or 0)
        waits = frame is None or frame.f_code.co_filename.startswith(_WAITING)
        return None if waits else run_time(thread)

    return Section(step, phase, moved, lambda: _stacks(thread))


def run_time(thread: threading.Thread) -> float:
    """Nanoseconds that `thread` and all threads of pools have run; see `run_time_of`."""
    return run_time_of("self", [thread.native_id, *(pooled.native_id for pooled, _ in _pooled())])


def run_time_of(pid: int | str, tasks: Iterable[int | None] = ()) -> float:
    """Nanoseconds that some or all (`()`) threads of a process have run. The time if one has just ended, or if the
    system does not tell: then it seems to move."""
    folder = Path(f"/proc/{pid}/task")
    try:
        times = [(folder / str(task) / "schedstat").read_text().split()[0] for task in tasks or os.listdir(folder)]
    except OSError:
        return float(time.monotonic_ns())
    return float(sum(map(int, times)))


# Files whose functions wait for a device or for other ranks.
_WAITING = (os.path.dirname(torch.__file__) + os.sep, messages.__file__)
_POOL = pools.__file__


def _pooled() -> Iterator[tuple[threading.Thread, FrameType]]:
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and any(each.f_code.co_filename == _POOL for each in _outwards(frame)):
            yield thread, frame


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stacks(thread: threading.Thread) -> str:
    """Where `thread` and the busy threads of pools are: the innermost functions, without their source."""
    frames = {thread: sys._current_frames().get(thread.ident or 0)}
    frames |= {pooled: frame for pooled, frame in _pooled() if frame.f_code.co_filename != _POOL}
    return "; ".join(
        f"thread {each.name} in " + " < ".join(map(_line, itertools.islice(_outwards(frame), 5)))
        for each, frame in frames.items()
    )


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
