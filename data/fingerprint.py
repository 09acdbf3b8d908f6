"""What a checkpoint remembers of the data, and whether a resumed run would still see the same past.

A fingerprint is plain JSON: seed, seq_length, the identity of each source, the phases. On resume only what
shaped the samples already consumed must agree. Where phases begin and end may change (train.steps, fractions): what
was consumed stays as it was, and the new layout holds from there on. Another blend for a phase that has served
samples, or a source with other content, would replace the past, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.phases import PhaseSchedule
from data.samples import SampleSource


def data_fingerprint(schedule: PhaseSchedule, sources: Mapping[str, SampleSource]) -> dict[str, Any]:
    """The fingerprint of a run: JSON types only, and nothing of where files lie."""
    used = [sources[name] for name in schedule.source_names]
    return {
        "seed": used[0].seed,
        "seq_length": used[0].seq_length,
        "sources": {source.name: source.description() for source in used},
        "phases": schedule.description(),
    }


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], consumed_samples: int) -> list[str]:
    """What of the first consumed_samples samples the two fingerprints disagree on, one sentence each."""
    found = [
        f"{key} was {saved[key]} and is now {current[key]}"
        for key in ("seed", "seq_length")
        if saved[key] != current[key]
    ]
    past, now = served(saved, consumed_samples), served(current, consumed_samples)
    if past != now and (changed := _changed_phase(saved, current, consumed_samples)):
        found.append(
            f"the phases up to sample {consumed_samples} were {_spell(past)} and are now {_spell(now)}; phase "
            f"{changed!r} has served samples, so it must stay in data.phases with its blend "
            "(give one that begins now another name)"
        )
    for name in dict.fromkeys(name for _, _, blend in past for name, _ in blend):
        before, after = saved["sources"][name], current["sources"].get(name)
        if after is None:
            found.append(f"source {name!r} is gone")
        elif before != after:
            found.append(
                f"source {name!r} had {before['num_tokens']} tokens (identity {before['identity'][:12]}) and "
                f"now has {after['num_tokens']} (identity {after['identity'][:12]})"
            )
    return found


def served(fingerprint: Mapping[str, Any], consumed_samples: int) -> list[tuple[int, int, list[list[Any]]]]:
    """The phases as (start, end, weights), cut off at consumed_samples; their names do not shape samples."""
    spans = [(p["start"], min(p["end"], consumed_samples), p["blend"]) for p in fingerprint["phases"]]
    return [span for span in spans if span[0] < span[1]]


def _changed_phase(saved: Mapping[str, Any], current: Mapping[str, Any], consumed_samples: int) -> str | None:
    """The first phase that has served samples and that the run does not have any more, or with another blend."""
    blends = {phase["name"]: phase["blend"] for phase in current["phases"]}
    for phase in saved["phases"]:
        if phase["start"] < min(phase["end"], consumed_samples) and blends.get(phase["name"]) != phase["blend"]:
            return str(phase["name"])
    return None


def _spell(spans: list[tuple[int, int, list[list[Any]]]]) -> str:
    return (
        "; ".join(
            f"[{start}, {end}) " + ", ".join(f"{name} {weight:.4g}" for name, weight in blend)
            for start, end, blend in spans
        )
        or "none"
    )
