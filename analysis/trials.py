"""What recipes cost over a few steps from one checkpoint: training losses paired step by step, with standard errors.

Recipes that begin with the same weights and moments and read the same tokens differ in their losses of a step by what
quantization does there, while from step to step the losses themselves go up and down by ten times as much. So

    gap = mean over steps of 100 * (loss / loss of the base in the same step - 1)

Neighbouring steps are not independent, for a weight that rounding has moved stays moved: the standard error is that of
the means of six blocks of steps, one after another, and the 95% interval Student's with five degrees of freedom.
Measured on a hybrid of 30M parameters and 50 steps, differences of two recipes scatter over starts as much as this
interval says, and gaps to BF16 1.6 times as much (docs/research.md): a start has something of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.gap_picture import Row, Words, draw_rows
from analysis.noise import Estimate, beyond_cell, nats_cell, percent_cell
from megatron_fp4.logging.words import counted, short_seconds

BLOCKS = 6


def first_steps(steps: int) -> int:
    """How many of `steps` do not count if nobody says: a sixth, at most ten."""
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

    @property
    def held_out_mean(self) -> float | None:
        """Each source weighed alike, as everywhere; None if it was not measured, or is not finite."""
        mean = statistics.mean(self.held_out.values()) if self.held_out else math.nan
        return mean if math.isfinite(mean) else None


@dataclass(frozen=True)
class TrialGap:
    """Of one recipe above another one: in percent of its loss, and in nats per token."""

    percent: Estimate
    nats: Estimate


def gap(trial: Trial, base: Trial, skip: int) -> TrialGap | None:
    """Over the steps behind the first `skip`; None if either did not get to its end or has a loss that is not finite
    among them."""
    losses, others = trial.losses[skip:], base.losses[skip:]
    if trial.ended is not None or base.ended is not None or len(losses) != len(others) or not losses:
        return None
    pairs = [(loss, other) for loss, other in zip(losses, others, strict=True) if loss is not None and other]
    if len(pairs) < len(losses):
        return None
    return TrialGap(
        block_estimate([100 * (loss / other - 1) for loss, other in pairs]),
        block_estimate([loss - other for loss, other in pairs]),
    )


def block_estimate(numbers: Sequence[float]) -> Estimate:
    """The mean of numbers that come one after another and are not independent; its error by the means of BLOCKS blocks
    of almost the same length, None of fewer than two numbers a block."""
    count, mean = len(numbers), statistics.mean(numbers)
    if count < 2 * BLOCKS:
        return Estimate(mean, None, count)
    edges = [i * count // BLOCKS for i in range(BLOCKS + 1)]
    means = [statistics.mean(numbers[first:last]) for first, last in pairwise(edges)]
    return Estimate(mean, statistics.stdev(means) / math.sqrt(BLOCKS), BLOCKS, BLOCKS - 1)


def held_out_gap(trial: Trial, base: Trial) -> float | None:
    """Of the last held-out losses, in percent of the base's; None if either has none."""
    mine, other = trial.held_out_mean, base.held_out_mean
    return 100 * (mine / other - 1) if mine is not None and other else None


def step_seconds(trial: Trial, skip: int) -> float | None:
    """The median over the steps behind the first `skip`; None without any."""
    return statistics.median(trial.seconds[skip:]) if trial.seconds[skip:] else None


def trial_table(trials: Mapping[str, Trial], against: str | None, start: int, skip: int) -> str:
    """Markdown: each recipe beside the first one, the base, and `against`; notes below.

    start: steps done before the first. skip: how many at the beginning do not count.
    """
    base = next(iter(trials))
    if against == base:
        against = None
    validated = any(trial.held_out for trial in trials.values())
    heads = ["recipe", "training loss", f"above {base}", "nats per token", "beyond the noise"]
    heads += [f"above {against}", "beyond the noise"] if against is not None else []
    heads += ["time of a step", *(["held-out loss", f"held-out above {base}"] if validated else [])]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, trial in trials.items():
        cells = [name, _loss(trial, skip)]
        found = gap(trial, trials[base], skip) if name != base else None
        percent = None if found is None else found.percent
        cells += [percent_cell(percent), nats_cell(None if found is None else found.nats), beyond_cell(percent)]
        if against is not None:
            found = gap(trial, trials[against], skip) if name not in (base, against) else None
            percent = None if found is None else found.percent
            cells += [percent_cell(percent), beyond_cell(percent)]
        cells.append(_time(trial, trials[base], skip))
        if validated:
            mean, above = trial.held_out_mean, held_out_gap(trial, trials[base]) if name != base else None
            cells += ["-" if mean is None else f"{mean:.4f}", "-" if above is None else f"{above:+.2f}%"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_notes(trials, base, start, skip)])


