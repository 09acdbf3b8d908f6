"""Which release of Transformer Engine a recipe needs on a chip, read from its sources (2.9 to 2.20).

A release that lacks something computes other numbers than the reference, or none: it is refused by name here, before
the self-test would find the difference.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron_fp4.precision.recipe import Recipe

Release = tuple[int, int]


@dataclass(frozen=True)
class _Need:
    """release: the first that has it. before: what earlier ones do. of: whether it matters to a recipe on a chip."""

    release: Release
    before: str
    of: Callable[[Recipe, tuple[int, int]], bool]


def _stochastic(recipe: Recipe) -> bool:
    return any(operand.rounding == "stochastic" for operand in recipe.operands.values())


_NEEDS = (
    _Need((2, 10), "GEMMs want a workspace from their caller", lambda recipe, _: recipe.quantized),
    _Need(
        (2, 12),
        "dgrad's and wgrad's copies of a gradient are rounded by the same draws",
        lambda recipe, _: _stochastic(recipe) and recipe.wgrad.rht > 0,
    ),
    _Need((2, 14), "NVFP4 block scales are rounded in another order", lambda recipe, _: "nvfp4" in recipe.formats),
    _Need(
        (2, 16),
        "the Hadamard transform takes a kernel that 12.x cannot run",
        lambda recipe, capability: capability[0] == 12 and recipe.wgrad.rht > 0,
    ),
    _Need(
        (2, 17),
        "there is no four-over-six",
        lambda recipe, _: any(operand.four_over_six for operand in recipe.operands.values()),
    ),
    _Need(
        (2, 20),
        "square MXFP8 blocks were not seen in the sources",
        lambda recipe, _: any(op.format == "mxfp8" and op.block[0] > 1 for op in recipe.operands.values()),
    ),
    _Need(
        (2, 19),
        "stochastic rounding makes every gradient zero on 12.x",
        lambda recipe, capability: capability[0] == 12 and _stochastic(recipe),
    ),
)


def needed_release(recipe: Recipe, capability: tuple[int, int]) -> Release:
    """The first release that computes `recipe` on a GPU of this compute capability as the reference does."""
    return max((need.release for need in _NEEDS if need.of(recipe, capability)), default=(0, 0))


def outdated(recipe: Recipe, capability: tuple[int, int]) -> str | None:
    """Why the installed release is too old for `recipe` on this GPU, or None if it is not, or if none is installed."""
    installed = installed_version()
    numbers = None if installed is None else re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None:
        return None
    release = (int(numbers[1]), int(numbers[2]))
    missing = [need for need in _NEEDS if release < need.release and need.of(recipe, capability)]
    if not missing:
        return None
    reasons = ", ".join(f"before {_text(need.release)} {need.before}" for need in missing)
    needed = _text(needed_release(recipe, capability))
    return f"Transformer Engine {installed} is installed and precision={recipe.name} needs {needed} or newer: {reasons}"


def installed_version() -> str | None:
    """The version of the installed package, such as `2.20.2`; None if there is none."""
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(release: Release) -> str:
    return f"{release[0]}.{release[1]}"
