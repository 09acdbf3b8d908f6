"""The pictures, each into a PNG file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_fp4.precision.recipe import GEMMS
from scripts.study.errors import FORMATS, UNCOMMON
from scripts.study.tables import short

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw_curves(axes: Axes, x: list[Any], curves: dict[str, list[float]], xlabel: str, ylabel: str, title: str) -> None:
    """One line a curve over `x`, and the labels."""
    for (name, values), colour, marker in zip(curves.items(), _COLOURS, _MARKERS, strict=False):
        axes.plot(x, values, marker=marker, color=colour, label=name)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3, which="both")


def draw_formats(found: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """SNR of each format (nearest), a row a tensor."""
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    names, formats = list(found), [f for f in FORMATS if f not in UNCOMMON]
    for form, colour, marker in zip(formats, _COLOURS, _MARKERS, strict=False):
        values = [found[name][form]["snr_db"] for name in names]
        axes.plot(values, range(len(names)), marker, color=colour, markersize=8, label=form, alpha=0.9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("signal to noise, dB (right is better)")
    axes.set_title("Rounding to nearest: error of each format", loc="left")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, columnspacing=1, handletextpad=0.2)
    save(figure, path)


def draw_hadamard(
    gains: dict[str, list[float]], errors: dict[str, list[float]], sizes: tuple[int, ...], path: Path
) -> None:
    """Gain of the ordinary tokens, and error of dW, over the transform's size."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    ticks, xlabel = [str(size) if size else "none" for size in sizes], "size of the Hadamard transform"
    left.axhline(1, color="black", linewidth=1, linestyle=":")
    title = "What is left of the ordinary tokens' part of dW"
    draw_curves(left, ticks, gains, xlabel, "gain (1: nothing lost systematically)", title)
    draw_curves(right, ticks, errors, xlabel, "relative error of dW", "Error of dW (four draws averaged)")
    right.set_ylim(0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def draw_means(counts: list[int], curves: dict[str, list[float]], path: Path) -> None:
    """Error of the mean of n quantizations, beside the line 1/sqrt(n)."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    xlabel = "n, quantizations of the same tensor that are averaged"
    draw_curves(axes, counts, curves, xlabel, "relative error of the mean", "NVFP4 1x16 of a Gaussian tensor")
    start = curves["stochastic"][0]
    axes.plot(counts, [start / math.sqrt(n) for n in counts], ":", color="black", label="1/sqrt(n)")
    axes.loglog()
    axes.legend()
    save(figure, path)


def draw_layers(errors: dict[str, dict[str, float]], path: Path) -> None:
    """Errors of the three products, a group a linear."""
    figure, axes = plt.subplots(figsize=(11, 5), layout="constrained")
    for i, product in enumerate(GEMMS):
        places = [place + 0.27 * (i - 1) for place in range(len(errors))]
        axes.bar(places, [one[product] for one in errors.values()], 0.25, color=_COLOURS[i], label=product)
    axes.set_xticks(range(len(errors)), [short(name) for name in errors], rotation=35, ha="right")
    axes.set_ylabel("relative error of the product")
    axes.set_title("Every linear in NVFP4: error of its products against BF16", loc="left")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(ncols=3, loc="upper left")
    axes.set_ylim(0, 1.2 * max(max(one.values()) for one in errors.values()))
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write and close; without the version of the library that drew it, so that the bytes stay the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
