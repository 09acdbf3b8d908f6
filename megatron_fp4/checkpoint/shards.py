"""The tensors and generators of a run as files: what each rank writes, and how any mesh reads it back.

A rank writes `__RANK_0.distcp` and, if it has much, `__RANK_1.distcp` and so on, side by side, which
torch.distributed.checkpoint's readers understand: one torch.save after another.
Of what several ranks hold alike, one of them writes it: which follows from its placement, without asking. A file is
hashed while it is written, and while it is read: each is read once from the first byte to the last, by the ranks that
need something in it, which is the whole check of a checkpoint; what no rank needs is read as well.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torch.futures import Future

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError, FileRecord, Manifest
from megatron_fp4.checkpoint.metadata import METADATA, Piece, Whole, read_metadata
from megatron_fp4.checkpoint.sync import RankSync
from megatron_fp4.training.optimizer import optimizer_state

_CHUNK = 1 << 24
_FILE_BYTES = 1 << 30
_MAX_FILES = 4


class OwnPiece(NamedTuple):
    """A part of a tensor that this rank writes; `tensor` is its place among the names. values: the live ones.

    common: ranks that need nothing else of this one's need it.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor
    common: bool = False


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The live tensors of a run, sharded: writing into them changes the run."""
    # In this order: asking an FSDP model for its state leaves it sharded, which optimizer_state needs.
    return {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}


def wholes_of(state: dict[str, Any]) -> list[Whole]:
    """The tensors of `state_of`, in an order that is the same on all ranks."""
    return [
        Whole((part, name), tensor.dtype, tuple(tensor.shape)) for part in state for name, tensor in state[part].items()
    ]


def own_pieces(state: dict[str, Any], rank: int) -> list[OwnPiece]:
    """What this rank writes of `state_of`; together the ranks write every tensor once."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, is_coordinator=rank == 0)
    numbers = {whole.name: number for number, whole in enumerate(wholes_of(state))}
    pieces = []
    for item in planner.create_local_plan().items:
        number, data = numbers[item.index.fqn], item.tensor_data
        assert data is not None
        whole = planner.state_dict[item.index.fqn]
        if not _is_writer(whole, number, rank) or data.chunk.sizes.numel() == 0:
            continue
        values = planner.resolve_data(item)
        assert isinstance(values, Tensor)
        place = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        pieces.append(OwnPiece(number, *place, values.detach(), _is_common(whole)))
    return pieces


def _is_writer(tensor: Tensor, number: int, rank: int) -> bool:
    """Whether `rank` writes its part of the tensor, of those that hold the same part."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or not bool((mesh.mesh == 0).any()):
        return False  # the mesh does not span the job, and the part of it with rank 0 has the same
    # Tensor by tensor another of those that hold the same, so that each writes about as much.
    return all(
        place == number % mesh.size(axis)
        for axis, (place, placement) in enumerate(zip(coordinate, tensor.placements, strict=True))
        if placement.is_replicate()
    )


def _is_common(tensor: Tensor) -> bool:
    """Whether ranks with other shards hold the same: those of a tensor-parallel group, or all."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size() > 1
    return tensor.placements[-1].is_replicate() and tensor.device_mesh.size(-1) > 1


class Written(NamedTuple):
    """A file of a rank: what it is, and where each piece lies in it."""

    record: FileRecord
    layout: list[Piece]


def write_shards(
    folder: Path, rank: int, pieces: Sequence[OwnPiece], abandoned: Callable[[], bool]
) -> dict[str, Written]:
    """Write this rank's pieces down to the disk, as some files at a time; returns the files by name.

    abandoned: asked between pieces; when true, an error ends the writing. Raises OSError.
    """
    parts = split(pieces)
    with ThreadPoolExecutor(max(len(parts), 1), thread_name_prefix="checkpoint") as pool:
        files_of_parts = [
            (name := f"__{rank}_{number}.distcp", pool.submit(write_shard, folder / name, part, abandoned))
            for number, part in enumerate(parts)
        ]
    return {name: future.result() for name, future in files_of_parts}


