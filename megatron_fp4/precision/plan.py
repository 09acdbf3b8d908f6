"""The plan gives every linear a recipe and the reason for it; during a run the precision can switch to another plan.

Selective high precision (paper, sections 4.1 and E.2): the run's recipe quantizes all linears but these. Linears of the
first and last blocks, linears whose names match a pattern, and linears that a plan file lists are in BF16; those of
`precision.exceptions` have a recipe of their own. The output head is in the plan only if an exception names it, and in
BF16 otherwise. The embedding, norms and everything between the linears are never quantized.

The paper switches to higher precision shortly before the learning rate decays (appendix D). "FP4 All the Way" (arXiv
2505.19115, section 4.1) switches when the gradient is small compared with its quantization noise
(measure/gradient_noise.py). The switch takes effect between two optimizer steps, in the same step on all ranks: it
depends only on the step's number, or on a measurement that is the same on all ranks.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    from megatron_fp4.precision.operands import LinearContext
    from megatron_fp4.precision.rng import StepState

HEAD = "head"
"""The name of the output head in a plan and in exceptions; patterns do not match it."""

# A plan with a smaller share of its weights in 4 bits gives a warning.
FEW_IN_4_BITS = 0.6
_FOR_TRANSFORMERS = "nvfp4_4over6_1x16_qkv_bf16"


@dataclass(frozen=True)
class LinearShape:
    """A linear before it is built: its name (`blocks.<index>.mixer.<projection>`), block and global shape.

    block: counted on from the last one in multi-token prediction (`mtp.<set>.blocks.<index>.mixer.<projection>`).
    letter: its block's letter in `model.pattern`, which exceptions refer to. input_key: the key of the configuration
    that sets `in_features`. input_sharded: whether tensor-parallel ranks shard these. title: its name in messages.
    groups: equal groups of its output rows (KV heads, state groups); no block of codes has rows of two groups.
    active: the share of tokens that it computes, or that each of its experts computes. experts: matrices of its weight
    [experts, out, in]. uses: how often it computes a token (once for each depth of multi-token prediction).
    sections: of a packed projection, in the order of the rows of a group: (name, rows in each group). whole: of a part
    of a packed projection, that projection; the part's name is `<projection>[<section>,...]`.
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
    active: float = 1.0
    experts: int = 1
    uses: int = 1
    sections: tuple[tuple[str, int], ...] = ()
    whole: LinearShape | None = None

    def part(self, names: Sequence[str]) -> LinearShape:
        """The part with the sections `names`; the linear itself if these are all."""
        sections = tuple(section for section in self.sections if section[0] in names)
        if len(sections) == len(self.sections):
            return self
        name, rows = f"{self.name}[{','.join(section for section, _ in sections)}]", sum(rows for _, rows in sections)
        return replace(self, name=name, out_features=self.groups * rows, sections=sections, whole=self)

    @property
    def parameters(self) -> int:
        return self.experts * self.in_features * self.out_features

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward GEMM, where a multiply-add counts as two. Training takes three times as many."""
        return round(2 * self.parameters * self.active) * self.uses


@dataclass(frozen=True)
class PlannedLinear:
    """One row of the plan. key: the recipe's key of the configuration in messages, such as `precision`."""

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
        """The share of the linears' weights that fprop multiplies as E2M1 codes, 0 to 1."""
        weights = [row.linear.parameters for row in self.rows if row.recipe[FPROP_WEIGHT].in_4_bits]
        return sum(weights) / max(1, sum(row.linear.parameters for row in self.rows))

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight in fprop, averaged over the linears, with block scales."""
        bits = sum(row.recipe[FPROP_WEIGHT].bits * row.linear.parameters for row in self.rows)
        return bits / max(1, sum(row.linear.parameters for row in self.rows))

    def warning(self, name: str) -> str:
        """A warning if the 4-bit plan of `precision=name` leaves much of the model in other formats; otherwise ""."""
        share = self.share_in_4_bits
        if not 0 < share < FEW_IN_4_BITS:
            return ""
        is_transformer = {row.linear.letter for row in self.rows if row.linear.name != HEAD} <= {"*", "-", "G"}
        remedy = f"; use precision={_FOR_TRANSFORMERS}" if is_transformer and name != _FOR_TRANSFORMERS else ""
        return (
            f"WARNING: precision={name} has {share:.0%} of this model's linear weights in 4 bits; its bf16_blocks and "
            f"exceptions keep the others in other formats{remedy}"
        )

    def switched(self, other: Plan, scope: str) -> Plan:
        """The plan after a precision switch of `scope` to `other`, a plan of the same linears (`same_parts`)."""
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
        """Every recipe of the plan, in the order of its rows, with a unique name: `nvfp4`, then `nvfp4 (2)`."""
        names: dict[Recipe, str] = {}
        for recipe in recipes_in([self]):
            number = 1 + sum(recipe.name == other.name for other in names)
            names[recipe] = recipe.name if number == 1 else f"{recipe.name} ({number})"
        return names

    @property
    def short_names(self) -> dict[Recipe, str]:
        """`recipe_names` without the overrides after a file's name, if the names are unique without them."""
        names = self.recipe_names
        short = {recipe: name.partition(WITH)[0] for recipe, name in names.items()}
        return short if len(set(short.values())) == len(short) else names

    def as_dict(self) -> dict[str, Any]:
        """For YAML and checkpoints: the recipes in full, and each linear's recipe by name, with the reason."""
        names = self.recipe_names
        return {
            "recipes": {name: recipe.describe() for recipe, name in names.items()},
            "linears": {row.linear.name: {"recipe": names[row.recipe], "why": row.reason} for row in self.rows},
            "quantized_linears": f"{self.num_quantized} of {len(self.rows)}",
            "bf16": [row.linear.name for row in self.rows if not row.recipe.quantized],
        }


