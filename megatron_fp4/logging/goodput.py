"""The goodput of a run: which share of its wall time went into training steps that count.

Wall time is that of all starts, each from the begin of its process to its end; the time between starts, when nothing
was running, is told beside it. Steps that were done again after a crash do not count, nor does the first step of a
start, in which kernels are compiled and the loader's workers begin. (The word, and what it is measured against, as in
Google's ML Goodput, 2024.) `time_ledger.py` writes what is read here.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fp4.logging.record_file import lines_of, listed, record_of
from megatron_fp4.logging.time_ledger import (
    DATA,
    ENDING,
    EXPORTS,
    FIRST,
    LEDGER_FILE,
    LOST,
    OTHER,
    ROLLBACK,
    SAVES,
    STARTUP,
    STEPS,
    VALIDATION,
    last_step,
)
from megatron_fp4.logging.words import short_time

logger = logging.getLogger(__name__)

ORDER = (STEPS, FIRST, STARTUP, DATA, VALIDATION, SAVES, LOST, ROLLBACK, EXPORTS, ENDING, OTHER)
# What is done again when steps are.
_REDONE = (STEPS, FIRST, DATA, VALIDATION)


@dataclass
class Start:
    """One process of the run's first rank. began, ended: seconds since 1970; ended: its end, or its last sign of life.

    first_step: steps done when its loop began, None if it never did. last_step: steps done at its end. seconds: by what
    they went to. lost_steps: of its steps, those done again by a later start. state: in which it ended, `running` (or
    killed, which nobody writes down) if it is the newest, `killed` if it is not.
    """

    began: float
    ended: float
    host: str = ""
    device: str = ""
    ranks: int = 0
    version: str = ""
    first_step: int | None = None
    last_step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    lost_steps: float = 0.0
    state: str = "running"
    reason: str = ""
    _pieces: list[_Piece] = field(default_factory=list)
    _booked: dict[str, float] = field(default_factory=dict)


@dataclass
class _Piece:
    """Time between two lines of the ledger: of the steps in (first, last], or behind step `last` if they are one."""

    first: int
    last: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Goodput:
    """seconds: of all starts, by what they went to, in the order of `ORDER`. stopped: between starts."""

    starts: list[Start]
    seconds: dict[str, float]
    stopped: float

    @property
    def wall(self) -> float:
        """Seconds of all starts."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Of the wall time in steps that count, 0..1."""
        return self.seconds.get(STEPS, 0.0) / self.wall if self.wall else 0.0

    @property
    def lost_steps(self) -> int:
        """How many steps were done again."""
        return round(sum(start.lost_steps for start in self.starts))

    def __str__(self) -> str:
        others = {kind: value for kind, value in self.seconds.items() if kind != STEPS and value >= 0.005 * self.wall}
        most = sorted(others.items(), key=lambda item: -item[1])
        starts = f" in {len(self.starts)} starts" if len(self.starts) > 1 else ""
        rest = ", ".join(f"{kind} {value / self.wall:.1%}" for kind, value in most)
        return f"{self.share:.1%} of {short_time(self.wall)}{starts}" + (f"; {rest}" if rest else "")


def goodput_of(run_dir: str | Path) -> Goodput | None:
    """Of the run in `run_dir`, finished or not; None if it has no ledger, as runs of older versions have none.

    Lines whose values are not what a ledger has are left out, with a warning.
    """
    path = Path(run_dir) / LEDGER_FILE
    try:
        with path.open("rb") as file:
            records = {number: record_of(line) for number, line, _ in lines_of(file)}
    except OSError:
        return None
    lines = {number: record for number, record in records.items() if isinstance(record, dict)}
    wrong = [number for number, record in lines.items() if not _is_line(record)]
    if wrong:
        logger.warning("%s: %s left out: values of wrong types", path, listed(wrong))
    step, seen = last_step(Path(run_dir))
    right = [lines[number] for number in sorted(lines.keys() - wrong)]
    return account(right, seen_step=step, seen=seen)


