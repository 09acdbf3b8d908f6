"""Comparing runs: final losses, gaps with or without an interval, and settings that differ besides the recipe."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.runs import compare_runs, differences, draw_runs, settings_of
from megatron_fp4.logging.run_folder import open_runs
from scripts import compare
from tests.programs import cells, error_line


def write_run(folder: Path, steps: int, gap: float = 0.0, noise: float = 0.0, lr: float = 0.1) -> Path:
    """A run whose loss is `gap` percent above that of gap=0, with `noise` percent of noise in each step."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = (5 - step / steps) * (1 + (gap + noise * rng.normal()) / 100)
        lines.append({"kind": "step", "step": step, "tokens": 10 * step, "loss": loss, "tokens_per_second": 2e4})
    last = {"code": 2.0 * (1 + gap / 100), "prose": 3.0}
    lines.append({"kind": "validation", "step": steps, "tokens": 10 * steps, "losses": last})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"run: {{seed: 1}}\noptimizer: {{lr: {lr}}}\ndata: {{seed: null}}\n")
    return folder


def test_24_noisy_steps_give_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "a", 24), write_run(tmp_path / "b", 24, gap=-1.0, noise=1.0, lr=0.2)]
    (tmp_path / "multirun.yaml").touch()  # SWEEP/* matches it too
    given = [*runs, tmp_path / "multirun.yaml", "--output", tmp_path / "gap.png"]
    assert compare.main(["runs", *map(str, given)]) == 0
    printed = capsys.readouterr().out
    _, _, first, second = cells(printed)
    assert first[2] == "-" and second[2].endswith("% (no interval)") and second[4] == "-1.00% (no interval)"
    assert "b also differs from a in optimizer.lr (0.2, not 0.1)" in printed
    assert (tmp_path / "gap.png").stat().st_size > 20_000


def test_many_steps_give_an_interval(tmp_path: Path) -> None:
    runs = open_runs([write_run(tmp_path / "a", 3000), write_run(tmp_path / "b", 3000, gap=1.0, noise=0.1)])
    _, _, first, second = cells(compare_runs(runs))
    assert first[:2] == ["a", f"{5 - 2970.5 / 3000:.4f}"] and first[-1] == "20.0k"
    low, high = map(float, second[2].partition("[")[2].strip("]").split(","))
    assert low < 1.0 < high and high - low < 0.3 and second[5:7] == ["3.0000", "+0.00% (no interval)"]
    assert draw_runs(runs, tmp_path / "a.png").exists()


def test_runs_that_cannot_be_compared_give_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, steps in (("a", 24), ("b", 24), ("short", 20)):
        write_run(tmp_path / name, steps)
    for arguments, expected in (
        (["a"], "name two runs or more"),
        (["a", "none"], "name the folder of a run"),
        (["a", "short"], "short ended at step 20 and a at 24; compare runs that end at the same"),
        (["a", "a"], "two runs are called a"),
        (["a", "b", "--output", "gap.txt"], "is not the name of a picture"),
    ):
        assert compare.main(["runs", *arguments]) == 2
        assert expected in error_line(capsys, "compare.py")


def test_settings_that_matter_are_reported() -> None:
    mine = settings_of(
        {"run": {"seed": 1}, "data": {"seed": None, "validation": {"a": "x"}, "num_workers": 1},
         "train": {"steps": 5, "micro_batch_size": 2}, "precision": {"name": "bf16"}, "model": {"new": None}}
    )  # fmt: skip
    theirs = settings_of(
        {"run": {"seed": 5}, "data": {"seed": 2, "validation": {"a": "x", "b": "y"}, "num_workers": 3},
         "train": {"steps": 6, "micro_batch_size": 4}, "precision": {"name": "nvfp4"}, "model": {"name": "u"}}
    )  # fmt: skip
    assert differences(mine, theirs) == ["train.steps (5, not 6)", "data.seed or run.seed (1, not 2)"]
