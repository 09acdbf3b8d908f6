"""How all pictures look: one palette, line styles beside colours, legends that cover nothing; and a figure that is
written and closed.

The colours are Okabe and Ito's (Color Universal Design, 2008), which people with any of the common colour deficiencies
can tell apart. Every curve also has a dash pattern and a marker of its own, so that a page printed in grey says the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a cluster's node

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron_fp4.logging.run_files import check_place, replace_file
from megatron_fp4.logging.words import short_number

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
# Yellow is left out of curves: too faint on white.
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.4)), (0, (7, 2, 1.5, 2)), (0, (1, 1.8)), (0, (9, 2, 3, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, FAINT = "#333333", "#5a6570"
# Spans that follow each other, such as data phases, under curves of any colour.
BANDS = ("#ffffff", "#eeeeee")
MISSING = "#d9d9d9"

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
}


@dataclass(frozen=True)
class Look:
    """Of one curve: what tells it from the others in colour and in grey."""

    color: str
    dash: Any
    marker: str

    def line(self, **settings: Any) -> dict[str, Any]:
        """For `Axes.plot`, a curve of many points."""
        return {"color": self.color, "linestyle": self.dash, **settings}

    def points(self, **settings: Any) -> dict[str, Any]:
        """For `Axes.plot`, a curve of few points, each of them marked."""
        return self.line(marker=self.marker, markersize=4.0, **settings)


def look(index: int) -> Look:
    """Of the curve number `index` of a picture; 42 different ones."""
    return Look(COLORS[index % len(COLORS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])


@contextmanager
def drawing(*grid: int, **settings: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes (`plt.subplots(*grid, **settings)`) in the style of all pictures, closed behind the `with`,
    in which it must be written."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(*grid, layout="constrained", **settings)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


@contextmanager
def picture(target: Path, *grid: int, **settings: Any) -> Iterator[tuple[Figure, Any]]:
    """As `drawing`; behind the `with`, the file `target`. Raises ValueError before, as `check_target` does."""
    check_target(target)
    with drawing(*grid, **settings) as (figure, axes):
        yield figure, axes
        # Without the version of the library that drew it: the same numbers then make the same bytes.
        replace_file(target, lambda path: figure.savefig(path, metadata={"Software": None}))


def check_target(target: Path) -> None:
    """Raise ValueError if a picture could not be written there: before the work whose result it is to show."""
    kinds = sorted(FigureCanvasAgg.filetypes)
    if target.suffix[1:].lower() not in kinds:
        raise ValueError(f"{target} is no name of a picture; give it one of the endings .{', .'.join(kinds)}")
    check_place(target)


def open_frame(axes: Axes) -> None:
    """No box around the curves, and faint lines at the numbers of the vertical axis."""
    axes.grid(axis="y", color="#000000", alpha=0.08)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, axes: Axes | Sequence[Axes]) -> None:
    """The legend of all curves under the frame, where it covers none; in as many columns as fit. Nothing for one curve
    without a label."""
    rows = [axes] if isinstance(axes, Axes) else list(axes)
    named = {label: handle for one in rows for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    if not named:
        return
    # Inches: a character of 9 points is some 0.07 wide, the handle and the gap 0.65.
    width = 0.65 + 0.07 * max(map(len, named))
    columns = max(1, min(len(named), int(figure.get_figwidth() / width)))
    figure.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=columns, columnspacing=1.5, borderpad=0.1
    )  # fmt: skip


def step_axis(axes: Axes, last: float, label: str = "step") -> None:
    """From 0 to the `last` step, in short numbers."""
    axes.set_xlim(0, max(1, last) * 1.01)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    if label:
        axes.set_xlabel(label)


def shade_spans(axes: Axes, spans: Sequence[tuple[str, float, float]], *, names: bool = True) -> None:
    """Bands behind the curves, from the second value of each span to the third, with their names above the frame, as
    far as there is room for them. Nothing for a single span."""
    if len(spans) < 2:
        return
    low, high = axes.get_xlim()
    room = _width(axes) / max(high - low, 1e-9)  # inches for a step
    for index, (name, start, end) in enumerate(spans):
        axes.axvspan(start, end, color=BANDS[index % len(BANDS)], zorder=-10, linewidth=0)
        if names and 0.068 * len(name) <= (end - start) * room:
            _above(axes, (start + end) / 2, name, FAINT, level=0)


def mark_steps(axes: Axes, marks: dict[float, str], *, names: bool = True) -> None:
    """Dotted lines at steps, with what happened there above the frame, over the names of spans."""
    low, high = axes.get_xlim()
    per_character = 0.068 / _width(axes) * (high - low)
    taken: list[float] = [-1e99] * 3  # where the last text of each level ends
    for step in sorted(marks):
        axes.axvline(step, color=INK, linewidth=1.0, linestyle=":")
        if not names:
            continue
        half = per_character * len(marks[step]) / 2
        place = min(max(step, low + half), high - half)
        level = next((i for i, end in enumerate(taken) if end < place - half), 0)
        taken[level] = place + half
        _above(axes, place, marks[step], INK, level=level + 1)


def _width(axes: Axes) -> float:
    """Inches, about: what labels and numbers leave of the figure."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return 0.86 * figure.get_figwidth()


def _above(axes: Axes, step: float, text: str, color: str, level: int) -> None:
    axes.annotate(
        text, (step, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3 + 12 * level),
        textcoords="offset points", ha="center", fontsize=8.5, color=color, annotation_clip=False,
    )  # fmt: skip
