"""What diagnostics measured early in a run, as numbers by which recipes can be compared: its *figures*.

A figure is one quantity of an operand or a GEMM (`metrics.jsonl`, kind `diagnostics`), taken over all linears, from the
records of the first 5% of the run's own steps (of a branch: behind its start; at least the first record), averaged.
Figures are such that larger is worse:

    error       of a GEMM: ||q - exact|| / ||exact||; of an operand the same, 10^(-snr_db / 20); `all GEMMs`: the root
                of the sum of squares over the three. That of wgrad is 1 / gradient_to_noise
    zeroed, saturated, crest
                as measure/statistics.py has them; crest is behind the Hadamard transform where there is one

    loss        of training, above the base's of the same step (in percent, the mean over the first fifth of the run's
                own steps): no error, but what errors did so far; of pairs that read the same tokens

Over linears: `median` and `worst` of those that the recipe quantizes (what TensorBoard and wandb show), and of errors
`mean` and `weighted` (by the linear's weights) of all linears, in which those that it leaves in BF16 have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

EARLY = 0.05
_EARLY_LOSS = 0.2
LOSS = "training loss above the base (%)"
# A quantity of an operand that is not quantized.
_ABSENT_IS_ZERO = ("error", "zeroed", "saturated")

Record = Mapping[str, Any]


def early_records(records: Sequence[Record]) -> list[Record]:
    """The diagnostics of the first 5% of a run's own steps, and at least the first one."""
    starts = [record for record in records if record["kind"] == "run"]
    first = int(starts[0].get("step", 0)) if starts else 0
    last = int(starts[-1].get("steps", 0)) if starts else 0
    found = [record for record in records if record["kind"] == "diagnostics"]
    until = first + EARLY * (last - first)
    return [record for record in found if record["step"] <= until] or found[:1]


def figures(records: Sequence[Record], sizes: Mapping[str, int]) -> dict[str, float]:
    """Of one run, averaged over its `early_records`: `error, fprop, median` and so on -> number.

    sizes: linear -> its number of weights, of all linears of the model. Raises ValueError for a linear that is not
    there.
    """
    sums: dict[str, list[float]] = {}
    for record in records:
        for name, value in _of_record(record, sizes).items():
            sums.setdefault(name, []).append(value)
    return {name: mean(values) for name, values in sums.items()}


def early_loss(records: Sequence[Record], base: Sequence[Record]) -> dict[str, float]:
    """`LOSS` of a run, held against a base run that began alike and read the same; empty if no step is in both.

    Skipped steps, and those whose loss is not finite, are left out.
    """
    starts = [record for record in records if record["kind"] == "run"]
    first, last = (int(starts[0].get("step", 0)), int(starts[-1].get("steps", 0))) if starts else (0, 0)
    until = first + _EARLY_LOSS * (last - first)
    of_base = _losses(base)
    gaps = [loss / of_base[step] - 1 for step, loss in _losses(records).items() if step <= until and step in of_base]
    return {LOSS: 100 * mean(gaps)} if gaps else {}


def _losses(records: Sequence[Record]) -> dict[int, float]:
    found = {int(r["step"]): _number(r["loss"]) for r in records if r["kind"] == "step" and not r.get("skipped")}
    return {step: loss for step, loss in found.items() if math.isfinite(loss)}


def _of_record(record: Record, sizes: Mapping[str, int]) -> dict[str, float]:
    by_quantity: dict[str, dict[str, float]] = {}
    for name, linear in record["linears"].items():
        if name not in sizes:
            raise ValueError(f"its diagnostics have a linear {name}, which the model of its config.yaml has not")
        for quantity, value in _quantities(linear):
            if math.isfinite(value):
                by_quantity.setdefault(quantity, {})[name] = value
    found = {}
    total = sum(sizes.values())
    for quantity, values in by_quantity.items():
        found[f"{quantity}, median"] = median(values.values())
        found[f"{quantity}, worst"] = max(values.values())
        if quantity.startswith("error"):
            found[f"{quantity}, mean"] = sum(values.values()) / len(sizes)
            found[f"{quantity}, weighted"] = sum(sizes[name] * value for name, value in values.items()) / total
    return found


def _quantities(linear: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """What was measured at a linear, as numbers of which larger ones are worse; NaN for what JSON has no number for."""
    squares = 0.0
    for gemm, error in linear["gemms"].items():
        yield f"error, {gemm}", _number(error)
        squares += _number(error) ** 2
    if linear["gemms"]:
        yield "error, all GEMMs", math.sqrt(squares)
    for operand, statistics in linear["operands"].items():
        yield f"error, {operand}", 10 ** (-_number(statistics["snr_db"]) / 20)
        for quantity in ("zeroed", "saturated"):
            yield f"{quantity}, {operand}", _number(statistics[quantity])
        yield f"crest, {operand}", _number(statistics.get("crest_rht", statistics["crest"]))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def of_recipe(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over the runs of a recipe, of the figures that all of them have."""
    common = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: mean(run[name] for run in runs) for name in common}


def by_figure(points: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Recipe -> figure -> number as figure -> recipe -> number, in the order of the recipes. An operand that a recipe
    does not quantize, but others do, has no error; figures without such a zero, crests, are left out then."""
    found = {}
    for name in dict.fromkeys(name for of_point in points.values() for name in of_point):
        absent = 0.0 if name.startswith(_ABSENT_IS_ZERO) else math.nan
        values = {recipe: of_point.get(name, absent) for recipe, of_point in points.items()}
        if not any(math.isnan(value) for value in values.values()):
            found[name] = values
    return found
