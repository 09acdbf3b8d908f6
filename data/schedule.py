"""The phases of a run: which source, and which sample of it, serves each global sample.

The global sample index is the only clock. A phase is a span of global samples with its own blend, batch size and
sequence length. It consists of full global batches, so no step mixes two blends. A source's samples are counted over
the whole run, across phases, so no sample is repeated before all were seen once. A phase with the same blend as the
phase before it continues that blend, so a batch size that grows in stages is a list of phases.

A sample always has the run's sequence length. A phase with a shorter length cuts each sample into several sequences, so
neither the clock nor the consumed samples depend on it.

A run may resume with another number of steps or other future phases, which would have given other past samples.
`PhaseSchedule.after` keeps the consumed spans and begins the new layout after them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from data.blend import Blend


@dataclass(frozen=True)
class Phase:
    """A span of training whose samples are drawn from sources by the weights of `blend` (see blend.Blend).

    It has at most one length: `fraction` of the run's steps, `steps`, or `tokens` (rounded to full steps). One phase of
    a run may have no length and gets the remaining steps. global_batch_size (in samples), sequence_length: None for the
    run's. by_tokens: the weights are the sources' token counts, which change with their files.
    """

    name: str
    fraction: float | None = None
    blend: Mapping[str, float] | None = None
    steps: int | None = None
    tokens: float | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    by_tokens: bool = False


# A run of fewer steps is a trial; a short phase may get no step in it.
_TRIAL_STEPS = 10


def phase_boundaries(
    phases: Sequence[Phase], num_steps: int, global_batch_size: int, sequence_length: int
) -> list[int]:
    """The step at which each phase ends in a run of num_steps: the sum of the lengths up to there, rounded.

    Raises ValueError if a phase has two lengths or gets no step, if two have no length, or if all do not fill the run.
    """
    lengths = []
    for phase in phases:
        tokens_per_step = (phase.global_batch_size or global_batch_size) * sequence_length
        given = {
            "fraction": phase.fraction and phase.fraction * num_steps,
            "steps": phase.steps,
            "tokens": phase.tokens and phase.tokens / tokens_per_step,
        }
        found = {key: length for key, length in given.items() if length is not None}
        if len(found) > 1:
            raise ValueError(f"phase {phase.name!r} has {' and '.join(found)}; give one length")
        lengths.append(next(iter(found.values()), None))
    rest = num_steps - sum(length for length in lengths if length is not None)
    unset = [phase.name for phase, length in zip(phases, lengths, strict=True) if length is None]
    if len(unset) > 1:
        raise ValueError(f"the phases {' and '.join(unset)} have no length; give all but one steps, tokens or a share")
    tolerance = 1e-6 * num_steps if all(phase.fraction is not None for phase in phases) else 0.5
    if rest < 0.5 if unset else abs(rest) >= tolerance:
        named = ", ".join(phase.name for phase in phases if phase.name not in unset)
        raise ValueError(
            f"the phases {named} take {num_steps - rest:.6g} steps, and the run has {num_steps}; correct them or "
            "train.steps. One phase may have no length: it gets the rest"
        )
    ends, share, steps = [], 0.0, 0.0
    for phase, length in zip(phases, lengths, strict=True):
        share += phase.fraction or 0.0
        if phase.fraction is None:
            steps += rest if length is None else length
        ends.append(min(num_steps, round(share * num_steps + steps)))
    ends[-1] = num_steps
    for phase, first, end in zip(phases, [0, *ends], ends, strict=False):
        if first >= end and num_steps >= _TRIAL_STEPS:
            raise ValueError(f"phase {phase.name!r} gets none of the {num_steps:,} steps; make it longer, or drop it")
    return ends


@dataclass(frozen=True)
class PhaseSpan:
    """A phase in the run: steps [first_step, end_step) of batch_size samples each, from global sample `start`.

    blend_start: the global sample at which its blend begins, perhaps in an earlier phase whose blend it continues.
    sequence_length: None for the run's. by_tokens: whether the weights are the sources' token counts.
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
        return self.start + self.num_samples

    def description(self) -> dict[str, Any]:
        """JSON values that `of` reads. Weights are a list of pairs, because the order of the sources breaks ties."""
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "end_step"}
        weights = zip(self.blend.names, self.blend.shares, strict=True)
        return {**kept, "end": self.end, "blend": [list(pair) for pair in weights]}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> PhaseSpan:
        kept = {field.name: entry[field.name] for field in fields(cls) if field.name != "end_step"}
        steps = (entry["end"] - entry["start"]) // entry["batch_size"]
        return cls(**{**kept, "end_step": entry["first_step"] + steps, "blend": Blend(dict(entry["blend"]))})


class Location(NamedTuple):
    """The origin of a global sample: sample `ordinal` (counted over the whole run) of `source`, in `phase`."""

    phase: str
    source: str
    ordinal: int


class SourceRange(NamedTuple):
    """The samples [start, end) of `source`, by ordinal, that a range of global samples takes in `phase`."""

    phase: str
    source: str
    start: int
    end: int


