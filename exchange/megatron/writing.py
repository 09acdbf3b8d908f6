"""A folder of `torch_dist`, written piece by piece by one process.

It is what torch.distributed.checkpoint reads: `.distcp` files, one torch.save after another, and `.metadata`, which
says where which part of which tensor lies. Beside tensors Megatron keeps small objects, each a torch.save of a list.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

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

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.metadata import METADATA

FILE_BYTES = 1 << 30
_VERSION = "1.0.0"


class PieceWriter:
    """Writes into `folder`; `finish` makes it readable. A context, which closes the files. Raises OSError."""

    def __init__(self, folder: Path, file_bytes: int | None = None) -> None:
        self._folder, self._file_bytes = folder, file_bytes or FILE_BYTES
        self._tensors: dict[str, STORAGE_TYPES] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._names: list[str] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

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
        content = Metadata(self._tensors, paths, self._places, version=_VERSION)
        files.write_file(self._folder / METADATA, pickle.dumps(content))

    def _save(self, index: MetadataIndex, value: object) -> None:
        if self._file is not None and self._file.tell() >= self._file_bytes:
            self._close()
        if self._file is None:
            self._names.append(f"__0_{len(self._names)}.distcp")
            self._file = open(self._folder / self._names[-1], "xb", buffering=io.DEFAULT_BUFFER_SIZE)  # noqa: SIM115
        start = self._file.tell()
        torch.save(value, self._file)
        self._places[index] = _StorageInfo(self._names[-1], start, self._file.tell() - start)

    def _close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
