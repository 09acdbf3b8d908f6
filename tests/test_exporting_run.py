"""pretrain.py with exports: of the checkpoints asked for, at the end, after a stop, by a start of a finished run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pretrain
from exchange import exports
from exchange.checkpoint import open_checkpoint
from pretrain import CONFIGS
from tests.exchange.test_exports import stand_in
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL, losses, records

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]
FEW = [*SMALL, *FAST, "train.global_batch_size=2", "train.steps=4", "checkpoint.interval=0", "precision=bf16"]
Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Start:
    """Start pretrain.py with overrides; what it printed, if it ended with `code`."""
    data = [*small_corpus(tmp_path), "precision.switch.when=never", f"run.dir={tmp_path / 'run'}"]

    def start(*overrides: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = pretrain.main([*FEW, *data, *overrides])
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
    monkeypatch.setattr(exports, "SCRIPT", stand_in(tmp_path))
    run_dir, overrides = tmp_path / "run", ["checkpoint.export_interval=2", "checkpoint.keep=1"]
    start(*overrides)
    assert names(run_dir / "exports") == ["step_00000002", "step_00000004"]
    assert names(run_dir / "checkpoints") == ["latest", "step_00000004"]
    assert [event["step"] for event in events(run_dir, "checkpoint")] == [2, 4]  # the export made the first one
    found = [(event["step"], event["path"], event["format"]) for event in events(run_dir, "export")]
    assert found == [(step, str(run_dir / "exports" / f"step_0000000{step}"), "bf16") for step in (2, 4)]
    assert json.loads((run_dir / "summary.json").read_text())["exported as"] == "exports/step_00000004"

    assert "is finished" in (printed := start(*overrides)) and "lacks" not in printed
    shutil.rmtree(run_dir / "exports" / "step_00000004")
    assert "lacks its export of step 4; writing that now" in start(*overrides)
    assert names(run_dir / "exports") == ["step_00000002", "step_00000004"] and len(losses(run_dir)) == 4


def test_a_stop_ends_the_wait_and_the_next_start_makes_the_export(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter by the real command; what the folder is in transformers has tests of its own."""
    run_dir, stopping = tmp_path / "run", tmp_path / "stopping.py"
    end = ["checkpoint.export_interval=4", "checkpoint.export_format=fp32"]
    stop = f"from pathlib import Path\nPath({str(run_dir / 'STOP')!r}).touch()\nPath(sys.argv[2], 'hang').touch()\n"
    stopping.write_text(stand_in(tmp_path).read_text().replace("import json", f"{stop}import json", 1))
    with monkeypatch.context() as patch:
        patch.setattr(exports, "SCRIPT", stopping)
        printed = start(*end, code=75)
    assert "broken off by the end of this start" in printed and not (run_dir / "STOP").exists()
    assert not [*run_dir.glob("exports/*"), *run_dir.glob("summary.json")]  # perhaps not even the folder
    assert json.loads((run_dir / "state.json").read_text())["state"] == "stopped"
    assert [event["step"] for event in events(run_dir, "export_failed")] == [4]

    (run_dir / "checkpoints" / "step_00000004" / "hang").unlink()
    assert "lacks its export of step 4" in start(*end)
    folder = run_dir / "exports" / "step_00000004"
    exported, source = load_file(folder / "model.safetensors"), open_checkpoint(run_dir, CONFIGS)
    assert torch.equal(exported["backbone.embeddings.weight"], source.tensor("embedding.weight"))
    assert sum(value.numel() for value in exported.values()) == sum(shape.numel() for shape in source.tensors.values())
    assert json.loads((folder / "made_from.json").read_text())["step"] == 4 and (run_dir / "summary.json").exists()
