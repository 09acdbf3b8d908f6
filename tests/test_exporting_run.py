"""pretrain.py with exports: of the checkpoints asked for, at the end, after a stop, by a start of a finished run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain
from exchange import callback
from exchange.checkpoint import open_checkpoint
from exchange.in_run import Exports
from pretrain import CONFIGS
from tests.exchange.test_in_run import stand_in
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL, losses, records

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]

FEW = [
    *SMALL,
    *FAST,
    "train.global_batch_size=2",
    "train.steps=4",
    "checkpoint.interval=0",
    "precision=bf16",
    "precision.switch.when=never",
]
Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Start:
    """Start pretrain.py with overrides; what it printed, if it ended with `code`."""
    data = small_corpus(tmp_path)

    def start(*overrides: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = pretrain.main([*FEW, *data, f"run.dir={tmp_path / 'run'}", *overrides])
        printed = capsys.readouterr()
        assert ended == code, printed
        return printed.out + printed.err

    return start


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in records(run_dir, "event") if record["event"] == name]


def test_every_export_has_its_checkpoint_and_its_record(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "Exports", partial(Exports, command=stand_in))
    run_dir, overrides = tmp_path / "run", ["checkpoint.export_interval=3", "checkpoint.export_at_end=true"]
    overrides.append("checkpoint.keep=1")
    printed = start(*overrides)
    exports = run_dir / "exports"
    assert names(exports) == ["step_00000003", "step_00000004"]
    assert names(run_dir / "checkpoints") == ["latest", "step_00000004"]
    assert [event["step"] for event in events(run_dir, "checkpoint")] == [3, 4]  # the export made the first one
    found = events(run_dir, "export")
    assert [(event["step"], event["path"], event["format"]) for event in found] == [
        (step, str(exports / f"step_0000000{step}"), "bf16") for step in (3, 4)
    ]
    assert all(0 < event["seconds"] < 600 for event in found) and not events(run_dir, "export_failed")
    assert f"after step 3: exported {exports}/step_00000003 (bf16, " in printed
    assert json.loads((run_dir / "summary.json").read_text())["exported as"] == "exports/step_00000004"

    assert "is finished" in (printed := start(*overrides)) and "lacks" not in printed
    shutil.rmtree(exports / "step_00000004")
    printed = start(*overrides)
    assert "lacks its export of step 4; writing that now" in printed and "after step 4: exported" in printed
    assert names(exports) == ["step_00000003", "step_00000004"] and len(losses(run_dir)) == 4


def test_a_stop_ends_the_wait_and_the_next_start_makes_the_export(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"

    def stopping(checkpoint: Path, output: Path, export_format: str) -> list[str]:
        (checkpoint / "hang").touch()
        (run_dir / "STOP").touch()
        return stand_in(checkpoint, output, export_format)

    monkeypatch.setattr(callback, "Exports", partial(Exports, command=stopping))
    printed = start("checkpoint.export_at_end=true", code=75)
    assert "broken off by the end of this start" in printed and "stopped after step 4 of 4 on the file STOP" in printed
    assert not (run_dir / "STOP").exists()
    assert names(run_dir / "exports") == ["step_00000004.tmp"] and not (run_dir / "summary.json").exists()
    assert json.loads((run_dir / "state.json").read_text())["state"] == "stopped"
    assert [event["step"] for event in events(run_dir, "export_failed")] == [4]

    (run_dir / "checkpoints" / "step_00000004" / "hang").unlink()
    monkeypatch.setattr(callback, "Exports", partial(Exports, command=stand_in))
    printed = start("checkpoint.export_at_end=true")
    assert "lacks its export of step 4, loss.png, summary.json; writing that now" in printed
    assert names(run_dir / "exports") == ["step_00000004"] and (run_dir / "summary.json").exists()


def test_a_failed_export_ends_nothing(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = ["python", "-c", "import sys; sys.exit('export_hf.py: no space left')"]
    monkeypatch.setattr(callback, "Exports", partial(Exports, command=lambda *_: failing))
    printed = start("checkpoint.export_interval=2", "checkpoint.asynchronous=false")
    assert printed.count("NOT EXPORTED, going on without: export_hf.py: no space left; by hand: python -c ") == 2
    (one, _) = events(tmp_path / "run", "export_failed")
    assert one["error"] == "export_hf.py: no space left" and one["command"].startswith("python -c ")
    assert names(tmp_path / "run" / "exports") == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] and "exported as" not in summary


def test_the_folder_has_the_weights_of_the_checkpoint(start: Start, tmp_path: Path) -> None:
    """By the real command; what the folder is in transformers has tests of its own."""
    from safetensors.torch import load_file

    start("checkpoint.export_at_end=true", "checkpoint.export_format=fp32")
    folder = tmp_path / "run" / "exports" / "step_00000004"
    exported = load_file(folder / "model.safetensors")
    source = open_checkpoint(tmp_path / "run", CONFIGS)
    assert torch.equal(exported["backbone.embeddings.weight"], source.tensor("embedding.weight"))
    assert sum(value.numel() for value in exported.values()) == sum(shape.numel() for shape in source.tensors.values())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "nemotron_h"
    assert json.loads((folder / "made_from.json").read_text())["step"] == 4
