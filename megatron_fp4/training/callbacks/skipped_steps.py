"""Steps that are not finite are counted, and too many in a row end the run with a diagnosis (nonfinite_guard.py)."""

from __future__ import annotations

from typing import Any

from megatron_fp4.measure.nonfinite import diagnose_nonfinite
from megatron_fp4.training.nonfinite_guard import NonFiniteGuard
from megatron_fp4.training.trainer import Callback, Step


class SkippedSteps(Callback):
    """max_skipped_steps: so many in a row end the run of `num_steps` steps."""

    name = "skipped"

    def __init__(self, max_skipped_steps: int, num_steps: int) -> None:
        self._guard = NonFiniteGuard(max_skipped_steps, num_steps)

    def after_step(self, step: Step) -> None:
        """Raises NonFiniteError on all ranks."""
        trainer, result = self.trainer, step.result
        self._guard.observe(result, step.done, lambda: trainer.compute_again(diagnose_nonfinite, step.batch))
        if result.skipped and not result.spike:
            trainer.log.metrics.event(step.done, "skip", **self._guard.state_dict())

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        """The updates since the checkpoint are undone."""
        self._guard.rolled_back(done, checkpoint)

    def state_dict(self) -> Any:
        """The counts."""
        return self._guard.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Those of a checkpoint."""
        self._guard.load_state_dict(state)
