"""Who holds up a run, from what the ranks wrote about themselves (progress.py).

A rank is suspected that failed; whose process, on this host, is stopped or gone; whose file is no longer rewritten; or
that is at an earlier place than others: an earlier step, or an earlier phase of the same step.
"""

from __future__ import annotations

import json
import re
import socket
import time
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
    """The suspects and where the others are, in a few lines; "" if nobody is suspected.

    wait: lets so much time pass that every rank that is alive writes again; called only if nobody failed or stopped
    visibly on this host.
    """
    reports = {rank: read_report(folder, rank, mine.start) for rank in range(world_size)}
    reports[mine.rank] = mine
    suspects = _visible(reports)
    silent: set[int] = set()
    if not suspects:
        wait()
        later = {rank: read_report(folder, rank, mine.start) for rank in range(world_size)}
        later[mine.rank] = mine
        for rank, (before, after) in enumerate(zip(reports.values(), later.values(), strict=True)):
            if rank != mine.rank and (after is None or (before is not None and after.beat == before.beat)):
                silent.add(rank)
        reports = later
        suspects = _visible(reports)
    for rank in silent - suspects.keys():
        suspects[rank] = "its process writes nothing any more: stopped, gone, or its host is"
    present = [report for report in reports.values() if report is not None]
    furthest = max((report.step, report.order) for report in present)
    for report in present:
        if report.rank not in suspects and not report.error and (report.step, report.order) < furthest:
            suspects[report.rank] = "behind the others"
    if not suspects:
        return ""
    lines = _describe(suspects, reports)
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
            remedy = f" (`kill -CONT {report.pid}` lets it go on)" if state == "stopped" else ""
            found[rank] = f"its process is {state}{remedy}"
    return found


def _follows(error: str) -> bool:
    """Whether an exception is that of a rank that waited for another one."""
    return re.search(r"gloo|nccl|timed out|connection (closed|reset)", error, re.IGNORECASE) is not None


def _describe(suspects: dict[int, str], reports: dict[int, Report | None]) -> list[str]:
    lines = []
    for rank in sorted(suspects)[:_NAMED]:
        report = reports[rank]
        if report is None:
            lines.append(f"  rank {rank}: nothing is known of it: it never came as far as this, or its host is gone")
        else:
            heard, there = time.time() - report.time, report.time - report.since
            lines.append(
                f"  rank {rank} (process {report.pid} on {report.host}): {suspects[rank]}; last heard of "
                f"{max(0.0, heard):.0f} s ago in {report.where}, {max(0.0, there):.0f} s after it came there"
            )
    if len(suspects) > _NAMED:
        lines.append(f"  and {len(suspects) - _NAMED} more: {ranks_in_words(sorted(suspects)[_NAMED:])}")
    return ["The run is held up by", *lines]


def process_state(report: Report) -> str | None:
    """What is wrong with a rank's process if it is on this host: stopped or gone; None if it runs or is elsewhere."""
    if report.host != socket.gethostname():
        return None
    return state_of_process(report.pid)


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
