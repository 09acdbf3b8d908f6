"""A checkpoint of Megatron-core, opened by one process that has neither Megatron nor a GPU.

Nothing that its pickles name is called or imported: `.metadata` is read as our own is (megatron_fp4/checkpoint/
metadata.py), `common.pt` with stand-ins of which plain values are taken, and tensors with torch's `weights_only`.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata
from megatron_fp4.checkpoint.shards import read_exactly

COMMON = "common.pt"
_TRACKER = "latest_checkpointed_iteration.txt"
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
            self._check_format()
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
        begin = [0] * len(saved.size)
        end = list(saved.size)
        if layer is not None:
            begin[0], end[0] = layer, layer + 1
        if rows is not None:
            end[0 if layer is None else 1] = rows
        result = torch.empty([stop - start for start, stop in zip(begin, end, strict=True)])
        written = 0
        for chunk in saved.chunks:
            low = [max(a, b) for a, b in zip(begin, chunk.offsets, strict=True)]
            extents = zip(end, chunk.offsets, chunk.sizes, strict=True)
            high = [min(stop, offset + size) for stop, offset, size in extents]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            values = self._piece(key, chunk.offsets, chunk.sizes, saved.properties.dtype)
            target = result[tuple(slice(a - b, c - b) for a, b, c in zip(low, begin, high, strict=True))]
            target.copy_(values[tuple(slice(a - o, c - o) for a, o, c in zip(low, chunk.offsets, high, strict=True))])
            written += target.numel()
        if written != result.numel():
            raise ValueError(f"{self.folder}: {METADATA} has {written} of {result.numel()} elements of {key}")
        return result if layer is None else result[0]

    def _piece(self, key: str, offsets: torch.Size, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        place = self._metadata.storage_data.get(MetadataIndex(key, offsets))
        if place is None or Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{self.folder}: {METADATA} does not say where {key} is; copy the folder again")
        try:
            with files.open_plain(self.folder / place.relative_path) as file:
                file.seek(place.offset)
                content = io.BytesIO(read_exactly(file, place.length, place.relative_path))
            values = torch.load(content, map_location="cpu", weights_only=True)
            del content
        except Exception as error:  # whatever torch makes of damaged bytes
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{self.folder / place.relative_path}: {key} is not readable ({words})") from error
        if not isinstance(values, Tensor) or values.shape != sizes or values.dtype != dtype:
            raise ValueError(f"{self.folder / place.relative_path}: {key} is not what {METADATA} says")
        return values

    def _check_format(self) -> None:
        try:
            described = json.loads((self.folder / "metadata.json").read_text())
            backend = described["sharded_backend"]
        except FileNotFoundError:
            raise DamagedCheckpointError(
                "it has no metadata.json, so it is none of --ckpt-format torch_dist; save it with that"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"metadata.json is not readable ({error})") from error
        if backend != "torch_dist":
            raise DamagedCheckpointError(f"its format is {backend}; save it with --ckpt-format torch_dist")


def _iteration_in(folder: Path) -> Path:
    """`folder` itself, or the iteration that its tracker file names."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give what Megatron-LM saved to, or an iter_* folder in it")
    tracker = folder / _TRACKER
    if not tracker.is_file():
        return folder
    name = tracker.read_text(errors="replace").strip()
    if name != "release" and not name.isdecimal():
        raise ValueError(f"{tracker} says {name[:40]!r}; give the iter_* folder itself")
    found = folder / (name if name == "release" else f"iter_{int(name):07d}")
    if not found.is_dir():
        raise ValueError(f"{found} is missing, which {_TRACKER} names; give another iter_* folder")
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
