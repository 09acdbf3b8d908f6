"""Damage that one rank alone finds, and damage that is there."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.checkpoint import files, shards
from megatron_fp4.checkpoint.checkpointer import CheckpointError
from megatron_fp4.parallel.mesh import ParallelMesh
from tests.distributed.one_rank import Job, flip_a_bit, names
from tests.training.harness import launch, toy_mesh

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]


def _path(file: Any) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))


def _dying_disk(file: Any, *unused: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))  # without a name, as reading an open file has it


def _wrong_hash(file: Any, length: int, digest: Any, name: str) -> None:
    digest.update(b"x")


def _resume_with_trouble(rank: int, root: str, sick: int, seen: dict[str, str]) -> list[Any]:
    """Resume as some would, with trouble that rank `sick` alone has in its shards of some checkpoints: what came out.

    seen: by checkpoint, which trouble.
    """
    read, digest_to = shards.read_exactly, shards._digest_to

    def troubled(trouble: str, sound: Any, sick_one: Any) -> Any:
        return lambda file, *rest: (sick_one if seen.get(_path(file).parent.name) == trouble else sound)(file, *rest)

    if rank == sick:
        shards.read_exactly = troubled("io", read, _dying_disk)
        shards._digest_to = troubled("hash", digest_to, _wrong_hash)
    outcomes: list[Any] = []
    mesh = toy_mesh()
    for resume in ("auto", str(Path(root) / "step_00000003")):
        try:
            outcomes.append(Job(Path(root), mesh).resume(resume))
        except (CheckpointError, ValueError) as error:
            outcomes.append((type(error), str(error)))
    return outcomes


@pytest.mark.parametrize("trouble", ["hash", "io"])
@pytest.mark.parametrize(("everywhere", "sick"), [(False, 1), (True, 1), (False, 0)])
def test_what_one_rank_alone_finds_damaged_is_not_moved(root: Path, trouble: str, everywhere: bool, sick: int) -> None:
    """A bad client or bad memory of one: an error that starts again elsewhere (no refusal), with rank and host."""
    before = names(root)
    seen = {f"step_0000000{step}": trouble for step in ((1, 2, 3) if everywhere else (3,))}
    results = launch(_resume_with_trouble, 2, str(root), sick, seen)
    assert results[0] == results[1]
    for kind, message in results[0]:
        assert kind is CheckpointError  # neither a refusal nor the damage itself
        assert f"rank {sick} on {socket.gethostname()}: " in message and "step_00000003" in message
        assert ("Input/output error" if trouble == "io" else "has changed") in message
    assert names(root) == before


def test_damage_that_only_another_rank_reads_is_moved(root: Path) -> None:
    """Rank 0 has no need of that file, and finds it damaged when it looks."""
    launch(_save_on_two, 2, str(root))
    flip_a_bit(root / "step_00000004" / "__1_0.distcp")
    assert launch(_resume_with_trouble, 2, str(root), 1, {})[0][0] == 3
    assert names(root) == ["latest", "step_00000001", "step_00000002", "step_00000003", "step_00000004.damaged"]


def _save_on_two(rank: int, root: str) -> None:
    Job(Path(root), toy_mesh()).save(4)


@pytest.mark.parametrize("steps", [(3,), (1, 2, 3)])
def test_a_file_that_no_rank_can_read(
    root: Path, mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]
) -> None:
    """Damage where others can be read; the way to the disk is broken where none can, and that is no refusal."""
    before = names(root)
    sound, sick = shards.read_exactly, {f"step_0000000{step}" for step in steps}
    monkeypatch.setattr(
        shards,
        "read_exactly",
        lambda file, *rest: (_dying_disk if _path(file).parent.name in sick else sound)(file, *rest),
    )
    record_of = files.record_of

    def failing(path: Path) -> files.FileRecord:
        if path.parent.name in sick and path.suffix == ".distcp":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return record_of(path)

    monkeypatch.setattr(files, "record_of", failing)
    if len(steps) == 1:
        assert Job(root, mesh).resume() == 2
        assert names(root) == ["latest", "step_00000001", "step_00000002", "step_00000003.damaged"]
    else:
        with pytest.raises(CheckpointError, match="cannot be read: rank 0 on") as caught:
            Job(root, mesh).resume()
        assert not isinstance(caught.value, ValueError)
        assert names(root) == before


def test_well_kept_nonsense_is_damage(root: Path, mesh: ParallelMesh) -> None:
    """Every file is as its manifest says, and what they say is no checkpoint."""
    folder = root / "step_00000003"
    record = files.write_file(folder / ".metadata", pickle.dumps(print))
    manifest = files.read_manifest(folder)
    files.write_manifest(folder, dataclasses.replace(manifest, files={**manifest.files, ".metadata": record}))
    assert Job(root, mesh).resume() == 2
    assert (root / "step_00000003.damaged").is_dir()
