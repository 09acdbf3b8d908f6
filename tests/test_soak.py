"""A short soak test, and that the soak test notices differences."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.checkpoint.files import write_file
from tests.soak import PLACES, Kill, Soak, arm, differences


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """It has two kills of one process, one with each way of saving. The long test is `python -m tests.soak`."""
    soak = Soak(kills=2, seed=53, processes=1, folder=tmp_path)
    soak.go()
    assert soak.wrong == []
    assert {background for _, background in soak.kills} == {False, True} and soak.kills.total() >= 2


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two equal runs of four steps, with the files that are compared."""
    found = []
    for folder in (tmp_path / "alone", tmp_path / "killed"):
        steps = [{"kind": "step", "step": n, "loss": 4.0 - n, "step_time": 0.1} for n in (1, 2, 3, 4)]
        for step in (2, 4):
            checkpoint = folder / "checkpoints" / f"step_{step:08d}"
            checkpoint.mkdir(parents=True)
            trainer = json.dumps({"skipped": 0, "config": {"run": str(folder), "checkpoint": {}}})
            written = {
                "__0_0.distcp": write_file(checkpoint / "__0_0.distcp", b"weights"),
                "trainer.json": write_file(checkpoint / "trainer.json", trainer),
            }
            manifest = {"save_index": step, "files": {name: asdict(record) for name, record in written.items()}}
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        (folder / "checkpoints" / "latest").write_text("step_00000004\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
        found.append(folder)
    return found


@pytest.mark.parametrize(
    ("path", "old", "new", "found"),
    [
        ("metrics.jsonl", '"step_time": 0.1', '"step_time": 0.7', None),
        ("metrics.jsonl.1", "", "of a start before the first checkpoint", None),
        ("metrics.jsonl", '"loss": 1.0', '"loss": 1.0000001', "records of kind step of steps [3]"),
        ("metrics.jsonl", '"step": 3', '"step": 4', "records of kind step are of steps [1, 2, 4, 4]"),
        ("checkpoints/step_00000004/__0_0.distcp", "w", "W", "__0_0.distcp is not what its manifest says"),
        ("checkpoints/step_00000004/trainer.json", '"skipped": 0', '"skipped": 1', "differs in ['skipped']"),
        ("checkpoints/latest", "4", "2", "`latest` names step_00000002"),
        ("checkpoints/step_00000002.tmp", "", "left", "left over: checkpoints/step_00000002.tmp"),
    ],
)
def test_each_difference_is_found(runs: list[Path], path: str, old: str, new: str, found: str | None) -> None:
    changed = runs[1] / path
    text = changed.read_text() if old else ""
    assert old in text
    changed.write_text(text.replace(old, new))
    lines = differences(*runs)
    assert any(found in line for line in lines) if found else lines == []


def test_every_place_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that was renamed would not be killed at."""
    replaced: list[Any] = []
    monkeypatch.setattr("tests.soak.setattr", lambda *what: replaced.append(what), raising=False)
    for name in PLACES:
        arm(Kill(name), [])
    assert all(callable(getattr(owner, attribute)) for owner, attribute, _ in replaced)
    assert [attribute for _, attribute, _ in replaced] == [place.name for place in PLACES.values()]
