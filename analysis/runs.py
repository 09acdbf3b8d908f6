"""Compares runs with the first one: losses, gaps and throughput, as a table and a picture; and the settings in which
runs differ besides the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.statistics import block_estimate, gap_text
from megatron_fp4.checkpoint.config_diff import NOT_OF_THE_MODEL
from megatron_fp4.logging.console import markdown
from megatron_fp4.logging.pictures import draw_gaps, draw_training, legend_below, look, picture, step_axis
from megatron_fp4.logging.run_folder import RunFolder

# Section -> keys that change losses by more than rounding and are not part of the recipe; None: all except _IGNORED.
_SECTIONS = {
    "model": None,
    "data": None,
    "train": ("steps", "global_batch_size", "sequence_length"),
    "optimizer": None,
    "schedule": None,
    "validation": ("num_samples",),
}
_IGNORED = (
    *(f"model.{key}" for key in NOT_OF_THE_MODEL),
    *("data.cache_dir", "data.num_workers", "data.max_epochs", "data.blends"),
)


def compare_runs(runs: Sequence[RunFolder]) -> str:
    """A Markdown table with each run's last training loss, last validation loss by source, the gaps of both to the
    first run, and tokens per second; below it the settings in which runs differ besides the recipe.

    Raises ValueError if the runs did not end at the same step.
    """
    first = runs[0]
    for run in runs:
        if run.steps[-1]["step"] != first.steps[-1]["step"]:
            ends = f"{run.name} ended at step {run.steps[-1]['step']} and {first.name} at {first.steps[-1]['step']}"
            raise ValueError(f"{ends}; compare runs that end at the same step")
    names = list(dict.fromkeys(name for run in runs for name in run.validation))
    heads = ["run", "training loss", "gap", *(head for name in names for head in (f"{name} loss", "gap")), "tokens/s"]
    rows = []
    for run in runs:
        last, gaps = run.last_losses, _last_gaps(run, first)
        cells = [run.name, f"{last.mean():.4f}" if last.size else "-"]
        cells.append(gap_text(block_estimate(list(gaps))) if run is not first and gaps.size else "-")
        for name in names:
            points, base = run.validation.get(name, {}), first.validation.get(name, {})
            step = max(points, default=0)
            cells.append(f"{points[step]:.4f}" if points else "-")
            one = run is not first and points and step == max(base, default=0)
            cells.append(gap_text(block_estimate([100 * (points[step] / base[step] - 1)])) if one else "-")
        speed = run.series("tokens_per_second")[1]
        cells.append(f"{np.nanmedian(speed) / 1e3:,.1f}k" if np.isfinite(speed).any() else "-")
        rows.append(cells)
    notes = [
        "gap: to the first run, in percent. [95% interval]: from the variance over the last steps of these two runs; "
        "other seeds add more. no interval: too few steps, or one measurement; compare recipes over several seeds.",
        *(
            difference_line(run.name, first.name, found)
            for run in runs[1:]
            if (found := differences(settings_of(run.config), settings_of(first.config)))
        ),
    ]
    return markdown(heads, rows, notes)


def _last_gaps(run: RunFolder, first: RunFolder) -> np.ndarray:
    """The gaps of the training losses in percent, for the last 2% of the steps."""
    (steps, loss), (base_steps, base_loss) = run.series("loss"), first.series("loss")
    _, mine, theirs = np.intersect1d(steps, base_steps, return_indices=True)
    gaps = 100 * (loss[mine] / base_loss[theirs] - 1)
    gaps = gaps[max(0, len(gaps) - len(run.last_losses)) :]
    return gaps[np.isfinite(gaps)]


def draw_runs(runs: Sequence[RunFolder], target: Path) -> Path:
    """Draw smoothed training losses, and below them the gap of each run to the first, in percent; returns `target`."""
    settings = {"figsize": (10, 7.6), "dpi": 150, "sharex": True, "height_ratios": (3, 2)}
    with picture(target, 2, 1, **settings) as (figure, (above, below)):
        looks = [look(index) for index in range(len(runs))]
        draw_training(above, runs, looks)
        for run, style in zip(runs, looks, strict=True):
            for event in run.happened("switch"):
                above.axvline(event["step"], color=style.color, linewidth=1.0, linestyle=":")
        draw_gaps(below, runs[0], runs[1:], looks[1:])
        for axes in (above, below):
            step_axis(axes, max(run.steps[-1]["step"] for run in runs))
        legend_below(figure, (above, below))
    return target


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a saved configuration that affect losses, besides the recipe: `section.key` -> value. `data.seed`
    has the name "data.seed or run.seed", because `run.seed` is its default."""
    found: dict[str, Any] = {}
    for section, keys in _SECTIONS.items():
        for key, value in (config.get(section) or {}).items():
            if f"{section}.{key}" not in _IGNORED and (keys is None or key in keys):
                found[f"{section}.{key}"] = _without_null(value)
    of_data = found.pop("data.seed", None)
    order = (config.get("run") or {}).get("seed") if of_data is None else of_data
    return found if order is None else found | {"data.seed or run.seed": order}


def _without_null(value: Any) -> Any:
    """The value without keys that are null, because newer versions have more of them."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The settings that both runs have with different values; short values are included. Of held-out sources, only
    those of both runs are compared."""
    found = []
    for name in mine:
        one, other = mine[name], theirs.get(name, mine[name])
        if name == "data.validation" and isinstance(one, Mapping) and isinstance(other, Mapping):
            one, other = ({source: of[source] for source in one if source in other} for of in (one, other))
        if one != other:
            short = not isinstance(one, Mapping | list) and not isinstance(other, Mapping | list)
            found.append(f"{name} ({one}, not {other})" if short else name)
    return found


def difference_line(name: str, other: str, found: Sequence[str]) -> str:
    """A note for a table with the gap of run `name` to run `other`."""
    return f"not only the recipe: {name} also differs from {other} in {', '.join(found)}"
