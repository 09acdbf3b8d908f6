"""Save and resume, as all ranks together do it.

Saving is a sequence of stages. After each, every rank learns whether any rank failed; if so all raise, what was
being written is removed, and earlier checkpoints are as they were. A process may be killed at any moment: the next
start finds the newest checkpoint that is whole (checkpoint_files.py says how one tells).

    1. rank 0 makes step_XXXXXXXX.tmp
    2. all write their shards of model and optimizer (torch.distributed.checkpoint), generators and trainer state
    3. all hash what they wrote
    4. rank 0 writes the manifest, renames the folder, replaces the pointer, removes old checkpoints

Tensors are stored by their global shape: a checkpoint loads at any world size and mesh, bit for bit. `run.dir` must
be on a file system that all nodes share.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.identity import identity_differences
from megatron_fp4.checkpoint.random_state import restore_random_state, save_random_state
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.training.optimizer import optimizer_state

logger = logging.getLogger(__name__)
T = TypeVar("T")
_TRAINER = "trainer.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks."""


class CheckpointGoneError(CheckpointError):
    """A checkpoint that was whole no longer is; raised on all ranks, before anything was loaded."""


@dataclass(frozen=True)
class Resumed:
    """What was loaded, apart from what went into model and optimizer.

    step: optimizer steps done, so also the next step's number. trainer: as it was given to `save`.
    same_world: the job had as many ranks, and generators were restored; otherwise they are as the start left them.
    """

    path: Path
    step: int
    consumed_samples: int
    consumed_tokens: int
    trainer: dict[str, Any]
    same_world: bool


