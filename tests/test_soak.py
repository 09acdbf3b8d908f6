"""A short soak, and that a soak sees what it is to see."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.soak import PLACES, ROOT, Kill, arm, differences


@pytest.mark.slow
def test_a_short_soak() -> None:
    """Six kills of one process, each mode of saving; `python -m tests.soak` is the long one."""
    command = [sys.executable, "-m", "tests.soak", "--kills", "6", "--processes", "1", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout
    kills = re.search(r"^all kills +(\d+) +(\d+)$", done.stdout, re.MULTILINE)
    assert kills is not None and sum(map(int, kills.groups())) >= 6 and min(map(int, kills.groups())) > 0


def make_run(folder: Path) -> Path:
    """What a run of four steps leaves, as far as it is compared."""
    records: list[dict[str, Any]] = [
        {"kind": "step", "step": step, "loss": 4.0 - step, "step_time": 0.1} for step in range(1, 5)
    ]
    records.insert(2, {"kind": "validation", "step": 2, "losses": {"a": 3.0}})
    for step in (2, 4):
        checkpoint = folder / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "__0_0.distcp").write_bytes(b"weights" * step)
        (checkpoint / "trainer.json").write_text(json.dumps({"skipped": 0, "config": {"run": {"dir": str(folder)}}}))
        files = {path.name: _record(path) for path in sorted(checkpoint.iterdir())}
        (checkpoint / "manifest.json").write_text(json.dumps({"save_index": step, "files": files}))
    (folder / "checkpoints" / "latest").write_text("step_00000004\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def _record(path: Path) -> dict[str, Any]:
    import hashlib

    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return make_run(tmp_path / "alone"), make_run(tmp_path / "killed")


def test_equal_runs_are_equal(runs: tuple[Path, Path]) -> None:
    expected, other = runs
    text = (other / "metrics.jsonl").read_text().replace('"step_time": 0.1', '"step_time": 0.7')
    (other / "metrics.jsonl").write_text(text)
    (other / "metrics.jsonl.1").write_text("")  # of a start before the first checkpoint
    assert differences(expected, other, damaged=0) == []


def _edit(path: str, old: str, new: str) -> Any:
    def edit(run: Path) -> None:
        text = (run / path).read_text()
        assert old in text
        (run / path).write_text(text.replace(old, new))

    return edit


def _rewrite_weights(run: Path) -> None:
    """Other weights, with a manifest that knows them."""
    folder = run / "checkpoints" / "step_00000004"
    (folder / "__0_0.distcp").write_bytes(b"Weights" * 4)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["__0_0.distcp"] = _record(folder / "__0_0.distcp")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_edit("metrics.jsonl", '"loss": 1.0', '"loss": 1.0000001'), "records of kind step of steps [3]"),
        (_edit("metrics.jsonl", '"a": 3.0', '"a": 3.5'), "other numbers in records of kind validation of steps [2]"),
        (_edit("metrics.jsonl", '"step": 3', '"step": 4'), "records of kind step are of steps [1, 2, 4, 4]"),
        (_edit("checkpoints/step_00000002/__0_0.distcp", "weights", "Weights"), "is not what its manifest says"),
        (_rewrite_weights, "step_00000004/__0_0.distcp has other bits"),
        (_edit("checkpoints/step_00000004/trainer.json", '"skipped": 0', '"skipped": 1'), "differs in ['skipped']"),
        (_edit("checkpoints/latest", "4", "2"), "`latest` names step_00000002"),
        (lambda run: (run / "checkpoints" / "step_00000002.tmp").mkdir(), "left over: checkpoints/step_00000002.tmp"),
        (lambda run: (run / "metrics.jsonl.tmp").touch(), "left over: metrics.jsonl.tmp"),
        (lambda run: shutil.rmtree(run / "checkpoints" / "step_00000002"), "checkpoints are ['step_00000004']"),
    ],
)  # fmt: skip
def test_each_difference_is_seen(runs: tuple[Path, Path], change: Any, found: str) -> None:
    expected, other = runs
    change(other)
    assert any(found in line for line in differences(expected, other, damaged=0))


def test_every_place_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that was renamed would never be killed at."""
    for name, place in PLACES.items():
        with monkeypatch.context() as context:
            replaced: list[Any] = []
            context.setattr("tests.soak.setattr", lambda *what, to=replaced: to.append(what), raising=False)
            arm(Kill(name, 1, 0, False), [])
        ((owner, attribute, _),) = replaced
        assert callable(getattr(owner, attribute)) and attribute == place.name
