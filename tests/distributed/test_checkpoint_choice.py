"""Which checkpoint is resumed from, which are kept, and what is no checkpoint of the run. One rank, in this process."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import pytest
import torch

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import CheckpointError
from megatron_fp4.parallel.mesh import ParallelMesh
from tests.distributed.one_rank import Job, flip_a_bit, names
from tests.training.harness import launch, toy_mesh

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]


def test_nothing_there(tmp_path: Path, mesh: ParallelMesh) -> None:
    assert Job(tmp_path / "none", mesh).resume() is None


def test_newest(root: Path, mesh: ParallelMesh) -> None:
    assert Job(root, mesh).resume() == 3
    assert Job(root, mesh).resume("never") is None


def test_given(root: Path, mesh: ParallelMesh) -> None:
    assert Job(root, mesh).resume(str(root / "step_00000002")) == 2
    with pytest.raises(ValueError, match="step_00000009 is not a folder; give auto"):
        Job(root, mesh).resume(str(root / "step_00000009"))
    flip_a_bit(root / "step_00000002" / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"is damaged: .*__0_0\.distcp has changed"):
        Job(root, mesh).resume(str(root / "step_00000002"))
    with pytest.raises(ValueError, match=r"is damaged: manifest\.json is missing"):
        Job(root.parent / "another", mesh).resume(str(root.parent))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "trainer.json", "rng.pt", "manifest.json"])
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
    assert len(loud) == 2 and "DAMAGED: step_00000003: " in loud[0] and name in loud[0]
    assert "was moved to" in loud[1] and loud[1].endswith("step_00000003.damaged; going on from step_00000002")
    assert names(root) == ["latest", "step_00000001", "step_00000002", "step_00000003.damaged"]
    assert (root / "latest").read_text() == "step_00000002\n"


def test_damaged_ones_are_kept_and_the_step_is_saved_again(root: Path, mesh: ParallelMesh) -> None:
    for again in range(3):
        flip_a_bit(root / "step_00000003" / "__0_0.distcp")
        (root / "step_00000002" / ".metadata").unlink(missing_ok=True)
        job = Job(root, mesh, keep=1)
        assert job.resume() == 1
        job.checkpointer.saves.keep = 0 if again < 2 else 1
        job.save(2)
        job.save(3)
        assert Job(root, mesh).checkpointer.steps_after(3) == []
    kept = [f"step_0000000{step}.damaged{more}" for step in (2, 3) for more in ("", ".1", ".2")]
    assert names(root) == ["latest", *kept[:3], "step_00000003", *kept[3:]]  # keep=1 prunes checkpoints, none of these
    assert Job(root, mesh).resume() == 3
    assert names(root) == ["latest", *kept[:3], "step_00000003", *kept[3:]]


def test_a_checkpoint_of_another_version_is_not_damaged(root: Path, mesh: ParallelMesh) -> None:
    manifest = files.read_manifest(root / "step_00000003")
    files.write_manifest(root / "step_00000003", dataclasses.replace(manifest, format=files.FORMAT + 1))
    with pytest.raises(ValueError, match=r"has format \d, .* resume with the version that wrote it"):
        Job(root, mesh).resume()
    assert "step_00000003" in names(root)


def test_what_goes_wrong_besides_damage_moves_nothing(root: Path, mesh: ParallelMesh) -> None:
    flip_a_bit(root / "step_00000003" / "trainer.json")
    with pytest.raises(ValueError, match="belongs to another run"):
        Job(root, mesh, hidden=16).resume()
    assert "step_00000003" in names(root)


def test_going_back_past_damaged_ones(root: Path, mesh: ParallelMesh) -> None:
    (root / "step_00000003" / "manifest.json").unlink()
    job = Job(root, mesh)
    assert job.resume(str(root / "step_00000001")) == 1
    assert job.checkpointer.steps_after(1) == [2, 3]  # 2 is intact: nothing is moved, and the caller refuses
    flip_a_bit(root / "step_00000002" / "__0_0.distcp")
    job = Job(root, mesh)
    assert job.resume(str(root / "step_00000001")) == 1
    assert job.checkpointer.steps_after(1) == []
    assert names(root) == ["latest", "step_00000001", "step_00000002.damaged", "step_00000003.damaged"]


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
    assert resumed is not None and resumed.trainer == {"note": "new", "origin": None}


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
    with pytest.raises(CheckpointError, match=r"has no tensor model\.extra\.weight"):
        job.resume(allow_mismatch=True)


def test_trainer_state_must_be_json(root: Path, mesh: ParallelMesh) -> None:
    with pytest.raises(TypeError):
        Job(root, mesh).save(9, tensor=torch.zeros(1))
    assert len(names(root)) == 4


def _resume_with_another_view(rank: int, root: str) -> tuple[int | None, list[int]]:
    """Rank 1 sees an empty folder, as on a file system that is slow to show what another host wrote."""
    if rank == 1:
        files.list_checkpoints = lambda root: []  # type: ignore[assignment]
    job = Job(Path(root), toy_mesh())
    return job.resume(), job.checkpointer.steps_after(1)


def test_the_first_rank_decides(root: Path) -> None:
    flip_a_bit(root / "step_00000003" / "trainer.json")
    assert launch(_resume_with_another_view, 2, str(root)) == [(2, [2])] * 2
    assert names(root) == ["latest", "step_00000001", "step_00000002", "step_00000003.damaged"]


def test_later_ones_of_another_version_stay(root: Path, mesh: ParallelMesh) -> None:
    (root / "step_00000003" / "manifest.json").unlink()
    manifest = dataclasses.replace(files.read_manifest(root / "step_00000002"), format=files.FORMAT + 1)
    files.write_manifest(root / "step_00000002", manifest)
    job = Job(root, mesh)
    assert job.resume(str(root / "step_00000001")) == 1
    assert job.checkpointer.steps_after(1) == [2, 3]
    with pytest.raises(ValueError, match="is of another version"):
        Job(root, mesh).resume(str(root / "step_00000002"))
