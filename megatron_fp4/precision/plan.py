"""The plan: which linear has which recipe, and why; and the switch to another plan during a run.

Selective high precision (paper, sections 4.1 and E.2): linears are quantized by the run's recipe except those of the
first and last blocks, those whose names match a pattern, and those that a plan file lists, which are in BF16; and those
of `precision.exceptions`, which have a recipe of their own. Embedding, head, norms and everything between the linears
are never quantized and do not appear.

The paper switches to higher precision shortly before the learning rate decays (appendix D); "FP4 all the way"
switches when the gradient drowns in quantization noise (its section 4): when

    ||gradient|| / (sigma_q * sqrt(d))  <  sqrt(3)

with sigma_q the standard deviation of the gradient's quantization noise per coordinate and d their number, so that the
denominator is the norm of the noise. The switch takes effect between two optimizer steps, on all ranks alike: it is a
function of the step number, or of a measurement that all ranks share.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_fp4.config.precision_schema import (
    WITH,
    Bf16BlocksConfig,
    ComposedException,
    ExceptionConfig,
    RecipeConfig,
    SwitchConfig,
)
from megatron_fp4.precision.recipe import BF16, FPROP_WEIGHT, Recipe, recipe_from_config, switched_recipe

if TYPE_CHECKING:
    from megatron_fp4.precision.backend import Backend
    from megatron_fp4.precision.linear import LinearContext
    from megatron_fp4.precision.rng import StepState

# Below this share of its weights a plan is hardly one of 4 bits, and says so.
FEW_IN_4_BITS = 0.6


@dataclass(frozen=True)
class LinearShape:
    """A linear before it is built: its name (`blocks.<index>.mixer.<projection>`), block and global shape.

    letter: of its block in `model.pattern`, which exceptions go by. input_key: the configuration's key of
    `in_features`; input_sharded: whether tensor-parallel ranks share them. title: what it is, in words. groups: equal
    groups of its output rows (KV heads, state groups), which blocks of a quantized weight do not straddle.
    """

    name: str
    block: int
    in_features: int
    out_features: int
    letter: str = ""
    input_key: str = ""
    input_sharded: bool = False
    title: str = ""
    groups: int = 1

    @property
    def parameters(self) -> int:
        return self.in_features * self.out_features

    @property
    def flops_per_token(self) -> int:
        """Of the forward GEMM, a multiply and an add counted as two; training takes three times that."""
        return 2 * self.parameters


@dataclass(frozen=True)
class PlannedLinear:
    """One row of the plan. key: what messages name the recipe with, such as `precision`."""

    linear: LinearShape
    recipe: Recipe
    reason: str
    key: str = "precision"


@dataclass(frozen=True)
class Plan:
    """A recipe for every quantizable linear of a model, in order of execution."""

    rows: tuple[PlannedLinear, ...]

    @property
    def num_quantized(self) -> int:
        """Number of linears with at least one quantized operand."""
        return sum(row.recipe.quantized for row in self.rows)

    @property
    def quantized_flops_per_token(self) -> int:
        """Forward FLOPs per token in quantized linears."""
        return sum(row.linear.flops_per_token for row in self.rows if row.recipe.quantized)

    @property
    def linear_flops_per_token(self) -> int:
        """Forward FLOPs per token in all linears of the plan."""
        return sum(row.linear.flops_per_token for row in self.rows)

    @property
    def share_in_4_bits(self) -> float:
        """Weights of the plan's linears that fprop multiplies as E2M1 codes over all of them, 0..1."""
        weights = [row.linear.parameters for row in self.rows if row.recipe[FPROP_WEIGHT].in_4_bits]
        return sum(weights) / max(1, sum(row.linear.parameters for row in self.rows))

    def warning(self, name: str) -> str:
        """A line if a plan in 4 bits, `precision=name`, leaves much of the model in other formats; else empty."""
        share = self.share_in_4_bits
        if not 0 < share < FEW_IN_4_BITS:
            return ""
        return (
            f"WARNING: precision={name} has {share:.0%} of this model's linear weights in 4 bits; its bf16_blocks and "
            "exceptions take the others. nvfp4_4over6_1x16_qkv_bf16 is for Transformers"
        )

    def switched(self, other: Plan, scope: str) -> Plan:
        """The plan after a precision switch of `scope` to `other`, a plan of the same model."""
        rows = []
        for now, then in zip(self.rows, other.rows, strict=True):
            if now.recipe == then.recipe:
                rows.append(now)
            else:
                recipe = switched_recipe(now.recipe, then.recipe, scope)
                rows.append(PlannedLinear(now.linear, recipe, f"precision switch ({scope})", then.key))
        return Plan(tuple(rows))

    @property
    def recipe_names(self) -> dict[Recipe, str]:
        """Every recipe of the plan, in the order of its rows, with a name of its own: `nvfp4`, then `nvfp4 (2)`."""
        names: dict[Recipe, str] = {}
        for recipe in recipes_in([self]):
            number = 1 + sum(recipe.name == other.name for other in names)
            names[recipe] = recipe.name if number == 1 else f"{recipe.name} ({number})"
        return names

    @property
    def short_names(self) -> dict[Recipe, str]:
        """`recipe_names` without the overrides that follow a file's name, if they are still different then."""
        names = self.recipe_names
        short = {recipe: name.partition(WITH)[0] for recipe, name in names.items()}
        return short if len(set(short.values())) == len(short) else names

    def as_dict(self) -> dict[str, Any]:
        """For YAML and checkpoints: the recipes written out, and every linear with its recipe's name and the reason."""
        names = self.recipe_names
        return {
            "recipes": {name: recipe.describe() for recipe, name in names.items()},
            "linears": {row.linear.name: {"recipe": names[row.recipe], "why": row.reason} for row in self.rows},
            "quantized_linears": f"{self.num_quantized} of {len(self.rows)}",
            "bf16": [row.linear.name for row in self.rows if not row.recipe.quantized],
        }


