"""Recipes tried from checkpoints: gaps of one start and over several, the file that keeps them, and the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from analysis.trials import (
    Trial,
    TrialFile,
    draw_trials,
    first_steps,
    gap,
    read_starts,
    start_gaps,
    starts_table,
    trial_line,
    trial_table,
)
from scripts import compare

STEPS = 24


def trial(percent: float, seconds: float = 0.1, **more: object) -> Trial:
    """`percent` above the base in every step."""
    return Trial([(3 - 0.01 * i) * (1 + percent / 100) for i in range(STEPS)], [seconds] * STEPS, **more)  # type: ignore[arg-type]


def written(folder: Path, name: str, percents: dict[str, float], steps: int = STEPS) -> Path:
    """A start as `compare.py try` leaves it."""
    made_from = {"checkpoint": f"hash of {name}", "start": 100, "number of steps": steps, "commit": "abc"}
    trials = {"bf16": trial(0.0), **{recipe: trial(percent, 0.2) for recipe, percent in percents.items()}}
    file = TrialFile(folder / f"{name}.json", made_from, dict.fromkeys(trials, "config"))
    for recipe, tried in trials.items():
        file.add(recipe, tried)
    return file.path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [
        written(tmp_path, "one", {"nvfp4": 1.0, "best": 0.4, "only here": 2.0}),
        written(tmp_path, "two", {"nvfp4": 1.2, "best": 0.6}),
        written(tmp_path, "three", {"nvfp4": 1.1, "best": 0.5}),
    ]


def test_a_gap_is_paired_by_step(tmp_path: Path) -> None:
    found = gap(trial(1.0), trial(0.0), 4)
    assert found is not None and found.mean == pytest.approx(1.0) and found.half_width == pytest.approx(0.0, abs=1e-9)
    nats = gap(trial(1.0), trial(0.0), 4, percent=False)
    assert nats is not None and nats.mean == pytest.approx(0.01 * (3 - 0.01 * 13.5))
    assert gap(trial(1.0, ended="ended"), trial(0.0), 4) is None
    assert gap(Trial([None, *trial(1.0).losses[1:]], []), trial(0.0), 0) is None
    assert gap(Trial([None, *trial(1.0).losses[1:]], []), trial(0.0), 1) is not None
    assert [first_steps(steps) for steps in (5, 24, 600)] == [0, 4, 10]


def test_the_table_of_one_start(tmp_path: Path) -> None:
    trials = {
        "bf16": trial(0.0, held_out={"a": 2.0, "b": 4.0}),
        "nvfp4": trial(1.0, 0.2, held_out={"a": 2.1, "b": 4.2}, notes=["a note"], skipped=2),
        "bad": trial(0.5, ended="ended after step 105: diverged"),
    }
    table = trial_table(trials, "nvfp4", 100, 4)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    base, nvfp4, bad = rows[2:]
    assert base == ["bf16", "2.8650", "-", "-", "-", "100 ms", "3.0000", "-"]
    assert nvfp4[2:3] + nvfp4[5:] == ["+1.00% [+1.00, +1.00]", "2.00 x", "3.1500", "+5.00% (no interval)"]
    assert bad[1:6] == ["-"] * 5
    for note in ("nvfp4: a note", "nvfp4: 2 steps made no update", "bad: ended after step 105", "steps 105 to 124"):
        assert note in table
    assert "no interval" in trial_table({"a": trial(0), "b": trial(1)}, None, 0, STEPS - 11)
    assert trial_line("nvfp4", trials["nvfp4"], trials["bf16"], 4).endswith(
        "training loss 2.8937, +1.00% [+1.00, +1.00]"
    )
    assert draw_trials(trials, "nvfp4", 4, tmp_path / "a.png").exists()
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_trials({"bf16": trials["bf16"], "bad": trials["bad"]}, None, 4, tmp_path / "b.png")


def test_starts(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = read_starts(files)
    assert start_gaps(starts, "nvfp4", 4)["best"].iloc[0] == pytest.approx(100 * (1.004 / 1.01 - 1))
    assert compare.main(["starts", *map(str, files), "--picture", str(tmp_path / "a.png")]) == 0
    table = starts_table(starts, "bf16", "nvfp4", 4)
    assert capsys.readouterr().out.startswith(table)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    nvfp4, best, once = rows[3:]
    # Pooled over both recipes: deviation 0.1 with four degrees of freedom, an error of 0.1 / sqrt(3).
    assert nvfp4[:3] == ["nvfp4", "3", "+1.10% [+0.94, +1.26]*"] and best[2] == "+0.50% [+0.34, +0.66]*"
    assert best[4] == "0.45 ± 0.03" and best[5] == "2.00 x" and once[:3] == ["only here", "1", "+2.00% [+1.72, +2.28]*"]
    assert (tmp_path / "a.png").exists()


def test_a_file_keeps_only_what_can_be_compared(files: list[Path]) -> None:
    before = files[0].read_text()
    made_from = json.loads(before)["made_from"]
    assert list(TrialFile(files[0], made_from, {"bf16": "config", "new": "config"}).trials) == ["bf16"]
    assert json.loads(files[0].read_text()) == json.loads(before)
    files[1].write_text("{}")
    for path, facts, recipes, message in (
        (files[0], {**made_from, "commit": "other"}, {}, "another commit"),
        (files[0], made_from, {"nvfp4": "other"}, "another nvfp4, whose configuration"),
        (files[1], made_from, {}, "holds no recipes that were tried"),
    ):
        with pytest.raises(ValueError, match=message):
            TrialFile(path, facts, recipes)
    assert files[1].read_text() == "{}"


def test_files_that_do_not_go_together_are_one_line(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, _ = map(str, files)
    copy = shutil.copy(one, tmp_path / "copy.json")
    for arguments, expected in (
        ([one], "two starts at least"),
        ([one, str(copy)], "of the same checkpoint"),
        ([one, str(written(tmp_path, "longer", {"nvfp4": 1.0}, STEPS + 1))], "other numbers of steps"),
        ([one, str(tmp_path / "none.json")], "holds no recipes"),
        ([one, two, "--base", "only here"], "has no recipe only here"),
        ([one, two, "--skip", "24"], "at least one of 24 steps must count"),
    ):
        assert compare.main(["starts", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("compare.py: ") and expected in error and error.count("\n") == 1, error
