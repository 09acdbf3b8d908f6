"""Which checkpoint is resumed from, and when none may be. One rank, in this process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import Checkpointer, CheckpointError
from megatron_fp4.checkpoint.origin import origin_state
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.fp32_gradients import local_part
from tests.training.harness import alone, launch, toy, toy_mesh

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]


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
        state = {**trainer, "origin": origin_state(self.checkpointer.origin)}
        return self.checkpointer.save(
            step, self.model, self.optimizer, state, consumed_samples=step, consumed_tokens=step
        )

    def resume(self, resume: str = "auto", allow_mismatch: bool = False) -> int | None:
        resumed = self.checkpointer.resume(
            resume, self.model, self.optimizer, self.clock, allow_mismatch=allow_mismatch
        )
        if resumed is None:
            return None
        weights = {local_part(parameter).unique().item() for parameter in self.model.parameters()}
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


def records(run_dir: Path, *lines: dict[str, Any] | str) -> None:
    run_dir.mkdir(exist_ok=True)
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run_dir / "metrics.jsonl").write_text("\n".join(text))


BEGUN, STEP = {"kind": "run", "step": 0}, {"kind": "step", "step": 7, "loss": 3.0}
SAVED = {"kind": "event", "event": "checkpoint", "step": 7}


@pytest.mark.parametrize("resume", ["auto", "branch"])
@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([BEGUN, STEP, SAVED, SAVED], r"metrics\.jsonl has 7 steps, and 2 checkpoints saved"),
        ([BEGUN, "garbage", "[1]", STEP, SAVED, '{"kind": "st'], r"7 steps, and 1 checkpoint saved"),
        ([{"kind": "run", "step": 4}, STEP], r"metrics\.jsonl has a start from step 4"),
        ("summary.json", r"summary\.json says that it was finished"),
        ("checkpoints/latest", r"latest names step_00000007"),
        ("checkpoints/step_00000003.damaged.1", r"moved aside: step_00000003\.damaged\.1"),
    ],
)
def test_a_run_that_lost_its_checkpoints_is_refused(
    root: Path, tmp_path: Path, mesh: ParallelMesh, lines: Any, found: str, resume: str
) -> None:
    run_dir = tmp_path / "lost"
    if isinstance(lines, list):
        records(run_dir, *lines)
    elif "damaged" in lines:
        (run_dir / lines).mkdir(parents=True)
    else:
        (run_dir / lines).parent.mkdir(parents=True)
        (run_dir / lines).write_text("step_00000007\n")
    job = Job(run_dir / "checkpoints", mesh)
    if resume == "branch" and "start from" in found:
        assert job.resume(str(root / "step_00000003")) == 3  # where every start of it begins
        return
    with pytest.raises(ValueError, match=found) as caught:
        job.resume("auto" if resume == "auto" else str(root / "step_00000003"))
    assert "choose another run.dir" in str(caught.value) and "\n" not in str(caught.value)
    assert ("checkpoint.resume=never" in str(caught.value)) == (resume == "auto")
    assert job.resume("never") is None


def test_killed_before_the_first_checkpoint(
    tmp_path: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture
) -> None:
    records(tmp_path, BEGUN, STEP)
    assert Job(tmp_path / "checkpoints", mesh).resume() is None
    assert "made 7 steps and no checkpoint; beginning at step 0 again" in caplog.text
    # And in the place of one that was given up by checkpoint.resume=never.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000900\n")
    records(tmp_path, {**BEGUN, "resume": "never"}, STEP)
    assert Job(tmp_path / "checkpoints", mesh).resume() is None


def test_never_silently_from_the_start(root: Path, mesh: ParallelMesh) -> None:
    for step in (1, 2, 3):
        flip_a_bit(root / f"step_0000000{step}" / "__0_0.distcp")
    before = names(root)
    with pytest.raises(ValueError, match=r"none is whole.*step_00000001.*another run\.dir"):
        Job(root, mesh).resume()
    assert names(root) == before
    assert Job(root, mesh).resume("never") is None


def test_pointer_to_nothing_is_refused(tmp_path: Path, mesh: ParallelMesh) -> None:
    (tmp_path / "latest").write_text("step_00000700\n")
    with pytest.raises(ValueError, match="latest names step_00000700"):
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


def test_a_newest_one_that_was_taken_away_is_said(
    root: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(root / "step_00000003")
    assert Job(root, mesh).resume() == 2
    assert "latest names step_00000003, which is not there" in caplog.text
