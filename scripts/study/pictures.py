"""The pictures, each into a PNG file."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from megatron_fp4.logging.picture import BLACK, legend_below, look, open_frame, picture
from megatron_fp4.precision.recipe import GEMMS
from scripts.study.errors import FORMATS, UNCOMMON
from scripts.study.tables import short


def draw_curves(axes: Axes, x: list[Any], curves: dict[str, list[float]], xlabel: str, ylabel: str, title: str) -> None:
    """One line a curve over `x`, and the labels."""
    for index, (name, values) in enumerate(curves.items()):
        axes.plot(x, values, label=name, **look(index).points())
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    axes.grid(alpha=0.3, which="both")


def draw_formats(found: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """SNR of each format (nearest), a row a tensor."""
    names, formats = list(found), [f for f in FORMATS if f not in UNCOMMON]
    with _page_picture(path, figsize=(9, 6)) as (figure, axes):
        for index, form in enumerate(formats):
            values, style = [found[name][form]["snr_db"] for name in names], look(index)
            axes.plot(values, range(len(names)), style.marker, color=style.color, markersize=8, label=form, alpha=0.9)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("signal to noise, dB (right is better)")
        axes.set_title("Rounding to nearest: error of each format")
        axes.grid(alpha=0.3)
        legend_below(figure, axes)


def draw_hadamard(
    gains: dict[str, list[float]], errors: dict[str, list[float]], sizes: tuple[int, ...], path: Path
) -> None:
    """Gain of the ordinary tokens, and error of dW, over the transform's size."""
    ticks, xlabel = [str(size) if size else "none" for size in sizes], "size of the Hadamard transform"
    with _page_picture(path, 1, 2, figsize=(12, 5.5)) as (figure, (left, right)):
        left.axhline(1, color=BLACK, linewidth=1, linestyle=":")
        title = "What is left of the ordinary tokens' part of dW"
        draw_curves(left, ticks, gains, xlabel, "gain (1: nothing lost systematically)", title)
        draw_curves(right, ticks, errors, xlabel, "relative error of dW", "Error of dW (four draws averaged)")
        right.set_ylim(0)
        legend_below(figure, right)


def draw_means(counts: list[int], curves: dict[str, list[float]], path: Path) -> None:
    """Error of the mean of n quantizations, beside the line 1/sqrt(n)."""
    xlabel = "n, quantizations of the same tensor that are averaged"
    with _page_picture(path, figsize=(8, 5)) as (figure, axes):
        draw_curves(axes, counts, curves, xlabel, "relative error of the mean", "NVFP4 1x16 of a Gaussian tensor")
        start = curves["stochastic"][0]
        axes.plot(counts, [start / math.sqrt(n) for n in counts], ":", color=BLACK, label="1/sqrt(n)")
        axes.loglog()
        legend_below(figure, axes)


def draw_layers(errors: dict[str, dict[str, float]], path: Path) -> None:
    """Errors of the three products, a group a linear."""
    with _page_picture(path, figsize=(11, 5)) as (figure, axes):
        for i, product in enumerate(GEMMS):
            places = [place + 0.27 * (i - 1) for place in range(len(errors))]
            heights = [one[product] for one in errors.values()]
            # Hatched differently, for a page in grey.
            axes.bar(places, heights, 0.25, color=look(i).color, hatch=("", "///", "...")[i], edgecolor="white",
                     linewidth=0, label=product)  # fmt: skip
        axes.set_xticks(range(len(errors)), [short(name) for name in errors], rotation=35, ha="right")
        axes.set_ylabel("relative error of the product")
        axes.set_title("Every linear in NVFP4: error of its products against BF16")
        open_frame(axes)
        legend_below(figure, axes)


def _page_picture(path: Path, *grid: int, **settings: Any) -> AbstractContextManager[Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return picture(path, *grid, dpi=100, **settings)
