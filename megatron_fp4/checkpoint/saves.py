"""Saving, as all ranks together do it: at once, or in the background while training goes on.

A save is a sequence of stages. After each, every rank learns whether any rank failed; if so the attempt is removed, and
earlier checkpoints are as they were. A process may be killed at any moment: the next start finds the newest checkpoint
that is whole (files.py says how one tells).

    1. rank 0 looks whether there is space, and makes step_XXXXXXXX.tmp
    2. all write their shards of model and optimizer, hashing what they write
    3. rank 0 writes generators, trainer state, .metadata and the manifest, renames the folder, replaces the pointer,
       and removes old checkpoints

In the background the tensors are copies of one instant (staging.py), and the stages run in a thread. One save is on its
way at a time. An attempt that fails is made once more; then the save is given up, and training goes on: the report says
so. Where `max_failed` saves in a row came to nothing, the run ends.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.metadata import METADATA, Piece, Whole, metadata_of
from megatron_fp4.checkpoint.random_state import pack
from megatron_fp4.checkpoint.shards import OwnPiece, shard_name, write_shard
from megatron_fp4.checkpoint.staging import Staging
from megatron_fp4.checkpoint.together import CheckpointError, Together

logger = logging.getLogger(__name__)
TRAINER = "trainer.json"
RANDOM_STATE = "rng.pt"
_ATTEMPTS = 2
_PAUSE = 2.0
"""Seconds between two attempts."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold. manifest: without files and index. generators: this rank's."""

    manifest: files.Manifest
    tensors: Sequence[Whole]
    pieces: Sequence[OwnPiece]
    generators: bytes
    trainer: str


@dataclass(frozen=True)
class SaveReport:
    """A save that has ended. seconds: from its begin. stall: seconds in which training waited for it.

    error: why there is no checkpoint, None if there is one.
    """

    step: int
    folder: Path
    seconds: float
    stall: float
    error: str | None = None


