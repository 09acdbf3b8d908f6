"""Reads a Hugging Face folder in 16 or 32 bits or in NVFP4, and imports it as a checkpoint (weights_only.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exchange.architectures import from_hf, sections_of
from exchange.hf_export import CONFIG, INDEX, QUANTIZATION, SINGLE, SPECIAL_IDS
from exchange.nvfp4 import decoded, layout_of
from exchange.tokenizer import kept_tokenizer
from exchange.weights_only import write_weights_only
from megatron_fp4.checkpoint.files import open_plain, read_plain
from megatron_fp4.config.compose import compose_config
from models.pattern import check_model
from models.published import Section, Sections, from_published

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPES = {**_FLOATS, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""How names of scales of activations end, which decoded weights do not need."""


class Folder:
    """The folder of a model. config: its config.json. layout: of its NVFP4 weights; or None. names: of tensors.

    Raises ValueError for files that are missing, damaged or do not match the index, or another quantized format.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_json(path / CONFIG)
        described = self.config
        try:
            if "quantization_config" not in described and (path / QUANTIZATION).is_file():  # from an older ModelOpt
                producer = read_json(path / QUANTIZATION)["producer"]["name"]
                described = {"quantization_config": {"quant_method": producer}}
            self.layout = layout_of(described)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / CONFIG}: {error}; give the folder of the weights in 16 bits") from error
        weight_map: dict[str, str] = {}
        if (path / INDEX).is_file():
            weight_map = read_json(path / INDEX).get("weight_map")  # type: ignore[assignment]
            files = weight_map.values() if isinstance(weight_map, dict) else [weight_map]
            if wrong := [name for name in files if not isinstance(name, str) or Path(name).name != name]:
                raise ValueError(f"{path / INDEX} names {wrong[0]!r}, which is not a file in the same folder")
        elif not (path / SINGLE).is_file():
            raise ValueError(f"{path} has neither {SINGLE} nor {INDEX}; give the folder of a model in safetensors")
        opened = {name: self._opened(name) for name in {*weight_map.values()} or {SINGLE}}
        self._file_of = {tensor: file for file in opened.values() for tensor in file.keys()}  # noqa: SIM118
        self.names = frozenset(self._file_of)
        for tensor, name in weight_map.items():
            if self._file_of.get(tensor) is not opened[name]:
                raise ValueError(f"{path / name} has no {tensor}, though {INDEX} lists it there; fetch it again")

    def stored(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor, without reading its values."""
        part = self._file_of[name].get_slice(name)
        if (kind := part.get_dtype()) not in _TYPES:
            raise ValueError(f"{self.path}: {name} is of type {kind}; {', '.join(_TYPES)} are known")
        return _TYPES[kind], tuple(part.get_shape())

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _opened(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.path / name
        try:
            open_plain(path).close()
            return safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise ValueError(f"{path} is missing, which {INDEX} names; fetch the folder again") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is not readable ({error}); fetch the folder again") from error

    def parts(self, section: Section) -> list[str]:
        """The tensors that store a section: the weight, or codes, block scales and tensor scale."""
        layout = self.layout
        if layout is None or f"{section.module}.{layout.scales}" not in self.names:
            return [section.name]
        return layout.names(section.module)

    def values(self, section: Section) -> Tensor:
        """The weights of a section: decoded to FP32 if they are NVFP4 codes, otherwise in their stored dtype."""
        codes, *scales = map(self.tensor, self.parts(section))
        if not scales:
            return codes
        assert self.layout is not None
        return self.layout.values(decoded(codes, scales[0]), scales[1])


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises ValueError if there is none."""
    try:
        content = json.loads(read_plain(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing; give the folder of a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable ({error}); fetch the folder again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; fetch the folder again")
    return content


def import_hf(path: Path, checkpoint: Path, config_dir: Path) -> dict[str, Any]:
    """Write `checkpoint`, which must not exist, from the model in the folder `path`; returns its `model` settings.

    `model.name` is the name of the folder. Weights are converted to FP32 masters exactly; NVFP4 codes, in ModelOpt's or
    compressed-tensors' layout, are decoded.
    Raises ValueError, in one line with file, key or tensor, for another kind of folder or a model that is not ours.
    """
    content, origin = read_json(path / CONFIG), path.resolve().name
    try:
        settings = {"name": origin, **from_hf(content)}
        config = compose_config([], config_dir)
        config = replace(config, model=replace(config.model, **settings))
        check_model(config.model)
    except ValueError as error:  # ConfigError, or pydantic's error, which has several lines
        raise ValueError(f"{path / CONFIG}: {' '.join(str(error).split())}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path / CONFIG} does not describe a model ({error!r}); fetch the folder again") from error
    folder, sections = Folder(path), sections_of(config.model)
    _check(folder, sections)
    kept, fingerprint = kept_tokenizer(path, config.model.vocab_size)
    length = content.get("max_position_embeddings")
    write_weights_only(
        checkpoint,
        config,
        ((name, from_published(parts, {p.name: folder.values(p) for p in parts})) for name, parts in sections.items()),
        imported={
            "format": "hugging_face" if folder.layout is None else f"hugging_face_{folder.layout.name}",
            "from": origin,
            "model_type": content["model_type"],
            "sequence_length": length if type(length) is int and length > 0 else None,
            "special_ids": {key: content[key] for key in SPECIAL_IDS if key in content},
        },
        tokenizer=fingerprint,
        extra_files=kept,
    )
    return settings


def _check(folder: Folder, sections: Sections) -> None:
    """Raise ValueError unless the folder has exactly the tensors of the model, with the right shapes and types."""
    needed = set[str]()
    for part in (part for parts in sections.values() for part in parts):
        stored = folder.parts(part)
        if missing := [name for name in stored if name not in folder.names]:
            raise ValueError(f"{folder.path} has no tensor {missing[0]}, which its {CONFIG} needs")
        dtype, shape = folder.stored(stored[0])
        if len(stored) > 1 and dtype == torch.uint8:
            shape = (shape[0], 2 * shape[1])
        elif dtype not in _FLOATS.values():
            raise ValueError(f"{folder.path}: {stored[0]} is {dtype}; weights in 16 or 32 bits, or NVFP4, are imported")
        if shape != part.shape:
            raise ValueError(f"{folder.path}: {stored[0]} is {list(shape)}, {list(part.shape)} by its {CONFIG}")
        needed |= {*stored}
    unknown = sorted(name for name in folder.names - needed if not name.endswith(OF_ACTIVATIONS))
    if unknown:
        raise ValueError(f"{folder.path} has a tensor {unknown[0]}, which a model of its {CONFIG} does not have")
