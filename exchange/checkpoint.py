"""Opens a checkpoint of a run in one process, without a mesh and with little memory.

Each tensor is read when it is needed, with its global shape, for any mesh that wrote it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError, Manifest, OtherFormatError, checkpoint_in
from megatron_fp4.checkpoint.shards import METADATA, read_metadata
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.schema import ConfigError, ParallelConfig
from megatron_fp4.parallel.mesh import build_mesh, init_distributed
from megatron_fp4.precision.fp32_gradients import local_part
from models.execution import PLAIN
from models.hybrid import HybridModel, build_model
from models.pattern import check_model

_PREFIX = "model."
_READERS = 4


class Checkpoint:
    """A checkpoint, opened for reading; no tensor is loaded yet.

    manifest, trainer: as they were saved. step, tokens: how many are done. weights_only: whether it has no optimizer
    state. config: the run's. trusted: whether the paths in it may be opened. tensors: the shapes of the model's
    parameters, by name. Raises DamagedCheckpointError for missing files or files with another size, and ConfigError.
    """

    def __init__(self, folder: Path, config_dir: Path, trusted: bool = False) -> None:
        self.folder, self.trusted = folder, trusted
        self.manifest: Manifest = files.read_manifest(folder)
        self.step, self.tokens = self.manifest.step, self.manifest.consumed_tokens
        self.weights_only = self.manifest.weights_only
        for name, record in self.manifest.files.items():
            with files.opened(folder, name, record):
                pass
        self.trainer = files.read_trainer(folder, self.manifest)
        self._metadata: Metadata = read_metadata(self.file(METADATA))
        self.config = config_from_saved(self.trainer["config"], [], config_dir, opens_data=False, trusted=trusted)
        check_model(self.config.model)
        self.tensors: dict[str, torch.Size] = {
            name.removeprefix(_PREFIX): saved.size
            for name, saved in self._metadata.state_dict_metadata.items()
            if name.startswith(_PREFIX) and isinstance(saved, TensorStorageMetadata)
        }

    def verify(self) -> None:
        """Compare every file with its SHA-256. Raises DamagedCheckpointError with the name of the file."""
        with ThreadPoolExecutor(_READERS) as pool:
            records = self.manifest.files
            for problem in pool.map(lambda name: files.check_file(self.folder, name, records[name]), records):
                if problem:
                    raise DamagedCheckpointError(f"{self.folder} is damaged: {problem}; give another checkpoint")

    def tensor(self, name: str) -> Tensor:
        """A parameter with its global shape, FP32 on the CPU. Raises DamagedCheckpointError for unreadable pieces."""
        saved = self._metadata.state_dict_metadata[_PREFIX + name]
        assert isinstance(saved, TensorStorageMetadata)
        if saved.properties.dtype != torch.float32:
            raise DamagedCheckpointError(f"{name} is {saved.properties.dtype}; masters are FP32")
        return read_region(self.folder, self._metadata, _PREFIX + name, [slice(0, size) for size in saved.size])

    def file(self, name: str) -> bytes:
        """The content of a small file. Raises DamagedCheckpointError if it has changed since it was saved."""
        return files.read_checked(self.folder, name, self.manifest.files)

    def read(self, path: Path) -> bytes:
        """The content of a file of the checkpoint, which its manifest must name, or of a plain file elsewhere."""
        return self.file(path.name) if path.parent == self.folder else files.read_plain(path)


def open_checkpoint(folder: Path, config_dir: Path, trusted: bool = False) -> Checkpoint:
    """The checkpoint in `folder`, or the newest one of the run in `folder`. trusted: see `config_from_saved`.

    Raises ValueError, in one line with folder and remedy, if there is none or it is incomplete.
    """
    chosen = checkpoint_in(folder)
    try:
        with files.well_formed(chosen / files.TRAINER):
            return Checkpoint(chosen, config_dir, trusted)
    except OtherFormatError as error:
        raise ValueError(f"{chosen}: {error}; use the version that wrote it") from error
    except DamagedCheckpointError as error:
        raise ValueError(f"{chosen} is damaged: {error}; give another checkpoint") from error
    except ConfigError as error:
        raise ValueError(f"{chosen}: {error}") from error


def load_model(
    checkpoint: Checkpoint, *, compute_dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> HybridModel:
    """The model with the checkpoint's weights in one process, without quantized linears.

    Creates a process group of one rank if there is none; `leave_distributed` ends it. Raises ValueError if the tensors
    do not fit the checkpoint's own configuration.
    """
    device = torch.device(device)
    if not torch.distributed.is_initialized():
        init_distributed(device.type, checkpoint.config.parallel.timeout_seconds)
    alone = build_mesh(ParallelConfig(), device)
    with torch.device("meta"):
        model = build_model(checkpoint.config.model, alone, compute_dtype, PLAIN)
    model.to_empty(device=device)
    tensors = model.state_dict()
    check_tensors(checkpoint.tensors, {name: tensor.shape for name, tensor in tensors.items()}, checkpoint.folder)
    for name, tensor in tensors.items():
        local_part(tensor).copy_(checkpoint.tensor(name))
    return model.eval()


def check_tensors(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], folder: Path) -> None:
    """Raise ValueError, with the first difference, if the tensors `found` are not those `expected`: name -> shape."""
    for name in (*expected, *found):
        have, want = (str(list(of[name])) if name in of else "missing" for of in (found, expected))
        if have != want:
            raise ValueError(f"{folder}: {name} is {have}, but {want} in the model of its configuration")


def read_region(folder: Path, metadata: Metadata, name: str, region: Sequence[slice]) -> Tensor:
    """A region of a tensor in a folder written by torch.distributed.checkpoint, FP32 on the CPU. region: slices.

    Raises DamagedCheckpointError for pieces that are missing or unreadable, have another shape or type than in the
    metadata, or are outside the folder.
    """
    saved = metadata.state_dict_metadata[name]
    assert isinstance(saved, TensorStorageMetadata)
    result = torch.empty([part.stop - part.start for part in region])
    written = 0
    for chunk in saved.chunks:
        inside, target = [], []
        for part, first, size in zip(region, chunk.offsets, chunk.sizes, strict=True):
            low, high = max(part.start, first), min(part.stop, first + size)
            inside.append(slice(low - first, high - first))
            target.append(slice(low - part.start, high - part.start))
        if any(part.stop <= part.start for part in target):
            continue
        place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
        if place is None or Path(place.relative_path).name != place.relative_path:
            raise DamagedCheckpointError(f"{METADATA} names no file in the folder for a piece of {name}")
        try:
            with files.open_plain(folder / place.relative_path) as file:
                view: Any = _create_file_view(io.BufferedReader(file), place.offset, place.length)
                piece = torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types for damaged bytes
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DamagedCheckpointError(f"{place.relative_path}: {name} is not readable ({problem})") from error
        if not isinstance(piece, Tensor) or piece.shape != chunk.sizes or piece.dtype != saved.properties.dtype:
            raise DamagedCheckpointError(f"{place.relative_path}: {name} differs from its entry in {METADATA}")
        result[tuple(target)] = piece[tuple(inside)]
        written += math.prod(part.stop - part.start for part in target)
    if written != result.numel():
        raise DamagedCheckpointError(f"{METADATA} has {written} of {result.numel()} elements of {name}")
    return result
