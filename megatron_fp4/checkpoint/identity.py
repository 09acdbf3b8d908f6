"""What makes a run that run: the settings a checkpoint must not be continued without.

Left out is what may change on resume: the mesh, precision, optimizer and schedule, number of steps, intervals.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fp4.config.schema import Config

NOT_OF_THE_MODEL = ("name", "nvfp4_bf16_blocks", "fp8_bf16_blocks")
"""Keys under `model` that are a label, and precision."""
_ABSENT = "(absent)"


def run_identity(config: Config, data_fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run as a flat dict, dotted name -> JSON value.

    data_fingerprint: what data and tokenizer are, of JSON types, nested as one likes; it appears under `data.`.
    """
    model = dataclasses.asdict(config.model)
    for name in NOT_OF_THE_MODEL:
        del model[name]
    nested = {
        "model": model,
        "train": {
            "sequence_length": config.train.sequence_length,
            "global_batch_size": config.train.global_batch_size,
        },
        "run": {"seed": config.run.seed},
        "data": json.loads(json.dumps(data_fingerprint)),  # as it will come back from the checkpoint
    }
    return flatten(nested)


def identity_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each field that differs, with both values; empty if it is the same run."""
    lines = []
    for name in sorted({*saved, *current}):
        before, now = saved.get(name, _ABSENT), current.get(name, _ABSENT)
        if before != now:
            lines.append(f"{name}: {before!r} in the checkpoint, {now!r} now")
    return lines


def other_run(folder: Path, differences: Sequence[str]) -> str:
    """The refusal of a checkpoint that another run made."""
    return (
        f"{folder} belongs to another run: {'; '.join(differences)}. Set these back, choose another run.dir, or resume "
        "anyway with checkpoint.allow_mismatch=true"
    )


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Mappings in mappings as one, with names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
