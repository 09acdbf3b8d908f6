"""Save checkpoints and resume from them, on all ranks together.

A save has three stages. After each stage all ranks learn whether any rank failed. If one did, the attempt is removed,
and earlier checkpoints do not change. After a kill the next start finds the newest intact checkpoint.

    1. rank 0 checks the free space, and makes step_XXXXXXXX.tmp
    2. all ranks write and hash their shards of model and optimizer
    3. rank 0 writes generators, trainer state, .metadata and the manifest, renames the folder, replaces the pointer,
       and removes old checkpoints

A save in the background writes copies of the tensors at one instant (staging.py), in a thread. There is one save at a
time. A failed attempt is tried once more (three times for the last save). If it fails again, the save is given up and
reported, and the run continues. After `max_failed_saves` failed saves in a row the run ends.

find.py chooses the checkpoint that a start resumes from, and shards.py reads it. Tensors are stored by their global
shape, so a checkpoint loads on any world size and mesh, bit for bit. All nodes must share the file system of `run.dir`.
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from megatron_fp4.checkpoint import files, find, shards
from megatron_fp4.checkpoint.files import FileRecord, Manifest, Origin
from megatron_fp4.checkpoint.staging import Staging, host_memory_error
from megatron_fp4.checkpoint.sync import CheckpointError, RankSync, RefusedError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.progress import Progress, run_time, section_of
from megatron_fp4.runtime.run_state import number_in_state

logger = logging.getLogger(__name__)
_BACKGROUND_TIMEOUT = datetime.timedelta(hours=6)
# Seconds between two attempts; the last save of a start gets more of them.
_PAUSES, _LAST_PAUSES = (2.0,), (2.0, 10.0, 30.0)


class CheckpointGoneError(CheckpointError):
    """A checkpoint is missing or damaged; raised on all ranks, before anything was loaded."""


@dataclass
class SaveReport:
    """A save and, after its end, its result. seconds: its duration. stall: seconds in which training waited for it.

    error: why there is no checkpoint; None: there is one.
    """

    step: int
    folder: Path
    seconds: float = 0.0
    stall: float = 0.0
    error: str | None = None


class _Snapshot(NamedTuple):
    """The content of a checkpoint. pieces, generators: of this rank. manifest: without them. last: of this start."""

    manifest: Manifest
    tensors: Sequence[shards.TensorInfo]
    pieces: Sequence[shards.OwnPiece]
    generators: bytes
    trainer: str
    last: bool


class _OfRank(NamedTuple):
    """What a rank sends to rank 0. records: of its files. layouts: the pieces in its files; empty: as before."""

    records: dict[str, FileRecord]
    layouts: dict[str, list[shards.Piece]]
    generators: bytes


class Checkpointer:
    """Saves checkpoints under one folder and resumes from them. Methods are collectives unless they say otherwise.

    root: `<run.dir>/checkpoints`. keep: how many to keep (0: all). identity: see config_diff.py. asynchronous: save in
    the background; needs `prepare`. max_failed_saves: after this many failed saves in a row the run ends. timeout: how
    long ranks wait for each other while training waits too. progress: of the run.

    before_publish: called on rank 0, in any thread, before a checkpoint gets its final name. published: called there
    after that, with its step and save index. needed: called there; returns the names of checkpoints to be kept.

    origin: the checkpoint of another run that this run began from. initialized_from: the checkpoint whose weights alone
    it began from. The trainer state has both.
    """

    def __init__(
        self,
        root: Path,
        mesh: ParallelMesh,
        *,
        keep: int,
        identity: Mapping[str, Any],
        asynchronous: bool = False,
        max_failed_saves: int = 1,
        timeout: datetime.timedelta = dist.default_pg_timeout,
        progress: Progress | None = None,
    ) -> None:
        self.root, self.keep = root, keep
        self.before_publish: Callable[[], None] = lambda: None
        self.published: Callable[[int, int], None] = lambda step, save_index: None
        self.needed: Callable[[], Collection[str]] = tuple
        self.origin: Origin | None = None
        self.initialized_from: Origin | None = None
        self.sync = RankSync(root, timeout)
        # A shared disk may hang for hours while training continues; the group must still work when it recovers.
        self._background = RankSync(root, max(timeout, _BACKGROUND_TIMEOUT)) if asynchronous else self.sync
        self._mesh, self._identity, self._asynchronous = mesh, dict(identity), asynchronous
        self._staging: Staging | None = None
        self._max_failed, self._failed_in_a_row = max_failed_saves, 0
        self._saved_step: int | None = None  # of the save that was started last, or of the checkpoint resumed from
        self._last: tuple[Path, int] | None = None  # the checkpoint that was finished or loaded last
        self._progress = progress or Progress()
        self._thread: threading.Thread | None = None
        self._current: SaveReport | None = None
        self._reports: list[SaveReport] = []
        self._broken = False  # the background save failed on this rank alone
        self._abandoned = threading.Event()
        # The layouts of the last save: of this rank's files; on rank 0 of all files, and the .metadata made of them.
        self._own_layouts: dict[str, list[shards.Piece]] = {}
        self._layouts: dict[str, list[shards.Piece]] = {}
        self._metadata = b""

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._staging is not None:
            self._staging.stop_locking()
        if kind is not None:  # a save in the background must not become a checkpoint after the run is restarted
            self._abandoned.set()

    def has(self, step: int) -> bool:
        """Whether the checkpoint that was loaded or saved last is this run's of `step` steps; the same on all ranks."""
        return step == self._saved_step

    def folder(self, step: int) -> Path:
        return self.root / files.folder_name(step)

    # Saving

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Reserve the host memory: this rank's share of weights and moments. `reports` page-locks it.

        Raises RefusedError on all ranks if a machine does not have enough.
        """
        if not self._asynchronous:
            return
        pieces = shards.own_pieces(shards.state_of(model, optimizer), self._mesh.rank)
        needed = sum(piece.values.nbytes for piece in pieces) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))

        def look() -> None:
            if problem := host_memory_error(needed):
                raise RefusedError(problem)

        self.sync.on_all("check the host memory", look)
        staging = self._staging = Staging(pieces, self._mesh.device)
        # The device waits for a save's copies before it changes the copied tensors.
        optimizer.register_step_pre_hook(lambda *_: staging.before_update())

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        trainer: Mapping[str, Any],
        *,
        consumed_samples: int,
        consumed_tokens: int,
        last: bool = False,
    ) -> Path:
        """Save a checkpoint after `step` optimizer steps; returns the folder that it will have.

        trainer: the trainer's state, JSON types, the same on all ranks (rank 0 writes it). last: the last save of this
        start. Does nothing if the step was just saved or resumed from. In the background it waits for the save before.

        Raises CheckpointError on all ranks after too many failed saves in a row.
        """
        if self.has(step) and not self._failed_in_a_row:
            return self.folder(step)
        self._end()
        began = time.perf_counter()
        state = shards.state_of(model, optimizer)
        manifest = Manifest(
            save_index=0,
            step=step,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_tokens,
            world_size=self._mesh.world_size,
            identity=self._identity,
            files={},
            torch_version=str(torch.__version__),
        )
        pieces, generators = shards.own_pieces(state, self._mesh.rank), shards.capture_random_state(self._mesh.device)
        snapshot = _Snapshot(
            manifest, shards.tensor_infos(state), pieces, generators, json.dumps(dict(trainer), indent=1), last
        )
        report = self._current = SaveReport(step, self.folder(step))
        if self._staging is None:
            self._save(snapshot, report, began)
            report.stall = report.seconds
            self._end()
        else:
            if last:  # the memory is not needed again
                self._staging.stop_locking()
            snapshot = snapshot._replace(pieces=self._staging.copy(pieces))
            # A daemon, so that a process that fails for another reason does not wait for a disk.
            self._thread = threading.Thread(
                target=self._save_beside, args=(snapshot, report, began), name="checkpoint", daemon=True
            )
            self._thread.start()
            report.stall = time.perf_counter() - began
        self._saved_step = step
        return self.folder(step)

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in the background failed. For the step's all-reduce."""
        return self._current is not None and not self._writing and self._current.error is not None

    def reports(self, save_failed: bool = False) -> list[SaveReport]:
        """Saves that have ended since the last call; ranks may notice at different times. Call it after every step.
        save_failed: `failed` of any rank, from the step's all-reduce.

        Raises CheckpointError on all ranks after too many failed saves in a row.
        """
        if self._staging is not None:
            self._staging.lock_pages()
        if save_failed:
            self._end()
        elif self._thread is not None and not self._writing and not self.failed:
            self._finish_report()
        reports, self._reports = self._reports, []
        return reports

    def finish(self) -> None:
        """Wait for the save in the background. Raises CheckpointError on all ranks if the last one failed."""
        self._end()
        if self._failed_in_a_row:
            raise CheckpointError("the last save failed; the steps since the one before are lost")

    def last_step(self) -> int | None:
        """The step of the checkpoint that was saved or loaded last, if any.

        Waits for the save in the background. Raises CheckpointError on all ranks as `save` does.
        """
        self._end()
        return None if self._last is None else self._last[1]

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _end(self) -> None:
        """Wait until no rank saves in the background, and finish the report. It is progress only while one moves.

        It uses the process group of training, whose timeout finds a rank that is stopped or gone as soon as in a step.
        The group of the background has a longer timeout.
        """
        if self._staging is not None:
            began, pause, before = time.perf_counter(), 0.001, -1.0
            while True:
                thread = self._thread if self._writing else None
                mine = [thread is not None, self._broken, run_time(thread) if thread is not None else 0]
                flags = torch.tensor(mine, dtype=torch.float64, device=self._mesh.device)
                dist.all_reduce(flags)
                writing, broken, moved = flags.tolist()
                if broken:
                    error = self._current.error if self._current is not None else None
                    raise CheckpointError(f"the save in the background failed: {error or 'on another rank'}")
                if not writing:
                    break
                if moved != before:
                    self._progress.alive()
                before = moved
                time.sleep(pause)
                pause = min(2 * pause, 0.2)
            if self._current is not None:
                self._current.stall += time.perf_counter() - began
        self._finish_report()

    def _finish_report(self) -> None:
        if (report := self._current) is None:
            return
        if self._thread is not None and self._staging is not None:
            self._thread.join()
            report.stall += self._staging.waited()
        self._thread = self._current = None
        self._reports.append(report)
        if report.error is None:
            self._failed_in_a_row, self._last = 0, (report.folder, report.step)
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self._max_failed:
            raise CheckpointError(f"{self._failed_in_a_row} saves in a row failed; the last: {report.error}")

    # The next methods run in the thread of a save in the background.

    def _save_beside(self, snapshot: _Snapshot, report: SaveReport, began: float) -> None:
        with self._progress.beside(section_of(threading.current_thread(), report.step, "save")):
            self._save(snapshot, report, began)

    def _save(self, snapshot: _Snapshot, report: SaveReport, began: float) -> None:
        pauses = list(_LAST_PAUSES if snapshot.last else _PAUSES)
        try:
            if self._staging is not None:
                self._background.on_all("copy model and optimizer", self._staging.wait)
            while True:
                try:
                    self._attempt(snapshot)
                    break
                except CheckpointError as error:
                    if self._abandoned.is_set() or not pauses:
                        raise
                    if self._mesh.rank == 0:
                        logger.warning("%s; trying again in %.0f s", error, pauses[0])
                    time.sleep(pauses.pop(0))
        except CheckpointError as error:
            report.error = str(error)
        except Exception as error:  # on this rank alone: another rank is gone, or waits for this one
            self._broken = True
            report.error = f"checkpoint under {self.root}: {type(error).__name__}: {error}"
        report.seconds = time.perf_counter() - began

    def _attempt(self, snapshot: _Snapshot) -> None:
        sync, final = self._background, self.folder(snapshot.manifest.step)
        unfinished = final.with_name(final.name + ".tmp")
        try:
            sync.on_rank0("make a folder", lambda: _make_folder(unfinished, snapshot.tensors))
            written = sync.gather("write model and optimizer", lambda: self._write_own(unfinished, snapshot))
            sync.on_rank0("finish", lambda: self._finish(unfinished, final, snapshot, written))
        except CheckpointError:
            self._own_layouts = {}  # rank 0 may not have received them
            if sync.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _write_own(self, folder: Path, snapshot: _Snapshot) -> _OfRank:
        written = shards.write_shards(folder, self._mesh.rank, snapshot.pieces, self._abandoned.is_set)
        layouts = {name: file.layout for name, file in written.items()}
        changed, self._own_layouts = layouts != self._own_layouts, layouts
        records = {name: file.record for name, file in written.items()}
        return _OfRank(records, layouts if changed else {}, snapshot.generators)

    def _finish(self, folder: Path, final: Path, snapshot: _Snapshot, of_ranks: list[_OfRank]) -> None:
        records = {name: record for of_rank in of_ranks for name, record in of_rank.records.items()}
        for name, record in records.items():
            # If the folder is not shared, the files of other nodes are missing here. Fail now, not on the resume.
            if not (folder / name).is_file() or (folder / name).stat().st_size != record.size:
                raise OSError(f"{folder / name} is missing or has another size; run.dir must be shared by all nodes")
        if any(of_rank.layouts for of_rank in of_ranks):
            for of_rank in of_ranks:
                self._layouts |= of_rank.layouts
            # Drop files of an earlier save that had more tensors.
            self._layouts = {name: layout for name, layout in self._layouts.items() if name in records}
            self._metadata = shards.metadata_of(snapshot.tensors, self._layouts)
        generators = shards.pack([of_rank.generators for of_rank in of_ranks])
        small = {
            shards.METADATA: self._metadata,
            files.RANDOM_STATE: generators,
            files.TRAINER: snapshot.trainer.encode(),
        }
        for name, content in small.items():
            records[name] = files.write_file(folder / name, content)
        index = files.next_save_index(self.root, number_in_state(self.root.parent, "save_index"))
        files.write_manifest(folder, replace(snapshot.manifest, save_index=index, files=records))
        self.before_publish()
        if self._abandoned.is_set():
            raise InterruptedError("the run ended while it was being written")
        files.publish(folder, final)
        self.published(snapshot.manifest.step, index)
        try:
            if removed := files.prune(self.root, self.keep, just_made=final, needed=self.needed()):
                logger.info("removed old checkpoints: %s", ", ".join(each.name for each in removed))
        except OSError as error:  # the new checkpoint is safe
            logger.warning("could not remove old checkpoints: %s", error)

    # Loading

    def resume(
        self, resume: str, model: nn.Module, optimizer: Optimizer, step_state: StepState, *, allow_mismatch: bool
    ) -> find.Resumed | None:
        """Load a checkpoint into `model` and `optimizer`; None if the run begins at step 0. Call it once, first.

        resume: `auto` (the newest intact checkpoint under `root`), `required` (the same, and one must exist), `never`,
        or the folder of a checkpoint; see find.py. allow_mismatch: load although the identity differs.

        Raises RefusedError if the user has to decide: the identity differs, no checkpoint is intact, those of an
        earlier run are lost, or the given folder is not a checkpoint. Raises CheckpointError if reading fails.
        """
        for line in self.sync.on_rank0("clean up", lambda: files.clean_stale(self.root)):
            self._warn(f"{self.root}: {line}")

        def load(folder: Path, manifest: Manifest) -> dict[str, Any]:
            self._check_identity(folder, manifest, allow_mismatch)
            return shards.load_checkpoint(folder, manifest, model, optimizer, self.sync, self._mesh.device)

        resumed = find.Finder(self.root, self.sync, load).choose(resume)
        if resumed is None:
            return None
        self.origin = resumed.origin
        self.initialized_from = Origin.of(resumed.trainer, "initialized_from")
        if resumed.folder.absolute().parent == self.root.absolute():
            self._saved_step = resumed.step
            if self._mesh.rank == 0:
                self.published(resumed.step, resumed.manifest.save_index)
        self._last = resumed.folder, resumed.step
        step_state.weights_version += 1
        return resumed

    def initialize(
        self, given: str, model: nn.Module, step_state: StepState, *, resumed: bool, allow_mismatch: bool
    ) -> Origin | None:
        """Load the weights of the checkpoint that `given` names (find.py) into `model`; returns it. Resume first.

        resumed: the run has resumed from its own checkpoint. Then this only checks that the run began from `given`, and
        returns None. Raises RefusedError if the user has to decide, CheckpointError if reading fails.
        """
        if resumed:
            find.check_begun_from(self.initialized_from, find.INITIALIZE, given, self.root, self.sync)
            return None
        self.initialized_from = find.initialize_weights(
            given, model, self._identity, self.sync, allow_mismatch=allow_mismatch
        )
        step_state.weights_version += 1
        return self.initialized_from

    def load(
        self, folder: Path | None, model: nn.Module, optimizer: Optimizer, state: StepState, *, allow_mismatch: bool
    ) -> find.Resumed:
        """Load weights, moments and generators of a checkpoint. folder: None: the checkpoint of `last_step`.

        The caller loads the trainer's state. Raises CheckpointGoneError on all ranks if the checkpoint is missing or
        damaged; then nothing has changed, because all files are checked before they are loaded. Raises RefusedError if
        the run's identity differs, unless `allow_mismatch`.
        """
        if folder is None:
            self._end()
            assert self._last is not None, "there is no checkpoint to load: call last_step first"
            folder = self._last[0]
        try:
            manifest = self.sync.on_rank0("read its manifest", lambda: files.read_manifest(folder))
            shards.check_files(folder, manifest, self.sync)
        except CheckpointError as error:
            raise CheckpointGoneError(f"{folder}: {error}") from error
        self._check_identity(folder, manifest, allow_mismatch)
        trainer = shards.load_checkpoint(folder, manifest, model, optimizer, self.sync, self._mesh.device)
        self._last = folder, manifest.step
        state.weights_version += 1
        return find.Resumed(folder, manifest, trainer)

    def _check_identity(self, folder: Path, manifest: Manifest, allow_mismatch: bool) -> None:
        # On all ranks, because data may differ between nodes.
        differences = self.sync.on_all(
            "compare", lambda: find.check_identity(folder, manifest, self._identity, allow_mismatch)
        )
        if differences:
            self._warn(f"resuming from {folder} although it differs: {'; '.join(differences)}")

    def _warn(self, message: str) -> None:
        if self._mesh.rank == 0:
            logger.warning(message)


def _make_folder(folder: Path, tensors: Sequence[shards.TensorInfo]) -> None:
    files.remove(folder)
    folder.mkdir(parents=True)
    needed, free = sum(tensor.num_bytes for tensor in tensors), shutil.disk_usage(folder).free
    if needed > free:
        text = f"a checkpoint needs {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free; make room, or lower"
        raise OSError(errno.ENOSPC, f"{text} checkpoint.keep", str(folder))
