"""Where a run's wall time goes, over all its starts, and its goodput: the share in training steps that count.

Records `time` of metrics.jsonl hold the `seconds` so far by kind. A start continues those of the checkpoint's step;
what earlier starts spent after it is lost work. The first step of a start, which compiles kernels and starts the
loader's workers, does not count. (The word as in Google's ML Goodput, 2024.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fp4.logging.files import iterate_records
from megatron_fp4.logging.words import short_time

STEPS, FIRST, STARTUP, LOST = "steps", "first step", "start-up", "lost work"
# By the phases of `Progress`; every other one belongs to the start-up before the first step, and to a step after it.
KINDS = {
    "start": STARTUP,
    "build": STARTUP,
    "load": STARTUP,
    "tune and test kernels": STARTUP,
    "data": "data wait",
    "validation": "validation",
    "text samples": "validation",
    "save": "saves",
    "go back to a checkpoint": "going back",
    "export": "exports",
    "end": "end",
}
ORDER = (STEPS, FIRST, STARTUP, "data wait", "validation", "saves", LOST, "going back", "exports", "end")


class TimeLedger:
    """Books the time of this process under what the run is doing. began: `time.monotonic()` of its begin."""

    def __init__(self, began: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._kind, self._since = STARTUP, time.monotonic() if began is None else began
        self._first: int | None = None  # the first step of this start

    def at(self, step: int, phase: str) -> None:
        """The run begins `phase` of `step` (an observer of `Progress`)."""
        self._book()
        if phase == "data" and self._first is None:
            self._first = step
        in_step = STARTUP if self._first is None else FIRST if step <= self._first else STEPS
        self._kind = KINDS.get(phase, in_step)

    def resume(self, path: Path, start: int) -> None:
        """Continue the times in the records at `path`, before those of steps after `start` are cut."""
        kept: Mapping[str, float] = {}
        last: Mapping[str, float] = {}
        for record in iterate_records(path, "time") if path.exists() else ():
            last = record["seconds"]
            kept = last if record["step"] <= start else kept
        lost = sum(last.values()) - sum(kept.values())
        for kind, seconds in [*kept.items(), *([(LOST, lost)] if lost > 0 else [])]:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def record(self) -> dict[str, Any]:
        """The times so far, as a record has them."""
        self._book()
        return {"seconds": {kind: round(value, 3) for kind, value in self.seconds.items()}}

    def _book(self) -> None:
        now = time.monotonic()
        self.seconds[self._kind] = self.seconds.get(self._kind, 0.0) + now - self._since
        self._since = now


@dataclass(frozen=True)
class Goodput:
    """seconds: of all starts by kind, in the order of `ORDER`."""

    seconds: dict[str, float]
    starts: int

    @property
    def wall(self) -> float:
        """Seconds of all starts."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Of the wall time in steps that count, 0..1."""
        return self.seconds.get(STEPS, 0.0) / self.wall if self.wall else 0.0

    def __str__(self) -> str:
        others = {kind: value for kind, value in self.seconds.items() if kind != STEPS and value >= 0.005 * self.wall}
        most = sorted(others.items(), key=lambda item: -item[1])
        starts = f" in {self.starts} starts" if self.starts > 1 else ""
        rest = ", ".join(f"{kind} {value / self.wall:.1%}" for kind, value in most)
        return f"{self.share:.1%} of {short_time(self.wall)}{starts}" + (f"; {rest}" if rest else "")


def goodput_of(records: Iterable[Mapping[str, Any]]) -> Goodput | None:
    """Of a run with these records; None if they have no times, as those of older versions."""
    seconds: Mapping[str, float] = {}
    starts = 0
    for record in records:
        starts += record["kind"] == "run"
        seconds = record["seconds"] if record["kind"] == "time" else seconds
    kinds = [*ORDER, *(kind for kind in seconds if kind not in ORDER)]
    return Goodput({kind: seconds[kind] for kind in kinds if kind in seconds}, starts) if seconds else None
