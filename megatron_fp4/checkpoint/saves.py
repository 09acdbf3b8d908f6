"""Saving, as all ranks together do it: at once, or in the background while training continues.

A save is a sequence of stages. After each, every rank learns whether any rank failed; if so the attempt is removed, and
earlier checkpoints are as they were. A process may be killed at any moment: the next start finds the newest checkpoint
that is whole (files.py says how one tells).

    1. rank 0 looks whether there is space, and makes step_XXXXXXXX.tmp
    2. all write their shards of model and optimizer, hashing what they write
    3. rank 0 writes generators, trainer state, .metadata and the manifest, renames the folder, replaces the pointer,
       and removes old checkpoints

In the background the tensors are copies of one instant (`Staging`), and the stages run in a thread. One save is on its
way at a time. An attempt that fails is made once more; then the save is given up, and the run continues, as the report
says. Where `max_failed` saves in a row came to nothing, the run ends.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.shards import METADATA, OwnPiece, Piece, Whole, metadata_of, pack, write_shards
from megatron_fp4.checkpoint.sync import CheckpointError, RankSync

logger = logging.getLogger(__name__)
_ALIGNMENT = 4096
_PAUSES = (2.0,)
_LAST_PAUSES = (2.0, 10.0, 30.0)
"""Seconds between two attempts; the last save of a run is worth more of them."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold. manifest: without files and index. generators: this rank's. last: of this start."""

    manifest: files.Manifest
    tensors: Sequence[Whole]
    pieces: Sequence[OwnPiece]
    generators: bytes
    trainer: str
    last: bool = False


@dataclass
class SaveReport:
    """A save, and once it has ended how it went. seconds: from its begin. stall: seconds in which training waited.

    error: why there is no checkpoint, None if there is one.
    """

    step: int
    folder: Path
    seconds: float = 0.0
    stall: float = 0.0
    error: str | None = None


class _OfRank(NamedTuple):
    """What rank 0 hears of a rank: its files, what lies where in them (nothing if that is as in the save before), its
    generators."""

    records: dict[str, files.FileRecord]
    layouts: dict[str, list[Piece]]
    generators: bytes


