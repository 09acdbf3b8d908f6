"""The `.metadata` file of torch.distributed.checkpoint: written once, and read without running what is in it.

It is a pickle, and torch reads it with `pickle.load`: whoever can write a checkpoint could run commands as the one who
reads it. Here nothing that it names is called and no class that it names is touched: it makes stand-ins, and what of
them describes tensors is taken over. Anything else is damage.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
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


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_NAMES = (
    *map(_name, (Metadata, MetadataIndex, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata)),
    *map(_name, (metadata.BytesStorageMetadata, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING)),
    *map(_name, (filesystem._StorageInfo, torch.Size)),
    "torch.serialization._get_layout",
    *("pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PurePosixPath"),
)


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
        return math.prod(self.shape) * self.dtype.itemsize


def metadata_of(tensors: Sequence[Whole], pieces: Mapping[str, Sequence[Piece]]) -> bytes:
    """The content of `.metadata`. pieces: of each file, by its name.

    Raises ValueError unless the pieces make up every tensor.
    """
    chunks: list[list[ChunkStorageMetadata]] = [[] for _ in tensors]
    storage: dict[MetadataIndex, filesystem._StorageInfo] = {}
    written = [0] * len(tensors)
    for file, of_file in pieces.items():
        for number, offsets, sizes, start, length in of_file:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            storage[MetadataIndex(tensors[number].name, chunk.offsets)] = filesystem._StorageInfo(file, start, length)
            chunks[number].append(chunk)
            written[number] += math.prod(sizes)
    for tensor, count in zip(tensors, written, strict=True):
        if count != math.prod(tensor.shape):
            raise ValueError(f"{count} of {math.prod(tensor.shape)} elements of {tensor.name} were written")
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


def read_metadata(content: bytes, foreign: bool = False) -> Metadata:
    """The inverse of `metadata_of`, also of what torch itself wrote.

    foreign: another program wrote it, with objects besides tensors and classes of its own, which are left out.
    Raises DamagedCheckpointError if it is anything but the description of tensors.
    """
    try:
        return _StandIns(content, foreign).metadata()
    except DamagedCheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(f"{METADATA} is not readable: {type(error).__name__}: {error}") from error


class _Thing:
    """What a pickle made: of a class that only this one reading has, because a pickle can set attributes of classes.

    It takes whatever fills a list, a set or a dictionary, and keeps nothing of that.
    """

    state: Any = None

    def __new__(cls, *arguments: Any) -> _Thing:
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, *_: Any) -> None: ...

    extend = add = __setitem__ = append


class _StandIns(pickle.Unpickler):
    """Makes a stand-in for every class that a checkpoint holds (foreign: for whatever is named)."""

    def __init__(self, content: bytes, foreign: bool) -> None:
        super().__init__(io.BytesIO(content))
        self._foreign = foreign
        self._classes: dict[str, type[_Thing]] = {name: type(name, (_Thing,), {}) for name in _NAMES}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if full not in self._classes and not self._foreign:
            raise DamagedCheckpointError(f"{METADATA} names {full}, which no checkpoint holds; nothing of it was run")
        return self._classes.setdefault(full, type("Foreign", (_Thing,), {}))

    def metadata(self) -> Metadata:
        """The real thing, of values of the expected types. Raises whatever other values come to."""
        state = self._made(self.load(), Metadata).state
        tensors = {
            str(name): self._tensor(saved)
            for name, saved in state["state_dict_metadata"].items()
            if not self._foreign or isinstance(saved, self._classes[_name(TensorStorageMetadata)])
        }
        places = {}
        for key, value in state["storage_data"].items():
            index, place = self._made(key, MetadataIndex).state, self._made(value, filesystem._StorageInfo).state
            if self._foreign and str(index["fqn"]) not in tensors:
                continue
            path = place["relative_path"]
            _expect(isinstance(path, str) and not place.get("transform_descriptors"))
            real = MetadataIndex(str(index["fqn"]), self._size(index["offset"]))
            places[real] = filesystem._StorageInfo(path, _count(place["offset"]), _count(place["length"]))
        paths = {str(name): tuple(map(str, path)) for name, path in (state.get("planner_data") or {}).items()}
        return Metadata({**tensors}, paths, places, version=str(state.get("version")))

    def _tensor(self, saved: Any) -> TensorStorageMetadata:
        state = self._made(saved, TensorStorageMetadata).state
        dtype = self._made(state["properties"], TensorProperties).state[0]
        _expect(isinstance(dtype, torch.dtype))
        places = [self._made(chunk, ChunkStorageMetadata).state for chunk in state["chunks"]]
        chunks = [ChunkStorageMetadata(self._size(place["offsets"]), self._size(place["sizes"])) for place in places]
        return TensorStorageMetadata(TensorProperties(dtype), self._size(state["size"]), chunks)

    def _size(self, size: Any) -> torch.Size:
        return torch.Size(map(_count, self._made(size, torch.Size).arguments[0]))

    def _made(self, thing: Any, cls: type) -> _Thing:
        _expect(isinstance(thing, self._classes[_name(cls)]))
        made: _Thing = thing
        return made


def _count(value: Any) -> int:
    _expect(type(value) is int and value >= 0)
    count: int = value
    return count


def _expect(condition: bool) -> None:
    if not condition:
        raise DamagedCheckpointError(f"{METADATA} does not describe a checkpoint")
