"""The picture of a run: losses over steps from `metrics.jsonl`, with its phases, decay and precision switch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from megatron_fp4.logging.picture import (
    BLACK,
    INK,
    legend_below,
    look,
    mark_steps,
    open_frame,
    picture,
    shade_spans,
    step_axis,
)
from megatron_fp4.logging.run_folder import RunFolder, open_run
from megatron_fp4.logging.words import short_number

# Of the steps: long enough to show the trend, short enough to follow the decay.
_SMOOTHING_FRACTION = 0.02
# Of a drawn curve: more than a picture has dots.
_POINTS = 2000


def plot_loss(run_dir: str | Path, baseline: str | Path | None = None) -> Path:
    """Draw `run_dir`/metrics.jsonl as `run_dir`/loss.png and return its path.

    Training loss (raw and smoothed) and validation loss per source, in nats per token; data phases are shaded. Of the
    `run` records it uses, where given: `decay_start` (step), and `unigram_entropy` (nats per token, a number or
    source -> number), the loss of a model that only knows token frequencies. Events named `switch` are marked.
    baseline: another run, as a folder or `name=folder`, whose losses are drawn beside them after the same tokens.

    Raises FileNotFoundError if there is no metrics.jsonl and ValueError if it has no steps yet.
    """
    run = open_run(run_dir)
    other = None if baseline is None else open_run(baseline)
    target = run.path / "loss.png"
    with picture(target, figsize=(10, 6.2), dpi=150) as (figure, axes):
        draw_losses(axes, run, other)
        tokens = short_number(run.steps[-1]["tokens"])
        plans = ", then ".join(dict.fromkeys(str(record.get("plan", "unknown")) for record in run.steps))
        beside = "" if other is None else f", beside {other.name}"
        axes.set_title(f"{run.name}: {plans}; {tokens} tokens{beside}", pad=32)
        legend_below(figure, axes)
    return target


def draw_losses(axes: Axes, run: RunFolder, other: RunFolder | None = None) -> None:
    """All that `loss.png` has inside and around its frame; title and legend are the caller's.

    A source keeps its colour and marker in both runs; the other run's curves are dashed, its markers hollow.
    """
    x, loss = training_losses(run.steps)
    sources = list(run.validation)
    looks = {source: look(index + 1) for index, source in enumerate(sources)}
    axes.plot(*thinned(x, loss), color=look(0).color, alpha=0.22, linewidth=0.8)
    axes.plot(*thinned(x, smooth(loss)), color=look(0).color, linewidth=1.8, label="training, smoothed")
    for source, points in run.validation.items():
        label = f"validation, {source} ({list(points.values())[-1]:.3f})"
        axes.plot(list(points), list(points.values()), label=label, **_solid(looks[source]))
    shown = [loss for points in run.validation.values() for loss in points.values()]
    if other is not None:
        base, base_loss = training_losses(other.steps)
        at = same_tokens(run, other, base)
        dashed: dict[str, Any] = {"linestyle": (0, (3, 1.5)), "linewidth": 1.4}
        axes.plot(*thinned(at, smooth(base_loss)), color=BLACK, label=f"{other.name}: training, smoothed", **dashed)
        for source, points in other.validation.items():
            at = same_tokens(run, other, np.array(list(points)))
            last = [value for place, value in zip(at, points.values(), strict=True) if math.isfinite(place)]
            if not last:
                continue
            shown += last
            style = looks.get(source) or look(len(looks) + 1)
            axes.plot(
                at, list(points.values()), color=style.color, marker=style.marker, markersize=5.5,
                markerfacecolor="none", label=f"{other.name}: validation, {source} ({last[-1]:.3f})", **dashed,
            )  # fmt: skip
    _draw_entropy(axes, run.facts.get("unigram_entropy"), sources)
    axes.set_ylabel("loss (nats per token)")
    step_axis(axes, x[-1])
    limit_losses(axes, loss, shown)
    open_frame(axes)
    shade_spans(axes, run.spans)
    mark_steps(axes, marks_of(run))


def same_tokens(run: RunFolder, other: RunFolder, steps: np.ndarray) -> np.ndarray:
    """Steps of `run` [n], in general fractions, that have seen as many tokens as the `steps` [n] of `other`; NaN behind
    the last step of either."""
    own = np.array([[record["step"], record["tokens"]] for record in run.steps], dtype=float)
    theirs = np.array([[record["step"], record["tokens"]] for record in other.steps], dtype=float)
    tokens = np.interp(steps, theirs[:, 0], theirs[:, 1], right=math.nan)
    return np.interp(tokens, own[:, 1], own[:, 0], right=math.nan)


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


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A curve [n] with at most 2,000 points or so, extremes of each piece kept; NaN stays a gap."""
    if len(values) <= _POINTS:
        return steps, values
    kept: set[int] = {0, len(values) - 1}
    for piece in np.array_split(np.arange(len(values)), _POINTS // 2):
        finite = piece[np.isfinite(values[piece])]
        low_high = (finite[values[finite].argmin()], finite[values[finite].argmax()]) if finite.size else (piece[0],)
        kept.update(map(int, low_high))
    index = np.array(sorted(kept))
    return steps[index], values[index]


def limit_losses(axes: Axes, loss: np.ndarray, shown: Sequence[float]) -> None:
    """A vertical axis for training losses [n], on which all `shown` values are to be seen."""
    finite = loss[np.isfinite(loss)]
    if finite.size:
        # The first steps fall from ln(vocabulary), and a spike would flatten everything else.
        top = max(np.percentile(finite, 99.5), *shown, finite.min() + 0.1)
        bottom = min(finite.min(), *shown, top)
        axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.04 * (top - bottom))


def marks_of(run: RunFolder) -> dict[float, str]:
    """What pictures of a run mark on its steps: where the decay starts, and switches of precision."""
    marks: dict[float, list[str]] = {}
    decay_start, last = run.facts.get("decay_start"), run.steps[-1]["step"]
    if isinstance(decay_start, int) and decay_start <= last:
        marks.setdefault(decay_start, []).append("decay starts")
    for event in run.events:
        if event["event"] == "switch":
            target = f" to {event['target']}" if "target" in event else ""
            marks.setdefault(event["step"], []).append(f"switch{target}")
    return {step: ", ".join(texts) for step, texts in marks.items()}


def _solid(style: Any) -> dict[str, Any]:
    return {"color": style.color, "linewidth": 1.4, "marker": style.marker, "markersize": 4.0}


def _draw_entropy(axes: Axes, entropy: float | dict[str, float] | None, sources: Sequence[str]) -> None:
    if entropy is None:
        return
    for source, value in (entropy if isinstance(entropy, dict) else {"": entropy}).items():
        style = look(sources.index(source) + 1) if source in sources else None
        label = f"unigram entropy{f', {source}' if source else ''} ({value:.2f})"
        axes.axhline(
            value, color=INK if style is None else style.color, linewidth=1.0, linestyle=(0, (1, 2.5)), label=label
        )
        if style is not None:  # the line alone is one of colour only
            axes.plot(
                [0.99], [value], marker=style.marker, markersize=4.5, color=style.color,
                transform=axes.get_yaxis_transform(),
            )  # fmt: skip
