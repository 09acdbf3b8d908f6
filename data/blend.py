"""Mixing sources by weight: which source serves sample i of a blend, and how many samples of it came before.

After i samples of a blend a source with the share w (weights sum to 1) has given floor(w i) or ceil(w i) of them, for
every i, every number of sources and weights exactly as given. Serving the source with the largest lag, as Megatron
does, does not keep that for many sources: several can be due at once.

So unit k of a source (its k-th sample from 0) has a window: it may not come before slot floor(k / w) and has to come
before slot ceil((k + 1) / w). Of the units that may come, the one with the earliest deadline does, of equal ones that
of the source named first. Earliest deadline first keeps all deadlines whenever that is possible at all (Jackson 1955),
and it is: in the slots [a, b) lie at most floor(w b) - ceil(w a) whole windows of a source, over all sources at most
b - a. (The chairman assignment problem, Tijdeman 1980; P-fair scheduling, Baruah et al. 1996.)

Weights are whole numbers here: those of the decimals as they were written, over their greatest common divisor. Their
sum is the period after which the sequence repeats. The sequence is walked slot by slot, from where the last call stood
or from one period of the rarest source before (1 / w slots), from any counts within one of each share. That gives the
same counts: of units with deadlines up to D, earliest deadline first has served before slot t as many as the least of
released(s) + t - s over all s <= t, where released(s) is the number of them whose windows begin before slot s. For an s
that lies 1 / w before D that is sum(ceil(w s)) >= s, which limits nothing; so what came before does not matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction


class Blend:
    """An endless sequence of source names in the proportion of `weights`, which need not sum to one.

    weights: finite and not negative, one of them positive. A float stands for the decimal that Python prints for it:
    0.1 is one tenth. A weight of zero leaves its source out.
    """

    def __init__(self, weights: Mapping[str, float | int]) -> None:
        exact = {name: Fraction(repr(weight)) for name, weight in weights.items() if weight > 0}
        scale = math.lcm(*(weight.denominator for weight in exact.values()))
        whole = [int(weight * scale) for weight in exact.values()]
        self.names = list(exact)
        self.shares = [share // math.gcd(*whole) for share in whole]
        """Whole numbers in the proportion of the weights, by source; one slot in `period` each."""
        self.period = sum(self.shares)
        self._walk = _Walk(self.shares, 0, [0] * len(self.shares))
        self._reach = -(-self.period // min(self.shares)) + 2

    def __eq__(self, other: object) -> bool:
        """Whether both serve the same source at every index."""
        return isinstance(other, Blend) and (self.names, self.shares) == (other.names, other.shares)

    __hash__ = None  # type: ignore[assignment]

    def source(self, index: int) -> tuple[str, int]:
        """(name, ordinal): the source of sample `index` and how many of its samples came before.

        O(log sources) for every slot since the last call, or for one period of the rarest source.
        """
        periods, slot = divmod(index, self.period)
        walk = self._walk_to(slot)
        d = walk.next_source()
        return self.names[d], periods * self.shares[d] + walk.counts[d]

    def counts(self, end: int) -> list[int]:
        """How many of the samples [0, end) come from each source, in the order of `names`. Cost as of `source`."""
        periods, slot = divmod(end, self.period)
        within = self._walk_to(slot).counts
        return [periods * share + count for share, count in zip(self.shares, within, strict=True)]

    def _walk_to(self, slot: int) -> _Walk:
        """The walk, standing before `slot` of the period."""
        if not self._walk.slot <= slot <= self._walk.slot + self._reach:
            start = max(0, slot - self._reach)
            # Counts that could be: each is its share, rounded down or up.
            counts = [share * start // self.period for share in self.shares]
            rests = [share * start % self.period for share in self.shares]
            for d in sorted(range(len(counts)), key=lambda d: -rests[d])[: start - sum(counts)]:
                counts[d] += 1
            self._walk = _Walk(self.shares, start, counts)
        while self._walk.slot < slot:
            self._walk.advance()
        return self._walk


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
        """Take the next slot."""
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
