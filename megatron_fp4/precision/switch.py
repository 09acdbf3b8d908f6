"""Which plan the linears of a model follow, and when another one takes over during a run.

The paper switches to higher precision shortly before the learning rate decays (appendix D); "FP4 all the way"
switches when the gradient drowns in quantization noise (its section 4): when

    ||gradient|| / (sigma_q * sqrt(d))  <  sqrt(3)

with sigma_q the standard deviation of the gradient's quantization noise per coordinate and d their number, so that the
denominator is the norm of the noise. The switch takes effect between two optimizer steps, on all ranks alike: it is a
function of the step number, or of a measurement that all ranks share.

The controller writes a plan into the linears and shares with them the StepState that the training step advances. Before
each step it decides whether the precision switch happens; when it does, every linear has its new recipe from the next
forward pass on, and the quantized weights that linears kept from the old one are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_fp4.config.precision_schema import SwitchConfig
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.linear import LinearContext
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.precision.rng import StepState


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
        if when.isdecimal() and int(when) <= num_steps:
            return int(when)
        if not when.isdecimal() and 0 < float(when) < 1:
            return round(float(when) * num_steps)
    except ValueError:
        pass
    raise ValueError(
        f"precision.switch.when={when} is not never, before_decay, gradient_noise, a fraction between 0 and 1 or "
        f"a step between 0 and train.steps={num_steps}; give one of these"
    )


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
        by_noise = self.config.when == "gradient_noise" and self.num_below >= self.config.patience
        if self.switched_at is not None or not (by_noise or (self.at_step is not None and step >= self.at_step)):
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


class PrecisionController:
    """Puts `plan` into effect, and after the switch, if there is one, `plan_after_switch`.

    linears: the context of every linear of the plan by name. step_state: the one that they read. backend: who makes
    operands and multiplies; None leaves each linear with what it has (`emulated` at first). plans: the run's, in order.
    """

    def __init__(
        self,
        linears: Mapping[str, LinearContext],
        plan: Plan,
        step_state: StepState,
        *,
        backend: Backend | None = None,
        switch: PrecisionSwitch | None = None,
        plan_after_switch: Plan | None = None,
    ) -> None:
        assert {row.linear.name for row in plan.rows} == linears.keys(), "the plan is of another model"
        self.linears, self.step_state, self.switch = dict(linears), step_state, switch or PrecisionSwitch()
        self.plans = [plan] if plan_after_switch is None else [plan, plan_after_switch]
        for name, linear in self.linears.items():
            linear.name, linear.step_state, linear.backend = name, step_state, backend or linear.backend
        self._apply(plan)

    @property
    def plan(self) -> Plan:
        """The plan in effect."""
        return self.plans[0 if self.switch.switched_at is None else -1]

    def before_step(self, step: int, measure_ratio: Callable[[], float]) -> bool:
        """Switch before `step` (from 0) is computed if it is time; returns whether it did.

        measure_ratio: measures the gradient's norm over that of its quantization noise in this very step, the same on
        all ranks; called only in the steps that the switch looks at.
        """
        if self.switch.measures(step):
            self.switch.record(measure_ratio())
        if not self.switch.try_switch(step):
            return False
        self._apply(self.plan)
        return True

    @contextmanager
    def other_recipes(self, change: Callable[[Recipe], Recipe]) -> Iterator[None]:
        """Inside a `with` every linear follows `change` of its recipe."""
        recipes = {name: linear.recipe for name, linear in self.linears.items()}
        self._set_recipes({name: change(recipe) for name, recipe in recipes.items()})
        try:
            yield
        finally:
            self._set_recipes(recipes)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"switched_at": self.switch.switched_at, "num_below": self.switch.num_below}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, with the plan that its run had by then.

        Raises ValueError if that was the plan after a switch and this run knows of none.
        """
        if state["switched_at"] is not None and len(self.plans) == 1:
            raise ValueError(
                "the checkpoint is from after the precision switch of its run, and precision.switch.when=never says "
                "no recipe for that; give precision.switch.when and precision.switch.target as that "
                "run had them, or take a checkpoint from before"
            )
        self.switch.switched_at, self.switch.num_below = state["switched_at"], state["num_below"]
        self._apply(self.plan)

    def _apply(self, plan: Plan) -> None:
        self._set_recipes({row.linear.name: row.recipe for row in plan.rows})

    def _set_recipes(self, recipes: Mapping[str, Recipe]) -> None:
        for name, linear in self.linears.items():
            linear.recipe, linear.weight_cache = recipes[name], None
