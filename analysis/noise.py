"""How sure a mean of few numbers is: standard errors, standard deviations pooled over groups, Student's t.

Groups of few numbers know little of their own spread: of three, the 95% interval is 4.3 standard errors to each side.
If what makes numbers scatter is the same in every group (here: seeds), the groups say together how much it is:

    s^2 = sum (n_g - 1) s_g^2 / sum (n_g - 1)

with as many degrees of freedom as the denominator, over groups of two numbers or more. Gaps to one and the same base
run share its noise, so these are a little too many: of 95% intervals, 93% to 94% hold the truth (2 or 3 pairs each of 3
to 16 recipes, drawn at random, with a base as noisy as they are), and they miss it together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

# So many numbers of its own a group needs to say how they scatter.
_OWN = 5
_SHARE = 0.95

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation (None of a single number) and how many numbers there were."""

    mean: float
    deviation: float | None
    count: int

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)


def spread(numbers: Sequence[float]) -> Spread:
    """Of at least one number."""
    return Spread(statistics.mean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers))


@dataclass(frozen=True)
class Pooled:
    """A standard deviation over several groups, each around its own mean, and its degrees of freedom."""

    deviation: float
    freedom: int


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """Over the groups with two numbers or more; None without one."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if not freedom:
        return None
    squares = sum((len(group) - 1) * statistics.variance(group) for group in several)
    return Pooled(math.sqrt(squares / freedom), freedom)


@dataclass(frozen=True)
class Estimate:
    """A mean of `count` numbers and how sure it is.

    error: its standard error; None if nothing says how the numbers scatter. freedom: degrees of freedom of that.
    shared: whether it is of the pooled standard deviation, not of these numbers alone.
    """

    mean: float
    error: float | None
    count: int
    freedom: int = 0
    shared: bool = False

    @property
    def half_width(self) -> float | None:
        """Of the 95% interval, by Student's t."""
        return None if self.error is None else self.error * student_quantile(self.freedom)

    @property
    def beyond_noise(self) -> bool | None:
        """Whether that interval leaves out zero; None if there is none."""
        return None if self.half_width is None else abs(self.mean) > self.half_width


def estimate(numbers: Sequence[float], shared: Pooled | None = None) -> Estimate:
    """Of at least one number: with their own standard deviation if there are five or more, else with `shared`; if that
    says no more than their own, with their own as far as there is one."""
    own = spread(numbers)
    if own.count >= _OWN or shared is None or shared.freedom < own.count:
        return Estimate(own.mean, own.error, own.count, own.count - 1)
    return Estimate(own.mean, shared.deviation / math.sqrt(own.count), own.count, shared.freedom, shared=True)


def share_of(gaps: Mapping[Key, float], others: Mapping[Key, float], other: Estimate | None = None) -> Estimate | None:
    """What part of `others` the `gaps` are: the mean over the pairs that both have of gap / other gap, and the error of
    its own scatter; None without such a pair, or if the other gap of one is not above zero, or all of them, whose mean
    is `other`, are not beyond the noise.

    What a pair adds to both gaps, as the noise of a base run, is not in the scatter of their ratio.
    """
    pairs = [(gaps[key], others[key]) for key in gaps if key in others]
    if not pairs or min(whole for _, whole in pairs) <= 0 or (other is not None and other.beyond_noise is False):
        return None
    return estimate([gap / whole for gap, whole in pairs])


def percent_cell(of: Estimate | None) -> str:
    """Of a table: a gap in percent with its standard error, starred if that is of the pooled deviation."""
    if of is None:
        return "-"
    return f"{of.mean:+.2f}%" + ("" if of.error is None else f" ± {of.error:.2f}{'*' if of.shared else ''}")


def nats_cell(of: Estimate | None) -> str:
    """The same of a gap in nats per token."""
    if of is None:
        return "-"
    return f"{of.mean:+.4f}" + ("" if of.error is None else f" ± {of.error:.4f}{'*' if of.shared else ''}")


def share_cell(of: Estimate | None) -> str:
    """A share with its standard error."""
    if of is None:
        return "-"
    return f"{of.mean:.2f}" + ("" if of.error is None else f" ± {of.error:.2f}")


def beyond_cell(of: Estimate | None) -> str:
    """Whether a gap is beyond the noise."""
    return "-" if of is None or of.beyond_noise is None else "yes" if of.beyond_noise else "no"


def student_quantile(freedom: int, share: float = _SHARE) -> float:
    """The t between whose negative and itself Student's distribution has `share` of its mass."""
    low, high = 0.0, 1.0
    while _central_mass(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_mass(middle, freedom) < share else (low, middle)
    return high


def _central_mass(t: float, freedom: int) -> float:
    """Of Student's distribution between -t and t: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):  # powers of the cosine below freedom - 1
        total += term
        term *= k / (k + 1) * cosine**2
    return (2 / math.pi) * (theta + sine * total) if odd else sine * total
