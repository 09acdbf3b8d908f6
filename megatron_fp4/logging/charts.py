"""The figures of a report, as SVG to stand inside a page, of one run or of several over each other.

A figure is small, so that its letters can still be read on a phone, where it is as wide as the screen. Long curves are
thinned: each piece keeps its smallest and its largest value.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_fp4.logging.comparison import curve_of, draw_gaps
from megatron_fp4.logging.goodput import ORDER, Goodput, goodput_of
from megatron_fp4.logging.heatmap import DEFAULT_QUANTITIES, draw_panel, linears_of, missing_legend
from megatron_fp4.logging.picture import (
    COLORS,
    INK,
    drawing,
    legend_below,
    look,
    mark_steps,
    open_frame,
    picture,
    shade_spans,
    step_axis,
)
from megatron_fp4.logging.plot import limit_losses, marks_of, same_tokens, smooth, thinned, training_losses
from megatron_fp4.logging.run_folder import RunFolder, named_run
from megatron_fp4.logging.words import counted, short_number, short_time

_SIZE = (5.4, 3.3)
_HATCHES = ("", "///", "...", "\\\\\\", "xx", "++", "oo", "--", "**", "||", "//")


def losses(runs: Sequence[RunFolder], baseline: RunFolder | None = None) -> str:
    """Of one run: its training loss, raw and smoothed, with phases and switches. Of several, and of the baseline, which
    stands where the first run had the same tokens: smoothed."""
    every = [*runs, *([] if baseline is None else [baseline])]
    curves, seen = [training_losses(run.steps) for run in every], []
    with drawing(figsize=_SIZE) as (figure, axes):
        for index, (run, (steps, loss)) in enumerate(zip(every, curves, strict=True)):
            style, at = look(index), same_tokens(runs[0], run, steps) if run is baseline else steps
            seen.append(loss[np.isfinite(at)])
            if len(every) == 1:
                axes.plot(*thinned(steps, loss), color=style.color, alpha=0.25, linewidth=0.7)
            label = f"{run.name}, smoothed" if len(every) > 1 else "training loss, smoothed"
            axes.plot(*thinned(at, smooth(loss)), label=label, **style.line(linewidth=1.5))
        axes.set_ylabel("loss (nats per token)")
        limit_losses(axes, np.concatenate(seen), [])
        _steps(axes, runs, names=True)
        legend_below(figure, axes)
        return svg(figure, "training loss")


def source_losses(runs: Sequence[RunFolder], source: str, baseline: RunFolder | None = None) -> str:
    """Held-out losses of one source, beside its unigram entropy where that is known. baseline: as for `losses`."""
    every = [*runs, *([] if baseline is None else [baseline])]
    with drawing(figsize=_SIZE) as (figure, axes):
        for index, run in enumerate(every):
            if points := run.validation.get(source):
                steps, values = np.array(list(points)), np.array(list(points.values()))
                at = same_tokens(runs[0], run, steps) if run is baseline else steps
                if not np.isfinite(at).any():
                    continue
                label = f"{run.name} ({values[np.isfinite(at)][-1]:.3f})" if len(every) > 1 else "validation loss"
                axes.plot(at, values, label=label, **look(index).points(linewidth=1.5))
        entropy = runs[0].facts.get("unigram_entropy")
        if isinstance(entropy, dict) and isinstance(entropy.get(source), int | float):
            value = entropy[source]
            axes.axhline(value, color=INK, linewidth=1, linestyle=":", label=f"unigram entropy ({value:.2f})")
        axes.set_ylabel("loss (nats per token)")
        _steps(axes, runs)
        legend_below(figure, axes)
        return svg(figure, f"held-out loss of {source}")


def gaps(runs: Sequence[RunFolder], baseline: RunFolder, shift: int = 0) -> str | None:
    """How far runs are above the baseline, in percent, of those with the same batches; None if there are none.

    shift: the number of the first run's look, since a run looks the same in all figures.
    """
    compared = [(shift + index, run) for index, run in enumerate(runs) if run.same_batches(baseline)]
    if not compared:
        return None
    with drawing(figsize=_SIZE) as (figure, axes):
        for index, run in compared:
            axes.plot([], [], label=f"{run.name}: training, smoothed", **look(index).line())
            draw_gaps(axes, [curve_of(baseline), curve_of(run)], first_look=index - 1)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, -0.1), max(high, 0.1))  # rounding errors are no gaps
        _steps(axes, [baseline, *runs] if shift else runs)
        legend_below(figure, axes)
        return svg(figure, f"loss above {baseline.name} in percent")


def series(
    runs: Sequence[RunFolder], field: str, label: str, *, smoothed: bool = True, scale: float = 1.0
) -> str | None:
    """A number that steps have; None if none of the runs has it. scale: what to multiply it by."""
    every = [run.series(field) for run in runs]
    if not any(np.isfinite(values).any() for _, values in every):
        return None
    with drawing(figsize=_SIZE) as (figure, axes):
        tops = []
        for index, (run, (steps, values)) in enumerate(zip(runs, every, strict=True)):
            style, there = look(index), np.isfinite(values)
            name = run.name if len(runs) > 1 else None
            if not there.any():
                continue
            steps, values = steps[there], values[there] * scale  # some numbers come only now and then
            if smoothed:
                axes.plot(*thinned(steps, values), color=style.color, alpha=0.25, linewidth=0.7)
                values = smooth(values)
            tops.append(np.percentile(values, 99.5))
            axes.plot(*thinned(steps, values), label=name, **style.line(linewidth=1.5))
        if smoothed:  # one slow first step must not flatten all others
            axes.set_ylim(0, max(max(tops) * 1.25, 1e-9))
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
        _steps(axes, runs)
        legend_below(figure, axes)
        return svg(figure, label)


def gradient_noise(runs: Sequence[RunFolder]) -> str | None:
    """The measured ratio of gradients to their quantization noise; None if no run measured it."""
    points = [
        {r["step"]: r["ratio"] for r in run.of("gradient_noise") if isinstance(r.get("ratio"), int | float)}
        for run in runs
    ]
    if not any(points):
        return None
    with drawing(figsize=_SIZE) as (figure, axes):
        for index, (run, values) in enumerate(zip(runs, points, strict=True)):
            label = run.name if len(runs) > 1 else None
            axes.plot(list(values), list(values.values()), label=label, **look(index).points(linewidth=1.5))
        axes.set_ylabel("gradient over its quantization noise")
        _steps(axes, runs)
        legend_below(figure, axes)
        return svg(figure, "gradient over its quantization noise")


def diagnostics(run: RunFolder) -> list[str]:
    """A heatmap each for the usual quantities, as PNG in an `img` (the cells of a large model would make a large SVG);
    none if the run measured nothing."""
    records = run.of("diagnostics")
    if not records:
        return []
    linears, pictures = linears_of(records), []
    height = 1.5 + min(11.0, max(1.2, 0.16 * len(linears)))
    for quantity in DEFAULT_QUANTITIES:
        with drawing(figsize=(6.6, height), dpi=150) as (figure, axes):
            draw_panel(figure, axes, records, linears, quantity)
            axes.invert_yaxis()
            axes.set_xlabel("step")
            missing_legend(figure)
            file = io.BytesIO()
            figure.savefig(file, format="png", metadata={"Software": None})
            data = base64.b64encode(file.getvalue()).decode()
            pictures.append(f'<img alt="{quantity} by linear and step" src="data:image/png;base64,{data}">')
    return pictures


def goodput(runs: Sequence[tuple[str, Goodput]]) -> str:
    """A bar for each run: where its wall time went, in percent."""
    with drawing(figsize=(_SIZE[0], 1.9 + 0.4 * len(runs))) as (figure, axes):
        draw_goodput(axes, runs)
        legend_below(figure, axes)
        return svg(figure, "shares of the wall time")


def plot_goodput(run_dir: str | Path) -> Path | None:
    """Draw where the wall time of the run in `run_dir` went, as its goodput.png; None if it has no ledger."""
    found = goodput_of(run_dir)
    if found is None:
        return None
    name, path = named_run(run_dir)
    with picture(path / "goodput.png", figsize=(9, 2.6), dpi=150) as (figure, axes):
        draw_goodput(axes, [(name, found)])
        axes.set_title(f"goodput {found.share:.1%} of {short_time(found.wall)}, {counted(len(found.starts), 'start')}")
        legend_below(figure, axes)
    return path / "goodput.png"


def draw_goodput(axes: Axes, runs: Sequence[tuple[str, Goodput]]) -> None:
    """Bars of shares, told apart by colour and hatch."""
    ends = np.zeros(len(runs))
    for index, kind in enumerate(ORDER):  # a kind looks the same in every picture
        if not any(kind in found.seconds for _, found in runs):
            continue
        shares = np.array([100 * found.seconds.get(kind, 0.0) / found.wall for _, found in runs])
        label = f"{kind} ({shares[0]:.1f}%)" if len(runs) == 1 else kind
        axes.barh(
            range(len(runs)), shares, 0.6, left=ends, label=label, color=COLORS[index % len(COLORS)],
            hatch=_HATCHES[index % len(_HATCHES)], edgecolor="white", linewidth=0,
        )  # fmt: skip
        ends += shares
    axes.set_yticks(range(len(runs)), [name for name, _ in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("wall time of all starts (%)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def svg(figure: Figure, title: str) -> str:
    """The figure as an `svg` element as wide as its place; its text stays text."""
    file = io.StringIO()
    # Names of clip paths must differ between the figures of a page, and be the same each time.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    text = file.getvalue()
    return text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _steps(axes: Axes, runs: Sequence[RunFolder], *, names: bool = False) -> None:
    """The axis of steps; of a single run with its phases and switches."""
    step_axis(axes, max(run.steps[-1]["step"] for run in runs))
    open_frame(axes)
    if len(runs) == 1:
        shade_spans(axes, runs[0].spans, names=names)
        mark_steps(axes, marks_of(runs[0]), names=names)
