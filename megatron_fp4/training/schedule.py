"""The learning rate as a pure function of the step: warm-up, stable, decay (WSD).

    lr
    peak |      ________________
         |    /                 \\
         |   /                   \\
    min  |  /                     \\_
         +--|----|--------------|---|--> step
            0  warmup_steps     |   num_steps - 1
                             decay_start_step

Steps count from 0, and lr(step) is what update `step` uses. Nothing is remembered between calls, so a resumed run
needs no schedule state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_fp4.config.schema import Config, ScheduleConfig
from megatron_fp4.precision.switch import switch_step

# What is left of (peak - minimum) once a fraction p of the decay is done; every shape is exactly 0 at p = 1, so the
# last step gets the minimum bit for bit. "1-sqrt" is from Hägele et al., arXiv:2405.18392, section 4.
_REMAINDERS: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "1-sqrt": lambda p: 1.0 - math.sqrt(p),
}


class WSDSchedule:
    """Warm-up, stable, decay over `num_steps` steps.

    warmup_steps: how many steps warm up; the last of them already has the peak rate.
    decay_start_step: the first step whose rate lies below the peak again (num_steps if nothing decays).

    Raises ValueError for what no run can mean: no step, a peak that is not positive, fractions that overlap,
    exponential decay to zero.
    """

    def __init__(self, config: ScheduleConfig, peak_lr: float, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"train.steps is {num_steps}; a schedule needs at least 1 step")
        if not (peak_lr > 0 and math.isfinite(peak_lr)):
            raise ValueError(f"optimizer.lr is {peak_lr}; give a positive learning rate")
        if config.warmup_fraction + config.decay_fraction > 1.0:
            raise ValueError(
                f"schedule.warmup_fraction {config.warmup_fraction} and schedule.decay_fraction "
                f"{config.decay_fraction} overlap: their sum must not exceed 1; lower one"
            )
        if config.decay == "exponential" and config.decay_fraction > 0 and config.min_lr_ratio == 0:
            raise ValueError(
                "schedule.decay=exponential never reaches schedule.min_lr_ratio=0; give a ratio above 0, "
                "or another decay"
            )
        self.peak_lr = peak_lr
        self.min_lr_ratio = config.min_lr_ratio
        self.decay = config.decay
        self.num_steps = num_steps
        self.decay_start_step = num_steps - _count(config.decay_fraction, num_steps)
        # In a very short run both roundings go up; the decay wins, because it must end at the minimum.
        self.warmup_steps = min(_count(config.warmup_fraction, num_steps), self.decay_start_step)

    @classmethod
    def of(cls, config: Config) -> WSDSchedule:
        """The schedule of the run that `config` describes. Raises ValueError as the class does."""
        return cls(config.schedule, config.optimizer.lr, config.train.steps)

    def switch_step(self, when: str) -> int | None:
        """The step before which a precision switch `when` happens, as `precision.switch.switch_step` has it.

        Raises ValueError as that does, and for a switch before a decay that does not come.
        """
        if when == "before_decay" and self.decay_start_step == self.num_steps:
            raise ValueError(
                "precision.switch.when=before_decay, but schedule.decay_fraction never decays; give a fraction above "
                "0, or a step or never as precision.switch.when"
            )
        return switch_step(when, self.num_steps, self.decay_start_step)

    def lr(self, step: int, switched_at: int | None = None, rewarm_steps: int = 0) -> float:
        """The learning rate of update `step`, from 0 to num_steps - 1.

        Warm-up climbs linearly from peak / warmup_steps (never 0); decay ends at exactly peak * min_lr_ratio on
        the last step. If the precision switched at step `switched_at`, the rate climbs once more over
        `rewarm_steps` steps (0: it does not) from its scheduled value / rewarm_steps to its scheduled value.
        """
        assert 0 <= step < self.num_steps, f"step {step} of {self.num_steps}"
        lr = self._scheduled(step)
        if switched_at is not None and switched_at <= step < switched_at + rewarm_steps:
            lr *= (step - switched_at + 1) / rewarm_steps
        return lr

    def _scheduled(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak_lr * ((step + 1) / self.warmup_steps)
        if step < self.decay_start_step:
            return self.peak_lr
        progress = (step - self.decay_start_step + 1) / (self.num_steps - self.decay_start_step)
        if self.decay == "exponential":
            return self.peak_lr * self.min_lr_ratio**progress
        remainder = _REMAINDERS[self.decay](progress)
        return self.peak_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * remainder)


def _count(fraction: float, num_steps: int) -> int:
    return max(1, round(fraction * num_steps)) if fraction > 0 else 0