def same_parts(plans: Iterable[Plan]) -> list[Plan]:
    """The plans of one model with the same parts of packed projections: sections that any plan tells apart are in
    different parts in all. So a precision switch changes recipes, and not which rows share a maximum."""
    tables = [
        {(row.linear.whole or row.linear, name): row for row in plan.rows for name in _names(row.linear)}
        for plan in plans
    ]
    rows: list[list[PlannedLinear]] = [[] for _ in tables]
    for linear in dict.fromkeys(linear for linear, _ in tables[0]):
        parts: dict[tuple[PlannedLinear, ...], list[str]] = {}
        for name in _names(linear):
            parts.setdefault(tuple(table[linear, name] for table in tables), []).append(name)
        for planned, names in parts.items():
            for of_plan, row in zip(rows, planned, strict=True):
                of_plan.append(replace(row, linear=linear.part(names)))
    return [Plan(tuple(of_plan)) for of_plan in rows]


def _names(linear: LinearShape) -> Sequence[str]:
    """The names of its sections; those of a linear that is not packed are [""]."""
    return [name for name, _ in linear.sections] or [""]


def split_contexts(linears: Mapping[str, LinearContext], plan: Plan) -> dict[str, LinearContext]:
    """The contexts of the plan's linears and parts, by name. linears: those of the modules, which get their parts."""
    assert {(row.linear.whole or row.linear).name for row in plan.rows} == linears.keys(), "a plan of another model"
    contexts = {}
    for context in linears.values():
        context.parts = ()
    for linear in (row.linear for row in plan.rows):
        contexts[linear.name] = whole = linears[(linear.whole or linear).name]
        if linear.whole is not None:
            contexts[linear.name] = whole.part(linear.sections, linear.whole.sections)
            whole.parts = (*whole.parts, contexts[linear.name])
    return contexts


def plan_in_effect(plans: tuple[Plan, Plan | None], switched_at: int | None) -> Plan:
    """The plan in effect, of those before and after the precision switch. switched_at: its step; None: not yet."""
    before, after = plans
    return before if switched_at is None or after is None else after


def recipes_in(plans: Iterable[Plan | None]) -> list[Recipe]:
    """The recipes of all linears of all plans, without duplicates."""
    return list(dict.fromkeys(row.recipe for plan in plans if plan is not None for row in plan.rows))


def recipe_of(exception: ExceptionConfig) -> RecipeConfig:
    """The recipe of an exception in a composed configuration."""
    assert isinstance(exception, ComposedException), "the configuration is not composed"
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
    """The plan of a model with `num_blocks` blocks.

    exceptions: those of a composed configuration; one for kinds of blocks that the model does not have changes nothing.
    key: the precision's key of the configuration in messages. Raises ValueError if a pattern matches no linear or a
    section's name no section, the plan file cannot be read or names an unknown linear, or an exception matches only
    linears or sections of earlier exceptions.
    """
    shapes = list(linears)
    recipes = [recipe_from_config(recipe_of(exception)) for exception in exceptions]
    known = {(shape.name, section) for shape in shapes for section in ("", *_names(shape))}
    listed = _read_plan_file(bf16.file, known, key) if bf16.file else frozenset()
    _refuse_unmatched(f"{key}.bf16_blocks.names", bf16.names, shapes)
    _refuse_exceptions(exceptions, shapes, key)
    quantized = recipe.quantized or any(other.quantized for other in recipes)

    def planned(shape: LinearShape, section: str) -> PlannedLinear:
        if shape.name == HEAD and not _first_exception(shape, exceptions, section):
            return PlannedLinear(shape, BF16, "the output head", key)
        if shape.name != HEAD and quantized and (why := _bf16_reason(shape, section, bf16, num_blocks, listed)):
            return PlannedLinear(shape, BF16, why, key)
        if not (match := _first_exception(shape, exceptions, section)):
            return PlannedLinear(shape, recipe, "the run's recipe", key)
        index, pattern = match
        exception = exceptions[index]
        reason = f"its name matches {pattern}" + (f" in blocks {exception.blocks}" if exception.blocks else "")
        reason += f", sections {','.join(exception.sections)}" if exception.sections else ""
        where = f"{key}.exceptions[{index}].precision={exception.precision}: precision"
        return PlannedLinear(shape, recipes[index], reason, where)

    rows = []
    for shape in shapes:
        parts: dict[PlannedLinear, list[str]] = {}
        for section in _names(shape):
            parts.setdefault(planned(shape, section), []).append(section)
        rows += [replace(row, linear=shape.part(names)) for row, names in parts.items()]
    return Plan(tuple(rows))


