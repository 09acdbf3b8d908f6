"""What recipes cost over a few steps from one checkpoint, and over several such starts.

Recipes that begin with the same weights and moments and read the same tokens differ in their losses of a step by what
quantization does there, while from step to step the losses themselves go up and down by ten times as much. So

    gap = mean over steps of 100 * (loss / loss of the base in the same step - 1)

Neighbouring steps are not independent, for a weight that rounding has moved stays moved: the interval is that of the
means of six blocks of steps. It is the noise of one start alone: another start, of other weights and data, has
something of its own, so over several starts the gap is their mean, and its error that of the starts around it.

Results stand in a JSON file that grows by one recipe after the other, so that what is stopped resumes with what is
missing:

    {"made_from": {...}, "trials": {NAME: {"configuration": ..., "losses": [...], ...}}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.statistics import (
    BLOCKS,
    Estimate,
    block_estimate,
    draw_estimates,
    estimates,
    gap_text,
    markdown,
    share_text,
)
from megatron_fp4.logging.console import counted, short_seconds
from megatron_fp4.logging.files import replace_text


def first_steps(steps: int) -> int:
    """How many of `steps` do not count by default: a sixth, at most ten."""
    return min(10, steps // 6)


@dataclass(frozen=True)
class Trial:
    """The steps of one recipe.

    losses: mean training loss of each, nats per token, None where it was not finite. seconds: of each. held_out: of the
    last, by source, empty if that was not measured. skipped: how many made no update. notes: what else there is to
    know, such as a switch. ended: why it did not get to its last step.
    """

    losses: list[float | None]
    seconds: list[float]
    held_out: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    ended: str | None = None

    def mean_loss(self, skip: int) -> float | None:
        """Of the steps after the first `skip`; None if it did not get to its end or one is not finite."""
        losses = [loss for loss in self.losses[skip:] if loss is not None]
        whole = losses and len(losses) == len(self.losses[skip:]) and self.ended is None
        return float(np.mean(losses)) if whole else None

    def seconds_of_a_step(self, skip: int) -> float | None:
        """The median after the first `skip`; None if it did not get to its end."""
        return float(np.median(self.seconds[skip:])) if self.ended is None and self.seconds[skip:] else None


def gap(trial: Trial, base: Trial | None, skip: int, percent: bool = True) -> Estimate | None:
    """Over the steps after the first `skip`, in percent of the base's loss or in nats per token; None without a base,
    or if either did not get to its end or has a loss that is not finite among them."""
    if (
        base is None
        or trial.mean_loss(skip) is None
        or base.mean_loss(skip) is None
        or len(trial.losses) != len(base.losses)
    ):
        return None
    mine, theirs = (np.array(of.losses[skip:], dtype=float) for of in (trial, base))
    return block_estimate(list(100 * (mine / theirs - 1) if percent else mine - theirs))


def trial_table(trials: Mapping[str, Trial], against: str | None, start: int, skip: int) -> str:
    """Markdown: each recipe beside the first one, the base, and `against`; notes below.

    start: steps done before the first. skip: how many at the beginning do not count.
    """
    base = next(iter(trials))
    against = None if against == base else against
    validated = any(trial.held_out for trial in trials.values())
    heads = ["recipe", "training loss", f"above {base}", "nats per token"]
    heads += [f"above {against}"] if against is not None else []
    heads += ["time of a step", *(["held-out loss", f"held-out above {base}"] if validated else [])]
    rows = []
    for name, trial in trials.items():
        mean, other = trial.mean_loss(skip), None if name == base else trials[base]
        cells = [name, "-" if mean is None else f"{mean:.4f}", gap_text(gap(trial, other, skip))]
        cells.append(gap_text(gap(trial, other, skip, percent=False), "", 4))
        if against is not None:
            cells.append(gap_text(gap(trial, None if name in (base, against) else trials[against], skip)))
        cells.append(_time(trial, other, skip))
        if validated:
            held_out, of_base = (np.mean(list(of.held_out.values() or [math.nan])) for of in (trial, trials[base]))
            cells.append(f"{held_out:.4f}" if np.isfinite(held_out) else "-")
            above = 100 * (held_out / of_base - 1) if other is not None else math.nan
            cells.append(f"{above:+.2f}% (no interval)" if np.isfinite(above) else "-")
        rows.append(cells)
    steps = max(len(trial.losses) for trial in trials.values())
    notes = [
        f"above: training loss over that of the other recipe in the same step, on the same tokens; mean of the steps "
        f"{start + skip + 1:,} to {start + steps:,}. [95% interval]: of the noise of this start alone; differences "
        f"that matter are worth a second checkpoint, of another seed. no interval: fewer than {2 * BLOCKS} steps.",
        *_trial_notes(trials),
    ]
    return markdown(heads, rows, notes)


def _time(trial: Trial, base: Trial | None, skip: int) -> str:
    """Of a step, in steps of the base; of the base itself in seconds."""
    mine = trial.seconds_of_a_step(skip)
    other = 1.0 if base is None else base.seconds_of_a_step(skip)
    if mine is None or other is None:
        return "-"
    return short_seconds(mine) if base is None else f"{mine / other:.2f} x"


def _trial_notes(trials: Mapping[str, Trial]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for name, trial in trials.items():
        skipped = [f"{counted(trial.skipped, 'step')} made no update"] if trial.skipped else []
        for note in (*([trial.ended] if trial.ended else []), *trial.notes, *skipped):
            lines.setdefault(note, []).append(name)
    return [f"{'all recipes' if len(of) == len(trials) else ', '.join(of)}: {note}" for note, of in lines.items()]


def trial_line(name: str, trial: Trial, base: Trial | None, skip: int) -> str:
    """A line about a recipe that has just been tried. base: None of the base itself."""
    mean, found = trial.mean_loss(skip), gap(trial, base, skip)
    outcome = trial.ended or f"training loss {'-' if mean is None else f'{mean:.4f}'}"
    seconds = f"{counted(len(trial.losses), 'step')} in {short_seconds(sum(trial.seconds))}"
    return f"{name}: {seconds}; {outcome}" + ("" if found is None else f", {found.text()}")


def draw_trials(trials: Mapping[str, Trial], against: str | None, skip: int, target: Path) -> Path:
    """The table's gaps to the first recipe, with a dotted line at that of `against`; returns `target`. Raises
    ValueError if no recipe has a gap."""
    base = next(iter(trials))
    found = {name: gap(trial, trials[base], skip) for name, trial in trials.items() if name != base}
    rows = {name: (of, ()) for name, of in found.items() if of is not None}
    return draw_estimates(rows, target, f"training loss above {base} (%)", against=against)


class TrialFile:
    """The file at `path`, there or not. made_from: what all results have in common, JSON values; its keys are words of
    a message. configurations: of the recipes to be tried, something that differs if they do. trials: of these recipes,
    what the file has.

    Raises ValueError for a file of something else, or with results that are not comparable; OSError.
    """

    def __init__(self, path: Path, made_from: Mapping[str, Any], configurations: Mapping[str, str]) -> None:
        self.path, self.configurations = path, configurations
        self.made_from = json.loads(json.dumps(made_from))
        self._kept: dict[str, Any] = {}
        self.trials: dict[str, Trial] = {}
        if path.exists():
            before, self._kept, trials = _content(path)
            for key in dict.fromkeys((*self.made_from, *before)):
                there, here = before.get(key), self.made_from.get(key)
                if there != here:
                    raise ValueError(
                        f"{path} has results of another {key} ({there}, and this is {here}), which cannot be compared "
                        "with these; give --output another file"
                    )
            for name, configuration in configurations.items():
                if name in self._kept and self._kept[name].get("configuration") != configuration:
                    raise ValueError(
                        f"{path} has results of another {name}, whose configuration or plan was not this one; give the "
                        "recipe another name, or --output another file"
                    )
            self.trials = {name: trials[name] for name in configurations if name in trials}
        self._write()  # what cannot be written is refused before anything is trained

    def add(self, name: str, trial: Trial) -> None:
        """Take up what has been tried, and write. Raises OSError."""
        self.trials[name] = trial
        self._kept[name] = {"configuration": self.configurations[name], **asdict(trial)}
        self._write()

    def _write(self) -> None:
        content = {"made_from": self.made_from, "trials": self._kept}
        replace_text(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _content(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Trial]]:
    """`made_from` of a file, its trials as they stand there, and as `Trial`s."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        made_from, records = dict(content["made_from"]), dict(content["trials"])
        trials = {
            name: Trial(**{key: value for key, value in record.items() if key != "configuration"})
            for name, record in records.items()
        }
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no recipes that were tried; name a file that --output has written") from error
    return made_from, records, trials


