"""A Hugging Face folder as a checkpoint that a run can begin from (weights_only.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer, load_tokenizer
from exchange.checkpoint import Checkpoint
from exchange.hf.architectures import architecture_in
from exchange.hf.export import CARD, CONFIG, GENERATION, shape_of
from exchange.hf.sections import Section, ours_of
from exchange.hf.shards import INDEX, Shards
from exchange.tokenizer import TOKENIZER_FILES
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import ConfigError
from models.pattern import check_model

FORMAT = "hugging_face"
_KEPT = (CONFIG, GENERATION, CARD, INDEX, *TOKENIZER_FILES, "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def import_hf(folder: Path, checkpoint: Path, config_dir: Path, *, name: str | None = None) -> dict[str, Any]:
    """Write `checkpoint`, which must not exist, from the model in `folder`; returns its `model` settings.

    name: what `model.name` becomes; None: the folder's. Weights become FP32 masters, exactly.
    Raises ValueError, one line that names file, key or tensor, for what is not such a folder or not one of our models.
    """
    content = _json(folder / CONFIG)
    try:
        settings = {"name": name or folder.resolve().name, **architecture_in(content).from_hf(content)}
        config = compose_config([], config_dir)
        config = _with_model(config, settings)
        check_model(config.model)
    except ValueError as error:  # ConfigError is one
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG} does not describe a model ({error!r}); fetch the folder again") from error
    if content.get("quantization_config"):
        raise ValueError(f"{folder / CONFIG} has a quantization_config; import the folder of the weights in 16 bits")
    tensors = Shards(folder)
    sections = architecture_in(content).sections(config.model)
    dtypes = _check(folder, tensors, sections)
    tokenizer = tokenizer_in(folder)
    if tokenizer is not None and tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} ids and the model only {config.model.vocab_size}; "
            "fetch the folder again, or take its tokenizer away"
        )
    kept = {name: (folder / name).read_bytes() for name in _KEPT if (folder / name).is_file()}
    write_weights_only(
        checkpoint,
        config,
        (NewTensor(ours, tuple(shape_of(parts)), _loader(tensors, parts)) for ours, parts in sections.items()),
        imported={
            "format": FORMAT,
            "from": folder.resolve().name,
            "model_type": content["model_type"],
            "sequence_length": _count(content.get("max_position_embeddings")),
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
            "shards": tensors.files,
            "files": sorted(kept),
        },
        tokenizer=None if tokenizer is None else tokenizer.fingerprint(),
        extra_files=kept,
    )
    return settings


def is_import(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is what `import_hf` wrote."""
    return checkpoint.trainer.get("imported", {}).get("format") == FORMAT


def tokenizer_in(folder: Path) -> TextTokenizer | None:
    """The tokenizer of a folder, None if it has none. Raises ValueError if it is damaged."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    return load_tokenizer(folder)


def _with_model(config: Any, settings: Mapping[str, Any]) -> Any:
    """`config` with the model of `settings`. Raises ConfigError for values that no model of ours can have."""
    try:
        return replace(config, model=replace(config.model, **settings))
    except ConfigError:
        raise
    except ValueError as error:  # pydantic's
        raise ConfigError(" ".join(str(error).split())) from error


def _check(folder: Path, tensors: Shards, sections: Mapping[str, list[Section]]) -> dict[str, torch.dtype]:
    """The type of each tensor, once all that the model needs are there, of the right shapes, and no others."""
    dtypes = {}
    expected = {part.name: part for parts in sections.values() for part in parts}
    for name, part in expected.items():
        if name not in tensors.names:
            raise ValueError(f"{folder} has no tensor {name}, which its {CONFIG} asks for")
        stored = tensors.stored(name)
        if stored.shape != part.shape:
            raise ValueError(f"{folder}: {name} is {list(stored.shape)}, {list(part.shape)} by its {CONFIG}")
        if stored.dtype not in _FLOATS:
            raise ValueError(f"{folder}: {name} is {stored.dtype}; weights in 16 or 32 bits can be imported")
        dtypes[name] = stored.dtype
    if unknown := [name for name in tensors.names if name not in expected]:
        raise ValueError(f"{folder} has a tensor {unknown[0]}, which a {_json(folder / CONFIG)['model_type']} of its "
                         f"{CONFIG} does not have")  # fmt: skip
    return dtypes


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _loader(tensors: Shards, parts: list[Section]) -> Any:
    def load() -> Tensor:
        return ours_of(parts, {part.name: tensors.tensor(part.name) for part in parts}, tuple(shape_of(parts)))

    return load


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable ({error}); fetch the folder again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object; fetch the folder again")
    return content
