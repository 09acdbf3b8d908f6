"""Spikes: steps whose loss or gradient norm lies far above what the steps before it had.

A step is a spike if its loss or its gradient norm exceeds, over the last `window` accepted steps,

    median + threshold * max(1.4826 * MAD, floor * median)         MAD: the median distance from the median

1.4826 MAD is the standard deviation of normally distributed numbers (Rousseeuw and Croux, "Alternatives to the Median
Absolute Deviation", 1993) and, unlike that, is not moved by the spikes themselves. Skipping such steps is OLMo 2's
method (arXiv:2501.00656; its SkipStepOptimizer: 6 standard deviations over 128 steps); going back to the last
checkpoint and skipping the data of all steps since is PaLM's (arXiv:2204.02311, section 5.1).

- One-sided: what falls is no spike. While the loss falls quickly the median lies above it and the MAD is wide.
- The floors are for histories that are nearly flat, and for gradient norms, whose ordinary outliers reach twice the
  median: with a threshold of 6 a loss must be 3% above its median, a norm 2.2 times its median.
- A change that is meant (another data phase, another precision) starts a new history (`SpikeGuard.enter`).
- Only finite numbers come here; the others are the non-finite guard's (nonfinite_guard.py), and neither counts as a
  spike nor ends a row of them.

Loss and norm are the step's all-reduced numbers, so all ranks decide alike, and the whole state is in the checkpoint,
so a resumed run decides as the straight one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp4.config.schema import SpikesConfig
from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.training.step import StepResult

_LOSS_FLOOR, _NORM_FLOOR = 0.005, 0.2


class SpikeError(DivergedError):
    """Too many spikes in a row."""


@dataclass(frozen=True)
class Spike:
    """A step that was refused. step: steps done, it included. in_row, total: spikes so far, with this one.

    loss_limit, grad_norm_limit: what loss and norm were allowed to be; their medians in loss_median, grad_norm_median.
    """

    step: int
    loss: float
    loss_median: float
    loss_limit: float
    grad_norm: float
    grad_norm_median: float
    grad_norm_limit: float
    in_row: int
    total: int

    def __str__(self) -> str:
        parts = []
        for name, value, limit, median in (
            ("loss", self.loss, self.loss_limit, self.loss_median),
            ("gradient norm", self.grad_norm, self.grad_norm_limit, self.grad_norm_median),
        ):
            above = "over" if value > limit else "within"
            parts.append(f"{name} {value:.4g} ({above} {limit:.4g}, median {median:.4g})")
        return ", ".join(parts)


class SpikeGuard:
    """Decides which steps are spikes, and counts them.

    config: action `none` accepts everything. In each step: `enter` its regime, give `accept` to `train_step`, `observe`
    the result; where the run then goes back to a checkpoint, `rolled_back`.

    in_row: spikes without an accepted step between them; of rollbacks, those to one and the same checkpoint, because
    accepted steps that are lost again are no progress. total: spikes since the run began.
    """

    def __init__(self, config: SpikesConfig) -> None:
        self.config = config
        self.in_row = 0
        self.total = 0
        self._checkpoint: int | None = None  # where the last spike went back to
        self._regime = ""
        self._history: list[tuple[float, float]] = []  # loss and gradient norm of accepted steps, the oldest first

    @property
    def accept(self) -> Callable[[float, float], bool] | None:
        """What `train_step` asks before its update; None if every step is accepted."""
        return None if self.config.action == "none" else self._accepts

    def enter(self, regime: str) -> None:
        """Say what the next step trains with (data phase, precision): steps of another regime are no measure."""
        if self.config.action != "none" and regime != self._regime:
            self._regime, self._history = regime, []

    def observe(self, result: StepResult, step: int, checkpoint: Callable[[], int | None]) -> Spike | None:
        """Take in the result of a step, after `step` steps done; the spike, if it was one.

        checkpoint: asked after a spike, says which step's checkpoint a rollback would go back to, None without one.
        """
        if self.config.action == "none" or (result.skipped and not result.spike):
            return None
        if not result.spike:
            self._history = [*self._history, (result.loss, result.grad_norm)][-self.config.window :]
            if self._checkpoint is None:
                self.in_row = 0
            return None
        target = checkpoint() if self.config.action == "rollback" else None
        if target != self._checkpoint:
            self._checkpoint, self.in_row = target, 0
        self.in_row += 1
        self.total += 1
        loss, norm = self._limits()
        return Spike(step, result.loss, *loss, result.grad_norm, *norm, self.in_row, self.total)

    def give_up(self, spike: Spike, diagnose: Callable[[], str]) -> None:
        """Raise SpikeError, with what `diagnose` says, if `spike` was one too many in a row.

        All ranks see the same spikes, so all call `diagnose` together: it may use collectives.
        """
        if spike.in_row >= self.config.max_in_row:
            row = "in a row" if self._checkpoint is None else f"after the checkpoint of step {self._checkpoint}"
            raise SpikeError(
                f"{spike.in_row} spikes {row} (spikes.max_in_row={self.config.max_in_row}), the last in step "
                f"{spike.step}: {spike}. {diagnose()}"
            )

    def rolled_back(self, state: Mapping[str, Any] | None) -> None:
        """The run went on from a checkpoint with this state: the measure is again what it was, the counts go on."""
        self._take_measure(state)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: JSON types, the same on all ranks."""
        return {
            "in_row": self.in_row,
            "total": self.total,
            "checkpoint": self._checkpoint,
            "regime": self._regime,
            "history": [list(pair) for pair in self._history],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; None: of a run that knew of no spikes."""
        self._take_measure(state)
        if state is not None:
            self.in_row, self.total, self._checkpoint = state["in_row"], state["total"], state["checkpoint"]

    def _take_measure(self, state: Mapping[str, Any] | None) -> None:
        self._regime, self._history = "", []
        # Steps that are not looked at leave no history, and what was before them is no measure of those after.
        if state is not None and self.config.action != "none":
            self._regime = state["regime"]
            self._history = [(loss, norm) for loss, norm in state["history"]][-self.config.window :]

    def _accepts(self, loss: float, grad_norm: float) -> bool:
        if len(self._history) < self.config.min_history:
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
