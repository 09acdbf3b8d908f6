"""A checkpoint as a Hugging Face folder: config.json, safetensors, tokenizer, generation config, model card.

One tensor after another is read, whatever mesh wrote them, so that a shard and a parameter are what memory holds. The
folder is written under another name and renamed: there is a whole one, or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer
from exchange.checkpoint import Checkpoint, check_tensors
from exchange.hf import shards
from exchange.hf.architectures import architecture_of
from exchange.hf.encoder import Encoder, PlainEncoder
from exchange.hf.model_card import model_card
from exchange.hf.tokenizer_files import tokenizer_files
from exchange.new_folder import new_folder
from megatron_fp4.checkpoint.files import TRAINER

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"
SHARD_BYTES = 2 << 30


def export_hf(
    checkpoint: Checkpoint,
    output: Path,
    *,
    encoder: Encoder,
    tokenizer: TextTokenizer | None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write `output`, which must not exist. tokenizer: of the run, None to leave it out. progress: is told the bytes of
    weights written, and all of them.

    Raises ValueError for a model that no architecture of transformers computes, a tokenizer that cannot be written, or
    an output that exists or lies inside the checkpoint; DamagedCheckpointError for a checkpoint that is not whole; and
    OSError. Then nothing is left behind.
    """
    config = checkpoint.config.model
    architecture = architecture_of(config)
    sections = architecture.sections(config)
    check_tensors({name: shape_of(sections[name]) for name in sections}, checkpoint.tensors, checkpoint.name)
    length = sequence_length(checkpoint)
    files = {} if tokenizer is None else tokenizer_files(tokenizer, length)
    layout = {name: encoder.layout(name, parts) for name, parts in sections.items()}
    groups = shards.cut(list(layout.items()), shard_bytes)
    special = _special_ids(tokenizer)
    described = {
        **architecture.to_hf(config),
        **special,
        "max_position_embeddings": length,
        **encoder.config_entries(),
    }
    checkpoint.verify()  # last, because it reads all of a large checkpoint, moments included
    with new_folder(output, checkpoint.folder) as folder:
        shards.write_shards(
            folder,
            dict(zip(shards.file_names(len(groups)), groups, strict=True)),
            layout,
            lambda name: encoder.tensors(name, sections[name], checkpoint.tensor(name)),
            progress,
        )
        (folder / CONFIG).write_text(json_text(described))
        generation = {key: value for key, value in special.items() if value is not None}
        if not described["use_cache"]:  # of config.json, `generate` does not take it
            generation["use_cache"] = False
        (folder / GENERATION).write_text(json_text(generation))
        card = model_card(checkpoint, architecture.MODEL_TYPE, length, encoder.description, encoder.use)
        (folder / CARD).write_text(card)
        for name, content in {**files, **encoder.extra_files()}.items():
            (folder / name).write_bytes(content)


def export_again(
    checkpoint: Checkpoint, output: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the folder that a checkpoint was imported from once more: its files byte for byte, its tensors in the types
    and shards that they had. Raises as `export_hf` does."""
    imported = checkpoint.trainer["imported"]
    config = checkpoint.config.model
    sections = architecture_of(config).sections(config)
    dtypes = {name: getattr(torch, dtype) for name, dtype in imported["dtypes"].items()}
    encoder = PlainEncoder(torch.float32, dtypes)
    ours = {section.name: name for name, parts in sections.items() for section in parts}
    layout = {part.name: encoder.layout("", [part]) for parts in sections.values() for part in parts}
    by_name = {part.name: part for parts in sections.values() for part in parts}
    if sorted(name for group in imported["shards"].values() for name in group) != sorted(layout) or any(
        Path(name).name != name for name in imported["shards"]
    ):
        raise ValueError(
            f"{checkpoint.folder}: {TRAINER} does not describe the folder it was imported from; add --dtype"
        )
    last: dict[str, Tensor] = {}

    def tensors(name: str) -> Mapping[str, Tensor]:
        if ours[name] not in last:  # the parts of a packed parameter follow each other
            last.clear()
            last[ours[name]] = checkpoint.tensor(ours[name])
        return encoder.tensors("", [by_name[name]], last[ours[name]])

    with new_folder(output, checkpoint.folder) as folder:
        shards.write_shards(folder, imported["shards"], layout, tensors, progress)
        for name in imported["files"]:
            (folder / name).write_bytes(checkpoint.file(name))


def shape_of(parts: list[Any]) -> torch.Size:
    """The shape of our parameter whose sections these are: rows together, and columns as they have, singletons gone."""
    rows = sum(part.shape[0] for part in parts)
    return torch.Size((rows, *(size for size in parts[0].shape[1:] if size != 1 or len(parts[0].shape) == 2)))


def sequence_length(checkpoint: Checkpoint) -> int:
    """The longest sequences of the run, or what imported weights came with, in tokens."""
    if checkpoint.weights_only and (came_with := checkpoint.trainer["imported"].get("sequence_length")):
        return int(came_with)
    train, phases = checkpoint.config.train, checkpoint.config.data.phases
    return max([train.sequence_length, *(phase.sequence_length or 0 for phase in phases)])


def json_text(content: Mapping[str, Any]) -> str:
    """As transformers writes it."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _special_ids(tokenizer: TextTokenizer | None) -> dict[str, int | None]:
    """Written also where they are none: transformers would take ids of its own."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    bos = None if tokenizer.bos_token is None else tokenizer.token_id(tokenizer.bos_token)
    return {"bos_token_id": bos, "eos_token_id": tokenizer.eod_id, "pad_token_id": tokenizer.eod_id}
