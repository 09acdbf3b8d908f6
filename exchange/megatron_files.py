"""Megatron-core's distributed checkpoints (`torch_dist`), read and written by one process without Megatron or a GPU.

They are what torch.distributed.checkpoint writes: `.distcp` files, one torch.save after another, and `.metadata`, which
says where which part of which tensor lies. Beside tensors Megatron keeps small objects, each a torch.save of a list.

Nothing that its pickles name is called or imported: `.metadata` is read as our own is
(megatron_fp4/checkpoint/metadata.py), `common.pt` with stand-ins of which plain values are taken, and tensors with
torch's `weights_only`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from exchange.checkpoint import read_region
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata

COMMON, TRACKER = "common.pt", "latest_checkpointed_iteration.txt"
FILE_BYTES = 1 << 30
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (bool, int, float, str, type(None))


class MegatronFolder:
    """An iteration's folder. folder: its path. tensors: the model's, by key. arguments: Megatron-LM's, as far as they
    are plain values; empty if it kept none. iteration: 0 if it is not known. num_optimizer_tensors: those left out.

    Raises ValueError, in one line that names the folder, if it is none, of another format or not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _iteration_in(folder)
        try:
            _check_format(self.folder)
            with files.open_plain(self.folder / METADATA) as file:
                self._metadata: Metadata = read_metadata(file.readall(), foreign=True)
            common = _read_common(self.folder / COMMON)
        except DamagedCheckpointError as error:
            raise ValueError(f"{self.folder}: {error}") from error
        found = self._metadata.state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: saved
            for name, saved in found.items()
            if isinstance(saved, TensorStorageMetadata) and "optimizer" not in name.split(".")
        }
        self.num_optimizer_tensors = len(found) - len(self.tensors)
        self.arguments: dict[str, Any] = common["args"]
        self.iteration: int = common["iteration"]

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a whole tensor; () without one of that name."""
        return tuple(self.tensors[key].size) if key in self.tensors else ()

    def tensor(self, key: str, layer: int | None = None, rows: int | None = None) -> Tensor:
        """FP32, on the CPU. layer: its place on the first axis, without that axis. rows: how many of the first ones.

        Raises ValueError for pieces that are missing or not readable, or of another type than FP32, BF16 or FP16.
        """
        saved = self.tensors[key]
        if saved.properties.dtype not in _TYPES:
            raise ValueError(f"{self.folder}: {key} is {saved.properties.dtype}; FP32, BF16 and FP16 can be imported")
        region = [slice(0, size) for size in saved.size]
        if layer is not None:
            region[0] = slice(layer, layer + 1)
        if rows is not None:
            region[0 if layer is None else 1] = slice(0, rows)
        try:
            result = read_region(self.folder, self._metadata, key, region)
        except DamagedCheckpointError as error:
            raise ValueError(f"{self.folder}: {error}; copy the folder again") from error
        return result if layer is None else result[0]


def _check_format(folder: Path) -> None:
    """Raise DamagedCheckpointError unless it is a folder of `torch_dist`."""
    try:
        backend = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except FileNotFoundError:
        problem = "it has no metadata.json, so it is none of --ckpt-format torch_dist; save it with that"
        raise DamagedCheckpointError(problem) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"metadata.json is not readable ({error})") from error
    if backend != "torch_dist":
        raise DamagedCheckpointError(f"its format is {backend}; save it with --ckpt-format torch_dist")


def _iteration_in(folder: Path) -> Path:
    """`folder` itself, or the iteration that its tracker file names."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give what Megatron-LM saved to, or an iter_* folder in it")
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    name = tracker.read_text(errors="replace").strip()
    if name != "release" and not name.isdecimal():
        raise ValueError(f"{tracker} says {name[:40]!r}; give the iter_* folder itself")
    found = folder / (name if name == "release" else f"iter_{int(name):07d}")
    if not found.is_dir():
        raise ValueError(f"{found} is missing, which {TRACKER} names; give another iter_* folder")
    return found


def _read_common(path: Path) -> dict[str, Any]:
    """`args` and `iteration` of common.pt. Raises DamagedCheckpointError if it is there and not readable."""
    if not path.exists():
        return {"args": {}, "iteration": 0}
    with files.open_plain(path) as file:
        content = file.readall()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            common = _StandIns(io.BytesIO(archive.read(name))).load()
        arguments = common.get("args") if isinstance(common, Mapping) else None
        state = getattr(arguments, "state", None)
        iteration = common.get("iteration") if isinstance(common, Mapping) else None
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(f"{path.name} is not readable: {type(error).__name__}: {error}") from error
    plain = {str(k): v for k, v in (state or {}).items() if _is_plain(v)} if isinstance(state, dict) else {}
    return {"args": plain, "iteration": iteration if type(iteration) is int and iteration >= 0 else 0}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(v, _PLAIN) for v in value))


class _StandIn:
    """In place of whatever a pickle names: takes everything, does nothing."""

    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> _StandIn:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, *_: Any) -> None: ...

    extend = add = __setitem__ = append


class _StandIns(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_StandIn,), {})  # a pickle can set attributes of classes: each name its own, each time

    def persistent_load(self, pid: Any) -> Any:
        return _StandIn()


class PieceWriter:
    """Writes into `folder`; `finish` makes it readable. A context, which closes the files. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, STORAGE_TYPES] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._names: list[str] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: str, shape: Sequence[int], offsets: Sequence[int], piece: Tensor) -> None:
        """The part of tensor `key` that begins at `offsets`; `shape` is of the whole. Pieces must not overlap."""
        described = self._tensors.get(key)
        if described is None:
            described = TensorStorageMetadata(TensorProperties(piece.dtype), torch.Size(shape), [])
            self._tensors[key] = described
        assert isinstance(described, TensorStorageMetadata) and described.properties.dtype == piece.dtype
        chunk = ChunkStorageMetadata(torch.Size(offsets), piece.shape)
        described.chunks.append(chunk)
        if piece.untyped_storage().nbytes() != piece.nbytes:  # torch.save writes storages whole
            piece = piece.clone()
        self._save(MetadataIndex(key, chunk.offsets), piece)

    def add_object(self, key: str, value: object) -> None:
        """A small object, as a list of one."""
        self._tensors[key] = BytesStorageMetadata()
        self._save(MetadataIndex(key), [value])

    def finish(self) -> None:
        """Close and describe the files. Each tensor has to be whole."""
        self._close()
        for key, described in self._tensors.items():
            if isinstance(described, TensorStorageMetadata):
                assert sum(chunk.sizes.numel() for chunk in described.chunks) == described.size.numel(), key
        paths = {key: (key,) for key in self._tensors}
        content = Metadata(self._tensors, paths, self._places, version="1.0.0")
        files.write_file(self._folder / METADATA, pickle.dumps(content))

    def _save(self, index: MetadataIndex, value: object) -> None:
        if self._file is not None and self._file.tell() >= FILE_BYTES:
            self._close()
        if self._file is None:
            self._names.append(f"__0_{len(self._names)}.distcp")
            self._file = open(self._folder / self._names[-1], "xb", buffering=io.DEFAULT_BUFFER_SIZE)  # noqa: SIM115
        start = self._file.tell()
        try:
            torch.save(value, self._file)
        except RuntimeError as error:  # what torch makes of a full disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        self._places[index] = _StorageInfo(self._names[-1], start, self._file.tell() - start)

    def _close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