@dataclass(frozen=True)
class Start:
    """What was tried from one checkpoint. name: of its file."""

    name: str
    made_from: dict[str, Any]
    trials: dict[str, Trial]


def read_starts(paths: Sequence[Path]) -> list[Start]:
    """One a file. Raises ValueError for files that are not of several checkpoints and equally many steps; OSError."""
    if len(paths) < 2:
        raise ValueError("name the files of two starts at least; of one, `compare.py try` prints the table")
    starts: list[Start] = []
    for path in paths:
        made_from, _, trials = _content(path)
        if not trials or not {"checkpoint", "number of steps"} <= made_from.keys():
            raise ValueError(f"{path} holds no recipe yet; wait for the first, or leave the file out")
        for other in starts:
            if other.made_from["checkpoint"] == made_from["checkpoint"]:
                raise ValueError(f"{other.name} and {path} are of the same checkpoint; name one of them")
            if other.made_from["number of steps"] != made_from["number of steps"]:
                raise ValueError(f"{other.name} and {path} have other numbers of steps; try equally many --steps")
        starts.append(Start(str(path), made_from, trials))
    return starts


def start_gaps(starts: Sequence[Start], base: str, skip: int) -> pd.DataFrame:
    """Gaps to `base` in percent: a row for each start, a column for each recipe. Raises ValueError if a start lacks
    `base`."""
    rows = {}
    for start in starts:
        if base not in start.trials:
            raise ValueError(f"{start.name} has no recipe {base}; it has {', '.join(start.trials)}")
        found = {name: gap(of, start.trials[base], skip) for name, of in start.trials.items() if name != base}
        rows[start.name] = {name: of.mean for name, of in found.items() if of is not None}
    return pd.DataFrame.from_dict(rows, orient="index")


