"""What a run says while it trains: each happening once in `metrics.jsonl` and its views, and once on the console."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_fp4.checkpoint.saves import SaveReport
from megatron_fp4.config.schema import Config
from megatron_fp4.report.console import RunConsole
from megatron_fp4.report.metrics import MetricsWriter, StepMetrics


class RunLog:
    """The metrics and the console of one run, on its first rank; silent on the others (`active=False`).

    The console prints from the start. Metrics are recorded between `open` and the end of a `with` around the training
    loop; before that nothing of an earlier start is touched.
    """

    def __init__(self, config: Config, active: bool) -> None:
        self.config, self.active = config, active
        self.console = RunConsole(config.train.steps, interval=config.logging.interval, active=active)
        self._wandb_run_id: str | None = None

    def state_dict(self) -> str | None:
        """The run's id at wandb, under which it goes on after a resume."""
        return self._wandb_run_id

    def load_state_dict(self, wandb_run_id: str | None) -> None:
        """Take up what a checkpoint held."""
        self._wandb_run_id = wandb_run_id

    def open(self, start: int, **facts: Any) -> None:
        """Begin to record, from `start` steps done, with facts about the run (JSON values)."""
        settings = self.config.logging
        self.console.start_step = start
        self.metrics = MetricsWriter(
            Path(self.config.run.dir),
            resume_step=start,
            tensorboard=settings.tensorboard,
            wandb_mode=settings.wandb,
            wandb_project=settings.wandb_project,
            wandb_run_id=self._wandb_run_id,
            config=asdict(self.config),
            active=self.active,
        )
        self._wandb_run_id = self.metrics.wandb_run_id
        self.metrics.run(start, **facts)

    def __enter__(self) -> RunLog:
        with ExitStack() as stack:
            stack.enter_context(self.metrics)
            stack.enter_context(self.console)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def switch(self, step: int) -> None:
        """The precision switch happened before `step` (from 0)."""
        switch = self.config.precision.switch
        self.metrics.event(step + 1, "switch", scope=switch.scope, target=switch.target)
        self.console.event(step, f"precision switches to {switch.target} ({switch.scope})")

    def step(self, metrics: StepMetrics, skipped: dict[str, int]) -> None:
        """A training step is done. skipped: the counts of skipped steps, recorded where this is one."""
        self.metrics.step(metrics)
        self.console.step(metrics)
        if metrics.skipped:
            self.metrics.event(metrics.step, "skip", **skipped)

    def validation(self, step: int, tokens: int, losses: dict[str, float]) -> None:
        """Held-out losses by source, in nats per token, after `step` steps and `tokens` training tokens."""
        self.metrics.validation(step, tokens, losses)
        self.console.validation(step, losses)

    def saves(self, reports: Sequence[SaveReport]) -> None:
        """Saves have ended; those of which no checkpoint came are said loudly."""
        for report in reports:
            times = {"seconds": round(report.seconds, 3), "stall": round(report.stall, 3)}
            if report.error is None:
                self.metrics.event(report.step, "checkpoint", path=str(report.folder), **times)
                self.console.event(report.step, f"saved {report.folder}")
            else:
                self.metrics.event(report.step, "save_failed", error=report.error, **times)
                self.console.event(report.step, f"NOT SAVED, going on without: {report.error}")

    def stop(self, step: int, signal: object) -> None:
        """The run stops after `step` steps on a signal to this rank, or (None) to another."""
        self.metrics.event(step, "stop", signal=str(signal))
        steps = self.config.train.steps
        self.console.text(f"stopped after step {step} of {steps} on {signal or 'a signal to another rank'}")
