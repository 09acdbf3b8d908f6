"""Which checkpoint is resumed from, and when none may be. One rank, in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.checkpoint.checkpointer import Checkpointer, CheckpointError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.clock import RunClock
from tests.training.harness import alone, toy

pytestmark = pytest.mark.slow


class Job:
    """One start of a run: a model whose weights tell which step they are of, and its checkpointer."""

    def __init__(self, root: Path, mesh: ParallelMesh, keep: int = 0, **identity: Any) -> None:
        self.root = root
        self.model, self.optimizer = toy(mesh)
        self.clock = RunClock(0)
        self.checkpointer = Checkpointer(root, mesh, keep=keep, identity={"hidden": 12, **identity})

    def save(self, step: int, **trainer: Any) -> Path:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        return self.checkpointer.save(
            step, self.model, self.optimizer, trainer, consumed_samples=step, consumed_tokens=step
        )

    def resume(self, resume: str = "auto", allow_mismatch: bool = False) -> int | None:
        resumed = self.checkpointer.resume(
            resume, self.model, self.optimizer, self.clock, allow_mismatch=allow_mismatch
        )
        if resumed is None:
            return None
        weights = {parameter.to_local().unique().item() for parameter in self.model.parameters()}
        assert weights == {resumed.step} and self.clock.weights_version == 1
        return resumed.step


@pytest.fixture
def mesh() -> Iterator[ParallelMesh]:
    with alone() as mesh:
        yield mesh


@pytest.fixture
def root(tmp_path: Path, mesh: ParallelMesh) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    job = Job(tmp_path / "checkpoints", mesh)
    for step in (1, 2, 3):
        job.save(step)
    return job.root


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_nothing_there(tmp_path: Path, mesh: ParallelMesh) -> None:
    assert Job(tmp_path / "none", mesh).resume() is None


def test_newest(root: Path, mesh: ParallelMesh) -> None:
    assert Job(root, mesh).resume() == 3
    assert Job(root, mesh).resume("never") is None


def test_given(root: Path, mesh: ParallelMesh) -> None:
    assert Job(root, mesh).resume(str(root / "step_00000002")) == 2
    with pytest.raises(ValueError, match="not a folder on every rank"):
        Job(root, mesh).resume(str(root / "step_00000009"))
    flip_a_bit(root / "step_00000002" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has changed"):
        Job(root, mesh).resume(str(root / "step_00000002"))
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        Job(root, mesh).resume(str(root.parent))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "trainer.json", "rng_00000.pt", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_any_damage_falls_back_loudly(
    root: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture, name: str, harm: str
) -> None:
    path = root / "step_00000003" / name
    if harm == "flip":
        flip_a_bit(path)
    elif harm == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    assert Job(root, mesh).resume() == 2
    loud = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(loud) == 1 and "DAMAGED" in loud[0] and "step_00000003" in loud[0] and name in loud[0]


def test_never_silently_from_the_start(root: Path, mesh: ParallelMesh) -> None:
    for step in (1, 2, 3):
        flip_a_bit(root / f"step_0000000{step}" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"none is whole.*step_00000001.*resume=never"):
        Job(root, mesh).resume()
    assert Job(root, mesh).resume("never") is None


def test_pointer_to_nothing_is_refused(tmp_path: Path, mesh: ParallelMesh) -> None:
    (tmp_path / "latest").write_text("step_00000700\n")
    with pytest.raises(CheckpointError, match="step_00000700: named by `latest` but missing"):
        Job(tmp_path, mesh).resume()


@pytest.mark.parametrize("content", ["", None, "step_00000001\n", "step_99999999\n", "\0\0\0"])
def test_whatever_the_pointer_says(root: Path, mesh: ParallelMesh, content: str | None) -> None:
    (root / "latest").unlink()
    if content is not None:
        (root / "latest").write_text(content)
    assert Job(root, mesh).resume() == 3


def test_stale_folders_are_ignored_and_removed(
    root: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture
) -> None:
    stale = root / "step_00000009.tmp"
    stale.mkdir()
    (stale / "__0_0.distcp").write_bytes(b"half")
    assert Job(root, mesh).resume() == 3
    assert not stale.exists() and "removed unfinished step_00000009.tmp" in caplog.text


def test_pruning(tmp_path: Path, mesh: ParallelMesh) -> None:
    job = Job(tmp_path, mesh, keep=2)
    for step in (1, 2, 3, 4):
        job.save(step)
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    with pytest.raises(ValueError, match=r"checkpoint\.keep is -1"):
        Job(tmp_path, mesh, keep=-1)


def test_going_back_makes_the_later_steps_old(root: Path, mesh: ParallelMesh) -> None:
    job = Job(root, mesh, keep=2)
    assert job.resume(str(root / "step_00000001")) == 1
    job.save(2)
    assert Job(root, mesh).resume() == 2
    assert names(root) == ["latest", "step_00000002", "step_00000003"]


def test_saving_a_step_again_does_nothing(root: Path, mesh: ParallelMesh) -> None:
    job = Job(root, mesh)
    assert job.resume() == 3
    before = (root / "step_00000003" / "manifest.json").stat()
    assert job.save(3) == root / "step_00000003"
    assert (root / "step_00000003" / "manifest.json").stat() == before


def test_replacing_a_checkpoint(root: Path, mesh: ParallelMesh) -> None:
    job = Job(root, mesh)
    assert job.resume("never") is None
    job.save(2, note="new")
    assert names(root) == ["latest", "step_00000001", "step_00000002", "step_00000003"]
    again = Job(root, mesh)
    resumed = again.checkpointer.resume("auto", again.model, again.optimizer, again.clock, allow_mismatch=False)
    assert resumed is not None and resumed.trainer == {"note": "new"}


def test_another_run_is_refused(root: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture) -> None:
    other = Job(root, mesh, hidden=16, tokenizer="abc")
    with pytest.raises(ValueError) as caught:
        other.resume()
    for part in ("hidden: 12 in the checkpoint, 16 now", "tokenizer: '(absent)'", "checkpoint.allow_mismatch=true"):
        assert part in str(caught.value)
    assert other.resume(allow_mismatch=True) == 3
    assert "although it differs" in caplog.text


def test_another_shape_is_an_error_even_if_allowed(root: Path, mesh: ParallelMesh) -> None:
    job = Job(root, mesh)
    job.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"could not load model and optimizer.*extra\.weight"):
        job.resume(allow_mismatch=True)


def test_trainer_state_must_be_json(root: Path, mesh: ParallelMesh) -> None:
    with pytest.raises(TypeError):
        Job(root, mesh).save(9, tensor=torch.zeros(1))
    assert len(names(root)) == 4
