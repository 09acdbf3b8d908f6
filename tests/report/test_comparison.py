"""Runs beside each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp4.report.comparison import comparison_rows, comparison_table, read_run

ROOT = Path(__file__).resolve().parent.parent.parent


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


@pytest.mark.slow
def test_the_command_prints_and_draws(runs, tmp_path):
    picture = tmp_path / "gap.png"
    command = [sys.executable, "scripts/compare_runs.py", *map(str, runs), "--output", str(picture)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "+5.00%" in done.stdout and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_mistakes_are_one_line(runs, tmp_path):
    shorter = write_run(tmp_path / "short", [4.0, 3.0], {}, 1.0)
    for folder, words in ((shorter, "short ended at step 2 and bf16 at 4"), (tmp_path / "none", "does not exist")):
        command = [sys.executable, "scripts/compare_runs.py", str(runs[0]), str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
