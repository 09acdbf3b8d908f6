"""Mixing sources by weight: which source serves sample i of a blend, and how many of its samples came before.

After i samples of a blend, a source with weight w (weights sum to 1) has served floor(w i) or ceil(w i) of them. This
holds for every i, any number of sources, and the exact weights. Megatron's rule, which serves the source that is
furthest behind, does not guarantee it for many sources, because several can be due at once.

Instead, sample k of a source (from 0) has a window of slots: it may not come before slot floor(k / w) and must come
before slot ceil((k + 1) / w). Each slot takes, of the samples that may come, the one with the earliest deadline; of
equal deadlines, that of the source named first. "Earliest deadline first" meets all deadlines whenever this is possible
(Jackson 1955). Here it is: the slots [a, b) contain at most floor(w b) - ceil(w a) full windows of a source, so at most
b - a of all sources. (The chairman assignment problem, Tijdeman 1980; P-fair scheduling, Baruah et al. 1996.)

The weights are converted to integers: the exact decimals, over their greatest common divisor. Their sum is the period
of the sequence. The sequence is walked slot by slot, from the position of the last call or from one period of the
rarest source earlier (1 / w slots). The walk may start with any counts within one of each source's share and still
gives the same result: of the samples with deadlines up to D, earliest deadline first has served before slot t the
minimum of released(s) + t - s over all s <= t, where released(s) is how many of them have windows that begin before
slot s. For an s at least 1 / w before D this is sum(ceil(w s)) >= s, which is no limit, so earlier slots do not matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction


class Blend:
    """An endless sequence of source names in the proportion of `weights`, which need not sum to one.

    weights: finite and not negative, at least one positive. A float means the decimal that Python prints for it: 0.1 is
    one tenth. A source with weight zero is left out.
    """

    def __init__(self, weights: Mapping[str, float | int]) -> None:
        exact = {name: Fraction(repr(weight)) for name, weight in weights.items() if weight > 0}
        scale = math.lcm(*(weight.denominator for weight in exact.values()))
        whole = [int(weight * scale) for weight in exact.values()]
        self.names = list(exact)
        self.shares = [share // math.gcd(*whole) for share in whole]
        """How many of the `period` slots each source gets, in the order of `names`."""
        self.period = sum(self.shares)
        self._walk = _Walk(self.shares, 0, [0] * len(self.shares))
        self._reach = -(-self.period // min(self.shares)) + 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blend) and (self.names, self.shares) == (other.names, other.shares)

    __hash__ = None  # type: ignore[assignment]

    def source(self, index: int) -> tuple[str, int]:
        """(name, ordinal): the source of sample `index`, and how many of its samples came before.

        Takes O(log sources) for each slot since the last call, or for each slot of one period of the rarest source.
        """
        periods, slot = divmod(index, self.period)
        walk = self._walk_to(slot)
        d = walk.next_source()
        return self.names[d], periods * self.shares[d] + walk.counts[d]

    def counts(self, end: int) -> list[int]:
        """How many of the samples [0, end) come from each source, in the order of `names`."""
        periods, slot = divmod(end, self.period)
        within = self._walk_to(slot).counts
        return [periods * share + count for share, count in zip(self.shares, within, strict=True)]

    def _walk_to(self, slot: int) -> _Walk:
        if not self._walk.slot <= slot <= self._walk.slot + self._reach:
            start = max(0, slot - self._reach)
            # Possible counts: each source's share of the slots, rounded down or up.
            counts = [share * start // self.period for share in self.shares]
            rests = [share * start % self.period for share in self.shares]
            for d in sorted(range(len(counts)), key=lambda d: -rests[d])[: start - sum(counts)]:
                counts[d] += 1
            self._walk = _Walk(self.shares, start, counts)
        while self._walk.slot < slot:
            self._walk.advance()
        return self._walk


class _Walk:
    """A position in the sequence of one period. counts: how many slots before `slot` each source has."""

    def __init__(self, shares: Sequence[int], slot: int, counts: Sequence[int]) -> None:
        self.slot = slot
        self.counts = list(counts)
        self._shares = shares
        self._period = sum(shares)
        self._ready: list[tuple[int, int]] = []  # (deadline, source) of samples that may come now
        self._waiting: list[tuple[int, int]] = []  # (first slot, source) of samples that may come later
        for source in range(len(shares)):
            self._queue(source)

    def next_source(self) -> int:
        while self._waiting and self._waiting[0][0] <= self.slot:
            self._make_ready(heapq.heappop(self._waiting)[1])
        return self._ready[0][1]

    def advance(self) -> None:
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
