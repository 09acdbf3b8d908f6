"""Folders as others write them, or damaged: what is no model of ours, what is not told, and what is never run."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from data.tokenizer import train_tokenizer
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.hf.export import sequence_length
from exchange.hf.tokenizer_files import tokenizer_files
from exchange.megatron import writing
from exchange.megatron.arguments import arguments_of
from exchange.megatron.export import export_megatron
from exchange.megatron.importing import import_megatron
from exchange.tokenizer import tokenizer_of
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.checkpoint.metadata import METADATA, read_metadata
from tests.exchange.megatron_cases import (
    CONFIGS,
    ITERATION,
    checkpoints,
    read_by_torch,
)

__all__ = ["checkpoints"]

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def foreign(folder: Path, checkpoint: Checkpoint, change: Change) -> Path:
    """A folder of another writer, with an optimizer's tensors and objects beside the model's."""
    export_megatron(checkpoint, folder, dtype=torch.float32)
    iteration = folder / ITERATION
    tensors = read_by_torch(iteration)
    arguments = arguments_of(checkpoint.config.model, 64, bf16=False)
    change(tensors, arguments)
    for path in [*iteration.glob("*.distcp"), iteration / METADATA]:
        path.unlink()
    with writing.PieceWriter(iteration) as writer:
        for key, values in tensors.items():
            writer.add(key, values.shape, [0] * values.dim(), values)
            writer.add(f"optimizer.state.exp_avg.{key}", values.shape, [0] * values.dim(), values)
        writer.add_object("rng_state/shard_0.0_1.1", {"seed": 1})
        writer.finish()
    common = {"args": argparse.Namespace(**arguments), "iteration": 30} if arguments else {"iteration": 30}
    torch.save(common, iteration / "common.pt")
    return folder


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor], arguments: dict[str, Any]) -> None:
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    return change


def drop(name: str) -> Change:
    def change(tensors: dict[str, Tensor], arguments: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith(name)]:
            del tensors[key]

    return change


def add(key: str, *shape: int) -> Change:
    return lambda tensors, arguments: tensors.update({key: torch.zeros(shape)})


def argument(**values: Any) -> Change:
    return lambda tensors, arguments: arguments.update(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("output_layer"), "no output_layer.weight: its embedding and head are one"),
        (drop("decoder.layers.3"), "layers are not numbered 0 to 4"),
        (drop("decoder.layers.0.mixer.D"), "no decoder.layers.0.mixer.D,"),
        (drop("decoder"), "no tensor decoder.layers"),
        (drop("embedding"), "no embedding.word_embeddings.weight"),
        (add("decoder.layers.1.mlp.linear_fc1.bias", 96), "linear_fc1.bias: biases, which no model here has"),
        (add("decoder.layers.1.mlp.router.weight", 4, 64), "router.weight: a mixture of experts"),
        (add("decoder.layers.2.self_attention.q_layernorm.weight", 24), "norms of queries and keys"),
        (add("embedding.position_embeddings.weight", 64, 64), "learned positions"),
        (add("decoder.something.weight", 3), "decoder.something.weight: no model here has such a tensor"),
        (add("decoder.layers.1.mlp.linear_fc1.weight", 192, 64), "a gate"),
        (add("decoder.layers.1.mlp.linear_fc1.weight", 97, 64), r"is \[97, 64\] there, \[96, 64\]"),
        (add("decoder.layers.1.self_attention.x", 1), "layer 1 has mlp, self_attention"),
        (rename("decoder.layers.1.mlp", "decoder.layers.1.cross_attention"), "layer 1 has cross_attention"),
        (argument(swiglu=True), "swiglu=True; models here have False"),
        (argument(squared_relu=False), "squared_relu=False"),
        (argument(normalization="LayerNorm"), "normalization=LayerNorm; models here have RMSNorm"),
        (argument(apply_layernorm_1p=True), "apply_layernorm_1p=True"),
        (argument(position_embedding_type="learned_absolute"), "position_embedding_type=learned_absolute"),
        (argument(rotary_percent=0.5), "rotary_percent=0.5"),
        (argument(no_rope_freq=4), "no_rope_freq=4"),
        (argument(num_attention_heads=5), "num_query_heads=5"),
        (argument(num_attention_heads="4"), "num_attention_heads='4' is no number above 0"),
        (argument(mamba_num_groups=0), "mamba_num_groups=0 is no number above 0"),
        (add("decoder.layers.1.mlp.linear_fc2.weight", 96), "those of no model"),
        (add("decoder.layers.0.mixer.A_log", 0), "those of no model"),
        (argument(num_attention_heads=None), "add model.num_query_heads=..."),
        (lambda tensors, arguments: arguments.clear(), "add model.norm_eps=... model.num_query_heads=... model.num_kv"),
        (lambda tensors, _: tensors.update({"output_layer.weight": torch.zeros(300, 64).long()}), "torch.int64; FP32"),
    ],
)
def test_what_is_no_model_of_ours(
    change: Change, words: str, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    folder = foreign(tmp_path / "theirs", checkpoints["hybrid"], change)
    with pytest.raises(ValueError, match=words) as raised:
        import_megatron(folder, tmp_path / "back", CONFIGS)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def damage(name: str, content: bytes | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.unlink() if content is None else path.write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (damage("latest_checkpointed_iteration.txt", b"soon"), "says 'soon'; give the iter_"),
        (damage("latest_checkpointed_iteration.txt", b"7"), "iter_0000007 is missing"),
        (damage("latest_checkpointed_iteration.txt", None), "no metadata.json, so it is none of --ckpt-format"),
        (damage(f"{ITERATION}/metadata.json", b'{"sharded_backend": "zarr"}'), "its format is zarr"),
        (damage(f"{ITERATION}/metadata.json", b"{"), "metadata.json is not readable"),
        (damage(f"{ITERATION}/.metadata", b"x"), ".metadata is not readable"),
        (damage(f"{ITERATION}/.metadata", None), ".metadata is missing"),
        (damage(f"{ITERATION}/common.pt", b"x"), "common.pt is not readable"),
        (damage(f"{ITERATION}/__0_0.distcp", b"x"), "embedding.word_embeddings.weight is not readable"),
        (damage(f"{ITERATION}/__0_0.distcp", None), "__0_0.distcp is missing"),
    ],
)
def test_damaged_folders(
    change: Callable[[Path], None], words: str, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    export_megatron(checkpoints["hybrid"], tmp_path / "theirs")
    change(tmp_path / "theirs")
    with pytest.raises(ValueError, match=words) as raised:
        import_megatron(tmp_path / "theirs", tmp_path / "back", CONFIGS)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_what_arguments_do_not_tell(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    """Overrides do, or a config of ours."""
    checkpoint = checkpoints["hybrid"]
    folder = foreign(tmp_path / "theirs", checkpoint, lambda tensors, arguments: arguments.clear())
    told = {"norm_eps": 1e-5, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 24, "rope": "false"}
    overrides = [f"model.{key}={value}" for key, value in {**told, "mamba_num_groups": 2}.items()]
    import_megatron(folder, tmp_path / "one", CONFIGS, overrides=overrides)
    back = open_checkpoint(tmp_path / "one", CONFIGS)
    assert replace(back.config.model, name="tiny", mamba_chunk_size=16) == replace(
        checkpoint.config.model, nvfp4_bf16_blocks=back.config.model.nvfp4_bf16_blocks
    )
    assert all(torch.equal(back.tensor(name), checkpoint.tensor(name)) for name in back.tensors)
    with pytest.raises(ValueError, match=r"give model.key=value"):
        import_megatron(folder, tmp_path / "two", CONFIGS, overrides=["train.steps=3"])
    with pytest.raises(ValueError, match=r"model.vocab_size is 4096 in tiny, and 300"):
        import_megatron(folder, tmp_path / "two", CONFIGS, model="tiny", overrides=overrides)
    sizes = {key: getattr(checkpoint.config.model, key) for key in ("hidden_dim", "ffn_dim", "mamba_num_heads")}
    sizes |= {"vocab_size": 300, "mamba_head_dim": 16, "mamba_state_dim": 40, "mamba_chunk_size": 128}
    more = [f"model.{key}={value}" for key, value in sizes.items()]
    settings = import_megatron(folder, tmp_path / "two", CONFIGS, model="tiny", overrides=[*overrides, *more])
    assert settings["name"] == "tiny" and settings["nvfp4_bf16_blocks"] == {"first": 0, "last": 2}


def test_the_length_of_sequences_travels(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    folder = foreign(tmp_path / "theirs", checkpoints["hybrid"], argument(max_position_embeddings=8191))
    import_megatron(folder, tmp_path / "back", CONFIGS)
    assert sequence_length(open_checkpoint(tmp_path / "back", CONFIGS)) == 8191


def test_padded_vocabularies_are_cut(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    def pad(tensors: dict[str, Tensor], arguments: dict[str, Any]) -> None:
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensors[key] = torch.cat([tensors[key], torch.ones(84, 64)])

    checkpoint = checkpoints["transformer"]
    folder = foreign(tmp_path / "theirs", checkpoint, pad)
    assert import_megatron(folder, tmp_path / "all", CONFIGS)["vocab_size"] == 384
    import_megatron(folder, tmp_path / "cut", CONFIGS, overrides=["model.vocab_size=300"])
    back = open_checkpoint(tmp_path / "cut", CONFIGS)
    assert torch.equal(back.tensor("head.weight"), checkpoint.tensor("head.weight"))
    with pytest.raises(ValueError, match=r"word_embeddings.weight is \[384, 64\] there, \[400, 64\]"):
        import_megatron(folder, tmp_path / "more", CONFIGS, overrides=["model.vocab_size=400"])


def test_tokenizers_travel(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some words, and some more words"] * 20, 290)
    export_megatron(checkpoints["transformer"], tmp_path / "out", tokenizer=tokenizer)
    import_megatron(tmp_path / "out" / ITERATION, tmp_path / "one", CONFIGS)
    kept = open_checkpoint(tmp_path / "one", CONFIGS)
    found = tokenizer_of(kept)
    assert found is not None and found.fingerprint() == tokenizer.fingerprint()
    export_megatron(kept, tmp_path / "again", tokenizer=found)
    names = [path.name for path in (tmp_path / "out" / "tokenizer").iterdir()]
    for name in names:
        first, second = ((tmp_path / folder / "tokenizer" / name).read_bytes() for folder in ("out", "again"))
        assert first == second
    assert "tokenizer.json" in names

    bare = foreign(tmp_path / "theirs", checkpoints["transformer"], lambda tensors, arguments: None)
    import_megatron(bare, tmp_path / "none", CONFIGS)
    assert tokenizer_of(open_checkpoint(tmp_path / "none", CONFIGS)) is None
    given = tmp_path / "out" / "tokenizer" / "tokenizer.json"
    import_megatron(bare, tmp_path / "given", CONFIGS, tokenizer=given)
    identity = open_checkpoint(tmp_path / "given", CONFIGS).manifest.identity
    assert identity["data.tokenizer"] == tokenizer.fingerprint()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has neither tokenizer"):
        import_megatron(bare, tmp_path / "two", CONFIGS, tokenizer=tmp_path / "empty")
    large = train_tokenizer([Path(__file__).read_text()], 400)
    (tmp_path / "large.json").write_bytes(tokenizer_files(large, 64)["tokenizer.json"])
    with pytest.raises(ValueError, match="has 400 ids and the model only 300"):
        import_megatron(bare, tmp_path / "two", CONFIGS, tokenizer=tmp_path / "large.json")
    assert not (tmp_path / "two").exists()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class _Theirs(dict):
    """A class that nobody here has, filled like a dictionary."""


def test_no_pickle_is_run(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    """Objects of others are left out, whatever they would do."""
    export_megatron(checkpoints["hybrid"], tmp_path / "theirs")
    iteration, exploded = tmp_path / "theirs" / ITERATION, tmp_path / "exploded"
    common = torch.load(iteration / "common.pt", weights_only=False)
    torch.save({**common, "rerun": _Bomb(exploded), "more": _Theirs(a=_Bomb(exploded))}, iteration / "common.pt")
    metadata: Metadata = pickle.loads((iteration / METADATA).read_bytes())
    metadata.mcore_data = {"a": _Theirs(b=1), "c": [_Bomb(exploded)]}
    (iteration / METADATA).write_bytes(pickle.dumps(metadata))
    import_megatron(tmp_path / "theirs", tmp_path / "back", CONFIGS)
    assert not exploded.exists()
    with pytest.raises(DamagedCheckpointError, match="which no checkpoint holds"):
        read_metadata((iteration / METADATA).read_bytes())
    pickle.loads((iteration / METADATA).read_bytes())
    assert exploded.exists()