def _first_exception(shape: LinearShape, exceptions: Sequence[ExceptionConfig], section: str) -> tuple[int, str] | None:
    """Index and pattern of the first exception that matches a linear's section ("": a linear without sections)."""
    matches = (
        (i, pattern)
        for i, exception in enumerate(exceptions)
        for pattern in exception.names
        if (not exception.blocks or shape.letter in exception.blocks)
        and (not exception.sections or section in exception.sections)
        and _matches(shape, pattern)
    )
    return next(matches, None)


def _matches(shape: LinearShape, pattern: str) -> bool:
    return pattern == HEAD if shape.name == HEAD else fnmatch.fnmatchcase(shape.name, pattern)


def _refuse_unmatched(key: str, patterns: Sequence[str], shapes: Sequence[LinearShape]) -> None:
    for pattern in patterns:
        if shapes and not any(_matches(shape, pattern) for shape in shapes):
            names = ", ".join(sorted({shape.name.split(".", 2)[-1] for shape in shapes}))
            raise ValueError(f"{key} has {pattern!r}, which matches no linear: blocks.<index>.<one of {names}>")


def _refuse_exceptions(exceptions: Sequence[ExceptionConfig], shapes: Sequence[LinearShape], key: str) -> None:
    """Raise ValueError for exceptions that match no linear of their blocks or no section of these linears, or only
    linears and sections of earlier exceptions."""
    for i, exception in enumerate(exceptions):
        in_blocks = [shape for shape in shapes if not exception.blocks or shape.letter in exception.blocks]
        if not exception.optional:
            _refuse_unmatched(f"{key}.exceptions[{i}].names", exception.names, in_blocks)
        named = [shape for shape in in_blocks if any(_matches(shape, name) for name in exception.names)]
        known = list(dict.fromkeys(name for shape in named for name in _names(shape) if name))
        if named and (unknown := [name for name in exception.sections if name not in known]):
            have = f"these have {', '.join(known)}" if known else "these have none; remove sections"
            raise ValueError(
                f"{key}.exceptions[{i}].sections has {unknown[0]!r}, which is no section of the linears "
                f"{exception.names}; {have}"
            )
        matched = [(row, name) for row in named for name in _names(row) if _first_exception(row, [exception], name)]
        firsts = {first[0] for shape, name in matched if (first := _first_exception(shape, exceptions, name))}
        if matched and i not in firsts and not exception.optional:
            earlier = " and ".join(f"{key}.exceptions[{first}]" for first in sorted(firsts))
            raise ValueError(
                f"{key}.exceptions[{i}].names={exception.names} has no effect: every linear that it matches belongs "
                f"to {earlier} before it; put it first, or remove it"
            )


def _bf16_reason(
    shape: LinearShape, section: str, bf16: Bf16BlocksConfig, num_blocks: int, listed: frozenset[tuple[str, str]]
) -> str:
    """Why a linear, or a section of it, stays in BF16; empty if it does not."""
    num_last = bf16.num_last(num_blocks)
    first, last = shape.block < bf16.first, num_blocks - num_last <= shape.block < num_blocks
    for end, included, count in (("first", first, bf16.first), ("last", last, num_last)):
        if included:
            return f"block {shape.block} is " + (f"one of the {end} {count}" if count > 1 else f"the {end}")
    for pattern in bf16.names:
        if fnmatch.fnmatchcase(shape.name, pattern):
            return f"its name matches {pattern}"
    return f"listed in {Path(bf16.file or '').name}" if listed & {(shape.name, ""), (shape.name, section)} else ""


