"""Recipes of tests: one that differs from another in some operands or transforms."""

from dataclasses import replace
from typing import Any

from megatron_fp4.precision.recipe import PLACES, Recipe


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """`recipe` with other operands (`dgrad_weight=...`), transforms (`wgrad_rht=16`) or fields (`amax="shard"`)."""
    for name, gemm in recipe.gemms.items():
        sides = {p.side: changes.pop(p.name) for p in PLACES if p.gemm == name and p.name in changes}
        changes[name] = replace(gemm, rht=changes.pop(f"{name}_rht", gemm.rht), **sides)
    return replace(recipe, **changes)


def with_means(recipe: Recipe) -> Recipe:
    """`recipe` with every mean kept."""
    kept = {place.name: replace(operand, mean="kept") for place, operand in recipe.operands.items()}
    return changed(recipe, mean_group=Recipe().mean_group, **kept)


def without_means(recipe: Recipe, **changes: Any) -> Recipe:
    """`recipe` with the mean of every quantized activation and gradient removed, and `changes` as above."""
    removed = {
        place.name: replace(operand, mean="removed")
        for place, operand in recipe.operands.items()
        if place.tensor != "weight" and operand.quantized
    }
    return changed(recipe, **removed | changes)