class Checkpointer:
    """Saves to and resumes from the checkpoints under one folder; every method is a collective.

    root: `<run.dir>/checkpoints`. keep: how many to keep (0: all). identity: see identity.run_identity.
    """

    def __init__(self, root: Path, mesh: ParallelMesh, *, keep: int, identity: Mapping[str, Any]) -> None:
        if keep < 0:
            raise ValueError(f"checkpoint.keep is {keep}; give the number to keep, or 0 for all")
        self.root = root
        self._mesh = mesh
        self._keep = keep
        self._identity = dict(identity)
        self._saved_step: int | None = None
        self._last: tuple[Path, int] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer: Mapping[str, Any],
        *,
        consumed_samples: int,
        consumed_tokens: int,
    ) -> Path:
        """Write a checkpoint after `step` optimizer steps and return its folder.

        trainer: the loop's own state, JSON types, the same on all ranks (rank 0's is written). Saving a step that
        was just saved or resumed from does nothing.

        Raises CheckpointError on all ranks if any could not write (a full disk); nothing is left of the attempt.
        """
        final = self.root / files.folder_name(step)
        if step == self._saved_step:
            return final
        trainer_json = json.dumps(dict(trainer), indent=1)  # a TypeError must come before the first collective
        staging = final.with_name(final.name + ".tmp")
        try:
            self._together("make a folder", lambda: _make_staging(staging), first_rank_only=True)
            self._together("write model and optimizer", lambda: _write_tensors(staging, model, optimizer))
            records = self._together("write its part", lambda: self._write_own_files(staging, trainer_json))
            manifest = files.Manifest(
                save_index=self._together("scan", lambda: files.next_save_index(self.root), first_rank_only=True)[0],
                step=step,
                consumed_samples=consumed_samples,
                consumed_tokens=consumed_tokens,
                world_size=self._mesh.world_size,
                identity=self._identity,
                files={name: record for written in records for name, record in written.items()},
                torch_version=str(torch.__version__),
            )
            self._together("finish", lambda: self._finish(staging, final, manifest), first_rank_only=True)
        except CheckpointError:
            if self._mesh.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        self._saved_step = step
        self._last = final, step
        return final

    def resume(
        self,
        resume: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clock: RunClock,
        *,
        allow_mismatch: bool,
    ) -> Resumed | None:
        """Load a checkpoint into `model` and `optimizer`; None if the run begins at step 0. Call it once, first.

        resume: `auto` (the newest whole checkpoint under `root`), `never`, or the folder of a checkpoint.
        allow_mismatch: load although the run's identity differs from the checkpoint's.

        Raises ValueError if the identity differs or the given folder is not there, and CheckpointError if a
        checkpoint is damaged: the given one or, with `auto`, all of them.
        """
        for line in self._together("clean up", lambda: files.clean_stale(self.root), first_rank_only=True)[0]:
            self._log(logging.WARNING, f"{self.root}: {line}")
        if resume == "never":
            return None
        chosen = self._newest_whole() if resume == "auto" else self._given(Path(resume))
        if chosen is None:
            return None
        folder, manifest = chosen
        self._check_identity(folder, manifest, allow_mismatch)
        resumed = self._load(folder, manifest, model, optimizer, clock)
        if folder.parent.absolute() == self.root.absolute():
            self._saved_step = manifest.step
        self._last = folder, manifest.step
        return resumed

    def last_step(self) -> int | None:
        """The step of the checkpoint that `reload` would load: the last that was saved or resumed from, if any."""
        return None if self._last is None else self._last[1]

    def reload(self, model: nn.Module, optimizer: torch.optim.Optimizer, clock: RunClock) -> Resumed:
        """Load the checkpoint of `last_step` again, in the middle of the run: weights, moments, generators.

        What is to come of the trainer's state is the caller's to decide. Raises CheckpointGoneError on all ranks if the
        checkpoint is no longer there or no longer whole; then nothing has changed.
        """
        assert self._last is not None, "there is no checkpoint to go back to: ask last_step first"
        folder = self._last[0]
        try:
            manifest = self._together("read its manifest", lambda: files.read_manifest(folder), first_rank_only=True)[0]
            problems = self._verify(folder, manifest)
        except CheckpointError as error:
            raise CheckpointGoneError(f"{folder} cannot be read: {error}") from error
        if problems:
            raise CheckpointGoneError(f"checkpoint {folder} is damaged: {'; '.join(problems)}")
        return self._load(folder, manifest, model, optimizer, clock)

    def _load(
        self,
        folder: Path,
        manifest: files.Manifest,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clock: RunClock,
    ) -> Resumed:
        self._together("load model and optimizer", lambda: _read_tensors(folder, model, optimizer))
        clock.weights_version += 1
        same_world = manifest.world_size == self._mesh.world_size
        if same_world:
            rng = folder / _rng_name(self._mesh.rank)
            self._together("load generators", lambda: restore_random_state(rng, self._mesh.device))
        trainer = self._together("load", lambda: json.loads((folder / _TRAINER).read_text()), first_rank_only=True)
        return Resumed(
            folder, manifest.step, manifest.consumed_samples, manifest.consumed_tokens, trainer[0], same_world
        )

    def steps_after(self, step: int) -> list[int]:
        """Steps of the checkpoints under the folder that lie after `step`, whole or not: a run that goes on from
        `step` would come to replace them."""
        steps = [files.step_of(folder) for folder in files.list_checkpoints(self.root)]
        return [other for other in steps if other > step]

    def _write_own_files(self, staging: Path, trainer_json: str) -> dict[str, files.FileRecord]:
        rank = self._mesh.rank
        save_random_state(staging / _rng_name(rank), self._mesh.device)
        mine = [staging / _rng_name(rank), *staging.glob(f"__{rank}_*.distcp")]
        if rank == 0:
            files.write_file(staging / _TRAINER, trainer_json)
            mine += [staging / _TRAINER, staging / ".metadata"]
        return {path.name: files.record_of(path) for path in mine}

    def _finish(self, staging: Path, final: Path, manifest: files.Manifest) -> None:
        for name, record in manifest.files.items():
            # Another node's file is missing here if the folder is not shared; better to know now than on resume.
            if not (staging / name).is_file() or (staging / name).stat().st_size != record.size:
                raise OSError(f"{staging / name} is not as another rank wrote it; run.dir must be shared by all nodes")
        files.write_manifest(staging, manifest)
        files.publish(staging, final)
        try:
            removed = files.prune(self.root, self._keep, just_made=final)
        except OSError as error:  # the new checkpoint is safe, and that is what matters
            logger.warning("could not remove old checkpoints: %s", error)
        else:
            if removed:
                logger.info("removed old checkpoints: %s", ", ".join(folder.name for folder in removed))

    def _newest_whole(self) -> tuple[Path, files.Manifest] | None:
        found = self._together("scan", lambda: files.scan(self.root), first_rank_only=True)[0]
        pointer = self._together("scan", lambda: files.read_pointer(self.root), first_rank_only=True)[0]
        damaged: list[str] = []
        for folder, manifest, problem in found:
            problems = [problem] if problem is not None else self._verify(folder, manifest)
            if not problems:
                if damaged or pointer not in (None, folder.name):
                    self._log(logging.WARNING, f"resuming from {folder.name}; the pointer names {pointer}")
                assert manifest is not None
                return folder, manifest
            damaged.append(f"{folder.name}: {'; '.join(problems)}")
            self._log(logging.ERROR, f"CHECKPOINT DAMAGED, trying the one before: {damaged[-1]}")
        if not damaged and pointer is None:
            return None
        missing = [] if pointer is None or damaged else [f"{pointer}: named by `{files.POINTER}` but missing"]
        raise CheckpointError(
            f"there are checkpoints under {self.root}, but none is whole ("
            + " | ".join(damaged + missing)
            + "). Not starting again at step 0 unasked: restore one, set checkpoint.resume to a whole checkpoint, "
            "or begin anew with checkpoint.resume=never"
        )

    def _given(self, folder: Path) -> tuple[Path, files.Manifest]:
        found: list[object] = list(self._together("look", folder.is_dir))
        if not all(found):
            raise ValueError(
                f"checkpoint.resume is {str(folder)!r}, which is not a folder on every rank; give auto, never or the "
                f"path of a checkpoint such as {self.root / files.folder_name(200)}"
            )
        manifest = self._together("read its manifest", lambda: files.read_manifest(folder), first_rank_only=True)[0]
        problems = self._verify(folder, manifest)
        if problems:
            raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(problems)}")
        return folder, manifest

    def _verify(self, folder: Path, manifest: files.Manifest | None) -> list[str]:
        """Each rank reads its share of the files, so that a large checkpoint is checked in parallel."""
        assert manifest is not None
        share = sorted(manifest.files.items())[self._mesh.rank :: self._mesh.world_size]
        problems = self._together("verify", lambda: [files.check_file(folder, name, record) for name, record in share])
        return [problem for of_rank in problems for problem in of_rank if problem is not None]

    def _check_identity(self, folder: Path, manifest: files.Manifest, allow_mismatch: bool) -> None:
        # Gathered, because data may differ from node to node, and a rank that leaves alone lets the others hang.
        of_ranks = self._together("compare", lambda: identity_differences(manifest.identity, self._identity))
        differences = list(dict.fromkeys(line for lines in of_ranks for line in lines))
        if not differences:
            return
        listing = "\n  ".join(differences)
        if not allow_mismatch:
            raise ValueError(
                f"{folder} belongs to another run:\n  {listing}\nSet these back, choose another run.dir, or resume "
                "anyway with checkpoint.allow_mismatch=true"
            )
        self._log(logging.WARNING, f"resuming from {folder} although it differs:\n  {listing}")

    def _together(self, what: str, action: Callable[[], T], first_rank_only: bool = False) -> list[T]:
        """Run `action` on all ranks (or the first); what they returned, or CheckpointError everywhere."""
        result: T | None = None
        error: str | None = None
        if self._mesh.rank == 0 or not first_rank_only:
            try:
                result = action()
            except (OSError, files.DamagedCheckpointError) as failure:
                error = str(failure)
            except CheckpointException as failure:  # every rank gets the failures of all
                error = "; ".join(sorted({f"{type(e).__name__}: {e}" for e, _ in failure.failures.values()}))
        outcomes: list[tuple[T | None, str | None]] = [(None, None)] * self._mesh.world_size
        dist.all_gather_object(outcomes, (result, error))
        failed = {error: rank for rank, (_, error) in reversed(list(enumerate(outcomes))) if error is not None}
        if failed:
            reasons = " | ".join(f"rank {rank}: {error}" for error, rank in failed.items())
            raise CheckpointError(f"checkpoint under {self.root}: could not {what}: {reasons}")
        return [result for result, _ in (outcomes[:1] if first_rank_only else outcomes)]  # type: ignore[misc]

    def _log(self, level: int, message: str) -> None:
        if self._mesh.rank == 0:
            logger.log(level, message)


def _make_staging(staging: Path) -> None:
    if staging.exists():
        shutil.rmtree(staging)
    os.makedirs(staging)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # In this order: asking an FSDP model for its state leaves it sharded, which optimizer_state needs.
    return {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}


def _write_tensors(staging: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    save(_tensors(model, optimizer), storage_writer=FileSystemWriter(staging))


def _read_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # Loaded in place: these are the live shards of parameters and moments.
    with torch.no_grad():
        load(_tensors(model, optimizer), storage_reader=FileSystemReader(folder))


def _rng_name(rank: int) -> str:
    return f"rng_{rank:05d}.pt"
