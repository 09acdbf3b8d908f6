"""Recipes tried from a checkpoint, in a JSON file that grows by one after the other.

    {"made_from": {...}, "trials": {NAME: {"configuration": ..., "losses": [...], ...}}, "results": {...}}

Whoever is stopped goes on with what is missing. So results stand in one file only if they can be compared: of the same
checkpoint, steps, code, machine and settings, and each of the very configuration that its name has now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from analysis.trials import Trial, results
from megatron_fp4.logging.run_files import replace_text


@dataclass
class TrialFile:
    """The file at `path`, there or not. made_from: what all results have in common, JSON values; its keys are words of
    a message. configurations: of the recipes to be tried, something that differs if they do. skip: as `results` takes
    it.

    Raises ValueError for a file of something else, or with results that are not comparable; OSError.
    """

    path: Path
    made_from: Mapping[str, Any]
    configurations: Mapping[str, str]
    skip: int
    trials: dict[str, Trial] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made_from = json.loads(json.dumps(self.made_from))
        if self.path.exists():
            self._read()
        self.write()  # what cannot be written is said before anything is trained

    def _read(self) -> None:
        made_from, self._kept, trials = _content(self.path, "give --output another file")
        for key in dict.fromkeys((*self.made_from, *made_from)):
            there, here = made_from.get(key), self.made_from.get(key)
            if there != here:
                raise ValueError(
                    f"{self.path} has results of another {key} ({there}, and this is {here}), which cannot be compared "
                    "with these; give --output another file"
                )
        for name, configuration in self.configurations.items():
            if name in self._kept and self._kept[name].get("configuration") != configuration:
                raise ValueError(
                    f"{self.path} has results of another {name}, whose configuration or plan was not this one; give "
                    "the recipe another name, or --output another file"
                )
        self.trials = {name: trials[name] for name in self.configurations if name in trials}

    def add(self, name: str, trial: Trial) -> None:
        """Take up what has been tried, and write. Raises OSError."""
        self.trials[name] = trial
        self._kept[name] = {"configuration": self.configurations[name], **asdict(trial)}
        self.write()

    def write(self) -> None:
        """Replace the file by one with all there is. Raises OSError."""
        named = {name: self.trials[name] for name in self.configurations if name in self.trials}
        content = {
            "made_from": self.made_from,
            "trials": self._kept,
            "results": results(named, self.skip) if next(iter(self.configurations)) in named else {},
        }
        replace_text(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_trials(path: Path) -> tuple[dict[str, Any], dict[str, Trial]]:
    """`made_from` of the file, and all recipes that were tried. Raises ValueError for a file of something else;
    OSError."""
    made_from, _, trials = _content(path, "name one that try_recipes.py --output has written")
    return made_from, trials


def _content(path: Path, remedy: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Trial]]:
    """`made_from` of a file, its trials as they stand there, and as `Trial`s."""
    if not path.is_file():
        raise ValueError(f"{path} is no file; {remedy}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        made_from, records = dict(content["made_from"]), dict(content["trials"])
        trials = {
            name: Trial(**{key: value for key, value in record.items() if key != "configuration"})
            for name, record in records.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no recipes that were tried; {remedy}") from error
    return made_from, records, trials
