"""What a run takes from each source in each phase, in samples and epochs, before it has begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from data.phases import PhaseSchedule
from data.samples import SampleSource


@dataclass(frozen=True)
class PlannedUse:
    """Of one source in one phase: samples (within one of what will be served), and epochs over the source.

    epochs: in this phase. epochs_done: from the beginning of the run to the end of the phase.
    """

    phase: str
    source: str
    samples: int
    epochs: float
    epochs_done: float


def planned_use(schedule: PhaseSchedule, sources: Mapping[str, SampleSource]) -> list[PlannedUse]:
    """A row for each source of each phase that has steps, in order."""
    taken: dict[str, int] = {}
    rows = []
    for span in schedule.spans:
        for name, share in zip(span.blend.names, span.blend.shares, strict=True):
            before = taken.get(name, 0)
            # A blend of long period would have to be walked for the last sample.
            taken[name] = before + round(span.num_samples * share / span.blend.period)
            if span.num_samples and name in sources:
                done, began = sources[name].epochs(taken[name]), sources[name].epochs(before)
                rows.append(PlannedUse(span.name, name, taken[name] - before, done - began, done))
    return rows


def check_epochs(
    schedule: PhaseSchedule, sources: Mapping[str, SampleSource], limit: float | Mapping[str, float] | None
) -> None:
    """Raise ValueError for sources that the run would go through more often than `limit`: of all, or by source."""
    if limit is None:
        return
    if isinstance(limit, Mapping):
        for name in limit:
            if name not in sources:
                raise ValueError(f"data.max_epochs names {name}, which is no source; sources: {', '.join(sources)}")
    found: dict[str, str] = {}
    for use in planned_use(schedule, sources):
        most = limit.get(use.source, float("inf")) if isinstance(limit, Mapping) else limit
        one_sample = 1 / sources[use.source].num_samples
        if use.source not in found and use.epochs_done > most + one_sample:
            available = sources[use.source].stream.num_tokens
            found[use.source] = (
                f"{use.source} {use.epochs_done:.3g} times by the end of phase {use.phase} (it has {available:,} "
                f"tokens), and the limit is {most:g}"
            )
    if found:
        raise ValueError(
            "the run would go through " + "; ".join(found.values()) + ": lower their weights in data.phases or "
            "train.steps, add text, or raise data.max_epochs"
        )
