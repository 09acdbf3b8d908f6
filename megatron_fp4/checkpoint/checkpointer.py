"""Save and resume, as all ranks together do it.

saves.py says how a checkpoint is written, files.py how one tells that it is whole, find.py which one a start resumes
from, shards.py how it is read. Tensors are stored by their global shape: a checkpoint loads at any world size and mesh,
bit for bit. `run.dir` must be on a file system that all nodes share.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.config_diff import identity_differences, other_run
from megatron_fp4.checkpoint.files import Manifest, Origin
from megatron_fp4.checkpoint.find import Finder, Resumed, check_begun_from, initialize_weights, refuse_weights_only
from megatron_fp4.checkpoint.saves import SaveReport, Saves, Snapshot, Staging, host_memory_error
from megatron_fp4.checkpoint.shards import (
    capture_random_state,
    check_files,
    load_checkpoint,
    own_pieces,
    state_of,
    wholes_of,
)
from megatron_fp4.checkpoint.sync import CheckpointError, RankSync, RefusedError
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.rng import StepState

logger = logging.getLogger(__name__)
_PATIENCE = datetime.timedelta(hours=6)


class CheckpointGoneError(CheckpointError):
    """A checkpoint is not there or not whole; raised on all ranks, before anything was loaded."""


class Checkpointer:
    """Saves to and resumes from the checkpoints under one folder; every method is a collective.

    root: `<run.dir>/checkpoints`. keep: how many to keep (0: all). identity: see config_diff.py.
    asynchronous: saves are written in the background, after `prepare`. max_failed_saves: so many in a row that come to
    nothing end the run. timeout: after which ranks that wait for one give up, where training waits as well.
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
    ) -> None:
        self.root = root
        self._mesh = mesh
        self._identity = dict(identity)
        self._asynchronous = asynchronous
        self._saved_step: int | None = None
        self._last: tuple[Path, int] | None = None
        self.origin: Origin | None = None
        """The checkpoint of another run that this one began from; its trainer state keeps it."""
        self.initialized_from: Origin | None = None
        """The checkpoint whose weights, and nothing else, this run began with; its trainer state keeps it too."""
        self.sync = RankSync(root, timeout)
        # A shared disk may hang for hours while training runs; its recovery must find the group alive.
        in_background = RankSync(root, max(timeout, _PATIENCE)) if asynchronous else self.sync
        self.saves = Saves(root, in_background, mesh.device, keep, max_failed_saves)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take the host memory that saves in the background need: this rank's share of weights and moments.

        Raises ConfigError on all ranks if a machine does not have it.
        """
        if not self._asynchronous:
            return
        pieces = own_pieces(state_of(model, optimizer), self._mesh.rank)
        needed = sum(piece.values.nbytes for piece in pieces) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))

        def look() -> None:
            if problem := host_memory_error(needed):
                raise RefusedError(problem)

        try:
            self.sync.on_all("look for memory", look)
        except RefusedError as error:
            raise ConfigError(str(error)) from error
        staging = self.saves.staging = Staging(pieces, self._mesh.device)
        # The device waits for a save's copies before it changes what they copy.
        optimizer.register_step_pre_hook(lambda *_: staging.before_update())

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer: Mapping[str, Any],
        *,
        consumed_samples: int,
        consumed_tokens: int,
        last: bool = False,
    ) -> Path:
        """Write a checkpoint after `step` optimizer steps and return its folder, where it will be.

        trainer: the loop's own state, JSON types, the same on all ranks (rank 0's is written). Saving a step that
        was just saved or resumed from does nothing. In the background, this waits for the save before and for nothing
        else; `reports` tells how one went. last: of this start.

        Raises CheckpointError on all ranks if so many saves in a row came to nothing that the run must end.
        """
        if self.has(step) and not self.saves.failed_in_a_row:
            return self.folder(step)
        self.saves.end()
        began = time.perf_counter()
        trainer_json = json.dumps(dict(trainer), indent=1)
        state = state_of(model, optimizer)
        manifest = Manifest(
            save_index=0,  # found out while it is written, as are the files
            step=step,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_tokens,
            world_size=self._mesh.world_size,
            identity=self._identity,
            files={},
            torch_version=str(torch.__version__),
        )
        pieces, generators = own_pieces(state, self._mesh.rank), capture_random_state(self._mesh.device)
        self.saves.begin(Snapshot(manifest, wholes_of(state), pieces, generators, trainer_json, last), began)
        self._saved_step = step
        return self.folder(step)

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
        if kind is not None:  # what is on its way must not become a checkpoint during the next try
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
        step_state: StepState,
        *,
        allow_mismatch: bool,
    ) -> Resumed | None:
        """Load a checkpoint into `model` and `optimizer`; None if the run begins at step 0. Call it once, first.

        resume: `auto` (the newest intact checkpoint under `root`), `required` (the same, and one must be there),
        `never`, or the folder of a checkpoint; find.py has what each means. allow_mismatch: load although the run's
        identity differs from the checkpoint's.

        Raises ValueError for what the user has to decide: the identity differs, nothing is intact or left of an
        earlier run, the given folder is not a checkpoint; and CheckpointError if reading fails otherwise.
        """
        for line in self.sync.on_rank0("clean up", lambda: files.clean_stale(self.root)):
            self._warn(f"{self.root}: {line}")

        def load(folder: Path, manifest: Manifest) -> dict[str, Any]:
            self._check_identity(folder, manifest, allow_mismatch)
            return load_checkpoint(folder, manifest, model, optimizer, self.sync, self._mesh.device)

        resumed = Finder(self.root, self.sync, load).choose(resume)
        if resumed is None:
            return None
        self.origin = resumed.origin
        self.initialized_from = Origin.of(resumed.trainer, "initialized_from")
        if resumed.folder.absolute().parent == self.root.absolute():
            self._saved_step = resumed.step
            if self._mesh.rank == 0:
                self.saves.published(resumed.step)
        self._last = resumed.folder, resumed.step
        step_state.weights_version += 1
        return resumed

    def initialize(
        self, given: str, model: nn.Module, step_state: StepState, *, resumed: bool, allow_mismatch: bool
    ) -> Origin | None:
        """Take the weights of the checkpoint that `given` names (find.py) into `model`, and nothing else of it;
        returns which that was. Call it after `resume`.

        resumed: the run resumed from a checkpoint of its own; then this only looks whether it began from `given`, and
        returns None. Raises ValueError for what the user has to decide, CheckpointError if reading fails otherwise.
        """
        if resumed:
            check_begun_from(self.initialized_from, given, self.root, self.sync)
            return None
        self.initialized_from = initialize_weights(
            given, model, self._identity, self.sync, allow_mismatch=allow_mismatch
        )
        step_state.weights_version += 1
        return self.initialized_from

    def has(self, step: int) -> bool:
        """Whether this run's checkpoint of `step` steps was loaded or saved last; the same on all ranks."""
        return step == self._saved_step

    def folder(self, step: int) -> Path:
        """The folder of the checkpoint of `step` steps, there or not."""
        return self.root / files.folder_name(step)

    def last_step(self) -> int | None:
        """The step of the checkpoint that was written or loaded last, if any.

        Waits for the save that is on its way. Raises CheckpointError on all ranks as `save` does.
        """
        self.saves.end()
        last = self.saves.last or self._last
        return None if last is None else last[1]

    def load(
        self,
        folder: Path | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step_state: StepState,
        *,
        allow_mismatch: bool,
    ) -> Resumed:
        """Load a checkpoint as it is: weights, moments, generators. Nothing on disk changes. folder: None: the one of
        `last_step`.

        What of the trainer's state is to be taken up is the caller's to decide. Raises CheckpointGoneError on all ranks
        if the checkpoint is not there or not whole; then nothing has changed, for which it is read twice. Raises
        ValueError if the run's identity differs, unless `allow_mismatch`.
        """
        if folder is None:
            self.saves.end()
            last = self.saves.last or self._last
            assert last is not None, "there is no checkpoint to go back to: ask last_step first"
            folder = last[0]
        try:
            manifest = self.sync.on_rank0("read its manifest", lambda: files.read_manifest(folder))
            check_files(folder, manifest, self.sync)
        except CheckpointError as error:
            raise CheckpointGoneError(f"{folder}: {error}") from error
        self._check_identity(folder, manifest, allow_mismatch)
        trainer = load_checkpoint(folder, manifest, model, optimizer, self.sync, self._mesh.device)
        self._last = folder, manifest.step
        step_state.weights_version += 1
        return Resumed(folder, manifest, trainer)

    def steps_after(self, step: int) -> list[int]:
        """Steps of the checkpoints under the folder that lie after `step`, whole or not: a run that resumes
        from `step` would come to replace them."""
        folders = self.sync.on_rank0("scan", lambda: files.list_checkpoints(self.root))
        return [other for folder in folders if (other := files.step_of(folder)) > step]

    def _check_identity(self, folder: Path, manifest: Manifest, allow_mismatch: bool) -> None:
        refuse_weights_only(folder, manifest)
        differences = identity_differences(manifest.identity, self._identity)

        def compare() -> None:
            if differences and not allow_mismatch:
                raise RefusedError(other_run(folder, differences))

        self.sync.on_all("compare", compare)  # data may differ from node to node
        if differences:
            self._warn(f"resuming from {folder} although it differs: {'; '.join(differences)}")

    def _warn(self, message: str) -> None:
        if self._mesh.rank == 0:
            logger.warning(message)
