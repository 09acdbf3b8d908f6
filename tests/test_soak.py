"""A short soak, and that a soak sees what it is to see."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.checkpoint.files import write_file
from tests.soak import PLACES, Kill, Soak, arm, differences


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """Four kills of one process, in both ways of saving; `python -m tests.soak` is the long one."""
    soak = Soak(kills=4, seed=3, mode="both", processes=1, folder=tmp_path)
    soak.go()
    assert soak.wrong == []
    assert {mode for _, mode in soak.kills} == {"sync", "async"} and soak.kills.total() >= 4


def record(path: Path) -> dict[str, Any]:
    written = write_file(path, path.read_bytes())
    return {"size": written.size, "sha256": written.sha256}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """What two runs of four steps leave, as far as it is compared."""
    found = []
    for folder in (tmp_path / "alone", tmp_path / "killed"):
        steps: list[dict[str, Any]] = [
            {"kind": "step", "step": n, "loss": 4.0 - n, "step_time": 0.1} for n in (1, 2, 3, 4)
        ]
        steps.insert(2, {"kind": "validation", "step": 2, "losses": {"a": 3.0}})
        for step in (2, 4):
            checkpoint = folder / "checkpoints" / f"step_{step:08d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "__0_0.distcp").write_bytes(b"weights" * step)
            (checkpoint / "trainer.json").write_text(json.dumps({"skipped": 0, "config": {"run": str(folder)}}))
            files = {path.name: record(path) for path in sorted(checkpoint.iterdir())}
            (checkpoint / "manifest.json").write_text(json.dumps({"save_index": step, "files": files}))
        (folder / "checkpoints" / "latest").write_text("step_00000004\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
        found.append(folder)
    return found


def edit(path: str, old: str, new: str) -> Any:
    def change(run: Path) -> None:
        text = (run / path).read_text()
        assert old in text
        (run / path).write_text(text.replace(old, new))

    return change


def rewrite_weights(run: Path) -> None:
    """Other weights, with a manifest that knows them."""
    folder = run / "checkpoints" / "step_00000004"
    (folder / "__0_0.distcp").write_bytes(b"Weights" * 4)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["__0_0.distcp"] = record(folder / "__0_0.distcp")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (edit("metrics.jsonl", '"step_time": 0.1', '"step_time": 0.7'), None),
        (lambda run: (run / "metrics.jsonl.1").touch(), None),  # of a start before the first checkpoint
        (edit("metrics.jsonl", '"loss": 1.0', '"loss": 1.0000001'), "records of kind step of steps [3]"),
        (edit("metrics.jsonl", '"step": 3', '"step": 4'), "records of kind step are of steps [1, 2, 4, 4]"),
        (rewrite_weights, "step_00000004/__0_0.distcp has other bits"),
        (edit("checkpoints/step_00000004/trainer.json", '"skipped": 0', '"skipped": 1'), "differs in ['skipped']"),
        (edit("checkpoints/latest", "4", "2"), "`latest` names step_00000002"),
        (lambda run: (run / "checkpoints" / "step_00000002.tmp").mkdir(), "left over: checkpoints/step_00000002.tmp"),
        (lambda run: shutil.rmtree(run / "checkpoints" / "step_00000002"), "checkpoints are ['step_00000004']"),
    ],
)  # fmt: skip
def test_each_difference_is_seen(runs: list[Path], change: Any, found: str | None) -> None:
    change(runs[1])
    lines = differences(*runs)
    assert any(found in line for line in lines) if found else lines == []


def test_every_place_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that was renamed would never be killed at."""
    replaced: list[Any] = []
    monkeypatch.setattr("tests.soak.setattr", lambda *what: replaced.append(what), raising=False)
    for name in PLACES:
        arm(Kill(name), [])
    assert all(callable(getattr(owner, attribute)) for owner, attribute, _ in replaced)
    assert [attribute for _, attribute, _ in replaced] == [place.name for place in PLACES.values()]
