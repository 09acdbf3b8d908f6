"""The phases of a run: which source, and which sample of it, serves each global sample.

The global sample index is the only clock. A phase is a span of it with its own blend, batch and sequence length, in
whole global batches, so that no step mixes two blends. A source's samples are counted over the whole run, across
phases: nothing is seen twice before everything was seen once. A phase with the blend of the phase before it continues
that blend, so a batch size that grows in stages is a row of phases.

A sample always has the run's sequence length. A phase of a shorter one cuts each of its samples into as many sequences
as it divides into, so neither the clock nor what was consumed depends on it.

A run that resumes with another number of steps, or with other phases to come, has a past that the new phases would
not have laid out so. `PhaseSchedule.after` keeps the spans that were consumed and lets the new layout begin after them.
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
    """A span of training drawn from sources by the weights of `blend`, one of them positive (see blend.Blend).

    At most one length: `fraction` of the run's steps, `steps`, or `tokens` (rounded to whole steps). One phase of a run
    may have none: it gets the rest. global_batch_size, in samples, and sequence_length: the run's if None. by_tokens:
    the weights are the sources' tokens, which change with their files.
    """

    name: str
    fraction: float | None = None
    blend: Mapping[str, float] | None = None
    steps: int | None = None
    tokens: float | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    by_tokens: bool = False


# A run of fewer steps is a trial, in which a short phase may come to nothing.
_TRIAL_STEPS = 10


def phase_boundaries(
    phases: Sequence[Phase], num_steps: int, global_batch_size: int, sequence_length: int
) -> list[int]:
    """The step after each phase, in a run of num_steps: the one nearest to the sum of the lengths.

    Raises ValueError when a phase has two lengths or gets no step, two have none, or they do not fill the run.
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
    open_ones = [phase.name for phase, length in zip(phases, lengths, strict=True) if length is None]
    if len(open_ones) > 1:
        raise ValueError(
            f"the phases {' and '.join(open_ones)} have no length; give all but one of them steps, tokens or a fraction"
        )
    tolerance = 1e-6 * num_steps if all(phase.fraction is not None for phase in phases) else 0.5
    if rest < 0.5 if open_ones else abs(rest) >= tolerance:
        named = ", ".join(phase.name for phase in phases if phase.name not in open_ones)
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
            raise ValueError(
                f"phase {phase.name!r} gets none of the {num_steps:,} steps; make it longer, or leave it out"
            )
    return ends


