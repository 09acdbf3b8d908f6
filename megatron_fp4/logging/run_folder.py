"""A run's folder as pictures and pages read it: everything that is there, and nothing that must be.

Folders of older versions lack files and fields; what is missing or cannot be read is empty here, and for who shows it
unknown. Only a folder without a training step is no run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_fp4.config.launcher import place_in_run
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.completion import SUMMARY_FILE
from megatron_fp4.logging.metrics import METRICS_FILE, records_of_run, steps_of
from megatron_fp4.logging.time_ledger import last_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """name: what pictures call the run. records: of metrics.jsonl. config, plan, summary, state: of config.yaml,
    plan.yaml, summary.json and state.json, empty if they are not there."""

    name: str
    path: Path
    records: list[dict[str, Any]]
    config: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]
    state: dict[str, Any]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind, in order."""
        return [record for record in self.records if record["kind"] == kind]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The training steps, of which there is one at least."""
        return self.of("step")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What happened, in order."""
        return [record for record in self.of("event") if "event" in record]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the starts of the run said of it; of each fact the newest."""
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
    def spans(self) -> list[tuple[str, int, int]]:
        """The data phases that were, as (name, first step - 1, last step)."""
        return spans_of(self.steps, "phase")

    def series(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values [n] of a number that every step has; NaN where it has none."""
        values = [record.get(field) for record in self.steps]
        numbers = [float(value) if isinstance(value, int | float) else np.nan for value in values]
        return np.array([record["step"] for record in self.steps]), np.array(numbers)

    def same_batches(self, other: RunFolder) -> bool:
        """Whether both had seen as many tokens after the last step that both have."""
        tokens = [{record["step"]: record.get("tokens") for record in run.steps} for run in (self, other)]
        common = tokens[0].keys() & tokens[1].keys()
        return bool(common) and tokens[0][max(common)] == tokens[1][max(common)]

    def setting(self, *keys: str) -> Any:
        """What the configuration says, None if it does not: `setting("train", "steps")`."""
        node: Any = self.config
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node


def spans_of(steps: list[dict[str, Any]], field: str) -> list[tuple[str, int, int]]:
    """Steps in a row that have the same text in `field`, as (text, first step - 1, last step)."""
    spans: list[tuple[str, int, int]] = []
    for record in steps:
        value = str(record.get(field, ""))
        if spans and spans[-1][0] == value:
            spans[-1] = (value, spans[-1][1], record["step"])
        else:
            spans.append((value, record["step"] - 1, record["step"]))
    return spans


def named_run(text: str | Path) -> tuple[str, Path]:
    """The name and the folder in `name=folder`, or in a folder alone, which then gives its own name.

    A folder whose path has an equals sign is taken as it is. Raises ValueError where one of the two is empty.
    """
    text = str(text)
    name, equals, folder = text.partition("=")
    if not equals or Path(text).exists():
        name, folder = Path(text).resolve().name, text
    if not name.strip() or not folder.strip():
        raise ValueError(f"{text!r} names no run; write the folder of a run, or a name for it too: NAME=FOLDER")
    return name.strip(), Path(folder)


def open_run(text: str | Path) -> RunFolder:
    """The run that `named_run` takes `text` for.

    Raises FileNotFoundError if there is no metrics.jsonl and ValueError if it has no steps yet.
    """
    name, path = named_run(text)
    records = records_of_run(path)
    steps_of(records, path)
    return RunFolder(
        name=name,
        path=path,
        records=records,
        config=_mapping(path / "config.yaml", yaml.safe_load),
        plan=_mapping(path / "plan.yaml", yaml.safe_load),
        summary=_mapping(path / SUMMARY_FILE, json.loads),
        state=_mapping(path / "state.json", json.loads),
    )


def check_sources(sources: Sequence[str], there: Sequence[str], run: str) -> None:
    """Raise ValueError for one of `sources` that `run` was never validated on. there: those that it was; none if that
    is still to come."""
    if there and (unknown := [name for name in sources if name not in there]):
        raise ValueError(
            f"--sources {','.join(sources)}: {run} was not validated on {', '.join(map(repr, unknown))}; name some of "
            f"{', '.join(there)}"
        )


def check_baseline(config: Config) -> None:
    """Raise ConfigError if `logging.baseline` is no other run that can be drawn beside this one.

    That it is gone is only said, by the first rank, where this run has begun: no picture is worth a run.
    """
    given = config.logging.baseline
    if given is None:
        return
    try:
        name, path = named_run(given)
    except ValueError as error:
        raise ConfigError(f"logging.baseline={given}: {error}") from error
    if not last_step(path)[0]:
        why = (
            f"logging.baseline={given} is no run to compare with: {path / METRICS_FILE} "
            f"{'has no training steps yet' if (path / METRICS_FILE).exists() else 'does not exist'}"
        )
        if not (Path(config.run.dir) / METRICS_FILE).exists():
            raise ConfigError(f"{why}; name the run.dir of a run that has trained, or drop it")
        if not place_in_run().rank:
            logger.warning("%s; this run goes on, and its pictures are without it", why)
        return
    if path.resolve() == Path(config.run.dir).resolve():
        raise ConfigError(f"logging.baseline={given} is this run's own run.dir; name another run, or drop it")
    if name == Path(config.run.dir).resolve().name:
        raise ConfigError(
            f"logging.baseline={given} has the name of this run, {name}; give it one of its own: NAME={path}"
        )


def _mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
