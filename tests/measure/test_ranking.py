from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.measure.ranking import plan_file, rank_linears, select_bf16
from megatron_fp4.precision.plan import LinearShape, build_plan
from megatron_fp4.precision.recipe import Gemm, Operand, Recipe

SHAPES = [
    LinearShape(f"blocks.{block}.mixer.{name}", block, 64, out)
    for block in range(5)
    for name, out in (("up_proj", 256), ("down_proj", 64))
]


def _errors() -> dict[str, dict[str, float]]:
    """wgrad worst at the end, dgrad worst at the beginning, fprop the same everywhere."""
    return {
        shape.name: {"fprop": 0.14, "dgrad": 0.2 - 0.01 * i, "wgrad": 0.1 + 0.02 * i} for i, shape in enumerate(SHAPES)
    }


def test_the_worst_come_first() -> None:
    ranked = rank_linears(SHAPES, _errors(), "wgrad")
    assert [row.linear for row in ranked] == SHAPES[::-1]
    assert ranked[0].score == pytest.approx(0.28)
    assert [row.linear for row in rank_linears(SHAPES, _errors(), "dgrad")] == SHAPES
    assert [row.linear for row in rank_linears(SHAPES, _errors(), "fprop")] == SHAPES  # ties: as given
    score = rank_linears(SHAPES, _errors(), "all")[0].score
    assert score == pytest.approx(math.sqrt((0.14**2 + 0.11**2 + 0.28**2) / 3))


def test_what_cannot_be_ranked() -> None:
    with pytest.raises(ValueError, match="gemm bgrad is not one of"):
        rank_linears(SHAPES, _errors(), "bgrad")
    with pytest.raises(ValueError, match=r"nothing was measured at blocks\.4\.mixer\.down_proj"):
        rank_linears(SHAPES, {n: e for n, e in _errors().items() if n != SHAPES[-1].name}, "wgrad")
    with pytest.raises(ValueError, match="quantizes no operand of dgrad"):
        rank_linears(SHAPES, {shape.name: {"fprop": 0.1} for shape in SHAPES}, "dgrad")


@pytest.mark.parametrize("budget", [0.05, 0.15, 0.21, 0.37, 0.5, 0.9, 0.99])
def test_a_budget_of_flops_is_kept_and_used(budget: float) -> None:
    ranked = rank_linears(SHAPES, _errors(), "wgrad")
    chosen = select_bf16(ranked, budget, "flops")
    total = sum(shape.flops_per_token for shape in SHAPES)
    spent = sum(row.linear.flops_per_token for row in chosen)
    assert spent <= budget * total * (1 + 1e-9)
    left_out = [row.linear.flops_per_token for row in ranked if row not in chosen]
    assert all(spent + cost > budget * total for cost in left_out)
    assert chosen[0].linear == (SHAPES[-1])  # the worst of all fits


def test_the_file_is_what_a_plan_reads(tmp_path: Path) -> None:
    ranked = rank_linears(SHAPES, _errors(), "wgrad")
    chosen = select_bf16(ranked, 0.3, "linears")
    path = tmp_path / "plan.yaml"
    path.write_text(plan_file(ranked, chosen, {"recipe": "nvfp4", "gemm": "wgrad", "budget": 0.3}))
    content = yaml.safe_load(path.read_text())
    assert content["bf16"] == ["blocks.3.mixer.down_proj", "blocks.4.mixer.down_proj", "blocks.4.mixer.up_proj"]
    assert content["selection"]["linears_kept"] == "3 of 10"
    assert content["measured"]["blocks.4.mixer.up_proj"] == {"kept": True, "fprop": 0.14, "dgrad": 0.12, "wgrad": 0.26}

    recipe = Recipe("nvfp4", Gemm(Operand("nvfp4", (1, 16))))
    plan = build_plan(SHAPES, recipe, Bf16BlocksConfig(file=str(path)), num_blocks=5)
    assert [row.linear.name for row in plan.rows if not row.recipe.quantized] == [
        "blocks.3.mixer.down_proj",
        "blocks.4.mixer.up_proj",
        "blocks.4.mixer.down_proj",
    ]
