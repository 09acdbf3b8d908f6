"""Save and resume, as all ranks together do it.

saves.py says how a checkpoint is written, files.py how one tells that it is whole, loading.py how it is read.

Tensors are stored by their global shape: a checkpoint loads at any world size and mesh, bit for bit. `run.dir` must
be on a file system that all nodes share.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.choice import Damage, choose
from megatron_fp4.checkpoint.identity import identity_differences, other_run
from megatron_fp4.checkpoint.initialize import check_begun_from, initialize_weights, refuse_weights_only
from megatron_fp4.checkpoint.loading import check_files, load_checkpoint
from megatron_fp4.checkpoint.local import LocalCheckpoints
from megatron_fp4.checkpoint.local_files import forget_starts
from megatron_fp4.checkpoint.local_start import choose_with_local
from megatron_fp4.checkpoint.origin import Origin, origin_in
from megatron_fp4.checkpoint.random_state import capture_random_state
from megatron_fp4.checkpoint.saves import SaveReport, Saves, Snapshot, manifest_of
from megatron_fp4.checkpoint.shards import own_pieces, state_of, wholes_of
from megatron_fp4.checkpoint.staging import Staging, host_memory_error
from megatron_fp4.checkpoint.together import CheckpointError, Together
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.rng import StepState

logger = logging.getLogger(__name__)
_PATIENCE = datetime.timedelta(hours=6)


@dataclass(frozen=True)
class Resumed:
    """What was loaded, apart from what went into model and optimizer.

    step: optimizer steps done, so also the next step's number. trainer: as it was given to `save`.
    same_world: the job had as many ranks, and generators were restored; otherwise they are as the start left them.
    damaged: newer checkpoints that were not whole, moved aside. local: it was one on the nodes' own disks.
    """

    path: Path
    step: int
    consumed_samples: int
    consumed_tokens: int
    trainer: dict[str, Any]
    same_world: bool
    damaged: tuple[Damage, ...] = ()
    local: bool = False


class CheckpointGoneError(CheckpointError):
    """A checkpoint is not there or not whole; raised on all ranks, before anything was loaded."""


class Checkpointer:
    """Saves to and resumes from the checkpoints under one folder; every method is a collective.

    root: `<run.dir>/checkpoints`. keep: how many to keep (0: all). identity: see identity.run_identity.
    asynchronous: saves go on in the background, after `prepare`. max_failed_saves: so many in a row that come to
    nothing end the run. timeout: after which ranks that wait for one give up, where training waits as well.
    local_dir: a folder on each node's own disk for checkpoints in between (local.py), None without these; num_steps: of
    the run, which is to be given then.
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
        local_dir: Path | None = None,
        num_steps: int = 0,
    ) -> None:
        if keep < 0:
            raise ValueError(f"checkpoint.keep is {keep}; give the number to keep, or 0 for all")
        self.root = root
        self._mesh = mesh
        self._identity = dict(identity)
        self._asynchronous = asynchronous
        self._saved_step: int | None = None
        self._resumed: tuple[Path, int] | None = None
        self.origin: Origin | None = None
        """The checkpoint of another run that this one began from; its trainer state keeps it."""
        self.initialized_from: Origin | None = None
        """The checkpoint whose weights, and nothing else, this run began with; its trainer state keeps it too."""
        self._together = Together(root, timeout)
        # A shared disk may hang for hours while training goes on; its recovery must find the group alive.
        in_background = Together(root, max(timeout, _PATIENCE)) if asynchronous else self._together
        self.saves = Saves(root, in_background, mesh.device, keep, max_failed_saves)
        self.saves.after_publish = lambda: forget_starts(root)
        self.local: LocalCheckpoints | None = None
        if local_dir is not None:
            self.local = LocalCheckpoints(local_dir, root, self._together, in_background, before=num_steps)
            self.local.before_publish = lambda: self.saves.before_publish()
            self.saves.after_publish, self.saves.save_local = self.local.note, self.local.save

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take the host memory that saves in the background need: this rank's share of weights and moments.

        Raises ConfigError on all ranks if a machine does not have it.
        """
        if self.local is not None:
            self.local.clear_unfinished()
        if self._asynchronous:
            pieces = own_pieces(state_of(model, optimizer), self._mesh.rank, everything=self.local is not None)
            needed = sum(piece.values.nbytes for piece in pieces) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            problems = self._together.collect("look for memory", lambda: host_memory_error(needed))
            if problem := self._together.first("look for memory", lambda: next(filter(None, problems), None)):
                raise ConfigError(problem)
            staging = Staging(pieces, self._mesh.device)
            optimizer.register_step_pre_hook(lambda *_: staging.before_update())
            self.saves.staging = staging

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer: Mapping[str, Any],
        *,
        consumed_samples: int,
        consumed_tokens: int,
        local: bool = False,
        last: bool = False,
    ) -> Path:
        """Write a checkpoint after `step` optimizer steps and return its folder, where it will be.

        trainer: the loop's own state, JSON types, the same on all ranks (rank 0's is written). Saving a step that
        was just saved or resumed from does nothing. In the background, this waits for the save before and for nothing
        else; `saves.collect` tells how one went. local: write it to the nodes' own disks, which never ends a run.

        Raises CheckpointError on all ranks if so many saves in a row came to nothing that the run must end.
        """
        final = self.root / files.folder_name(step)
        if step == self._saved_step and not self.saves.failed_in_a_row:
            return final
        self.saves.end()
        began = time.perf_counter()
        trainer_json = json.dumps(dict(trainer), indent=1)
        state = state_of(model, optimizer)
        manifest = manifest_of(step, consumed_samples, consumed_tokens, self._mesh.world_size, self._identity)
        pieces = own_pieces(state, self._mesh.rank, everything=local)
        generators = capture_random_state(self._mesh.device)
        self.saves.begin(Snapshot(manifest, wholes_of(state), pieces, generators, trainer_json, local, last), began)
        if not local:
            self._saved_step = step
        return final

    def before_change(self) -> None:
        """Let the device wait for a save's copies before weights change outside of an update."""
        if self.saves.staging is not None:
            self.saves.staging.before_update()

    @property
    def failed(self) -> bool:
        """Whether this rank knows of a save in the background that came to nothing. For the step's all-reduce."""
        return self.saves.failed

    def reports(self, save_failed: bool = False) -> list[SaveReport]:
        """Saves that have ended since the last call. save_failed: `failed` of any rank, by the step's all-reduce.

        Raises CheckpointError on all ranks if so many in a row came to nothing that the run must end.
        """
        if save_failed:
            self.saves.end()
        return self.saves.collect()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # what is on its way must not become a checkpoint behind the next try's back
            self.saves.abandon()

    def finish(self) -> None:
        """Wait for the save that is on its way. Raises CheckpointError on all ranks if the last one came to nothing."""
        self.saves.end()
        if self.saves.failed_in_a_row:
            raise CheckpointError("the last save came to nothing; what was trained since the one before is lost")

    def resume(
        self,
        resume: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clock: StepState,
        *,
        allow_mismatch: bool,
    ) -> Resumed | None:
        """Load a checkpoint into `model` and `optimizer`; None if the run begins at step 0. Call it once, first.

        resume: `auto` (the newest intact checkpoint under `root`), `never`, or the folder of a checkpoint; choice.py
        has what each means. allow_mismatch: load although the run's identity differs from the checkpoint's.

        Raises ValueError for what the user has to decide: the identity differs, nothing is intact or left of an
        earlier run, the given folder is not a checkpoint; and CheckpointError if reading fails otherwise.
        """
        together = self._together
        for line in together.first("clean up", lambda: files.clean_stale(self.root)):
            self._log(logging.WARNING, f"{self.root}: {line}")

        def load(folder: Path, manifest: files.Manifest) -> dict[str, Any]:
            self._check_identity(folder, manifest, allow_mismatch)
            return self._load(folder, manifest, model, optimizer)

        def check(folder: Path, manifest: files.Manifest) -> None:
            check_files(folder, manifest, together)

        if self.local is None:
            chosen = choose(self.root, resume, together, load, check)
        else:
            state = state_of(model, optimizer)
            chosen = choose_with_local(
                self.local, state, self._mesh.device, resume, load, check,
                lambda folder, manifest: self._check_identity(folder, manifest, allow_mismatch),
            )  # fmt: skip
        if chosen is None:
            return None
        clock.weights_version += 1
        self.origin, manifest = chosen.origin, chosen.manifest
        self.initialized_from = origin_in(chosen.trainer, "initialized_from")
        if chosen.folder.absolute().parent == self.root.absolute():
            self._saved_step = manifest.step
        self._resumed = self._shared_before(manifest.step) if chosen.local else (chosen.folder, manifest.step)
        return Resumed(
            chosen.folder,
            manifest.step,
            manifest.consumed_samples,
            manifest.consumed_tokens,
            chosen.trainer,
            manifest.world_size == self._mesh.world_size,
            chosen.damaged,
            chosen.local,
        )

    def initialize(
        self, given: str, model: nn.Module, clock: StepState, *, resumed: bool, allow_mismatch: bool
    ) -> Origin | None:
        """Take the weights of the checkpoint that `given` names (initialize.py) into `model`, and nothing else of it;
        returns which that was. Call it behind `resume`.

        resumed: the run goes on with a checkpoint of its own; then this only looks whether it began from `given`, and
        returns None. Raises ValueError for what the user has to decide, CheckpointError if reading fails otherwise.
        """
        if resumed:
            check_begun_from(self.initialized_from, given, self.root, self._together)
            return None
        self.initialized_from = initialize_weights(
            given, model, self._identity, self._together, allow_mismatch=allow_mismatch
        )
        clock.weights_version += 1
        return self.initialized_from

    def _shared_before(self, step: int) -> tuple[Path, int] | None:
        """The newest shared checkpoint before a local one: what the run would have gone back to without a stop."""

        def find() -> tuple[Path, int] | None:
            earlier = [folder for folder in files.list_checkpoints(self.root) if files.step_of(folder) <= step]
            if earlier:
                return earlier[-1], files.step_of(earlier[-1])
            return (Path(self.origin.path), self.origin.step) if self.origin is not None else None

        return self._together.first("scan", find)

    def has(self, step: int) -> bool:
        """Whether this run's checkpoint of `step` steps was loaded or saved last; the same on all ranks."""
        return step == self._saved_step

    def folder(self, step: int) -> Path:
        """The folder of the checkpoint of `step` steps, there or not."""
        return self.root / files.folder_name(step)

    def last_step(self) -> int | None:
        """The step of the checkpoint that `reload` would load: the last that was written or resumed from, if any.

        Waits for the save that is on its way. Raises CheckpointError on all ranks as `save` does.
        """
        self.saves.end()
        last = self.saves.last or self._resumed
        return None if last is None else last[1]

    def reload(self, model: nn.Module, optimizer: torch.optim.Optimizer, clock: StepState) -> Resumed:
        """Load the checkpoint of `last_step` again, in the middle of the run; see `load`."""
        self.saves.end()
        last = self.saves.last or self._resumed
        assert last is not None, "there is no checkpoint to go back to: ask last_step first"
        # What the run itself began from, or wrote, has been looked at.
        return self.load(last[0], model, optimizer, clock, allow_mismatch=True)

    def load(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clock: StepState,
        *,
        allow_mismatch: bool,
    ) -> Resumed:
        """Load a checkpoint as it is: weights, moments, generators. Nothing on disk changes.

        What of the trainer's state is to be taken up is the caller's to decide. Raises CheckpointGoneError on all ranks
        if the checkpoint is not there or not whole; then nothing has changed, for which it is read twice. Raises
        ValueError if the run's identity differs, unless `allow_mismatch`.
        """
        together = self._together
        try:
            manifest = together.first("read its manifest", lambda: files.read_manifest(folder))
            check_files(folder, manifest, together)
        except CheckpointError as error:
            raise CheckpointGoneError(f"{folder}: {error}") from error
        self._check_identity(folder, manifest, allow_mismatch)
        trainer = self._load(folder, manifest, model, optimizer)
        clock.weights_version += 1
        same_world = manifest.world_size == self._mesh.world_size
        return Resumed(folder, manifest.step, manifest.consumed_samples, manifest.consumed_tokens, trainer, same_world)

    def steps_after(self, step: int) -> list[int]:
        """Steps of the checkpoints under the folder that lie after `step`, whole or not: a run that goes on from
        `step` would come to replace them."""
        folders = self._together.first("scan", lambda: files.list_checkpoints(self.root))
        return [other for folder in folders if (other := files.step_of(folder)) > step]

    def _load(
        self, folder: Path, manifest: files.Manifest, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        return load_checkpoint(folder, manifest, model, optimizer, self._together, self._mesh.device)

    def _check_identity(self, folder: Path, manifest: files.Manifest, allow_mismatch: bool) -> None:
        refuse_weights_only(folder, manifest)
        # Of all ranks, because data may differ from node to node, and a rank that leaves alone lets the others hang.
        of_ranks = self._together.collect("compare", lambda: identity_differences(manifest.identity, self._identity))
        differences = self._together.first(
            "compare", lambda: list(dict.fromkeys(line for lines in of_ranks for line in lines))
        )
        if not differences:
            return
        if not allow_mismatch:
            raise ValueError(other_run(folder, differences))
        self._log(logging.WARNING, f"resuming from {folder} although it differs: {'; '.join(differences)}")

    def _log(self, level: int, message: str) -> None:
        if self._mesh.rank == 0:
            logger.log(level, message)
