"""The tensors and generators of a run as files: what each rank writes, and how any mesh reads it.

A rank writes `__RANK_0.distcp` and, if it has much data, `__RANK_1.distcp` and so on, in parallel. A file is a sequence
of torch.save outputs, in the format of torch.distributed.checkpoint. If several ranks hold the same data, one of them
writes it. A file is hashed while it is written, and while it is read: each rank that needs a part of a file reads the
whole file once. Files that no rank needs are read too. This is the only check of a checkpoint's content.

`.metadata` says where each tensor is, as a pickle in the format of torch.distributed.checkpoint. torch reads it with
`pickle.load`, so whoever can write a checkpoint could run code as its reader. Here pickles.py reads it.
"""

from __future__ import annotations

import gc
import hashlib
import io
import math
import os
import pickle
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError, FileRecord, Manifest
from megatron_fp4.checkpoint.pickles import StandIn, read_pickle
from megatron_fp4.checkpoint.sync import RankSync, RefusedError
from megatron_fp4.training.optimizer import optimizer_state

METADATA = ".metadata"
_CHUNK = 1 << 24
_FILE_BYTES = 1 << 30
_MAX_FILES = 4


class Piece(NamedTuple):
    """A part of a tensor in a rank's file.

    tensor: its index among the tensors. offsets, sizes: of the part in the tensor. start, length: of the part in the
        file, in bytes.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    length: int


class TensorInfo(NamedTuple):
    """A whole tensor: its path in the nested state (`("model", "head.weight")`), dtype and shape."""

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its name in torch.distributed.checkpoint."""
        return ".".join(self.path)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class OwnPiece(NamedTuple):
    """A part of a tensor that this rank writes. tensor: its index among the tensors. values: the live tensor.

    common: replicated data, which every rank loads; it is kept in a file of its own.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor
    common: bool = False


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The live tensors of a run, sharded. Writing into them changes the run."""
    # In this order: model.state_dict() leaves a model of FSDP2 sharded, as optimizer_state needs it.
    return {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}


def tensor_infos(state: dict[str, Any]) -> list[TensorInfo]:
    """The tensors of `state_of`, in the same order on all ranks."""
    return [
        TensorInfo((part, name), tensor.dtype, tuple(tensor.shape))
        for part in state
        for name, tensor in state[part].items()
    ]


def own_pieces(state: dict[str, Any], rank: int) -> list[OwnPiece]:
    """The pieces of `state_of` that this rank writes. Together, the ranks write every tensor once."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, is_coordinator=rank == 0)
    numbers = {info.name: number for number, info in enumerate(tensor_infos(state))}
    pieces = []
    for item in planner.create_local_plan().items:
        number, data, whole = numbers[item.index.fqn], item.tensor_data, planner.state_dict[item.index.fqn]
        assert data is not None
        if not _is_writer(whole, number, rank) or data.chunk.sizes.numel() == 0:
            continue
        if isinstance(whole, DTensor):  # ranks of the tensor-parallel group have other shards, but the same piece
            common = whole.placements[-1].is_replicate() and whole.device_mesh.size(-1) > 1
        else:
            common = dist.get_world_size() > 1
        values = planner.resolve_data(item)
        assert isinstance(values, Tensor)
        pieces.append(OwnPiece(number, tuple(data.chunk.offsets), tuple(data.chunk.sizes), values.detach(), common))
    return pieces


def _is_writer(tensor: Tensor, number: int, rank: int) -> bool:
    """Whether, of all ranks that hold the same part of the tensor, `rank` writes it."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or not bool((mesh.mesh == 0).any()):
        return False  # the mesh does not span the job; the mesh with rank 0 has the same parts
    # Ranks that hold the same take turns, tensor by tensor, so that all write about the same amount.
    return all(
        place == number % mesh.size(axis)
        for axis, (place, placement) in enumerate(zip(coordinate, tensor.placements, strict=True))
        if placement.is_replicate()
    )


# Writing


