"""GGUF files, read by the `gguf` package; `tests/engines.py` compares llama.cpp's answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from data.tokenizer import CL100K, HuggingFaceTokenizer, train_tokenizer
from exchange.architectures import sections_of
from exchange.gguf import export_gguf
from exchange.nvfp4 import TrainedPlan, multiplied_weight
from megatron_fp4.parallel.mesh import ParallelMesh
from tests.composing import composed, plans_of
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of
from tests.exchange.test_nvfp4 import HYBRID, TRANSFORMER
from tests.exchange.test_tokenizer_files import pieces

NAMES = {
    "embeddings": "token_embd", "embed_tokens": "token_embd", "norm_f": "output_norm", "model.norm": "output_norm",
    "lm_head": "output", "norm": "attn_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mixer.norm": "ssm_norm", "in_proj": "ssm_in", "out_proj": "ssm_out", "conv1d": "ssm_conv1d", "A_log": "ssm_a",
    "D": "ssm_d", "dt_bias": "ssm_dt.bias", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "up_proj": "ffn_up", "gate_proj": "ffn_gate", "down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """`blk.2.attn_q` of `backbone.layers.2.mixer.q_proj.weight`."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    ours = max((key for key in NAMES if f".{module}".endswith(f".{key}")), key=len)
    block = [part for part in name.split(".") if part.isdecimal()]
    end = ".bias" if name.endswith(".bias") else ""
    return f"blk.{block[0]}.{NAMES[ours]}{end}" if block else NAMES[ours]


def read(path: Path) -> dict[str, tuple[str, Any]]:
    """Type and data of every tensor, without the end of its name."""
    found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert {name.rpartition(".")[2] for name in found} <= {"weight", "bias", "scale", "ssm_a", "ssm_d"}
    return {name.removesuffix(".weight"): (of.tensor_type.name, of.data) for name, of in found.items()}


def in_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Rows j and j + head_dim / 2 of each head side by side."""
    order = [
        head + place // 2 + place % 2 * (head_dim // 2)
        for head in range(0, len(rows), head_dim)
        for place in range(head_dim)
    ]
    return rows[order]


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["hybrid", "transformer", "llama"])
def test_every_tensor_is_in_the_file(name: str, kind: str, tmp_path: Path, mesh: ParallelMesh) -> None:
    config = CASES[name]
    checkpoint = checkpoint_of(tmp_path / "c", config, tensors_of(strong_model(config, mesh)))
    export_gguf(checkpoint, tmp_path / "m.gguf", kind=kind)
    found = read(tmp_path / "m.gguf")
    for ours, parts in sections_of(config).items():
        for part in parts:
            values, stored = part.published(checkpoint.tensor(ours)), gguf_name(part.name)
            if config.rope and stored.endswith(("attn_q", "attn_k")):
                values = in_pairs(values, config.head_dim)
            values = -values.exp() if stored.endswith("ssm_a") else values
            form, data = found.pop(stored)
            matrix = values.dim() == 2
            assert form == ("BF16" if matrix and kind == "bf16" else "F32"), stored
            expected = values.to(torch.bfloat16).float() if form == "BF16" else values
            assert np.array_equal(dequantize(data, GGMLQuantizationType[form]).reshape(-1), expected.reshape(-1)), (
                stored
            )
    assert not found


SIZES = ["model.ffn_dim=128", "model.num_query_heads=8", "model.mamba_num_heads=8"]


def test_codes_and_scales_decode_to_what_training_multiplied(tmp_path: Path, mesh: ParallelMesh) -> None:
    config = composed(*HYBRID, *SIZES, "precision=nvfp4")
    model, plan = strong_model(config.model, mesh), plans_of(config)[0]
    checkpoint, trained = (
        checkpoint_of(tmp_path / "c", config.model, tensors_of(model)),
        TrainedPlan(plan, torch.bfloat16),
    )
    export_gguf(checkpoint, tmp_path / "m.gguf", kind="nvfp4", trained=trained)
    found, rows = read(tmp_path / "m.gguf"), trained.nvfp4_linears()
    assert rows
    for ours, parts in sections_of(config.model).items():
        row = rows.get(ours.removesuffix(".weight"))
        for part in parts:
            form, data = found[gguf_name(part.name)]
            assert (form == "NVFP4") == (row is not None)
            if row is not None:
                operand, scale = multiplied_weight(checkpoint.tensor(ours), row, torch.bfloat16)
                values = dequantize(data, GGMLQuantizationType.NVFP4)
                assert np.array_equal(values, part.published(operand)), part.name
                assert found[f"{gguf_name(part.name)}.scale"][1] == scale.numpy(), part.name


OWN = train_tokenizer(["some text and more"] * 9, 280).content
SPLIT = {"type": "Split", "pattern": {"Regex": CL100K}, "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize("pre", [{}, {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, LEVEL]}}])
def test_the_tokenizer_is_in_the_file(pre: dict[str, Any], tmp_path: Path, mesh: ParallelMesh) -> None:
    config, tokenizer = CASES["transformer"], HuggingFaceTokenizer(json.dumps(json.loads(OWN) | pre), "own")
    checkpoint = checkpoint_of(tmp_path / "c", config, tensors_of(strong_model(config, mesh)))
    export_gguf(checkpoint, tmp_path / "m.gguf", tokenizer=tokenizer)
    fields = {
        name.removeprefix("tokenizer.ggml."): of.contents()
        for name, of in GGUFReader(tmp_path / "m.gguf").fields.items()
    }
    model = json.loads(OWN)["model"]
    assert (fields["model"], fields["pre"]) == ("gpt2", "dbrx" if pre else "gpt-2")
    assert {token: number for number, token in enumerate(fields["tokens"][: tokenizer.vocab_size])} == model["vocab"]
    assert len(fields["tokens"]) == config.vocab_size and fields["tokens"][-1] == "[PAD299]"
    assert fields["merges"] == [" ".join(pair) for pair in model["merges"]]
    assert fields["token_type"][tokenizer.eod_id] == 3 and fields["eos_token_id"] == tokenizer.eod_id
    assert fields["add_bos_token"] is False


def test_what_llama_cpp_does_not_compute_is_refused(tmp_path: Path, mesh: ParallelMesh) -> None:
    normalizing = HuggingFaceTokenizer(json.dumps(json.loads(OWN) | {"normalizer": {"type": "NFC"}}), "nfc")
    for overrides, tokenizer, words in (
        (
            [*TRANSFORMER, *SIZES, "precision=nvfp4"],
            None,
            "does not multiply the FFNs of an arcee by their tensor scales; give",
        ),
        ([*HYBRID, "precision=nvfp4"], None, "96 input features, and llama.cpp stores NVFP4 in groups of 64; give"),
        (
            [*HYBRID, *SIZES, "model.vocab_size=420"],
            normalizing,
            "llama.cpp has no tokenizer like nfc: only byte-level",
        ),
        ([*HYBRID, *SIZES, "model.vocab_size=420"], pieces("bpe", True, "identity"), "no tokenizer like pieces.model:"),
    ):
        config = composed(*overrides)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        checkpoint = checkpoint_of(folder, config.model, tensors_of(strong_model(config.model, mesh)))
        trained = TrainedPlan(plans_of(config)[0], torch.bfloat16)
        with pytest.raises(ValueError, match=words):
            export_gguf(
                checkpoint,
                tmp_path / "m.gguf",
                kind="nvfp4",
                trained=None if tokenizer else trained,
                tokenizer=tokenizer,
            )
    assert not list(tmp_path.glob("*.gguf"))
