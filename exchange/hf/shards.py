"""The safetensors files of a folder: cut into shards, written one at a time, and read tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exchange.hf.encoder import Stored

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_METADATA = {"format": "pt"}


def safetensors() -> Any:
    """The package's torch functions. Raises ValueError, with the remedy, where it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError(f'{error}; Hugging Face folders need it: pip install "megatron_fp4[hf]"') from error
    return safetensors.torch


def cut(groups: Sequence[tuple[str, Sequence[Stored]]], shard_bytes: int) -> list[list[str]]:
    """The groups' names by shard, in order: no shard larger than `shard_bytes` unless one group is."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, stored in groups:
        more = sum(each.num_bytes for each in stored)
        if shards[-1] and size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def file_names(count: int) -> list[str]:
    """As transformers calls `count` shards."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_shards(
    folder: Path,
    shards: Mapping[str, Sequence[str]],
    layout: Mapping[str, Sequence[Stored]],
    tensors: Callable[[str], Mapping[str, Tensor]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the files of `shards` (name -> groups), and the index if they are several.

    layout: group -> what it stores. tensors: group -> its tensors, asked for once each. progress: is told the bytes of
    tensors written, and all of them. No more than a shard, and the group that is made for it, is in memory at a time.
    Raises OSError.
    """
    module = safetensors()
    from safetensors import SafetensorError

    places: dict[str, str] = {}
    written, total = 0, sum(stored.num_bytes for group in layout.values() for stored in group)
    for file, groups in shards.items():
        content: dict[str, Tensor] = {}
        for group in groups:
            made = tensors(group)
            assert [Stored(n, t.dtype, tuple(t.shape)) for n, t in made.items()] == list(layout[group]), group
            content |= made
        try:
            module.save_file(content, folder / file, metadata=_METADATA)
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(
                f"{folder / file} cannot be written ({error}); make room, or name a folder elsewhere"
            ) from error
        del content
        places |= {stored.name: file for group in groups for stored in layout[group]}
        (folder / file).chmod(0o666 & ~_umask())  # it makes them for their owner alone
        written += sum(stored.num_bytes for group in groups for stored in layout[group])
        progress(written, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Shards:
    """The tensors of a folder by name. Raises ValueError, naming folder and file, for files that are missing, damaged
    or do not hold what the index says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, list[str]] = {}
        """File -> the tensors in it."""
        self._module = safetensors()
        from safetensors import SafetensorError, safe_open

        self._open, self._error = safe_open, SafetensorError
        if (folder / INDEX).is_file():
            try:
                weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
                names = list(dict.fromkeys(weight_map.values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(f"{folder / INDEX} is not readable ({error}); fetch the folder again") from error
        elif (folder / SINGLE).is_file():
            weight_map, names = None, [SINGLE]
        else:
            raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; give the folder of a model in safetensors")
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{folder / INDEX} names {name!r}, which is not a file beside it")
            with self._opened(name) as file:
                self.files[name] = list(file.keys())
        self._file_of = {tensor: name for name, tensors in self.files.items() for tensor in tensors}
        for tensor, name in (weight_map or {}).items():
            if self._file_of.get(tensor) != name:
                raise ValueError(f"{folder / name} does not hold {tensor}, which {INDEX} says it does; fetch it again")

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._file_of)

    def stored(self, name: str) -> Stored:
        """Type and shape, without reading the values."""
        with self._opened(self._file_of[name]) as file:
            part = file.get_slice(name)
            kind = part.get_dtype()
            if kind not in _TYPES:
                raise ValueError(f"{self.folder}: {name} is of type {kind}; {', '.join(_TYPES)} are known")
            return Stored(name, _TYPES[kind], tuple(part.get_shape()))

    def tensor(self, name: str) -> Tensor:
        """The values, as they are stored."""
        with self._opened(self._file_of[name]) as file:
            return file.get_tensor(name)

    def _opened(self, name: str) -> Any:
        path = self.folder / name
        try:
            return self._open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise ValueError(f"{path} is missing, which {INDEX} names; fetch the folder again") from None
        except (self._error, OSError) as error:
            raise ValueError(f"{path} is not readable ({error}); fetch the folder again") from error


_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
