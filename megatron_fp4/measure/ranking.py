"""Choosing the linears to keep in BF16 by what was measured at them.

The paper keeps the first and last blocks in BF16 and remarks (appendix E.2) that the last layers show larger
quantization errors in their weight gradients, and that such errors could decide which linears need more precision.
This is that decision, by the errors of whichever GEMM is named: order the linears, take the worst until a budget is
spent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megatron_fp4.precision.plan import LinearShape

GEMM_CHOICES = ("wgrad", "dgrad", "fprop", "all")
BUDGET_UNITS = ("linears", "flops")


@dataclass(frozen=True)
class RankedLinear:
    """A linear with its measured relative errors by GEMM, and the score that it is ordered by (larger is worse)."""

    linear: LinearShape
    errors: dict[str, float]
    score: float


def rank_linears(
    linears: Iterable[LinearShape], errors: Mapping[str, Mapping[str, float]], gemm: str
) -> list[RankedLinear]:
    """The linears, worst first; equal scores in the order given.

    errors: linear -> GEMM -> relative error of its result. gemm: the one whose error is the score, or `all` for the
    root mean square over the three (a GEMM without an error counts as exact). An error that is not a number is the
    worst there is.

    Raises ValueError for another `gemm`, a linear without measurements, or one GEMM that no linear was measured at.
    """
    if gemm not in GEMM_CHOICES:
        raise ValueError(f"--gemm {gemm} is not one of {', '.join(GEMM_CHOICES)}")
    shapes = list(linears)
    if missing := [shape.name for shape in shapes if shape.name not in errors]:
        raise ValueError(f"nothing was measured at {missing[0]} ({len(missing)} linears in all); is it ever used?")
    if gemm != "all" and not any(gemm in errors[shape.name] for shape in shapes):
        raise ValueError(f"--gemm {gemm}: the recipe quantizes no operand of {gemm}; choose another GEMM or recipe")
    ranked = [RankedLinear(shape, dict(errors[shape.name]), _score(errors[shape.name], gemm)) for shape in shapes]
    return sorted(ranked, key=lambda row: row.score, reverse=True)


def allowance(linears: Sequence[LinearShape], budget: float, by: str) -> tuple[list[int], int]:
    """What each of `linears` costs of a `budget` as `select_bf16` takes it, and how much there is to spend.

    Raises ValueError for another budget or unit, or if the budget allows none.
    """
    if by not in BUDGET_UNITS:
        raise ValueError(f"--by {by} is not one of {', '.join(BUDGET_UNITS)}")
    if not 0 < budget < 1:
        raise ValueError(f"--budget {budget} is not a share of them; give a number above 0 and below 1, such as 0.15")
    costs = [1 if by == "linears" else linear.flops_per_token for linear in linears]
    # A product such as 0.15 * 20 may come out a hair under the whole number that it stands for.
    left = math.floor(budget * sum(costs) * (1 + 1e-12))
    if min(costs, default=0) > left:
        smallest = math.ceil(min(costs) / sum(costs) * 1e4) / 1e4
        raise ValueError(f"--budget {budget} of {len(linears)} linears keeps none in BF16; the smallest is {smallest}")
    return costs, left


def select_bf16(ranked: Sequence[RankedLinear], budget: float, by: str) -> list[RankedLinear]:
    """The linears to keep in BF16, worst first: as many of the worst as `budget` allows, never more.

    budget: share of all `ranked`, in (0, 1). by: `linears` (their number) or `flops` (of their GEMMs); with `flops` a
    linear that no longer fits is passed over for a less bad one that does.

    Raises ValueError as `allowance` does.
    """
    costs, left = allowance([row.linear for row in ranked], budget, by)
    chosen = []
    for row, cost in zip(ranked, costs, strict=True):
        if cost <= left:
            chosen.append(row)
            left -= cost
    return chosen


def plan_file(ranked: Sequence[RankedLinear], chosen: Sequence[RankedLinear], facts: Mapping[str, Any]) -> str:
    """The text of a plan file for `precision.bf16_blocks.file`.

    Its list `bf16` is what a run reads, by block; `selection` (`facts` and the shares kept) and
    `measured` (all linears, worst first) are for people.
    """
    kept = {row.linear.name for row in chosen}
    flops = sum(row.linear.flops_per_token for row in ranked)
    shares = {
        "linears_kept": f"{len(chosen)} of {len(ranked)}",
        "share_of_linears": round(len(chosen) / len(ranked), 4),
        "share_of_flops": round(sum(row.linear.flops_per_token for row in chosen) / flops, 4),
    }
    in_order = sorted(chosen, key=lambda row: (row.linear.block, row.linear.name))
    content = {
        "bf16": [row.linear.name for row in in_order],
        "selection": {**facts, **shares},
        "measured": {
            row.linear.name: {
                "kept": row.linear.name in kept,
                **{gemm: float(f"{error:.4g}") for gemm, error in row.errors.items()},
            }
            for row in ranked
        },
    }
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=False, width=120)


def _score(errors: Mapping[str, float], gemm: str) -> float:
    score = math.sqrt(sum(e * e for e in errors.values()) / 3) if gemm == "all" else errors.get(gemm, 0.0)
    return math.inf if math.isnan(score) else score
