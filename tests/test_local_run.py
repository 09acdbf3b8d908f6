"""pretrain.py with checkpoints on the node's own disk: interrupted between two shared ones, and started again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pretrain
from tests.test_pretrain import SMALL, assert_same_checkpoint, losses, records

pytestmark = pytest.mark.slow


def test_a_run_goes_on_from_its_local_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        *SMALL,
        "logging.tensorboard=false",
        "checkpoint.interval=3",
        "train.steps=6",
        "precision.switch.when=never",
    ]
    folder, straight = tmp_path / "run", tmp_path / "straight"
    local = [*settings, f"run.dir={folder}", f"checkpoint.local_dir={tmp_path / 'disk'}", "checkpoint.local_interval=2"]
    assert pretrain.main([*settings, f"run.dir={straight}"]) == 0

    save = pretrain.save

    def fail_later(run: Any, step: int, **settings: Any) -> None:
        save(run, step, **settings)
        if step == 4:
            run.checkpointer.finish()
            monkeypatch.setattr(pretrain, "train_step", None)  # not callable: step 5 ends the run

    monkeypatch.setattr(pretrain, "save", fail_later)
    with pytest.raises(TypeError):
        pretrain.main(local)
    monkeypatch.undo()
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000003\n"
    assert [event["step"] for event in records(folder, "event") if event["event"] == "local_checkpoint"] == [2, 4]

    capsys.readouterr()
    assert pretrain.main(local) == 0
    printed = capsys.readouterr().out
    assert "step 4 is read from the nodes' own disks" in printed and "resumed after step 4 of 6" in printed
    assert losses(folder) == losses(straight) and len(losses(folder)) == 6
    last = "checkpoints/step_00000006"
    assert_same_checkpoint(folder / last, straight / last, tmp_path)
    (resumed,) = [event for event in records(folder, "event") if event["event"] == "resumed_locally"]
    assert resumed["step"] == 4
    (saved, *_) = [event for event in records(folder, "event") if event["event"] == "local_checkpoint"]
    assert saved["seconds"] >= saved["stall"] > 0
    assert json.loads((folder / "checkpoints" / "local.json").read_text())["starts"]
