"""Figures of what diagnostics measured early, and their correlation with gaps: known ones, and none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.report.early_figures import LOSS, by_figure, early_loss, early_records, figures, of_recipe
from megatron_fp4.report.held_out import read_groups
from megatron_fp4.report.prediction import by_chance, correlation_table, correlations, strongest
from models.pattern import linear_shapes
from scripts import predict_gap

MODEL = {"pattern": "M-", "hidden_dim": 32, "ffn_dim": 64, "mamba_num_heads": 2, "mamba_head_dim": 16}
LINEARS = [shape.name for shape in linear_shapes(ModelConfig(**MODEL))]


def operand(snr_db: float | None, zeroed: float = 0.1, **more: float) -> dict[str, float | None]:
    return {"snr_db": snr_db, "zeroed": zeroed, "saturated": 0.0, "amax": 1.0, "rms": 0.5, "crest": 2.0, **more}


def record(step: int, errors: dict[str, float]) -> dict[str, Any]:
    """errors: linear -> relative error of its fprop, whose input has the SNR of that."""
    linears = {
        name: {"recipe": "x", "operands": {"fprop_activation": operand(-20 * np.log10(e))}, "gemms": {"fprop": e}}
        for name, e in errors.items()
    }
    return {"kind": "diagnostics", "step": step, "linears": linears, "blocks": {}}


def test_the_first_twentieth_of_a_runs_own_steps_and_of_a_branch_its_first_record():
    records = [{"kind": "run", "step": 600, "steps": 1000}, *(record(step, {}) for step in (601, 611, 621, 631))]
    assert [r["step"] for r in early_records(records)] == [601, 611]
    assert [r["step"] for r in early_records([{"kind": "run", "step": 0, "steps": 100}, *records[1:]])] == [601]
    assert early_records([{"kind": "run", "step": 0, "steps": 100}]) == []


def test_training_loss_above_the_base_over_the_first_fifth():
    def steps(losses: dict[int, float | None], **more: Any) -> list[dict[str, Any]]:
        return [{"kind": "step", "step": step, "loss": loss, **more} for step, loss in losses.items()]

    run = [{"kind": "run", "step": 100, "steps": 150}]
    records = run + steps({101: 2.02, 102: 2.06, 103: None, 111: 4.0}) + steps({104: 9.0}, skipped=True)
    base = steps({100: 1.0, 101: 2.0, 102: 2.0, 103: 2.0, 104: 2.0, 111: 2.0})
    assert early_loss(records, base) == {LOSS: pytest.approx((1.0 + 3.0) / 2)}
    assert early_loss(records, steps({200: 1.0})) == {}


def test_figures_over_linears():
    sizes = {"a": 6, "b": 3, "c": 1}  # of c nothing was measured: BF16
    found = figures([record(1, {"a": 0.1, "b": 0.4}), record(2, {"a": 0.3, "b": 0.6})], sizes)
    expected = {"median": (0.25 + 0.45) / 2, "worst": 0.5, "mean": (0.5 + 0.9) / 6, "weighted": (1.8 + 3.6) / 20}
    for over, value in expected.items():
        for quantity in ("fprop", "fprop_activation", "all GEMMs"):
            assert found[f"error, {quantity}, {over}"] == pytest.approx(value), (quantity, over)
    assert found["crest, fprop_activation, median"] == 2.0 and found["zeroed, fprop_activation, worst"] == 0.1
    with pytest.raises(ValueError, match="have a linear b, which"):
        figures([record(1, {"b": 0.4})], {"a": 6})


def test_all_gemms_add_up_and_a_transform_has_its_own_crest():
    linear = {
        "gemms": {"fprop": 0.3, "dgrad": 0.4, "wgrad": None},
        "operands": {"wgrad_gradient": operand(None, crest_rht=1.5)},
    }
    found = figures([{"linears": {"a": linear}}], {"a": 1})
    assert "error, wgrad, median" not in found and "error, wgrad_gradient, median" not in found  # not finite
    assert found["crest, wgrad_gradient, worst"] == 1.5
    linear["gemms"] = {"fprop": 0.3, "dgrad": 0.4}
    assert figures([{"linears": {"a": linear}}], {"a": 1})["error, all GEMMs, worst"] == pytest.approx(0.5)


def test_what_a_recipe_does_not_quantize_has_no_error_and_no_crest():
    points = {"both": {"error, wgrad, median": 0.2, "crest, x, median": 3.0}, "forward": {"error, fprop, median": 0.1}}
    assert by_figure(points) == {
        "error, wgrad, median": {"both": 0.2, "forward": 0.0},
        "error, fprop, median": {"both": 0.0, "forward": 0.1},
    }
    assert of_recipe([{"a": 1.0, "b": 1.0}, {"a": 3.0}]) == {"a": 2.0}


def study(count: int, related: bool) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Recipes with 20 figures of noise and, if related, one that is the gap's square."""
    generator = np.random.default_rng(5)
    gaps = {f"r{i}": float(gap) for i, gap in enumerate(generator.uniform(0.1, 2.0, count))}
    points = {r: {f"zeroed, {j}, median": float(generator.normal()) for j in range(20)} for r in gaps}
    if related:
        for recipe, gap in gaps.items():
            points[recipe] |= {"error, wgrad, median": gap**2, "error, wgrad, worst": 3 * gap**2}
    return points, gaps


