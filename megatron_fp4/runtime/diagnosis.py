"""Who holds up a run, from what the ranks wrote about themselves (progress.py).

A rank is suspected that failed; whose process, on this host, is stopped or gone; whose file is no longer rewritten; or
that is at an earlier place than others: an earlier step, or an earlier phase of the same step.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

# Of the ranks with one and the same fault, so many are described one by one.
_NAMED = 8
_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "gone", "X": "gone"}


class Report(NamedTuple):
    """What a rank writes about itself. start: the same on all ranks of one start of the run. beat: counts its writings.
    step, phase, order, since: see progress.Place. time: of writing. error: the exception it ended with, or ""."""

    start: str
    rank: int
    host: str
    pid: int
    step: int
    phase: str
    order: int
    since: float
    time: float
    beat: int
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


def is_lowest_waiting(folder: Path, mine: Report, patience: float, interval: float) -> bool:
    """Whether no lower rank, alive and waiting as long, is there to speak instead. Reads few files, usually one.

    patience, interval: seconds that a rank waits before it looks, and between its writings.
    """
    for rank in range(mine.rank):
        other = read_report(folder, rank, mine.start)
        if other is None or process_state(other) is not None or other.error:
            continue
        # Four fifths: ranks begin to wait one after the other.
        if other.time - other.since >= 0.8 * patience and _writes_again(folder, other, 2.5 * interval):
            return False
    return True


def _writes_again(folder: Path, report: Report, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        later = read_report(folder, report.rank, report.start)
        if later is not None and later.beat > report.beat:
            return True
        time.sleep(seconds / 50)
    return False


def diagnose(folder: Path, mine: Report, world_size: int, wait: Callable[[], None]) -> str:
    """The suspects and where the others are, in a few lines; "" if none is suspected.

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
        for rank, after in reports.items():
            earlier = before[rank]
            silent = after is None or (earlier is not None and after.beat == earlier.beat)
            if rank != mine.rank and silent and rank not in suspects:
                suspects[rank] = "its process writes nothing any more: stopped, gone, or its host is"
    present = [report for report in reports.values() if report is not None]
    furthest = max((report.step, report.order) for report in present)
    for report in present:
        if report.rank not in suspects and not report.error and (report.step, report.order) < furthest:
            suspects[report.rank] = "behind the others"
    if not suspects:
        return ""
    lines = ["The run is held up by", *(_described(reports[rank], rank, suspects[rank]) for rank in sorted(suspects))]
    if len(suspects) > _NAMED:
        rest = ranks_in_words(sorted(suspects)[_NAMED:])
        lines[_NAMED + 1 :] = [f"  and {len(suspects) - _NAMED} more: {rest}"]
    waiting = defaultdict(list)
    for report in present:
        if report.rank not in suspects:
            waiting[report.where].append(report.rank)
    lines += [f"  waiting: {ranks_in_words(ranks)} in {where}" for where, ranks in sorted(waiting.items())]
    return "\n".join(lines)


def _visible(reports: dict[int, Report | None]) -> dict[int, str]:
    """What is certain at once: exceptions, and the processes of this host."""
    found = {}
    for rank, report in reports.items():
        if report is None:
            continue
        state = process_state(report)
        if report.error and not _follows(report.error):
            found[rank] = f"failed: {report.error}"
        elif state is not None and not report.error:
            remedy = f" (`kill -CONT {report.pid}` resumes it)" if state == "stopped" else ""
            found[rank] = f"its process is {state}{remedy}"
    return found


def _follows(error: str) -> bool:
    """Whether an exception is that of a rank that waited for another one."""
    return re.search(r"gloo|nccl|timed out|connection (closed|reset)", error, re.IGNORECASE) is not None


def _described(report: Report | None, rank: int, fault: str) -> str:
    if report is None:
        return f"  rank {rank}: nothing is known of it: it never came as far as this, or its host is gone"
    heard, there = time.time() - report.time, report.time - report.since
    return (
        f"  rank {rank} (process {report.pid} on {report.host}): {fault}; last heard of {max(0.0, heard):.0f} s ago in "
        f"{report.where}, {max(0.0, there):.0f} s after it came there"
    )


def process_state(report: Report) -> str | None:
    """What is wrong with a rank's process if it is on this host: stopped or gone; None if it runs or is elsewhere."""
    return state_of_process(report.pid) if report.host == socket.gethostname() else None


def state_of_process(pid: int) -> str | None:
    """What is wrong with a process of this host: stopped or gone; None if it runs."""
    if not Path("/proc/self/stat").exists():  # another operating system
        return None
    try:
        # The first field after the name, which may itself hold a parenthesis.
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "gone"
    return _STATES.get(letter)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`ranks 0-2, 5`: ascending numbers, neighbours together."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'' if len(spans) == 1 and spans[0][0] == spans[0][1] else 's'} {words}"


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
_OF_DESCRIPTORS = {
    *("read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "fdatasync", "ftruncate", "flock"),
}


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
        waits = (task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "D"
        return "a page fault" if waits else "", switches
    name = _CALLS.get(os.uname().machine, {}).get(int(call[0]), "") if call[0] != "running" else ""
    if name in _OF_DESCRIPTORS:
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
