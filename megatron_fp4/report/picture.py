"""What the pictures of runs share: no display, one frame, and a figure that is written and closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a cluster's node

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_fp4.report.run_files import replace_file

COLORS = ("#1f4e79", "#c8553d", "#3a7d44", "#8a5a9e", "#b8860b", "#2a9d8f", "#6c757d")


@contextmanager
def picture(target: Path, *grid: int, **settings: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes (`plt.subplots(*grid, **settings)`) to draw on; behind the `with`, `target`."""
    figure, axes = plt.subplots(*grid, layout="constrained", **settings)
    try:
        yield figure, axes
        replace_file(target, figure.savefig)
    finally:
        plt.close(figure)


def open_frame(axes: Axes) -> None:
    """No box around the curves, and faint lines at the numbers of the vertical axis."""
    axes.grid(axis="y", color="#000000", alpha=0.08)
    axes.spines[["top", "right"]].set_visible(False)