def plan_in_effect(plans: tuple[Plan, Plan | None], switched_at: int | None) -> Plan:
    """Of the plans before and after the precision switch, the one in effect. switched_at: a step; None: not yet."""
    before, after = plans
    return before if switched_at is None or after is None else after


def recipes_in(plans: Iterable[Plan | None]) -> list[Recipe]:
    """The recipes of all linears of all plans, each once."""
    return list(dict.fromkeys(row.recipe for plan in plans if plan is not None for row in plan.rows))


def recipe_of(exception: ExceptionConfig) -> RecipeConfig:
    """The recipe of an exception of a composed configuration."""
    assert isinstance(exception, ComposedException), "an exception without its recipe"
    return exception.recipe


# ------------------------------------------------------------------------------------------------- from a configuration


def build_plan(
    linears: Iterable[LinearShape],
    recipe: Recipe,
    bf16: Bf16BlocksConfig,
    num_blocks: int,
    exceptions: Sequence[ExceptionConfig] = (),
    key: str = "precision",
) -> Plan:
    """The plan of a model with `num_blocks` blocks. exceptions: those of a composed configuration. key: what messages
    call the precision that all this is of.

    An exception for block types that the model does not have changes nothing. Raises ValueError if a name pattern
    or a plan file names no linear of this model, the file cannot be read, or an exception matches only linears that
    earlier ones take.
    """
    shapes = list(linears)
    recipes = [recipe_from_config(recipe_of(exception)) for exception in exceptions]
    listed = _read_plan_file(bf16.file, {shape.name for shape in shapes}, key) if bf16.file else frozenset()
    _refuse_unmatched(f"{key}.bf16_blocks.names", bf16.names, shapes)
    _refuse_exceptions(exceptions, shapes, key)
    quantized = recipe.quantized or any(other.quantized for other in recipes)
    rows = []
    for shape in shapes:
        planned, reason, where = recipe, "the run's recipe", key
        if quantized and (why := _bf16_reason(shape, bf16, num_blocks, listed)):
            planned, reason = BF16, why
        elif match := _first_exception(shape, exceptions):
            index, pattern = match
            planned, reason = recipes[index], f"its name matches {pattern}"
            where = f"{key}.exceptions[{index}].precision={exceptions[index].precision}: precision"
            if exceptions[index].blocks:
                reason += f" in blocks {exceptions[index].blocks}"
        rows.append(PlannedLinear(shape, planned, reason, where))
    return Plan(tuple(rows))


def _first_exception(shape: LinearShape, exceptions: Sequence[ExceptionConfig]) -> tuple[int, str] | None:
    """The first exception that covers a linear, and the pattern that its name matches."""
    matches = (
        (i, pattern)
        for i, exception in enumerate(exceptions)
        for pattern in exception.names
        if (not exception.blocks or shape.letter in exception.blocks) and fnmatch.fnmatchcase(shape.name, pattern)
    )
    return next(matches, None)


