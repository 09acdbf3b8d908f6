"""A run that began from another one's checkpoint: what it goes on with, and what it says of its origin. One rank, in
this process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.origin import origin_state
from megatron_fp4.parallel.mesh import ParallelMesh
from tests.distributed.one_rank import Job, flip_a_bit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]


@pytest.fixture
def branch(root: Path, tmp_path: Path, mesh: ParallelMesh) -> Job:
    """A run that began from step 2 of `root`'s, and saved step 5."""
    job = Job(tmp_path / "branch" / "checkpoints", mesh)
    assert job.resume(str(root / "step_00000002")) == 2
    job.save(5)
    return job


def test_a_branch_goes_on_with_its_own(root: Path, branch: Job, mesh: ParallelMesh) -> None:
    again = Job(branch.root, mesh)
    assert again.resume(str(root / "step_00000002")) == 5
    again.save(6)
    shutil.rmtree(root)  # the parent may go
    once_more = Job(branch.root, mesh)
    assert once_more.resume(str(root / "step_00000002")) == 6
    assert once_more.checkpointer.origin == branch.checkpointer.origin
    origin = once_more.checkpointer.origin
    assert origin is not None and (origin.path, origin.step) == (str(root / "step_00000002"), 2)
    assert Job(branch.root, mesh).resume() == 6


def test_equal_bits_have_one_digest_whoever_saved_them(root: Path, tmp_path: Path, mesh: ParallelMesh) -> None:
    def contents(folder: Path) -> str:
        begun = Job(tmp_path / f"from_{folder.parent.name}_{folder.name}", mesh)
        begun.resume(str(folder))
        assert begun.checkpointer.origin is not None
        return begun.checkpointer.origin.contents_sha256

    resumed = Job(tmp_path / "made_again", mesh)
    resumed.resume(str(root / "step_00000002"))  # with its generators
    again = resumed.save(2, seconds=1.5)
    assert contents(again) == contents(root / "step_00000002") != contents(root / "step_00000001")
    saved = ".metadata", "__0_0.distcp", "rng.pt"
    listing = [[name, hashlib.sha256((again / name).read_bytes()).hexdigest()] for name in saved]
    assert contents(again) == hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def test_an_origin_from_before_there_were_digests_of_contents_is_read(
    root: Path, branch: Job, mesh: ParallelMesh
) -> None:
    folder = branch.root / "step_00000005"
    trainer, manifest = json.loads((folder / "trainer.json").read_text()), files.read_manifest(folder)
    assert len(trainer["origin"].pop("contents_sha256")) == 64
    record = files.write_file(folder / "trainer.json", json.dumps(trainer))
    files.write_manifest(folder, dataclasses.replace(manifest, files={**manifest.files, "trainer.json": record}))
    for resume in ("auto", str(root / "step_00000002"), str(folder)):
        again = Job(branch.root, mesh)
        assert again.resume(resume) == 5
        assert origin_state(again.checkpointer.origin) == {**trainer["origin"], "contents_sha256": ""}


def test_a_branch_of_another_origin_is_refused(root: Path, branch: Job, mesh: ParallelMesh, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of a run that began from .*step_00000002 .*choose another run\.dir"):
        Job(branch.root, mesh).resume(str(root / "step_00000001"))
    with pytest.raises(ValueError, match=r"began at step 0 .*newest is step_00000003"):
        Job(root, mesh).resume(str(branch.root / "step_00000005"))
    moved = shutil.copytree(root / "step_00000002", tmp_path / "archive" / "parent")
    assert Job(branch.root, mesh).resume(str(moved)) == 5  # the same checkpoint elsewhere


def test_a_branch_goes_on_beside_a_parent_that_was_made_again(
    root: Path, branch: Job, mesh: ParallelMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent, again = root / "step_00000002", Job(tmp_path / "made_again", mesh)
    again.resume(str(parent))
    made_again = again.save(2, seconds=1.5)  # the same bits in another folder, with other times
    assert Job(branch.root, mesh).resume(str(made_again)) == 5
    shutil.rmtree(parent)
    shutil.copytree(made_again, parent)
    assert Job(branch.root, mesh).resume(str(parent)) == 5
    assert "any more" not in caplog.text
    (made_again / "manifest.json").write_text("not JSON")
    with pytest.raises(ValueError, match="of a run that began from"):
        Job(branch.root, mesh).resume(str(made_again))
    (parent / "manifest.json").write_text("not JSON")
    assert Job(branch.root, mesh).resume(str(parent)) == 5
    assert "step_00000002 is not the checkpoint any more" in caplog.text


def test_a_parent_that_was_written_anew_is_said(
    root: Path, branch: Job, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture
) -> None:
    anew = Job(root, mesh)
    torch.rand(1)  # so that the generators are others
    anew.save(2)
    assert Job(branch.root, mesh).resume(str(root / "step_00000002")) == 5
    assert "step_00000002 is not the checkpoint any more that this run began from" in caplog.text


def test_a_branch_falls_back_among_its_own(root: Path, branch: Job, mesh: ParallelMesh) -> None:
    branch.save(6)
    flip_a_bit(branch.root / "step_00000006" / "__0_0.distcp")
    assert Job(branch.root, mesh).resume(str(root / "step_00000002")) == 5
    flip_a_bit(branch.root / "step_00000005" / "__0_0.distcp")
    with pytest.raises(ValueError, match="none is whole"):  # not from the parent unasked
        Job(branch.root, mesh).resume(str(root / "step_00000002"))
