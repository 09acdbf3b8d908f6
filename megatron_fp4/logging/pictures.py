"""The pictures of a run: losses, heatmaps of what quantization does, and the look that all pictures share.

The colours are Okabe and Ito's (Color Universal Design, 2008), for people with colour deficiencies. Every curve also
has a dash pattern and a marker, for pages printed in grey.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a cluster's node

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron_fp4.logging.console import short_number
from megatron_fp4.logging.files import check_place, replace_file
from megatron_fp4.logging.run_folder import RunFolder, open_run

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.4)), (0, (7, 2, 1.5, 2)), (0, (1, 1.8)), (0, (9, 2, 3, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, FAINT, MISSING = "#333333", "#5a6570", "#d9d9d9"

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
    "legend.handlelength": 3.2,  # a dash pattern needs room to be seen
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,  # names of runs and sources may have dollar signs
    "svg.fonttype": "none",
}

# Of a curve: the part that its moving average covers, and the points that are drawn.
_SMOOTHING_FRACTION, _POINTS = 0.02, 2000


@dataclass(frozen=True)
class Look:
    """Of one curve: its colour, and what distinguishes it in grey."""

    color: str
    dash: Any
    marker: str

    def line(self, **settings: Any) -> dict[str, Any]:
        """For `Axes.plot`, a curve of many points."""
        return {"color": self.color, "linestyle": self.dash, **settings}

    def points(self, **settings: Any) -> dict[str, Any]:
        """For `Axes.plot`, a curve of few points, each of them marked."""
        return self.line(**{"marker": self.marker, "markersize": 4.0, **settings})


def look(index: int) -> Look:
    """Of the curve number `index` of a picture; 42 different ones."""
    return Look(COLORS[index % len(COLORS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])


@contextmanager
def drawing(*grid: int, **settings: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes (`plt.subplots(*grid, **settings)`), closed after the `with`, in which it is written."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(*grid, layout="constrained", **settings)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


@contextmanager
def picture(target: Path, *grid: int, **settings: Any) -> Iterator[tuple[Figure, Any]]:
    """As `drawing`; after the `with`, the file `target`. Raises ValueError before, as `check_target` does."""
    check_target(target)
    with drawing(*grid, **settings) as (figure, axes):
        yield figure, axes
        # Without the version of the library that drew it: the same numbers then make the same bytes.
        replace_file(target, lambda path: figure.savefig(path, metadata={"Software": None}))


def check_target(target: Path) -> None:
    """Raise ValueError if a picture could not be written there: before the work whose result it shows."""
    kinds = sorted(FigureCanvasAgg.filetypes)
    if target.suffix[1:].lower() not in kinds:
        raise ValueError(f"{target} is no name of a picture; give it one of the endings .{', .'.join(kinds)}")
    check_place(target)


def open_frame(axes: Axes) -> None:
    """No box around the curves, and faint lines at the numbers of the vertical axis."""
    axes.grid(axis="y", color="#000000", alpha=0.08)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, axes: Axes | Sequence[Axes]) -> None:
    """The legend of all curves under the frame, in as many columns as fit; none without labels."""
    rows = [axes] if isinstance(axes, Axes) else list(axes)
    named = {label: handle for one in rows for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    if named:
        # Inches: a character of 9 points is some 0.07 wide, the handle and the gap 0.65.
        width = 0.65 + 0.07 * max(map(len, named))
        columns = max(1, min(len(named), int(figure.get_figwidth() / width)))
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=columns, columnspacing=1.5)


def step_axis(axes: Axes, last: float) -> None:
    """From 0 to the `last` step, in short numbers."""
    axes.set_xlim(0, max(1, last) * 1.01)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.set_xlabel("step")
    open_frame(axes)


def mark_run(axes: Axes, run: RunFolder) -> None:
    """Shade the data phases, with their names above the frame, and mark where the decay starts and the precision
    switches."""
    last = run.steps[-1]["step"]
    for index, (name, start, end) in enumerate(run.phases):
        if len(run.phases) > 1 and index % 2:
            axes.axvspan(start, end, color="#eeeeee", zorder=-10, linewidth=0)
        if len(run.phases) > 1 and len(name) < 100 * (end - start) / last:
            axes.annotate(
                name, ((start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
                textcoords="offset points", ha="center", fontsize=8.5, color=FAINT,
            )  # fmt: skip
    marks = {event["step"]: f"switch to {event.get('target')}" for event in run.events if event["event"] == "switch"}
    decay_start = run.facts.get("decay_start")
    if isinstance(decay_start, int) and decay_start <= last:
        marks[decay_start] = f"decay starts{', ' + marks[decay_start] if decay_start in marks else ''}"
    for index, (step, text) in enumerate(marks.items()):
        axes.axvline(step, color=INK, linewidth=1.0, linestyle=(":", "-.")[index % 2], label=f"{text} (step {step:,})")


def smooth(values: np.ndarray) -> np.ndarray:
    """Moving average of [n] values over 2% of them, NaN left out (and NaN where nothing else is in reach).

    The window is centered, so that it does not lag behind a falling loss; it shrinks towards the first value, where
    the loss falls fastest, and is cut off at the last. O(n).
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
    """A curve [n] with some 2,000 points at most: smallest and largest value of each piece."""
    if len(values) <= _POINTS:
        return steps, values
    kept = {0, len(values) - 1}
    for piece in np.array_split(np.arange(len(values)), _POINTS // 2):
        finite = piece[np.isfinite(values[piece])]
        kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])} if finite.size else set()
    index = sorted(kept)
    return steps[index], values[index]


