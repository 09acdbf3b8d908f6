"""Steps whose loss or gradient is not finite: they are skipped and counted, and too many in a row end the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.training.step import StepResult


class NonFiniteError(DivergedError):
    """Too many steps in a row were skipped."""


@dataclass
class NonFiniteGuard:
    """Counts steps that were skipped because they were not finite; the counters belong into the checkpoint.

    max_skipped_steps: this many in a row end the run. num_steps: of the run, which also ends so if none of them made an
    update (None: of unknown length). consecutive: since the last update; spikes (spikes.py) neither
    count nor end the row. total: since the run began. without_update: steps since the last update, spikes included.
    """

    max_skipped_steps: int
    num_steps: int | None = None
    consecutive: int = 0
    total: int = 0
    without_update: int = 0

    def state_dict(self) -> dict[str, int]:
        """For the checkpoint."""
        return {"consecutive": self.consecutive, "total": self.total, "without_update": self.without_update}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a checkpoint, also of a run that counted less."""
        self.consecutive, self.total = state["consecutive"], state["total"]
        self.without_update = state.get("without_update", self.consecutive)

    def observe(self, result: StepResult, step: int, diagnose: Callable[[], str]) -> None:
        """Count `result`, after `step` steps done, itself included; raise NonFiniteError with what `diagnose` says once
        too many in a row were skipped, or all steps of the run.

        All ranks see the same results, so all call `diagnose` together: it may use collectives.
        """
        if not result.skipped:
            self.consecutive = self.without_update = 0
            return
        self.without_update += 1
        if result.spike:
            return
        self.consecutive += 1
        self.total += 1
        none = step == self.num_steps and self.without_update >= step
        if none or self.consecutive >= self.max_skipped_steps:
            end = "the run ends without an update: " if none else ""
            raise NonFiniteError(
                f"{end}{self.consecutive} steps in a row were not finite, up to step {step} (loss {result.loss}, "
                f"gradient norm {result.grad_norm}): weights and optimizer are those after step "
                f"{step - self.without_update}. {diagnose()}"
            )

    def rolled_back(self, step: int, checkpoint: int) -> None:
        """After `step` steps done the run went on with the weights of the checkpoint of step `checkpoint`."""
        self.without_update = step - checkpoint
