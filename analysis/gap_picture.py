"""Gaps of recipes as a picture: a row each, the smallest on top, with its 95% interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.noise import Estimate
from megatron_fp4.logging.picture import BLACK, BLUE, FAINT, INK, VERMILION, legend_below, picture


@dataclass(frozen=True)
class Row:
    """A gap in percent. each: the numbers that it is the mean of, to be drawn as ticks beside it."""

    label: str
    gap: Estimate
    each: Sequence[float] = ()


@dataclass(frozen=True)
class Words:
    """axis: what a gap is, with its unit. mean: what the dots are, such as "mean of the pairs". title: over it all.
    each: what a tick is."""

    axis: str
    mean: str
    title: str | None = None
    each: str = "a pair"


def draw_rows(
    rows: Sequence[Row],
    target: str | Path,
    words: Words,
    noise: tuple[str, float] | None = None,
    mark: tuple[str, float] | None = None,
) -> Path:
    """Draw at least one row; returns `target`. Filled: beyond the noise.

    noise: name and half width of a band around zero. mark: name and place of a dotted line.
    """
    rows = sorted(rows, key=lambda row: row.gap.mean)
    target = Path(target)
    with picture(target, figsize=(8.5, 1.7 + 0.36 * len(rows)), dpi=150) as (figure, axes):
        if noise is not None:
            axes.axvspan(-noise[1], noise[1], color=BLACK, alpha=0.07, linewidth=0, label=noise[0])
        axes.axvline(0, color=INK, linewidth=1.0)
        if mark is not None:
            axes.axvline(mark[1], color=FAINT, linewidth=1.0, linestyle=(0, (1, 2)), label=mark[0])
        labels: set[str] = set()
        for place, row in enumerate(rows):
            if len(row.each) > 1:
                axes.plot(
                    row.each, [place + 0.22] * len(row.each), color=BLUE, linestyle="none", marker="|", markersize=6,
                    label=_once(words.each, labels),
                )  # fmt: skip
            gap = row.gap
            color, sure = (VERMILION, "beyond the noise") if gap.beyond_noise else (BLUE, "not beyond the noise")
            interval = f" (95% interval), {sure}" if gap.error is not None else ", how sure is not known"
            axes.errorbar(
                [gap.mean], [place], xerr=[gap.half_width or 0.0], color=color, marker="o" if gap.beyond_noise else "s",
                markerfacecolor=color if gap.beyond_noise else "white", markersize=6, capsize=3, linewidth=1.5,
                linestyle="none", label=_once(f"{words.mean}{interval}", labels),
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(words.axis)
        if words.title is not None:
            axes.set_title(words.title, fontsize=9.5, wrap=True)
        axes.grid(axis="x", color="#000000", alpha=0.08)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        legend_below(figure, axes)
    return target


def _once(label: str, seen: set[str]) -> str | None:
    if label in seen:
        return None
    seen.add(label)
    return label