class Written(NamedTuple):
    """A file that a rank has written: its record, and the pieces in it."""

    record: FileRecord
    layout: list[Piece]


def write_shards(
    folder: Path, rank: int, pieces: Sequence[OwnPiece], abandoned: Callable[[], bool]
) -> dict[str, Written]:
    """Write this rank's pieces to the disk as several files, in parallel; returns the files by name.

    abandoned: called between pieces; if it returns true, writing ends with an error. Raises OSError.
    """
    parts = {f"__{rank}_{number}.distcp": part for number, part in enumerate(_split(pieces))}
    with ThreadPoolExecutor(_MAX_FILES + 1, thread_name_prefix="checkpoint") as pool:
        written = {name: pool.submit(write_shard, folder / name, part, abandoned) for name, part in parts.items()}
    return {name: future.result() for name, future in written.items()}


def _split(pieces: Sequence[OwnPiece]) -> list[list[OwnPiece]]:
    """Split pieces into parts of about the same size, enough of them that hashing in parallel is fast.

    The common pieces are a separate part, so that other ranks need not read a large file for them.
    """
    own, common = ([piece for piece in pieces if piece.common == kind] for kind in (False, True))
    own.sort(key=lambda piece: -piece.values.nbytes)
    count = min(_MAX_FILES, -(-sum(piece.values.nbytes for piece in own) // _FILE_BYTES), len(own))
    return [part for part in (*(own[first::count] for first in range(count)), common) if part]


def write_shard(path: Path, pieces: Sequence[OwnPiece], abandoned: Callable[[], bool]) -> Written:
    """Write pieces as one file."""
    layout = []
    with open(path, "xb", buffering=1 << 20) as raw:
        file = _HashingFile(raw)
        for piece in pieces:
            if abandoned():
                raise InterruptedError("the run ended while it was being written")
            start = file.size
            values = piece.values.cpu()
            if values.untyped_storage().nbytes() != values.nbytes:  # torch.save writes the whole storage
                values = values.clone()
            file.save(values)
            layout.append(Piece(piece.tensor, piece.offsets, piece.sizes, start, file.size - start))
        return Written(file.finish(), layout)


class _HashingFile:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._error: OSError | None = None
        self.size = 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self._error = error
            raise
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing: torch.save calls it after every tensor, and `finish` flushes once."""

    def save(self, tensor: Tensor) -> None:
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]
        except Exception:
            if self._error is not None:  # torch's own error on a full disk is `unexpected pos 704 vs 598`
                raise self._error from None
            raise

    def finish(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self.size, self._hash.hexdigest())


# Reading


def read_shards(folder: Path, metadata: Metadata, records: Mapping[str, FileRecord], state: dict[str, Any]) -> set[str]:
    """Copy the tensors of a checkpoint into `state`, the parts that this rank holds.

    metadata, state: of the same tensors (`check_tensors`). records: of the checkpoint's files. Returns the names of the
    files that were read. Otherwise raises DamagedCheckpointError; then `state` is unusable.
    """
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    wanted: dict[str, dict[int, list[tuple[int, ReadItem]]]] = {}
    for item in planner.finish_plan(planner.create_local_plan()).items:
        place = metadata.storage_data.get(item.storage_index)
        if item.type == LoadItemType.BYTE_IO or place is None:
            raise DamagedCheckpointError(f"{METADATA}: {item.storage_index.fqn} is not a plain tensor")
        of_file = wanted.setdefault(place.relative_path, {})
        of_file.setdefault(place.offset, []).append((place.length, item))
    with ThreadPoolExecutor(_MAX_FILES, thread_name_prefix="checkpoint") as pool:
        reads = [pool.submit(_read_file, folder, name, records, of_file, planner) for name, of_file in wanted.items()]
    for one in reads:
        one.result()
    return set(wanted)


@torch.no_grad()  # here, because it applies to one thread only
def _read_file(
    folder: Path,
    name: str,
    records: Mapping[str, FileRecord],
    wanted: dict[int, list[tuple[int, ReadItem]]],
    planner: DefaultLoadPlanner,
) -> None:
    """Read the whole file, copy the `wanted` parts into their tensors, and compare the file with its record.

    wanted: start of a part -> its length and the tensor's item, for each item that takes it.
    """
    if (record := records.get(name)) is None:
        raise DamagedCheckpointError(f"{METADATA} names the file {name!r}, which the checkpoint does not have")
    digest, position = hashlib.sha256(), 0
    with files.opened(folder, name, record) as raw, io.BufferedReader(raw) as file:
        for start in sorted(wanted):
            length = wanted[start][0][0]
            if start < position or start + length > record.size:
                raise DamagedCheckpointError(f"{METADATA} does not describe {name}")
            _digest_to(start, position, file, digest)
            content = file.read(length)
            digest.update(content)
            for _, item in wanted[start]:
                _put(content, item, planner, name)
            position = start + length
        _digest_to(record.size, position, file, digest)
    if digest.hexdigest() != record.sha256:
        raise files.changed(name)


def _digest_to(end: int, position: int, file: IO[bytes], digest: Any) -> None:
    for start in range(position, end, _CHUNK):
        digest.update(file.read(min(_CHUNK, end - start)))


def _put(content: bytes, item: ReadItem, planner: DefaultLoadPlanner, name: str) -> None:
    try:
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        part = saved[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
    except Exception as error:  # on damaged bytes, torch may raise anything
        raise DamagedCheckpointError(f"{name}: {item.storage_index.fqn} is not readable: {error}", name) from error
    target = planner.resolve_tensor(item).detach()
    if target.shape != part.shape or target.dtype != part.dtype:
        raise DamagedCheckpointError(
            f"{name}: {item.storage_index.fqn} is {part.dtype} {list(part.shape)}, expected {target.dtype} "
            f"{list(target.shape)}"
        )
    target.copy_(part)
    planner.commit_tensor(item, target)


def check_tensors(folder: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """Raise RefusedError if the tensors of the checkpoint in `folder` are not those of the run."""
    texts = {
        "model": ("is of another model", "set the model back, or choose another checkpoint or run.dir"),
        "optimizer": (
            "was saved by another optimizer",
            f"set the optimizer back, or begin another run.dir from its weights: checkpoint.initialize_from={folder}",
        ),
    }
    for part in state:
        if difference := _difference(metadata.state_dict_metadata, part, tensor_infos({part: state[part]})):
            what, remedy = texts[part]
            raise RefusedError(f"{folder} {what}: {difference}; {remedy}")


def _difference(saved: Mapping[str, Any], part: str, tensors: Sequence[TensorInfo]) -> str:
    """How the saved tensors differ first from these of the `model` or the `optimizer`, as text; "" if there is none."""
    for tensor in tensors:
        one = saved.get(tensor.name)
        if not isinstance(one, TensorStorageMetadata):
            return f"the checkpoint has no tensor {tensor.name}, which this {part} has"
        there, here = (one.properties.dtype, [*one.size]), (tensor.dtype, [*tensor.shape])
        if there != here:
            return "{} is {} {} in the checkpoint, {} {} in this {}".format(tensor.name, *there, *here, part)
    known = {tensor.name for tensor in tensors}
    unknown = sorted(name for name in saved if name.startswith(f"{part}.") and name not in known)
    return f"the checkpoint has a tensor {unknown[0]}, which this {part} does not have" if unknown else ""


def check_files(folder: Path, manifest: Manifest, sync: RankSync, names: Collection[str] | None = None) -> None:
    """Check the files `names` (None: all), each rank a share. Raises DamageError on all ranks if one is damaged."""
    mine = sorted(manifest.files if names is None else names)[sync.rank :: sync.world_size]

    def check() -> None:
        for name in mine:
            if problem := files.check_file(folder, name, manifest.files[name]):
                raise problem

    sync.on_all("check it", check)


def load_tensors(folder: Path, manifest: Manifest, state: dict[str, Any], sync: RankSync) -> set[str]:
    """Read tensors of a checkpoint into `state`, each rank the parts that it holds. A collective. Returns the names of
    the files that this rank has read. Raises as `load_checkpoint`."""
    content = sync.on_rank0("read it", lambda: files.read_checked(folder, METADATA, manifest.files))
    metadata = sync.on_all("read it", lambda: read_metadata(content))
    sync.on_all("compare", lambda: check_tensors(folder, metadata, state))
    return sync.on_all("load it", lambda: read_shards(folder, metadata, manifest.files, state))


def load_checkpoint(
    folder: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizer, sync: RankSync, device: torch.device
) -> dict[str, Any]:
    """Read a checkpoint into model, optimizer and generators. A collective. Returns the trainer's state.

    device: of the generators. Raises on all ranks: DamageError if the checkpoint is damaged (then model and optimizer
    must be loaded again), RefusedError if it is of another model, CheckpointError if it cannot be read.
    """
    records = manifest.files
    generators: list[bytes] = []  # on rank 0, those of all ranks

    def read_small() -> dict[str, Any]:
        trainer = files.read_trainer(folder, manifest)
        generators.extend(unpack(files.read_checked(folder, files.RANDOM_STATE, records)))
        if len(generators) != manifest.world_size:
            raise DamagedCheckpointError(f"{len(generators)} ranks' generators of {manifest.world_size}")
        return trainer

    read = load_tensors(folder, manifest, state_of(model, optimizer), sync)
    trainer = sync.on_rank0("read it", read_small)
    of_ranks = sync.gather("check it", lambda: read)
    done = {METADATA, files.TRAINER, files.RANDOM_STATE}
    left = sync.on_rank0("check it", lambda: sorted(records.keys() - done.union(*of_ranks)))
    check_files(folder, manifest, sync, left)
    if manifest.world_size == sync.world_size:
        mine = sync.scatter(generators)
        sync.on_all("restore generators", lambda: restore_random_state(mine, device))
    return trainer


# The metadata: where each tensor is


def metadata_of(
    tensors: Sequence[TensorInfo],
    pieces: Mapping[str, Sequence[Piece]],
    objects: Mapping[str, tuple[str, int, int]] | None = None,
) -> bytes:
    """The content of `.metadata`. pieces: of each file, by its name. objects: others: name -> file, start and length.

    Raises ValueError unless the pieces cover every tensor.
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
    described: dict[str, metadata.STORAGE_TYPES] = {
        tensor.name: TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), of_tensor)
        for tensor, of_tensor in zip(tensors, chunks, strict=True)
    }
    for name, place in (objects or {}).items():
        described[name] = metadata.BytesStorageMetadata()
        storage[MetadataIndex(name)] = filesystem._StorageInfo(*place)
    content = Metadata(
        state_dict_metadata=described,
        planner_data={name: (name,) for name in objects or ()} | {tensor.name: tensor.path for tensor in tensors},
        storage_data=storage,
        version="1.0.0",  # of torch's format
    )
    return pickle.dumps(content)


