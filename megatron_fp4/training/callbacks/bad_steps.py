"""Steps without an update: steps whose numbers are not finite, and spikes.

Steps that are not finite are skipped and counted; too many in a row end the run. A spike is a step whose loss or
gradient norm exceeds this limit, taken over the last `window` accepted steps:

    median + threshold * max(1.4826 * MAD, floor * median)         MAD: the median distance from the median

1.4826 MAD estimates the standard deviation of normally distributed numbers (Rousseeuw and Croux, "Alternatives to the
Median Absolute Deviation", 1993); unlike the sample standard deviation, spikes hardly change it. To skip a spike is
OLMo 2's method (arXiv:2501.00656; its SkipStepOptimizer: 6 standard deviations over 128 steps). To go back to the last
checkpoint and skip the data of all steps since then is PaLM's (arXiv:2204.02311, section 5.1).

- The limit is one-sided: a small loss is no spike. While the loss falls quickly, the median is above it and the MAD is
  large.
- The floors are for histories that are nearly flat, and for gradient norms, whose ordinary outliers reach twice the
  median: with a threshold of 6, a loss is a spike from 3% above the median on, a norm from 2.2 times the median on.
- An intended change (another data phase, another precision) starts a new history.
- A step that is not finite is no spike; neither resets the count of the other.

Loss and norm are the step's all-reduced numbers, so all ranks decide alike. The whole state is in the checkpoint, so a
resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_fp4.checkpoint.checkpointer import CheckpointGoneError
from megatron_fp4.config.schema import SpikesConfig
from megatron_fp4.measure.diagnosis import diagnose_nonfinite, diagnose_spike
from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.training.step import StepResult
from megatron_fp4.training.trainer import Callback, Step

_LOSS_FLOOR, _NORM_FLOOR = 0.005, 0.2


class SkippedSteps(Callback):
    """Counts steps that were skipped because they were not finite.

    max_in_row: after this many in a row the run ends with an error. num_steps: of the run; if none of them makes an
    update, the run ends with an error too. consecutive: skipped steps since the last update. total: since the run
    began. without_update: steps since the last update, including spikes.
    """

    name = "skipped"

    def __init__(self, max_in_row: int, num_steps: int) -> None:
        self.max_in_row, self.num_steps = max_in_row, num_steps
        self.consecutive = self.total = self.without_update = 0

    def after_step(self, step: Step) -> None:
        """Raises DivergedError on all ranks, with a diagnosis."""
        result = step.result
        if not result.skipped:
            self.consecutive = self.without_update = 0
            return
        self.without_update += 1
        if result.spike:
            return
        self.consecutive += 1
        self.total += 1
        no_update_at_all = step.done == self.num_steps and self.without_update >= step.done
        if no_update_at_all or self.consecutive >= self.max_in_row:
            end = "the run ends without an update: " if no_update_at_all else ""
            raise DivergedError(
                f"{end}{self.consecutive} steps in a row were not finite, up to step {step.done} (loss {result.loss}, "
                f"gradient norm {result.grad_norm}): weights and optimizer are those after step "
                f"{step.done - self.without_update}. {self.trainer.compute_again(diagnose_nonfinite, step.batch)}"
            )
        self.trainer.log.metrics.event(step.done, "skip", **self.state_dict())

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        self.without_update = done - checkpoint

    def state_dict(self) -> Any:
        return {"consecutive": self.consecutive, "total": self.total, "without_update": self.without_update}

    def load_state_dict(self, state: Any) -> None:
        self.consecutive, self.total, self.without_update = (state[key] for key in self.state_dict())


@dataclass(frozen=True)
class Spike:
    """A step that is a spike. *_limit: the most that was allowed. *_median: over the history. in_row, total: spikes so
    far, including this one."""

    loss: float
    loss_median: float
    loss_limit: float
    grad_norm: float
    grad_norm_median: float
    grad_norm_limit: float
    in_row: int
    total: int

    def __str__(self) -> str:
        def compared(name: str, value: float, limit: float, median: float) -> str:
            return f"{name} {value:.4g} ({'over' if value > limit else 'within'} {limit:.4g}, median {median:.4g})"

        loss = compared("loss", self.loss, self.loss_limit, self.loss_median)
        return f"{loss}, {compared('gradient norm', self.grad_norm, self.grad_norm_limit, self.grad_norm_median)}"


class Spikes(Callback):
    """Detects spikes, counts them, and skips or rolls back. config: with the action `none`, no step is a spike.

    in_row: spikes without an accepted step between them; with rollbacks, spikes since the same checkpoint, because a
    rollback undoes the accepted steps. total: spikes since the run began.
    """

    name = "spikes"

    def __init__(self, config: SpikesConfig) -> None:
        self.config = config
        self.accept = None if config.action == "none" else self._accepts
        self.in_row = self.total = 0
        self._checkpoint: int | None = None  # the step of the checkpoint that the last spike rolled back to
        self._regime = ""
        self._history: list[tuple[float, float]] = []  # loss and gradient norm of accepted steps, the oldest first

    def before_step(self, step: Step) -> None:
        regime = f"{self.trainer.phase(step.index)}, {self.trainer.plan_name}"
        if self.config.action != "none" and regime != self._regime:
            self._regime, self._history = regime, []

    def after_step(self, step: Step) -> None:
        if (spike := self.observe(step.result)) is None:
            return
        self._skip_or_roll_back(spike, step.done)
        if spike.in_row >= self.config.max_in_row:
            row = "in a row" if self._checkpoint is None else f"after the checkpoint of step {self._checkpoint}"
            raise DivergedError(
                f"{spike.in_row} spikes {row} (spikes.max_in_row={self.config.max_in_row}), the last in step "
                f"{step.done}: {spike}. {self.trainer.compute_again(diagnose_spike, step.batch, step.result)}"
            )

    def observe(self, result: StepResult) -> Spike | None:
        """Update history and counts with the result of a step; returns the spike, or None."""
        if self.config.action == "none" or (result.skipped and not result.spike):
            return None
        if not result.spike:
            self._history = [*self._history, (result.loss, result.grad_norm)][-self.config.window :]
            if self._checkpoint is None:
                self.in_row = 0
            return None
        target = self.last_checkpoint() if self.config.action == "rollback" else None
        if target != self._checkpoint:
            self._checkpoint, self.in_row = target, 0
        self.in_row += 1
        self.total += 1
        loss, norm = self._limits()
        return Spike(result.loss, *loss, result.grad_norm, *norm, self.in_row, self.total)

    def last_checkpoint(self) -> int | None:
        return self.trainer.checkpointer.last_step()

    def _skip_or_roll_back(self, spike: Spike, done: int) -> None:
        """Roll back to the last checkpoint, if the configuration asks for it and there is one, and record the spike."""
        trainer, restored, action, outcome = self.trainer, None, "skip", "skipped"
        if spike.in_row >= self.config.max_in_row:
            outcome, action = "the run ends", "end"
        elif self.config.action == "rollback" and self.last_checkpoint() is None:
            outcome = "skipped, because there is no checkpoint yet to roll back to"
        elif self.config.action == "rollback":
            try:
                restored, action = trainer.roll_back(done), "rollback"
                outcome = f"rolled back to the checkpoint of step {restored}, continuing with the next batch"
            except CheckpointGoneError as error:
                outcome = f"skipped, because the rollback failed: {error}"
        first = done - 1 if restored is None else restored
        start, end = trainer.samples(first), trainer.samples(done)
        trainer.log.event(
            done,
            "spike",
            f"spike: {spike}; {outcome}",
            **asdict(spike),
            action=action,
            checkpoint=restored,
            steps=[first + 1, done],
            samples=[start, end - 1],
            sources=[
                {"phase": found.phase, "source": found.source, "first": found.start, "last": found.end - 1}
                for found in trainer.data.phases.source_ranges(start, end)
            ],
        )

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        """Restore the history of the checkpoint; the counts stay."""
        # With the action `none` there is no history, and an older one would not fit the steps that follow.
        known = state is not None and self.config.action != "none"
        self._regime = state["regime"] if known else ""
        self._history = [(loss, norm) for loss, norm in state["history"]][-self.config.window :] if known else []

    def state_dict(self) -> Any:
        return {
            "in_row": self.in_row,
            "total": self.total,
            "checkpoint": self._checkpoint,
            "regime": self._regime,
            "history": [list(pair) for pair in self._history],
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore history and counts. None: the checkpoint's run had no spike detection."""
        self.rolled_back(0, 0, state)
        if state is not None:
            self.in_row, self.total, self._checkpoint = state["in_row"], state["total"], state["checkpoint"]

    def _accepts(self, loss: float, grad_norm: float) -> bool:
        if 2 * len(self._history) < self.config.window:
            return True
        (_, loss_limit), (_, norm_limit) = self._limits()
        return loss <= loss_limit and grad_norm <= norm_limit

    def _limits(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(median, limit) of the loss and of the gradient norm, over the history."""
        losses, norms = zip(*self._history, strict=True)
        return _limit(losses, self.config.threshold, _LOSS_FLOOR), _limit(norms, self.config.threshold, _NORM_FLOOR)


def _limit(values: Sequence[float], threshold: float, floor: float) -> tuple[float, float]:
    median = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - median) for value in values)
    return median, median + threshold * max(deviation, floor * abs(median))
