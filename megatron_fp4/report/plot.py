"""The picture of a run: losses over steps from `metrics.jsonl`, with its phases, decay and precision switch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megatron_fp4.report.console import short_number
from megatron_fp4.report.metrics import records_of_run, steps_of
from megatron_fp4.report.picture import COLORS, open_frame, picture

_TRAINING, *_SOURCES = COLORS
_PHASES = ("#eef3f8", "#fbf3e6", "#eef6ee", "#f6eef5")
# Of the steps: long enough to show the trend, short enough to follow the decay.
_SMOOTHING_FRACTION = 0.02


def plot_loss(run_dir: str | Path) -> Path:
    """Draw `run_dir`/metrics.jsonl as `run_dir`/loss.png and return its path.

    Training loss (raw and smoothed) and validation loss per source, in nats per token; data phases are shaded. Of the
    `run` records it uses, where given: `decay_start` (step), and `unigram_entropy` (nats per token, a number or
    source -> number), the loss of a model that only knows token frequencies. Events named `switch` are marked.

    Raises FileNotFoundError if there is no metrics.jsonl and ValueError if it has no steps yet.
    """
    records = records_of_run(run_dir)
    steps = steps_of(records, run_dir)
    facts = {key: value for record in records if record["kind"] == "run" for key, value in record.items()}
    target = Path(run_dir) / "loss.png"
    with picture(target, figsize=(10, 5.6), dpi=150) as (_, axes):
        x, loss = training_losses(steps)
        axes.plot(x, loss, color=_TRAINING, alpha=0.22, linewidth=0.8)
        axes.plot(x, smooth(loss), color=_TRAINING, linewidth=1.8, label="training (smoothed)")
        validations = [record for record in records if record["kind"] == "validation"]
        _draw_validation(axes, validations)
        _draw_entropy(axes, facts.get("unigram_entropy"))
        _frame(axes, x, loss, validations)
        _shade_phases(axes, steps)
        _mark_events(axes, facts.get("decay_start"), [record for record in records if record["kind"] == "event"])
        tokens = short_number(steps[-1]["tokens"])
        plans = ", then ".join(dict.fromkeys(record["plan"] for record in steps))
        axes.set_title(f"{Path(run_dir).resolve().name}: {plans}; {tokens} tokens", loc="left", pad=22)
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none", loc="upper right")
    return target


def training_losses(steps: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the steps, and their losses, NaN where one was not finite: both [n]."""
    losses = [math.nan if record["loss"] is None else record["loss"] for record in steps]
    return np.array([record["step"] for record in steps]), np.array(losses)


def smooth(values: np.ndarray) -> np.ndarray:
    """Moving average of [n] values over 2% of them, NaN left out (and NaN where nothing else is in reach).

    The window is centered, so that it does not lag behind a falling loss; it shrinks towards the first value, where
    the loss falls fastest, and is cut off at the last, where one value says little. O(n).
    """
    count = len(values)
    half = max(1, round(_SMOOTHING_FRACTION * count / 2))
    index = np.arange(count)
    start = index - np.minimum(half, index)
    end = np.minimum(index + (index - start), count - 1) + 1
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    inside = counts[end] - counts[start]
    return np.where(inside > 0, (sums[end] - sums[start]) / np.maximum(inside, 1), math.nan)


def _draw_validation(axes: Axes, records: list[dict[str, Any]]) -> None:
    sources = list(dict.fromkeys(source for record in records for source in record["losses"]))
    for index, source in enumerate(sources):
        points = [(record["step"], record["losses"].get(source)) for record in records]
        x, y = zip(*[(step, loss) for step, loss in points if loss is not None] or [(math.nan, math.nan)], strict=True)
        color = _SOURCES[index % len(_SOURCES)]
        label = f"validation: {source} ({y[-1]:.3f})"
        axes.plot(x, y, color=color, linewidth=1.4, marker="o", markersize=3.5, label=label)


def _draw_entropy(axes: Axes, entropy: float | dict[str, float] | None) -> None:
    if entropy is None:
        return
    lines = entropy if isinstance(entropy, dict) else {"": entropy}
    # Sources keep the order, and so the colours, of the validation curves.
    for index, (source, value) in enumerate(lines.items()):
        color = _SOURCES[index % len(_SOURCES)] if source else "#444444"
        label = f"unigram entropy{f': {source}' if source else ''} ({value:.2f})"
        axes.axhline(value, color=color, linewidth=1.0, linestyle=(0, (5, 3)), alpha=0.75, label=label)


def _frame(axes: Axes, x: np.ndarray, loss: np.ndarray, validations: list[dict[str, Any]]) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(0, max(1, x[-1]) * 1.01)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    finite = loss[np.isfinite(loss)]
    if finite.size:
        shown = [value for record in validations for value in record["losses"].values() if value is not None]
        # The first steps fall from ln(vocabulary), and a spike would flatten everything else.
        top = max(np.percentile(finite, 99.5), *shown, finite.min() + 0.1)
        bottom = min(finite.min(), *shown, top)
        axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.04 * (top - bottom))
    open_frame(axes)


def _shade_phases(axes: Axes, steps: list[dict[str, Any]]) -> None:
    spans: list[tuple[str, int, int]] = []
    for record in steps:
        if spans and spans[-1][0] == record["phase"]:
            spans[-1] = (*spans[-1][:2], record["step"])
        else:
            spans.append((record["phase"], record["step"] - 1, record["step"]))
    for index, (phase, start, end) in enumerate(spans):
        axes.axvspan(start, end, color=_PHASES[index % len(_PHASES)], zorder=-10, linewidth=0)
        if len(spans) > 1:
            axes.annotate(
                phase,
                ((start + end) / 2, 0.015),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize=8.5,
                color="#5a6570",
            )


def _mark_events(axes: Axes, decay_start: int | None, events: list[dict[str, Any]]) -> None:
    marks: dict[int, list[str]] = {}
    if decay_start is not None:
        marks.setdefault(decay_start, []).append("decay starts")
    for event in events:
        if event["event"] == "switch":
            target = f" to {event['target']}" if "target" in event else ""
            marks.setdefault(event["step"], []).append(f"switch{target}")
    for step, texts in marks.items():
        axes.axvline(step, color="#333333", linewidth=1.0, linestyle=":")
        axes.annotate(
            ", ".join(texts),
            (step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color="#333333",
        )
