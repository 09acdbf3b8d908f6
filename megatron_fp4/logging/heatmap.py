"""The picture of a run's diagnostics: layers against steps, one panel for each quantity.

A colour means the same number in every picture: the scale of a quantity is fixed (`SCALES`), in steps that can be read
off, with its unit beside it; arrows at its ends say that there are values beyond. Each panel's title has the smallest
and largest number that was measured. What was not measured is hatched grey, which is no colour of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from megatron_fp4.logging.metrics import records_of_run
from megatron_fp4.logging.picture import FAINT, MISSING, picture
from megatron_fp4.precision.recipe import GEMMS, SLOTS

DEFAULT_QUANTITIES = ("wgrad_gradient.snr_db", "wgrad.error")

_STATISTICS = {
    "snr_db": "signal to noise",
    "zeroed": "share that became zero",
    "saturated": "share beyond the largest code",
    "amax": "largest magnitude",
    "rms": "root mean square",
    "crest": "largest over rms",
    "amax_rht": "largest magnitude behind the transform",
    "rms_rht": "root mean square behind the transform",
    "crest_rht": "largest over rms behind the transform",
}


@dataclass(frozen=True)
class Scale:
    """Of a quantity in every picture. unit: beside the colours. bounds: between colours, from low to high, in equal
    shares of the colour map (not of the numbers). good_is_large: dark is worse in any case."""

    unit: str
    bounds: tuple[float, ...]
    good_is_large: bool = False

    @property
    def colors(self) -> str:
        """The colour map: even in lightness, so that it can be read in grey and by the colour-blind."""
        return "viridis" if self.good_is_large else "viridis_r"


def _decades(first: int, last: int, marks: Sequence[float]) -> tuple[float, ...]:
    return (*(round(mark * 10.0**power, 12) for power in range(first, last) for mark in marks), 10.0**last)


_SHARE = Scale("share", (0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5))
_MAGNITUDE = Scale("magnitude", _decades(-8, 4, (1, 3)))
_CREST = Scale("ratio", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 200, 1000))
# Finest where numbers in 4 bits lie. A Gaussian tensor has some 20 dB in NVFP4 and some 32 dB in MXFP8.
SCALES = {
    "snr_db": Scale("dB", (0, 4, 8, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26, 30, 35, 40, 50), True),
    "zeroed": _SHARE,
    "saturated": _SHARE,
    "amax": _MAGNITUDE,
    "rms": _MAGNITUDE,
    "crest": _CREST,
    "amax_rht": _MAGNITUDE,
    "rms_rht": _MAGNITUDE,
    "crest_rht": _CREST,
    "error": Scale(
        "error / product (norms)",
        (0, 0.02, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.18, 0.2, 0.25, 0.3,
         0.4, 0.6),
    ),
    "gradient_to_noise": Scale("ratio", (0, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 50, 100), True),
}  # fmt: skip
_OPERANDS = {slot.name: slot for slot in SLOTS}
_MAX_LABELS = 64
_TALL = 24  # linears


def plot_heatmap(
    run_dir: str | Path, quantities: Sequence[str] = DEFAULT_QUANTITIES, target: str | Path | None = None
) -> Path | None:
    """Draw the diagnostics in `run_dir`/metrics.jsonl, one panel a quantity, as `target` (`run_dir`/diagnostics.png).

    quantities: `<operand>.<statistic>` such as `wgrad_gradient.snr_db` (see measure/statistics.py),
    `<gemm>.error` (fprop, dgrad, wgrad), or `gradient_to_noise`. Dark is worse in every panel. Rows are linears in the
    order of execution, columns the measured steps; hatched: not quantized, not measured, or not finite.

    Returns the picture's path, or None if the run has no diagnostics. Raises FileNotFoundError if there is no
    metrics.jsonl and ValueError for an unknown quantity.
    """
    for quantity in quantities:
        _check(quantity)
    records = [record for record in records_of_run(run_dir) if record["kind"] == "diagnostics"]
    if not records:
        return None
    linears = linears_of(records)
    # Few linears: panels under each other, with room for the names. Many: side by side, or the picture is a tower.
    count, tall = len(quantities), len(linears) > _TALL
    height = 1.1 + min(14.0, max(1.6, 0.16 * len(linears)))
    rows, columns = (1, count) if tall else (count, 1)
    size = (2.5 + 6.0 * count, height) if tall else (10, height * count)
    written = Path(target) if target is not None else Path(run_dir) / "diagnostics.png"
    settings = {"figsize": size, "dpi": 130, "squeeze": False, "sharex": True, "sharey": True}
    with picture(written, rows, columns, **settings) as (figure, panels):
        for axes, quantity in zip(panels.flat, quantities, strict=True):
            draw_panel(figure, axes, records, linears, quantity)
        panels[0, 0].invert_yaxis()
        for axes in panels[-1]:
            axes.set_xlabel("step")
        figure.suptitle(f"{Path(run_dir).resolve().name}: what quantization does", x=0.01, ha="left")
        missing_legend(figure)
    return written


def missing_legend(figure: Figure) -> None:
    """Say under the panels what hatched cells are."""
    patch = Patch(facecolor=MISSING, edgecolor=FAINT, hatch="////", linewidth=0)
    figure.legend([patch], ["not quantized, not measured, or not finite"], loc="outside lower left")


def heatmap_values(records: Sequence[dict[str, Any]], linears: Sequence[str], quantity: str) -> np.ndarray:
    """FP64 [linears, records] of one quantity; NaN where it was not measured."""
    values = np.full((len(linears), len(records)), math.nan)
    for column, record in enumerate(records):
        for row, name in enumerate(linears):
            value = _value(record["linears"].get(name), quantity)
            if value is not None:
                values[row, column] = value
    return values


def draw_panel(
    figure: Figure, axes: Axes, records: Sequence[dict[str, Any]], linears: Sequence[str], quantity: str
) -> None:
    """One quantity of the `diagnostics` in `records`, with its title, rows and colours; the axis of steps is the
    caller's. Rows go up; who wants the first linear on top inverts the axis."""
    values, scale = heatmap_values(records, linears, quantity), SCALES[quantity.rpartition(".")[2]]
    steps = np.array([record["step"] for record in records], dtype=float)
    edges = _edges(steps)
    axes.add_patch(
        Rectangle((edges[0], 0), edges[-1] - edges[0], len(linears), facecolor=MISSING, edgecolor=FAINT, hatch="////",
                  linewidth=0, alpha=0.6, zorder=0)
    )  # fmt: skip
    finite = values[np.isfinite(values)]
    beyond = (bool((finite < scale.bounds[0]).any()), bool((finite > scale.bounds[-1]).any()))
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(beyond, "neither")
    colors = matplotlib.colormaps[scale.colors]
    mesh = axes.pcolormesh(
        edges, np.arange(len(linears) + 1), np.ma.masked_invalid(values), cmap=colors,
        norm=BoundaryNorm(scale.bounds, colors.N, extend="both"), shading="flat", zorder=1,
    )  # fmt: skip
    every = -(-len(linears) // _MAX_LABELS)
    shown = range(0, len(linears), every)
    size = 7 if len(linears) > 20 else 8
    axes.set_yticks([row + 0.5 for row in shown], [linears[row] for row in shown], fontsize=size)
    axes.tick_params(axis="y", length=0)
    measured = f"measured: {finite.min():.3g} to {finite.max():.3g}" if finite.size else "never measured"
    axes.set_title(f"{_title(quantity)}; {measured}", fontsize=10)
    axes.set_xlim(max(0.0, edges[0]), edges[-1])
    for start in _block_starts(linears):
        axes.axhline(start, color="white", linewidth=0.6, zorder=2)
    bar = figure.colorbar(
        mesh, ax=axes, pad=0.01, fraction=0.03, extend=extend, spacing="uniform", ticks=scale.bounds[::4],
        label=scale.unit,
    )  # fmt: skip
    bar.ax.set_yticklabels([f"{bound:g}" for bound in scale.bounds[::4]])
    bar.ax.tick_params(labelsize=8)
    bar.minorticks_off()


def _edges(steps: np.ndarray) -> np.ndarray:
    """Column borders [n + 1] halfway between steps [n]."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    return np.concatenate(([steps[0] - (middles[0] - steps[0])], middles, [steps[-1] + (steps[-1] - middles[-1])]))


def linears_of(records: Sequence[dict[str, Any]]) -> list[str]:
    """All linears that occur, in the order of the model. A switch only removes some, so the longest record has it."""
    names = list(max(records, key=lambda record: len(record["linears"]))["linears"])
    return names + [name for record in records for name in record["linears"] if name not in names]


def _block_starts(linears: Sequence[str]) -> list[int]:
    blocks = [name.split(".")[:2] for name in linears]
    return [row for row in range(1, len(blocks)) if blocks[row] != blocks[row - 1]]


def _value(linear: dict[str, Any] | None, quantity: str) -> float | None:
    if linear is None:
        return None
    if quantity == "gradient_to_noise":
        return linear.get("gradient_to_noise")
    part, statistic = quantity.split(".")
    return linear["gemms"].get(part) if part in GEMMS else linear["operands"].get(part, {}).get(statistic)


def _title(quantity: str) -> str:
    if quantity == "gradient_to_noise":
        return "weight gradient over its quantization noise"
    part, statistic = quantity.split(".")
    if part in GEMMS:
        return f"relative error of {part}"
    slot = _OPERANDS[part]
    return f"{slot.tensor} in {slot.gemm}: {_STATISTICS[statistic]}"


def _check(quantity: str) -> None:
    part, _, statistic = quantity.partition(".")
    known = quantity == "gradient_to_noise" or (part in GEMMS and statistic == "error")
    if not known and not (part in _OPERANDS and statistic in _STATISTICS):
        raise ValueError(
            f"{quantity!r} is no quantity of the diagnostics; give <operand>.<statistic> with an operand of "
            f"{', '.join(_OPERANDS)} and a statistic of {', '.join(_STATISTICS)}, or <gemm>.error with a GEMM of "
            f"{', '.join(GEMMS)}, or gradient_to_noise"
        )
