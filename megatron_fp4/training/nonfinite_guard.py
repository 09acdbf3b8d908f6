"""Steps whose loss or gradient is not finite: they are skipped and counted, and too many in a row end the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_fp4.faults.exit_codes import DivergedError
from megatron_fp4.training.step import StepResult


class NonFiniteError(DivergedError):
    """Too many steps in a row were skipped."""


@dataclass
class NonFiniteGuard:
    """Counts skipped steps; both counters belong into the checkpoint.

    max_skipped_steps: this many in a row end the run. consecutive: skipped since the last update.
    total: skipped since the run began.
    """

    max_skipped_steps: int
    consecutive: int = 0
    total: int = 0

    def state_dict(self) -> dict[str, int]:
        """For the checkpoint."""
        return {"consecutive": self.consecutive, "total": self.total}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a checkpoint."""
        self.consecutive, self.total = state["consecutive"], state["total"]

    def observe(self, result: StepResult, step: int, diagnose: Callable[[], str]) -> None:
        """Count `result`; raise NonFiniteError with what `diagnose` says once too many in a row were skipped.

        All ranks see the same results, so all call `diagnose` together: it may use collectives.
        """
        if not result.skipped:
            self.consecutive = 0
            return
        self.consecutive += 1
        self.total += 1
        if self.consecutive >= self.max_skipped_steps:
            raise NonFiniteError(
                f"{self.consecutive} steps in a row were skipped, up to step {step} (loss {result.loss}, gradient "
                f"norm {result.grad_norm}): weights and optimizer are those of step "
                f"{step - self.consecutive}. {diagnose()}"
            )
