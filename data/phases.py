"""Phases of a run: spans of steps with their own blend, in one run, without a restart between them.

The global sample index is the only clock. A phase is a span of it, rounded to whole global batches so that no
step mixes two blends. A source's samples are counted over the whole run, across phases, so that nothing is
seen twice before everything was seen once.

A run that goes on with another number of steps, or with other phases to come, has a past that the new phases would
not have laid out so. `PhaseSchedule.behind` then keeps the spans that were consumed, as history, and lets the new
layout begin behind them; counting goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from data.blend import Blend


@dataclass(frozen=True)
class Phase:
    """`fraction` of the run, from 0 to 1, drawn from sources by the weights of `blend` (see blend.Blend)."""

    name: str
    fraction: float
    blend: Mapping[str, float]


@dataclass(frozen=True)
class PhaseSpan:
    """A phase laid out: it serves the global samples [start, end)."""

    name: str
    start: int
    end: int
    blend: Blend

    @property
    def num_samples(self) -> int:
        return self.end - self.start


class Location(NamedTuple):
    """Where a global sample comes from: sample `ordinal` (over the whole run) of `source`, during `phase`."""

    phase: str
    source: str
    ordinal: int


class SourceRange(NamedTuple):
    """The samples [start, end) of `source`, by ordinal, that a span of global samples takes during `phase`."""

    phase: str
    source: str
    start: int
    end: int


class PhaseSchedule:
    """The phases of a run of num_steps global batches of global_batch_size samples.

    A phase ends at the step nearest to its share of the run, so in a run of very few steps a short phase may
    get none. Raises ValueError when there are no phases, two share a name, a fraction is not in (0, 1], or
    the fractions do not sum to 1.
    """

    def __init__(self, phases: Sequence[Phase], num_steps: int, global_batch_size: int) -> None:
        if num_steps < 1 or global_batch_size < 1:
            raise ValueError(f"a run needs steps and samples, got {num_steps} steps of {global_batch_size} samples")
        _check(phases)
        self.num_steps = num_steps
        self.global_batch_size = global_batch_size
        spans = []
        share, start = 0.0, 0
        for phase in phases:
            share += phase.fraction
            end = num_steps if phase is phases[-1] else min(num_steps, round(share * num_steps))
            try:
                blend = Blend(phase.blend)
            except ValueError as error:
                raise ValueError(f"phase {phase.name!r}: {error}") from error
            spans.append(PhaseSpan(phase.name, start * global_batch_size, end * global_batch_size, blend))
            start = end
        self._lay_out(spans)

    def _lay_out(self, spans: list[PhaseSpan]) -> None:
        """Take `spans`, which follow each other from 0, and count each source's samples before each of them."""
        self.spans = spans
        self._offsets: list[dict[str, int]] = []
        consumed: dict[str, int] = {}
        for span in spans:
            self._offsets.append(dict(consumed))
            for name in span.blend.names:
                consumed[name] = consumed.get(name, 0) + span.blend.count(name, span.num_samples)
        self._totals = consumed
        self._starts = [span.start for span in spans]

    def behind(self, past: Sequence[Mapping[str, Any]], consumed: int) -> PhaseSchedule:
        """This schedule from sample `consumed` on, with the samples before it as `past` has them.

        past: the `description` of the schedule that served them. A phase that is under way in both goes on as one span,
        so that its blend does not begin anew; any other that is cut begins its blend at `consumed`.
        """
        served = [_span(entry) for entry in past if entry["start"] < min(entry["end"], consumed)]
        ours = [span for span in self.spans if span.end > max(span.start, consumed)]
        if served and ours and ours[0].start < consumed:
            last, first = served[-1], ours[0]
            under_way = last.end > consumed or last.start == first.start
            if under_way and same_blend(last.blend, first.blend):
                served.pop()
                ours[0] = replace(first, start=last.start)
            else:
                ours[0] = replace(first, start=consumed)
        served = [replace(span, end=min(span.end, consumed)) for span in served]
        schedule = copy(self)
        schedule._lay_out([*served, *ours])
        return schedule

    @property
    def num_samples(self) -> int:
        """Samples of the whole run."""
        return self.num_steps * self.global_batch_size

    @property
    def source_names(self) -> list[str]:
        """Every source that some phase draws from, in order of first appearance."""
        return list(self._totals)

    def locate(self, global_sample: int) -> Location:
        """Phase, source and ordinal of a global sample. O(log num_phases). Raises IndexError off the run."""
        if not 0 <= global_sample < self.num_samples:
            raise IndexError(f"global sample {global_sample} is outside a run of {self.num_samples}")
        # Of phases that start together all but the last are empty, and bisect_right finds the last.
        index = bisect_right(self._starts, global_sample) - 1
        span = self.spans[index]
        source, ordinal = span.blend.source(global_sample - span.start)
        return Location(span.name, source, self._offsets[index].get(source, 0) + ordinal)

    def source_ranges(self, start: int, end: int) -> list[SourceRange]:
        """What the global samples [start, end) are, by phase and source; ordinals as in `locate`.

        Sources that give none of them are left out. Raises IndexError off the run.
        """
        if not 0 <= start <= end <= self.num_samples:
            raise IndexError(f"global samples [{start}, {end}) are outside a run of {self.num_samples}")
        found = []
        for span, offsets in zip(self.spans, self._offsets, strict=True):
            first, last = max(start, span.start) - span.start, min(end, span.end) - span.start
            for source in span.blend.names if first < last else []:
                offset, blend = offsets.get(source, 0), span.blend
                ordinals = offset + blend.count(source, first), offset + blend.count(source, last)
                if ordinals[0] < ordinals[1]:
                    found.append(SourceRange(span.name, source, *ordinals))
        return found

    def description(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps to recognise the phases: name, samples [start, end), normalized weights.

        Weights are pairs in a list, because the order of the sources breaks ties in the blend.
        """
        return [
            {
                "name": span.name,
                "start": span.start,
                "end": span.end,
                "blend": list(map(list, span.blend.weights.items())),
            }
            for span in self.spans
        ]


def _span(entry: Mapping[str, Any]) -> PhaseSpan:
    """An entry of `PhaseSchedule.description` as the span that it was."""
    return PhaseSpan(entry["name"], entry["start"], entry["end"], Blend.restored(dict(entry["blend"])))


def same_blend(one: Blend, other: Blend) -> bool:
    """Whether both serve the same source at every index."""
    return list(one.weights.items()) == list(other.weights.items())


def _check(phases: Sequence[Phase]) -> None:
    if not phases:
        raise ValueError("a run needs at least one phase, e.g. {name: main, fraction: 1.0, blend: {code: 1.0}}")
    names = [phase.name for phase in phases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two phases are named {name!r}; phase names must differ")
    for phase in phases:
        if not 0 < phase.fraction <= 1:
            raise ValueError(f"phase {phase.name!r} has the fraction {phase.fraction}; fractions lie in (0, 1]")
    total = sum(phase.fraction for phase in phases)
    if abs(total - 1) > 1e-6:
        raise ValueError(
            f"the fractions of the phases {', '.join(names)} sum to {total:.6g}; they must sum to 1: they "
            "are shares of the whole run"
        )
