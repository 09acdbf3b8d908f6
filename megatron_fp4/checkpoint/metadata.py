"""The `.metadata` file of torch.distributed.checkpoint: written once, and read without running what is in it.

It is a pickle, and torch reads it with `pickle.load`: whoever can write a checkpoint could run commands as the one who
reads it. Here only the dataclasses that it is made of are constructed; anything else is damage.
"""

from __future__ import annotations

import contextlib
import gc
import io
import pathlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fp4.checkpoint.files import DamagedCheckpointError

METADATA = ".metadata"
_VERSION = "1.0.0"  # torch's, of the format
_CLASSES = {
    f"{cls.__module__}.{cls.__qualname__}": cls
    for cls in (
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
        TensorProperties,
        ChunkStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
    )
}
_FUNCTIONS = {"torch.serialization._get_layout": torch.serialization._get_layout}
_PATHS = ("pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PurePosixPath")


class Piece(NamedTuple):
    """A part of a tensor in a rank's file.

    tensor: its place in the list of names. offsets, sizes: where in the tensor. start, length: where in the file, in
        bytes.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    length: int


class Whole(NamedTuple):
    """A whole tensor: its path in the nested state (`("model", "head.weight")`), dtype and shape."""

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """As torch.distributed.checkpoint flattens it."""
        return ".".join(self.path)

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """A thousand ranks make millions of small objects, which the collector would look through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_gc()
def metadata_of(tensors: Sequence[Whole], pieces: Mapping[str, Sequence[Piece]]) -> bytes:
    """The content of `.metadata`. pieces: of each file, by its name."""
    # Weights and both moments are cut alike: the same objects, which a pickle then holds once.
    chunks_of: dict[tuple[tuple[int, ...], tuple[int, ...]], ChunkStorageMetadata] = {}
    chunks: list[list[ChunkStorageMetadata]] = [[] for _ in tensors]
    names = [tensor.name for tensor in tensors]
    storage: dict[MetadataIndex, filesystem._StorageInfo] = {}
    for file, of_file in pieces.items():
        for number, offsets, sizes, start, length in of_file:
            chunk = chunks_of.get((offsets, sizes))
            if chunk is None:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                chunks_of[offsets, sizes] = chunk
            storage[MetadataIndex(names[number], chunk.offsets)] = filesystem._StorageInfo(file, start, length)
            chunks[number].append(chunk)
    content = Metadata(
        state_dict_metadata={
            tensor.name: TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), of_tensor)
            for tensor, of_tensor in zip(tensors, chunks, strict=True)
        },
        planner_data={tensor.name: tensor.path for tensor in tensors},
        storage_data=storage,
        version=_VERSION,
    )
    return pickle.dumps(content)


@_without_gc()
def read_metadata(content: bytes) -> Metadata:
    """The inverse of `metadata_of`, also of what torch itself wrote.

    Raises DamagedCheckpointError if it is anything but the description of tensors.
    """
    try:
        read = _Restricted(io.BytesIO(content)).load()
    except DamagedCheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(f"{METADATA} is not readable: {type(error).__name__}: {error}") from error
    if not isinstance(read, Metadata) or not isinstance(read.storage_data, dict):
        raise DamagedCheckpointError(f"{METADATA} does not describe a checkpoint")
    return read


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _CLASSES:
            return _CLASSES[full]
        if full in _FUNCTIONS:
            return _FUNCTIONS[full]
        if full in _PATHS:
            return pathlib.PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise DamagedCheckpointError(f"{METADATA} names {full}, which no checkpoint holds; it was not written by this")
