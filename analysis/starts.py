"""What recipes cost over several starts: the results of `scripts/try_recipes.py` from some checkpoints, in one table.

A trial's own error (`trials.py`) is that of the steps of one start. Another start, of other weights and other data, has
something of its own, so what a recipe costs is here the mean over starts, and its standard error that of the starts'
gaps around it. Few starts say little of how they scatter: fewer than five take the standard deviation within all
recipes, pooled (`noise.py`). The share of another recipe's gap is a ratio of two gaps of the same start; what the start
adds to both is not in its scatter.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from analysis.gap_picture import Row, Words, draw_rows
from analysis.noise import Estimate, beyond_cell, estimate, percent_cell, pooled, share_cell, share_of
from analysis.trial_file import read_trials
from analysis.trials import Trial, gap, step_seconds
from megatron_fp4.logging.words import counted

_CHECKPOINT, _STEPS, _START = "checkpoint", "number of steps", "start"


@dataclass(frozen=True)
class Start:
    """What was tried from one checkpoint. name: of its file. made_from: as `TrialFile` has it."""

    name: str
    made_from: dict[str, Any]
    trials: dict[str, Trial]

    @property
    def steps(self) -> int:
        """Of each recipe."""
        return int(self.made_from[_STEPS])


def read_starts(paths: Sequence[Path]) -> list[Start]:
    """One a file. Raises ValueError for files that are not of several starts and equally many steps; OSError."""
    if len(paths) < 2:
        raise ValueError("name the files of two starts at least; of one, try_recipes.py itself prints the table")
    starts: list[Start] = []
    for path in paths:
        found = Start(str(path), *read_trials(path))
        for key in (_CHECKPOINT, _STEPS, _START):
            if key not in found.made_from:
                raise ValueError(f"{path} does not say its {key}; name files that try_recipes.py --output has written")
        if not found.trials:
            raise ValueError(f"{path} holds no recipe yet; wait for the first, or leave the file out")
        for other in starts:
            if other.made_from[_CHECKPOINT] == found.made_from[_CHECKPOINT]:
                raise ValueError(
                    f"{other.name} and {path} are of the same checkpoint, so they are one start; name one of them, and "
                    "files of other seeds' checkpoints"
                )
            if other.steps != found.steps:
                raise ValueError(
                    f"{other.name} has {other.steps} steps of each recipe, and {path} {found.steps}, whose means "
                    "cannot be compared; try the same number of --steps"
                )
        starts.append(found)
    return starts


@dataclass(frozen=True)
class Starts:
    """The gaps of all recipes over `starts`.

    base: the recipe that all are held against. against: another one, or None. skip: first steps that do not count.
    Raises ValueError if a start lacks the base, or none has `against`.
    """

    starts: Sequence[Start]
    base: str
    against: str | None
    skip: int

    def __post_init__(self) -> None:
        for start in self.starts:
            if self.base not in start.trials:
                raise ValueError(
                    f"{start.name} has no recipe {self.base}; it has {', '.join(start.trials)}. Give --base another "
                    "name, or try that recipe there, too"
                )
        if self.against is not None and self.against not in self.names:
            raise ValueError(f"--against {self.against}: no recipe has this name; they are {', '.join(self.names)}")
        steps = self.starts[0].steps
        if not 0 <= self.skip < steps:
            raise ValueError(f"--skip {self.skip}: of {counted(steps, 'step')} at least one must count")

    @cached_property
    def names(self) -> list[str]:
        """Of all recipes, the base first, as the files have them."""
        return list(dict.fromkeys([self.base, *(name for start in self.starts for name in start.trials)]))

    def gaps(self, name: str, base: str) -> dict[str, float]:
        """Of recipe `name` above `base`, in percent, by start; without those where either did not get to its end."""
        found = {
            start.name: gap(start.trials[name], start.trials[base], self.skip)
            for start in self.starts
            if name in start.trials and base in start.trials
        }
        return {start: of.percent.mean for start, of in found.items() if of is not None}

    @cached_property
    def above(self) -> dict[str, Estimate]:
        """Of each recipe with a gap to the base: the mean over starts."""
        return self.estimates(self.base)

    def estimates(self, base: str) -> dict[str, Estimate]:
        """Of each recipe besides the base and `base` that has a gap to the latter: the mean over starts."""
        others = [name for name in self.names if name not in (base, self.base)]
        gaps = {name: list(self.gaps(name, base).values()) for name in others}
        shared = pooled(gaps.values())
        return {name: estimate(of_starts, shared) for name, of_starts in gaps.items() if of_starts}

    def share(self, name: str) -> Estimate | None:
        """Of the gap of `against` that `name` has, 1 if both cost as much; see `share_of`."""
        if self.against is None:
            return None
        whole = self.above.get(self.against)
        return share_of(self.gaps(name, self.base), self.gaps(self.against, self.base), whole)

    def time(self, name: str) -> float | None:
        """Of a step, in times of the base's: the mean over starts."""
        ratios = []
        for start in self.starts:
            mine = step_seconds(start.trials[name], self.skip) if name in start.trials else None
            base = step_seconds(start.trials[self.base], self.skip)
            if mine and base and start.trials[name].ended is None:
                ratios.append(mine / base)
        return statistics.mean(ratios) if ratios else None