def draw_trials(trials: Mapping[str, Trial], against: str | None, start: int, skip: int, target: str | Path) -> Path:
    """The table's gaps to the first recipe, with 95% intervals, and a dotted line at that of `against`; returns
    `target`. Raises ValueError if no recipe has a gap."""
    base = next(iter(trials))
    found = {name: gap(trial, trials[base], skip) for name, trial in trials.items() if name != base}
    rows = [Row(name, gap.percent) for name, gap in found.items() if gap is not None]
    if not rows:
        without = {name: why for name, trial in trials.items() if (why := _why_without_gap(trial, skip))}
        if base in without:
            raise ValueError(f"nothing to draw: {base}, which gaps are measured from, {without[base]}")
        raise ValueError(f"nothing to draw: {'; '.join(f'{name} {why}' for name, why in without.items())}")
    other = found.get(against or "")
    steps = max(len(trial.losses) for trial in trials.values())
    return draw_rows(
        rows,
        target,
        Words(
            f"training loss above {base} (%)", "mean of the steps", f"steps {start + skip + 1:,} to {start + steps:,}"
        ),
        mark=None if other is None else (f"{against}", other.percent.mean),
    )


def _why_without_gap(trial: Trial, skip: int) -> str | None:
    """Why no gap can be measured of a trial, or from it."""
    if trial.ended is not None:
        return trial.ended
    count = trial.losses[skip:].count(None)
    if not count:
        return None
    return f"has {counted(count, 'loss', 'losses')} that {'is' if count == 1 else 'are'} not finite"


def said(name: str, trial: Trial, base: Trial | None, skip: int) -> str:
    """A line about a recipe that has just been tried. base: None of the base itself."""
    seconds = f"{counted(len(trial.losses), 'step')} in {short_seconds(sum(trial.seconds))}"
    if trial.ended is not None:
        return f"{name}: {seconds}; {trial.ended}"
    found = gap(trial, base, skip) if base is not None else None
    return f"{name}: {seconds}, training loss {_loss(trial, skip)}" + (
        f", {percent_cell(found.percent)}" if found else ""
    )


def results(trials: Mapping[str, Trial], skip: int) -> dict[str, dict[str, Any]]:
    """The numbers of the table beside the first recipe, for programs."""
    base = next(iter(trials.values()))
    rows: dict[str, dict[str, Any]] = {}
    for name, trial in list(trials.items())[1:]:
        found = gap(trial, base, skip)
        rows[name] = {
            "percent": found and found.percent.mean,
            "percent_error": found and found.percent.error,
            "nats": found and found.nats.mean,
            "nats_error": found and found.nats.error,
            "beyond_noise": found and found.percent.beyond_noise,
            "held_out_percent": held_out_gap(trial, base),
        }
    return rows


def _notes(trials: Mapping[str, Trial], base: str, start: int, skip: int) -> Iterable[str]:
    steps = max(len(trial.losses) for trial in trials.values())
    first = f", without the first {skip}" if skip else ""
    yield (
        f"above: training loss over that of {base} in the same step, on the same tokens; mean of the steps "
        f"{start + skip + 1:,} to {start + steps:,}{first}. time of a step: the median."
    )
    if steps - skip < 2 * BLOCKS:
        yield f"Fewer than {2 * BLOCKS} steps count, which is too few for a standard error: give more --steps."
    else:
        yield (
            f"±: one standard error, by the means of {BLOCKS} blocks of steps. beyond the noise: zero is outside the "
            f"95% interval (Student's t, {BLOCKS - 1} degrees of freedom). It is the noise of this start alone: "
            "differences that matter are worth a second checkpoint, of another seed, and scripts/compare_starts.py."
        )
    of_all = [note for note in trials[base].notes if all(note in trial.notes for trial in trials.values())]
    yield from (f"all recipes: {note}" for note in of_all)
    for name, trial in trials.items():
        for note in (*([trial.ended] if trial.ended else []), *trial.notes):
            if note not in of_all:
                yield f"{name}: {note}"
        if trial.skipped:
            yield f"{name}: {counted(trial.skipped, 'step')} made no update (not finite, or a spike)"


def _loss(trial: Trial, skip: int) -> str:
    losses = [loss for loss in trial.losses[skip:] if loss is not None]
    return f"{statistics.mean(losses):.4f}" if losses and trial.ended is None else "-"


def _time(trial: Trial, base: Trial, skip: int) -> str:
    mine, other = step_seconds(trial, skip), step_seconds(base, skip)
    if mine is None or trial.ended is not None:
        return "-"
    return short_seconds(mine) if trial is base or not other else f"{mine / other:.2f} x"