def same_tokens(run: RunFolder, other: RunFolder, steps: np.ndarray) -> np.ndarray:
    """Steps of `run` [n], in general fractions, that have seen as many tokens as the `steps` [n] of `other`; NaN after
    the last step of either."""
    (own, own_tokens), (theirs, their_tokens) = run.series("tokens"), other.series("tokens")
    tokens = np.interp(steps, theirs, their_tokens, right=math.nan)
    return np.interp(tokens, own_tokens, own, right=math.nan)


def plot_loss(run_dir: str | Path, baseline: str | Path | None = None) -> Path:
    """Draw `run_dir`/metrics.jsonl as `run_dir`/loss.png and return its path.

    baseline: another run, as a folder or `name=folder`, drawn beside it after the same tokens. Raises FileNotFoundError
    if there is no metrics.jsonl and ValueError if it has no steps yet.
    """
    run = open_run(run_dir)
    other = None if baseline is None else open_run(baseline)
    target = run.path / "loss.png"
    with picture(target, figsize=(10, 6.2), dpi=150) as (figure, axes):
        draw_losses(axes, run, other)
        plans = ", then ".join(dict.fromkeys(str(record.get("plan", "unknown")) for record in run.steps))
        axes.set_title(f"{run.name}: {plans}; {short_number(run.steps[-1]['tokens'])} tokens", pad=18)
        legend_below(figure, axes)
    return target


def draw_losses(axes: Axes, run: RunFolder, other: RunFolder | None = None) -> None:
    """Training loss, raw and smoothed, and validation loss by source, in nats per token, with unigram entropies.

    A source keeps its colour and marker in both runs; the curves of `other` are dashed, its markers hollow.
    """
    steps, loss = run.series("loss")
    sources = dict.fromkeys([*run.validation, *(other.validation if other is not None else ())])
    looks = {source: look(index + 1) for index, source in enumerate(sources)}
    axes.plot(*thinned(steps, loss), color=look(0).color, alpha=0.22, linewidth=0.8)
    axes.plot(*thinned(steps, smooth(loss)), color=look(0).color, linewidth=1.8, label="training, smoothed")
    shown = [value for points in run.validation.values() for value in points.values()]
    for source, points in run.validation.items():
        label, style = f"validation, {source} ({list(points.values())[-1]:.3f})", looks[source].points(linestyle="-")
        axes.plot(list(points), list(points.values()), label=label, **style)
    if other is not None:
        theirs, their_loss = other.series("loss")
        dashed: dict[str, Any] = {"linestyle": (0, (3, 1.5)), "linewidth": 1.4}
        label = f"{other.name}: training, smoothed"
        axes.plot(*thinned(same_tokens(run, other, theirs), smooth(their_loss)), color=BLACK, label=label, **dashed)
        for source, points in other.validation.items():
            at, values = same_tokens(run, other, np.array(list(points))), np.array(list(points.values()))
            if (last := values[np.isfinite(at)]).size:
                shown += list(last)
                label = f"{other.name}: validation, {source} ({last[-1]:.3f})"
                axes.plot(at, values, label=label, **looks[source].points(markerfacecolor="none", **dashed))
    entropies = run.facts.get("unigram_entropy")
    for source, value in entropies.items() if isinstance(entropies, dict) else ():
        color = looks[source].color if source in looks else INK
        label = f"unigram entropy, {source} ({value:.2f})"
        axes.axhline(value, color=color, linewidth=1.0, linestyle=(0, (1, 2.5)), label=label)
    axes.set_ylabel("loss (nats per token)")
    finite = loss[np.isfinite(loss)]
    if finite.size:
        # The first steps fall from ln(vocabulary), and a spike would flatten everything else.
        top = max(np.percentile(finite, 99.5), *shown, finite.min() + 0.1)
        bottom = min(finite.min(), *shown, top)
        axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.04 * (top - bottom))
    step_axis(axes, steps[-1])
    mark_run(axes, run)


def draw_training(axes: Axes, runs: Sequence[RunFolder]) -> None:
    """Smoothed training losses of runs side by side, in nats per token."""
    for index, run in enumerate(runs):
        steps, losses = run.series("loss")
        axes.plot(*thinned(steps, smooth(losses)), label=run.name, **look(index).line(linewidth=1.5))
    every = np.concatenate([run.series("loss")[1] for run in runs])
    finite = every[np.isfinite(every)]
    if finite.size:  # the first steps would flatten everything else
        axes.set_ylim(finite.min() - 0.1, np.percentile(finite, 97))
    axes.set_ylabel("training loss, smoothed\n(nats per token)")


