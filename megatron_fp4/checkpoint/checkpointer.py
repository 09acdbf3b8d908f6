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
from megatron_fp4.checkpoint.choice import Damage, Origin, choose
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


@dataclass(frozen=True)
class Resumed:
    """What was loaded, apart from what went into model and optimizer.

    step: optimizer steps done, so also the next step's number. trainer: as it was given to `save`.
    same_world: the job had as many ranks, and generators were restored; otherwise they are as the start left them.
    damaged: newer checkpoints that were not whole, moved aside.
    """

    path: Path
    step: int
    consumed_samples: int
    consumed_tokens: int
    trainer: dict[str, Any]
    same_world: bool
    damaged: tuple[Damage, ...] = ()


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
        self.origin: Origin | None = None
        """The checkpoint of another run that this one began from; its trainer state keeps it."""

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

        resume: `auto` (the newest intact checkpoint under `root`), `never`, or the folder of a checkpoint; choice.py
        has what each means. allow_mismatch: load although the run's identity differs from the checkpoint's.

        Raises ValueError for what the user has to decide: the identity differs, nothing is intact or left of an
        earlier run, the given folder is not a checkpoint; and CheckpointError if reading fails otherwise.
        """
        for line in self._first("clean up", lambda: files.clean_stale(self.root)):
            self._log(logging.WARNING, f"{self.root}: {line}")

        def load(folder: Path, manifest: files.Manifest) -> dict[str, Any]:
            self._check_identity(folder, manifest, allow_mismatch)
            return self._load(folder, manifest, model, optimizer)

        chosen = choose(self.root, resume, self._first, load, self._verify)
        if chosen is None:
            return None
        clock.weights_version += 1
        self.origin, manifest = chosen.origin, chosen.manifest
        if chosen.folder.absolute().parent == self.root.absolute():
            self._saved_step = manifest.step
        return Resumed(
            chosen.folder,
            manifest.step,
            manifest.consumed_samples,
            manifest.consumed_tokens,
            chosen.trainer,
            manifest.world_size == self._mesh.world_size,
            chosen.damaged,
        )

    def _load(
        self, folder: Path, manifest: files.Manifest, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Load a checkpoint and return its trainer state. Raises DamagedCheckpointError on all ranks."""
        if problems := self._verify(folder, manifest):
            raise files.DamagedCheckpointError("; ".join(problems))
        self._together("load model and optimizer", lambda: _read_tensors(folder, model, optimizer))
        if manifest.world_size == self._mesh.world_size:
            rng = folder / _rng_name(self._mesh.rank)
            self._together("load generators", lambda: restore_random_state(rng, self._mesh.device))
        trainer: dict[str, Any] = self._first("load", lambda: json.loads((folder / _TRAINER).read_text()))
        return trainer

    def steps_after(self, step: int) -> list[int]:
        """Steps of the checkpoints under the folder that lie after `step`, whole or not: a run that goes on from
        `step` would come to replace them."""
        steps = [files.step_of(folder) for folder in files.list_checkpoints(self.root)]
        return [other for other in steps if other > step]

    def has(self, step: int) -> bool:
        """Whether this run's checkpoint of `step` steps was loaded or saved last; the same on all ranks."""
        return step == self._saved_step

    def folder(self, step: int) -> Path:
        """The folder of the checkpoint of `step` steps, there or not."""
        return self.root / files.folder_name(step)

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

    def _verify(self, folder: Path, manifest: files.Manifest) -> list[str]:
        """Each rank reads its share of the files, so that a large checkpoint is checked in parallel."""
        share = sorted(manifest.files.items())[self._mesh.rank :: self._mesh.world_size]
        problems = self._together("verify", lambda: [files.check_file(folder, name, record) for name, record in share])
        return [problem for of_rank in problems for problem in of_rank if problem is not None]

    def _check_identity(self, folder: Path, manifest: files.Manifest, allow_mismatch: bool) -> None:
        # Gathered, because data may differ from node to node, and a rank that leaves alone lets the others hang.
        of_ranks = self._together("compare", lambda: identity_differences(manifest.identity, self._identity))
        differences = list(dict.fromkeys(line for lines in of_ranks for line in lines))
        if not differences:
            return
        listing = "; ".join(differences)
        if not allow_mismatch:
            raise ValueError(
                f"{folder} belongs to another run: {listing}. Set these back, choose another run.dir, or resume "
                "anyway with checkpoint.allow_mismatch=true"
            )
        self._log(logging.WARNING, f"resuming from {folder} although it differs: {listing}")

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

    def _first(self, what: str, action: Callable[[], T]) -> T:
        return self._together(what, action, first_rank_only=True)[0]

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