def split(pieces: Sequence[OwnPiece]) -> list[list[OwnPiece]]:
    """Into parts of about the same size, so many that hashing them one beside the other does not take long.

    What others need besides their own has a part to itself: they must not read a large file for it.
    """
    own, common = ([piece for piece in pieces if piece.common == kind] for kind in (False, True))
    total = sum(piece.values.nbytes for piece in own)
    count = min(_MAX_FILES, -(-total // _FILE_BYTES), len(own))
    parts: list[list[OwnPiece]] = [[] for _ in range(count)] + ([common] if common else [])
    sizes = [0] * count
    for piece in sorted(own, key=lambda piece: -piece.values.nbytes):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(piece)
        sizes[smallest] += piece.values.nbytes
    return parts


def write_shard(path: Path, pieces: Sequence[OwnPiece], abandoned: Callable[[], bool]) -> Written:
    """Write pieces as one file."""
    layout = []
    with _HashingFile(path) as file:
        for piece in pieces:
            if abandoned():
                raise InterruptedError("the run ended while it was being written")
            start = file.size
            values = piece.values.cpu()
            if values.untyped_storage().nbytes() != values.nbytes:  # torch.save writes storages whole
                values = values.clone()
            file.save(values)
            layout.append(Piece(piece.tensor, piece.offsets, piece.sizes, start, file.size - start))
        return Written(file.finish(), layout)


class _HashingFile:
    """A new file, hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115
        self._hash = hashlib.sha256()
        self._error: OSError | None = None
        self.size = 0

    def __enter__(self) -> _HashingFile:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._file.close()
        except OSError:
            if error[0] is None:
                raise

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
        """torch.save asks for it after every tensor; `finish` does it once."""

    def save(self, tensor: Tensor) -> None:
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]
        except Exception:
            if self._error is not None:  # of a full disk torch says `unexpected pos 704 vs 598`
                raise self._error from None
            raise

    def finish(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self.size, self._hash.hexdigest())


def read_shards(folder: Path, metadata: Metadata, records: dict[str, FileRecord], state: dict[str, Any]) -> set[str]:
    """Copy the tensors of a checkpoint into `state_of`, those parts that this rank holds.

    records: what the files must be. Returns the names of the files that were read and are as they must be.
    Raises DamagedCheckpointError if one is not, after which `state` holds nothing that can be used, and ValueError if
    the tensors of the checkpoint are not those of the run.
    """
    reader = CheckedReader(folder, records, metadata)
    planner = DefaultLoadPlanner()
    check_names(metadata, state)
    with torch.no_grad():
        planner.set_up_planner(state, metadata, is_coordinator=False)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner)
    return reader.read


def check_names(metadata: Metadata, state: dict[str, Any]) -> None:
    """Raise ValueError if the tensors of a checkpoint are not those of the run."""
    expected = {whole.name: whole.shape for whole in wholes_of(state)}
    for name, shape in expected.items():
        saved = metadata.state_dict_metadata.get(name)
        if saved is None or not hasattr(saved, "size"):
            raise ValueError(f"the checkpoint has no tensor {name}, which this model has")
        if tuple(saved.size) != shape:
            raise ValueError(f"{name} is {list(saved.size)} in the checkpoint, {list(shape)} in this model")


class CheckedReader(FileSystemReader):
    """Reads a checkpoint for torch.distributed.checkpoint's `load`, without unpickling what it does not know.

    records: of the files, which are then read whole and compared; None: only what is asked for is read, unchecked.
    read: names of the files that were compared.
    """

    def __init__(
        self, folder: Path, records: dict[str, FileRecord] | None = None, metadata: Metadata | None = None
    ) -> None:
        super().__init__(folder)
        self.read: set[str] = set()
        self._folder, self._records, self._metadata = folder, records, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises OSError and DamagedCheckpointError."""
        if self._metadata is None:
            self._metadata = read_metadata((self._folder / METADATA).read_bytes())
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises OSError and DamagedCheckpointError."""
        wanted: dict[str, dict[int, list[tuple[int, ReadItem]]]] = {}
        for item in plan.items:
            place = self.storage_data.get(item.storage_index)
            if item.type == LoadItemType.BYTE_IO or place is None or place.transform_descriptors:
                raise DamagedCheckpointError(f"{METADATA}: {item.storage_index.fqn} is not a plain tensor")
            of_file = wanted.setdefault(place.relative_path, {})
            of_file.setdefault(place.offset, []).append((place.length, item))
        with ThreadPoolExecutor(_MAX_FILES, thread_name_prefix="checkpoint") as pool:
            read = {name: pool.submit(self._read_file, name, of_file, planner) for name, of_file in wanted.items()}
        self.read |= {name for name in sorted(read) if read[name].result()}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.no_grad()  # which holds for one thread
    def _read_file(self, name: str, wanted: dict[int, list[tuple[int, ReadItem]]], planner: LoadPlanner) -> bool:
        """Returns whether it was compared with its record."""
        record = None if self._records is None else self._records.get(name)
        if Path(name).name != name or (self._records is not None and record is None):
            raise DamagedCheckpointError(f"{METADATA} names the file {name!r}, which the checkpoint does not have")
        digest, position = hashlib.sha256(), 0
        with files.reading(name), self._open(name, record) as file:
            size = os.fstat(file.fileno()).st_size
            for start in sorted(wanted):
                length = wanted[start][0][0]
                if not 0 <= start <= start + length <= size or start < position:
                    raise DamagedCheckpointError(f"{METADATA} does not describe {name}")
                if record is None:
                    file.seek(start)
                else:
                    _digest_to(file, start - position, digest, name)
                content = read_exactly(file, length, name)
                if record is not None:
                    digest.update(content)
                for _, item in wanted[start]:
                    _put(content, item, planner, name)
                position = start + length
            if record is not None:
                _digest_to(file, size - position, digest, name)
                if digest.hexdigest() != record.sha256:
                    raise DamagedCheckpointError(files.changed(name), name)
        return record is not None

    def _open(self, name: str, record: FileRecord | None) -> io.FileIO:
        if record is None:
            return files.open_plain(self._folder / name)
        return files.open_sized(self._folder, name, record)


def _put(content: bytes, item: ReadItem, planner: LoadPlanner, name: str) -> None:
    try:
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        part = saved[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
    except Exception as error:  # whatever torch makes of damaged bytes
        raise DamagedCheckpointError(f"{name}: {item.storage_index.fqn} is not readable: {error}", name) from error
    target = planner.resolve_tensor(item).detach()
    if target.shape != part.shape or target.dtype != part.dtype:
        raise DamagedCheckpointError(
            f"{name}: {item.storage_index.fqn} is {part.dtype} {list(part.shape)}, expected {target.dtype} "
            f"{list(target.shape)}"
        )
    target.copy_(part)
    planner.commit_tensor(item, target)


def read_exactly(file: io.FileIO, length: int, name: str) -> bytes:
    """The next bytes of a file that messages call `name`. Raises DamagedCheckpointError if it ends before."""
    parts = []
    while length > 0:  # one call returns two GiB at most
        parts.append(file.read(length))
        if not parts[-1]:
            raise DamagedCheckpointError(f"{name} ends too early", name)
        length -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _digest_to(file: io.FileIO, length: int, digest: Any, name: str) -> None:
    while length > 0:
        content = read_exactly(file, min(length, _CHUNK), name)
        digest.update(content)
        length -= len(content)


def check_files(folder: Path, manifest: Manifest, sync: RankSync, names: Collection[str] | None = None) -> None:
    """Read `names` (None: all files), each rank its share. Raises DamageError on all ranks if one is not whole."""
    mine = sorted(manifest.files if names is None else names)[sync.rank :: sync.world_size]

    def check() -> None:
        for name in mine:
            files.open_sized(folder, name, manifest.files[name]).close()
            if files.record_of(folder / name) != manifest.files[name]:
                raise DamagedCheckpointError(files.changed(name), name)

    sync.on_all("check it", check)


def load_checkpoint(
    folder: Path,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: RankSync,
    device: torch.device,
) -> dict[str, Any]:
    """Read a checkpoint into model, optimizer and generators, as all ranks together; returns the trainer's state.

    device: whose generators these are. Raises DamageError on all ranks if it is not whole (what was read into must then
    be read into again), CheckpointError if it cannot be read or is of another model.
    """
    records = manifest.files
    content = sync.on_rank0("read it", lambda: files.read_checked(folder, METADATA, records))
    metadata = sync.on_all("read it", lambda: read_metadata(content))
    state = state_of(model, optimizer)
    read = sync.on_all("load it", lambda: read_shards(folder, metadata, records, state))
    generators: list[bytes] = []  # rank 0's

    def read_small() -> dict[str, Any]:
        trainer: dict[str, Any] = json.loads(files.read_checked(folder, files.TRAINER, records))
        if files.RANDOM_STATE in records:
            generators.extend(unpack(files.read_checked(folder, files.RANDOM_STATE, records)))
        else:  # format 1
            of_ranks = sorted(name for name in records if name.startswith("rng_"))
            generators.extend(files.read_checked(folder, name, records) for name in of_ranks)
        if len(generators) != manifest.world_size:
            raise DamagedCheckpointError(f"{len(generators)} ranks' generators of {manifest.world_size}")
        return trainer

    trainer = sync.on_rank0("read it", read_small)
    small = {METADATA, files.TRAINER, files.RANDOM_STATE, *(name for name in records if name.startswith("rng_"))}
    of_ranks = sync.gather("check it", lambda: read)
    left = sync.on_rank0("check it", lambda: sorted(records.keys() - small - set().union(*of_ranks)))
    check_files(folder, manifest, sync, left)
    if manifest.world_size == sync.world_size:
        mine = sync.scatter(generators)
        sync.on_all("restore generators", lambda: restore_random_state(mine, device))
    return trainer


# Random generators of one rank: Python, NumPy, torch on the CPU and on its GPU. Data order and stochastic rounding do
# not draw from these (they are functions of the seed and the step); whatever else draws resumes with them.


def capture_random_state(device: torch.device) -> bytes:
    """This process's generator states."""
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))  # type: ignore[arg-type]
    # Tensors and plain types only, so that loading never runs code from the file.
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
    """Put this process's generators where `capture_random_state` found them. A GPU's only if one was saved."""
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
