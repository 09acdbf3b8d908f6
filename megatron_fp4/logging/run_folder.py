"""Read the folder of a run, for pictures, pages and comparisons.

Folders of older versions lack files and fields, which are empty here. Only one without a training step is an error.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_fp4.checkpoint.files import read_plain
from megatron_fp4.logging.files import METRICS_FILE, SUMMARY_FILE, iterate_records


@dataclass(frozen=True)
class RunFolder:
    """The content of a run's folder. name: of the run in pictures. records: of metrics.jsonl. config, state: from
    config.yaml and state.json; empty if there is no such file."""

    name: str
    path: Path
    records: list[dict[str, Any]]
    config: dict[str, Any]
    state: dict[str, Any]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        return self.of("step")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return [record for record in self.of("event") if "event" in record]

    def happened(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.events if record["event"] == event]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts that the starts of the run recorded; the newest value of each."""
        return {key: value for record in self.of("run") for key, value in record.items()}

    @cached_property
    def validation(self) -> dict[str, dict[int, float]]:
        """Held-out losses (nats per token) by source and step."""
        found: dict[str, dict[int, float]] = {}
        for record in self.of("validation"):
            for source, loss in (record.get("losses") or {}).items():
                if loss is not None:
                    found.setdefault(source, {})[record["step"]] = loss
        return found

    @cached_property
    def phases(self) -> list[tuple[str, int, int]]:
        """The data phases so far, as (name, first step - 1, last step)."""
        spans = []
        for name, steps in groupby(self.steps, key=lambda record: str(record.get("phase", ""))):
            numbers = [record["step"] for record in steps]
            spans.append((name, numbers[0] - 1, numbers[-1]))
        return spans

    @property
    def plans(self) -> str:
        """The names of its precision plans, in order: `nvfp4, then bf16`."""
        return ", then ".join(dict.fromkeys(str(record.get("plan", "unknown")) for record in self.steps))

    def series(self, field: str, kind: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """Steps [n] and values [n] of a field in the records of a kind; NaN for records without it."""
        records = self.of(kind)
        values = [record.get(field) for record in records]
        numbers = [float(value) if isinstance(value, int | float) else math.nan for value in values]
        return np.array([record["step"] for record in records]), np.array(numbers)

    @property
    def last_losses(self) -> np.ndarray:
        """The finite training losses of the last 2% of the steps, counted from step 0."""
        steps, losses = self.series("loss")
        last = losses[steps > steps[-1] - max(1, round(0.02 * steps[-1]))]
        return last[np.isfinite(last)]

    def same_batches(self, other: RunFolder) -> bool:
        """Whether both runs had the same number of tokens after the last step that both have."""
        mine, theirs = ({record["step"]: record.get("tokens") for record in run.steps} for run in (self, other))
        common = mine.keys() & theirs.keys()
        return bool(common) and mine[max(common)] == theirs[max(common)]

    def setting(self, *keys: str) -> Any:
        """A value of the configuration, such as `setting("train", "steps")`; None if it has none."""
        node: Any = self.config
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node


def named_run(text: str | Path) -> tuple[str, Path]:
    """The name and folder in `name=folder`, or in a folder alone, whose own name it then is.

    A path with an equals sign that exists is a folder alone. Raises ValueError if name or folder is empty.
    """
    text = str(text)
    name, equals, folder = text.partition("=")
    if not equals or Path(text).exists():
        name, folder = Path(text).resolve().name, text
    if not name.strip() or not folder.strip():
        raise ValueError(f"{text!r} names no run; give the folder of a run, or a name and the folder: NAME=FOLDER")
    return name.strip(), Path(folder)


def open_run(text: str | Path) -> RunFolder:
    """Read the run that `text` names, as in `named_run`.

    Raises FileNotFoundError if there is no metrics.jsonl, and ValueError if it has no steps yet.
    """
    name, path = named_run(text)
    records = read_records(path)
    if not any(record["kind"] == "step" for record in records):
        raise ValueError(f"{path / METRICS_FILE} has no training steps yet; try again when the run has made some")
    return RunFolder(name, path, records, read_mapping(path / "config.yaml"), read_mapping(path / "state.json"))


def open_runs(texts: Sequence[str | Path]) -> list[RunFolder]:
    """`open_run` of each. Hydra's file in SWEEP/* is skipped. Raises ValueError too if two runs have the same name,
    because pictures could not distinguish them."""
    runs = [open_run(text) for text in texts if Path(text).name != "multirun.yaml"]
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two runs are called {name}; give them names of their own: NAME=FOLDER")
    return runs


def read_records(run_dir: str | Path) -> list[dict[str, Any]]:
    """All records of the run in `run_dir`. Raises FileNotFoundError if there is no metrics.jsonl."""
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name the folder of a run (its run.dir)")
    return list(iterate_records(path))


def summarized_steps(run_dir: Path) -> int | None:
    """The number of steps in a run's summary; None if there is no complete summary."""
    steps = read_mapping(run_dir / SUMMARY_FILE).get("steps")
    return steps if isinstance(steps, int) else None


class _WithoutAliases(yaml.SafeLoader):
    """Refuses aliases, with which a few lines become gigabytes. A run's files have none."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys of a YAML or JSON file in a run's folder; empty if the file is missing, damaged or something else.
    Raises ValueError for a link, a pipe, or a file of more than 16 MiB."""
    try:
        content = read_plain(path, 16 << 20)
    except OSError:
        return {}
    with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):
        keys = json.loads(content) if path.suffix == ".json" else yaml.load(content, _WithoutAliases)
        return keys if isinstance(keys, dict) else {}
    return {}
