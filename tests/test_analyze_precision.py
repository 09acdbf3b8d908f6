import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import pretrain
from analysis.health import judge
from megatron_fp4.measure.diagnostics import LinearMeasurement
from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.plan import LinearShape
from megatron_fp4.quantization.rounding import rounding_key
from scripts import analyze_precision
from scripts.analyze_precision import rank_linears
from tests.composing import composed, plans_of
from tests.distributed.one_rank import flip_a_bit
from tests.precision.reference import NVFP4
from tests.programs import cells, error_line
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL

SETTINGS = [*SMALL, *FAST, "model.pattern=*-M", "model.hidden_dim=128", "model.head_dim=32", "train.sequence_length=64"]
SETTINGS += ["train.steps=3", "train.global_batch_size=4", "precision.switch.when=never"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run of three steps."""
    folder = tmp_path_factory.mktemp("run")
    assert pretrain.main([*SETTINGS, *small_corpus(folder), f"run.dir={folder / 'run'}"]) == 0
    return folder / "run" / "checkpoints" / "step_00000003"


def analyze(checkpoint: Path, *arguments: str) -> int:
    return analyze_precision.main([str(checkpoint), "--trust-config", *arguments])


def test_the_command_writes_a_plan_from_a_checkpoint(checkpoint: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "plan.yaml"
    assert analyze(checkpoint, "--budget", "0.4", "--micro-batches", "2", "--output", str(output)) == 0
    plan = yaml.safe_load(output.read_text())
    assert len(plan["bf16"]) == 2 and len(plan["measured"]) == 6
    errors = {name: row["fprop"] for name, row in plan["measured"].items()}
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert set(plan["bf16"]) == set(list(errors)[:2])
    assert all(0.01 < error < 0.5 for error in errors.values())
    selection = {"recipe": "nvfp4", "micro_batches": 2, "linears_kept": "2 of 6"}
    assert selection.items() <= plan["selection"].items()
    assert [row["kept"] for row in plan["measured"].values()] == [True] * 2 + [False] * 4
    rows = cells(printed := capsys.readouterr().out)[2:8]
    assert [row[0] for row in rows] == list(errors) and [row[-1] for row in rows] == ["BF16"] * 2 + [""] * 4
    assert "fprop, dgrad, wgrad: relative error" in printed


def test_sections_are_ranked_and_a_run_reads_their_plan(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.yaml"
    assert analyze(checkpoint, "--sections", "--budget", "0.5", "--output", str(output)) == 0
    plan = yaml.safe_load(output.read_text())
    assert len(plan["measured"]) == 3 + 5 + 4 and "blocks.2.mixer.in_proj[dt]" in plan["measured"]
    config = composed(*SETTINGS, "precision.bf16_blocks.last=0", f"precision.bf16_blocks.file={output}")
    in_bf16 = [row.linear for row in plans_of(config)[0].rows if not row.recipe.quantized]
    assert sum(max(1, len(linear.sections)) for linear in in_bf16) == len(plan["bf16"]) == 6


def test_another_recipe_and_budget(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.yaml"
    arguments = ["--gemm", "wgrad", "--micro-batches", "20", "--budget", "0.5", "--output", str(output)]
    assert analyze(checkpoint, "precision=fp8_block", *arguments) == 0
    plan = yaml.safe_load(output.read_text())
    assert plan["selection"]["micro_batches"] == 6  # as many as three steps have
    assert len(plan["bf16"]) == 3 and plan["selection"]["recipe"] == "fp8_block"
    errors = [row["wgrad"] for row in plan["measured"].values()]
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.1  # finer than FP4


def test_wrong_input_gives_one_line_before_measuring(checkpoint: Path, tmp_path: Path, capsys) -> None:
    damaged = tmp_path / "step_00000003"
    shutil.copytree(checkpoint, damaged)
    flip_a_bit(next(damaged.glob("*.distcp")))
    with mock.patch.object(analyze_precision, "losses", side_effect=AssertionError("measured")):
        for given, arguments, message in (
            (checkpoint, ["precision=bf16"], "quantizes nothing"),
            (checkpoint, ["nonsense"], "write key=value"),
            (checkpoint, ["--micro-batches", "0"], "give 1 or more"),
            (checkpoint, ["--budget", "2"], "--budget 2.0 is not a share"),
            (checkpoint, ["--budget", "0.01"], "of 6 linears keeps none in BF16; the smallest is 0.1667"),
            (checkpoint, ["--output", "none/plan.yaml"], "none/plan.yaml cannot be written: there is no folder none"),
            (tmp_path / "none", [], "is not a folder"),
            (damaged, ["--budget", "0.5"], "is damaged"),
            (checkpoint, ["--health", "parallel.tensor=2", "parallel.expert=2"], "parallel.tensor=1 parallel.expert=1"),
        ):
            assert analyze(given, *arguments) == 2
            assert message in error_line(capsys, "analyze_precision.py")


def changed_requests(monkeypatch: pytest.MonkeyPatch, change: Callable[[OperandRequest], OperandRequest]) -> None:
    """Let the emulated backend compute what `change` makes of its requests."""
    operands = EmulatedBackend.operands

    def changed(self: Any, x: Any, place: Any, *requests: Any) -> Any:
        return operands(self, x, place, *(request and change(request) for request in requests))

    monkeypatch.setattr(EmulatedBackend, "operands", changed)


def nearest(request: OperandRequest) -> OperandRequest:
    return replace(request, operand=replace(request.operand, rounding="nearest"), key=None)


def other_draws(request: OperandRequest) -> OperandRequest:
    return replace(request, key=request.key and rounding_key(request.slot.name))


DAMAGES: dict[str, tuple[Callable[[OperandRequest], OperandRequest], bool, set[str]]] = {
    "sound": (lambda request: request, True, set()),
    "nearest for stochastic": (nearest, True, {"dgrad", "wgrad"}),
    "no transform": (lambda request: replace(request, rht=0), True, {"wgrad"}),
    "sound, draws by the backend": (other_draws, False, set()),
    "nearest for stochastic, draws by the backend": (nearest, False, {"dgrad", "wgrad"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_not_healthy(checkpoint: Path, capsys, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    change, draws_ours, named = DAMAGES[damage]
    changed_requests(monkeypatch, change)
    monkeypatch.setattr(EmulatedBackend, "draws_ours", draws_ours)
    assert analyze(checkpoint, "--health") == (4 if named else 0)
    verdict, *reasons = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    assert verdict == (
        "WORSE THAN USUAL" if named else "HEALTHY: 12 products as specified on this machine, errors and loss as usual"
    )
    assert {reason.split()[0] for reason in reasons} - {"and"} == named


def test_products_and_losses_are_judged() -> None:
    contexts = {"a": LinearContext("a", NVFP4)}

    def judged(error: float, bias: float, *losses: tuple[float, float], difference: float = 0.0) -> str:
        sums = {"fprop": (1.0, error**2, bias), "fprop_difference": (1.0, difference**2, 0.0)}
        return judge({"a": LinearMeasurement("nvfp4", {}, sums)}, contexts, losses).verdict.split(":")[0]

    usual = [(4.002, 4.0), (4.003, 4.0), (4.002, 4.0), (4.001, 4.0)]
    assert judged(0.1, -0.01, *usual) == "HEALTHY"
    assert judged(0.1, -0.01, *usual, difference=0.03).startswith("WORSE THAN USUAL\n  fprop of a differs")
    assert judged(0.4, -0.01, *usual).startswith("WORSE THAN USUAL\n  fprop of a")
    assert judged(0.1, -0.07, *usual).startswith("WORSE THAN USUAL\n  fprop of a")
    assert judged(0.1, math.nan, *usual).startswith("WORSE THAN USUAL\n  fprop of a")
    assert judged(0.1, 0.0, *((4.1 + loss, 4.0) for loss in (0.0, 0.01, 0.02))).startswith(
        "WORSE THAN USUAL\n  the loss"
    )
    assert judged(0.1, 0.0, (4.1, 4.0), (3.9, 4.0)).startswith("NOT ESTABLISHED\n  whether the loss")
    assert judged(0.1, 0.0, (4.1, 4.0)).startswith("NOT ESTABLISHED\n  whether the loss")  # one has no interval
    assert judged(0.1, 0.0, (math.nan, 4.0), (4.0, 4.0)).startswith("WORSE THAN USUAL\n  the loss")


SHAPES = [
    LinearShape(f"blocks.{block}.mixer.{name}", block, 64, out)
    for block in range(5)
    for name, out in (("up_proj", 256), ("down_proj", 64))
]
# The error of wgrad rises from linear to linear, that of dgrad falls, and that of fprop is the same everywhere.
ERRORS = {s.name: {"fprop": 0.14, "dgrad": 0.2 - 0.01 * i, "wgrad": 0.1 + 0.02 * i} for i, s in enumerate(SHAPES)}


def test_linears_with_the_largest_errors_come_first() -> None:
    ranked = rank_linears(SHAPES, ERRORS, "wgrad")
    assert ranked == SHAPES[::-1]
    assert rank_linears(SHAPES, ERRORS, "fprop") == SHAPES  # ties keep their order
    unknown = rank_linears(SHAPES, ERRORS | {SHAPES[3].name: {"wgrad": math.nan}}, "wgrad")
    assert unknown[0] == SHAPES[3]
    with pytest.raises(ValueError, match=r"nothing was measured for blocks\.4\.mixer\.down_proj"):
        rank_linears(SHAPES, {n: e for n, e in ERRORS.items() if n != SHAPES[-1].name}, "wgrad")
    with pytest.raises(ValueError, match="quantizes no operand of dgrad"):
        rank_linears(SHAPES, {shape.name: {"fprop": 0.1} for shape in SHAPES}, "dgrad")
