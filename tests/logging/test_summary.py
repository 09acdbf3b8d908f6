"""What a run says of its recipes before it begins."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from megatron_fp4.config.schema import Config, RunConfig
from megatron_fp4.logging.console import RunConsole
from megatron_fp4.logging.summary import recipe_facts, summarize
from megatron_fp4.precision.plan import LinearShape, Plan, PlannedLinear
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe

X8, X4 = Operand("mxfp8", (1, 32)), Operand("nvfp4", (1, 16))
MXFP8 = Recipe("mxfp8", Gemm(X8, X8), Gemm(X8, X8), Gemm(X8, X8))
NVFP4 = Recipe("nvfp4", Gemm(X4, X4), Gemm(X4, X4), Gemm(X4, X4, 16))


def plan_of(*recipes: Recipe) -> Plan:
    shapes = (LinearShape(f"blocks.{i}.mixer.up_proj", i, 64, 128) for i in range(len(recipes)))
    return Plan(tuple(PlannedLinear(shape, recipe, "") for shape, recipe in zip(shapes, recipes, strict=True)))


def test_one_recipe_needs_no_name() -> None:
    facts = recipe_facts(plan_of(NVFP4, BF16, NVFP4))
    assert facts == {
        "fprop x|W": "nvfp4 1x16 | nvfp4 1x16",
        "dgrad dy|W": "nvfp4 1x16 | nvfp4 1x16",
        "wgrad dy|x": "nvfp4 1x16 | nvfp4 1x16, RHT 16 (fixed signs)",
    }
    assert list(recipe_facts(plan_of(BF16)).values()) == ["bf16 | bf16"] * 3


def test_every_quantized_recipe_of_the_plan_is_printed() -> None:
    """The run's own, and those of its exceptions."""
    facts = recipe_facts(plan_of(NVFP4, MXFP8, BF16, replace(NVFP4)))
    assert list(facts) == [f"{name}, {gemm}" for name in ("nvfp4", "mxfp8") for gemm in recipe_facts(plan_of(NVFP4))]
    assert facts["nvfp4, wgrad dy|x"] == "nvfp4 1x16 | nvfp4 1x16, RHT 16 (fixed signs)"
    assert facts["mxfp8, wgrad dy|x"] == "mxfp8 1x32 | mxfp8 1x32"


def test_a_loss_that_is_not_finite_is_null_in_the_summary(tmp_path: Path) -> None:
    """JSON has no NaN, and whoever reads the file need not be Python."""
    config, losses = Config(run=RunConfig(dir=str(tmp_path))), {"code": math.nan, "prose": 2.0}
    summarize(RunConsole(300, active=False), config, 100, None, losses, {"code": 6.0, "prose": 6.0}, {"code": math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary["validation loss, code (nats)"] is None and summary["below unigram entropy, code"] is None
    assert summary["validation loss, prose (nats)"] == 2.0 and summary["finished"] is True
