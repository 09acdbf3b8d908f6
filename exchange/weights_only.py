"""A checkpoint without optimizer state, written by one process: what an import makes and `checkpoint.initialize_from`
begins a run from.

It is a checkpoint like any other (megatron_fp4/checkpoint/files.py) of step 0, with `weights_only` in its manifest, so
that every mesh reads it; and it keeps the files that came with the weights, such as the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exchange.new_folder import new_folder
from megatron_fp4 import __version__
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.checkpoint.metadata import METADATA, Piece, Whole, metadata_of
from megatron_fp4.checkpoint.shards import OwnPiece, write_shard
from megatron_fp4.config.environment import as_saved
from megatron_fp4.config.schema import Config

_FILE_BYTES = 1 << 30


class NewTensor(NamedTuple):
    """A parameter to write: our name, global shape, and how to get it (FP32 on the CPU, our row order)."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def write_weights_only(
    folder: Path,
    config: Config,
    tensors: Iterable[NewTensor],
    *,
    imported: Mapping[str, Any],
    tokenizer: str | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write `folder`, which must not exist, whole or not at all; no more than a GiB of tensors, or the largest of them,
    is in memory at a time.

    config: of a run of this model. imported: where the weights come from, of JSON types, for the trainer state.
    tokenizer: its fingerprint if it is known. extra_files: name -> content, kept beside.
    Raises ValueError if it exists, OSError, and what `load` raises.
    """
    with new_folder(folder) as staging:
        records, pieces, wholes = _write_tensors(staging, tensors)
        trainer = {"version": __version__, "config": as_saved(config), "imported": dict(imported)}
        content: dict[str, str | bytes] = {
            **(extra_files or {}),
            files.TRAINER: json.dumps(trainer, indent=1),
            METADATA: metadata_of(wholes, pieces),
        }
        for name, text in content.items():
            records[name] = files.write_file(staging / name, text)
        manifest = files.Manifest(
            save_index=1,
            step=0,
            consumed_samples=0,
            consumed_tokens=0,
            world_size=1,
            identity=run_identity(config, {"tokenizer": tokenizer}),
            files=records,
            torch_version=str(torch.__version__),
            weights_only=True,
        )
        files.write_manifest(staging, manifest)


def _write_tensors(
    folder: Path, tensors: Iterable[NewTensor]
) -> tuple[dict[str, files.FileRecord], dict[str, list[Piece]], list[Whole]]:
    records: dict[str, files.FileRecord] = {}
    layouts: dict[str, list[Piece]] = {}
    wholes: list[Whole] = []
    waiting: list[OwnPiece] = []

    def flush() -> None:
        name = f"__0_{len(records)}.distcp"
        written = write_shard(folder / name, waiting, lambda: False)
        records[name], layouts[name] = written.record, written.layout
        waiting.clear()

    for new in tensors:
        if waiting and sum(p.values.nbytes for p in waiting) + 4 * torch.Size(new.shape).numel() > _FILE_BYTES:
            flush()
        values = new.load()
        assert values.dtype == torch.float32 and tuple(values.shape) == tuple(new.shape), new.name
        waiting.append(OwnPiece(len(wholes), (0,) * values.dim(), tuple(values.shape), values))
        wholes.append(Whole(("model", new.name), torch.float32, tuple(values.shape)))
    if waiting:
        flush()
    return records, layouts, wholes
