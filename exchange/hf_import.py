"""A Hugging Face folder as a checkpoint that a run can begin from (weights_only.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import load_tokenizer
from exchange.architectures import Section, Sections, from_hf, ours_of, sections_of, shape_of
from exchange.hf_export import CONFIG, INDEX, SINGLE, SPECIAL_IDS
from exchange.nvfp4 import decoded, layout_of
from exchange.tokenizer import TOKENIZER_FILES
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.config.compose import compose_config
from models.pattern import check_model

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPES = {**_FLOATS, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}


class Shards:
    """The tensors of a folder by name. names: of all.

    Raises ValueError, naming folder and file, for files that are missing, damaged or do not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weight_map: dict[str, str] = {}
        files = [SINGLE]
        if (folder / INDEX).is_file():
            try:
                weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
                files = list(dict.fromkeys(weight_map.values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(f"{folder / INDEX} is not readable ({error}); fetch the folder again") from error
        elif not (folder / SINGLE).is_file():
            raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; give the folder of a model in safetensors")
        self._file_of: dict[str, str] = {}
        for name in files:
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{folder / INDEX} names {name!r}, which is not a file beside it")
            with self._opened(name) as file:
                self._file_of |= dict.fromkeys(file.keys(), name)
        self.names = frozenset(self._file_of)
        for tensor, name in weight_map.items():
            if self._file_of.get(tensor) != name:
                raise ValueError(f"{folder / name} does not hold {tensor}, which {INDEX} says it does; fetch it again")

    def stored(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape, without reading the values."""
        with self._opened(self._file_of[name]) as file:
            part = file.get_slice(name)
            if (kind := part.get_dtype()) not in _TYPES:
                raise ValueError(f"{self.folder}: {name} is of type {kind}; {', '.join(_TYPES)} are known")
            return _TYPES[kind], tuple(part.get_shape())

    def tensor(self, name: str) -> Tensor:
        """The values, as they are stored."""
        with self._opened(self._file_of[name]) as file:
            return file.get_tensor(name)

    def _opened(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.folder / name
        try:
            return safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise ValueError(f"{path} is missing, which {INDEX} names; fetch the folder again") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not readable ({error}); fetch the folder again") from error


def import_hf(folder: Path, checkpoint: Path, config_dir: Path, *, name: str | None = None) -> dict[str, Any]:
    """Write `checkpoint`, which must not exist, from the model in `folder`; returns its `model` settings.

    name: what `model.name` becomes; None: the folder's. Weights become FP32 masters, exactly; NVFP4 codes, in
    ModelOpt's layout or compressed-tensors', what they stand for.
    Raises ValueError, one line that names file, key or tensor, for what is not such a folder or not one of our models.
    """
    content = read_config(folder)
    try:
        settings = {"name": name or folder.resolve().name, **from_hf(content)}
        config = compose_config([], config_dir)
        config = replace(config, model=replace(config.model, **settings))
        check_model(config.model)
    except ValueError as error:  # ConfigError is one, pydantic's another, of several lines
        raise ValueError(f"{folder / CONFIG}: {' '.join(str(error).split())}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG} does not describe a model ({error!r}); fetch the folder again") from error
    tensors, sections, vocab_size = _Weights(folder, content), sections_of(config.model), config.model.vocab_size
    _check(folder, tensors, sections)
    has_tokenizer = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model"))
    tokenizer = load_tokenizer(folder) if has_tokenizer else None
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} ids and the model only {vocab_size}; fetch the folder "
            "again, or take its tokenizer away"
        )
    kept = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    length = content.get("max_position_embeddings")
    write_weights_only(
        checkpoint,
        config,
        (NewTensor(ours, tuple(shape_of(p)), partial(_load, tensors, p)) for ours, p in sections.items()),
        imported={
            "format": "hugging_face" if tensors.layout is None else f"hugging_face_{tensors.layout.name}",
            "from": folder.resolve().name,
            "model_type": content["model_type"],
            "sequence_length": length if type(length) is int and length > 0 else None,
            "special_ids": {key: content[key] for key in SPECIAL_IDS if key in content},
        },
        tokenizer=None if tokenizer is None else tokenizer.fingerprint(),
        extra_files=kept,
    )
    return settings


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """config.json of a folder, or another file of JSON. Raises ValueError if it is not there or not readable."""
    path = folder / name
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing; give the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable ({error}); fetch the folder again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object; fetch the folder again")
    return content


class _Weights(Shards):
    """Of a folder whose weights may be NVFP4 codes. layout: of them, None without a `quantization_config`."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        super().__init__(folder)
        beside = folder / "hf_quant_config.json"  # older folders of ModelOpt have nothing else
        try:
            if "quantization_config" not in config and beside.is_file():
                config = {"quantization_config": {"quant_method": read_config(folder, beside.name)["producer"]["name"]}}
            self.layout = layout_of(config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / CONFIG}: {error}; import the folder of the weights in 16 bits") from error

    def parts(self, section: Section) -> list[str]:
        """What the folder has of a section: the tensor, or codes, block scales and tensor scale."""
        layout = self.layout
        if layout is None or f"{section.module}.{layout.scales}" not in self.names:
            return [section.name]
        return [f"{section.module}.{kind}" for kind in (layout.codes, layout.scales, layout.weight_scale)]

    def values(self, section: Section) -> Tensor:
        """The weights: FP32 where they are codes, else as they are stored."""
        codes, *scales = map(self.tensor, self.parts(section))
        if not scales:
            return codes
        assert self.layout is not None
        return self.layout.values(decoded(codes, scales[0]), scales[1])


# What the activations of a quantized folder are scaled by, which weights do not need.
_OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")


def _check(folder: Path, tensors: _Weights, sections: Sections) -> None:
    """Raise ValueError unless all that the model needs is there, of the right shapes and types, and nothing else."""
    needed = set[str]()
    for part in (part for parts in sections.values() for part in parts):
        stored = tensors.parts(part)
        if missing := [name for name in stored if name not in tensors.names]:
            raise ValueError(f"{folder} has no tensor {missing[0]}, which its {CONFIG} asks for")
        dtype, shape = tensors.stored(stored[0])
        if len(stored) > 1 and dtype == torch.uint8:
            shape = (shape[0], 2 * shape[1])
        elif dtype not in _FLOATS.values():
            raise ValueError(f"{folder}: {stored[0]} is {dtype}; weights in 16 or 32 bits, or NVFP4, can be imported")
        if shape != part.shape:
            raise ValueError(f"{folder}: {stored[0]} is {list(shape)}, {list(part.shape)} by its {CONFIG}")
        needed |= {*stored}
    unknown = sorted(name for name in tensors.names - needed if not name.endswith(_OF_ACTIVATIONS))
    if unknown:
        raise ValueError(f"{folder} has a tensor {unknown[0]}, which a model of its {CONFIG} does not have")


def _load(tensors: _Weights, parts: list[Section]) -> Tensor:
    return ours_of(parts, {part.name: tensors.values(part) for part in parts})
