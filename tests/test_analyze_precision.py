from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import yaml

from data.indexed import IndexedDatasetWriter
from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.precision.plan import LinearShape, build_plan
from megatron_fp4.precision.recipe import Gemm, Operand, Recipe
from scripts import analyze_precision
from scripts.analyze_precision import plan_file, rank_linears, select_bf16

SMALL = [
    "model.pattern=*-M",
    "model.vocab_size=128",
    "model.hidden_dim=128",
    "model.ffn_dim=128",
    "model.num_query_heads=4",
    "model.mamba_num_heads=4",
    "model.mamba_head_dim=32",
    "model.mamba_state_dim=32",
    "train.steps=3",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.sequence_length=64",
    "data=indexed",
    "data.num_workers=0",
    "data.phases=[{name: main, fraction: 1.0, blend: {a: 1.0}}]",
    "precision.switch.when=never",
    "precision.diagnostics.interval=2",
    "validation.interval=0",
    "logging.tensorboard=false",
    "logging.report=false",
    "run.device=cpu",
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of three steps with diagnostics, and its checkpoint."""
    import pretrain

    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "a", np.uint16) as writer:
        for _ in range(40):
            writer.add_document(rng.integers(0, 128, 64))
    arguments = [*SMALL, f"data.sources={{a: {folder / 'a'}}}", f"run.dir={folder / 'run'}"]
    assert pretrain.main(arguments) == 0
    yield folder / "run"


def _checkpoint(run_dir: Path) -> str:
    return str(run_dir / "checkpoints" / "step_00000003")


def test_a_plan_from_a_checkpoint(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_dir / "plan_bf16.yaml"
    arguments = ["--budget", "0.4", "--micro-batches", "2", "--output", str(output)]
    assert analyze_precision.main([_checkpoint(run_dir), "--trust-config", *arguments]) == 0
    plan = yaml.safe_load(output.read_text())
    assert len(plan["bf16"]) == 2 and len(plan["measured"]) == 6
    errors = {name: row["fprop"] for name, row in plan["measured"].items()}
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert set(plan["bf16"]) == set(list(errors)[:2])
    assert all(0.01 < error < 0.5 for error in errors.values())
    assert plan["selection"]["recipe"] == "nvfp4" and plan["selection"]["micro_batches"] == 2
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:7]] == list(errors)
    assert sum(line.endswith("BF16") for line in printed[1:7]) == 2


def test_another_recipe_and_budget(run_dir: Path) -> None:
    output = run_dir / "plan_fp8.yaml"
    arguments = ["--by", "flops", "--gemm", "all", "--micro-batches", "20", "--output", str(output)]
    assert (
        analyze_precision.main(
            [_checkpoint(run_dir), "--trust-config", "precision=fp8_block", "--budget", "0.5", *arguments]
        )
        == 0
    )
    plan = yaml.safe_load(output.read_text())
    assert plan["selection"]["micro_batches"] == 6  # all that three steps have
    assert 0 < plan["selection"]["share_of_flops"] <= 0.5 and plan["selection"]["recipe"] == "fp8_block"
    assert all(row["wgrad"] < 0.1 for row in plan["measured"].values())  # finer than FP4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["precision=bf16"], "quantizes nothing"),
        (["nonsense"], "write key=value"),
        (["--micro-batches", "0"], "at least 1"),
        (["--budget", "2"], "--budget 2.0 is not a share"),
        (["--budget", "0.01"], "of 6 linears keeps none in BF16; the smallest is 0.1667"),
        (["--output", "none/plan.yaml"], "none/plan.yaml cannot be written: there is no folder none; make it"),
    ],
)
def test_what_a_user_can_get_wrong(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with mock.patch.object(analyze_precision, "measure", side_effect=AssertionError("measured")):
        assert analyze_precision.main([_checkpoint(run_dir), "--trust-config", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("analyze_precision.py: ") and error.count("\n") == 1


def test_a_checkpoint_that_is_missing_or_damaged(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert analyze_precision.main([str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    damaged = tmp_path / "step_00000003"
    damaged.mkdir()
    for file in Path(_checkpoint(run_dir)).iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    tensors = next(damaged.glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert analyze_precision.main([str(damaged)]) == 2
    assert "is damaged" in capsys.readouterr().err


# Ranking and choosing.

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
    with pytest.raises(ValueError, match=r"nothing was measured at blocks\.4\.mixer\.down_proj"):
        rank_linears(SHAPES, {n: e for n, e in _errors().items() if n != SHAPES[-1].name}, "wgrad")
    with pytest.raises(ValueError, match="quantizes no operand of dgrad"):
        rank_linears(SHAPES, {shape.name: {"fprop": 0.1} for shape in SHAPES}, "dgrad")


@pytest.mark.parametrize("budget", [0.05, 0.21, 0.5, 0.99])
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
