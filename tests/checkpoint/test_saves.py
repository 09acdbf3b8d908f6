"""A save that fails, one that is abandoned, one that is crafted: with one process, whose training goes on."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.checkpoint import files, saves, shards
from megatron_fp4.checkpoint.checkpointer import Checkpointer, CheckpointError
from megatron_fp4.checkpoint.shards import METADATA, OwnPiece, read_metadata, write_shards
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from tests.training.harness import alone, toy

MODES = pytest.mark.parametrize("asynchronous", [False, True])


class Trial:
    """A toy model, and a checkpointer for it."""

    def __init__(self, root: Path, mesh: Any, **settings: Any) -> None:
        self.root, self.mesh = root, mesh
        self.model, self.optimizer = toy(mesh)
        self.checkpointer = Checkpointer(root, mesh, keep=0, identity={}, **settings)
        self.checkpointer.prepare(self.model, self.optimizer)

    def save(self, step: int, trainer: dict[str, Any] | None = None) -> None:
        self.checkpointer.save(
            step, self.model, self.optimizer, trainer or {}, consumed_samples=step, consumed_tokens=step
        )

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def filled(self) -> float:
        values = {local_part(parameter).mean().item() for parameter in self.model.parameters()}
        assert len(values) == 1
        return values.pop()

    def resume(self) -> Any:
        return self.checkpointer.resume("auto", self.model, self.optimizer, StepState(0), allow_mismatch=False)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trial]]:
    monkeypatch.setattr(saves, "_PAUSES", (0.0,))
    monkeypatch.setattr(saves, "_LAST_PAUSES", (0.0, 0.0, 0.0))
    with alone() as mesh:
        yield lambda **settings: Trial(tmp_path / "checkpoints", mesh, **settings)


def failing(monkeypatch: pytest.MonkeyPatch, times: int, error: Exception) -> list[int]:
    """Let writing shards fail so often; returns a list that grows with every try."""
    tries: list[int] = []
    write = saves.write_shards

    def sometimes(*arguments: Any) -> Any:
        tries.append(1)
        if len(tries) <= times:
            raise error
        return write(*arguments)

    monkeypatch.setattr(saves, "write_shards", sometimes)
    return tries


FULL = OSError(28, "No space left on device", "shard")


@MODES
def test_a_failing_save_is_tried_again(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    one = trial(asynchronous=asynchronous, max_failed_saves=2)
    tries = failing(monkeypatch, 1, FULL)
    one.fill(3.0)
    one.save(1)
    one.checkpointer.finish()
    (report,) = one.checkpointer.reports()
    assert len(tries) == 2 and report.error is None and report.folder == one.root / "step_00000001"
    one.fill(0.0)
    assert one.resume().step == 1 and one.filled() == 3.0


def test_the_last_save_is_tried_more_often(trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    one = trial(asynchronous=True)
    tries = failing(monkeypatch, 3, FULL)
    one.checkpointer.save(1, one.model, one.optimizer, {}, consumed_samples=1, consumed_tokens=1, last=True)
    one.checkpointer.finish()
    assert len(tries) == 4 and one.resume().step == 1


@MODES
def test_failing_saves_are_left_out_until_there_are_too_many(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    one = trial(asynchronous=asynchronous, max_failed_saves=3)
    one.save(1)
    one.checkpointer.finish()
    tries = failing(monkeypatch, 99, FULL)
    one.save(2)
    one.save(3)
    with pytest.raises(CheckpointError, match=r"3 saves in a row came to nothing; the last: .*No space left on device"):
        one.save(4)
        one.checkpointer.reports(save_failed=True)
    reports = one.checkpointer.reports()
    assert len(tries) == 6 and [report.error is None for report in reports] == [True, False, False, False]
    assert "rank 0: [Errno 28] No space left on device: 'shard'" in str(reports[1].error)
    assert {path.name for path in one.root.iterdir()} == {"latest", "step_00000001"}


def test_space_is_looked_at_before(trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    one = trial(asynchronous=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 990, 10))
    tries = failing(monkeypatch, 0, FULL)
    with pytest.raises(CheckpointError, match=r"a checkpoint needs 0\.0 MB, and 0\.0 MB are free; make room"):
        one.save(1)
        one.checkpointer.finish()
    assert tries == [] and not list(one.root.glob("step*"))


def test_what_is_saved_is_of_one_instant(trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training changes weights while they are written."""
    one = trial(asynchronous=True)
    go = threading.Event()
    write = saves.write_shards
    monkeypatch.setattr(saves, "write_shards", lambda *arguments: (go.wait(60), write(*arguments))[1])
    one.fill(1.0)
    one.save(1)
    one.fill(2.0)
    assert one.checkpointer.reports() == [] and not list(one.root.glob("step_00000001"))
    go.set()
    one.checkpointer.finish()
    assert one.resume().step == 1 and one.filled() == 1.0


