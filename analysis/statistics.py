"""95% confidence intervals of means of few numbers, by Student's t, as text and as pictures.

A group of few numbers tells little about its own variance: with three, the interval is 4.3 standard errors to each
side. If the variance has the same cause in every group (here: seeds), it can be pooled over the groups:

    s^2 = sum (n_g - 1) s_g^2 / sum (n_g - 1)

The denominator is the number of degrees of freedom. It is slightly too large, because gaps to the same base run share
its noise: of the 95% intervals, 92% to 94% contain the true value (simulated: 2 to 16 recipes with 2 or 3 pairs each,
equal variance, half of it from the base). For a recipe with a larger variance than the others it is less; compare such
a recipe separately.
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

# A group with at least this number of values uses its own variance.
_OWN = 5
# For the error of a mean over consecutive steps, which are not independent.
BLOCKS = 6


@dataclass(frozen=True)
class Estimate:
    """A mean of `count` numbers. error: its standard error; None if the variance is unknown. freedom: the degrees of
    freedom of the error. shared: whether the error uses the pooled standard deviation of several groups."""

    mean: float
    error: float | None
    count: int
    freedom: int = 0
    shared: bool = False

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95% interval."""
        return None if self.error is None else self.error * float(stats.t.ppf(0.975, self.freedom))

    @property
    def ends(self) -> tuple[float, float] | None:
        """Of the 95% interval."""
        return None if (width := self.half_width) is None else (self.mean - width, self.mean + width)

    @property
    def beyond_noise(self) -> bool:
        """Whether there is an interval and it does not contain zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def text(self, unit: str = "%", digits: int = 2) -> str:
        """`+1.23% [+0.95, +1.51]`, with a star if the variance is pooled; or `+1.23% (no interval)`."""
        mean = f"{self.mean:+.{digits}f}{unit}"
        if self.ends is None:
            return f"{mean} (no interval)"
        low, high = self.ends
        return f"{mean} [{low:+.{digits}f}, {high:+.{digits}f}]{'*' if self.shared else ''}"


class Pooled(NamedTuple):
    """The pooled standard deviation of several groups, each around its own mean, and its degrees of freedom."""

    deviation: float
    freedom: int


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """Pooled over the groups with two numbers or more; None if there are none."""
    several = [np.asarray(group) for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in several)
    return Pooled(math.sqrt(squares / freedom), freedom) if freedom else None


def estimate(numbers: Sequence[float], shared: Pooled | None = None) -> Estimate:
    """The mean of at least one number. Its error is from their own standard deviation if there are five numbers or
    more; otherwise from `shared`, unless that has fewer degrees of freedom than there are numbers."""
    count, mean = len(numbers), float(np.mean(numbers))
    if count < _OWN and shared is not None and shared.freedom >= count:
        return Estimate(mean, shared.deviation / math.sqrt(count), count, shared.freedom, shared=True)
    return Estimate(mean, float(stats.sem(numbers)) if count > 1 else None, count, count - 1)


def estimates(gaps: pd.DataFrame) -> dict[str, Estimate]:
    """The estimate of each column that has a number, with the pooled standard deviation of all columns."""
    groups = {str(name): list(column.dropna()) for name, column in gaps.items()}
    shared = pooled(groups.values())
    return {name: estimate(numbers, shared) for name, numbers in groups.items() if numbers}


def block_estimate(numbers: Sequence[float]) -> Estimate:
    """The mean of consecutive numbers that are not independent. Its error is from the means of BLOCKS blocks of almost
    equal length; None if there are fewer than two numbers per block."""
    if len(numbers) < 2 * BLOCKS:
        return Estimate(float(np.mean(numbers)), None, len(numbers))
    means = [block.mean() for block in np.array_split(np.asarray(numbers), BLOCKS)]
    return Estimate(float(np.mean(numbers)), float(stats.sem(means)), BLOCKS, BLOCKS - 1)


def share_text(gaps: pd.DataFrame, name: str, against: str | None) -> str:
    """The gap of `name` over the gap of `against`, with its standard error: the mean over the rows of `gaps` that have
    both. A dash if there is none, or if the gap of `against` is not certain to be above zero."""
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
    """Draw estimates, the smallest on top, each with its name, its 95% interval and its numbers as ticks; returns
    `target`. A filled marker: the interval does not contain zero. Raises ValueError if there is none.

    axis: the label of the axis. against: a dotted line at this row. noise: name and half width of a band around zero.
    """
    if not rows:
        raise ValueError("nothing to draw: no finished run or recipe has a gap to the base")
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
