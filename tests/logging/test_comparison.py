"""Runs beside each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from megatron_fp4.logging.comparison import comparison_rows, comparison_table, read_run, read_runs
from megatron_fp4.logging.run_folder import named_run
from scripts import compare_runs


def write_run(folder: Path, losses: list[float | None], validation: dict[int, dict[str, float]], speed: float) -> Path:
    folder.mkdir()
    records = [{"kind": "run", "step": 0}]
    for step, loss in enumerate(losses, start=1):
        records.append(
            {"kind": "step", "step": step, "tokens": 10 * step, "loss": loss, "tokens_per_second": speed, "plan": "p"}
        )
        if step in validation:
            records.append({"kind": "validation", "step": step, "tokens": 10 * step, "losses": validation[step]})
    records.append({"kind": "event", "step": 3, "event": "switch"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = write_run(
        tmp_path / "bf16", [4.0, 3.0, 2.0, 2.0], {2: {"a": 3.0, "b": 1.0}, 4: {"a": 2.0, "b": 4.0}}, 100.0
    )
    second = write_run(tmp_path / "fp4", [4.0, None, 2.2, 2.1], {4: {"a": 2.02, "b": 3.96}}, 50.0)
    return [first, second]


def test_gaps_are_relative_to_the_first_run(runs):
    first, second = comparison_rows([read_run(run) for run in runs])
    assert set(first["gaps"].values()) == {0.0} and first["speed"] == 1
    assert second["losses"] == {"training": 2.1, "a": 2.02, "b": 3.96}
    assert second["gaps"] == pytest.approx({"training": 5.0, "a": 1.0, "b": -1.0})
    assert second["speed"] == 0.5 and second["tokens"] == 40
    table = comparison_table([first, second])
    assert "| fp4 | 2.1000 | +5.00% | 2.0200 | +1.00% | 3.9600 | -1.00% |" in table


def test_what_is_not_the_recipes_is_said_below_the_table(runs):
    first, second = runs
    for folder, rate in ((first, 1e-3), (second, 2e-3)):
        config = {"run": {"seed": 1}, "optimizer": {"lr": rate}, "precision": {"name": folder.name}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    table = comparison_table(comparison_rows(read_runs([first, second])))
    assert table.endswith("|\n\nnot the recipe alone: fp4 differs from bf16 in optimizer.lr (0.002, not 0.001), too")
    (first / "config.yaml").write_text((second / "config.yaml").read_text())
    assert "not the recipe alone" not in comparison_table(comparison_rows(read_runs([first, second])))


def test_a_run_whose_losses_are_no_numbers_has_no_gap(runs, tmp_path, compare):
    lost = write_run(tmp_path / "lost", [None] * 4, {4: {"a": 2.0, "b": 3.0}}, 15e3)
    for order in ((runs[0], lost), (lost, runs[0])):
        code, output, errors = compare(*order, "--output", tmp_path / "gap.png")
        assert (code, errors) == (0, "") and "nan" not in output and "| lost | - | - | 2.0000 | +0.00% |" in output
    assert "| 15k | " in output and "| 0.1k | " in output


def test_last_losses_of_a_branch_are_of_the_same_steps(tmp_path):
    losses = [4.0 - i / 100 for i in range(200)]
    whole = write_run(tmp_path / "whole", losses, {}, 1.0)
    branch = write_run(tmp_path / "branch", losses, {}, 1.0)
    metrics = branch / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(
        "".join(line for line in lines if json.loads(line)["step"] == 0 or json.loads(line)["step"] > 150)
    )
    first, second = comparison_rows(read_runs([whole, branch]))
    assert second["losses"]["training"] == first["losses"]["training"] == pytest.approx(sum(losses[-4:]) / 4)


def test_runs_go_by_the_names_that_a_person_gave(runs, tmp_path):
    named = read_runs([f"BF16={runs[0]}", f"NVFP4, then BF16={runs[1]}", runs[1]])
    assert [run.name for run in named] == ["BF16", "NVFP4, then BF16", "fp4"]
    odd = tmp_path / "lr=1e-3"
    odd.mkdir()
    assert named_run(odd) == ("lr=1e-3", odd)
    for wrong in ("=runs/a", "name=", " =x"):
        with pytest.raises(ValueError, match="NAME=FOLDER"):
            named_run(wrong)
    with pytest.raises(ValueError, match=r"two runs are called bf16; give them names of their own: NAME=FOLDER"):
        read_runs([runs[0], runs[0]])


@pytest.fixture
def compare(monkeypatch, capsys):
    """The command: its exit code, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, arguments)])
        try:
            compare_runs.main()
        except SystemExit as end:
            return int(end.code or 0), *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_the_sources_that_count(runs, tmp_path, compare):
    code, output, errors = compare(*runs, "--sources", "a", "--output", tmp_path / "gap.png")
    assert code == 0, errors
    assert "a loss" in output and "b loss" not in output
    assert (tmp_path / "gap.png").exists()
    code, output, errors = compare(*runs, "--sources", "a,c")
    assert (code, output) == (2, "")
    assert "--sources a,c: bf16 was not validated on 'c'; name some of a, b" in errors


def test_what_cannot_be_compared_or_drawn_is_refused_before_anything_is_printed(runs, tmp_path, compare):
    for arguments, message in (
        ([runs[0]], "has nothing to be held against; name two runs or more"),
        ([*runs, "--output", tmp_path / "gap.txt"], "is no name of a picture"),
        ([*runs, "--output", tmp_path / "none" / "gap.png"], "none"),
    ):
        code, output, errors = compare(*arguments)
        assert (code, output, errors.count("\n")) == (2, "", 1) and message in errors


def test_the_command_prints_and_draws(runs, tmp_path, compare):
    picture = tmp_path / "gap.png"
    code, output, errors = compare(runs[0], f"NVFP4={runs[1]}", "--output", picture)
    assert code == 0, errors
    assert "+5.00%" in output and "| NVFP4 |" in output and picture.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_one_line(runs, tmp_path, compare):
    shorter = write_run(tmp_path / "short", [4.0, 3.0], {}, 1.0)
    for folder, words in ((shorter, "short ended at step 2 and bf16 at 4"), (tmp_path / "none", "does not exist")):
        code, _, errors = compare(runs[0], folder)
        assert code == 2 and words in errors and len(errors.splitlines()) == 1
    for target, words in (("gap.txt", "no name of a picture"), (f"{tmp_path}/none/gap.png", "there is no folder")):
        code, _, errors = compare(*runs, "--output", target)
        assert code == 2 and words in errors and len(errors.splitlines()) == 1
