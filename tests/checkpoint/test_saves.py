"""Saves that fail or are abandoned, loads during a run, and crafted checkpoints; in one process."""

import os
import pickle
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.checkpoint import checkpointer, files, shards
from megatron_fp4.checkpoint.checkpointer import CheckpointError, CheckpointGoneError
from megatron_fp4.checkpoint.shards import METADATA, read_metadata
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from tests.distributed.one_rank import Job, flip_a_bit, names, rewrite

FULL = OSError(28, "No space left on device", "shard")
FIRST = "step_00000001"


@pytest.fixture
def make_job(tmp_path: Path, mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setattr(checkpointer, "_PAUSES", (0.0,))
    monkeypatch.setattr(checkpointer, "_LAST_PAUSES", (0.0, 0.0, 0.0))
    return lambda **settings: Job(tmp_path / "checkpoints", mesh, settings=settings)


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Make the first `times` calls of `write_shards` fail. Returns a list that grows by one with each call."""
    tries: list[int] = []
    write = checkpointer.shards.write_shards

    def sometimes(*arguments: Any) -> Any:
        tries.append(1)
        if len(tries) <= times:
            raise FULL
        return write(*arguments)

    monkeypatch.setattr(checkpointer.shards, "write_shards", sometimes)
    return tries


@pytest.mark.parametrize(("asynchronous", "last"), [(False, False), (True, False), (True, True)])
def test_a_failing_save_is_tried_again(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, asynchronous: bool, last: bool
) -> None:
    """The last save of a run is tried more often."""
    job = make_job(asynchronous=asynchronous, max_failed_saves=2)
    tries = failing(monkeypatch, 3 if last else 1)
    job.save(1, last=last)
    job.checkpointer.finish()
    (report,) = job.checkpointer.reports()
    assert len(tries) == (4 if last else 2) and report.error is None and report.folder == job.root / FIRST
    assert job.resume() == 1


def test_failing_saves_are_skipped_until_there_are_too_many(make_job: Callable[..., Job], monkeypatch) -> None:
    job = make_job(asynchronous=True, max_failed_saves=3)
    job.save(1)
    job.checkpointer.finish()
    tries = failing(monkeypatch, 99)
    job.save(2)
    job.save(3)
    with pytest.raises(CheckpointError, match=r"3 saves in a row failed; the last: .*No space left on device"):
        job.save(4)
        job.checkpointer.reports(save_failed=True)
    reports = job.checkpointer.reports()
    assert len(tries) == 6 and [report.error is None for report in reports] == [True, False, False, False]
    assert "rank 0: [Errno 28] No space left on device: 'shard'" in str(reports[1].error)
    assert names(job.root) == ["latest", FIRST]
    # The file's own error is raised, not what torch makes of it (`unexpected pos 704 vs 598`).
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left on device"):
        shards._HashingFile(full).save(torch.zeros(1000))


def test_free_space_is_checked_before_a_save(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    job = make_job(asynchronous=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 990, 10))
    tries = failing(monkeypatch, 0)
    with pytest.raises(CheckpointError, match=r"a checkpoint needs 0\.0 MB, and 0\.0 MB are free; make room"):
        job.save(1)
        job.checkpointer.finish()
    assert tries == [] and not list(job.root.glob("step*"))


def test_an_abandoned_save_is_not_published(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ended by an exception may start again in the same process while its last save is still written."""
    job = make_job(asynchronous=True)
    job.save(1)
    job.checkpointer.finish()
    go = threading.Event()
    write_manifest = files.write_manifest
    monkeypatch.setattr(files, "write_manifest", lambda *arguments: (go.wait(60), write_manifest(*arguments)))
    with pytest.raises(ZeroDivisionError), job.checkpointer:
        job.save(2)
        raise ZeroDivisionError
    go.set()
    with pytest.raises(CheckpointError):
        job.checkpointer.finish()
    assert make_job(asynchronous=True).resume() == 1 and names(job.root) == ["latest", FIRST]


@pytest.mark.parametrize("damage", ["none", "a bit", "the folder"])
def test_a_rollback_loads_the_last_checkpoint_or_changes_nothing(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The rollback waits if the checkpoint is still being saved."""
    publish = files.publish
    monkeypatch.setattr(files, "publish", lambda *folders: (time.sleep(0.1), publish(*folders)))
    job = make_job(asynchronous=True)
    assert job.checkpointer.last_step() is None
    folder, draws = job.save(1, note=1), torch.get_rng_state()
    job.fill(7.0)
    torch.rand(3)
    version, parts = job.step_state.weights_version, (job.model, job.optimizer, job.step_state)
    assert job.checkpointer.last_step() == 1
    if damage == "none":
        again = job.checkpointer.load(None, *parts, allow_mismatch=False)
        assert (again.step, again.folder, again.trainer["note"]) == (1, folder, 1)
    else:
        flip_a_bit(folder / "__0_0.distcp") if damage == "a bit" else folder.rename(folder.with_name("elsewhere"))
        with pytest.raises(CheckpointGoneError, match=FIRST):
            job.checkpointer.load(None, *parts, allow_mismatch=False)
    loaded = damage == "none"
    assert {local_part(p).unique().item() for p in job.model.parameters()} == {1.0 if loaded else 7.0}
    assert torch.equal(torch.get_rng_state(), draws) == loaded
    # The version invalidates the quantized weights that linears keep.
    assert (job.step_state.weights_version > version) == loaded


def test_a_save_fails_if_no_rank_writes_some_elements(make_job: Callable[..., Job], monkeypatch) -> None:
    job = make_job()
    monkeypatch.setattr(shards, "_is_writer", lambda tensor, number, rank: number != 3)
    with pytest.raises(CheckpointError, match=r"0 of \d+ elements of .* were written"):
        job.save(1)
    assert not list(job.root.glob("step*"))


# Checkpoints crafted by an attacker


class Command:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def crafted_generators(folder: Path) -> None:
    torch.save([Command("touch ran")], "crafted.pt")
    rewrite(folder, files.RANDOM_STATE, Path("crafted.pt").read_bytes())


def metadata_of_a_file_outside(folder: Path) -> None:
    shutil.copy(folder / "__0_0.distcp", "outside")
    metadata = read_metadata((folder / METADATA).read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = str(Path("outside").absolute())
    rewrite(folder, METADATA, pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("craft", "found"),
    [
        (lambda f: rewrite(f, METADATA, pickle.dumps(Command("touch ran"))), "system, which no checkpoint holds"),
        (crafted_generators, "WeightsUnpickler|weights_only|Weights only"),
        (metadata_of_a_file_outside, "which the checkpoint does not have"),
        (lambda folder: rewrite(folder, "../outside", b"x"), "is not a file name"),
    ],
)
def test_a_crafted_checkpoint_with_a_valid_manifest_runs_no_code_and_reads_no_other_file(
    make_job: Callable[..., Job], craft: Callable[[Path], None], found: str
) -> None:
    job = make_job()
    job.save(1)
    craft(job.root / FIRST)
    with pytest.raises(CheckpointError, match=found):
        job.resume()
    assert not Path("ran").exists()
