"""Runs beside each other: losses, gaps and throughput of some runs relative to the first, as a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from megatron_fp4.logging.other_settings import difference_line, differences, settings_of
from megatron_fp4.logging.picture import INK, legend_below, look, open_frame, picture, step_axis
from megatron_fp4.logging.plot import smooth, training_losses
from megatron_fp4.logging.run_folder import RunFolder, check_sources, open_run

# Of a run's steps: what its last training loss is the mean of.
_LAST_FRACTION = 0.02


@dataclass(frozen=True)
class RunCurve:
    """What a comparison needs of a run.

    steps, loss: [n] of the training steps, NaN where a step was skipped. validation: per source the (step, loss) that
    were measured. switches: steps of changes of precision. tokens, tokens_per_second: of the whole run; median.
    settings: of `other_settings.py`.
    """

    name: str
    steps: np.ndarray
    loss: np.ndarray
    validation: dict[str, dict[int, float]]
    switches: list[int]
    tokens: int
    tokens_per_second: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def last_loss(self) -> float:
        """Mean training loss of the last 2% of the steps, counted from step 0: of the same steps for a branch. NaN if
        none of them has a finite one."""
        end = self.steps[-1]
        last = self.loss[self.steps > end - max(1, round(_LAST_FRACTION * end))]
        finite = last[np.isfinite(last)]
        return float(finite.mean()) if finite.size else float("nan")


def read_run(run_dir: str | Path) -> RunCurve:
    """The curve of the run in `run_dir`, a folder or `name=folder`.

    Raises FileNotFoundError if there is no metrics.jsonl and ValueError if it has no steps yet.
    """
    return curve_of(open_run(run_dir))


def curve_of(run: RunFolder) -> RunCurve:
    """What a comparison needs of `run`."""
    numbers, losses = training_losses(run.steps)
    speeds = [record["tokens_per_second"] for record in run.steps if record.get("tokens_per_second") is not None]
    return RunCurve(
        name=run.name,
        steps=numbers,
        loss=losses,
        validation=run.validation,
        switches=[event["step"] for event in run.events if event["event"] == "switch"],
        tokens=run.steps[-1]["tokens"],
        tokens_per_second=statistics.median(speeds) if speeds else float("nan"),
        settings=settings_of(run.config),
    )


def read_runs(folders: Sequence[str | Path], sources: Sequence[str] = ()) -> list[RunCurve]:
    """`read_run` of each, with the validation losses of `sources` alone (default: of all).

    Raises ValueError too if two have the same name, which no picture could tell apart, or one was not validated on one
    of `sources`.
    """
    runs = [read_run(folder) for folder in folders]
    check_names([run.name for run in runs])
    if not sources:
        return runs
    for run in runs:
        check_sources(sources, list(run.validation), run.name)
    return [replace(run, validation={s: run.validation[s] for s in sources if s in run.validation}) for run in runs]


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError if two runs are called the same."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two runs are called {name}; give them names of their own: NAME=FOLDER")


def comparison_rows(runs: Sequence[RunCurve]) -> list[dict[str, Any]]:
    """Of each run: last training loss, last validation loss per source, both with their gap to the first run in
    percent (positive: worse), tokens per second with their ratio to the first run's, and in what else than its recipe
    it differs from that.

    Raises ValueError if the runs did not end at the same step: their last losses would not compare.
    """
    first = runs[0]
    for run in runs[1:]:
        if run.steps[-1] != first.steps[-1]:
            raise ValueError(
                f"{run.name} ended at step {run.steps[-1]} and {first.name} at {first.steps[-1]}; compare finished runs"
            )
    rows = []
    for run in runs:
        losses = {"training": (run.last_loss, first.last_loss)}
        for source, points in run.validation.items():
            if source in first.validation and max(points) == max(first.validation[source]):
                losses[source] = (points[max(points)], first.validation[source][max(points)])
        rows.append(
            {
                "run": run.name,
                "tokens": run.tokens,
                "losses": {what: loss for what, (loss, _) in losses.items()},
                "gaps": {what: 100 * (loss - of_first) / of_first for what, (loss, of_first) in losses.items()},
                "tokens_per_second": run.tokens_per_second,
                "speed": run.tokens_per_second / first.tokens_per_second,
                "differences": differences(run.settings, first.settings),
            }
        )
    return rows


def comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table, and below it a line for each run whose gap is not the recipe's alone."""
    names = list(rows[0]["losses"])
    lines = [
        "| run | " + " | ".join(f"{name} loss | gap" for name in names) + " | tokens/s | of the first |",
        "|---|" + "---|" * (2 * len(names) + 2),
    ]
    for row in rows:
        cells = [row["run"]]
        for name in names:
            loss, gap = row["losses"].get(name), row["gaps"].get(name)
            cells += ["-" if loss is None or not np.isfinite(loss) else f"{loss:.4f}"]
            cells += ["-" if gap is None or not np.isfinite(gap) else f"{gap:+.2f}%"]
        thousands = row["tokens_per_second"] / 1e3
        cells += [f"{thousands:,.{0 if thousands >= 10 else 1}f}k", f"{row['speed']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    if unlike := [row for row in rows if row["differences"]]:
        first = rows[0]["run"]
        lines += ["", *(difference_line(row["run"], first, row["differences"]) for row in unlike)]
    return "\n".join(lines)


def plot_comparison(runs: Sequence[RunCurve], target: str | Path) -> Path:
    """Draw smoothed training losses, and below them the gap of each run to the first in percent; returns `target`.

    The gap is of the training losses of the same steps (the same tokens, if data and seed were the same), smoothed, and
    as dots that of the validation losses averaged over sources. Switches of precision are marked.
    """
    first, target = runs[0], Path(target)
    settings = {"figsize": (10, 7.6), "dpi": 150, "sharex": True, "height_ratios": (3, 2)}
    with picture(target, 2, 1, **settings) as (figure, (above, below)):
        for index, run in enumerate(runs):
            style = look(index)
            above.plot(run.steps, smooth(run.loss), label=f"{run.name}: training", **style.line(linewidth=1.5))
            for step in run.switches:
                for axes in (above, below):
                    axes.axvline(step, color=style.color, linewidth=1.0, linestyle=":")
        draw_gaps(below, runs)
        finite = first.loss[np.isfinite(first.loss)]
        if finite.size:
            above.set_ylim(finite.min() - 0.1, np.percentile(finite, 97))
        above.set_ylabel("training loss, smoothed\n(nats per token)")
        if any(run.switches for run in runs):
            above.set_title("dotted: precision switches")
        below.set_xlabel("step")
        step_axis(below, max(run.steps[-1] for run in runs))
        for axes in (above, below):
            open_frame(axes)
        legend_below(figure, (above, below))
    return target


def draw_gaps(axes: Axes, runs: Sequence[RunCurve], first_look: int = 0) -> None:
    """How far each run is above the first, in percent of its loss: a curve for training, markers for validation.

    first_look: the number of the first run's look; those of the others follow.
    """
    first = runs[0]
    axes.axhline(0, color=INK, linewidth=1.0)
    for index, run in enumerate(runs[1:], start=1):
        style = look(first_look + index)
        _, of_run, of_first = np.intersect1d(run.steps, first.steps, return_indices=True)
        gap = 100 * (run.loss[of_run] - first.loss[of_first]) / first.loss[of_first]
        # No label: the curve of the same run above it has one.
        axes.plot(run.steps[of_run], smooth(gap), **style.line(linewidth=1.5))
        points = _validation_gaps(run, first)
        if points:
            axes.plot(
                list(points), list(points.values()), color=style.color, linestyle="none", marker=style.marker,
                markersize=5.5, label=f"{run.name}: validation, {_mean_of(run)}",
            )  # fmt: skip
    axes.set_ylabel(f"loss above {first.name} (%)")


def _mean_of(run: RunCurve) -> str:
    """What a mean over the sources of a run is of: their names if they are few."""
    return "mean of the sources" if len(run.validation) > 2 else " and ".join(run.validation)


def _validation_gaps(run: RunCurve, first: RunCurve) -> dict[int, float]:
    """Step -> gap of the mean over sources to the first run's, in percent, where both measured all sources."""
    sources = [source for source in run.validation if source in first.validation]
    if not sources:
        return {}
    steps = sorted(set.intersection(*(set(of.validation[s]) for of in (run, first) for s in sources)))
    return {
        step: 100
        * (sum(run.validation[s][step] for s in sources) / sum(first.validation[s][step] for s in sources) - 1)
        for step in steps
    }
