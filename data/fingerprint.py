"""What a checkpoint remembers of the data, and whether a resumed run would still see the same past.

A fingerprint is plain JSON: seed, seq_length, the identity of each source, the phases. On resume only what
shaped the samples already consumed must agree, so a run may be lengthened, given another last phase or a new
source; what would reorder or replace the past is refused.
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
    past, now = _past(saved, consumed_samples), _past(current, consumed_samples)
    if past != now:
        found.append(f"the phases up to sample {consumed_samples} were {_spell(past)} and are now {_spell(now)}")
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


def _past(fingerprint: Mapping[str, Any], consumed_samples: int) -> list[tuple[int, int, list[list[Any]]]]:
    """The phases as (start, end, weights), cut off where the run stands; their names do not shape samples."""
    spans = [(p["start"], min(p["end"], consumed_samples), p["blend"]) for p in fingerprint["phases"]]
    return [span for span in spans if span[0] < span[1]]


def _spell(spans: list[tuple[int, int, list[list[Any]]]]) -> str:
    return (
        "; ".join(
            f"[{start}, {end}) " + ", ".join(f"{name} {weight:.4g}" for name, weight in blend)
            for start, end, blend in spans
        )
        or "none"
    )