def _refuse_unmatched(key: str, patterns: Sequence[str], shapes: Sequence[LinearShape]) -> None:
    for pattern in patterns:
        if shapes and not any(fnmatch.fnmatchcase(shape.name, pattern) for shape in shapes):
            names = ", ".join(sorted({shape.name.split(".", 2)[-1] for shape in shapes}))
            raise ValueError(
                f"{key} has {pattern!r}, which matches no linear; they are blocks.<index>.<one of {names}>"
            )


def _refuse_exceptions(exceptions: Sequence[ExceptionConfig], shapes: Sequence[LinearShape], key: str) -> None:
    """Raise ValueError for exceptions that match no linear of their blocks, or only linears that earlier ones take."""
    for i, exception in enumerate(exceptions):
        among = [shape for shape in shapes if not exception.blocks or shape.letter in exception.blocks]
        _refuse_unmatched(f"{key}.exceptions[{i}].names", exception.names, among)
        matched = [shape for shape in shapes if _first_exception(shape, [exception])]
        takers = {found[0] for shape in matched if (found := _first_exception(shape, exceptions))}
        if matched and i not in takers:
            earlier = " and ".join(f"{key}.exceptions[{taker}]" for taker in sorted(takers))
            raise ValueError(
                f"{key}.exceptions[{i}].names={exception.names} has no effect: every linear that it matches falls "
                f"under {earlier} before it; put it first, or drop it"
            )


def _bf16_reason(shape: LinearShape, bf16: Bf16BlocksConfig, num_blocks: int, listed: frozenset[str]) -> str:
    """Why a linear stays in BF16, or an empty string if it does not."""
    first, last = shape.block < bf16.first, shape.block >= num_blocks - bf16.last
    for end, of_it, count in (("first", first, bf16.first), ("last", last, bf16.last)):
        if of_it:
            return f"block {shape.block} is " + (f"one of the {end} {count}" if count > 1 else f"the {end}")
    for pattern in bf16.names:
        if fnmatch.fnmatchcase(shape.name, pattern):
            return f"its name matches {pattern}"
    return f"listed in {Path(bf16.file or '').name}" if shape.name in listed else ""


def _read_plan_file(path: str, known: set[str], key: str) -> frozenset[str]:
    try:
        content = yaml.safe_load(Path(path).read_text())
        names = content.get("bf16") if isinstance(content, dict) else None
        if not isinstance(names, list):
            raise ValueError("it has no list of linears under `bf16`")
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"it lists {unknown[0]!r}, which is no linear of this model")
    except (OSError, yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{key}.bf16_blocks.file={path} cannot be used ({why}); give a plan file as scripts/analyze_precision.py "
            "writes it for this model"
        ) from error
    return frozenset(names)


# ------------------------------------------------------------------------------------------------------------- switch


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


# Measurements of the gradient noise in a row that must lie below the threshold.
PATIENCE = 3


@dataclass
class PrecisionSwitch:
    """Decides before each step whether the precision switches now, once in a run; by default it never does.

    at_step: as `switch_step` returns it. switched_at: the first step computed under the new plan, or None.
    num_below: measurements in a row that lay below the threshold (`gradient_noise`).
    """

    config: SwitchConfig = field(default_factory=SwitchConfig)
    at_step: int | None = None
    switched_at: int | None = None
    num_below: int = 0

    def before_step(self, step: int, measure_ratio: Callable[[], float]) -> bool:
        """Switch before `step` is computed if it is time; returns whether it did.

        measure_ratio: measures the gradient's norm over that of its quantization noise in this very step; called only
        in the steps in which `gradient_noise` looks at it.
        """
        if self.switched_at is not None:
            return False
        by_noise = self.config.when == "gradient_noise"
        if by_noise and step % self.config.interval == 0:
            self.num_below = self.num_below + 1 if measure_ratio() < self.config.threshold else 0
        if (by_noise and self.num_below >= PATIENCE) or (self.at_step is not None and step >= self.at_step):
            self.switched_at = step
        return self.switched_at is not None


class PrecisionController:
    """Writes recipes into the linears: those of `plan`, and when the switch happens those of `plan_after_switch`, if
    there is one. From the next forward pass on a linear has its new recipe; quantized weights that it kept are dropped.

    linears: the context of every linear of the plan by name. step_state: what they are to read. backend: what they are
    to compute with; None leaves each as it is (`emulated` at first). plans: the run's, in order.
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
        return self.plans[0 if self.switch.switched_at is None else -1]

    def before_step(self, step: int, measure_ratio: Callable[[], float]) -> bool:
        """As `PrecisionSwitch.before_step`, for `step` from 0; what is measured is the same on all ranks."""
        switches = self.switch.before_step(step, measure_ratio)
        if switches:
            self._apply(self.plan)
        return switches

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
