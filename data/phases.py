"""Phases of a run: spans of steps with their own blend, in one run, without a restart between them.

The global sample index is the only clock. A phase is a span of it, rounded to whole global batches so that no
step mixes two blends. A source's samples are counted over the whole run, across phases, so that nothing is
seen twice before everything was seen once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        self.spans: list[PhaseSpan] = []
        self._offsets: list[dict[str, int]] = []
        consumed: dict[str, int] = {}
        share, start = 0.0, 0
        for phase in phases:
            share += phase.fraction
            end = num_steps if phase is phases[-1] else min(num_steps, round(share * num_steps))
            try:
                blend = Blend(phase.blend)
            except ValueError as error:
                raise ValueError(f"phase {phase.name!r}: {error}") from error
            span = PhaseSpan(phase.name, start * global_batch_size, end * global_batch_size, blend)
            self.spans.append(span)
            self._offsets.append(dict(consumed))
            for name in blend.names:
                consumed[name] = consumed.get(name, 0) + blend.count(name, span.num_samples)
            start = end
        self._totals = consumed
        self._starts = [span.start for span in self.spans]

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

    def tokens_per_phase(self, seq_length: int) -> dict[str, int]:
        """Target tokens of each phase: its samples times seq_length."""
        return {span.name: span.num_samples * seq_length for span in self.spans}

    def description(self) -> list[dict[str, object]]:
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
