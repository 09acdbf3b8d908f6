"""Beginning a run from the weights alone of a checkpoint: `checkpoint.initialize_from=PATH`.

PATH is a checkpoint of another run or its folder, of which the newest checkpoint is taken, or an imported checkpoint,
which holds nothing but weights. The run begins at step 0: moments, generators, precision switch, schedule and data are
those of a new run. Any mesh reads it, every rank the files that hold something of its shards, each compared with its
SHA-256 on the way.

What the run began from is in the trainer state of all its checkpoints, as `initialized_from`, like a branch's `origin`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.config_diff import identity_differences, run_identity
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest, Origin, OtherFormatError
from megatron_fp4.checkpoint.find import refuse_damaged
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata
from megatron_fp4.checkpoint.shards import check_tensors, read_shards
from megatron_fp4.checkpoint.sync import DamageError, RankSync, RefusedError
from megatron_fp4.config.schema import Config, ConfigError

KEY = "checkpoint.initialize_from"
# What weights that are there do not depend on: how others would be drawn, and in what pieces the scan is computed.
_FREE = {"model.init_std", "model.mamba_chunk_size"}


def check_initialization(config: Config) -> None:
    """Raise ConfigError if `checkpoint.initialize_from` cannot be begun from: no checkpoint, or of another model.

    Reads manifests only. A run that has checkpoints of its own resumes from those, whatever has become of the path.
    """
    given, settings = config.checkpoint.initialize_from, config.checkpoint
    if given is None:
        return
    if settings.resume not in ("auto", "required", "never"):
        raise ConfigError(
            f"{KEY}={given} takes weights alone and checkpoint.resume={settings.resume} all of a checkpoint; give one "
            "of them"
        )
    if files.list_checkpoints(Path(config.run.dir) / "checkpoints"):
        return
    try:
        folder, manifest = _source(given)
        if not settings.allow_mismatch:
            _check_model(folder, manifest, run_identity(config, {}), ("model.",))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _source(given: str) -> tuple[Path, Manifest]:
    """The checkpoint that is meant, by manifests alone. Raises RefusedError, and OSError."""
    try:
        folder = files.checkpoint_in(Path(os.path.realpath(given)))
        return folder, files.read_manifest(folder)
    except OtherFormatError as error:
        raise RefusedError(f"{KEY}={given} is of another version: {error}; give another checkpoint") from error
    except DamagedCheckpointError as error:
        raise RefusedError(f"{KEY}={given} is damaged: {error}; give another checkpoint") from error
    except ValueError as error:
        raise RefusedError(f"{KEY}={error}") from error


def _check_model(folder: Path, manifest: Manifest, identity: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raise RefusedError, with every key that differs, if the checkpoint's weights are not for the run of this
    `identity`. keys: compare those that begin so."""
    saved, own = (
        {name: value for name, value in facts.items() if name not in _FREE and name.startswith(keys)}
        for facts in (manifest.identity, identity)
    )
    if differences := identity_differences(saved, own):
        raise RefusedError(
            f"{KEY}={folder} is of another model or tokenizer: {'; '.join(differences)}. Set these keys back, give "
            "another checkpoint, or begin all the same with checkpoint.allow_mismatch=true"
        )


def initialize_weights(
    given: str, model: nn.Module, identity: Mapping[str, Any], sync: RankSync, *, allow_mismatch: bool
) -> Origin:
    """Load the weights that `given` names into `model`; a collective. Returns where they are from.

    identity: the run's (config_diff.py). Raises RefusedError on all ranks for what the user has to decide: no
    checkpoint, another model or tokenizer, damage; CheckpointError if reading fails otherwise.
    """

    def look() -> tuple[Path, Manifest, Origin]:
        folder, manifest = _source(given)
        return folder, manifest, Origin.at(folder, manifest)

    def compare() -> None:
        try:
            check_tensors(metadata, state)
            saved = {name for name in metadata.state_dict_metadata if name.startswith("model.")}
            if extra := sorted(saved - {f"model.{name}" for name in state["model"]}):
                raise ValueError(f"the checkpoint has a tensor {extra[0]}, which this model does not have")
        except ValueError as error:
            raise RefusedError(f"{KEY}={folder}: {error}; give a checkpoint of this model") from error

    folder, manifest, origin = sync.on_rank0("find it", look)
    if not allow_mismatch:  # on all ranks: the tokenizer's file may be another on another node
        sync.on_all("compare", lambda: _check_model(folder, manifest, identity, ("model.", "data.tokenizer")))
    try:
        content = sync.on_rank0("read it", lambda: files.read_checked(folder, METADATA, manifest.files))
        metadata = sync.on_all("read it", lambda: read_metadata(content))
        state = {"model": model.state_dict()}
        sync.on_rank0("compare", compare)
        sync.on_all("load it", lambda: read_shards(folder, metadata, manifest.files, state))
    except DamageError as error:
        refuse_damaged(f"{KEY}={folder}", folder, error, sync)
    return origin


def check_begun_from(begun: Origin | None, given: str, root: Path, sync: RankSync) -> None:
    """Refuse to resume from checkpoints under `root` of a run that did not begin from the weights that `given` names.

    begun: what it began from. That may be gone by now, moved, or have newer checkpoints beside it.
    """
    path = Path(os.path.realpath(given))

    def known() -> bool:
        if begun is None:
            return False
        was = Path(begun.path)
        if path in (was, was.parent, was.parent.parent):
            return True
        return any(begun.is_in(folder) for folder in (path, path / was.name, path / "checkpoints" / was.name))

    if sync.on_rank0("compare origins", known):
        return
    began = "with weights of its own" if begun is None else f"from the weights of {begun.path}"
    raise ValueError(
        f"{KEY}={given}, but {root} has checkpoints of a run that began {began}; choose another run.dir to begin from "
        f"{path.name} there, or resume from them with {KEY}={'null' if begun is None else begun.path}"
    )
