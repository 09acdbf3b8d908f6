"""Beginning a run from the weights alone of a checkpoint: `checkpoint.initialize_from=PATH`.

PATH is a checkpoint of another run or its folder, of which the newest intact checkpoint is taken, or an imported
checkpoint, which holds nothing but weights. The run begins at step 0: moments, generators, precision switch, schedule
and data are those of a new run. Any mesh reads it, every rank the files that hold something of its shards, each file
compared with its SHA-256 on the way.

What the run began from is in the trainer state of all its checkpoints, as `initialized_from`, like a branch's `origin`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.config_diff import identity_differences, run_identity
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest, Origin
from megatron_fp4.checkpoint.find import confirm
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata
from megatron_fp4.checkpoint.shards import read_shards, wholes_of
from megatron_fp4.checkpoint.sync import CheckpointError, DamageError, RankSync
from megatron_fp4.config.schema import Config, ConfigError

logger = logging.getLogger(__name__)

KEY = "checkpoint.initialize_from"
# What weights that are there do not depend on: how others would be drawn, and in what pieces the scan is computed.
_FREE = {"model.init_std", "model.mamba_chunk_size"}
_OF_WEIGHTS = ("model.", "data.tokenizer")


class Source(NamedTuple):
    """A checkpoint to begin from."""

    folder: Path
    manifest: Manifest
    origin: Origin


def check_initialization(config: Config) -> None:
    """Raise ConfigError if `checkpoint.initialize_from` cannot be begun from: no checkpoint, or of another model.

    Reads manifests only. A run that has checkpoints of its own resumes from those, whatever has become of the path.
    """
    settings = config.checkpoint
    if settings.initialize_from is None:
        return
    given = settings.initialize_from
    if settings.resume not in ("auto", "required", "never"):
        raise ConfigError(
            f"{KEY}={given} takes weights alone and checkpoint.resume={settings.resume} all of a checkpoint; give one "
            "of them"
        )
    if has_begun(config.run.dir):
        return
    try:
        sources, _ = find_sources(Path(given))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    if not settings.allow_mismatch and (problem := mismatch(sources[0], run_identity(config, {}), "model.")):
        raise ConfigError(problem)


def has_begun(run_dir: str | Path) -> bool:
    """Whether a run has checkpoints, whole or not."""
    return bool(files.list_checkpoints(Path(run_dir) / "checkpoints"))


def find_sources(given: Path) -> tuple[list[Source], list[str]]:
    """The checkpoint in the folder `given`, or those of the run in it, the newest first, at least one; and what is
    wrong with others there.

    Only manifests are looked at. Raises ValueError, with the remedy, if there is none, and OSError.
    """
    given = Path(os.path.realpath(given))
    if not given.is_dir():
        raise ValueError(f"{KEY}={given} is not a folder; give a checkpoint, or the folder of a run that has some")
    folders = [given]
    if not (given / files.MANIFEST).exists():
        folders = files.list_checkpoints(given / "checkpoints") or files.list_checkpoints(given)
    if not folders:
        raise ValueError(
            f"{KEY}={given} has no checkpoint; give the path of one, such as RUN/checkpoints/step_00000200, or of a "
            "run that has some"
        )
    found, problems = [], []
    for folder in folders:
        try:
            manifest = files.read_manifest(folder)
            found.append(Source(folder, manifest, Origin.at(folder, manifest)))
        except files.OtherFormatError as error:  # it may be the newest and whole: nothing older is taken instead
            raise ValueError(f"{KEY}={folder} is of another version: {error}; give another checkpoint") from error
        except (DamagedCheckpointError, IsADirectoryError) as error:
            problems.append(f"{folder.name}: {error}")
    if not found:
        raise ValueError(f"{KEY}={given} is damaged: {'; '.join(problems)}; give another checkpoint")
    return sorted(found, key=lambda source: source.manifest.save_index, reverse=True), problems


def mismatch(source: Source, identity: Mapping[str, Any], key: str = "") -> str | None:
    """Why the weights of `source` are not for the run of this `identity`, with every key that differs; None if they
    are. key: compare only those that begin so."""
    relevant = [
        {name: value for name, value in facts.items() if name not in _FREE and name.startswith(key or _OF_WEIGHTS)}
        for facts in (source.manifest.identity, identity)
    ]
    differences = identity_differences(*relevant)
    if not differences:
        return None
    return (
        f"{KEY}={source.folder} is of another model or tokenizer: {'; '.join(differences)}. Set these keys back, give "
        "another checkpoint, or begin all the same with checkpoint.allow_mismatch=true"
    )


def initialize_weights(
    given: str,
    model: nn.Module,
    identity: Mapping[str, Any],
    sync: RankSync,
    *,
    allow_mismatch: bool,
) -> Origin:
    """Load the weights that `given` names into `model`; a collective. Returns where they are from.

    identity: the run's (config_diff.py). Raises ValueError on all ranks, in one line, for what the user has to decide:
    no checkpoint, another model or tokenizer, damage; CheckpointError if reading fails otherwise.
    """

    def look() -> tuple[list[Source], str | None]:
        try:
            found, problems = find_sources(Path(given))
        except ValueError as error:
            return [], str(error)
        for problem in problems:
            logger.error("CHECKPOINT DAMAGED: under %s, %s", given, problem)
        return found, None

    sources, refusal = sync.on_rank0("find it", look)
    _refuse(refusal)
    damaged: list[str] = []
    for source in sources:
        if not allow_mismatch:
            _refuse(_of_any_rank(source, identity, sync))
        try:
            _load(source, model, sync)
            return source.origin
        except DamageError as error:
            confirm(source.folder, error, sync)
            if error.unreadable:
                raise CheckpointError(f"{KEY}={given} cannot be read: {error.reasons}") from error
            damaged.append(f"{source.folder.name}: {error.reasons}")
            if sync.rank == 0:
                logger.error("CHECKPOINT DAMAGED: %s: %s", source.folder, error.reasons)
    raise ValueError(f"{KEY}={given} is damaged: {'; '.join(damaged)}; give another checkpoint")


def _of_any_rank(source: Source, identity: Mapping[str, Any], sync: RankSync) -> str | None:
    problems = sync.gather("compare", lambda: mismatch(source, identity))
    return sync.on_rank0("compare", lambda: next(filter(None, problems), None))


def _load(source: Source, model: nn.Module, sync: RankSync) -> None:
    """Read the weights; raises DamageError on all ranks, after which `model` holds nothing that can be used."""
    folder, records = source.folder, source.manifest.files
    content = sync.on_rank0("read it", lambda: files.read_checked(folder, METADATA, records))
    metadata = sync.on_all("read it", lambda: read_metadata(content))
    state = {"model": model.state_dict()}
    _refuse(sync.on_rank0("compare", lambda: _tensor_problem(folder, metadata, state)))
    sync.on_all("load it", lambda: read_shards(folder, metadata, records, state))


def _tensor_problem(folder: Path, metadata: Metadata, state: dict[str, Any]) -> str | None:
    """The first tensor of the model that the checkpoint does not have as it is here, or the other way round."""
    expected = {whole.name: f"{whole.dtype} {list(whole.shape)}" for whole in wholes_of(state)}
    saved = {
        name: f"{tensor.properties.dtype} {list(tensor.size)}"
        for name, tensor in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(tensor, TensorStorageMetadata)
    }
    for name in (*expected, *saved):
        there, here = saved.get(name, "not there"), expected.get(name, "not there")
        if there != here:
            return (
                f"{KEY}={folder}: tensor {name.removeprefix('model.')} is {there} in the checkpoint, {here} in this "
                "model; give a checkpoint of this model"
            )
    return None


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
        moved = (path, path / was.name, path / "checkpoints" / was.name)
        return any(begun.is_in(folder) for folder in moved)

    if sync.on_rank0("compare origins", known):
        return
    began = "with weights of its own" if begun is None else f"from the weights of {begun.path}"
    raise ValueError(
        f"{KEY}={given}, but {root} has checkpoints of a run that began {began}; choose another run.dir to begin from "
        f"{path.name} there, or resume from them with {KEY}={'null' if begun is None else begun.path}"
    )


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ValueError(problem)
