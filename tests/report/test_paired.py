"""Recipes over seeds: pairs, means, standard errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_fp4.report.paired import HeldOut, gaps, read_held_out, spread, table
from scripts import compare_recipes


def write_run(folder: Path, seed: int, losses: dict[int, dict[str, float | None]]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run:\n  seed: {seed}\n")
    records = [{"kind": "validation", "step": t, "tokens": 1_000_000 * t, "losses": of} for t, of in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_standard_error_is_that_of_the_mean():
    assert spread([1.0, 2.0, 3.0, 6.0]).error == pytest.approx((14 / 3) ** 0.5 / 2)
    assert (spread([5.0]).mean, spread([5.0]).deviation, spread([5.0]).error) == (5.0, None, None)


def test_runs_are_paired_by_seed_whatever_their_order():
    base = [HeldOut(1, {10: 2.0, 20: 1.0}), HeldOut(2, {10: 4.0, 20: 2.0})]
    runs = [HeldOut(2, {10: 4.4, 20: 2.0, 30: 9.0}), HeldOut(1, {10: 2.02})]
    found = gaps(runs, base)
    assert list(found) == [10, 20]
    assert found[10] == pytest.approx({1: 1.0, 2: 10.0}) and found[20] == pytest.approx({2: 0.0})


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match=r"no pair: the runs have the seeds \[3\], the base \[1\]"):
        gaps([HeldOut(3, {10: 1.0})], [HeldOut(1, {10: 1.0})])
    with pytest.raises(ValueError, match="one run of each seed"):
        gaps([HeldOut(1, {10: 1.0}), HeldOut(1, {10: 1.0})], [HeldOut(1, {10: 1.0})])


def test_sources_weigh_alike_and_one_that_was_not_measured_leaves_its_point_out(tmp_path):
    run = write_run(tmp_path / "run", 7, {1: {"a": 1.0, "b": 3.0}, 2: {"a": 1.0, "b": None}})
    assert read_held_out(run) == HeldOut(7, {1_000_000: 2.0})
    (run / "config.yaml").write_text("model: {}\n")
    with pytest.raises(ValueError, match=r"names no run\.seed"):
        read_held_out(run)


def test_the_table_has_errors_and_counts():
    base = [HeldOut(1, {10_000_000: 2.0}), HeldOut(2, {10_000_000: 2.2})]
    groups = {
        "bf16": base,
        "fp4": [HeldOut(1, {10_000_000: 2.02}), HeldOut(2, {10_000_000: 2.266})],
        "fp8": [HeldOut(2, {10_000_000: 2.2})],
    }
    *_, row = table(groups).splitlines()
    assert row == "| 10M | 2.1000 (2) | 6.73% | +2.00% ± 1.00 (2) | +0.00% (1) |"


def test_the_command_prints_draws_and_refuses(tmp_path, monkeypatch, capsys):
    runs = [write_run(tmp_path / f"{n}{s}", s, {1: {"a": 2.0 + g}}) for n, g in (("b", 0), ("f", 0.02)) for s in (1, 2)]
    picture = tmp_path / "gap.png"
    command = ["compare_recipes.py", f"bf16={runs[0]},{runs[1]}"]
    monkeypatch.setattr(sys, "argv", [*command, f"fp4={runs[2]},{runs[3]}", "--output", str(picture)])
    compare_recipes.main()
    assert "+1.00% ± 0.00 (2)" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")
    for wrong, words in (([], "two groups"), (["fp4"], "NAME=RUN"), ([f"fp4={tmp_path / 'none'}"], "does not exist")):
        monkeypatch.setattr(sys, "argv", [*command, *wrong])
        with pytest.raises(SystemExit) as end:
            compare_recipes.main()
        errors = capsys.readouterr().err
        assert end.value.code == 2 and words in errors and len(errors.splitlines()) == 1
