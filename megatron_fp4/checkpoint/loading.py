"""Read one checkpoint into model, optimizer and generators, as all ranks together do it.

Every file is hashed while the ranks that need something in it read it, once; what no rank needs is read as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata
from megatron_fp4.checkpoint.random_state import restore_random_state, unpack
from megatron_fp4.checkpoint.shards import check_names, read_shards, state_of, verify
from megatron_fp4.checkpoint.together import Together


def check_files(
    folder: Path, manifest: files.Manifest, together: Together, names: Collection[str] | None = None
) -> None:
    """Read `names` (None: all files), each rank its share. Raises DamageError on all ranks if one is not whole."""
    mine = sorted(manifest.files if names is None else names)[together.rank :: together.world_size]
    together.each("check it", lambda: verify(folder, manifest.files, mine))


def load_checkpoint(
    folder: Path,
    manifest: files.Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    together: Together,
    device: torch.device,
) -> dict[str, Any]:
    """Read a checkpoint into model, optimizer and generators; returns the trainer's state.

    device: whose generators these are. Raises DamageError on all ranks if it is not whole (what was read into must then
    be read into again), CheckpointError if it cannot be read or is of another model, ValueError if it is of another
    run.
    """
    records = manifest.files
    content = together.first("read it", lambda: files.read_checked(folder, METADATA, _record(records, METADATA)))
    metadata = together.each("read it", lambda: read_metadata(content))
    state = state_of(model, optimizer)
    together.each("load it", lambda: check_names(metadata, state))
    read = together.each("load it", lambda: read_shards(folder, metadata, records, state))
    generators: list[bytes] = []  # rank 0's

    def read_small() -> dict[str, Any]:
        trainer, of_ranks = _small_files(folder, records)
        if len(of_ranks) != manifest.world_size:
            raise files.DamagedCheckpointError(f"{len(of_ranks)} ranks' generators of {manifest.world_size}")
        generators.extend(of_ranks)
        return trainer

    trainer = together.first("read it", read_small)
    of_ranks = together.collect("check it", lambda: read)
    left = together.first("check it", lambda: _left(records, of_ranks))
    check_files(folder, manifest, together, left)
    if manifest.world_size == together.world_size:
        mine = together.scatter(generators)
        together.each("restore generators", lambda: restore_random_state(mine, device))
    return trainer


def _record(records: Mapping[str, files.FileRecord], name: str) -> files.FileRecord:
    if name not in records:
        raise files.DamagedCheckpointError(f"{files.MANIFEST} does not name {name}")
    return records[name]


def _small_files(folder: Path, records: Mapping[str, files.FileRecord]) -> tuple[dict[str, Any], list[bytes]]:
    """The trainer's state and the generators of all ranks."""
    trainer = json.loads(files.read_checked(folder, files.TRAINER, _record(records, files.TRAINER)))
    if files.RANDOM_STATE in records:
        return trainer, unpack(files.read_checked(folder, files.RANDOM_STATE, records[files.RANDOM_STATE]))
    of_ranks = sorted(name for name in records if name.startswith("rng_"))  # format 1
    return trainer, [files.read_checked(folder, name, records[name]) for name in of_ranks]


def _left(records: Mapping[str, files.FileRecord], of_ranks: list[set[str]]) -> list[str]:
    """Files that nobody has read: of ranks whose part no rank of this job needs."""
    small = {METADATA, files.TRAINER, files.RANDOM_STATE, *(name for name in records if name.startswith("rng_"))}
    return sorted(records.keys() - small - set().union(*of_ranks))
