"""Data states as version 0.2 saved them, brought to the present form.

There, weights were rounded to thousandths (by largest remainder), and the blend repeated after a thousand slots, laid
out by Megatron's rule: slot i goes to argmax_d (w_d * max(i, 1) - count_d), the lowest d on a tie. What such a run has
taken from each source is counted here as it was; from there on the exact blend holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from data.fingerprint import FORMAT
from data.phases import PhaseSchedule

_SLOTS = 1000


def upgraded(state: Mapping[str, Any], schedule: PhaseSchedule) -> dict[str, Any]:
    """The state of a loader of version 0.2 as one of today, for a run of this schedule.

    There a global batch always had the same size, the run's, and weights were saved as their shares.
    """
    global_batch_size = schedule.global_batch_size
    consumed, saved = int(state["consumed_samples"]), state["fingerprint"]
    phases: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for phase in saved["phases"]:
        last = min(phase["end"], consumed)
        if phase["start"] < last:
            names = [name for name, _ in phase["blend"]]
            taken = _counts([weight for _, weight in phase["blend"]], last - phase["start"])
            for name, count in zip(names, taken, strict=True):
                counts[name] = counts.get(name, 0) + count
        phases.append({**phase, "blend": _blend(phase, schedule)})
    return {
        "consumed_samples": consumed,
        "position": {"counts": counts, "blend_counts": counts},
        "fingerprint": {
            "format": FORMAT,
            "seed": saved["seed"],
            "seq_length": saved["seq_length"],
            "order": "windows",
            "sources": {
                name: {"files": [[source["num_tokens"], source["identity"]]], "growth": [[0, 1]]}
                for name, source in saved["sources"].items()
            },
            "phases": [
                {
                    **phase,
                    "batch_size": global_batch_size,
                    "sequence_length": None,
                    "by_tokens": False,
                    "blend_start": -1,  # so that a blend under way begins anew
                    "first_step": phase["start"] // global_batch_size,
                }
                for phase in phases
            ],
        },
    }


def _blend(phase: Mapping[str, Any], schedule: PhaseSchedule) -> list[list[Any]]:
    """The weights of a saved phase; those of the schedule's phase of that name if only rounding tells them apart."""
    saved = dict(phase["blend"])
    for span in schedule.spans:
        same_sources = span.name == phase["name"] and span.blend.names == list(saved)
        if same_sources and all(abs(saved[name] - share) < 1e-9 for name, share in span.blend.weights.items()):
            return [list(pair) for pair in zip(span.blend.names, span.blend.shares, strict=True)]
    return phase["blend"]


def _counts(weights: Sequence[float], end: int) -> list[int]:
    """How many of the first `end` samples each source gave."""
    slots = _slots_of(weights)
    periods, rest = divmod(end, _SLOTS)
    placed = [0] * len(slots)
    for i in range(rest):
        claims = [slots[d] * max(i, 1) - placed[d] * _SLOTS for d in range(len(slots))]
        placed[claims.index(max(claims))] += 1
    return [periods * slots[d] + placed[d] for d in range(len(slots))]


def _slots_of(weights: Sequence[float]) -> list[int]:
    exact = [weight * _SLOTS for weight in weights]
    # Rounded first, as there: 0.29 * 1000 = 289.99999999999994 must not lose a slot.
    slots = [math.floor(round(value, 6)) for value in exact]
    by_remainder = sorted(range(len(slots)), key=lambda d: slots[d] - exact[d])
    for d in by_remainder[: _SLOTS - sum(slots)]:
        slots[d] += 1
    return slots
