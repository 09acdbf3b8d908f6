"""Going on with a run's data: what a checkpoint says of the past, and what the configuration says of the rest.

What was consumed stays as it was; phases to come, and files that a source has got since, hold from there on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.fingerprint import differences, served, spelled, to_come
from data.phases import PhaseSchedule
from data.samples import Growth, Samples
from data.state_0_2 import upgraded


@dataclass(frozen=True)
class GoingOn:
    """How a run goes on behind `consumed` samples. changes: what is other than the checkpoint had it, in words."""

    consumed: int
    schedule: PhaseSchedule
    sources: dict[str, Samples]
    changes: list[str]


class OtherDataError(ValueError):
    """The run's data would not have given the samples that the checkpoint has seen."""


def go_on(
    state: Mapping[str, Any], schedule: PhaseSchedule, sources: Mapping[str, Samples], allow_other_data: bool = False
) -> GoingOn:
    """The schedule and sources of a configuration, behind what a checkpoint's `state` has consumed.

    state: the loader's `state_dict`. allow_other_data: go on behind it although its samples were of other data; then
    steps and counts go on, and what comes is of these sources.

    Raises OtherDataError with what differs, ValueError for a position that begins no step.
    """
    if "format" not in state["fingerprint"]:
        state = upgraded(state, schedule)
    consumed, saved, counts = int(state["consumed_samples"]), state["fingerprint"], state["position"]["counts"]
    changes = []
    if found := differences(saved, schedule, sources, consumed, counts):
        if not allow_other_data:
            raise OtherDataError("; ".join(found))
        changes.append(f"the data is other than the checkpoint's: {'; '.join(found)}")
    phases = schedule.description()
    if served(saved["phases"], consumed) != served(phases, consumed):
        schedule = schedule.behind(saved["phases"], consumed)
        phases = schedule.description()
    before, now = to_come(saved["phases"], consumed), to_come(phases, consumed)
    if before != now:
        changes.append(f"phases behind sample {consumed}: were {spelled(before)}; are {spelled(now)}")
    check_position(schedule, consumed)
    schedule.stand_at(consumed, state["position"])
    grown = {}
    for name, source in sources.items():
        given, kept = counts.get(name, 0), saved["sources"].get(name)
        if given and kept is not None and source.replaces(kept) is None:
            growth, files = [Growth(*entry) for entry in kept["growth"]], len(source.stream.parts)
            if files > growth[-1].files:
                more = source.stream.parts[growth[-1].files :]
                tokens = sum(part.num_tokens for part in more)
                changes.append(
                    f"source {name!r} has {len(more)} new files of {tokens:,} tokens, mixed with what its epoch has "
                    f"left behind its sample {given}"
                )
                growth.append(Growth(given, files))
            source = source.grown(growth)
        grown[name] = source
    return GoingOn(consumed, schedule, grown, changes)


def check_position(schedule: PhaseSchedule, consumed: int) -> None:
    """Raise ValueError if no step of the schedule begins behind `consumed` samples."""
    try:
        steps = schedule.steps_before(consumed)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint stands after {consumed} samples, which are no whole number of this run's batches; resume "
            "with the checkpoint's train.global_batch_size and phases"
        ) from error
    if steps > schedule.num_steps:
        raise ValueError(
            f"the checkpoint stands after {consumed} samples in {steps} steps, and the run ends after "
            f"{schedule.num_steps}; resume with train.steps={steps} or more"
        )
