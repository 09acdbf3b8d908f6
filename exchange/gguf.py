"""Exports a checkpoint as a GGUF file for llama.cpp: weights in F32, BF16 or NVFP4, and the tokenizer.

llama.cpp's own converter rejects tokenizers that were trained here (it recognizes published ones by a hash of ids) and
takes some dense hybrids for mixtures of experts. Here both are known.

Differences to a Hugging Face folder: A is -exp(A_log); q and k have the rows of a head in pairs, because llama.cpp
rotates neighbours where transformers rotates halves; a group of 64 NVFP4 elements has its four block scales first, then
in each block the elements 0 to 7 in low nibbles and 8 to 15 in high ones; the tensor scale is a tensor of its own.

Sources: gguf 0.19 (`quants.py`, `tensor_mapping.py`); llama.cpp of 2026-10 (`conversion/*.py`, `src/llama-vocab.cpp`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.tokenizer import CL100K, GPT2, QWEN2, TextTokenizer, WordCache
from exchange.architectures import ARCEE, NEMOTRON_H, architecture_of, sections_of
from exchange.checkpoint import Checkpoint, check_tensors
from exchange.hf_export import sequence_length
from exchange.nvfp4 import TrainedPlan, reordered, trained_weight
from exchange.tokenizer import WITHOUT, tokenizer_files
from exchange.weights_only import check_output
from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.logging.console import tracked
from megatron_fp4.logging.files import replace_file
from megatron_fp4.quantization.rounding import E4M3_MAX
from megatron_fp4.quantization.tensor import NVFP4Tensor, tensor_decode_scale
from models.attention import Attention
from models.mlp import MLP
from models.pattern import blocks_of
from models.published import Section, shape_of

FORMATS = ("bf16", "f32", "nvfp4")
_GROUP = 64  # elements of one row in a unit of NVFP4
# llama.cpp's name of what cuts a text into words, by expression and `ignore_merges`.
_PRE_TOKENIZERS: dict[tuple[str | None, bool], str] = {
    (GPT2, False): "gpt-2",
    (CL100K, False): "dbrx",
    (CL100K, True): "llama-bpe",
    (QWEN2, False): "qwen2",
}


def export_gguf(
    checkpoint: Checkpoint,
    output: Path,
    *,
    kind: str = "bf16",
    trained: TrainedPlan | None = None,
    tokenizer: TextTokenizer | None = None,
) -> None:
    """Write the file `output`, which must not exist; it appears only when it is complete.

    kind: of the weights, one of FORMATS; vectors, the convolution, A and D are F32. trained: for NVFP4, the plan that
    the weights were trained with; linears without codes are BF16 then.
    Raises ValueError for a model or tokenizer that llama.cpp does not compute, a missing package, NaN or inf in a
    weight to be quantized, or an output that exists; DamagedCheckpointError; OSError.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"a GGUF file needs a package of an extra ({error}): pip install -e '.[gguf]'") from error
    check_output(output, checkpoint.folder)
    config = checkpoint.config.model
    architecture, sections = architecture_of(config), sections_of(config)
    shapes = {name: shape_of(parts) for name, parts in sections.items()}
    check_tensors(checkpoint.tensors, shapes, checkpoint.folder)
    rows = {} if trained is None else {f"{name}.weight": row for name, row in trained.nvfp4_linears().items()}
    if rows and architecture == ARCEE:
        raise ValueError(
            "llama.cpp does not multiply the FFNs of an arcee by their tensor scales; give --format bf16, or export-hf "
            "--format nvfp4 for other engines"
        )
    for row in (row.linear for row in rows.values() if row.linear.in_features % _GROUP):
        raise ValueError(
            f"{row.name} has {row.in_features} input features, and llama.cpp stores NVFP4 in groups of {_GROUP}; give "
            "--format bf16"
        )
    writer = gguf.GGUFWriter(None, architecture)
    file_type = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "nvfp4": "MOSTLY_NVFP4"}[kind]
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(config.name)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _describe(writer, config, architecture, sequence_length(checkpoint))
    _describe_tokenizer(writer, config.vocab_size, tokenizer, checkpoint)
    named: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_blocks)

    def tensors(name: str, ours: Tensor, codes: NVFP4Tensor | None) -> Iterator[tuple[str, str, Tensor]]:
        for part in sections[name]:
            stored = named.get_name(part.name.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))
            if stored is None:
                raise ValueError(f"{part.name} has no name in a GGUF file of {architecture}; use export-hf")
            if codes is None:
                yield stored, *_plain(part, ours, config, kind)
            else:
                order = torch.arange(codes.shape[0]) if part.rows is None else part.rows
                made = reordered(codes, _in_pairs(order, part, config))
                yield stored, "NVFP4", _grouped(made)
                yield stored.replace(".weight", ".scale"), "F32", tensor_decode_scale(made.amax, made.scale_max).view(1)

    # llama.cpp does not compute multi-token prediction, and the model does without.
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    for name, shape in shapes.items():
        described = tensors(name, torch.empty(shape, device="meta"), _empty_codes(shape) if name in rows else None)
        for stored, form, tensor in described:
            dtype = np.dtype("uint8" if tensor.dtype == torch.uint8 else "float32")
            writer.add_tensor_info(stored, tensor.shape, dtype, tensor.nbytes, gguf.GGMLQuantizationType[form])
    checkpoint.verify()  # after the other checks, because it reads every file

    def write(path: Path) -> None:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in tracked(shapes, "parameters written"):
            ours = checkpoint.tensor(name)
            row = rows.get(name)
            codes = None if row is None or trained is None else trained_weight(ours, row, trained.compute_dtype)
            for _, _, tensor in tensors(name, ours, codes):
                writer.write_tensor_data(tensor.contiguous().numpy())
        writer.close()

    replace_file(output, write)


