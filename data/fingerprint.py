"""What a checkpoint remembers of the data, and whether a resumed run would still see the same past.

A fingerprint is plain JSON: seed, seq_length, the order of samples, the files of each source, the phases. On resume
only what shaped the samples already consumed must agree. What is to come may change: where phases begin and end, their
blends, batches and sequence lengths, and a source may have got more files behind those that it had. A phase that has
served samples must keep its blend, and a source that has given some must keep their files: anything else would replace
the past, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data.concatenation import side_by_side
from data.fim import FillInTheMiddle
from data.megatron_order import order_differences
from data.megatron_schedule import MegatronSchedule
from data.phases import PhaseSchedule
from data.samples import Samples

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


def differences(
    saved: Mapping[str, Any],
    schedule: PhaseSchedule,
    sources: Mapping[str, Samples],
    consumed_samples: int,
    counts: Mapping[str, int],
) -> list[str]:
    """What of the past a run would replace, one sentence each.

    saved: the fingerprint of the run that has consumed the samples, `counts` of them from each source.
    """
    one = next(iter(sources.values()))
    now = {"seed": one.seed, "seq_length": one.seq_length, "order": one.order}
    keys = {"seed": "data.seed (by default run.seed)", "seq_length": "train.sequence_length", "order": "data.order"}
    found = [f"{keys[key]} was {saved[key]} and is now {value}" for key, value in now.items() if saved[key] != value]
    if isinstance(schedule, MegatronSchedule) and "megatron" in saved:
        found += order_differences(saved["megatron"], schedule.order.description(), consumed_samples)
    current = schedule.description()
    if served(saved["phases"], consumed_samples) != served(current, consumed_samples):
        changed = _changed_phase(saved["phases"], current, consumed_samples)
        if changed:
            found.append(
                f"the phases up to sample {consumed_samples} were {spelled(saved['phases'], end=consumed_samples)} and "
                f"are now {spelled(current, end=consumed_samples)}; phase {changed!r} has served samples, so it must "
                "stay in data.phases with its blend, sources in the same order (give one that begins now another name)"
            )
    for name in (name for name, count in counts.items() if count):
        if name not in sources:
            found.append(f"source {name!r} is gone")
        elif name not in saved["sources"]:
            found.append(f"source {name!r} was gone already")
        elif "fim" in saved["sources"][name] and not isinstance(sources[name], FillInTheMiddle):
            found.append(f"source {name!r} had data.fim and has none now")
        elif problem := sources[name].replaces(saved["sources"][name]):
            found.append(f"source {name!r} {problem}")
    return found


def served(phases: Sequence[Mapping[str, Any]], consumed_samples: int) -> list[tuple[Any, ...]]:
    """What of the phases shaped the samples before consumed_samples; their names do not."""
    spans = [
        (
            p["start"],
            min(p["end"], consumed_samples),
            p["batch_size"],
            p["sequence_length"],
            p["blend_start"],
            p["blend"],
        )
        for p in phases
    ]
    return [span for span in spans if span[0] < span[1]]


def to_come(phases: Sequence[Mapping[str, Any]], consumed_samples: int) -> list[dict[str, Any]]:
    """What is left of the phases behind consumed_samples."""
    return [
        {**phase, "start": max(phase["start"], consumed_samples), "blend_start": 0, "first_step": 0}
        for phase in phases
        if phase["end"] > max(phase["start"], consumed_samples)
    ]


def spelled(phases: Sequence[Mapping[str, Any]], end: int | None = None) -> str:
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
