"""What a checkpoint knows of the data, and how a run resumes after it.

A fingerprint is plain JSON: seed, seq_length, the order of samples, the files of each source, the phases. On resume
only what shaped the samples already consumed must agree: a phase that has served samples must keep its blend, and a
source that has given some must keep its files. What is to come may change: where phases begin and end, their blends,
batches and sequence lengths, and a source may have more files after those that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from data.megatron_order import MegatronSchedule, order_differences
from data.order import Growth, Samples
from data.schedule import PhaseSchedule
from data.storage import side_by_side

FORMAT = 2


def data_fingerprint(schedule: PhaseSchedule, sources: Mapping[str, Samples]) -> dict[str, Any]:
    """The fingerprint of a run: JSON types only, and nothing of where files lie."""
    # Where other data was allowed, one of the past may be gone.
    used = [sources[name] for name in schedule.source_names if name in sources]
    # An object of a store takes a while to name itself, and then knows.
    side_by_side(lambda part: part.identity(), {id(part): part for s in used for part in s.stream.parts}.values())
    return {
        "format": FORMAT,
        "seed": used[0].seed,
        "seq_length": used[0].seq_length,
        "order": used[0].order,
        "sources": {source.name: source.description() for source in used},
        "phases": schedule.description(),
        **({"megatron": schedule.order.description()} if isinstance(schedule, MegatronSchedule) else {}),
    }


class ResumedData(NamedTuple):
    """How a run resumes after `consumed` samples. changes: what is other than the checkpoint had it, in words."""

    consumed: int
    schedule: PhaseSchedule
    sources: dict[str, Samples]
    changes: list[str]


def resume_data(
    state: Mapping[str, Any], schedule: PhaseSchedule, sources: Mapping[str, Samples], allow_other_data: bool = False
) -> ResumedData:
    """The schedule and sources of a configuration, after what a checkpoint's `state` has consumed.

    state: the loader's `state_dict`. allow_other_data: resume after it although its samples were of other data; then
    steps and counts continue, and what comes is of these sources.

    Raises ValueError with what differs, and for a position that begins no step.
    """
    consumed, saved, counts = int(state["consumed_samples"]), state["fingerprint"], state["position"]["counts"]
    changes = []
    if found := _differences(saved, schedule, sources, consumed, counts):
        if not allow_other_data:
            raise ValueError(
                f"this run's data is not the data of the checkpoint: {'; '.join(found)}. Restore those settings and "
                "files, or resume with other data by checkpoint.allow_mismatch=true, which gives up exact resumption"
            )
        changes.append(f"the data is other than the checkpoint's: {'; '.join(found)}")
    phases = schedule.description()
    if _served(saved["phases"], consumed) != _served(phases, consumed):
        past, said = (_spelled(of, end=consumed) for of in (saved["phases"], phases))
        # Weights by tokens are those of the files of then.
        if past != said and not any(phase["by_tokens"] for phase in saved["phases"]):
            changes.append(f"phases before sample {consumed} stay as they were: {past}; data.phases says {said}")
        schedule = schedule.after(saved["phases"], consumed)
        phases = schedule.description()
    before, now = _to_come(saved["phases"], consumed), _to_come(phases, consumed)
    if before != now:
        changes.append(f"phases after sample {consumed}: were {_spelled(before)}; are {_spelled(now)}")
    _check_position(schedule, consumed)
    grown = {}
    for name, source in sources.items():
        given, kept = counts.get(name, 0), saved["sources"].get(name)
        problem = None if kept is None else source.replaces(kept)
        if not given and problem is not None:
            changes.append(f"source {name!r}, of which nothing was consumed yet, {problem}")
        if given and kept is not None and problem is None:
            growth, files = [Growth(*entry) for entry in kept["growth"]], len(source.stream.parts)
            if files > growth[-1].files:
                more = source.stream.parts[growth[-1].files :]
                tokens = sum(part.num_tokens for part in more)
                changes.append(
                    f"source {name!r} has {len(more)} new files of {tokens:,} tokens, mixed with what its epoch has "
                    f"left after its sample {given}"
                )
                growth.append(Growth(given, files))
            source = source.grown(growth)
        grown[name] = source
    return ResumedData(consumed, schedule, grown, changes)


def _differences(
    saved: Mapping[str, Any],
    schedule: PhaseSchedule,
    sources: Mapping[str, Samples],
    consumed_samples: int,
    counts: Mapping[str, int],
) -> list[str]:
    """What of the past a run would replace, one sentence each.

    saved: the fingerprint of the run that has consumed the samples, `counts` of them from each source.
    """
    if "format" not in saved:
        raise ValueError("the checkpoint was written by version 0.2, whose order of samples is no more; start anew")
    one = next(iter(sources.values()))
    now = {"seed": one.seed, "seq_length": one.seq_length, "order": one.order}
    keys = {"seed": "data.seed (by default run.seed)", "seq_length": "train.sequence_length", "order": "data.order"}
    found = [f"{keys[key]} was {saved[key]} and is now {value}" for key, value in now.items() if saved[key] != value]
    if isinstance(schedule, MegatronSchedule) and "megatron" in saved:
        found += order_differences(saved["megatron"], schedule.order.description(), consumed_samples)
    current = schedule.description()
    if changed := _changed_phase(saved["phases"], current, consumed_samples):
        found.append(
            f"the phases up to sample {consumed_samples} were {_spelled(saved['phases'], end=consumed_samples)} and "
            f"are now {_spelled(current, end=consumed_samples)}; phase {changed!r} has served samples, so it must "
            "stay in data.phases with its blend, sources in the same order (give one that begins now another name)"
        )
    for name in (name for name, count in counts.items() if count):
        if name not in sources:
            found.append(f"source {name!r} is gone")
        elif name not in saved["sources"]:
            found.append(f"source {name!r} was gone already")
        elif "fim" in saved["sources"][name]:
            found.append(f"source {name!r} had data.fim, which is no more")
        elif problem := sources[name].replaces(saved["sources"][name]):
            found.append(f"source {name!r} {problem}")
    return found


def _served(phases: Sequence[Mapping[str, Any]], consumed_samples: int) -> list[tuple[Any, ...]]:
    """What of the phases shaped the samples before consumed_samples; their names do not."""
    keys = ("batch_size", "sequence_length", "blend_start", "blend")
    return [
        (phase["start"], min(phase["end"], consumed_samples), *(phase[key] for key in keys))
        for phase in phases
        if phase["start"] < min(phase["end"], consumed_samples)
    ]


def _to_come(phases: Sequence[Mapping[str, Any]], consumed_samples: int) -> list[dict[str, Any]]:
    """What is left of the phases after consumed_samples."""
    return [
        {**phase, "start": max(phase["start"], consumed_samples), "blend_start": 0, "first_step": 0}
        for phase in phases
        if phase["end"] > max(phase["start"], consumed_samples)
    ]


def _spelled(phases: Sequence[Mapping[str, Any]], end: int | None = None) -> str:
    """The phases for a reader, as far as sample `end`."""
    words = []
    for phase in phases:
        last = phase["end"] if end is None else min(phase["end"], end)
        if phase["start"] < last:
            total = sum(weight for _, weight in phase["blend"])
            blend = ", ".join(f"{name} {weight / total:.4g}" for name, weight in phase["blend"][:8])
            more = f" and {len(phase['blend']) - 8} more" if len(phase["blend"]) > 8 else ""
            words.append(f"{phase['name']} [{phase['start']}, {last}) {blend}{more}")
    return "; ".join(words) or "none"


def _changed_phase(
    saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]], consumed_samples: int
) -> str | None:
    """The first phase that has served samples and that the run does not have any more, or with another blend."""
    if _served(saved, consumed_samples) == _served(current, consumed_samples):
        return None
    blends = {phase["name"]: (phase["blend"], phase["by_tokens"]) for phase in current}
    under_another_name = [phase["blend"] for phase in current if phase["name"] not in {p["name"] for p in saved}]
    for phase in saved:
        blend, by_tokens = blends.get(phase["name"], (None, False))
        # Weights by tokens are what the files were then; with more files they are others from here on.
        same = blend == phase["blend"] or (by_tokens and phase["by_tokens"])
        same = same or (phase["name"] not in blends and phase["blend"] in under_another_name)
        if phase["start"] < min(phase["end"], consumed_samples) and not same:
            return str(phase["name"])
    return None


def _check_position(schedule: PhaseSchedule, consumed: int) -> None:
    """Raise ValueError if no step of the schedule begins after `consumed` samples."""
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
