"""Which checkpoint a run resumes from, and what it refuses. Tests use one rank in this process, unless they launch
more."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.checkpoint import files, shards
from megatron_fp4.checkpoint.checkpointer import CheckpointError
from megatron_fp4.checkpoint.find import refuse_to_overwrite
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.runtime.run_state import write_state
from tests.distributed.one_rank import Job, flip_a_bit, names
from tests.training.harness import launch, toy_mesh

pytestmark = pytest.mark.slow

SECOND, NEWEST = "step_00000002", "step_00000003"


def test_a_run_resumes_from_the_newest_or_a_given_checkpoint(root: Path, tmp_path: Path, mesh: ParallelMesh) -> None:
    assert Job(tmp_path / "none", mesh).resume() is None
    assert Job(root, mesh).resume() == 3 == Job(root, mesh).resume("required")
    assert Job(root, mesh).resume("never") is None
    assert Job(root, mesh).resume(str(root / SECOND)) == 2
    with pytest.raises(ValueError, match="step_00000009 is not a folder; give a checkpoint"):
        Job(root, mesh).resume(str(root / "step_00000009"))
    flip_a_bit(root / SECOND / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"is damaged: .*__0_0\.distcp has changed"):
        Job(root, mesh).resume(str(root / SECOND))
    with pytest.raises(ValueError, match=r"is not a checkpoint, but contains some: give .*step_00000003"):
        Job(root.parent / "another", mesh).resume(str(root.parent))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__0_0.distcp", flip_a_bit),
        (".metadata", _truncate),
        ("trainer.json", Path.unlink),
        ("rng.pt", flip_a_bit),
        ("manifest.json", _replace_by_pipe),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_run_resumes_from_the_previous_one(
    root: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    damage(root / NEWEST / name)
    assert Job(root, mesh).resume() == 2
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2 and f"DAMAGED: {NEWEST}: " in errors[0] and name in errors[0]
    assert errors[1].endswith(f"{NEWEST}.damaged; resuming from {SECOND}")
    assert names(root) == ["latest", "step_00000001", SECOND, f"{NEWEST}.damaged"]
    assert (root / "latest").read_text() == f"{SECOND}\n"


@pytest.mark.parametrize("index_is_known", [True, False])
def test_a_checkpoint_that_comes_back_does_not_win_over_what_was_saved_since(
    root: Path, tmp_path: Path, mesh: ParallelMesh, caplog: pytest.LogCaptureFixture, index_is_known: bool
) -> None:
    """The newest one is moved away, the run goes back and saves, and the other returns. index_is_known: by state.json;
    otherwise the run knows it only by the name under which the newest was moved."""

    def job() -> Job:
        one = Job(root, mesh)
        if index_is_known:
            one.checkpointer.published = lambda step, index: write_state(tmp_path, "running", step, "", step, index)
        return one

    first = job()
    first.save(5)
    away = root / "step_00000005.damaged" if not index_is_known else tmp_path / "away"
    shutil.move(root / "step_00000005", away)
    second = job()
    assert second.resume() == 3
    second.save(4)
    shutil.move(away, root / "step_00000005")
    for _ in range(2):
        assert job().resume() == 4
        refuse_to_overwrite("auto", 4, root)
    assert names(root) == ["latest", *(f"step_0000000{step}" for step in (1, 2, 3, 4)), "step_00000005.returned"]
    assert files.read_manifest(root / "step_00000004").save_index == 5


def test_a_checkpoint_of_another_version_is_not_damaged(root: Path, mesh: ParallelMesh) -> None:
    manifest = files.read_manifest(root / NEWEST)
    files.write_manifest(root / NEWEST, dataclasses.replace(manifest, format=files.FORMAT + 1))
    with pytest.raises(ValueError, match=r"has format \d, .* resume with the version that wrote it"):
        Job(root, mesh).resume()
    job = Job(root, mesh)
    assert job.resume(str(root / "step_00000001")) == 1
    with pytest.raises(ValueError, match=r"starts from step 1, but .* up to step 3, .*; choose another run\.dir"):
        refuse_to_overwrite("auto", 1, root)
    assert NEWEST in names(root)
    files.write_manifest(root / NEWEST, dataclasses.replace(manifest, format=1))
    with pytest.raises(ValueError, match=r"is of format 1, .*; begin a run from it with checkpoint\.init"):
        Job(root, mesh).resume()
    assert NEWEST in names(root)


@pytest.mark.parametrize("content", ["step_00000001\n", "step_99999999\n", "a folder"])
def test_a_wrong_pointer_does_not_change_the_choice(root: Path, mesh: ParallelMesh, content: str, caplog) -> None:
    (root / "latest").unlink()
    if content == "a folder":
        (root / "latest").mkdir()
    else:
        (root / "latest").write_text(content)
    job = Job(root, mesh)
    assert job.resume() == 3
    assert ("latest names step_99999999, which does not exist" in caplog.text) == (content == "step_99999999\n")
    assert job.save(4).is_dir()


def test_a_step_is_saved_again_only_by_a_new_run(root: Path, mesh: ParallelMesh) -> None:
    resumed = Job(root, mesh)
    assert resumed.resume() == 3
    before = (root / NEWEST / "manifest.json").stat()
    assert resumed.save(3) == root / NEWEST and (root / NEWEST / "manifest.json").stat() == before
    new = Job(root, mesh)
    assert new.resume("never") is None
    (root / f"{SECOND}.tmp").symlink_to(root / "step_00000001")
    new.save(2, note="new")  # replaces the checkpoint, which becomes the newest
    assert files.read_manifest(root / "step_00000001").step == 1  # the link's target is unchanged
    assert Job(root, mesh).resume() == 2


def test_a_checkpoint_of_another_run_is_refused(root: Path, mesh: ParallelMesh, caplog) -> None:
    other = Job(root, mesh, hidden=16, tokenizer="abc")
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        other.resume()
    for part in ("hidden: 12 in the checkpoint, 16 now", "tokenizer: '(absent)'", "checkpoint.allow_mismatch=true"):
        assert part in str(caught.value)
    assert other.resume(allow_mismatch=True) == 3 and "although it differs" in caplog.text
    moments = other.optimizer.state[other.model.head.weight]
    moments["momentum"] = moments.pop("exp_avg")
    with pytest.raises(
        ValueError, match=r"another optimizer: .*has no tensor optimizer\.head\.weight\.momentum.*initialize_"
    ):
        other.resume(allow_mismatch=True)
    del moments["momentum"]
    with pytest.raises(ValueError, match=r"another optimizer: .*has a tensor optimizer\.head\.weight\.exp_avg, which"):
        other.resume(allow_mismatch=True)
    other.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"another model: .* has no tensor model\.extra\.weight.*; set the model back"):
        other.resume(allow_mismatch=True)


def _save_on_two(rank: int, root: str) -> None:
    """Save step 4 on two ranks."""
    Job(Path(root), toy_mesh()).save(4)


def _resume_on_two(rank: int, root: str, faulty_rank: int, fault: str) -> list[Any]:
    """Resume from the newest checkpoint and from step 3, and begin from the weights of step 3, with a fault of one
    rank."""
    mesh, outcomes = toy_mesh(), list[Any]()
    digest_to = shards._digest_to

    def faulty_digest(end: int, position: int, file: Any, digest: Any) -> None:
        if Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).parent.name == NEWEST:
            if fault == "io":
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # without a file name, like a read of an open file
            digest.update(b"x")
        digest_to(end, position, file, digest)

    if rank == faulty_rank and fault in ("io", "hash"):
        shards._digest_to = faulty_digest
    if rank == faulty_rank and fault == "an empty folder":  # its file system does not yet show what another host wrote
        files.list_checkpoints = lambda root: []  # type: ignore[assignment]
    given = str(Path(root) / NEWEST)
    for resume in ("auto", given, "never"):
        job = Job(Path(root), mesh)
        try:
            if (step := job.resume(resume)) is None:
                begun = job.checkpointer.initialize(
                    given, job.model, job.step_state, resumed=False, allow_mismatch=False
                )
                assert all((local_part(parameter) == 3).all() for parameter in job.model.parameters())
                step = begun and begun.step
            outcomes.append(step)
        except (CheckpointError, ValueError) as error:
            outcomes.append((type(error), str(error)))
    return outcomes


@pytest.mark.parametrize(("fault", "faulty_rank"), [("io", 1), ("hash", 0)])
def test_a_checkpoint_that_only_one_rank_finds_damaged_is_not_moved(root: Path, fault: str, faulty_rank: int) -> None:
    """The host of one rank is faulty. The error names rank and host, and is no refusal, so that the run restarts on
    another host."""
    before = names(root)
    results = launch(_resume_on_two, 2, str(root), faulty_rank, fault)
    assert results[0] == results[1] and len(results[0]) == 3
    for kind, message in results[0]:
        assert kind is CheckpointError  # not a subclass: neither a refusal nor the damage
        assert f"rank {faulty_rank}: " in message and f"(on {socket.gethostname()})" in message
        assert NEWEST in message and "finds it intact" in message
    assert names(root) == before


def test_damage_in_a_file_of_another_rank_is_confirmed_and_moved_by_rank_0(root: Path) -> None:
    """Rank 0 does not need the file, but checks it. Rank 1 does not see any checkpoints."""
    launch(_save_on_two, 2, str(root))
    flip_a_bit(root / "step_00000004" / "__1_0.distcp")
    assert launch(_resume_on_two, 2, str(root), 1, "an empty folder") == [[3, 3, 3]] * 2
    assert names(root) == ["latest", "step_00000001", SECOND, NEWEST, "step_00000004.damaged"]


@pytest.mark.parametrize("steps", [(3,), (1, 2, 3)])
def test_files_that_no_rank_can_read(root: Path, mesh: ParallelMesh, monkeypatch, steps: tuple[int, ...]) -> None:
    """A checkpoint is damaged if others can be read. If none can, the disk is not reachable, which is no refusal."""
    before, unreadable = names(root), {f"step_0000000{step}" for step in steps}
    real = files.open_plain

    def failing(path: Path) -> Any:
        if path.parent.name in unreadable and path.suffix == ".distcp":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(files, "open_plain", failing)
    if len(steps) == 1:
        assert Job(root, mesh).resume() == 2
        assert names(root) == ["latest", "step_00000001", SECOND, f"{NEWEST}.damaged"]
    else:
        with pytest.raises(CheckpointError, match=r"can be read .*Input/output error") as caught:
            Job(root, mesh).resume()
        assert not isinstance(caught.value, ValueError)
        assert names(root) == before


# A run whose checkpoints are lost does not silently begin again


def records(run_dir: Path, *lines: dict[str, Any] | str) -> None:
    run_dir.mkdir(exist_ok=True)
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run_dir / "metrics.jsonl").write_text("\n".join(text))


BEGUN, STEP = {"kind": "run", "step": 0}, {"kind": "step", "step": 7, "loss": 3.0}
SAVED = {"kind": "event", "event": "checkpoint", "step": 7}


@pytest.mark.parametrize(
    ("trace", "message", "resume"),
    [
        ("metrics.jsonl", "7 steps and 2 saved checkpoints", "required"),
        ("state.json", "has a checkpoint of step 7", "branch"),
        ("summary.json", "exists, so the run was finished", "auto"),
        ("checkpoints/latest", "names step_00000007", "branch"),
        ("checkpoints/step_00000003.damaged.1", "moved aside", "auto"),
    ],
)
def test_a_run_that_lost_its_checkpoints_is_refused(
    root: Path, tmp_path: Path, mesh: ParallelMesh, trace: str, message: str, resume: str
) -> None:
    run_dir = tmp_path / "lost"
    (run_dir / trace).parent.mkdir(parents=True)
    if trace == "metrics.jsonl":
        records(run_dir, BEGUN, "garbage", "[1]", STEP, SAVED, SAVED, '{"kind": "st')
    elif trace == "state.json":
        write_state(run_dir, "running", 9, "", checkpoint=7)
    elif "damaged" in trace:
        (run_dir / trace).mkdir()
    else:
        (run_dir / trace).write_text("step_00000007\n")
    job = Job(run_dir / "checkpoints", mesh)
    with pytest.raises(ValueError, match=message) as caught:
        job.resume(str(root / NEWEST) if resume == "branch" else resume)
    assert Path(trace).name in str(caught.value) and "choose another run.dir" in str(caught.value)
    assert ("checkpoint.resume=never" in str(caught.value)) == (resume != "branch") and "\n" not in str(caught.value)
    assert job.resume("never") is None


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path, mesh: ParallelMesh, caplog) -> None:
    records(tmp_path, BEGUN, STEP)
    assert Job(tmp_path / "checkpoints", mesh).resume() is None
    assert "trained 7 steps and saved no checkpoint" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint\.resume=required, but there is no checkpoint .*mount its disk"):
        Job(tmp_path / "checkpoints", mesh).resume("required")
    # Also if it was started with checkpoint.resume=never in the place of a run that had checkpoints.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000900\n")
    records(tmp_path, {**BEGUN, "resume": "never"}, STEP)
    assert Job(tmp_path / "checkpoints", mesh).resume() is None


# A run that began from another one's checkpoint


@pytest.fixture
def branch(root: Path, tmp_path: Path, mesh: ParallelMesh) -> Job:
    """A run that began from step 2 of the run in `root`, and saved step 5."""
    job = Job(tmp_path / "branch" / "checkpoints", mesh)
    assert job.resume(str(root / SECOND)) == 2
    job.save(5)
    return job


def test_a_branch_resumes_from_its_own_checkpoints(root: Path, branch: Job, mesh: ParallelMesh) -> None:
    again = Job(branch.root, mesh)
    assert again.resume(str(root / SECOND)) == 5
    again.save(6)
    origin = again.checkpointer.origin
    assert origin is not None and (origin.path, origin.step) == (str(root / SECOND), 2)
    shutil.rmtree(root)  # the parent may be removed
    once_more = Job(branch.root, mesh)
    assert once_more.resume(str(root / SECOND)) == 6 and once_more.checkpointer.origin == origin
    for step in (5, 6):
        flip_a_bit(branch.root / f"step_0000000{step}" / "__0_0.distcp")
    with pytest.raises(ValueError, match="none is intact"):  # it does not begin again from the parent
        Job(branch.root, mesh).resume(str(root / SECOND))


def test_a_branch_of_another_origin_is_refused(root: Path, branch: Job, mesh: ParallelMesh, tmp_path: Path) -> None:
    """A copy of the origin, or a checkpoint made again with the same bits, is not another origin."""
    with pytest.raises(ValueError, match=r"of a run that began from .*step_00000002; choose another run\.dir"):
        Job(branch.root, mesh).resume(str(root / "step_00000001"))
    with pytest.raises(ValueError, match=r"began at step 0; .*resume from them with checkpoint\.resume=auto"):
        Job(root, mesh).resume(str(branch.root / "step_00000005"))
    moved = shutil.copytree(root / SECOND, tmp_path / "archive" / "parent")
    assert Job(branch.root, mesh).resume(str(moved)) == 5
    again = Job(tmp_path / "made_again", mesh)
    again.resume(str(root / SECOND))
    made_again = again.save(2, seconds=1.5)  # with other times
    assert Job(branch.root, mesh).resume(str(made_again)) == 5
    (made_again / "manifest.json").write_text("not JSON")
    with pytest.raises(ValueError, match="of a run that began from"):
        Job(branch.root, mesh).resume(str(made_again))
