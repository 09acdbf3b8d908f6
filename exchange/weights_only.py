"""Folders that are written whole or not at all; and a checkpoint without optimizer state, written by one process: what
an import makes and `checkpoint.initialize_from` begins a run from.

The checkpoint is one like any other (megatron_fp4/checkpoint/files.py) of step 0, with `weights_only` in its manifest,
so that every mesh reads it; and it keeps the files of the tokenizer that came with the weights.
"""

from __future__ import annotations

import fcntl
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
from megatron_fp4.checkpoint.shards import METADATA, OwnPiece, Piece, Whole, metadata_of, write_shard
from megatron_fp4.config.compose import as_saved
from megatron_fp4.config.schema import Config
from megatron_fp4.runtime.revision import revision

FILE_BYTES = 1 << 30
_LOCK = ".being_written"


def check_output(output: Path, checkpoint: Path | None = None) -> None:
    """Raise ValueError if `output` exists or lies inside `checkpoint`."""
    if os.path.lexists(output):
        raise ValueError(f"{output} exists already; name another folder, or remove it")
    if checkpoint is not None and checkpoint.resolve() in output.resolve().parents:
        raise ValueError(f"{output} lies inside the checkpoint {checkpoint}; name a folder elsewhere")


@contextmanager
def new_folder(output: Path, checkpoint: Path | None = None) -> Iterator[Path]:
    """A folder OUTPUT.tmp to write into, which becomes `output` if nothing is raised, and goes otherwise.

    What a killed command left under that name is removed: it has our lock file, and no process holds the lock. Raises
    ValueError as `check_output` does, and for any other OUTPUT.tmp; OSError.
    """
    check_output(output, checkpoint)
    staging = output.with_name(f"{output.name}.tmp")
    lock_file = staging / _LOCK
    ours = staging.is_dir() and not staging.is_symlink() and (lock_file.is_file() or not any(staging.iterdir()))
    if os.path.lexists(staging) and not ours:
        raise ValueError(f"{staging} is in the way, and no command like this wrote it; name another folder, or move it")
    staging.mkdir(parents=True, exist_ok=True)
    with open(lock_file, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.path.samestat(os.fstat(lock.fileno()), os.stat(lock_file))
        except (BlockingIOError, FileNotFoundError):
            is_current = False
        except OSError:  # of a file system without locks
            is_current = True
        if not is_current:
            raise ValueError(f"another command is writing {staging}; wait for its end, or name another folder")
        try:
            for left in staging.iterdir():
                if left != lock_file:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield staging
            lock_file.unlink()
            for path in (*staging.rglob("*"), staging):
                files.sync_folder(path)  # a file as well
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
    """Write `folder`, which must not exist, whole or not at all.

    config: of a run of this model. tensors: parameters by our names, FP32 on the CPU, in our row order. imported: where
    the weights come from, of JSON types, for the trainer state. tokenizer: its fingerprint if it is known. extra_files:
    name -> content, kept beside.
    Raises ValueError if it exists, OSError, and what `tensors` raises.
    """
    parameters = (
        (Whole(("model", name), torch.float32, tuple(values.shape)), values, (0,) * values.dim())
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
    pieces: Iterable[tuple[Whole, Tensor, Sequence[int]]],
    objects: Mapping[str, tuple[str, int, int]] | None = None,
) -> dict[str, files.FileRecord]:
    """Write tensors into `folder` as torch.distributed.checkpoint has them; returns the records of the files. A GiB of
    tensors and the next of them are in memory at a time.

    pieces: the whole, part of its values, and where in it they begin. objects: as `metadata_of` takes them.
    Raises OSError.
    """
    records: dict[str, files.FileRecord] = {}
    layout: dict[str, list[Piece]] = {}
    numbers: dict[Whole, int] = {}
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