def draw_gaps(axes: Axes, base: RunFolder, runs: Sequence[RunFolder]) -> None:
    """How far runs are above `base` after the same steps, in percent of its loss: a curve for training, smoothed, and
    markers for validation, the mean of the sources that both have."""
    base_steps, base_loss = base.series("loss")
    axes.axhline(0, color=INK, linewidth=1.0)
    for index, run in enumerate(runs, start=1):
        style, (steps, loss) = look(index), run.series("loss")
        _, mine, theirs = np.intersect1d(steps, base_steps, return_indices=True)
        gap = 100 * (loss[mine] / base_loss[theirs] - 1)
        axes.plot(*thinned(steps[mine], smooth(gap)), label=f"{run.name}: training", **style.line(linewidth=1.5))
        if points := validation_gaps(run, base):
            marks = style.points(label=f"{run.name}: validation") | {"linestyle": "none"}
            axes.plot(list(points), list(points.values()), **marks)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.1), max(high, 0.1))  # rounding errors are no gaps
    axes.set_ylabel(f"loss above {base.name} (%)")


def validation_gaps(run: RunFolder, base: RunFolder) -> dict[int, float]:
    """Step -> gap of the mean held-out loss of all sources that both have, in percent, where both measured all."""
    sources = [source for source in run.validation if source in base.validation]
    if not sources:
        return {}
    steps = set.intersection(*(set(of.validation[source]) for of in (run, base) for source in sources))
    totals = {step: [sum(of.validation[s][step] for s in sources) for of in (run, base)] for step in sorted(steps)}
    return {step: 100 * (mine / theirs - 1) for step, (mine, theirs) in totals.items()}


@dataclass(frozen=True)
class Quantity:
    """Of the diagnostics: where a linear's record has it, and its fixed scale, so that a colour means the same number
    in every picture. Dark is worse. bounds: between colours, in equal shares of the colour map."""

    title: str
    unit: str
    colors: str
    bounds: tuple[float, ...]
    path: tuple[str, ...]

    def values(self, records: Sequence[dict[str, Any]], linears: Sequence[str]) -> np.ndarray:
        """FP64 [linears, records]; NaN where it was not measured."""

        def of(record: dict[str, Any], linear: str) -> float:
            node = record["linears"].get(linear)
            for key in self.path:
                node = (node or {}).get(key)
            return math.nan if node is None else float(node)

        return np.array([[of(record, linear) for record in records] for linear in linears])


QUANTITIES = (
    Quantity(
        "output gradient in wgrad: signal to noise", "dB", "viridis",
        (0, 4, 8, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26, 30, 35, 40, 50),
        ("operands", "wgrad_gradient", "snr_db"),
    ),
    Quantity(
        "relative error of wgrad", "of the product (norms)", "viridis_r",
        (0, 0.02, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.18, 0.2, 0.25, 0.3,
         0.4, 0.6),
        ("gemms", "wgrad"),
    ),
)  # fmt: skip


def heatmap_height(run: RunFolder) -> float:
    """Inches, with room for the names of the linears."""
    return 1.2 + min(12.0, max(1.4, 0.16 * len(_linears(run))))


def draw_heatmap(figure: Figure, axes: Axes, run: RunFolder, quantity: Quantity) -> None:
    """One quantity of the run's diagnostics: linears in the order of the model against measured steps."""
    records, linears = run.of("diagnostics"), _linears(run)
    values, steps = quantity.values(records, linears), np.array([float(record["step"]) for record in records])
    middles = (steps[1:] + steps[:-1]) / 2
    half = (middles[0] - steps[0], steps[-1] - middles[-1]) if len(steps) > 1 else (0.5, 0.5)
    edges = np.concatenate(([steps[0] - half[0]], middles, [steps[-1] + half[1]]))
    colors = matplotlib.colormaps[quantity.colors].with_extremes(bad=MISSING)
    mesh = axes.pcolormesh(
        edges, np.arange(len(linears) + 1), np.ma.masked_invalid(values), cmap=colors,
        norm=BoundaryNorm(quantity.bounds, colors.N, extend="both"), rasterized=True,
    )  # fmt: skip
    axes.set_facecolor(MISSING)
    shown = range(0, len(linears), -(-len(linears) // 64))
    axes.set_yticks([row + 0.5 for row in shown], [linears[row] for row in shown], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    finite = values[np.isfinite(values)]
    measured = f"measured: {finite.min():.3g} to {finite.max():.3g}" if finite.size else "never measured"
    axes.set_title(f"{quantity.title}; {measured}", fontsize=10)
    bar = figure.colorbar(
        mesh, ax=axes, pad=0.01, fraction=0.03, spacing="uniform", ticks=quantity.bounds[::4], label=quantity.unit
    )  # fmt: skip
    bar.ax.tick_params(labelsize=8)
    bar.minorticks_off()


def _linears(run: RunFolder) -> list[str]:
    """All linears that were measured, in the order of the model: a switch only removes some, so the longest record has
    it."""
    records = run.of("diagnostics")
    names = list(max(records, key=lambda record: len(record["linears"]))["linears"])
    return list(dict.fromkeys([*names, *(name for record in records for name in record["linears"])]))