@dataclass
class Saves:
    """The saves of one run under `root`; every method is a collective, unless it says otherwise.

    device: for the collectives of training's own group. keep: how many checkpoints to keep (0: all). staging: given,
    saves are written in the background. max_failed: so many in a row that come to nothing end the run. before_publish:
    called on rank 0, in whatever thread, before a checkpoint gets its name. published: called there after that, with
    its step. needed: asked there for the names of checkpoints that must not be removed yet. alive: called while
    training waits for a save. failed_in_a_row: saves that came to nothing. last: the checkpoint that was made last.
    """

    root: Path
    sync: RankSync
    device: torch.device
    keep: int
    max_failed: int = 1
    staging: Staging | None = None
    before_publish: Callable[[], None] = lambda: None
    published: Callable[[int], None] = lambda step: None
    alive: Callable[[], None] = lambda: None
    needed: Callable[[], Collection[str]] = tuple
    failed_in_a_row: int = 0
    last: tuple[Path, int] | None = None
    _thread: threading.Thread | None = None
    _broken: bool = False
    _abandoned: threading.Event = field(default_factory=threading.Event)
    _own_layouts: dict[str, list[Piece]] = field(default_factory=dict)
    _layouts: dict[str, list[Piece]] = field(default_factory=dict)
    _metadata: bytes = b""
    _current: SaveReport | None = None
    _reports: list[SaveReport] = field(default_factory=list)

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank's save in the background has come to nothing, which `end` has not told yet."""
        return self._current is not None and not self._writing and self._current.error is not None

    def begin(self, snapshot: Snapshot, began: float) -> None:
        """Save; in the background if there is staging. The save before has ended (`end`).

        began: when training began to wait for it, as `time.perf_counter` counts. Raises as `end` does.
        """
        step = snapshot.manifest.step
        report = self._current = SaveReport(step, self.root / files.folder_name(step))
        if self.staging is None:
            self._save(snapshot, report, began)
            report.stall = report.seconds
            return self.end()
        staged = replace(snapshot, pieces=self.staging.copy(snapshot.pieces))
        # A daemon: a process that dies of something else must not wait for a disk.
        save = threading.Thread(target=self._save, args=(staged, report, began), name="checkpoint", daemon=True)
        self._thread = save
        save.start()
        report.stall = time.perf_counter() - began

    def end(self) -> None:
        """Wait for the save that is on its way, and take note of how it went.

        Raises CheckpointError on all ranks if it came to nothing, as did those before it, `max_failed` in a row.
        """
        if self.staging is not None:
            began = time.perf_counter()
            self._await_all()
            if self._current is not None:
                self._current.stall += time.perf_counter() - began
        self._take_note()

    def _await_all(self) -> None:
        """Wait until no rank writes in the background.

        By collectives of training's own group, so that a rank that is stopped or gone is found as soon as it is in a
        step: the background's own has more patience.
        """
        pause = 0.001
        while True:
            flags = torch.tensor([float(self._writing), float(self._broken)], device=self.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            writing, broken = flags.tolist()
            if broken:
                error = self._current.error if self._current is not None else None
                raise CheckpointError(f"saving in the background broke off: {error or 'on another rank'}")
            if not writing:
                return
            self.alive()
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _take_note(self) -> None:
        if (report := self._current) is None:
            return
        if self._thread is not None and self.staging is not None:
            self._thread.join()
            report.stall += self.staging.waited()
        self._thread = self._current = None
        self._reports.append(report)
        if report.error is None:
            self.failed_in_a_row, self.last = 0, (report.folder, report.step)
            return
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= self.max_failed:
            raise CheckpointError(f"{self.failed_in_a_row} saves in a row came to nothing; the last: {report.error}")

    def collect(self) -> list[SaveReport]:
        """Those that have ended since the last call. Not a collective: ranks may notice at different times."""
        if self._thread is not None and not self._writing and not self.failed:
            self._take_note()
        reports, self._reports = self._reports, []
        return reports

    def abandon(self) -> None:
        """Let no save that is on its way become a checkpoint any more. Not a collective."""
        self._abandoned.set()

    def _save(self, snapshot: Snapshot, report: SaveReport, began: float) -> None:
        try:
            if self.staging is not None:
                self.sync.on_all("copy model and optimizer", self.staging.wait)
            self._write(snapshot)
        except CheckpointError as error:
            report.error = str(error)
        except Exception as error:  # not agreed upon: another rank is gone, or waits for this one
            self._broken = True
            report.error = f"checkpoint under {self.root}: {type(error).__name__}: {error}"
        report.seconds = time.perf_counter() - began

    def _write(self, snapshot: Snapshot) -> None:
        for pause in _LAST_PAUSES if snapshot.last else _PAUSES:
            try:
                return self._attempt(snapshot)
            except CheckpointError as error:
                if self._abandoned.is_set():
                    raise
                if self.sync.rank == 0:
                    logger.warning("%s; trying again in %.0f s", error, pause)
                time.sleep(pause)
        return self._attempt(snapshot)

    def _attempt(self, snapshot: Snapshot) -> None:
        sync, final = self.sync, self.root / files.folder_name(snapshot.manifest.step)
        staging = final.with_name(final.name + ".tmp")
        try:
            sync.on_rank0("make a folder", lambda: _make_folder(staging, snapshot.tensors))
            written = sync.gather("write model and optimizer", lambda: self._write_own(staging, snapshot))
            sync.on_rank0("finish", lambda: self._finish(staging, final, snapshot, written))
        except CheckpointError:
            self._own_layouts = {}  # rank 0 may not have got them
            if sync.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise

    def _write_own(self, folder: Path, snapshot: Snapshot) -> _OfRank:
        written = write_shards(folder, self.sync.rank, snapshot.pieces, self._abandoned.is_set)
        layouts = {name: file.layout for name, file in written.items()}
        changed, self._own_layouts = layouts != self._own_layouts, layouts
        records = {name: file.record for name, file in written.items()}
        return _OfRank(records, layouts if changed else {}, snapshot.generators)

    def _finish(self, staging: Path, final: Path, snapshot: Snapshot, of_ranks: list[_OfRank]) -> None:
        records = {name: record for of_rank in of_ranks for name, record in of_rank.records.items()}
        for name, record in records.items():
            # Another node's file is missing here if the folder is not shared; better to know now than on resume.
            if not (staging / name).is_file() or (staging / name).stat().st_size != record.size:
                raise OSError(f"{staging / name} is not as it was written; run.dir must be shared by all nodes")
        if any(of_rank.layouts for of_rank in of_ranks):
            for of_rank in of_ranks:
                self._layouts |= of_rank.layouts
            # Of a save that had more tensors there may be files that this one has not.
            self._layouts = {name: layout for name, layout in self._layouts.items() if name in records}
            self._metadata = metadata_of(snapshot.tensors, self._layouts)
        for name, content in (
            (METADATA, self._metadata),
            (files.RANDOM_STATE, pack([of_rank.generators for of_rank in of_ranks])),
            (files.TRAINER, snapshot.trainer.encode()),
        ):
            records[name] = files.write_file(staging / name, content)
        index = files.next_save_index(self.root)
        files.write_manifest(staging, replace(snapshot.manifest, save_index=index, files=records))
        self.before_publish()
        if self._abandoned.is_set():
            raise InterruptedError("the run ended while it was being written")
        files.publish(staging, final)
        self.published(snapshot.manifest.step)
        try:
            if removed := files.prune(self.root, self.keep, just_made=final, needed=self.needed()):
                logger.info("removed old checkpoints: %s", ", ".join(folder.name for folder in removed))
        except OSError as error:  # the new checkpoint is safe, and that is what matters
            logger.warning("could not clear up after a save: %s", error)


def _make_folder(folder: Path, tensors: Sequence[Whole]) -> None:
    files.remove(folder)
    folder.mkdir(parents=True)
    needed, free = sum(tensor.num_bytes for tensor in tensors), shutil.disk_usage(folder).free
    if needed > free:
        text = f"a checkpoint needs {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free; make room, or lower"
        raise OSError(errno.ENOSPC, f"{text} checkpoint.keep", str(folder))


# The tensors of one instant, copied to the host while training continues. On a GPU the copies run on a stream of their
# own, into page-locked memory that is taken once, for the life of the run. Weights and moments do not change before the
# next update: so the next forward and backward pass run beside the copies, and only the optimizer waits for them.


class Staging:
    """Host memory for the pieces of one rank, and the copies into it.

    pieces: of the run; later ones are some or all of them, with the same sizes and types. device: where they are.
    """

    def __init__(self, pieces: Sequence[OwnPiece], device: torch.device) -> None:
        self._device = device
        sizes = [-(-piece.values.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in pieces]
        starts = [0, *itertools.accumulate(sizes)]
        # Shared, not private: the loader's processes are forked from this one, and what a device writes into must not
        # be copied on that occasion.
        self._memory = mmap.mmap(-1, max(starts[-1], 1))
        self._staged = {
            (piece.tensor, piece.offsets): torch.frombuffer(
                self._memory, dtype=piece.values.dtype, count=piece.values.numel(), offset=start
            ).view(piece.values.shape)
            for piece, start in zip(pieces, starts, strict=False)
        }
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            if starts[-1] > 0:
                _lock_pages(self._memory, starts[-1], device)

    def copy(self, pieces: Sequence[OwnPiece]) -> list[OwnPiece]:
        """Begin to copy; returns the pieces with the host's tensors, which hold the values after `wait`."""
        staged = [piece._replace(values=self._staged[piece.tensor, piece.offsets]) for piece in pieces]
        if self._stream is None:
            for target, piece in zip(staged, pieces, strict=True):
                target.values.copy_(piece.values)
            return staged
        self._waits.clear()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, piece in zip(staged, pieces, strict=True):
                target.values.copy_(piece.values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def before_update(self) -> None:
        """Let the device wait for the copies before it changes what they copy."""
        if self._copied is None or self._copied.query():
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        stream.wait_event(self._copied)
        after.record(stream)
        self._waits.append((before, after))

    def wait(self) -> None:
        """Wait, from any thread, until the copies are done."""
        if self._copied is not None:
            self._copied.synchronize()

    def waited(self) -> float:
        """Seconds that the device waited for the last copies."""
        waited = 0.0
        for before, after in self._waits:
            after.synchronize()
            waited += before.elapsed_time(after) / 1e3
        return waited


def host_memory_error(num_bytes: int) -> str | None:
    """Why this machine cannot hold `num_bytes` more; None if it can, or does not say what it has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (available,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError):
        return None
    if num_bytes <= available:
        return None
    return (
        f"checkpoint.asynchronous=true keeps a copy of weights and moments in host memory: {num_bytes / 1e9:.1f} GB on "
        f"{socket.gethostname()}, which has {available / 1e9:.1f} GB left; set checkpoint.asynchronous=false, or use "
        "more nodes"
    )


def _lock_pages(memory: mmap.mmap, size: int, device: torch.device) -> None:
    """Page-lock host memory, so that copies run beside the host and at full speed."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole.zero_()  # the pages come into being here, instead of one by one in the driver
    result = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), size, 0)
    if int(result) != 0:
        logger.warning("host memory for checkpoints could not be page-locked (%s); copies will be slow", result)
        # CUDA keeps the error for the next one who asks, which would be some kernel's launch.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device).add_(1)