def starts_table(found: Starts) -> str:
    """Markdown: each recipe's gap to the base and to `against` over the starts, its share of the gap of `against`, and
    the time of a step; notes below."""
    above, against = found.above, found.against
    beside = found.estimates(against) if against is not None else {}
    heads = ["recipe", "starts", f"above {found.base}", "beyond the noise"]
    if against is not None:
        heads += [f"above {against}", "beyond the noise", f"share of the gap of {against}"]
    heads.append("time of a step")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in found.names:
        of_base, time = above.get(name), found.time(name)
        count = len(found.starts) if name == found.base else of_base.count if of_base else 0
        cells = [name, str(count), percent_cell(of_base), beyond_cell(of_base)]
        if against is not None:
            other = beside.get(name)
            cells += [percent_cell(other), beyond_cell(other), _share_cell(found, name)]
        cells.append("-" if time is None or name == found.base else f"{time:.2f} x")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_notes(found, [*above.values(), *beside.values()])])


def draw_starts(found: Starts, target: str | Path) -> Path:
    """The gaps to the base with 95% intervals, each start as a tick, and a dotted line at that of `against`; returns
    `target`. Raises ValueError if no recipe has a gap."""
    above = found.above
    if not above:
        raise ValueError(f"nothing to draw: no recipe got to its last step beside {found.base}, with finite losses")
    rows = [Row(f"{name} ({of.count})", of, [*found.gaps(name, found.base).values()]) for name, of in above.items()]
    other = above.get(found.against or "")
    words = Words(
        f"training loss above {found.base} (%)", "mean of the starts", f"{_steps(found)}, {len(found.starts)} starts",
        each="a start",
    )  # fmt: skip
    return draw_rows(rows, target, words, mark=None if other is None else (f"{found.against}", other.mean))


def _share_cell(found: Starts, name: str) -> str:
    if name == found.against:
        return "1"
    return share_cell(found.share(name) if name != found.base else None)


def _steps(found: Starts) -> str:
    begins = sorted({start.made_from[_START] for start in found.starts})
    count = found.starts[0].steps
    if len(begins) == 1:
        return f"steps {begins[0] + found.skip + 1:,} to {begins[0] + count:,}"
    return f"{counted(count - found.skip, 'step')} behind steps {', '.join(f'{at + found.skip:,}' for at in begins)}"


def _notes(found: Starts, estimates: Sequence[Estimate]) -> list[str]:
    lines = [
        f"above: training loss over that of the other recipe in the same step, on the same tokens; mean of "
        f"{_steps(found)}, over the starts. time of a step: in times of {found.base}'s.",
        "±: one standard error of the mean over starts. beyond the noise: zero is outside the 95% interval (Student's "
        "t).",
    ]
    if any(of.shared for of in estimates):
        lines.append("*: of fewer than five starts, by the standard deviation within all recipes, pooled.")
    if len({start.made_from[_START] for start in found.starts}) > 1:
        lines.append("The starts are at different steps: their scatter is also what gaps grow by between these.")
    for key in dict.fromkeys(key for start in found.starts for key in start.made_from):
        values = {start.name: start.made_from.get(key) for start in found.starts}
        if key not in (_CHECKPOINT, _START) and len(set(map(str, values.values()))) > 1:
            lines.append(f"another {key}: {', '.join(f'{value} ({name})' for name, value in values.items())}")
    for start in found.starts:
        ended = [f"{name} {trial.ended}" for name, trial in start.trials.items() if trial.ended is not None]
        lines += [f"{start.name}: {line}" for line in ended]
    return lines
