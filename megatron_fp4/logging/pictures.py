"""The pictures of a run: losses, heatmaps of quantization errors, and the style of all pictures.

The colours are Okabe and Ito's (Color Universal Design, 2008), which colour-blind people can distinguish. Every curve
also has its own dash pattern and marker, for pages printed in grey.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display on a cluster's node

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure

from megatron_fp4.logging.console import short_number
from megatron_fp4.logging.files import PICTURE_FILE, check_place, replace_file
from megatron_fp4.logging.run_folder import RunFolder, open_run

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
_COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.4)), (0, (7, 2, 1.5, 2)), (0, (1, 1.8)), (0, (9, 2, 3, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, FAINT, _MISSING = "#333333", "#5a6570", "#d9d9d9"

_STYLE: Any = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.handlelength": 3.2,  # long enough to show a dash pattern
    "text.parse_math": False,  # names of runs and sources may have dollar signs
    "path.simplify_threshold": 0.5,  # a long run has a hundred steps for each pixel
    "svg.fonttype": "none",
}


class Look(NamedTuple):
    """The style of one curve: its colour, and a dash pattern and marker that distinguish it in grey."""

    color: str
    dash: Any
    marker: str

    def line(self, **settings: Any) -> dict[str, Any]:
        """Arguments of `Axes.plot` for a curve of many points."""
        return {"color": self.color, "linestyle": self.dash, "linewidth": 1.5, **settings}

    def points(self, **settings: Any) -> dict[str, Any]:
        """Arguments of `Axes.plot` for a curve of few points, with markers."""
        return self.line(**{"marker": self.marker, "markersize": 4.0, **settings})


def look(index: int) -> Look:
    """The style of curve number `index` in a picture. There are 42 different ones."""
    return Look(_COLORS[index % len(_COLORS)], _DASHES[index % len(_DASHES)], _MARKERS[index % len(_MARKERS)])


@contextmanager
def drawing(*grid: int, **settings: Any) -> Iterator[tuple[Figure, Any]]:
    """A context with a figure and its axes (`plt.subplots(*grid, **settings)`); the figure is closed at its end."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(*grid, layout="constrained", **settings)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


@contextmanager
def picture(target: Path, *grid: int, **settings: Any) -> Iterator[tuple[Figure, Any]]:
    """As `drawing`; at its end, the figure is written to `target`. Raises ValueError before, as `check_target` does."""
    check_target(target)
    with drawing(*grid, **settings) as (figure, axes):
        yield figure, axes
        # Without the version of matplotlib, so that the same numbers make the same bytes.
        replace_file(target, lambda path: figure.savefig(path, metadata={"Software": None}))


def check_target(target: Path) -> None:
    """Raise ValueError if no picture can be written at `target`. Call it before the work whose result it will show."""
    kinds = sorted(FigureCanvasAgg.filetypes)
    if target.suffix[1:].lower() not in kinds:
        raise ValueError(f"{target} is not the name of a picture; use one of the endings .{', .'.join(kinds)}")
    check_place(target)


def legend_below(figure: Figure, axes: Axes | Sequence[Axes]) -> None:
    """Draw a legend of all curves below the frame, in as many columns as fit; no legend without labels."""
    legends = [each.get_legend_handles_labels() for each in ([axes] if isinstance(axes, Axes) else axes)]
    named = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    if named:
        # In inches: a character of 9 points is about 0.07 wide, the handle and the gap 0.65.
        width = 0.65 + 0.07 * max(map(len, named))
        columns = max(1, min(len(named), int(figure.get_figwidth() / width)))
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=columns, columnspacing=1.5)


def step_axis(axes: Axes, last: float) -> None:
    """Set up axes: steps from 0 to `last` in short numbers, faint horizontal lines, no box."""
    axes.set_xlim(0, max(1, last) * 1.01)
    axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
    axes.set_xlabel("step")
    axes.grid(axis="y", color="#000000", alpha=0.08)
    axes.spines[["top", "right"]].set_visible(False)


