"""The plan: which linear has which recipe, and why.

Selective high precision (paper, sections 4.1 and E.2): linears are quantized by the run's recipe except those of the
first and last blocks, those whose names match a pattern, and those that a plan file lists, which are in BF16; and those
of `precision.exceptions`, which have a recipe of their own. Embedding, head, norms and everything between the linears
are never quantized and do not appear.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_fp4.config.precision_schema import Bf16BlocksConfig, ComposedException, ExceptionConfig, RecipeConfig
from megatron_fp4.precision.recipe import BF16, FPROP_WEIGHT, Recipe, recipe_from_config, switched_recipe
from megatron_fp4.quantization.elements import E2M1_MAX
from megatron_fp4.quantization.formats import FORMATS

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
        """Number of weights."""
        return self.in_features * self.out_features

    @property
    def flops_per_token(self) -> int:
        """Of the forward GEMM, a multiply and an add counted as two; training takes three times that."""
        return 2 * self.parameters


@dataclass(frozen=True)
class PlannedLinear:
    """One row of the plan. key: what the recipe is called in the configuration."""

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
    def share_of_linears(self) -> float:
        """Quantized linears over all linears, 0..1."""
        return self.num_quantized / max(1, len(self.rows))

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
        four_bits = {name for name, form in FORMATS.items() if form.largest == E2M1_MAX}
        weights = [row.linear.parameters for row in self.rows if row.recipe[FPROP_WEIGHT].format in four_bits]
        return sum(weights) / max(1, sum(row.linear.parameters for row in self.rows))

    def warning(self, name: str) -> str:
        """A line if a plan in 4 bits, `name` in the configuration, leaves much of the model in others; else empty."""
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
        """Every recipe of the plan once, as rows have them, with a name of its own: `nvfp4`, another `nvfp4 (2)`."""
        names: dict[Recipe, str] = {}
        for row in self.rows:
            if row.recipe not in names:
                number = 1 + sum(recipe.name == row.recipe.name for recipe in names)
                names[row.recipe] = row.recipe.name if number == 1 else f"{row.recipe.name} ({number})"
        return names

    def as_dict(self) -> dict[str, Any]:
        """For YAML and checkpoints: the recipes written out, and every linear with its recipe's name and the reason."""
        names = self.recipe_names
        recipes = {name: recipe.describe() for recipe, name in names.items()}
        linears = {row.linear.name: {"recipe": names[row.recipe], "why": row.reason} for row in self.rows}
        return {
            "recipes": recipes,
            "linears": linears,
            "quantized_linears": f"{self.num_quantized} of {len(self.rows)}",
            "bf16": [row.linear.name for row in self.rows if not row.recipe.quantized],
        }


def plan_in_effect(plans: tuple[Plan, Plan | None], switched_at: int | None) -> Plan:
    """Of the plans before and after the precision switch, the one that a run follows which switched at that step (None:
    not yet)."""
    before, after = plans
    return before if switched_at is None or after is None else after


def recipes_in(plans: Iterable[Plan | None]) -> list[Recipe]:
    """Those of all linears of all plans, each once."""
    return list(dict.fromkeys(row.recipe for plan in plans if plan is not None for row in plan.rows))


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
    _refuse_unmatched(f"{key}.bf16_blocks.names", bf16.names, shapes, num_blocks)
    for i, exception in enumerate(exceptions):
        among = [shape for shape in shapes if not exception.blocks or shape.letter in exception.blocks]
        _refuse_unmatched(f"{key}.exceptions[{i}].names", exception.names, among, num_blocks)
    _refuse_covered(exceptions, shapes, key)
    quantized = recipe.quantized or any(other.quantized for other in recipes)
    rows = []
    for shape in shapes:
        planned, reason, where = recipe, "the run's recipe", key
        if quantized and (why := _bf16_reason(shape, bf16, num_blocks, listed)):
            planned, reason = BF16, why
        elif match := first_exception(shape.name, shape.letter, exceptions):
            index, pattern = match
            planned, reason = recipes[index], f"its name matches {pattern}"
            where = f"{key}.exceptions[{index}].precision={exceptions[index].precision}: precision"
            if exceptions[index].blocks:
                reason += f" in blocks {exceptions[index].blocks}"
        rows.append(PlannedLinear(shape, planned, reason, where))
    return Plan(tuple(rows))


def recipe_of(exception: ExceptionConfig) -> RecipeConfig:
    """The recipe of an exception of a composed configuration."""
    assert isinstance(exception, ComposedException), "an exception without its recipe"
    return exception.recipe


def first_exception(name: str, letter: str, exceptions: Sequence[ExceptionConfig]) -> tuple[int, str] | None:
    """The first exception that covers a linear in a block of this letter, and the pattern that its name matches."""
    for i, exception in enumerate(exceptions):
        if not exception.blocks or letter in exception.blocks:
            for pattern in exception.names:
                if fnmatch.fnmatchcase(name, pattern):
                    return i, pattern
    return None


def _refuse_unmatched(key: str, patterns: Sequence[str], shapes: Sequence[LinearShape], num_blocks: int) -> None:
    for pattern in patterns:
        if shapes and not any(fnmatch.fnmatchcase(shape.name, pattern) for shape in shapes):
            names = ", ".join(sorted({shape.name.split(".", 2)[-1] for shape in shapes}))
            raise ValueError(
                f"{key} has {pattern!r}, which matches no linear; names are "
                f"blocks.<0..{num_blocks - 1}>.<one of {names}>"
            )


def _refuse_covered(exceptions: Sequence[ExceptionConfig], shapes: Sequence[LinearShape], key: str) -> None:
    for i, exception in enumerate(exceptions):
        matched = [shape for shape in shapes if first_exception(shape.name, shape.letter, [exception])]
        takers = {found[0] for shape in matched if (found := first_exception(shape.name, shape.letter, exceptions))}
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
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{key}.bf16_blocks.file={path} cannot be read ({' '.join(str(error).split())}); give a plan file as "
            "scripts/analyze_precision.py writes it"
        ) from error
    names = content.get("bf16") if isinstance(content, dict) else None
    if not isinstance(names, list):
        raise ValueError(
            f"{key}.bf16_blocks.file={path} has no list of linears under the key `bf16`; give a "
            "plan file as scripts/analyze_precision.py writes it"
        )
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"{key}.bf16_blocks.file={path} lists {unknown[0]!r}, which is no linear of this model; was the file "
            f"made for another model? scripts/analyze_precision.py makes one for this one, or set it to null"
        )
    return frozenset(names)
