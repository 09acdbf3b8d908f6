"""What a finished run still lacks, because it was killed between its last checkpoint and its last file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fp4.logging.metrics import METRICS_FILE
from megatron_fp4.logging.record_file import move_aside

SUMMARY_FILE, PICTURE_FILE, REPORT_FILE = "summary.json", "loss.png", "report.html"


@dataclass(frozen=True)
class Missing:
    """Which of its last records and files a run of so many steps lacks.

    others: in the words of who makes them, such as exports. losses: the validation losses behind its last step by
    source, if metrics.jsonl has them.
    """

    checkpoint: bool
    validation: bool
    files: tuple[str, ...]
    losses: dict[str, float]
    others: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """For a line that says what is missing."""
        records = {"its last validation": self.validation, "its last checkpoint's event": self.checkpoint}
        return [*(name for name, missing in records.items() if missing), *self.others, *self.files]


def missing_of(
    run_dir: Path, steps: int, *, validates: bool, others: Callable[[int], Sequence[str]] = lambda _: ()
) -> Missing:
    """What the folder of a run that has done all its `steps` lacks, as the first rank sees it. A collective.

    validates: the run has held-out data. others: what else is missing behind so many steps, asked on the first rank.
    Raises OSError on all ranks.
    """
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = replace(_look(run_dir, steps, validates), others=tuple(others(steps)))
        except OSError as error:
            outcome[0] = str(error)
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Missing):
        return outcome[0]
    raise OSError(outcome[0])


def set_aside_ending(run_dir: Path, *, anew: bool) -> None:
    """A run that goes on is not finished: rename the summary of an earlier end, and if it begins anew the picture and
    the page."""
    move_aside(run_dir / SUMMARY_FILE)
    if anew:
        move_aside(run_dir / PICTURE_FILE)
        move_aside(run_dir / REPORT_FILE)


def _look(run_dir: Path, steps: int, validates: bool) -> Missing:
    records = _records(run_dir / METRICS_FILE)
    last = [record for record in records if record.get("step") == steps]
    measured = [record["losses"] for record in last if record.get("kind") == "validation" and record.get("losses")]
    losses = {name: math.nan if loss is None else loss for name, loss in measured[-1].items()} if measured else {}
    files = []
    if any(record.get("kind") == "step" for record in records) and not (run_dir / PICTURE_FILE).is_file():
        files.append(PICTURE_FILE)
    if _summarized(run_dir / SUMMARY_FILE) != steps:
        files.append(SUMMARY_FILE)
    saved = any(record.get("event") == "checkpoint" for record in last)
    return Missing(not saved, validates and not losses, tuple(files), losses)


def _records(path: Path) -> list[dict[str, Any]]:
    """Those that can be read; a start that trains on is the one to complain of others."""
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _summarized(path: Path) -> int | None:
    """The number of steps that a summary is of; None if there is none that can be read."""
    try:
        return int(json.loads(path.read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