def mark_run(axes: Axes, run: RunFolder) -> None:
    """Shade the data phases, with their names above the frame; mark restarts, decay and switch."""
    last = run.steps[-1]["step"]
    for index, (name, start, end) in enumerate(run.phases if len(run.phases) > 1 else ()):
        if index % 2:
            axes.axvspan(start, end, color="#eeeeee", zorder=-10, linewidth=0)
        if len(name) < 100 * (end - start) / last:
            axes.annotate(
                name, ((start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
                textcoords="offset points", ha="center", fontsize=8.5, color=FAINT,
            )  # fmt: skip
    marks = {event["step"]: f"switch to {event.get('target')}" for event in run.happened("switch")}
    decay_start = run.facts.get("decay_start")
    if isinstance(decay_start, int) and decay_start <= last:
        marks[decay_start] = ", ".join(["decay starts", *filter(None, [marks.get(decay_start)])])
    restarts = [record["step"] for record in run.of("run") if 0 < record["step"] < last]
    for index, step in enumerate(restarts):
        label = None if index else f"restarts ({len(restarts)})"
        axes.axvline(step, color=FAINT, linewidth=0.7, linestyle=(0, (1, 3)), label=label)
    for index, (step, text) in enumerate(marks.items()):
        axes.axvline(step, color=INK, linewidth=1.0, linestyle=(":", "-.")[index % 2], label=f"{text} (step {step:,})")


def show_from(axes: Axes, first: float) -> None:
    """Show only the steps from `first` on, and the range of the curves there."""
    curves = [np.asarray(line.get_xydata()) for line in axes.get_lines()]
    # A mark at one step is as high as the axes; a line at one height has no steps.
    shown = np.concatenate([xy[xy[:, 0] >= first, 1] for xy in curves if np.ptp(xy[:, 0]) > 1])
    shown = shown[np.isfinite(shown)]
    axes.set_xlim(left=first)
    if shown.size:
        low, high = shown.min(), max(np.percentile(shown, 99.5), shown.min() + 1e-3)
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def smooth(values: np.ndarray) -> np.ndarray:
    """Moving average of [n] values over 2% of them. NaN values are left out; a window of only NaN gives NaN.

    The window is centered, so that it does not lag behind a falling loss. It becomes smaller towards the first value,
    where the loss falls fastest, and ends at the last value. O(n).
    """
    index = np.arange(len(values))
    reach = np.minimum(index, max(1, round(0.01 * len(values))))
    start, end = index - reach, np.minimum(index + reach + 1, len(values))
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    with np.errstate(invalid="ignore"):
        return (sums[end] - sums[start]) / (counts[end] - counts[start])


def plot_loss(run_dir: str | Path, baseline: str | Path | None = None) -> Path:
    """Draw `run_dir`/metrics.jsonl as `run_dir`/loss.png and return its path.

    baseline: another run, as a folder or `name=folder`, drawn beside it at the same number of tokens. Raises
    FileNotFoundError if there is no metrics.jsonl, and ValueError if it has no steps yet.
    """
    run, other = open_run(run_dir), None if baseline is None else open_run(baseline)
    with picture(run.path / PICTURE_FILE, figsize=(10, 6.2), dpi=150) as (figure, axes):
        draw_losses(axes, run, other)
        axes.set_title(f"{run.name}: {run.plans}; {short_number(run.steps[-1]['tokens'])} tokens", pad=18)
        legend_below(figure, axes)
    return run.path / PICTURE_FILE


def draw_losses(axes: Axes, run: RunFolder, other: RunFolder | None = None) -> None:
    """Training loss, raw and smoothed, and validation loss by source, in nats per token, with unigram entropies.

    A source has the same colour and marker in both runs; the curves of `other` are dashed, with hollow markers. Values
    after the same number of tokens are at the same place.
    """
    steps, loss = run.series("loss")
    tokens = run.series("tokens")[1]
    sources = dict.fromkeys([*run.validation, *(other.validation if other is not None else ())])
    looks = {source: look(index + 1) for index, source in enumerate(sources)}
    axes.plot(steps, loss, color=look(0).color, alpha=0.22, linewidth=0.8)
    axes.plot(steps, smooth(loss), color=look(0).color, linewidth=1.8, label="training, smoothed")
    shown = [value for points in run.validation.values() for value in points.values()]
    for source, points in run.validation.items():
        label, style = f"validation, {source} ({list(points.values())[-1]:.3f})", looks[source].points(linestyle="-")
        axes.plot(list(points), list(points.values()), label=label, **style)
    if other is not None:
        theirs, their_loss = other.series("loss")
        dashed: dict[str, Any] = {"linestyle": (0, (3, 1.5)), "linewidth": 1.4}

        def at(steps_of_other: Any) -> np.ndarray:
            then = np.interp(steps_of_other, theirs, other.series("tokens")[1], right=math.nan)
            return np.interp(then, tokens, steps, right=math.nan)

        axes.plot(at(theirs), smooth(their_loss), color=BLACK, label=f"{other.name}: training, smoothed", **dashed)
        for source, points in other.validation.items():
            place, values = at(list(points)), np.array(list(points.values()))
            if (last := values[np.isfinite(place)]).size:
                shown += list(last)
                style = looks[source].points(markerfacecolor="none", **dashed)
                axes.plot(place, values, label=f"{other.name}: validation, {source} ({last[-1]:.3f})", **style)
    for source, value in (run.facts.get("unigram_entropy") or {}).items():
        color = looks[source].color if source in looks else INK
        label = f"unigram entropy, {source} ({value:.2f})"
        axes.axhline(value, color=color, linewidth=1.0, linestyle=(0, (1, 2.5)), label=label)
    axes.set_ylabel("loss (nats per token)")
    finite = loss[np.isfinite(loss)]
    if finite.size:
        # The first losses are as large as ln(vocabulary); they, or a spike, would flatten everything else.
        top = max(np.percentile(finite, 99.5), *shown, finite.min() + 0.1)
        bottom = min(finite.min(), *shown, top)
        axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.04 * (top - bottom))
    step_axis(axes, steps[-1])
    mark_run(axes, run)


def draw_training(axes: Axes, runs: Sequence[RunFolder], looks: Sequence[Look]) -> None:
    """The smoothed training losses of several runs, in nats per token."""
    every = [run.series("loss") for run in runs]
    for run, style, (steps, losses) in zip(runs, looks, every, strict=True):
        axes.plot(steps, smooth(losses), label=run.name, **style.line())
    finite = np.concatenate([losses[np.isfinite(losses)] for _, losses in every])
    if finite.size:  # the first steps would flatten everything else
        axes.set_ylim(finite.min() - 0.1, np.percentile(finite, 97))
    axes.set_ylabel("training loss, smoothed\n(nats per token)")


def draw_gaps(axes: Axes, base: RunFolder, runs: Sequence[RunFolder], looks: Sequence[Look]) -> None:
    """How much higher the losses of runs are than those of `base` after the same steps, in percent: a smoothed curve
    for training, and markers for validation, over the mean of the sources that both have."""
    base_steps, base_loss = base.series("loss")
    axes.axhline(0, color=INK, linewidth=1.0)
    for run, style in zip(runs, looks, strict=True):
        steps, loss = run.series("loss")
        _, mine, theirs = np.intersect1d(steps, base_steps, return_indices=True)
        gap = 100 * (loss[mine] / base_loss[theirs] - 1)
        axes.plot(steps[mine], smooth(gap), label=f"{run.name}: training", **style.line())
        if points := validation_gaps(run, base):
            label = f"{run.name}: validation"
            axes.plot(list(points), list(points.values()), **style.points(label=label, linestyle="none"))
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.1), max(high, 0.1))  # rounding errors are no gaps
    axes.set_ylabel(f"loss above {base.name} (%)")


