"""A short soak test, and that the soak test notices differences."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.soak import PLACES, Kill, Soak, arm, differences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    """A soak with two kills of one process, one with each way of saving."""
    soak = Soak(kills=2, seed=53, processes=1, folder=tmp_path_factory.mktemp("soak"))
    soak.go()
    return soak


def test_a_short_soak(short: Soak) -> None:
    """The long test is `python -m tests.soak`."""
    assert short.wrong == []
    assert {background for _, background in short.kills} == {False, True} and short.kills.total() >= 2


@pytest.mark.parametrize(
    ("path", "old", "new", "found"),
    [
        ("metrics.jsonl", '"step_time": ', '"step_time": 1', None),
        ("metrics.jsonl.1", "", "of a start before the first checkpoint", None),
        ("metrics.jsonl", '"loss": 6.', '"loss": 6.1', "records of kind step of steps [1, "),
        ("metrics.jsonl", '"kind": "step", "step": 3', '"kind": "step", "step": 4', "step are of steps [1, 2, 4, 4"),
        ("checkpoints/step_00000016/rng.pt", "", "W", "rng.pt is not what its manifest says"),
        ("checkpoints/step_00000016/trainer.json", '"pattern": "', '"pattern": "M', "differs in ['config']"),
        ("checkpoints/latest", "16", "14", "`latest` names step_00000014"),
        ("checkpoints/step_00000002.tmp", "", "left", "left over: checkpoints/step_00000002.tmp"),
    ],
)
def test_each_difference_is_found(
    short: Soak, tmp_path: Path, path: str, old: str, new: str, found: str | None
) -> None:
    copy = Path(shutil.copytree(short.alone / "run", tmp_path / "run"))
    changed = copy / path
    text = changed.read_text() if old else ""
    assert old in text
    changed.write_text(text.replace(old, new))
    lines = differences(short.alone / "run", copy)
    assert any(found in line for line in lines) if found else lines == []


def test_every_place_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that was renamed would not be killed at."""
    replaced: list[Any] = []
    monkeypatch.setattr("tests.soak.setattr", lambda *what: replaced.append(what), raising=False)
    for name in PLACES:
        arm(Kill(name), [])
    assert all(callable(getattr(owner, attribute)) for owner, attribute, _ in replaced)
    assert [attribute for _, attribute, _ in replaced] == [place.name for place in PLACES.values()]
