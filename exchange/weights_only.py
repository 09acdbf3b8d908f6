"""Writes folders that appear only when they are complete, and checkpoints without optimizer state: what an import
writes and `checkpoint.initialize_from` reads.

Such a checkpoint has the normal format (megatron_fp4/checkpoint/files.py), so every mesh can read it. It is of step 0
and has `weights_only` in its manifest. It also has the files of the tokenizer that was imported with the weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4 import __version__
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.checkpoint.shards import METADATA, OwnPiece, Piece, TensorInfo, metadata_of, write_shard
from megatron_fp4.config.compose import as_saved
from megatron_fp4.config.schema import Config
from megatron_fp4.runtime.revision import revision

FILE_BYTES = 1 << 30


def check_output(output: Path, checkpoint: Path | None = None) -> None:
    """Raise ValueError if `output` exists or is inside `checkpoint`."""
    if os.path.lexists(output):
        raise ValueError(f"{output} exists already; name another folder, or remove it")
    if checkpoint is not None and checkpoint.resolve() in output.resolve().parents:
        raise ValueError(f"{output} is inside the checkpoint {checkpoint}; name another folder")


@contextmanager
def new_folder(output: Path, checkpoint: Path | None = None) -> Iterator[Path]:
    """A folder OUTPUT.tmp to write into. It is renamed to `output` at the end, or removed after an exception.

    Raises ValueError as `check_output` does, and for an OUTPUT.tmp of another command, running or killed; OSError.
    """
    check_output(output, checkpoint)
    staging = output.with_name(f"{output.name}.tmp")
    try:
        staging.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"{staging} exists: another command is writing it, or was killed; remove it then, or name another folder"
        ) from None
    try:
        yield staging
        for path in (*staging.rglob("*"), staging):
            files.sync_folder(path)  # it also syncs files
        check_output(output, checkpoint)
        os.rename(staging, output)
        files.sync_folder(output.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_weights_only(
    folder: Path,
    config: Config,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    imported: Mapping[str, Any],
    tokenizer: str | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write `folder`, which must not exist; it appears only when it is complete.

    config: of a run of this model. tensors: (our name, parameter), FP32 on the CPU, in our row order. imported: the
    origin of the weights, as JSON values, for the trainer state. tokenizer: its fingerprint if it is known.
    extra_files: name -> content of further files.
    Raises ValueError if the folder exists, OSError, and what `tensors` raises.
    """
    parameters = (
        (TensorInfo(("model", name), torch.float32, tuple(values.shape)), values, (0,) * values.dim())
        for name, values in tensors
    )
    with new_folder(folder) as staging:
        records = write_pieces(staging, parameters)
        trainer = {"version": __version__, "commit": revision(), "config": as_saved(config), "imported": dict(imported)}
        content: dict[str, str | bytes] = {**(extra_files or {}), files.TRAINER: json.dumps(trainer, indent=1)}
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


def write_pieces(
    folder: Path,
    pieces: Iterable[tuple[TensorInfo, Tensor, Sequence[int]]],
    objects: Mapping[str, tuple[str, int, int]] | None = None,
) -> dict[str, files.FileRecord]:
    """Write tensors into `folder` in the format of torch.distributed.checkpoint; returns the records of the files. At
    most FILE_BYTES of tensors and one more tensor are in memory.

    pieces: (complete tensor, values, offsets of the values in it). objects: as for `metadata_of`. Raises OSError.
    """
    records: dict[str, files.FileRecord] = {}
    layout: dict[str, list[Piece]] = {}
    numbers: dict[TensorInfo, int] = {}
    waiting: list[OwnPiece] = []

    def flush() -> None:
        name = f"__0_{len(records)}.distcp"
        written = write_shard(folder / name, waiting, lambda: False)
        records[name], layout[name] = written.record, written.layout
        waiting.clear()

    for whole, values, offsets in pieces:
        assert values.dtype == whole.dtype, whole.name
        if waiting and sum(piece.values.nbytes for piece in waiting) + values.nbytes > FILE_BYTES:
            flush()
        number = numbers.setdefault(whole, len(numbers))
        waiting.append(OwnPiece(number, tuple(offsets), tuple(values.shape), values))
    flush()
    records[METADATA] = files.write_file(folder / METADATA, metadata_of([*numbers], layout, objects))
    return records
