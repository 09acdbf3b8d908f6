"""Changed recipes for tests."""

from dataclasses import replace
from typing import Any

from megatron_fp4.precision.recipe import SLOTS, Recipe


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """`recipe` with other operands (`dgrad_weight=...`), transforms (`wgrad_rht=16`) or fields (`amax="shard"`)."""
    for name, gemm in recipe.gemms.items():
        sides = {p.side: changes.pop(p.name) for p in SLOTS if p.gemm == name and p.name in changes}
        changes[name] = replace(gemm, rht=changes.pop(f"{name}_rht", gemm.rht), **sides)
    return replace(recipe, **changes)
