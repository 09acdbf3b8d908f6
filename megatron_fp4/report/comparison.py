"""Runs beside each other: losses, gaps and throughput of some runs relative to the first, as a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fp4.report.metrics import records_of_run, steps_of
from megatron_fp4.report.picture import COLORS, open_frame, picture
from megatron_fp4.report.plot import smooth, training_losses

# Of a run's steps: what its last training loss is the mean of.
_LAST_FRACTION = 0.02


@dataclass(frozen=True)
class RunCurve:
    """What a comparison needs of a run.

    steps, loss: [n] of the training steps, NaN where a step was skipped. validation: per source the (step, loss) that
    were measured. switches: steps of changes of precision. tokens, tokens_per_second: of the whole run; median.
    """

    name: str
    steps: np.ndarray
    loss: np.ndarray
    validation: dict[str, dict[int, float]]
    switches: list[int]
    tokens: int
    tokens_per_second: float

    @property
    def last_loss(self) -> float:
        """Mean training loss of the last 2% of the steps."""
        return float(np.nanmean(self.loss[-max(1, round(_LAST_FRACTION * len(self.loss))) :]))


def read_run(run_dir: str | Path) -> RunCurve:
    """The curve of the run in `run_dir`.

    Raises FileNotFoundError if there is no metrics.jsonl and ValueError if it has no steps yet.
    """
    records = records_of_run(run_dir)
    steps = steps_of(records, run_dir)
    numbers, losses = training_losses(steps)
    validation: dict[str, dict[int, float]] = {}
    for record in records:
        for source, loss in record.get("losses", {}).items() if record["kind"] == "validation" else ():
            if loss is not None:
                validation.setdefault(source, {})[record["step"]] = loss
    return RunCurve(
        name=Path(run_dir).resolve().name,
        steps=numbers,
        loss=losses,
        validation=validation,
        switches=[r["step"] for r in records if r["kind"] == "event" and r["event"] == "switch"],
        tokens=steps[-1]["tokens"],
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in steps),
    )


def comparison_rows(runs: Sequence[RunCurve]) -> list[dict[str, Any]]:
    """Of each run: last training loss, last validation loss per source, both with their gap to the first run in
    percent (positive: worse), and tokens per second with their ratio to the first run's.

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
            }
        )
    return rows


def comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    names = list(rows[0]["losses"])
    lines = [
        "| run | " + " | ".join(f"{name} loss | gap" for name in names) + " | tokens/s | of the first |",
        "|---|" + "---|" * (2 * len(names) + 2),
    ]
    for row in rows:
        cells = [row["run"]]
        for name in names:
            loss, gap = row["losses"].get(name), row["gaps"].get(name)
            cells += ["-", "-"] if loss is None else [f"{loss:.4f}", f"{gap:+.2f}%"]
        cells += [f"{row['tokens_per_second'] / 1e3:,.0f}k", f"{row['speed']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot_comparison(runs: Sequence[RunCurve], target: str | Path) -> Path:
    """Draw smoothed training losses, and below them the gap of each run to the first in percent; returns `target`.

    The gap is of the training losses of the same steps (the same tokens, if data and seed were the same), smoothed, and
    as dots that of the validation losses averaged over sources. Switches of precision are marked.
    """
    first, target = runs[0], Path(target)
    settings = {"figsize": (10, 7.2), "dpi": 150, "sharex": True, "height_ratios": (3, 2)}
    with picture(target, 2, 1, **settings) as (_, (above, below)):
        for index, run in enumerate(runs):
            color = COLORS[index % len(COLORS)]
            above.plot(run.steps, smooth(run.loss), color=color, linewidth=1.5, label=run.name)
            for step in run.switches:
                for axes in (above, below):
                    axes.axvline(step, color=color, linewidth=1.0, linestyle=":")
            if index:
                count = min(len(run.loss), len(first.loss))
                gap = 100 * (run.loss[:count] - first.loss[:count]) / first.loss[:count]
                below.plot(run.steps[:count], smooth(gap), color=color, linewidth=1.5, label=f"{run.name}: training")
                points = _validation_gaps(run, first)
                below.plot(
                    list(points), list(points.values()), color=color, linestyle="none", marker="o", markersize=4,
                    label=f"{run.name}: validation",
                )  # fmt: skip
        finite = first.loss[np.isfinite(first.loss)]
        above.set_ylim(finite.min() - 0.1, np.percentile(finite, 97))
        above.set_ylabel("training loss, smoothed (nats per token)")
        above.set_title(f"{', '.join(run.name for run in runs)}", loc="left")
        below.axhline(0, color=COLORS[0], linewidth=1.0)
        below.set_ylabel(f"loss above {first.name} (%)")
        below.set_xlabel("step")
        for axes in (above, below):
            open_frame(axes)
            axes.legend(frameon=False)
    return target


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