@dataclass
class Saves:
    """The saves of one run under `root`; every method is a collective.

    keep: how many checkpoints to keep (0: all). staging: given, saves go on in the background. max_failed: so many in a
    row that come to nothing end the run. before_publish: called on rank 0, in whatever thread, before a checkpoint gets
    its name.
    """

    root: Path
    together: Together
    keep: int
    max_failed: int = 1
    staging: Staging | None = None
    before_publish: Callable[[], None] = lambda: None
    failed_in_a_row: int = 0
    _thread: threading.Thread | None = None
    _outcome: CheckpointError | None = None
    _abandoned: threading.Event = field(default_factory=threading.Event)
    _layout: list[Piece] | None = None
    _layouts: list[list[Piece]] = field(default_factory=list)
    _metadata: bytes = b""
    _current: SaveReport | None = None
    _began: float = 0.0
    _ended: float = 0.0
    _reports: list[SaveReport] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether this rank's save in the background has come to nothing and nobody was told."""
        return self._thread is not None and not self._thread.is_alive() and self._outcome is not None

    @property
    def on_its_way(self) -> bool:
        """Whether this rank is writing in the background."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, snapshot: Snapshot, began: float) -> None:
        """Save; in the background if there is staging, once the save before has ended. Raises as `end` does.

        began: when training began to wait for it, as `time.perf_counter` counts.
        """
        self.end()
        self._began, self._outcome = began, None
        self._current = SaveReport(snapshot.manifest.step, self.root / files.folder_name(snapshot.manifest.step), 0, 0)
        if self.staging is None:
            self._save(snapshot)
            self.end()
            return
        staged = replace(snapshot, pieces=self.staging.copy(snapshot.pieces))
        # A daemon: a process that dies of something else must not wait for a disk.
        self._thread = threading.Thread(target=self._save, args=(staged,), name="checkpoint", daemon=True)
        self._thread.start()
        self.staging.stall = time.perf_counter() - began

    def end(self) -> None:
        """Wait for the save that is on its way, and take note of how it went.

        Raises CheckpointError on all ranks if it came to nothing, as did those before it, `max_failed` in a row.
        """
        if self._current is None:
            return
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            self._thread = None
            if self.staging is not None:
                self.staging.stall += time.perf_counter() - began
        seconds = self._ended - self._began
        stall = seconds if self.staging is None else self.staging.total_stall()
        error = None if self._outcome is None else str(self._outcome)
        self._reports.append(replace(self._current, seconds=seconds, stall=stall, error=error))
        self._current = None
        if self._outcome is None:
            self.failed_in_a_row = 0
            return
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= self.max_failed:
            raise CheckpointError(f"{self.failed_in_a_row} saves in a row came to nothing; the last: {self._outcome}")

    def collect(self) -> list[SaveReport]:
        """Those that have ended since the last call. Not a collective: ranks may notice at different times."""
        if self._thread is not None and not self._thread.is_alive() and self._outcome is None:
            self.end()
        reports, self._reports = self._reports, []
        return reports

    def abandon(self) -> None:
        """Let no save that is on its way become a checkpoint any more. Not a collective."""
        self._abandoned.set()

    def _save(self, snapshot: Snapshot) -> None:
        try:
            if self.staging is not None:
                self.staging.wait()
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    self._attempt(snapshot)
                    break
                except CheckpointError as error:
                    if attempt == _ATTEMPTS or self._abandoned.is_set():
                        raise
                    if self.together.rank == 0:
                        logger.warning("%s; trying once more", error)
                    time.sleep(_PAUSE)
        except CheckpointError as error:
            self._outcome = error
        except Exception as error:  # the group is broken: another rank is gone
            self._outcome = CheckpointError(f"checkpoint under {self.root}: {type(error).__name__}: {error}")
        self._ended = time.perf_counter()

    def _attempt(self, snapshot: Snapshot) -> None:
        step, together = snapshot.manifest.step, self.together
        final = self.root / files.folder_name(step)
        staging = final.with_name(final.name + ".tmp")
        try:
            together.first("make a folder", lambda: _make_folder(staging, snapshot.tensors))
            written = together.collect("write model and optimizer", lambda: self._write_own(staging, snapshot))
            together.first("finish", lambda: self._finish(staging, final, snapshot, written))
        except CheckpointError:
            if together.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise

    def _write_own(self, folder: Path, snapshot: Snapshot) -> tuple[files.FileRecord | None, list[Piece] | None, bytes]:
        """The record of this rank's file (None without one), where what lies in it (None: as in the save before), and
        its generators."""
        if not snapshot.pieces:
            return None, [], snapshot.generators
        path = folder / shard_name(self.together.rank)
        record, layout = write_shard(path, snapshot.pieces, self._abandoned.is_set)
        changed, self._layout = layout != self._layout, layout
        return record, layout if changed else None, snapshot.generators

    def _finish(self, staging: Path, final: Path, snapshot: Snapshot, written: list[Any]) -> None:
        records: dict[str, files.FileRecord] = {}
        for rank, (record, _, _) in enumerate(written):
            if record is None:
                continue
            path = staging / shard_name(rank)
            # Another node's file is missing here if the folder is not shared; better to know now than on resume.
            if not path.is_file() or path.stat().st_size != record.size:
                raise OSError(f"{path} is not as rank {rank} wrote it; run.dir must be shared by all nodes")
            records[path.name] = record
        if not self._metadata or any(layout is not None for _, layout, _ in written):
            known = self._layouts or [[] for _ in written]
            self._layouts = [
                old if layout is None else layout for old, (_, layout, _) in zip(known, written, strict=True)
            ]
            of_files = {shard_name(rank): layout for rank, layout in enumerate(self._layouts) if layout}
            self._metadata = metadata_of(snapshot.tensors, of_files)
        for name, content in (
            (METADATA, self._metadata),
            (RANDOM_STATE, pack([generators for _, _, generators in written])),
            (TRAINER, snapshot.trainer.encode()),
        ):
            records[name] = files.write_file(staging / name, content)
        index = files.next_save_index(self.root)
        files.write_manifest(staging, replace(snapshot.manifest, save_index=index, files=records))
        self.before_publish()
        if self._abandoned.is_set():
            raise InterruptedError("the run ended while it was being written")
        files.publish(staging, final)
        try:
            removed = files.prune(self.root, self.keep, just_made=final)
        except OSError as error:  # the new checkpoint is safe, and that is what matters
            logger.warning("could not remove old checkpoints: %s", error)
        else:
            if removed:
                logger.info("removed old checkpoints: %s", ", ".join(folder.name for folder in removed))


def _make_folder(folder: Path, tensors: Sequence[Whole]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    needed, free = sum(tensor.num_bytes for tensor in tensors), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"a checkpoint needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free", str(folder)
        )


def manifest_of(step: int, samples: int, tokens: int, world_size: int, identity: dict[str, Any]) -> files.Manifest:
    """The manifest of a checkpoint to come; index and files are found out while it is written."""
    return files.Manifest(0, step, samples, tokens, world_size, identity, {}, str(torch.__version__))