def validation_gaps(run: RunFolder, base: RunFolder) -> dict[int, float]:
    """Step -> gap of the mean held-out loss in percent, over common sources, where both measured all."""
    pairs = [(points, base.validation[name]) for name, points in run.validation.items() if name in base.validation]
    steps = set.intersection(*(set(points) for pair in pairs for points in pair)) if pairs else ()
    totals = {step: [sum(points[step] for points in of) for of in zip(*pairs, strict=True)] for step in sorted(steps)}
    return {step: 100 * (mine / theirs - 1) for step, (mine, theirs) in totals.items()}


class Quantity(NamedTuple):
    """A quantity of the diagnostics. path: of the number in a linear's record. colors, bounds: a fixed scale, so that a
    colour means the same number in every picture; dark is worse. Bounds divide the map equally."""

    title: str
    unit: str
    colors: str
    path: tuple[str, ...]
    bounds: tuple[float, ...]


QUANTITIES = (
    Quantity(
        "output gradient in wgrad: signal to noise", "dB", "viridis", ("operands", "wgrad_gradient", "snr_db"),
        (0, 4, 8, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26, 30, 35, 40, 50),
    ),
    Quantity(
        "relative error of wgrad", "of the product (norms)", "viridis_r", ("gemms", "wgrad"),
        (0, 0.02, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.18, 0.2, 0.25, 0.3,
         0.4, 0.6),
    ),
)  # fmt: skip


