"""Recipes tried from several checkpoints: means over starts, shares of a gap, and files that do not go together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.noise import student_quantile
from analysis.starts import Start, Starts, draw_starts, read_starts, starts_table
from analysis.trial_file import TrialFile, read_trials
from analysis.trials import Trial
from scripts import compare_starts

STEPS = 24


def trial(percent: float, seconds: float = 0.1, ended: str | None = None) -> Trial:
    """`percent` above the base in every step."""
    return Trial([(3 - 0.01 * i) * (1 + percent / 100) for i in range(STEPS)], [seconds] * STEPS, ended=ended)


def start(name: str, percents: dict[str, float], begin: int = 100) -> Start:
    made_from = {"checkpoint": f"hash of {name}", "start": begin, "number of steps": STEPS, "commit": "abc"}
    return Start(name, made_from, {"bf16": trial(0.0), **{k: trial(v, 0.2) for k, v in percents.items()}})


STARTS = [
    start("one", {"nvfp4": 1.0, "best": 0.4, "only here": 2.0}),
    start("two", {"nvfp4": 1.2, "best": 0.6}),
    start("three", {"nvfp4": 1.1, "best": 0.5}),
]


def written(folder: Path, found: Start) -> Path:
    """The start as try_recipes.py leaves it."""
    file = TrialFile(folder / f"{found.name}.json", found.made_from, dict.fromkeys(found.trials, "config"), 4)
    for name, tried in found.trials.items():
        file.add(name, tried)
    return file.path


def test_means_over_starts_share_their_deviation() -> None:
    found = Starts(STARTS, "bf16", "nvfp4", 4)
    above = found.estimates("bf16")
    assert list(above) == ["nvfp4", "best", "only here"]
    assert [above["nvfp4"].mean, above["best"].mean] == pytest.approx([1.1, 0.5])
    # Both scatter with 0.1% around their means: with four degrees of freedom together.
    assert above["best"].error == pytest.approx(0.1 / 3**0.5) and above["best"].freedom == 4
    assert above["only here"].half_width == pytest.approx(0.1 * student_quantile(4)) and above["only here"].shared
    beside = found.estimates("nvfp4")["best"]
    assert beside.mean == pytest.approx(
        sum(100 * (a / b - 1) for a, b in ((1.004, 1.01), (1.006, 1.012), (1.005, 1.011))) / 3
    )
    assert beside.error is not None and beside.error < 0.001  # what a start adds to both recipes is not in it


def test_the_share_of_a_gap_is_one_of_pairs() -> None:
    found = Starts(STARTS, "bf16", "nvfp4", 4)
    share = found.share("best")
    assert share is not None and share.mean == pytest.approx((0.4 + 0.5 + 5 / 11) / 3) and not share.shared
    assert Starts(STARTS, "bf16", None, 4).share("best") is None
    free = [start("one", {"nvfp4": 0.0, "best": 0.4}), *STARTS[1:]]
    assert Starts(free, "bf16", "nvfp4", 4).share("best") is None  # a share of nothing


def test_the_table_and_its_notes() -> None:
    ended = start("four", {"nvfp4": 1.1}, begin=300)
    ended.trials["best"] = trial(0.5, ended="ended after step 3: nan")
    ended.made_from["commit"] = "def"
    lines = starts_table(Starts([*STARTS, ended], "bf16", "nvfp4", 4)).splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:] for line in lines[2:6]}
    assert rows["bf16"] == ["4", "-", "-", "-", "-", "-", "-"]
    assert rows["nvfp4"][:4] == ["4", "+1.10% ± 0.04*", "yes", "-"] and rows["nvfp4"][5:] == ["1", "2.00 x"]
    assert rows["best"][0] == "3" and rows["best"][5] == "0.45 ± 0.03"
    assert rows["only here"][:3] == ["1", "+2.00% ± 0.09*", "yes"]
    notes = "\n".join(lines[6:])
    assert "mean of 20 steps behind steps 104, 304" in notes and "at different steps" in notes
    assert "another commit: abc (one), abc (two), abc (three), def (four)" in notes
    assert "four: best ended after step 3: nan" in notes
    alone = starts_table(Starts(STARTS, "bf16", None, 4))
    assert "nvfp4 |" in alone and "share" not in alone and "steps 105 to 124" in alone and "different" not in alone


def test_files_that_are_not_starts_are_refused(tmp_path: Path) -> None:
    one = written(tmp_path, STARTS[0])
    with pytest.raises(ValueError, match="two starts at least"):
        read_starts([one])
    again = tmp_path / "again.json"
    again.write_text(one.read_text())
    with pytest.raises(ValueError, match=r"one\.json and .*again\.json are of the same checkpoint.*other seeds"):
        read_starts([one, again])
    content: dict[str, Any] = json.loads(one.read_text())
    content["made_from"] |= {"checkpoint": "other", "number of steps": 60}
    again.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has 24 steps of each recipe, and .*again\.json 60"):
        read_starts([one, again])
    del content["made_from"]["checkpoint"]
    again.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="does not say its checkpoint"):
        read_starts([one, again])
    content["made_from"] |= {"checkpoint": "other", "number of steps": STEPS}
    again.write_text(json.dumps({**content, "trials": {}}))
    with pytest.raises(ValueError, match=r"again\.json holds no recipe yet; wait for the first"):
        read_starts([one, again])
    again.write_text('{"made_from": {}, "trials": {"a": {"loss": 1}}}')
    with pytest.raises(ValueError, match="holds no recipes that were tried; name one that"):
        read_trials(again)
    with pytest.raises(ValueError, match=r"none\.json is no file; name one that try_recipes\.py --output"):
        read_starts([one, tmp_path / "none.json"])
    with pytest.raises(ValueError, match="two has no recipe only here; it has bf16, nvfp4, best"):
        Starts(STARTS, "only here", None, 4)
    with pytest.raises(ValueError, match="--against nope: no recipe has this name; they are bf16, nvfp4, best"):
        Starts(STARTS, "bf16", "nope", 4)
    with pytest.raises(ValueError, match="--skip 24: of 24 steps at least one must count"):
        Starts(STARTS, "bf16", None, STEPS)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(written(tmp_path, found)) for found in STARTS]
    picture = tmp_path / "starts.png"
    monkeypatch.setattr(sys, "argv", ["compare_starts.py", *files, "--picture", str(picture)])
    compare_starts.main()
    out = capsys.readouterr().out
    assert "| best | 3 | +0.50% ± 0.06* | yes |" in out and "share of the gap of nvfp4" in out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_starts(Starts([start("a", {}), start("b", {})], "bf16", None, 4), picture)
    for wrong in ([files[0]], [*files, "--against", "x"], [*files, "--picture", str(tmp_path / "no" / "p.png")]):
        monkeypatch.setattr(sys, "argv", ["compare_starts.py", *wrong])
        with pytest.raises(SystemExit) as ended:
            compare_starts.main()
        captured = capsys.readouterr()
        assert ended.value.code == 2 and captured.err.startswith("compare_starts.py: ") and not captured.out
