"""Mixing sources by weight: which source serves sample i of a blend, and its how-manieth sample that is.

Megatron walks the whole run and stores the answer for each i. Here the order repeats after PERIOD slots, so
both answers are a table look-up for any i, and a run may be extended without changing what came before.
Within the period the slots are laid out by Megatron's rule: slot i goes to argmax_d (w_d * max(i, 1) -
count_d), the lowest d on a tie, which keeps every prefix as close to the weights as whole samples allow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

PERIOD = 1000


class Blend:
    """An endless sequence of source names in the proportion of `weights`, which need not sum to one.

    Weights are honoured to 1/PERIOD, by largest remainder. A weight of zero leaves its source out. Raises
    ValueError for no sources, a weight that is negative or not finite, no positive weight, or a positive
    weight too small for the period to hold.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._set(_normalized(weights))

    @classmethod
    def restored(cls, weights: Mapping[str, float]) -> Blend:
        """The blend that had these `weights`, bit for bit: normalizing them once more could move a slot."""
        blend = cls.__new__(cls)
        blend._set(dict(weights))
        return blend

    def _set(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.names = list(self.weights)
        self._slots_per_period = _largest_remainder(self.weights)
        self._slots, self._before = _lay_out(list(self._slots_per_period.values()))

    def source(self, index: int) -> tuple[str, int]:
        """(name, ordinal): the source of sample `index` and how many of its samples came before. O(1)."""
        if index < 0:
            raise IndexError(f"sample {index} of a blend is negative")
        name = self.names[self._slots[index % PERIOD]]
        return name, self.count(name, index)

    def count(self, name: str, end: int) -> int:
        """How many of the samples [0, end) come from source `name`. O(1)."""
        if name not in self.weights:
            return 0
        periods, rest = divmod(end, PERIOD)
        return periods * self._slots_per_period[name] + int(self._before[rest, self.names.index(name)])


def _normalized(weights: Mapping[str, float]) -> dict[str, float]:
    if not weights:
        raise ValueError("a blend needs at least one source, e.g. {code: 0.7, prose: 0.3}")
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"the weight of source {name!r} is {weight}; weights are finite and not negative")
    total = sum(weights.values())
    if total == 0:
        raise ValueError(f"all weights of the blend {dict(weights)} are zero; give at least one source a share")
    return {name: weight / total for name, weight in weights.items() if weight > 0}


def _largest_remainder(weights: Mapping[str, float]) -> dict[str, int]:
    """Whole slots per source that sum to PERIOD; ties go to the source named first."""
    exact = {name: weight * PERIOD for name, weight in weights.items()}
    # Rounding first keeps 0.29 * 1000 = 289.99999999999994 from losing a slot to a rounding error.
    slots = {name: math.floor(round(value, 6)) for name, value in exact.items()}
    by_remainder = sorted(weights, key=lambda name: slots[name] - exact[name])
    for name in by_remainder[: PERIOD - sum(slots.values())]:
        slots[name] += 1
    for name, count in slots.items():
        if count == 0:
            raise ValueError(
                f"the weight of source {name!r} is {weights[name]:.2g} of the blend; the smallest share is "
                f"1/{PERIOD}: raise it or leave the source out"
            )
    return slots


def _lay_out(slots_per_period: list[int]) -> tuple[list[int], np.ndarray]:
    """The source of each slot, and counts [PERIOD, num_sources] of each source before each slot.

    In integers (the rule times PERIOD), so that ties are exact. A source that has all its slots has a
    negative claim, while the claims sum to zero or more, so the greedy rule never gives a source more than
    its slots.
    """
    placed = [0] * len(slots_per_period)
    slots: list[int] = []
    before = np.zeros((PERIOD, len(placed)), dtype=np.int64)
    for i in range(PERIOD):
        before[i] = placed
        claims = [slots_per_period[d] * max(i, 1) - placed[d] * PERIOD for d in range(len(placed))]
        chosen = claims.index(max(claims))
        slots.append(chosen)
        placed[chosen] += 1
    return slots, before