def measured(run: RunFolder, quantity: Quantity) -> tuple[list[str], np.ndarray]:
    """The names of the linears in the order of the model, and values FP64 [linears, diagnostics]; NaN: not measured."""
    records = run.of("diagnostics")
    # After a switch a record may have fewer linears; the longest one has the order of all.
    longest_first = sorted(records, key=lambda record: -len(record["linears"]))
    linears = list(dict.fromkeys(name for record in longest_first for name in record["linears"]))

    def value(record: dict[str, Any], linear: str) -> float:
        node = record["linears"].get(linear)
        for key in quantity.path:
            node = (node or {}).get(key)
        return math.nan if node is None else float(node)

    return linears, np.array([[value(record, linear) for record in records] for linear in linears])


def draw_heatmap(figure: Figure, axes: Axes, run: RunFolder, quantity: Quantity) -> None:
    """Draw one quantity of the run's diagnostics: linears in the order of the model against measured steps."""
    linears, values = measured(run, quantity)
    figure.set_figheight(1.2 + min(12.0, max(1.4, 0.16 * len(linears))))  # room for the names
    steps = np.array([float(record["step"]) for record in run.of("diagnostics")])
    middles = (steps[1:] + steps[:-1]) / 2
    half = (middles[0] - steps[0], steps[-1] - middles[-1]) if len(steps) > 1 else (0.5, 0.5)
    edges = np.concatenate(([steps[0] - half[0]], middles, [steps[-1] + half[1]]))
    colors = matplotlib.colormaps[quantity.colors].with_extremes(bad=_MISSING)
    mesh = axes.pcolormesh(
        edges, np.arange(len(linears) + 1), np.ma.masked_invalid(values), cmap=colors,
        norm=BoundaryNorm(quantity.bounds, colors.N, extend="both"), rasterized=True,
    )  # fmt: skip
    axes.set_facecolor(_MISSING)
    shown = range(0, len(linears), -(-len(linears) // 64))
    axes.set_yticks([row + 0.5 for row in shown], [linears[row] for row in shown], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    finite = values[np.isfinite(values)]
    measured_range = f"{finite.min():.3g} to {finite.max():.3g}" if finite.size else "never"
    axes.set_xlabel(f"step (measured: {measured_range})")
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, fraction=0.03, ticks=quantity.bounds[::4], label=quantity.unit)
    bar.ax.tick_params(labelsize=8)
    bar.minorticks_off()
