"""Steps whose loss or gradient is not finite: they are skipped and counted, and too many in a row end the run."""

from __future__ import annotations

from typing import Any

from megatron_fp4.measure.diagnosis import diagnose_nonfinite
from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.training.trainer import Callback, Step


class NonFiniteError(DivergedError):
    """Too many steps in a row were skipped."""


class SkippedSteps(Callback):
    """Counts steps that were skipped because they were not finite.

    max_in_row: so many in a row end the run of `num_steps` steps, which also ends so if none of them made an update.
    consecutive: since the last update; spikes (spikes.py) neither count nor end the row. total: since the run began.
    without_update: steps since the last update, spikes included.
    """

    name = "skipped"

    def __init__(self, max_in_row: int, num_steps: int) -> None:
        self.max_in_row, self.num_steps = max_in_row, num_steps
        self.consecutive = self.total = self.without_update = 0

    def after_step(self, step: Step) -> None:
        """Raises NonFiniteError on all ranks, with a diagnosis."""
        result = step.result
        if not result.skipped:
            self.consecutive = self.without_update = 0
            return
        self.without_update += 1
        if result.spike:
            return
        self.consecutive += 1
        self.total += 1
        none = step.done == self.num_steps and self.without_update >= step.done
        if none or self.consecutive >= self.max_in_row:
            end = "the run ends without an update: " if none else ""
            raise NonFiniteError(
                f"{end}{self.consecutive} steps in a row were not finite, up to step {step.done} (loss {result.loss}, "
                f"gradient norm {result.grad_norm}): weights and optimizer are those after step "
                f"{step.done - self.without_update}. {self.trainer.compute_again(diagnose_nonfinite, step.batch)}"
            )
        self.trainer.log.metrics.event(step.done, "skip", **self.state_dict())

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        """The updates since the checkpoint are undone."""
        self.without_update = done - checkpoint

    def state_dict(self) -> Any:
        """The counts."""
        return {"consecutive": self.consecutive, "total": self.total, "without_update": self.without_update}

    def load_state_dict(self, state: Any) -> None:
        """Those of a checkpoint, also of a run that counted less."""
        self.consecutive, self.total = state["consecutive"], state["total"]
        self.without_update = state.get("without_update", self.consecutive)
