"""GGUF files, read by the `gguf` package; `tests/engines.py` compares llama.cpp's answers."""

import json
from dataclasses import replace
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
from exchange.checkpoint import Checkpoint
from exchange.gguf import export_gguf
from exchange.nvfp4 import TrainedPlan, multiplied_weight
from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from tests.composing import composed, plans_of
from tests.exchange.models import CASES, checkpoint_of, strong_model, tensors_of
from tests.exchange.test_nvfp4 import HYBRID, TRANSFORMER
from tests.exchange.test_tokenizer_files import pieces

OWN = train_tokenizer(["some text and more"] * 9, 280).content
SPLIT = {"type": "Split", "pattern": {"Regex": CL100K}, "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SIZES = ["model.ffn_dim=128", "model.num_query_heads=8", "model.mamba_num_heads=8"]
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
    return {of.name.removesuffix(".weight"): (of.tensor_type.name, of.data) for of in GGUFReader(path).tensors}


def in_pairs(values: Tensor, name: str, config: ModelConfig) -> Tensor:
    """Rows j and j + head_dim / 2 of each head of q and k side by side."""
    if not config.rope or ("q_proj" not in name and "k_proj" not in name):
        return values
    heads, half = values.split(config.head_dim), config.head_dim // 2
    return torch.stack([row for head in heads for pair in zip(head[:half], head[half:], strict=True) for row in pair])


@pytest.mark.parametrize(("name", "kind"), [("hybrid", "f32"), ("transformer", "bf16"), ("llama", "bf16")])
def test_tensors_and_tokenizer_are_in_the_file(name: str, kind: str, tmp_path: Path, mesh: ParallelMesh) -> None:
    config = replace(CASES[name], vocab_size=300)
    pre = {} if name == "llama" else {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, LEVEL]}}
    tokenizer = HuggingFaceTokenizer(json.dumps(json.loads(OWN) | pre), "own")
    checkpoint = checkpoint_of(tmp_path / "c", config, tensors_of(strong_model(config, mesh)))
    export_gguf(checkpoint, tmp_path / "m.gguf", kind=kind, tokenizer=tokenizer)
    found = read(tmp_path / "m.gguf")
    for ours, parts in sections_of(config).items():
        for part in parts:
            values, stored = part.published(checkpoint.tensor(ours)), gguf_name(part.name)
            values = in_pairs(values, part.name, config)
            values = -values.exp() if stored.endswith("ssm_a") else values
            form, data = found.pop(stored)
            assert form == ("BF16" if values.dim() == 2 and kind == "bf16" else "F32"), stored
            expected = values.to(torch.bfloat16).float() if form == "BF16" else values
            assert np.array_equal(dequantize(data, GGMLQuantizationType[form]).ravel(), expected.ravel()), stored
    assert not found
    fields = {
        key.removeprefix("tokenizer.ggml."): of.contents() for key, of in GGUFReader(tmp_path / "m.gguf").fields.items()
    }
    vocab, merges = (json.loads(OWN)["model"][key] for key in ("vocab", "merges"))
    assert (fields["model"], fields["pre"], fields["add_bos_token"]) == ("gpt2", "dbrx" if pre else "gpt-2", False)
    assert {token: number for number, token in enumerate(fields["tokens"][: len(vocab)])} == vocab
    assert len(fields["tokens"]) == 300 and fields["merges"] == [" ".join(pair) for pair in merges]
    assert fields["token_type"][tokenizer.eod_id] == 3 and fields["eos_token_id"] == tokenizer.eod_id


def nvfp4(folder: Path, mesh: ParallelMesh, *overrides: str) -> tuple[Checkpoint, TrainedPlan]:
    config = composed(*overrides, "precision=nvfp4")
    checkpoint = checkpoint_of(folder, config.model, tensors_of(strong_model(config.model, mesh)))
    return checkpoint, TrainedPlan(plans_of(config)[0], torch.bfloat16)


@pytest.mark.parametrize("model", [HYBRID, [*TRANSFORMER, "model.pattern='*G*G*G'"]])
def test_codes_and_scales_decode_to_what_training_multiplied(
    model: list[str], tmp_path: Path, mesh: ParallelMesh
) -> None:
    checkpoint, trained = nvfp4(tmp_path / "c", mesh, *model, *SIZES)
    config = checkpoint.config.model
    export_gguf(checkpoint, tmp_path / "m.gguf", kind="nvfp4", trained=trained)
    found, rows = read(tmp_path / "m.gguf"), trained.nvfp4_linears()
    for ours, parts in sections_of(config).items():
        row = rows.pop(ours.removesuffix(".weight"), None)
        for part, (form, data) in ((part, found[gguf_name(part.name)]) for part in parts):
            assert (form == "NVFP4") == (row is not None)
            if row is not None:
                operand, scale = multiplied_weight(checkpoint.tensor(ours), row, torch.bfloat16)
                expected = in_pairs(part.published(operand), part.name, config)
                assert np.array_equal(dequantize(data, GGMLQuantizationType.NVFP4), expected), part.name
                assert found[f"{gguf_name(part.name)}.scale"][1] == scale.numpy(), part.name
    assert not rows


def test_what_llama_cpp_does_not_compute_is_refused(tmp_path: Path, mesh: ParallelMesh) -> None:
    normalizing = HuggingFaceTokenizer(json.dumps(json.loads(OWN) | {"normalizer": {"type": "NFC"}}), "nfc")
    for number, (overrides, tokenizer, words) in enumerate(
        (
            ([*TRANSFORMER, *SIZES], None, "does not multiply the FFNs of an arcee by their tensor scales; give"),
            (HYBRID, None, "96 input features, and llama.cpp stores NVFP4 in groups of 64; give"),
            ([*HYBRID, *SIZES], normalizing, "llama.cpp has no tokenizer like nfc: only byte-level"),
            ([*HYBRID, *SIZES], pieces("bpe", True, "identity"), "no tokenizer like pieces.model:"),
        )
    ):
        checkpoint, trained = nvfp4(tmp_path / f"{number}", mesh, *overrides, "model.vocab_size=420")
        with pytest.raises(ValueError, match=words):
            export_gguf(checkpoint, tmp_path / "m.gguf", kind="nvfp4", trained=trained, tokenizer=tokenizer)
    checkpoint = checkpoint_of(tmp_path / "e", CASES["experts"], tensors_of(strong_model(CASES["experts"], mesh)))
    with pytest.raises(
        ValueError, match=r"mixer\.gate\.weight has no name in a GGUF file of nemotron_h; use export-hf"
    ):
        export_gguf(checkpoint, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf"))
