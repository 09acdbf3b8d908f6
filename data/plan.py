"""What a run takes from each source in each phase, in samples and epochs, before it has begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from data.phases import PhaseSchedule, PhaseSpan
from data.samples import Samples


@dataclass(frozen=True)
class PlannedUse:
    """Of one source in one phase: its share and samples (within one of what will be served), and epochs over it.

    epochs: in this phase. epochs_done: from the beginning of the run to the end of the phase.
    """

    source: str
    share: float
    samples: int
    epochs: float
    epochs_done: float


def planned_use(schedule: PhaseSchedule, sources: Mapping[str, Samples]) -> list[tuple[PhaseSpan, list[PlannedUse]]]:
    """For each phase, what it takes from each of its sources."""
    taken: dict[str, int] = {}
    plan = []
    for span in schedule.spans:
        uses = []
        for name, whole in zip(span.blend.names, span.blend.shares, strict=True):
            before, share = taken.get(name, 0), whole / span.blend.period
            # A blend of long period would have to be walked for the last sample.
            taken[name] = before + round(span.num_samples * share)
            if span.num_samples and name in sources:  # with other data allowed, one may be gone
                began, done = sources[name].epochs(before), sources[name].epochs(taken[name])
                uses.append(PlannedUse(name, share, taken[name] - before, done - began, done))
        plan.append((span, uses))
    return plan


# A run of fewer is a trial, in which a short share may come to nothing.
_TRIAL_STEPS = 10


def check_phases(schedule: PhaseSchedule) -> None:
    """Raise ValueError for a phase that never comes, because its length rounds to no step."""
    for index, span in enumerate(schedule.spans):
        if span.end_step <= span.first_step and schedule.num_steps >= _TRIAL_STEPS:
            raise ValueError(
                f"phase {index} ({span.name}) gets none of the {schedule.num_steps:,} steps: its length rounds to 0; "
                "make it longer, raise train.steps, or leave the phase out"
            )


def check_epochs(
    schedule: PhaseSchedule, sources: Mapping[str, Samples], limit: float | Mapping[str, float] | None
) -> None:
    """Raise ValueError for sources that the run would go through more often than `limit`: of all, or by source."""
    if limit is None:
        return
    for name in limit if isinstance(limit, Mapping) else ():
        if name not in sources:
            raise ValueError(f"data.max_epochs names {name}, from which no phase draws: {', '.join(sources)}")
    found: dict[str, str] = {}
    for span, uses in planned_use(schedule, sources):
        for use in uses:
            most = limit.get(use.source, float("inf")) if isinstance(limit, Mapping) else limit
            one_sample = 1 / sources[use.source].num_samples
            if use.source not in found and use.epochs_done > most + one_sample:
                available = sources[use.source].stream.num_tokens
                found[use.source] = (
                    f"{use.source} ({available:,} tokens) {use.epochs_done:.3g} times by the end of phase "
                    f"{span.name}, where {most:g} is the limit"
                )
    if found:
        raise ValueError(
            "the run would go through " + "; ".join(found.values()) + ": lower their weights in data.phases or "
            "train.steps, add text, or raise data.max_epochs"
        )
