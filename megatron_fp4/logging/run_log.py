"""The log of a run: `metrics.jsonl` and its views, the console, `run.log`; and the wall time.

`time` records of metrics.jsonl have the `seconds` so far by kind. A resumed run continues with those of the
checkpoint's step; the time that earlier starts spent after it is lost work. The first step of a start does not count
as a training step, because it compiles kernels and starts loader workers. Goodput, as in Google's ML Goodput (2024), is
the share of the wall time in training steps that count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import yaml

from megatron_fp4.config.compose import to_yaml
from megatron_fp4.config.schema import Config
from megatron_fp4.logging import files
from megatron_fp4.logging.console import RunConsole, short_time
from megatron_fp4.logging.metrics import MetricsWriter, StepMetrics
from megatron_fp4.runtime.revision import revision

_STEPS, _FIRST, _STARTUP, _LOST = "steps", "first step", "start-up", "lost work"
# Phase of `Progress` -> kind. All other phases are start-up before the first step, and steps after it.
_KINDS = {
    **dict.fromkeys(("validation", "text samples"), "validation"),
    "data": "data wait",
    "save": "saves",
    "roll back": "rollback",
    "export": "exports",
    "end": "end",
}


class RunLog:
    """The metrics and console of one run, on its first rank; on the others (`active=False`) it writes nothing.

    The console prints from the start. Metrics are recorded from `open` to the end of a `with` around the training loop;
    before `open`, files of an earlier start do not change. times: the time of this process by kind; it observes the
    progress. memory_size: of the device, in GiB, to show which share is used; None: show no share.
    """

    def __init__(self, config: Config, active: bool, times: TimeLedger, memory_size: float | None = None) -> None:
        self.config, self.active, self.times, self.transcript = config, active, times, files.Transcript()
        self.console = RunConsole(
            config.train.steps,
            interval=config.logging.interval,
            active=active,
            memory_size=memory_size,
            transcript=self.transcript.text,
        )
        self.opened = self._told_to_stop = False
        self._steps_done = 0

    def open(self, start: int, **facts: Any) -> None:
        """Open the records after `start` steps, and record facts about the run (JSON values)."""
        run_dir = Path(self.config.run.dir)
        self.console.start_step = self._steps_done = start
        self.opened = True
        if self.active and start < self.config.train.steps:  # these files would say that the run is finished
            for name in (files.SUMMARY_FILE, *((files.PICTURE_FILE, files.REPORT_FILE) if start == 0 else ())):
                files.attempt(f"{run_dir}: a new name for {name}", partial(files.move_aside, run_dir / name))
        if self.active and start:
            files.attempt(f"{run_dir}: the time so far", partial(self.times.resume, run_dir, start))
        self.metrics = MetricsWriter(self.config, start, self.active)
        if self.active:
            self.transcript.open(run_dir / files.TRANSCRIPT_FILE)
            self.transcript.text(f"--- from step {start}, commit {revision()}")
        self.metrics.record(start, "run", {"commit": revision(), **facts})
        self._record_times()

    def settings(self, plan: Mapping[str, Any]) -> None:
        """Write config.yaml and plan.yaml. plan: `Plan.as_dict` of the first plan."""
        texts = {"config.yaml": to_yaml(self.config), "plan.yaml": yaml.safe_dump(dict(plan), sort_keys=False)}
        for name, text in texts.items() if self.active else ():
            path = Path(self.config.run.dir) / name
            files.attempt(str(path), partial(files.replace_text, path, text))

    def __enter__(self) -> RunLog:
        logging.getLogger().addHandler(self.transcript)
        self.console.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.console.__exit__(kind, error, traceback)
        if error is not None:
            self.transcript.text("".join(format_exception(error)))
        logging.getLogger().removeHandler(self.transcript)
        self._record_times()
        self.metrics.close(hurry=self._told_to_stop or error is not None)

    def _record_times(self) -> None:
        self.metrics.record(self._steps_done, "time", self.times.record())

    def step(self, metrics: StepMetrics) -> None:
        self.metrics.step(metrics)
        self.console.step(metrics)
        if self._steps_done == self.console.start_step:
            self.console.text(self.times.of_start())
        self._steps_done = metrics.step
        if metrics.step % self.config.logging.interval == 0:
            self._record_times()

    def event(self, step: int, event: str, text: str, **details: Any) -> None:
        """Record that `event` happened after `step` steps, with details (JSON values), and print `text`."""
        self.metrics.event(step, event, **details)
        self.console.event(step, text)

    def stop(self, step: int, why: str) -> None:
        """Record that the run stops after `step` steps. why: what asked for it."""
        self.metrics.event(step, "stop", signal=why)
        self._told_to_stop = True


class TimeLedger:
    """Measures how much time this process spends in each phase. began: `time.monotonic()` when the process began.

    seconds: by kind, of all starts of the run. phases: by phase of `Progress`, of this start.
    """

    def __init__(self, began: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self._kind, self._phase, self._since = _STARTUP, "imports", time.monotonic() if began is None else began
        self._first: int | None = None  # the first step of this start

    def at(self, step: int, phase: str) -> None:
        """The run begins `phase` of `step` (an observer of `Progress`)."""
        self._book()
        if phase == "data" and self._first is None:
            self._first = step
        in_step = _STARTUP if self._first is None else _FIRST if step <= self._first else _STEPS
        self._kind, self._phase = _KINDS.get(phase, in_step), phase.split(" of micro-batch")[0]

    def of_start(self) -> str:
        """The time of this start so far by phase, without phases that took less than a hundredth of it."""
        self._book()
        whole = sum(self.phases.values())
        parts = [f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items() if seconds >= 0.01 * whole]
        return f"this start took {whole:.1f} s to the end of its first step: {', '.join(parts)}"

    def resume(self, run_dir: Path, start: int) -> None:
        """Add the times in the records of `run_dir`. Call it before records of steps after `start` are removed."""
        kept: Mapping[str, float] = {}
        last: Mapping[str, float] = {}
        for record in files.records_of(run_dir, "time"):
            last = record["seconds"]
            kept = last if record["step"] <= start else kept
        lost = sum(last.values()) - sum(kept.values())
        for kind, seconds in [*kept.items(), *([(_LOST, lost)] if lost > 0 else [])]:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def record(self) -> dict[str, Any]:
        """The times so far, as in a record."""
        self._book()
        return {"seconds": {kind: round(value, 3) for kind, value in self.seconds.items()}}

    def _book(self) -> None:
        now = time.monotonic()
        for seconds, of in (self.seconds, self._kind), (self.phases, self._phase):
            seconds[of] = seconds.get(of, 0.0) + now - self._since
        self._since = now


def goodput_of(records: Iterable[Mapping[str, Any]]) -> str | None:
    """The share of training steps in the wall time of all starts of a run, and the shares of other kinds, as text; None
    if the records have no times, as in older versions."""
    seconds: Mapping[str, float] = {}
    starts = 0
    for record in records:
        starts += record["kind"] == "run"
        seconds = record["seconds"] if record["kind"] == "time" else seconds
    if not (wall := sum(seconds.values())):
        return None
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    others = [f"{kind} {time / wall:.1%}" for kind, time in longest_first if kind != _STEPS and time >= 0.005 * wall]
    in_starts = f" in {starts} starts" if starts > 1 else ""
    rest = f"; {', '.join(others)}" if others else ""
    return f"{seconds.get(_STEPS, 0.0) / wall:.1%} of {short_time(wall)}{in_starts}{rest}"