def _plain(part: Section, ours: Tensor, config: ModelConfig, kind: str) -> tuple[str, Tensor]:
    """A tensor without codes, as (type, values); BF16 as bytes."""
    values, name = part.published(ours), part.name.rpartition("mixer.")[2]
    if name == "A_log":
        values = -values.exp()
    if name in ("A_log", "D"):
        values = values.view(-1, 1)
    elif name == "norm.weight" and "mixer." in part.name:
        values = values.view(config.mamba_num_groups, -1)
    elif name == "conv1d.weight":
        values = values.squeeze(1)
    else:
        values = _in_pairs(values, part, config)
    is_matrix = values.dim() == 2 and not part.fp32 and name not in ("conv1d.weight", "norm.weight")
    if kind == "f32" or not is_matrix:
        return "F32", values
    return "BF16", values.to(torch.bfloat16).contiguous().view(torch.uint8)


def _in_pairs(rows: Tensor, part: Section, config: ModelConfig) -> Tensor:
    """The rows of q and k in the order of llama.cpp: those that RoPE rotates together side by side."""
    if not (config.rope and part.module.endswith(("q_proj", "k_proj"))):
        return rows
    return rows.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _empty_codes(shape: torch.Size) -> NVFP4Tensor:
    rows, columns = shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
    scales = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn, device="meta")
    return NVFP4Tensor(codes, scales, (1, 16), amax=torch.empty((), device="meta"), scale_max=E4M3_MAX)


def _grouped(tensor: NVFP4Tensor) -> Tensor:
    """Codes and block scales as llama.cpp reads them: uint8 [rows, columns / 64 * 36]."""
    rows, nibbles = tensor.codes.shape[0], torch.stack([tensor.codes & 15, tensor.codes >> 4], dim=-1)
    low, high = nibbles.view(rows, -1, 4, 2, 8).unbind(3)
    scales = tensor.scales.view(torch.uint8).view(rows, -1, 4)
    return torch.cat([scales, (low | high << 4).flatten(2)], dim=2).flatten(1)


def _describe(writer: Any, config: ModelConfig, architecture: str, length: int) -> None:
    blocks = blocks_of(config)
    writer.add_context_length(length)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_head_count(config.num_query_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if architecture != NEMOTRON_H:
        writer.add_block_count(config.num_blocks // 2)
        writer.add_feed_forward_length(config.ffn_dim)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_base)
        return
    writer.add_block_count(config.num_blocks)
    writer.add_layer_norm_eps(config.norm_eps)  # llama.cpp demands it and takes the other
    # Where both are 0, the block is a Mamba-2.
    writer.add_feed_forward_length([config.ffn_dim if block is MLP else 0 for block in blocks])
    writer.add_head_count_kv([config.num_kv_heads if block is Attention else 0 for block in blocks])
    writer.add_ssm_conv_kernel(config.mamba_conv_width)
    writer.add_ssm_inner_size(config.mamba_inner_dim)
    writer.add_ssm_state_size(config.mamba_state_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_group_count(config.mamba_num_groups)


def _describe_tokenizer(writer: Any, rows: int, tokenizer: TextTokenizer | None, checkpoint: Checkpoint) -> None:
    """The vocabulary, with a token for every row of the embedding. Raises ValueError for one that llama.cpp lacks."""
    import gguf

    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    pre, settings = _pre_tokenizer(tokenizer, checkpoint)
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [gguf.TokenType.UNUSED] * rows
    for token, number in settings["model"]["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in settings["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in settings["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eod_id)
    writer.add_pad_token_id(tokenizer.eod_id)
    writer.add_bos_token_id(tokenizer.eod_id if tokenizer.bos_id is None else tokenizer.bos_id)
    writer.add_add_bos_token(tokenizer.bos_id is not None)


def _pre_tokenizer(tokenizer: TextTokenizer, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    content = tokenizer_files(tokenizer, sequence_length(checkpoint), checkpoint.read)["tokenizer.json"]
    settings: dict[str, Any] = json.loads(content)
    expression = WordCache.expression_of(settings)
    pre = _PRE_TOKENIZERS.get((expression, bool(settings["model"].get("ignore_merges"))))
    if settings["model"]["type"] != "BPE" or settings["normalizer"] is not None or pre is None:
        raise ValueError(
            f"llama.cpp has no tokenizer like {tokenizer.name}: only byte-level BPE that does not normalize text and "
            f"cuts it as GPT-2, cl100k or Qwen 2 do; {WITHOUT}"
        )
    return pre, settings
