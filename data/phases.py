"""Phases of a run: spans of steps with their own blend, batch and sequence length, in one run, without a restart.

The global sample index is the only clock. A phase is a span of it, in whole global batches, so that no step mixes two
blends. A source's samples are counted over the whole run, across phases, so that nothing is seen twice before
everything was seen once. A phase with the blend of the phase before it goes on with it: a batch size that grows in
stages is a row of phases.

A sample always has the run's sequence length. A phase of a shorter one cuts each of its samples into as many sequences
as it divides into, so neither the clock nor what was consumed depends on it.

A run that goes on with another number of steps, or with other phases to come, has a past that the new phases would
not have laid out so. `PhaseSchedule.behind` then keeps the spans that were consumed, as history, and lets the new
layout begin behind them; counting goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from data.blend import Blend
from data.phase_lengths import Phase, phase_boundaries


@dataclass(frozen=True)
class PhaseSpan:
    """A phase laid out: the steps [first_step, end_step) of batch_size samples each, from global sample `start` on.

    blend_start: the global sample from which its blend is counted; that of an earlier phase if the blend goes on. -1 in
    a span that another version served by other counts (state_0_2.py).
    sequence_length: of its sequences; None for the run's. by_tokens: whether its weights are the sources' tokens.
    """

    name: str
    first_step: int
    end_step: int
    start: int
    batch_size: int
    blend: Blend
    blend_start: int
    sequence_length: int | None = None
    by_tokens: bool = False

    @property
    def num_samples(self) -> int:
        return (self.end_step - self.first_step) * self.batch_size

    @property
    def end(self) -> int:
        """The global sample behind its last."""
        return self.start + self.num_samples


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
    """The phases of a run of num_steps global batches of global_batch_size samples, unless a phase has its own size.

    sequence_length: tokens of a sample, for phases whose length is in tokens.

    Raises ValueError when there are no phases, two share a name, a length is not positive or they do not fill the
    run, a sequence length does not divide the run's, or a blend is no blend.
    """

    def __init__(
        self, phases: Sequence[Phase], num_steps: int, global_batch_size: int, sequence_length: int = 1
    ) -> None:
        if num_steps < 1 or global_batch_size < 1:
            raise ValueError(f"a run needs steps and samples, got {num_steps} steps of {global_batch_size} samples")
        self.num_steps = num_steps
        self.global_batch_size = global_batch_size
        spans: list[PhaseSpan] = []
        ends = phase_boundaries(phases, num_steps, global_batch_size, sequence_length)
        for phase, first, end in zip(phases, [0, *ends], ends, strict=False):
            try:
                blend = Blend(phase.blend or {})
            except ValueError as error:
                raise ValueError(f"phase {phase.name!r}: {error}") from error
            size, length = phase.global_batch_size or global_batch_size, phase.sequence_length
            if length is not None and (length < 1 or sequence_length % length):
                raise ValueError(
                    f"phase {phase.name!r} has the sequence length {length}, which does not divide the run's of "
                    f"{sequence_length}: its samples are cut into whole sequences"
                )
            own_length = None if length == sequence_length else length
            spans.append(PhaseSpan(phase.name, first, end, 0, size, blend, 0, own_length, phase.by_tokens))
        self._lay_out(spans, done=0)

    def _lay_out(self, spans: Sequence[PhaseSpan], done: int) -> None:
        """Take `spans`, whose steps follow each other from 0; those that begin at step `done` or later get their
        samples, and their blend's start, here."""
        self.spans: list[PhaseSpan] = []
        start = 0
        for span in spans:
            if span.first_step >= done:
                # Of phases without a step only the name is left.
                before = next((earlier for earlier in reversed(self.spans) if earlier.num_samples), None)
                if before is not None and before.blend == span.blend and before.blend_start >= 0:
                    span = replace(span, start=start, blend=before.blend, blend_start=before.blend_start)
                else:
                    span = replace(span, start=start, blend_start=start)
            self.spans.append(span)
            start = span.end
        self._starts = [span.start for span in self.spans]
        self._first_steps = [span.first_step for span in self.spans]
        # Each source's samples before a blend began, by the sample where it did, as far as they are known.
        self._offsets: dict[int, Mapping[str, int]] = {0: {}}
        self._anchor: tuple[int, Mapping[str, Mapping[str, int]]] | None = None  # of `stand_at`

    def behind(self, past: Sequence[Mapping[str, Any]], consumed: int) -> PhaseSchedule:
        """This schedule from sample `consumed` on, with the samples before it as `past` has them.

        past: the `description` of the schedule that served them. A phase that is under way in both keeps its blend's
        position; any other that is cut begins its blend at `consumed`.
        """
        served = [_span(entry) for entry in past if entry["start"] < min(entry["end"], consumed)]
        if served:
            last = served[-1]
            served[-1] = replace(last, end_step=last.first_step + -(-(consumed - last.start) // last.batch_size))
        done = served[-1].end_step if served else 0
        ours = [replace(span, first_step=max(span.first_step, done)) for span in self.spans if span.end_step > done]
        if served and ours and _goes_on(served[-1], ours[0]):
            served[-1] = replace(served[-1], end_step=ours.pop(0).end_step)
        schedule = copy(self)
        schedule._lay_out([*served, *ours], done)
        return schedule

    @property
    def num_samples(self) -> int:
        """Samples of the whole run."""
        return self.spans[-1].end

    @property
    def source_names(self) -> list[str]:
        """Every source that some phase draws from, in order of first appearance."""
        return list(dict.fromkeys(name for span in self.spans if span.num_samples for name in span.blend.names))

    def check_sources(self, names: Collection[str]) -> None:
        """Raise ValueError if a phase draws from a source that is none of `names`."""
        if missing := [name for name in self.source_names if name not in names]:
            raise ValueError(
                f"the phases draw from {', '.join(missing)}, but the data has the sources {', '.join(names)}; correct "
                "the blends of the phases or add the source"
            )

    def span(self, step: int) -> PhaseSpan:
        """The phase of `step`, from 0; the run's last behind its end."""
        # Of phases that start together all but the last are empty, and bisect_right finds the last.
        return self.spans[bisect_right(self._first_steps, step) - 1]

    def samples_before(self, step: int) -> int:
        """Global samples of the steps [0, step)."""
        span = self.span(step)
        return span.start + (step - span.first_step) * span.batch_size

    def steps_before(self, sample: int) -> int:
        """The step that begins with global sample `sample`. Raises ValueError if none does, within the run or at its
        end."""
        span = self.spans[max(0, bisect_right(self._starts, sample) - 1)]
        steps, rest = divmod(sample - span.start, span.batch_size)
        if rest or not 0 <= sample <= self.num_samples:
            raise ValueError(f"sample {sample} begins no step of this run")
        return span.first_step + steps

    def locate(self, global_sample: int) -> Location:
        """Phase, source and ordinal of a global sample. Raises IndexError off the run.

        O(log num_phases), and what the blend's `source` costs; see blend.py.
        """
        if not 0 <= global_sample < self.num_samples:
            raise IndexError(f"global sample {global_sample} is outside a run of {self.num_samples}")
        index = bisect_right(self._starts, global_sample) - 1
        span = self.spans[index]
        source, ordinal = span.blend.source(global_sample - span.blend_start)
        return Location(span.name, source, self._offset(span).get(source, 0) + ordinal)

    def advance(self, global_sample: int) -> None:
        """Walk a blend of long period up to a global sample, so that its counts are there when they are asked for."""
        if global_sample < self.num_samples:
            span = self.span_at(global_sample)
            span.blend.advance(global_sample - span.blend_start)

    def counts(self, global_sample: int) -> dict[str, int]:
        """How many of the global samples [0, global_sample) come from each source that gives any."""
        return self.position(global_sample)["counts"]

    def source_ranges(self, start: int, end: int) -> list[SourceRange]:
        """What the global samples [start, end) are, by phase and source; ordinals as in `locate`.

        Sources that give none of them are left out. Raises IndexError off the run.
        """
        if not 0 <= start <= end <= self.num_samples:
            raise IndexError(f"global samples [{start}, {end}) are outside a run of {self.num_samples}")
        found = []
        for span in self.spans:
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                before, after = self._counts(span, first), self._counts(span, last)
                for source in span.blend.names:
                    if before.get(source, 0) < after.get(source, 0):
                        found.append(SourceRange(span.name, source, before.get(source, 0), after[source]))
        return found

    def position(self, global_sample: int) -> dict[str, dict[str, int]]:
        """What `stand_at` needs to go on from a global sample: JSON types.

        counts: of each source in [0, global_sample). blend_counts: the same before the last of their blends began.
        """
        if self._anchor is not None and self._anchor[0] == global_sample:
            return {key: dict(counts) for key, counts in self._anchor[1].items()}
        served = self.span_at(max(0, global_sample - 1))
        counts = self._counts(served, global_sample)
        # Whoever goes back to a checkpoint looks from here on again.
        served.blend.keep(global_sample - served.blend_start)
        return {"counts": counts, "blend_counts": dict(self._offset(served))}

    def stand_at(self, global_sample: int, position: Mapping[str, Mapping[str, int]]) -> None:
        """Take the counts of `position`, so that nothing before global_sample has to be walked (see blend.py).

        If a blend begins there, the counts hold whatever served the samples before.
        """
        self._anchor = global_sample, position
        span, counts = self.span_at(global_sample), position["counts"]
        if span.blend_start == global_sample:
            self._offsets[global_sample] = dict(counts)
            return
        began = position["blend_counts"]
        self._offsets[span.blend_start] = dict(began)
        within = [counts.get(name, 0) - began.get(name, 0) for name in span.blend.names]
        span.blend.remember(global_sample - span.blend_start, within)

    def span_at(self, global_sample: int) -> PhaseSpan:
        """The span that serves a global sample, the last one at the end of the run."""
        if not 0 <= global_sample <= self.num_samples:
            raise IndexError(f"global sample {global_sample} is outside a run of {self.num_samples}")
        return self.spans[bisect_right(self._starts, global_sample) - 1]

    def _counts(self, span: PhaseSpan, global_sample: int) -> dict[str, int]:
        counts = dict(self._offset(span))
        for name, count in zip(span.blend.names, span.blend.counts(global_sample - span.blend_start), strict=True):
            if count:
                counts[name] = counts.get(name, 0) + count
        return counts

    def _offset(self, span: PhaseSpan) -> Mapping[str, int]:
        """Each source's samples before the blend of a span began."""
        if span.blend_start < 0:
            raise IndexError(f"the samples of phase {span.name!r} before {span.end} were another version's")
        if span.blend_start not in self._offsets:
            before = next(earlier for earlier in self.spans if earlier.end == span.blend_start and earlier.num_samples)
            self._offsets[span.blend_start] = self._counts(before, span.blend_start)
        return self._offsets[span.blend_start]

    def description(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps to recognise the phases, and to lay out new ones behind them.

        Name, samples [start, end) in batches of batch_size, sequence length if it is not the run's, the blend and the
        sample where it began. Its weights are pairs in a list, because the order of the sources breaks ties.
        """
        return [
            {
                "name": span.name,
                "start": span.start,
                "end": span.end,
                "batch_size": span.batch_size,
                "sequence_length": span.sequence_length,
                "blend_start": span.blend_start,
                "blend": [list(pair) for pair in zip(span.blend.names, span.blend.shares, strict=True)],
                "by_tokens": span.by_tokens,
                "first_step": span.first_step,
            }
            for span in self.spans
        ]


def _goes_on(served: PhaseSpan, ours: PhaseSpan) -> bool:
    """Whether a phase that follows one that has served samples is that phase, going on."""
    return served.blend_start >= 0 and (served.name, served.batch_size, served.sequence_length, served.blend) == (
        ours.name,
        ours.batch_size,
        ours.sequence_length,
        ours.blend,
    )


def _span(entry: Mapping[str, Any]) -> PhaseSpan:
    """An entry of `PhaseSchedule.description` as the span that it was."""
    size, first = entry["batch_size"], entry["first_step"]
    return PhaseSpan(
        entry["name"],
        first,
        first + (entry["end"] - entry["start"]) // size,
        entry["start"],
        size,
        Blend(dict(entry["blend"])),
        entry["blend_start"],
        entry["sequence_length"],
        entry["by_tokens"],
    )