def _read_plan_file(path: str, known: set[tuple[str, str]], key: str) -> frozenset[tuple[str, str]]:
    """The file's linears, each with one of its sections, or with "" for all of it. known: those that may be listed."""
    listed = set[tuple[str, str]]()
    try:
        content = yaml.safe_load(Path(path).read_text())
        names = content.get("bf16") if isinstance(content, dict) else None
        if not isinstance(names, list):
            raise ValueError("it has no list of linears under `bf16`")
        for name in names:
            linear, _, sections = str(name).removesuffix("]").partition("[")
            of_name = {(linear, section) for section in sections.split(",")}
            if not of_name <= known:
                raise ValueError(f"this model has no linear {name!r}")
            listed |= of_name
    except (OSError, yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{key}.bf16_blocks.file={path} cannot be used ({why}); give a plan file that "
            "scripts/analyze_precision.py wrote for this model"
        ) from error
    return frozenset(listed)


# ------------------------------------------------------------------------------------------------------------- switch


def switch_step(when: str, num_steps: int, decay_start_step: int) -> int | None:
    """The first step after the switch that `when` asks for; None for `never` and `gradient_noise`: no fixed step.

    Raises ValueError unless `when` is one of these, before_decay, a fraction in (0, 1) or a step in [0, num_steps].
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


# The precision switches after so many consecutive measurements of the gradient noise below the threshold.
PATIENCE = 3


@dataclass
class PrecisionSwitch:
    """Decides before each step whether the precision switches now. It switches at most once in a run, by default never.

    at_step: from `switch_step`. switched_at: the first step with the new plan, or None. num_below: consecutive
    measurements below the threshold so far (`gradient_noise`).
    """

    config: SwitchConfig = field(default_factory=SwitchConfig)
    at_step: int | None = None
    switched_at: int | None = None
    num_below: int = 0

    def before_step(self, step: int, measure_ratio: Callable[[], float]) -> bool:
        """Decide whether the precision switches before `step` is computed; returns whether it does.

        measure_ratio: measures the norm of this step's gradient divided by the norm of its quantization noise; called
        only every `interval` steps of `gradient_noise`.
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
    """Writes the recipes of `plan` into the linears, and at the switch those of `plan_after_switch`, if there is one.

    A linear uses its new recipe from the next forward pass on; it drops the quantized weights that it kept. linears:
    when it is built, the context of every linear of the model, by name; afterwards of every linear and part of the
    plan. Each gets `step_state` and `backend` (None: it keeps its own, at first `emulated`).
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
        self.linears, self.step_state = split_contexts(linears, plan), step_state
        self.switch = switch or PrecisionSwitch()
        self.plans = [plan] if plan_after_switch is None else [plan, plan_after_switch]
        for name, linear in self.linears.items():
            linear.name, linear.step_state, linear.backend = name, step_state, backend or linear.backend
        self._apply(plan)

    @property
    def plan(self) -> Plan:
        return self.plans[0 if self.switch.switched_at is None else -1]

    def before_step(self, step: int, measure_ratio: Callable[[], float]) -> bool:
        """As `PrecisionSwitch.before_step`, and apply the plan. measure_ratio: returns the same on all ranks."""
        switched = self.switch.before_step(step, measure_ratio)
        if switched:
            self._apply(self.plan)
        return switched

    @contextmanager
    def other_recipes(self, change: Callable[[Recipe], Recipe]) -> Iterator[None]:
        """Inside a `with`, every linear has the recipe that `change` makes from its own."""
        recipes = {name: linear.recipe for name, linear in self.linears.items()}
        self._set_recipes({name: change(recipe) for name, recipe in recipes.items()})
        try:
            yield
        finally:
            self._set_recipes(recipes)

    def state_dict(self) -> dict[str, Any]:
        return {"switched_at": self.switch.switched_at, "num_below": self.switch.num_below}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint, with the plan that was in effect there.

        Raises ValueError if that is the plan after a switch and this run has no switch.
        """
        if state["switched_at"] is not None and len(self.plans) == 1:
            raise ValueError(
                "the checkpoint was saved after the precision switch of its run, but with precision.switch.when=never "
                "there is no recipe for it; set precision.switch.when and precision.switch.target as in that run, or "
                "give a checkpoint from before the switch"
            )
        self.switch.switched_at, self.switch.num_below = state["switched_at"], state["num_below"]
        self._apply(self.plan)

    def _apply(self, plan: Plan) -> None:
        self._set_recipes({row.linear.name: row.recipe for row in plan.rows})

    def _set_recipes(self, recipes: Mapping[str, Recipe]) -> None:
        for name, linear in self.linears.items():
            linear.recipe, linear.weight_cache = recipes[name], None
