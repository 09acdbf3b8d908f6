"""How sure a mean of few numbers is: 95% intervals by Student's t, as text and as pictures.

Groups of few numbers know little of their own scatter: of three, the interval is 4.3 standard errors to each side. If
what makes numbers scatter is the same in every group (here: seeds), the groups together know how much it is:

    s^2 = sum (n_g - 1) s_g^2 / sum (n_g - 1)

with as many degrees of freedom as the denominator. Gaps to one and the same base run share its noise, so these are a
little too many: of 95% intervals, 92% to 94% hold the truth (2 or 3 pairs each of 2 to 16 recipes, drawn at random, all
runs alike). Of a recipe that scatters more than the others it is fewer: compare that one apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from megatron_fp4.logging.pictures import BLACK, BLUE, FAINT, INK, VERMILION, legend_below, picture

# A group with as many numbers of its own knows how they scatter.
_OWN = 5
# Of a mean over neighbouring steps, which are not independent.
BLOCKS = 6


@dataclass(frozen=True)
class Estimate:
    """A mean of `count` numbers. error: its standard error, None if nothing says how the numbers scatter. freedom:
    degrees of freedom of that. shared: whether it is of the pooled standard deviation of several groups."""

    mean: float
    error: float | None
    count: int
    freedom: int = 0
    shared: bool = False

    @property
    def half_width(self) -> float | None:
        """Of the 95% interval."""
        return None if self.error is None else self.error * float(stats.t.ppf(0.975, self.freedom))

    @property
    def beyond_noise(self) -> bool:
        """Whether there is an interval that leaves out zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def text(self, unit: str = "%", digits: int = 2) -> str:
        """`+1.23% [+0.95, +1.51]`, starred if the scatter is the pooled one; or that there is no interval."""
        mean = f"{self.mean:+.{digits}f}{unit}"
        if self.half_width is None:
            return f"{mean} (no interval)"
        low, high = self.mean - self.half_width, self.mean + self.half_width
        return f"{mean} [{low:+.{digits}f}, {high:+.{digits}f}]{'*' if self.shared else ''}"


class Pooled(NamedTuple):
    """A standard deviation over several groups, each around its own mean, and its degrees of freedom."""

    deviation: float
    freedom: int


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """Over the groups with two numbers or more; None without one."""
    several = [np.asarray(group) for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in several)
    return Pooled(math.sqrt(squares / freedom), freedom) if freedom else None


def estimate(numbers: Sequence[float], shared: Pooled | None = None) -> Estimate:
    """Of at least one number: with their own standard deviation if there are five or more, else with `shared`; if that
    knows no more than their own, with their own, as far as there is one."""
    count, mean = len(numbers), float(np.mean(numbers))
    if count < _OWN and shared is not None and shared.freedom >= count:
        return Estimate(mean, shared.deviation / math.sqrt(count), count, shared.freedom, shared=True)
    return Estimate(mean, float(stats.sem(numbers)) if count > 1 else None, count, count - 1)


def estimates(gaps: pd.DataFrame) -> dict[str, Estimate]:
    """Of each column that has a number, with the pooled standard deviation of all of them."""
    groups = {str(name): list(column.dropna()) for name, column in gaps.items()}
    shared = pooled(groups.values())
    return {name: estimate(numbers, shared) for name, numbers in groups.items() if numbers}


def block_estimate(numbers: Sequence[float]) -> Estimate:
    """The mean of numbers that follow one another and are not independent; its error by the means of BLOCKS blocks of
    almost the same length, None of fewer than two numbers a block."""
    if len(numbers) < 2 * BLOCKS:
        return Estimate(float(np.mean(numbers)), None, len(numbers))
    means = [block.mean() for block in np.array_split(np.asarray(numbers), BLOCKS)]
    return Estimate(float(np.mean(numbers)), float(stats.sem(means)), BLOCKS, BLOCKS - 1)


def share_text(gaps: pd.DataFrame, name: str, against: str | None) -> str:
    """What part of the gap of `against` that of `name` is, with its standard error: the mean over the rows of `gaps`
    that have both. A dash if there is none, or nothing says that the gaps of `against` are above zero."""
    whole = estimates(gaps).get(str(against))
    if whole is None or not whole.beyond_noise or name not in gaps:
        return "-"
    pairs = gaps.dropna(subset=[name, str(against)])
    if pairs.empty or pairs[against].min() <= 0:
        return "-"
    share = estimate(list(pairs[name] / pairs[against]))
    return f"{share.mean:.2f}" + ("" if share.error is None else f" ± {share.error:.2f}")


def gap_text(gap: Estimate | None, unit: str = "%", digits: int = 2) -> str:
    """`Estimate.text`, or a dash."""
    return "-" if gap is None else gap.text(unit, digits)


def draw_estimates(
    rows: Mapping[str, tuple[Estimate, Sequence[float]]],
    target: Path,
    axis: str,
    *,
    against: str | None = None,
    noise: tuple[str, float] | None = None,
) -> Path:
    """Draw at least one estimate by its name, the smallest on top, with its 95% interval and the numbers that it is the
    mean of as ticks; returns `target`. Filled: the interval leaves out zero. Raises ValueError if there is none.

    axis: what a gap is. against: a dotted line at this row's. noise: name and half width of a band around zero.
    """
    if not rows:
        raise ValueError("nothing to draw: there is no gap, of runs or recipes that got to their ends beside the base")
    ordered = sorted(rows.items(), key=lambda row: row[1][0].mean)
    with picture(target, figsize=(8.5, 1.7 + 0.36 * len(ordered)), dpi=150) as (figure, axes):
        axes.axvline(0, color=INK, linewidth=1.0)
        if noise is not None:
            axes.axvspan(-noise[1], noise[1], color=BLACK, alpha=0.07, linewidth=0, label=noise[0])
        if against is not None and against in rows:
            axes.axvline(rows[against][0].mean, color=FAINT, linewidth=1.0, linestyle=(0, (1, 2)), label=against)
        for place, (_, (gap, numbers)) in enumerate(ordered):
            color = VERMILION if gap.beyond_noise else BLUE
            if len(numbers) > 1:
                axes.plot(numbers, [place + 0.22] * len(numbers), color=BLUE, linestyle="none", marker="|")
            kind = "95% interval without zero" if gap.beyond_noise else "95% interval with zero"
            axes.errorbar(
                [gap.mean], [place], xerr=[gap.half_width or 0.0], color=color, marker="o" if gap.beyond_noise else "s",
                markerfacecolor=color if gap.beyond_noise else "white", capsize=3, linestyle="none",
                label="mean, no interval" if gap.error is None else f"mean, {kind}",
            )  # fmt: skip
        axes.set_yticks(range(len(ordered)), [f"{name} ({gap.count})" for name, (gap, _) in ordered])
        axes.set_ylim(len(ordered) - 0.4, -0.6)
        axes.set_xlabel(axis)
        axes.grid(axis="x", color="#000000", alpha=0.08)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        legend_below(figure, axes)
    return target
