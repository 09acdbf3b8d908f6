"""The picture of a run's diagnostics: layers against steps, one panel for each quantity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from megatron_fp4.precision.recipe import GEMMS, PLACES
from megatron_fp4.report.metrics import records_of_run
from megatron_fp4.report.picture import picture

DEFAULT_QUANTITIES = ("wgrad_gradient.snr_db", "wgrad.error")

_STATISTICS = {
    "snr_db": "signal to noise (dB)",
    "zeroed": "share that became zero",
    "saturated": "share beyond the largest code",
    "amax": "largest magnitude",
    "rms": "root mean square",
    "crest": "largest over rms",
    "amax_rht": "largest magnitude behind the transform",
    "rms_rht": "root mean square behind the transform",
    "crest_rht": "largest over rms behind the transform",
}
_OPERANDS = {place.name: place for place in PLACES}
_MAX_LABELS = 64
_TALL = 24  # linears


def plot_heatmap(
    run_dir: str | Path, quantities: Sequence[str] = DEFAULT_QUANTITIES, target: str | Path | None = None
) -> Path | None:
    """Draw the diagnostics in `run_dir`/metrics.jsonl, one panel a quantity, as `target` (`run_dir`/diagnostics.png).

    quantities: `<operand>.<statistic>` such as `wgrad_gradient.snr_db` (see measure/statistics.py),
    `<gemm>.error` (fprop, dgrad, wgrad), or `gradient_to_noise`. Dark is worse in every panel. Rows are linears in the
    order of execution, columns the measured steps; white: not quantized, not measured, or not finite.

    Returns the picture's path, or None if the run has no diagnostics. Raises FileNotFoundError if there is no
    metrics.jsonl and ValueError for an unknown quantity.
    """
    for quantity in quantities:
        _check(quantity)
    records = [record for record in records_of_run(run_dir) if record["kind"] == "diagnostics"]
    if not records:
        return None
    linears = _names(records)
    # Few linears: panels under each other, with room for the names. Many: side by side, or the picture is a tower.
    count, tall = len(quantities), len(linears) > _TALL
    height = 1.1 + min(14.0, max(1.6, 0.16 * len(linears)))
    rows, columns = (1, count) if tall else (count, 1)
    size = (2.5 + 6.0 * count, height) if tall else (10, height * count)
    written = Path(target) if target is not None else Path(run_dir) / "diagnostics.png"
    settings = {"figsize": size, "dpi": 130, "squeeze": False, "sharex": True, "sharey": True}
    with picture(written, rows, columns, **settings) as (figure, panels):
        for axes, quantity in zip(panels.flat, quantities, strict=True):
            _draw(figure, axes, records, linears, quantity)
        panels[0, 0].invert_yaxis()
        for axes in panels[-1]:
            axes.set_xlabel("step")
        figure.suptitle(f"{Path(run_dir).resolve().name}: what quantization does", x=0.01, ha="left")
    return written


def heatmap_values(records: Sequence[dict[str, Any]], linears: Sequence[str], quantity: str) -> np.ndarray:
    """FP64 [linears, records] of one quantity; NaN where it was not measured."""
    values = np.full((len(linears), len(records)), math.nan)
    for column, record in enumerate(records):
        for row, name in enumerate(linears):
            value = _value(record["linears"].get(name), quantity)
            if value is not None:
                values[row, column] = value
    return values


def _draw(figure: Figure, axes: Axes, records: Sequence[dict[str, Any]], linears: Sequence[str], quantity: str) -> None:
    values = heatmap_values(records, linears, quantity)
    steps = np.array([record["step"] for record in records], dtype=float)
    good_is_large = quantity.endswith("snr_db") or quantity == "gradient_to_noise"
    colors = "viridis" if good_is_large else "viridis_r"
    mesh = axes.pcolormesh(
        _edges(steps), np.arange(len(linears) + 1), values, cmap=colors, norm=_norm(values), shading="flat"
    )
    every = -(-len(linears) // _MAX_LABELS)
    shown = range(0, len(linears), every)
    size = 7 if len(linears) > 20 else 8
    axes.set_yticks([row + 0.5 for row in shown], [linears[row] for row in shown], fontsize=size)
    axes.tick_params(axis="y", length=0)
    axes.set_title(_title(quantity), loc="left", fontsize=10)
    for event in _block_starts(linears):
        axes.axhline(event, color="white", linewidth=0.6)
    # Arrows at the ends say that there are values beyond.
    beyond = (bool((values < mesh.norm.vmin).any()), bool((values > mesh.norm.vmax).any()))
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(beyond, "neither")
    figure.colorbar(mesh, ax=axes, pad=0.01, fraction=0.03, extend=extend)


def _norm(values: np.ndarray) -> Normalize:
    """Colours over what is usual: one bad step must not make everything else look alike."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return Normalize(0, 1)
    first, third = np.percentile(finite, [25, 75])
    reach = 3 * (third - first)
    low, high = max(finite.min(), first - reach), min(finite.max(), third + reach)
    return Normalize(low, high if high > low else low + max(abs(low), 1.0) * 1e-3)


def _edges(steps: np.ndarray) -> np.ndarray:
    """Column borders [n + 1] halfway between steps [n]."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    return np.concatenate(([steps[0] - (middles[0] - steps[0])], middles, [steps[-1] + (steps[-1] - middles[-1])]))


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
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
    place = _OPERANDS[part]
    return f"{place.tensor} in {place.gemm}: {_STATISTICS[statistic]}"


def _check(quantity: str) -> None:
    part, _, statistic = quantity.partition(".")
    known = quantity == "gradient_to_noise" or (part in GEMMS and statistic == "error")
    if not known and not (part in _OPERANDS and statistic in _STATISTICS):
        raise ValueError(
            f"{quantity!r} is no quantity of the diagnostics; give <operand>.<statistic> with an operand of "
            f"{', '.join(_OPERANDS)} and a statistic of {', '.join(_STATISTICS)}, or <gemm>.error with a GEMM of "
            f"{', '.join(GEMMS)}, or gradient_to_noise"
        )
