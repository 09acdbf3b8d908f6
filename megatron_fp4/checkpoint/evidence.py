"""What a run leaves behind besides its checkpoints, so that a start can tell a new run from one that lost them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fp4.checkpoint import files

METRICS, SUMMARY = "metrics.jsonl", "summary.json"  # as report/ writes them


@dataclass(frozen=True)
class Evidence:
    """found: what says that there were checkpoints, for a message. steps: the last one that metrics.jsonl has."""

    steps: int = 0
    found: list[str] = field(default_factory=list)


@dataclass
class _Records:
    """What metrics.jsonl tells. anew: its run was told to begin at step 0, whatever there was before."""

    steps: int = 0
    checkpoints: int = 0
    resumed_from: int = 0
    anew: bool = False


def earlier_run(root: Path, *, branch: bool) -> Evidence:
    """Traces of a run whose checkpoints under `root` are gone.

    A run that was killed before its first checkpoint leaves none, and may begin again where it began. branch: that is
    behind step 0, so a start from a later step says nothing. Raises OSError.
    """
    records, run_dir = _read(root.parent / METRICS), root.parent
    found = []
    if records.checkpoints:
        found.append(
            f"{METRICS} has {_count(records.steps, 'step')}, and {_count(records.checkpoints, 'checkpoint')} saved"
        )
    elif records.resumed_from and not branch:
        found.append(f"{METRICS} has a start from step {records.resumed_from}")
    if not records.anew:  # otherwise the rest is of the run before, which was given up knowingly
        if (run_dir / SUMMARY).exists():
            found.append(f"{SUMMARY} says that it was finished")
        if (pointer := files.read_pointer(root)) is not None:
            found.append(f"checkpoints/{files.POINTER} names {pointer}")
        if damaged := files.list_damaged(root):
            found.append(f"damaged checkpoints were moved aside: {', '.join(folder.name for folder in damaged)}")
    return Evidence(records.steps, found)


def _read(path: Path) -> _Records:
    """Whatever lines can be read: a damaged one must not hide the others."""
    records = _Records()
    if not path.is_file():
        return records
    with path.open("rb") as file:
        for line in file:
            try:
                _take(records, json.loads(line))
            except (ValueError, TypeError, AttributeError):
                continue
    return records


def _take(records: _Records, record: dict[str, Any]) -> None:
    kind, step = record.get("kind"), record.get("step")
    if kind == "step" and isinstance(step, int):
        records.steps = max(records.steps, step)
    elif kind == "event" and record.get("event") == "checkpoint":
        records.checkpoints += 1
    elif kind == "run":
        records.resumed_from = max(records.resumed_from, int(step or 0))
        records.anew = records.anew or record.get("resume") == "never"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