class PhaseSchedule:
    """The phases of a run of num_steps global batches of global_batch_size samples; a phase may have its own size.
    sequence_length: of a sample, for lengths in tokens. Raises ValueError if the phases do not fill the run."""

    def __init__(
        self, phases: Sequence[Phase], num_steps: int, global_batch_size: int, sequence_length: int = 1
    ) -> None:
        self.num_steps = num_steps
        spans: list[PhaseSpan] = []
        ends = phase_boundaries(phases, num_steps, global_batch_size, sequence_length)
        for phase, first, end in zip(phases, [0, *ends], ends, strict=False):
            size, length = phase.global_batch_size or global_batch_size, phase.sequence_length
            own_length = None if length == sequence_length else length
            spans.append(
                PhaseSpan(phase.name, first, end, 0, size, Blend(phase.blend or {}), 0, own_length, phase.by_tokens)
            )
        self._lay_out(spans, done=0)

    def _lay_out(self, spans: Sequence[PhaseSpan], done: int) -> None:
        """Take `spans` of consecutive steps; compute `start` and `blend_start` of those that begin from step `done`."""
        self.spans: list[PhaseSpan] = []
        start = 0
        for span in spans:
            if span.first_step >= done:
                # A phase without a step has no effect on the blend of the next.
                before = next((earlier for earlier in reversed(self.spans) if earlier.num_samples), None)
                if before is not None and before.blend == span.blend:
                    span = replace(span, start=start, blend=before.blend, blend_start=before.blend_start)
                else:
                    span = replace(span, start=start, blend_start=start)
            self.spans.append(span)
            start = span.end
        # blend_start -> each source's samples before it; `_offset` adds entries.
        self._offsets: dict[int, Mapping[str, int]] = {0: {}}

    def after(self, past: Sequence[Mapping[str, Any]], consumed: int) -> PhaseSchedule:
        """The schedule with the phases of `past` up to sample `consumed`, and this schedule's phases after it. past:
        the `description` of the schedule that served the consumed samples. The phase at `consumed` keeps the position
        in its blend if both schedules have it; otherwise its blend begins at `consumed`."""
        served = [PhaseSpan.of(entry) for entry in past if entry["start"] < min(entry["end"], consumed)]
        if served:
            last = served[-1]
            served[-1] = replace(last, end_step=last.first_step + -(-(consumed - last.start) // last.batch_size))
        done = served[-1].end_step if served else 0
        ours = [replace(span, first_step=max(span.first_step, done)) for span in self.spans if span.end_step > done]
        if served and ours:
            last_served, first_of_ours = (
                (span.name, span.batch_size, span.sequence_length, span.blend) for span in (served[-1], ours[0])
            )
            if last_served == first_of_ours:  # the phase continues
                served[-1] = replace(served[-1], end_step=ours.pop(0).end_step)
        schedule = copy(self)
        schedule._lay_out([*served, *ours], done)
        return schedule

    @property
    def num_samples(self) -> int:
        return self.spans[-1].end

    @property
    def source_names(self) -> list[str]:
        """The sources that phases draw from, in order of their first appearance."""
        return list(dict.fromkeys(name for span in self.spans if span.num_samples for name in span.blend.names))

    def check_sources(self, names: Collection[str]) -> None:
        """Raise ValueError if a phase draws from a source that is not in `names`."""
        if missing := [name for name in self.source_names if name not in names]:
            raise ValueError(
                f"the phases draw from {', '.join(missing)}, but the data has the sources {', '.join(names)}; correct "
                "the blends of the phases or add the source"
            )

    def span(self, step: int) -> PhaseSpan:
        """The phase of `step`, counted from 0; after the end of the run, its last phase."""
        # When several phases begin at the same step, all but the last are empty; bisect_right finds the last.
        return self.spans[bisect_right(self.spans, step, key=lambda span: span.first_step) - 1]

    def span_at(self, global_sample: int) -> PhaseSpan:
        """The phase that serves a global sample; after the end of the run, its last phase."""
        return self.spans[bisect_right(self.spans, global_sample, key=lambda span: span.start) - 1]

    def samples_before(self, step: int) -> int:
        span = self.span(step)
        return span.start + (step - span.first_step) * span.batch_size

    def steps_before(self, sample: int) -> int:
        """The step that begins with a global sample, or the number of steps for the end of the run."""
        span = self.span_at(max(0, sample))
        steps, rest = divmod(sample - span.start, span.batch_size)
        if rest or not 0 <= sample <= self.num_samples:
            raise ValueError(f"no step of this run begins with sample {sample}")
        return span.first_step + steps

    def locate(self, global_sample: int) -> Location:
        span = self.span_at(global_sample)
        source, ordinal = span.blend.source(global_sample - span.blend_start)
        return Location(span.name, source, self._offset(span).get(source, 0) + ordinal)

    def counts(self, global_sample: int) -> dict[str, int]:
        """How many of the global samples [0, global_sample) come from each source, without zeros."""
        return self._counts(self.span_at(max(0, global_sample - 1)), global_sample)

    def source_ranges(self, start: int, end: int) -> list[SourceRange]:
        """The samples of each source in the global samples [start, end), by phase; ordinals as in `locate`."""
        found = []
        for span in self.spans:
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                before, after = self._counts(span, first), self._counts(span, last)
                for source in span.blend.names:
                    if before.get(source, 0) < after.get(source, 0):
                        found.append(SourceRange(span.name, source, before.get(source, 0), after[source]))
        return found

    def _counts(self, span: PhaseSpan, global_sample: int) -> dict[str, int]:
        counts = dict(self._offset(span))
        for name, count in zip(span.blend.names, span.blend.counts(global_sample - span.blend_start), strict=True):
            if count:
                counts[name] = counts.get(name, 0) + count
        return counts

    def _offset(self, span: PhaseSpan) -> Mapping[str, int]:
        """How many samples each source served before the blend of a span began."""
        if span.blend_start not in self._offsets:
            before = next(earlier for earlier in self.spans if earlier.end == span.blend_start and earlier.num_samples)
            self._offsets[span.blend_start] = self._counts(before, span.blend_start)
        return self._offsets[span.blend_start]

    def description(self) -> list[dict[str, Any]]:
        """What a checkpoint saves to recognize the phases and to continue after them."""
        return [span.description() for span in self.spans]
