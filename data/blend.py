"""Mixing sources by weight: which source serves sample i of a blend, and its how-manieth sample that is.

After i samples of a blend a source with the share w (weights sum to 1) has given floor(w i) or ceil(w i) of them, for
every i, every number of sources and weights exactly as given. No rule that looks at the present lags alone does that
for many sources, Megatron's largest lag first included: sources fall behind together and cannot all be served in time.

So unit k of a source (its k-th sample from 0) has a window: it may not come before slot floor(k / w), or the source
would be ahead by one, and has to come before slot ceil((k + 1) / w), or it would be behind by one. Of the units that
may come, the one with the earliest deadline does, of equal ones that of the source named first. Earliest deadline first
keeps all deadlines whenever that is possible at all (Jackson 1955), and it is: in the slots [a, b) lie at most
floor(w b) - ceil(w a) whole windows of a source, over all sources at most b - a. (The chairman assignment problem,
Tijdeman 1980; P-fair scheduling, Baruah et al. 1996.)

Weights are whole numbers here: those of the decimals as they were written, over their greatest common divisor. Their
sum is the period after which the sequence repeats. A short period is a table. In a long one the sequence is walked,
one slot after the other, from one period of the rarest source before (1 / w slots), from any counts within one of each
share. That gives the same counts: of units with deadlines up to D, earliest deadline first has served before slot t as
many as the least of released(s) + t - s over all s <= t, where released(s) is the number of them whose windows begin
before slot s. For an s that lies 1 / w before D that is sum(ceil(w s)) >= s, which limits nothing; so what came before
does not matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

# A table of a longer period would take more than a tenth of a second to make.
TABLE_SLOTS = 1 << 16


class Blend:
    """An endless sequence of source names in the proportion of `weights`, which need not sum to one.

    A float stands for the decimal that Python prints for it: 0.1 is one tenth. A weight of zero leaves its source out.
    Raises ValueError for no sources, a weight that is negative or not finite, or no positive weight.
    """

    def __init__(self, weights: Mapping[str, float | int]) -> None:
        shares = _whole_numbers(weights)
        self.names = list(shares)
        self.shares = list(shares.values())
        """Whole numbers in the proportion of the weights, by source; one slot in `period` each."""
        self.period = sum(self.shares)
        self._table = _Table(self.shares) if self.period <= TABLE_SLOTS else None
        self._walk = _Walk(self.shares, 0, [0] * len(self.shares))
        self._reach = -(-self.period // min(self.shares)) + 2

    @property
    def weights(self) -> dict[str, float]:
        """The share of each source, rounded to floats; for people to read."""
        return {name: share / self.period for name, share in zip(self.names, self.shares, strict=True)}

    def __eq__(self, other: object) -> bool:
        """Whether both serve the same source at every index."""
        return isinstance(other, Blend) and (self.names, self.shares) == (other.names, other.shares)

    __hash__ = None  # type: ignore[assignment]

    def source(self, index: int) -> tuple[str, int]:
        """(name, ordinal): the source of sample `index` and how many of its samples came before.

        O(1) for a period up to TABLE_SLOTS; else O(log sources) for every slot since the last call, or for one period
        of the rarest source.
        """
        if index < 0:
            raise IndexError(f"sample {index} of a blend is negative")
        periods, slot = divmod(index, self.period)
        if self._table is not None:
            d, before = self._table.slot(slot)
        else:
            walk = self._walk_to(slot)
            d = walk.next_source()
            before = walk.counts[d]
        return self.names[d], periods * self.shares[d] + before

    def counts(self, end: int) -> list[int]:
        """How many of the samples [0, end) come from each source, in the order of `names`. Cost as of `source`."""
        if end < 0:
            raise IndexError(f"a blend has no sample before {end}")
        periods, slot = divmod(end, self.period)
        within = self._table.counts(slot) if self._table is not None else self._walk_to(slot).counts
        return [periods * share + count for share, count in zip(self.shares, within, strict=True)]

    def _walk_to(self, slot: int) -> _Walk:
        """The walk, standing before `slot` of the period."""
        if not self._walk.slot <= slot <= self._walk.slot + self._reach:
            self._walk = _Walk(self.shares, *self._near(max(0, slot - self._reach)))
        while self._walk.slot < slot:
            self._walk.advance()
        return self._walk

    def _near(self, slot: int) -> tuple[int, list[int]]:
        """`slot`, and counts that could be: each is its share, rounded down or up."""
        counts = [share * slot // self.period for share in self.shares]
        rests = [share * slot % self.period for share in self.shares]
        for d in sorted(range(len(counts)), key=lambda d: -rests[d])[: slot - sum(counts)]:
            counts[d] += 1
        return slot, counts


class _Walk:
    """The sequence of one period, slot by slot; `counts` says how often each source came before `slot`."""

    def __init__(self, shares: Sequence[int], slot: int, counts: Sequence[int]) -> None:
        self.slot = slot
        self.counts = list(counts)
        self._shares = shares
        self._period = sum(shares)
        self._ready: list[tuple[int, int]] = []  # (deadline, source) of units that may come now
        self._waiting: list[tuple[int, int]] = []  # (first slot, source) of units that may not yet
        for source in range(len(shares)):
            self._queue(source)

    def next_source(self) -> int:
        """Which source comes at `slot`."""
        while self._waiting and self._waiting[0][0] <= self.slot:
            self._make_ready(heapq.heappop(self._waiting)[1])
        return self._ready[0][1]

    def advance(self) -> None:
        """Go on by one slot."""
        source = self.next_source()
        heapq.heappop(self._ready)
        self.counts[source] += 1
        self.slot += 1
        self._queue(source)

    def _queue(self, source: int) -> None:
        first = self.counts[source] * self._period // self._shares[source]
        if first <= self.slot:
            self._make_ready(source)
        else:
            heapq.heappush(self._waiting, (first, source))

    def _make_ready(self, source: int) -> None:
        deadline = -(-(self.counts[source] + 1) * self._period // self._shares[source])
        heapq.heappush(self._ready, (deadline, source))


class _Table:
    """A whole period, written down."""

    def __init__(self, shares: Sequence[int]) -> None:
        walk = _Walk(shares, 0, [0] * len(shares))
        slots, before = [], []
        for _ in range(sum(shares)):
            source = walk.next_source()
            slots.append(source)
            before.append(walk.counts[source])
            walk.advance()
        self._slots = np.array(slots, dtype=np.int32)
        self._before = np.array(before, dtype=np.int32)
        # The slots of each source, ascending, one source after the other.
        self._sorted = np.argsort(self._slots, kind="stable")
        self._bounds = list(pairwise(np.cumsum([0, *shares]).tolist()))

    def slot(self, slot: int) -> tuple[int, int]:
        """The source at `slot`, and how often it came before."""
        return int(self._slots[slot]), int(self._before[slot])

    def counts(self, slot: int) -> list[int]:
        """How often each source came before `slot`."""
        return [int(np.searchsorted(self._sorted[first:end], slot)) for first, end in self._bounds]


def _whole_numbers(weights: Mapping[str, float | int]) -> dict[str, int]:
    """The positive weights as whole numbers without a common divisor, in exactly their proportion."""
    if not weights:
        raise ValueError("a blend needs at least one source, e.g. {code: 0.7, prose: 0.3}")
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"the weight of source {name!r} is {weight}; weights are finite and not negative")
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items() if weight > 0}
    if not exact:
        raise ValueError(f"all weights of the blend {dict(weights)} are zero; give at least one source a share")
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * scale) for name, weight in exact.items()}
    divisor = math.gcd(*whole.values())
    return {name: share // divisor for name, share in whole.items()}
