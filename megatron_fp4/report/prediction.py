"""Whether what diagnostics measure early says what a recipe costs in the end: correlations over recipes.

A *point* is a recipe: a figure of it (`early_figures.py`) and its gap at the end (`final_gaps.py`), each the mean over
its runs, because runs of one recipe differ in little but noise. The base is no point: its gap is zero by definition.

With few recipes and many figures some correlate by chance. So each has an interval (bootstrap over recipes), and the
strongest of all is to be held against what the strongest of all reaches when the gaps are shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fp4.report.early_figures import by_figure
from megatron_fp4.report.noise import Estimate
from megatron_fp4.report.picture import INK, MARKERS, legend_below, look, open_frame, picture
from megatron_fp4.report.words import counted

LEAST = 4
"""Recipes that a correlation needs at least."""
_RESAMPLES = 2000
_SEED = 0
# More than there are colours, so that no two recipes look alike.
_MARKERS = (*MARKERS, "<", ">", "p", "*", "h", "8")

Points = Mapping[str, Mapping[str, float]]
"""Recipe -> figure -> number."""


@dataclass(frozen=True)
class Correlation:
    """Of a figure with the gap, over `count` recipes.

    spearman, pearson: of ranks and of numbers. low, high: the 95% interval of the first, by bootstrap. weakest: the
    first with one recipe left out, that which leaves least of it (or turns its sign).
    """

    figure: str
    spearman: float
    pearson: float
    low: float
    high: float
    weakest: float
    count: int


def correlations(points: Points, gaps: Mapping[str, float]) -> list[Correlation]:
    """Of every figure that differs between recipes, the strongest first.

    points: recipe -> figure -> number. gaps: recipe -> gap at the end. Raises ValueError for fewer than four recipes,
    or if no figure differs.
    """
    if len(points) < LEAST:
        raise ValueError(
            f"{counted(len(points), 'recipe')} with diagnostics and a gap at the end ({', '.join(points) or 'none'}); "
            f"a correlation needs {LEAST} at least"
        )
    found = []
    for name, values in by_figure(points).items():
        x, y = np.array(list(values.values())), np.array([gaps[recipe] for recipe in values])
        if len(np.unique(x)) > 1 and len(np.unique(y)) > 1:
            found.append(_correlation(name, x, y))
    if not found:
        raise ValueError("no figure differs between the recipes, or all gaps are the same")
    return sorted(found, key=lambda one: -abs(one.spearman))


def _correlation(name: str, x: np.ndarray, y: np.ndarray) -> Correlation:
    """x, y: [recipes]."""
    generator, count = np.random.default_rng(_SEED), len(x)
    drawn = generator.integers(0, count, (_RESAMPLES, count))
    resampled = _pearson(_ranks(x[drawn]), _ranks(y[drawn]))
    low, high = np.percentile(resampled[np.isfinite(resampled)], (2.5, 97.5))
    whole = float(_pearson(_ranks(x), _ranks(y)))
    rest = np.array([[j for j in range(count) if j != i] for i in range(count)])
    without = _pearson(_ranks(x[rest]), _ranks(y[rest]))
    weakest = math.copysign(1.0, whole) * float(np.nanmin(np.sign(whole) * np.nan_to_num(without)))
    return Correlation(name, whole, float(_pearson(x, y)), float(low), float(high), weakest, count)


def by_chance(points: Points, gaps: Mapping[str, float]) -> float:
    """What the strongest rank correlation of all figures stays below in 95% of shuffles of the gaps."""
    x = np.array([list(values.values()) for values in by_figure(points).values()])
    ranks = _ranks(x)[:, None, :]  # [figures, 1, recipes]
    generator, order = np.random.default_rng(_SEED), _ranks(np.array([gaps[recipe] for recipe in points]))
    shuffled = generator.permuted(np.tile(order, (_RESAMPLES, 1)), axis=1)  # [shuffles, recipes]
    most = np.abs(np.nan_to_num(_pearson(ranks, shuffled[None]))).max(axis=0)
    return float(np.percentile(most, 95))


def correlation_table(found: Sequence[Correlation], chance: float, rows: int = 15) -> str:
    """Markdown, the strongest `rows` of them. chance: of `by_chance`."""
    lines = [
        "| figure | rank correlation | 95% interval | without any one recipe | linear correlation |",
        "|" + "---|" * 5,
        *(
            f"| {one.figure} | {one.spearman:+.2f} | {one.low:+.2f} to {one.high:+.2f} | {one.weakest:+.2f} | "
            f"{one.pearson:+.2f} |"
            for one in found[:rows]
        ),
        "",
        f"{counted(len(found), 'figure')} of {counted(found[0].count, 'recipe')}. If gaps had nothing to do with them, "
        f"the strongest rank correlation would be below {chance:.2f} in 95% of cases; {abs(found[0].spearman):.2f} is "
        f"{'more' if abs(found[0].spearman) > chance else 'no more'} than chance gives. Intervals: bootstrap over "
        "recipes.",
    ]
    return "\n".join(lines)


def strongest(found: Sequence[Correlation], count: int) -> list[Correlation]:
    """The first `count` of different quantities: a median and a mean of the same say much the same."""
    of_quantity: dict[str, Correlation] = {}
    for one in found:
        of_quantity.setdefault(one.figure.rpartition(", ")[0], one)
    return list(of_quantity.values())[:count]


def draw_correlations(
    found: Sequence[Correlation],
    points: Points,
    gaps: Mapping[str, Estimate],
    base: str,
    target: str | Path,
    note: str | None = None,
) -> Path:
    """Gaps, with one standard error, against the strongest four figures of different quantities; returns `target`.

    note: a line on top of them.
    """
    target, shown, values = Path(target), strongest(found, 4), by_figure(points)
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    settings = {"figsize": (4.6 * columns, 3.3 * rows + 0.5), "dpi": 150, "sharey": True, "squeeze": False}
    with picture(target, rows, columns, **settings) as (figure, grid):
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        for axes, one in zip(grid.flat, shown, strict=False):
            for index, recipe in enumerate(points):
                gap, style = gaps[recipe], look(index)
                axes.errorbar(
                    [values[one.figure][recipe]], [gap.mean], [gap.error or 0.0], color=style.color, linewidth=1.0,
                    marker=_MARKERS[index % len(_MARKERS)], markersize=6, linestyle="none", label=recipe,
                )  # fmt: skip
            axes.axhline(0, color=INK, linewidth=0.8)
            axes.set_xlabel(one.figure)
            axes.set_title(f"rank correlation {one.spearman:+.2f}, {one.low:+.2f} to {one.high:+.2f}", fontsize=9.5)
            open_frame(axes)
        for axes in grid[:, 0]:
            axes.set_ylabel(f"loss above {base} at the end (%)")
        if note:
            figure.suptitle(note, fontsize=9.5)
        legend_below(figure, list(grid.flat))
    return target


def _ranks(x: np.ndarray) -> np.ndarray:
    """Of [..., n] along the last axis, from 0; equal numbers share the mean of theirs."""
    below = (x[..., None, :] < x[..., :, None]).sum(-1)
    same = (x[..., None, :] == x[..., :, None]).sum(-1)
    return below + (same - 1) / 2


def _pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of [..., n] and [..., n] along the last axis; NaN where one of them does not vary."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    norm = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norm > 0, (x * y).sum(-1) / norm, np.nan)
