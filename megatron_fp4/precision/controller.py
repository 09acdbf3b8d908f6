"""Which plan the linears of a model follow, and when another one takes over.

The controller writes a plan into the linears and shares with them the clock that the training step advances. Before
each step it decides whether the precision switch happens; when it does, every linear has its new recipe from the next
forward pass on, and the quantized weights that linears kept from the old one are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.linear_context import LinearContext
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.precision.switch import PrecisionSwitch


class PrecisionController:
    """Puts `plan` into effect, and after the switch, if there is one, `plan_after_switch`.

    linears: the context of every linear of the plan by name. clock: the one that they are to read. backend: who makes
    operands and multiplies; None leaves each linear with what it has (`emulated` at first). plans: the run's, in order.
    """

    def __init__(
        self,
        linears: Mapping[str, LinearContext],
        plan: Plan,
        clock: RunClock,
        *,
        backend: Backend | None = None,
        switch: PrecisionSwitch | None = None,
        plan_after_switch: Plan | None = None,
    ) -> None:
        assert {row.linear.name for row in plan.rows} == linears.keys(), "the plan is of another model"
        self.linears, self.clock, self.switch = dict(linears), clock, switch or PrecisionSwitch()
        self.plans = [plan] if plan_after_switch is None else [plan, plan_after_switch]
        for name, linear in self.linears.items():
            linear.name, linear.clock, linear.backend = name, clock, backend or linear.backend
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
        return self.switch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, with the plan that its run had by then.

        Raises ValueError if that was the plan after a switch and this run knows of none.
        """
        if state["switched_at"] is not None and len(self.plans) == 1:
            raise ValueError(
                "the checkpoint is from behind the precision switch of its run, and precision.switch.when=never says "
                "no recipe for that; give precision.switch.when and precision.switch.target as that "
                "run had them, or take a checkpoint from before"
            )
        self.switch.load_state_dict(state)
        self._apply(self.plan)

    def _apply(self, plan: Plan) -> None:
        self._set_recipes({row.linear.name: row.recipe for row in plan.rows})

    def _set_recipes(self, recipes: Mapping[str, Recipe]) -> None:
        for name, linear in self.linears.items():
            linear.recipe, linear.weight_cache = recipes[name], None