def test_a_relation_is_found_and_is_more_than_chance():
    points, gaps = study(12, related=True)
    first, second, third, *_ = found = correlations(points, gaps)
    assert [first.figure, second.figure] == ["error, wgrad, median", "error, wgrad, worst"]
    assert first.spearman == pytest.approx(1.0) and 0.9 < first.pearson < 1.0 and first.count == 12
    assert (first.low, first.high, first.weakest) == (pytest.approx(1.0),) * 3
    assert [one.figure for one in strongest(found, 2)] == [first.figure, third.figure]
    assert abs(third.spearman) < (chance := by_chance(points, gaps)) < 1.0
    assert "1.00 is more than chance gives" in correlation_table(found, chance)
    assert correlations(points, {name: -gap for name, gap in gaps.items()})[0].spearman == pytest.approx(-1.0)


def test_without_a_relation_the_strongest_is_no_more_than_chance():
    points, gaps = study(12, related=False)
    found = correlations(points, gaps)
    chance = by_chance(points, gaps)
    assert abs(found[0].spearman) > 0.4 and "is no more than chance gives" in correlation_table(found, chance)
    assert all(one.low <= one.spearman <= one.high for one in found)
    assert sum(one.low <= 0 <= one.high for one in found) >= 15
    assert all(np.sign(one.spearman) * one.weakest <= abs(one.spearman) for one in found)


def test_ties_share_their_rank():
    points = {name: {"error, x, median": x} for name, x in zip("abcde", (1.0, 1.0, 2.0, 3.0, 3.0), strict=True)}
    gaps = dict(zip("abcde", (0.1, 0.2, 0.3, 0.4, 0.5), strict=True))
    x, y = np.array([0.5, 0.5, 2, 3.5, 3.5]), np.arange(5)
    assert correlations(points, gaps)[0].spearman == pytest.approx(np.corrcoef(x, y)[0, 1])


def write_run(folder: Path, loss: float, error: float | None, origin: str | None = None) -> None:
    """origin: the run that it is a branch of, from step 10."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": 1}, "model": MODEL}))
    records = [
        {"kind": "run", "step": 0, "steps": 100}
        if origin is None
        else {
            "kind": "run",
            "step": 10,
            "steps": 100,
            "origin": {"path": f"/there/{origin}/checkpoints/x", "step": 10},
        },
        {"kind": "step", "step": 11, "loss": loss},
        *([] if error is None else [record(1, dict.fromkeys(LINEARS, error)), record(90, {LINEARS[0]: 0.9})]),
        {"kind": "validation", "step": 100, "tokens": 10**6, "losses": {"a": loss, "noise": 3.0}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_branch_of_a_branch_is_held_against_the_partner_of_its_trunk(tmp_path: Path):
    write_run(tmp_path / "base", 2.0, None)
    write_run(tmp_path / "fp4", 2.2, 0.2, "base")
    write_run(tmp_path / "switch", 2.1, 0.1, "fp4")
    runs = read_groups([f"{name}={tmp_path / name}" for name in ("base", "fp4", "switch")])
    compared = [run for group in runs.values() for run in group]
    assert predict_gap.of_run(*runs["switch"], runs["base"], compared)[LOSS] == pytest.approx(5.0)
    assert LOSS not in predict_gap.of_run(*runs["switch"], runs["base"], compared[:1])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "base", 2.0, None)
    errors = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.15}
    for name, error in errors.items():
        write_run(tmp_path / name, 2.0 + error / 10, error)
    write_run(tmp_path / "silent", 2.1, None)
    for name in ("a", "silent"):
        other = {"run": {"seed": 1}, "model": {**MODEL, "init_std": 0.5}}
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(other))
    base = {"run": {"seed": 1}, "model": {**MODEL, "init_std": 0.02}}
    (tmp_path / "base" / "config.yaml").write_text(yaml.safe_dump(base))
    groups = [f"{name}={tmp_path / name}" for name in ("base", *errors, "silent")]
    picture = tmp_path / "prediction.png"
    monkeypatch.setattr(sys, "argv", ["predict_gap.py", *groups, "--output", str(picture), "--rows", "2"])
    predict_gap.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "left out: silent has no diagnostics (precision.diagnostics.interval)"
    assert lines[3] == "| error, fprop, median | +1.00 | +1.00 to +1.00 | +1.00 | +1.00 |" and lines[5] == ""
    assert lines[7] == "not the recipe alone: a (a) differs from base in model.init_std (0.5, not 0.02), too"
    assert "of 4 recipes" in lines[6] and picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["predict_gap.py", *groups, "--output", str(picture), "--sources", "a"])
    predict_gap.main()
    assert "held-out losses: of a alone" in capsys.readouterr().out
    for model, arguments, words in (
        (MODEL, [*groups, "--sources", "b"], "base was not validated on 'b'; name some of a, noise"),
        (MODEL, groups[:4], "3 recipes with diagnostics and a gap at the end (a, b, c); a correlation needs 4"),
        (MODEL, [*groups, "--rows", "0"], "--rows 0: give 1 or more"),
        ({"patern": "M-"}, groups, "config.yaml: model.patern is nothing that this version knows: Unexpected"),
        ({"pattern": "Q"}, groups, "config.yaml names no model that this version knows"),
        ({**MODEL, "pattern": "M"}, groups, "have a linear blocks.1.mixer.up_proj, which the model of its config.yaml"),
    ):
        (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": 1}, "model": model}))
        monkeypatch.setattr(sys, "argv", ["predict_gap.py", *arguments])
        with pytest.raises(SystemExit) as end:
            predict_gap.main()
        printed = capsys.readouterr().err
        assert end.value.code == 2 and words in printed and len(printed.splitlines()) == 1, printed