def test_an_abandoned_save_is_not_published(trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ended by an exception and is tried again in the same process."""
    one = trial(asynchronous=True)
    one.fill(1.0)
    one.save(1)
    one.checkpointer.finish()
    go = threading.Event()
    write_manifest = files.write_manifest
    monkeypatch.setattr(files, "write_manifest", lambda *arguments: (go.wait(60), write_manifest(*arguments)))
    one.fill(2.0)
    with pytest.raises(ZeroDivisionError), one.checkpointer:
        one.save(2)
        raise ZeroDivisionError
    go.set()
    with pytest.raises(CheckpointError):
        one.checkpointer.finish()
    again = trial(asynchronous=True)
    assert again.resume().step == 1 and again.filled() == 1.0
    assert {path.name for path in again.root.iterdir()} == {"latest", "step_00000001"}


def test_a_description_of_files_is_made_once(trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    """And again after an attempt in which shards were written and rank 0 failed before it had taken note of them."""
    one, made, packed = trial(max_failed_saves=2), [], []
    metadata_of, pack = saves.metadata_of, saves.pack

    def once(states: Any) -> bytes:
        packed.append(1)
        if len(packed) == 1:
            raise FULL
        return pack(states)

    monkeypatch.setattr(saves, "metadata_of", lambda *arguments: made.append(1) or metadata_of(*arguments))
    monkeypatch.setattr(saves, "pack", once)
    for step in (1, 2, 3):
        one.fill(float(step))
        one.save(step)
    assert len(made) == 2 and len(packed) == 4
    one.fill(0.0)
    assert one.resume().step == 3 and one.filled() == 3.0


def test_a_part_that_nobody_writes_is_no_checkpoint(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    monkeypatch.setattr(shards, "_is_writer", lambda tensor, number, rank: number != 3)
    with pytest.raises(CheckpointError, match=r"0 of \d+ elements of .* were written"):
        one.save(1)
    assert not list(one.root.glob("step*"))


# What was read in one go, and cut into several files


@pytest.mark.parametrize("damaged", [False, True])
def test_several_files_of_a_rank(trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch, damaged: bool) -> None:
    monkeypatch.setattr(shards, "_FILE_BYTES", 1000)
    one = trial()
    one.fill(4.0)
    one.save(1)
    names = sorted(path.name for path in (one.root / "step_00000001").glob("*.distcp"))
    assert names == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp", "__0_3.distcp"]
    one.fill(0.0)
    if damaged:
        os.truncate(one.root / "step_00000001" / names[2], 300)
        with pytest.raises(CheckpointError, match=r"__0_2\.distcp"):
            one.resume()
    else:
        assert one.resume().step == 1 and one.filled() == 4.0


def test_every_file_is_read_once(trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that many ranks share is the bottleneck of a start."""
    one = trial()
    one.save(1)
    opened: list[str] = []

    open_plain = files.open_plain

    def watched(path: Path) -> Any:
        opened.append(path.name)
        return open_plain(path)

    monkeypatch.setattr(files, "open_plain", watched)
    one.resume()
    assert sorted(opened) == sorted([files.MANIFEST, METADATA, "__0_0.distcp", files.RANDOM_STATE, files.TRAINER])


def test_a_full_disk_is_named_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own words were `unexpected pos 704 vs 598`."""

    class Full:
        def write(self, data: Any) -> int:
            raise FULL

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(shards, "open", lambda *_, **__: Full(), raising=False)
    piece = OwnPiece(0, (0,), (1000,), torch.zeros(1000))
    with pytest.raises(OSError, match="No space left on device"):
        write_shards(tmp_path, 0, [piece], lambda: False)


# A checkpoint that somebody made up


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest say that this is what it must be."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / files.MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / files.MANIFEST).write_text(json.dumps({**manifest, "sha256": digest}))


class Command:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_crafted_checkpoint_with_a_valid_manifest_runs_nothing(trial: Callable[..., Trial], tmp_path: Path) -> None:
    one = trial()
    one.save(1)
    folder = one.root / "step_00000001"
    command = Command(f"touch {tmp_path / 'ran'}")
    rewrite(folder, METADATA, pickle.dumps(command))
    with pytest.raises(CheckpointError, match="system, which no checkpoint holds"):
        one.resume()
    assert not (tmp_path / "ran").exists()


def test_crafted_generators_run_nothing(trial: Callable[..., Trial], tmp_path: Path) -> None:
    one = trial()
    one.save(1)
    crafted = tmp_path / "crafted.pt"
    torch.save([Command(f"touch {tmp_path / 'ran'}")], crafted)
    rewrite(one.root / "step_00000001", files.RANDOM_STATE, crafted.read_bytes())
    with pytest.raises(CheckpointError):
        one.resume()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../outside", "manifest.json"])
def test_a_manifest_names_files_beside_it(trial: Callable[..., Trial], name: str) -> None:
    one = trial()
    one.save(1)
    folder = one.root / "step_00000001"
    manifest = json.loads((folder / files.MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"][name] = {"size": 1, "sha256": ""}
    write_manifest(folder, manifest)
    with pytest.raises(CheckpointError, match="not the name of a file beside it"):
        one.resume()


def test_a_description_names_files_of_the_manifest(trial: Callable[..., Trial], tmp_path: Path) -> None:
    one = trial()
    one.save(1)
    folder = one.root / "step_00000001"
    shutil.copy(folder / "__0_0.distcp", tmp_path / "outside")
    metadata = read_metadata((folder / METADATA).read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = str(tmp_path / "outside")
    rewrite(folder, METADATA, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which the checkpoint does not have"):
        one.resume()