def _is_line(record: Mapping[str, Any]) -> bool:
    """Whether `account` can read the values of a record; what is missing it does without."""
    seconds = record.get("seconds", {})
    numbers = [record[name] for name in ("time", "began", "seen_step", "ranks") if name in record]
    numbers += [] if record.get("seen") is None else [record["seen"]]
    texts = [record[name] for name in ("state", "reason") if name in record]
    if not isinstance(seconds, dict) or not all(isinstance(text, str) for text in texts):
        return False
    # Compared, because NaN, infinities and integers of any length are JSON to Python.
    values = (*numbers, *seconds.values(), record["step"])
    return all(isinstance(value, int | float) and abs(value) < 1e15 for value in values)


def account(records: Iterable[Mapping[str, Any]], seen_step: int = 0, seen: float | None = None) -> Goodput | None:
    """The lines of a ledger summed up. None if there is no start in them.

    seen_step, seen: the last step in metrics.jsonl, and when that file was last written: what the newest start has done
    since its last line.
    """
    starts: list[Start] = []
    for line in records:
        kind, moment, step = line["kind"], float(line.get("time", 0.0)), line["step"]
        if kind == "start":
            if starts and starts[-1].state == "running":
                _close(starts[-1], line.get("seen_step", 0), line.get("seen"), float(line.get("began", moment)))
                starts[-1].state = "killed"
            began = float(line.get("began", moment))
            host, device, version = (str(line.get(key, "")) for key in ("host", "device", "version"))
            starts.append(Start(began, moment, host, device, line.get("ranks", 0), version))
            _add(starts[-1], 0, moment, {STARTUP: moment - began})
        elif not starts:
            continue
        elif kind == "loop":
            for start in starts[:-1]:
                _lose(start, step)
            starts[-1].first_step = starts[-1].last_step = step
        elif kind in ("time", "end"):
            _add(starts[-1], step, moment, line.get("seconds", {}))
            if kind == "end":
                starts[-1].state, starts[-1].reason = line.get("state", "ended"), line.get("reason", "")
    if starts and starts[-1].state == "running":
        _close(starts[-1], seen_step, seen, time.time())
    for start in starts:
        for piece in start._pieces:
            for name, value in piece.seconds.items():
                start.seconds[name] = start.seconds.get(name, 0.0) + value
    # Found finished, or refused before anything was done: nobody waited for that.
    starts = [start for start in starts if start.first_step is not None or start.state not in ("finished", "refused")]
    if not starts:
        return None
    totals: dict[str, float] = {}
    for start in starts:
        for name, value in start.seconds.items():
            totals[name] = totals.get(name, 0.0) + value
    order = [*ORDER, *(name for name in totals if name not in ORDER)]
    stopped = sum(max(0.0, after.began - before.ended) for before, after in itertools.pairwise(starts))
    return Goodput(starts, {name: totals[name] for name in order if totals.get(name, 0.0) > 0}, stopped)


def _add(start: Start, step: int, moment: float, seconds: Mapping[str, float]) -> None:
    """A line of time: what came on top of the line before is a piece."""
    new = {kind: value - start._booked.get(kind, 0.0) for kind, value in seconds.items()}
    start._booked = dict(seconds)
    start._pieces.append(_Piece(start.last_step, max(step, start.last_step), new))
    start.last_step = max(step, start.last_step)
    start.ended = max(moment, start.ended)


def _close(start: Start, seen_step: int, seen: float | None, before: float) -> None:
    """What a start without an end did behind its last line, as metrics.jsonl shows it. before: when the next began."""
    if seen is None or not start.ended < seen <= before + 1.0:
        return
    done = max(start.last_step, seen_step) if start.first_step is not None else start.last_step
    kind = STEPS if done > start.last_step else OTHER
    start._pieces.append(_Piece(start.last_step, done, {kind: seen - start.ended}))
    start.last_step, start.ended = done, seen


def _lose(start: Start, step: int) -> None:
    """A later start goes on from `step` steps done: what this one did behind them is done again."""
    for piece in start._pieces:
        if piece.last <= step:
            continue
        steps = piece.last - max(piece.first, step)
        share = steps / (piece.last - piece.first) if piece.last > piece.first else 1.0
        for kind in _REDONE:
            lost = share * piece.seconds.get(kind, 0.0)
            if lost:
                piece.seconds[kind] -= lost
                piece.seconds[LOST] = piece.seconds.get(LOST, 0.0) + lost
        start.lost_steps += steps
        piece.first, piece.last = min(piece.first, step), step
