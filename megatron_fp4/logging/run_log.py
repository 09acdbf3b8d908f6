"""What a run says while it trains: each happening once in `metrics.jsonl` and its views, and once on the console; and
where its wall time goes.

Records `time` of metrics.jsonl hold the `seconds` so far by kind. A start continues those of the checkpoint's step;
what earlier starts spent after it is lost work. The first step of a start, which compiles kernels and starts the
loader's workers, does not count. Goodput, as in Google's ML Goodput (2024), is the share in training steps that count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from megatron_fp4.checkpoint.checkpointer import SaveReport
from megatron_fp4.config.compose import to_yaml
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.console import RunConsole, short_time
from megatron_fp4.logging.files import (
    PICTURE_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    attempt,
    move_aside,
    records_of,
    replace_text,
)
from megatron_fp4.logging.metrics import MetricsWriter, StepMetrics
from megatron_fp4.runtime.revision import revision

_STEPS, _FIRST, _STARTUP, _LOST = "steps", "first step", "start-up", "lost work"
# By the phases of `Progress`; every other one belongs to the start-up before the first step, and to a step after it.
_KINDS = {
    **dict.fromkeys(("validation", "text samples"), "validation"),
    "data": "data wait",
    "save": "saves",
    "go back to a checkpoint": "going back",
    "export": "exports",
    "end": "end",
}


class RunLog:
    """The metrics and the console of one run, on its first rank; silent on the others (`active=False`).

    memory_size: of the device, in GiB, if the console is to show the share of it that is taken. The console prints from
    the start. Metrics are recorded between `open` and the end of a `with` around the training loop; before that nothing
    of an earlier start is touched. times: where the time of this process goes; an observer of its progress.
    """

    def __init__(self, config: Config, active: bool, times: TimeLedger, memory_size: float | None = None) -> None:
        self.config, self.active, self.times = config, active, times
        self.console = RunConsole(
            config.train.steps, interval=config.logging.interval, active=active, memory_size=memory_size
        )
        self.opened = self._told_to_stop = False
        self._steps_done = 0
        self._found: list[tuple[str, dict[str, Any]]] = []

    def found(self, event: str, lines: Sequence[str], **details: Any) -> None:
        """Say what a start has found before it began: `lines` now, and an event with details once records are open."""
        for line in lines:
            self.console.text(line)
        self._found.append((event, details))

    def open(self, start: int, **facts: Any) -> None:
        """Begin to record, from `start` steps done, with facts about the run (JSON values)."""
        run_dir = Path(self.config.run.dir)
        self.console.start_step = self._steps_done = start
        self.opened = True
        if self.active and start < self.config.train.steps:  # so it is not finished, whatever an earlier end wrote
            for name in (SUMMARY_FILE, *((PICTURE_FILE, REPORT_FILE) if start == 0 else ())):
                attempt(f"{run_dir}: another name for {name}", partial(move_aside, run_dir / name))
        if self.active and start:
            attempt(f"{run_dir}: the time so far", partial(self.times.resume, run_dir, start))
        self.metrics = MetricsWriter(self.config, start, self.active)
        self.metrics.record(start, "run", {"commit": revision(), **facts})
        self._record_times()
        for event, details in self._found:
            self.metrics.event(start, event, **details)

    def settings(self, plan: Mapping[str, Any]) -> None:
        """Write config.yaml and plan.yaml. plan: `Plan.as_dict` of the first plan."""
        texts = {"config.yaml": to_yaml(self.config), "plan.yaml": yaml.safe_dump(dict(plan), sort_keys=False)}
        for name, text in texts.items() if self.active else ():
            path = Path(self.config.run.dir) / name
            attempt(str(path), partial(replace_text, path, text))

    def __enter__(self) -> RunLog:
        self.console.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.console.__exit__(kind, error, traceback)
        self._record_times()
        self.metrics.close(hurry=self._told_to_stop or error is not None)

    def _record_times(self) -> None:
        self.metrics.record(self._steps_done, "time", self.times.record())

    def step(self, metrics: StepMetrics) -> None:
        """A training step is done."""
        self.metrics.step(metrics)
        self.console.step(metrics)
        if self._steps_done == self.console.start_step:
            self.console.text(self.times.of_start())
        self._steps_done = metrics.step
        if metrics.step % self.config.logging.interval == 0:
            self._record_times()

    def switch(self, step: int) -> None:
        """The precision switch happened before `step` (from 0)."""
        switch = self.config.precision.switch
        self.metrics.event(step + 1, "switch", scope=switch.scope, target=switch.target)
        self.console.event(step, f"precision switches to {switch.target} ({switch.scope})")

    def validation(self, step: int, tokens: int, losses: dict[str, float], bits_per_byte: dict[str, float]) -> None:
        """Held-out losses by source, in nats per token, and as far as known in bits per byte of text, after `step`
        steps and `tokens` training tokens."""
        mean, bits = sum(losses.values()) / len(losses), {"bits_per_byte": bits_per_byte} if bits_per_byte else {}
        curves = {f"loss/validation_{source}": loss for source, loss in losses.items()} | {"loss/validation": mean}
        curves |= {f"bits_per_byte/{source}": value for source, value in bits_per_byte.items()}
        self.metrics.record(step, "validation", {"tokens": tokens, "loss": mean, "losses": losses, **bits}, curves)
        self.console.validation(step, losses, bits_per_byte)

    def texts(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """What the model says after `step` steps: of each the `prompt`, its continuation `text` (None: the logits were
        not finite), and whether it `ended` by itself, rather than because it was long enough."""
        self.metrics.texts(step, samples)
        for sample in samples:
            text = "nothing, because its logits are not finite" if sample["text"] is None else repr(sample["text"])
            self.console.event(step, f"the model continues {sample['prompt']!r}: {text}")

    def saves(self, reports: Sequence[SaveReport]) -> None:
        """Saves have ended; those of which no checkpoint came are said loudly."""
        for report in reports:
            times = {"seconds": round(report.seconds, 3), "stall": round(report.stall, 3)}
            if report.error is None:
                self.metrics.event(report.step, "checkpoint", path=str(report.folder), **times)
                self.console.event(report.step, f"saved {report.folder}")
            else:
                self.metrics.event(report.step, "save_failed", error=report.error, **times)
                self.console.event(report.step, f"NOT SAVED, training continues: {report.error}")

    def exported(self, step: int, folder: Path, export_format: str, seconds: float) -> None:
        """The checkpoint of `step` steps is exported in `folder`; it took `seconds`."""
        self.metrics.event(step, "export", path=str(folder), format=export_format, seconds=round(seconds, 3))
        self.console.event(step, f"exported {folder} ({export_format}, {seconds:.1f} s)")

    def export_failed(self, step: int, error: str, command: str) -> None:
        """There is no export of `step` steps. command: what makes it by hand."""
        self.metrics.event(step, "export_failed", error=error, command=command)
        self.console.event(step, f"NOT EXPORTED, training continues: {error}; by hand: {command}")

    def stop(self, step: int, why: str | None) -> None:
        """The run is to stop after `step` steps. why: what asked this rank to, None: another rank was asked."""
        self.metrics.event(step, "stop", signal=why or "a signal to another rank")
        self._told_to_stop = True

    def stopped(self, start: int, step: int, why: str | None) -> None:
        """Say how the run stands now that it has stopped after `step` steps and everything is written. start: the steps
        that were done when it began. why: as for `stop`."""
        how = f"saved step {step}" if step > start else "there is nothing new to save"
        on = f"step {step} of {self.config.train.steps} on {why or 'a signal to another rank'}"
        self.console.text(f"stopped after {on}: {how}; the same command resumes")


class TimeLedger:
    """Books the time of this process under what the run is doing. began: `time.monotonic()` of its begin.

    seconds: by kind, of all starts. phases: of this one, by the phases of `Progress`.
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
        """Where the time of this start went so far; what took less than a hundredth of it is not named."""
        self._book()
        whole = sum(self.phases.values())
        parts = [f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items() if seconds >= 0.01 * whole]
        return f"this start took {whole:.1f} s to the end of its first step: {', '.join(parts)}"

    def resume(self, run_dir: Path, start: int) -> None:
        """Continue the times in the records of `run_dir`, before those of steps after `start` are cut."""
        kept: Mapping[str, float] = {}
        last: Mapping[str, float] = {}
        for record in records_of(run_dir, "time"):
            last = record["seconds"]
            kept = last if record["step"] <= start else kept
        lost = sum(last.values()) - sum(kept.values())
        for kind, seconds in [*kept.items(), *([(_LOST, lost)] if lost > 0 else [])]:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def record(self) -> dict[str, Any]:
        """The times so far, as a record has them."""
        self._book()
        return {"seconds": {kind: round(value, 3) for kind, value in self.seconds.items()}}

    def _book(self) -> None:
        now = time.monotonic()
        for seconds, of in (self.seconds, self._kind), (self.phases, self._phase):
            seconds[of] = seconds.get(of, 0.0) + now - self._since
        self._since = now


def goodput_of(records: Iterable[Mapping[str, Any]]) -> str | None:
    """The share of steps that count in the wall time of all starts of a run with these records, and what took the rest;
    None if they have no times, as those of older versions."""
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
