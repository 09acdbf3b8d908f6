"""What a run says while it trains: each happening once in `metrics.jsonl` and its views, and once on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from megatron_fp4.checkpoint.saves import SaveReport
from megatron_fp4.config.compose import to_yaml
from megatron_fp4.config.environment import as_saved
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.console import RunConsole
from megatron_fp4.logging.files import (
    METRICS_FILE,
    PICTURE_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    attempt,
    move_aside,
    replace_text,
)
from megatron_fp4.logging.goodput import TimeLedger
from megatron_fp4.logging.metrics import MetricsWriter, StepMetrics, known_run_id
from megatron_fp4.runtime.revision import revision


class RunLog:
    """The metrics and the console of one run, on its first rank; silent on the others (`active=False`).

    memory_size: of the device, in GiB, if the console is to show the share of it that is taken. The console prints from
    the start. Metrics are recorded between `open` and the end of a `with` around the training loop; before that nothing
    of an earlier start is touched. times: where the time of this process goes; an observer of its progress.
    """

    def __init__(self, config: Config, active: bool, memory_size: float | None = None) -> None:
        self.config, self.active = config, active
        self.console = RunConsole(
            config.train.steps, interval=config.logging.interval, active=active, memory_size=memory_size
        )
        self.times = TimeLedger()
        self._wandb_run_id: str | None = None
        self.losses: dict[str, float] = {}
        """Of the last validation of this start."""
        self._told_to_stop, self._steps_done = False, 0
        self.opened = False
        self._found: list[tuple[str, dict[str, Any]]] = []

    def state_dict(self) -> str | None:
        """The run's id at wandb, under which it resumes."""
        return self._wandb_run_id

    def load_state_dict(self, wandb_run_id: str | None) -> None:
        """Take up what a checkpoint held."""
        self._wandb_run_id = wandb_run_id

    def found(self, event: str, lines: Sequence[str], **details: Any) -> None:
        """Say what a start has found before it began: `lines` now, and an event with details once records are open."""
        for line in lines:
            self.console.text(line)
        self._found.append((event, details))

    def open(self, start: int, **facts: Any) -> None:
        """Begin to record, from `start` steps done, with facts about the run (JSON values)."""
        settings, run_dir = self.config.logging, Path(self.config.run.dir)
        self.console.start_step = self._steps_done = start
        self.opened = True
        if self.active and start < self.config.train.steps:  # so it is not finished, whatever an earlier end wrote
            for name in (SUMMARY_FILE, *((PICTURE_FILE, REPORT_FILE) if start == 0 else ())):
                attempt(f"{run_dir}: another name for {name}", partial(move_aside, run_dir / name))
        if self.active and start:
            attempt(f"{run_dir}: the time so far", partial(self.times.resume, run_dir / METRICS_FILE, start))
        # Another run's checkpoint has that run's id.
        of_checkpoint = None if facts.get("origin") else self._wandb_run_id
        self.metrics = MetricsWriter(
            run_dir,
            resume_step=start,
            tensorboard=settings.tensorboard,
            wandb_mode=settings.wandb,
            wandb_project=settings.wandb_project,
            wandb_run_id=known_run_id(run_dir, of_checkpoint) if start else None,
            config=as_saved(self.config),
            active=self.active,
        )
        self._wandb_run_id = self.metrics.wandb_run_id
        self.metrics.run(start, commit=revision(), **facts)
        self._record_times()
        for event, details in self._found:
            self.metrics.event(start, event, **details)

    def sync(self) -> None:
        """Bring every record so far to the disk: before a checkpoint is published. Any thread may call it."""
        self.metrics.sync()

    def settings(self, plan: Mapping[str, Any]) -> None:
        """Write config.yaml and plan.yaml. plan: `Plan.as_dict` of the first plan."""
        if not self.active:
            return
        run_dir = Path(self.config.run.dir)
        texts = {"config.yaml": to_yaml(self.config), "plan.yaml": yaml.safe_dump(dict(plan), sort_keys=False)}
        for name, text in texts.items():
            attempt(str(run_dir / name), lambda: replace_text(run_dir / name, text))  # noqa: B023

    def __enter__(self) -> RunLog:
        with ExitStack() as stack:
            stack.enter_context(self.metrics)
            stack.enter_context(self.console)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._record_times()
        if self._told_to_stop:
            self.metrics.close(hurry=True)
        self._stack.__exit__(kind, error, traceback)

    def switch(self, step: int) -> None:
        """The precision switch happened before `step` (from 0)."""
        switch = self.config.precision.switch
        self.metrics.event(step + 1, "switch", scope=switch.scope, target=switch.target)
        self.console.event(step, f"precision switches to {switch.target} ({switch.scope})")

    def step(self, metrics: StepMetrics) -> None:
        """A training step is done."""
        self.metrics.step(metrics)
        self.console.step(metrics)
        self._steps_done = metrics.step
        if metrics.step % self.config.logging.interval == 0:
            self._record_times()

    def _record_times(self) -> None:
        self.metrics.record(self._steps_done, "time", self.times.record(), {})

    def validation(self, step: int, tokens: int, losses: dict[str, float], bits_per_byte: dict[str, float]) -> None:
        """Held-out losses by source, in nats per token, and as far as known in bits per byte of text, after `step`
        steps and `tokens` training tokens."""
        self.losses = losses
        self.metrics.validation(step, tokens, losses, bits_per_byte)
        self.console.validation(step, losses, bits_per_byte)

    def texts(self, step: int, samples: Sequence[Any]) -> None:
        """What the model says after `step` steps: of each the prompt, its continuation `text` (None: not finite), and
        whether it `ended`."""
        self.metrics.texts(step, [asdict(sample) for sample in samples])
        for sample in samples:
            text = "nothing, because its logits are not finite" if sample.text is None else repr(sample.text)
            self.console.event(step, f"the model continues {sample.prompt!r}: {text}")

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
        steps = self.config.train.steps
        if step == steps:
            how = f"saved step {step}, but not its export, which the same command makes"
        elif step > start:
            how = f"saved step {step}; the same command resumes"
        elif start > 0:
            how = f"nothing is new since step {start} was saved; the same command resumes"
        else:
            how = "there is nothing to save yet; the same command begins again"
        self.console.text(f"stopped after step {step} of {steps} on {why or 'a signal to another rank'}: {how}")