def read_metadata(content: bytes, foreign: bool = False) -> Metadata:
    """The inverse of `metadata_of`; also reads what torch itself wrote.

    foreign: another program wrote it, with objects other than tensors, of which only the places are kept, and its own
    classes, which are left out. Raises DamagedCheckpointError if it does not describe tensors.
    """
    collects = gc.isenabled()
    gc.disable()  # nothing here is garbage, and collections would take most of the time
    try:
        return _metadata(read_pickle(content, None if foreign else _NAMES), foreign)
    except DamagedCheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(f"{METADATA} is not readable: {type(error).__name__}: {error}") from error
    finally:
        if collects:
            gc.enable()


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_CLASSES = (
    *(Metadata, MetadataIndex, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, torch.Size),
    *(metadata.BytesStorageMetadata, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
)
_NAMES = {
    *map(_name, _CLASSES),
    "torch.serialization._get_layout",
    *("pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PurePosixPath"),
}
# Far above what a tensor has; a pickle can name a long tuple many times.
_MOST_PARTS = 64


def _metadata(read: Any, foreign: bool) -> Metadata:
    """The real Metadata, from values of the expected types. Other values raise any exception."""
    state = _made(read, Metadata).state
    places: dict[MetadataIndex, filesystem._StorageInfo] = {}
    tensors: dict[str, TensorStorageMetadata] = {}
    places_left = len(state["storage_data"])
    for name, saved in state["state_dict_metadata"].items():
        if foreign and getattr(saved, "name", None) != _name(TensorStorageMetadata):
            continue
        places_left -= len(_made(saved, TensorStorageMetadata).state["chunks"])
        _expect(isinstance(name, str) and places_left >= 0)  # each chunk has a place
        tensors[name] = _tensor(saved)
    for key, value in state["storage_data"].items():
        index, place = _made(key, MetadataIndex).state, _made(value, filesystem._StorageInfo).state
        is_object = foreign and index["fqn"] not in tensors
        if is_object and index.get("offset") is not None:
            continue
        path = place["relative_path"]
        _expect(isinstance(path, str) and isinstance(index["fqn"], str) and not place.get("transform_descriptors"))
        real = MetadataIndex(index["fqn"], None if is_object else _size(index["offset"]))
        places[real] = filesystem._StorageInfo(path, _count(place["offset"]), _count(place["length"]))
    paths = {}
    for name, path in (state.get("planner_data") or {}).items():
        _expect(isinstance(name, str) and len(path) < _MOST_PARTS)
        paths[name] = tuple(part if isinstance(part, str) else str(_count(part)) for part in path)
    return Metadata({**tensors}, paths, places, version=str(state.get("version")))


def _tensor(saved: Any) -> TensorStorageMetadata:
    state = saved.state
    dtype = _made(state["properties"], TensorProperties).state[0]
    _expect(isinstance(dtype, torch.dtype))
    places = [_made(chunk, ChunkStorageMetadata).state for chunk in state["chunks"]]
    chunks = [ChunkStorageMetadata(_size(place["offsets"]), _size(place["sizes"])) for place in places]
    return TensorStorageMetadata(TensorProperties(dtype), _size(state["size"]), chunks)


def _size(size: Any) -> torch.Size:
    (sizes,) = _made(size, torch.Size).arguments
    _expect(len(sizes) < _MOST_PARTS)
    return torch.Size(map(_count, sizes))


def _made(thing: Any, cls: type) -> StandIn:
    _expect(isinstance(thing, StandIn) and thing.name == _name(cls))
    return thing  # type: ignore[no-any-return]


def _count(value: Any) -> int:
    _expect(type(value) is int and value >= 0)
    return int(value)


def _expect(condition: bool) -> None:
    if not condition:
        raise DamagedCheckpointError(f"{METADATA} does not describe a checkpoint")


# Random generators of one rank: Python, NumPy, torch on the CPU and on its GPU. Data order and stochastic rounding do
# not use these (they are functions of the seed and the step); everything else that draws resumes with them.


def capture_random_state(device: torch.device) -> bytes:
    """The generator states of this process."""
    numpy_state: Any = np.random.get_state(legacy=False)
    # Only tensors and plain types, so that loading runs no code from the file.
    state = {
        "python": random.getstate(),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_rest": (int(numpy_state["state"]["pos"]), int(numpy_state["has_gauss"]), float(numpy_state["gauss"])),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def restore_random_state(content: bytes, device: torch.device) -> None:
    """Restore this process's generators from `capture_random_state`; a GPU's only if one was saved."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    random.setstate(state["python"])
    position, has_gauss, gauss = state["numpy_rest"]
    np.random.set_state(("MT19937", state["numpy_key"].numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def pack(states: Sequence[bytes]) -> bytes:
    """The states of all ranks as one file."""
    buffer = io.BytesIO()
    torch.save([torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states], buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> list[bytes]:
    """The inverse of `pack`."""
    return [state.numpy().tobytes() for state in torch.load(io.BytesIO(content), weights_only=True)]