@dataclass(frozen=True)
class PhaseSpan:
    """A phase laid out: the steps [first_step, end_step) of batch_size samples each, from global sample `start` on.

    blend_start: the global sample from which its blend is counted; that of an earlier phase whose blend it continues.
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
        """The global sample after its last."""
        return self.start + self.num_samples

    def description(self) -> dict[str, Any]:
        """As JSON, from which `of` makes it again. Weights are pairs in a list, because the order of the sources breaks
        ties."""
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "end_step"}
        weights = zip(self.blend.names, self.blend.shares, strict=True)
        return {**kept, "end": self.end, "blend": [list(pair) for pair in weights]}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> PhaseSpan:
        """The span of a `description`."""
        kept = {field.name: entry[field.name] for field in fields(cls) if field.name != "end_step"}
        steps = (entry["end"] - entry["start"]) // entry["batch_size"]
        return cls(**{**kept, "end_step": entry["first_step"] + steps, "blend": Blend(dict(entry["blend"]))})


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
    sequence_length: of a sample, for lengths in tokens. Raises ValueError when the phases do not fill the run."""

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
        """Take `spans`, whose steps follow each other; those from step `done` on get `start` and `blend_start` here."""
        self.spans: list[PhaseSpan] = []
        start = 0
        for span in spans:
            if span.first_step >= done:
                # Of phases without a step only the name is left.
                before = next((earlier for earlier in reversed(self.spans) if earlier.num_samples), None)
                if before is not None and before.blend == span.blend:
                    span = replace(span, start=start, blend=before.blend, blend_start=before.blend_start)
                else:
                    span = replace(span, start=start, blend_start=start)
            self.spans.append(span)
            start = span.end
        # Each source's samples before a blend began, by the sample where it did, as far as they are known.
        self._offsets: dict[int, Mapping[str, int]] = {0: {}}

    def after(self, past: Sequence[Mapping[str, Any]], consumed: int) -> PhaseSchedule:
        """This schedule from sample `consumed` on, with those before it as `past` has them, the `description` of the
        schedule that served them. A phase that is under way in both keeps its blend's position; any other that is cut
        begins its blend at `consumed`."""
        served = [PhaseSpan.of(entry) for entry in past if entry["start"] < min(entry["end"], consumed)]
        if served:
            last = served[-1]
            served[-1] = replace(last, end_step=last.first_step + -(-(consumed - last.start) // last.batch_size))
        done = served[-1].end_step if served else 0
        ours = [replace(span, first_step=max(span.first_step, done)) for span in self.spans if span.end_step > done]
        if served and ours:
            one, other = (
                (span.name, span.batch_size, span.sequence_length, span.blend) for span in (served[-1], ours[0])
            )
            if one == other:  # the phase that has served samples continues
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
        """Sources that some phase draws from, in order of first appearance."""
        return list(dict.fromkeys(name for span in self.spans if span.num_samples for name in span.blend.names))

    def check_sources(self, names: Collection[str]) -> None:
        """Raise ValueError if a phase draws from a source that is none of `names`."""
        if missing := [name for name in self.source_names if name not in names]:
            raise ValueError(
                f"the phases draw from {', '.join(missing)}, but the data has the sources {', '.join(names)}; correct "
                "the blends of the phases or add the source"
            )

    def span(self, step: int) -> PhaseSpan:
        """The phase of `step`, from 0; the run's last after its end."""
        # Of phases that start together all but the last are empty, and bisect_right finds the last.
        return self.spans[bisect_right(self.spans, step, key=lambda span: span.first_step) - 1]

    def span_at(self, global_sample: int) -> PhaseSpan:
        """The phase that serves a global sample; the run's last after its end."""
        return self.spans[bisect_right(self.spans, global_sample, key=lambda span: span.start) - 1]

    def samples_before(self, step: int) -> int:
        """Global samples of the steps [0, step)."""
        span = self.span(step)
        return span.start + (step - span.first_step) * span.batch_size

    def steps_before(self, sample: int) -> int:
        """The step that begins with a global sample, the end included. Raises ValueError if none does."""
        span = self.span_at(max(0, sample))
        steps, rest = divmod(sample - span.start, span.batch_size)
        if rest or not 0 <= sample <= self.num_samples:
            raise ValueError(f"sample {sample} begins no step of this run")
        return span.first_step + steps

    def locate(self, global_sample: int) -> Location:
        """Where a global sample of the run comes from."""
        span = self.span_at(global_sample)
        source, ordinal = span.blend.source(global_sample - span.blend_start)
        return Location(span.name, source, self._offset(span).get(source, 0) + ordinal)

    def counts(self, global_sample: int) -> dict[str, int]:
        """How many of the global samples [0, global_sample) come from each source that gives any."""
        return self._counts(self.span_at(max(0, global_sample - 1)), global_sample)

    def source_ranges(self, start: int, end: int) -> list[SourceRange]:
        """What the global samples [start, end) are, by phase and source that gives some; ordinals as in `locate`."""
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
        """Each source's samples before the blend of a span began."""
        if span.blend_start not in self._offsets:
            before = next(earlier for earlier in self.spans if earlier.end == span.blend_start and earlier.num_samples)
            self._offsets[span.blend_start] = self._counts(before, span.blend_start)
        return self._offsets[span.blend_start]

    def description(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps to recognise the phases, and to lay out new ones after them."""
        return [span.description() for span in self.spans]
