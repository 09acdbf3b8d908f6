"""Periodic measurements of quantization: the first micro-batch of every N-th step under a probe.

    diagnostics = Diagnostics(config.precision.diagnostics.interval, linears)
    ...
    with diagnostics.measuring(step):
        result = train_step(...)
    record = diagnostics.collect()          # None unless the step was measured

A measured step computes exactly what it would have computed otherwise. What a record holds, for each quantized
linear: statistics of each quantized operand (measure/statistics.py says which) and of each GEMM its relative
error against the unquantized product of the same inputs (measure/probe.py says how). And for each linear and each
block the gradient-to-noise ratio of its weight gradient,

    ||dW exact|| / ||dW - dW exact||

for one micro-batch and the dy that arrived: the noise that this wgrad adds, without what dy brought along.
`measure/gradient_noise.py` measures all of the noise, of a whole step, at the price of computing it twice more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_fp4.measure.probe import LinearMeasurement, Probe

if TYPE_CHECKING:
    from megatron_fp4.precision.linear import LinearContext

Record = dict[str, Any]


class Diagnostics:
    """Measures `linears` (name -> context, the same on all ranks) in every `interval`-th step; never if 0."""

    def __init__(self, interval: int, linears: Mapping[str, LinearContext]) -> None:
        if interval < 0:
            raise ValueError(f"precision.diagnostics.interval={interval} is negative; give a number of steps, or 0")
        self.interval = interval
        self._linears = dict(linears)
        self._probe: Probe | None = None

    def due(self, step: int) -> bool:
        """Whether `step` (from 0) is one to measure: 0, interval, 2 interval, ..."""
        return self.interval > 0 and step % self.interval == 0

    def measuring(self, step: int) -> AbstractContextManager[object]:
        """A context for the training step `step`, in which the linears are measured if it is due."""
        if not self.due(step):
            return nullcontext()
        self._probe = Probe()
        return self._probe.attached(self._linears)

    def collect(self) -> Record | None:
        """The measurements since the last call, over all ranks; None if there are none. Collective after a due step."""
        probe, self._probe = self._probe, None
        found = probe.collect(list(self._linears)) if probe is not None else {}
        return diagnostics_record(found) if found else None


def diagnostics_record(found: Mapping[str, LinearMeasurement]) -> Record:
    """What `metrics.jsonl` gets (besides `kind` and `step`):

    linears: name -> recipe, operands (name -> statistics), gemms (fprop, dgrad, wgrad -> relative error) and
    gradient_to_noise; blocks: name -> gradient_to_noise over the block's linears. Linears and GEMMs without a
    quantized operand are left out, and a gradient-to-noise ratio where wgrad is not quantized.
    """
    linears: dict[str, Any] = {}
    sums_of_blocks: dict[str, list[tuple[float, float]]] = {}
    for name, measurement in found.items():
        linears[name] = {
            "recipe": measurement.recipe,
            "operands": measurement.operands,
            "gemms": measurement.errors,
        }
        if measurement.wgrad_sums is not None:
            linears[name]["gradient_to_noise"] = _ratio(*measurement.wgrad_sums)
            sums_of_blocks.setdefault(block_of(name), []).append(measurement.wgrad_sums)
    blocks = {
        block: {"gradient_to_noise": _ratio(sum(signal for signal, _ in sums), sum(noise for _, noise in sums))}
        for block, sums in sums_of_blocks.items()
    }
    return {"linears": linears, "blocks": blocks}


# The larger a quantity the worse it is, but for these.
_BETTER_LARGE = ("snr_db", "gradient_to_noise")


def diagnostics_scalars(record: Record) -> dict[str, float]:
    """A record as a few curves for TensorBoard and wandb, `quantization_<quantity>/<operand or GEMM>_<median or worst>`
    over all linears; of gradient-to-noise ratios over all linears and all blocks.

    What each linear has is in `metrics.jsonl`, of which `scripts/report.py` makes a picture. Largest magnitude and
    root mean square are left out; their ratio, the crest, is here.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for linear in record["linears"].values():
        for operand, statistics in linear["operands"].items():
            for quantity in ("snr_db", "zeroed", "saturated", "crest"):
                found.setdefault((quantity, operand), []).append(statistics[quantity])
            if "crest_rht" in statistics:  # beside the one that the transform found
                found.setdefault(("crest", f"{operand}_rht"), []).append(statistics["crest_rht"])
        for gemm, error in linear["gemms"].items():
            found.setdefault(("error", gemm), []).append(error)
    for part in ("linears", "blocks"):
        for values in record[part].values():
            if "gradient_to_noise" in values:
                found.setdefault(("gradient_to_noise", part), []).append(values["gradient_to_noise"])
    scalars: dict[str, float] = {}
    for (quantity, name), every in found.items():
        if not (numbers := [number for number in every if not math.isnan(number)]):
            continue
        worst = min if quantity in _BETTER_LARGE else max
        scalars[f"quantization_{quantity}/{name}_median"] = median(numbers)
        scalars[f"quantization_{quantity}/{name}_worst"] = worst(numbers)
    return scalars


def block_of(linear: str) -> str:
    """`blocks.3` of `blocks.3.mixer.in_proj`."""
    return ".".join(linear.split(".")[:2])


def _ratio(signal: float, noise: float) -> float:
    """Square root of signal over noise, both squared norms; infinite without noise."""
    if noise == 0:
        return math.inf if signal > 0 else math.nan
    return math.sqrt(signal / noise)
