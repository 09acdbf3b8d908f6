"""When the plan changes during a run.

The paper switches to higher precision shortly before the learning rate decays (appendix D); "FP4 all the way"
switches when the gradient drowns in quantization noise (its section 4): when

    ||gradient|| / (sigma_q * sqrt(d))  <  sqrt(3)

with sigma_q the standard deviation of the gradient's quantization noise per coordinate and d their number, so that the
denominator is the norm of the noise. The switch takes effect between two optimizer steps, on all ranks alike: it is a
function of the step number, or of a measurement that all ranks share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_fp4.config.precision_schema import SwitchConfig


def switch_step(when: str, num_steps: int, decay_start_step: int) -> int | None:
    """The step before which a switch `when` happens; None for `never` and `gradient_noise`, which have no fixed step.

    Raises ValueError for anything but never, before_decay, gradient_noise, a fraction in (0, 1) or a step in
    [0, num_steps].
    """
    if when in ("never", "gradient_noise"):
        return None
    if when == "before_decay":
        return decay_start_step
    try:
        return step_or_fraction(when, num_steps)
    except ValueError:
        raise ValueError(
            f"precision.switch.when={when} is not never, before_decay, gradient_noise, a fraction between 0 and 1 or "
            f"a step between 0 and train.steps={num_steps}; give one of these"
        ) from None


def step_or_fraction(when: str, num_steps: int) -> int:
    """The step that `when` names, a step in [0, num_steps] or a fraction in (0, 1) of them; ValueError for anything
    else."""
    if when.isdecimal():
        step = int(when)
        if step > num_steps:
            raise ValueError
        return step
    fraction = float(when)
    if not 0 < fraction < 1:
        raise ValueError
    return round(fraction * num_steps)


@dataclass
class PrecisionSwitch:
    """Decides, before each step, whether the switch happens now, and remembers that it did; by default it never does.

    at_step: as `switch_step` returns it. switched_at: the first step computed under the new plan, or None.
    num_below: measurements in a row that lay below the threshold (`gradient_noise`).
    """

    config: SwitchConfig = field(default_factory=SwitchConfig)
    at_step: int | None = None
    switched_at: int | None = None
    num_below: int = 0

    def try_switch(self, step: int) -> bool:
        """Switch before `step` is computed if it is time, once; returns whether it did."""
        if self.switched_at is not None:
            return False
        by_noise = self.config.when == "gradient_noise" and self.num_below >= self.config.patience
        if not by_noise and (self.at_step is None or step < self.at_step):
            return False
        self.switched_at = step
        return True

    def measures(self, step: int) -> bool:
        """Whether the gradient's quantization noise is to be measured in `step`."""
        waiting = self.config.when == "gradient_noise" and self.switched_at is None
        return waiting and step % self.config.interval == 0

    def record(self, ratio: float) -> None:
        """Take in a measured ratio of gradient norm over noise norm."""
        self.num_below = self.num_below + 1 if ratio < self.config.threshold else 0

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"switched_at": self.switched_at, "num_below": self.num_below}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.switched_at, self.num_below = state["switched_at"], state["num_below"]