def starts_table(starts: Sequence[Start], base: str, against: str | None, skip: int) -> str:
    """Markdown: each recipe's gap to the base and to `against` over the starts, its share of the gap of `against`, and
    the time of a step; notes below. Raises ValueError if a start lacks one of the two."""
    found = start_gaps(starts, base, skip)
    above, beside = estimates(found), {}
    heads = ["recipe", "starts", f"above {base}"]
    if against is not None:
        heads += [f"above {against}", f"share of the gap of {against}"]
        beside = estimates(start_gaps(starts, against, skip).drop(columns=base, errors="ignore"))
    rows = []
    for name in dict.fromkeys([base, *(name for start in starts for name in start.trials)]):
        there = [start.trials for start in starts if name in start.trials]
        cells = [name, str(len(there)), gap_text(above.get(name))]
        cells += [] if against is None else [gap_text(beside.get(name)), share_text(found, name, against)]
        seconds = [(of[name].seconds_of_a_step(skip), of[base].seconds_of_a_step(skip)) for of in there]
        ratios = [mine / other for mine, other in seconds if mine is not None and other is not None]
        rows.append([*cells, f"{np.mean(ratios):.2f} x" if ratios and name != base else "-"])
    notes = [
        "above: training loss over that of the other recipe in the same step; mean over the starts. [95% interval]: of "
        "the scatter of starts. *: of fewer than five starts, by the scatter within all recipes, pooled.",
        *(
            f"another {key}: {', '.join(f'{start.made_from.get(key)} ({start.name})' for start in starts)}"
            for key in starts[0].made_from
            if key != "checkpoint" and len({str(start.made_from.get(key)) for start in starts}) > 1
        ),
        *(f"{start.name}: {line}" for start in starts for line in _trial_notes(start.trials)),
    ]
    return markdown([*heads, "time of a step"], rows, notes)


def draw_starts(starts: Sequence[Start], base: str, against: str | None, skip: int, target: Path) -> Path:
    """The gaps to the base, each start as a tick, and a dotted line at that of `against`; returns `target`. Raises
    ValueError if no recipe has a gap."""
    found = start_gaps(starts, base, skip)
    rows = {name: (of, list(found[name].dropna())) for name, of in estimates(found).items()}
    axis, title = f"training loss above {base} (%)", f"{len(starts)} starts"
    return draw_estimates(rows, target, axis, title=title, against=against)
