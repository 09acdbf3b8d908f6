"""Runs that begin with only the weights of a checkpoint: what they load, what they record, and what is refused."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain
from exchange.checkpoint import open_checkpoint
from exchange.weights_only import write_weights_only
from megatron_fp4.checkpoint import files
from megatron_fp4.training.callbacks.numerics import SelfTest
from pretrain import CONFIGS
from scripts import replay
from tests.distributed.one_rank import flip_a_bit
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL, losses, records
from tests.test_resume import Start, checkpoint, start

__all__ = ["start"]
pytestmark = pytest.mark.slow

FEW = [*SMALL, *FAST, "train.global_batch_size=2", "train.steps=4", "checkpoint.interval=2", "precision.switch.when=3"]
NO_SWITCH = "precision.switch.when=never"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, data: list[str]) -> Path:
    """The folder of a run of 4 steps, with checkpoints of steps 2 and 4. Not to be changed."""
    folder = tmp_path_factory.mktemp("parent") / "run"
    assert pretrain.main([*FEW, *data, f"run.dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def imported(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent's last weights as a weights-only checkpoint."""
    source, folder = open_checkpoint(parent, CONFIGS), tmp_path_factory.mktemp("imported") / "model"
    tensors = ((name, source.tensor(name)) for name in source.tensors)
    write_weights_only(folder, source.config, tensors, imported={"from": "a test"})
    return folder


def trainer(run_dir: Path, step: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((checkpoint(run_dir, step) / "trainer.json").read_text())
    return read


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's manifest; of `identity` only the given keys."""
    manifest = files.read_manifest(folder)
    if "identity" in changes:
        changes["identity"] = {**manifest.identity, **changes["identity"]}
    files.write_manifest(folder, dataclasses.replace(manifest, **changes))


def test_a_run_begins_with_exactly_these_weights_and_nothing_else(
    parent: Path, imported: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may begin with weights of a run or of an import, at step 0, without moments and before its switch."""
    found: list[tuple[dict[str, Tensor], bool]] = []

    def look(callback: SelfTest, done: int) -> None:
        run = callback.trainer
        moments = any(tensor.any() for state in run.optimizer.state.values() for tensor in state.values())
        weights = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
        found.append((weights, bool(moments) or run.precision.switch.switched_at is not None))

    monkeypatch.setattr(SelfTest, "start", look)
    source = open_checkpoint(checkpoint(parent, 4), CONFIGS)
    for given, begun, step in ((parent, checkpoint(parent, 4), 4), (imported, imported, 0)):
        run_dir = tmp_path / str(step)
        printed = start(run_dir, f"checkpoint.initialize_from={given}", "run.seed=7", "train.steps=1", NO_SWITCH)
        assert f"begins with the weights of {begun} (its step {step})" in printed
        weights, other = found.pop()
        assert not other and weights.keys() == source.tensors.keys()
        for name, value in weights.items():
            assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, source.tensor(name))
        (record,) = records(run_dir, "run")
        assert record["step"] == 0 and record["origin"] is None
        assert record["initialized_from"] == trainer(run_dir, 1)["initialized_from"]
        contents = files.Origin.at(begun, files.read_manifest(begun)).contents_sha256
        assert record["initialized_from"]["path"] == str(begun)
        assert record["initialized_from"]["contents_sha256"] == contents


def test_a_run_resumes_from_its_own_checkpoints_and_records_its_origin(
    parent: Path, imported: Path, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path(shutil.copytree(parent, tmp_path / "parent"))
    run_dir, given = tmp_path / "run", f"checkpoint.initialize_from={mine}"
    start(run_dir, given)
    straight = losses(run_dir)
    shutil.rmtree(checkpoint(run_dir, 4))
    # It replays from the weights that the run began with.
    assert replay.main([str(run_dir), "--step", "2", "--trust-config"]) == 0
    assert "2 of 2 steps are equal to the last bit" in capsys.readouterr().out

    mine.rename(tmp_path / "moved")  # the parent is moved
    for again in (f"checkpoint.initialize_from={tmp_path / 'moved'}", "checkpoint.initialize_from=null"):
        shutil.rmtree(checkpoint(run_dir, 4), ignore_errors=True)
        printed = start(run_dir, again)
        assert "resumed after step 2 of 4" in printed
        assert "begins with" not in printed and "changed since" not in printed
        assert losses(run_dir) == straight
        assert trainer(run_dir, 4)["initialized_from"]["path"] == str(checkpoint(mine, 4))
    starts = [record["initialized_from"]["path"] for record in records(run_dir, "run")]
    assert starts == [str(checkpoint(mine, 4))] * 3
    assert replay.main([str(run_dir), "--step", "2", "--trust-config"]) == 2
    assert f"initialize_from={checkpoint(mine, 4)} is not a folder" in capsys.readouterr().err

    printed = start(run_dir, f"checkpoint.initialize_from={imported}", code=2)
    assert f"began from the weights of {checkpoint(mine, 4)}" in printed and "choose another run.dir" in printed
    printed = start(parent, f"checkpoint.initialize_from={imported}", code=2)
    assert "began from new weights" in printed and "checkpoint.initialize_from=null" in printed


def unchanged(folder: Path) -> None:
    """Leaves the import unchanged."""


# (change of a copy of the import, overrides, words of the line)
REFUSED: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda folder: rewrite(folder, format=3), "", "format 3, this version reads 1 to 2"),
    (lambda folder: flip_a_bit(folder / "__0_0.distcp"), "", "__0_0.distcp has changed"),
    (unchanged, "model.rope=true", "model.rope: False in the checkpoint, True now"),
    (unchanged, "model.ffn_dim=256 checkpoint.allow_mismatch=true", "[128, 64] in the checkpoint, torch.float32 [256"),
    (unchanged, "checkpoint.resume={} checkpoint.initialize_from=null", "only weights: nothing to resume"),
]


@pytest.mark.parametrize(("change", "overrides", "expected"), REFUSED)
def test_refusals_give_one_line_and_leave_nothing(
    imported: Path, start: Start, tmp_path: Path, change: Callable[[Path], object], overrides: str, expected: str
) -> None:
    folder = Path(shutil.copytree(imported, tmp_path / "model"))
    change(folder)
    given = [f"checkpoint.initialize_from={folder}", *overrides.format(folder).split()]
    assert expected in start(tmp_path / "run", *given, code=2)
    assert not [*tmp_path.glob("run/checkpoints/*")] and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_another_tokenizer_is_refused_unless_allowed_and_a_check_reports_mismatches(
    imported: Path, start: Start, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(imported, tmp_path / "model"))
    rewrite(folder, identity={"data.tokenizer": "0123456789abcdef"})
    given = f"checkpoint.initialize_from={folder}"
    assert "data.tokenizer: '0123456789abcdef' in the checkpoint" in start(tmp_path / "none", given, code=2)
    start(tmp_path / "run", given, "checkpoint.allow_mismatch=true", "train.steps=1", NO_SWITCH)
    other = [f"checkpoint.initialize_from={imported}", "model.hidden_dim=128"]
    assert "data.tokenizer: '0123456789abcdef'" in start(tmp_path / "unseen", given, "--check", code=2)
    start(tmp_path / "unseen", given, "run.dry=true")  # opens no data
    for mode in ("--check", "run.dry=true"):
        assert "model.hidden_dim: 64 in the checkpoint, 128 now" in start(tmp_path / "unseen", *other, mode, code=2)
    assert not (tmp_path / "unseen").exists()
