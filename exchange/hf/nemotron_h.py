"""`nemotron_h` of transformers: hybrids of Mamba-2, attention without positions, and squared-ReLU FFNs.

Names and meaning are those of transformers 5.23 (models/nemotron_h); FFN blocks are known since 5.6. Two things of it:

- `hybrid_override_pattern` has our letters, and every version that knows FFN blocks reads it.
- dt = softplus(dt + dt_bias) is clamped below at `time_step_min` (5.4 to 5.10: at `time_step_limit`, whose default is
  no clamp), though not where one token is decoded. Training here has no clamp, so time_step_min is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from exchange.hf.sections import Section, in_sections
from megatron_fp4.config.schema import ModelConfig
from models.attention import qkv_order
from models.mamba2 import mamba_conv_order, mamba_in_proj_order

MODEL_TYPE = "nemotron_h"
CLASS = "NemotronHForCausalLM"
_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
_FIXED = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "residual_in_fp32": False,
    "num_nextn_predict_layers": 0,
    "sliding_window": None,
}
"""What a configuration must have, or leave out, for a model to be one of ours."""
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "num_query_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_num_groups": "n_groups",
    "mamba_state_dim": "ssm_state_size",
    "mamba_conv_width": "conv_kernel",
    "mamba_chunk_size": "chunk_size",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
}
"""Ours -> theirs."""


def misfit(config: ModelConfig) -> str | None:
    """Why a model cannot be a `nemotron_h`; None if it can."""
    return "model.rope=true, and its attention knows no positions" if config.rope and "*" in config.pattern else None


def sections(config: ModelConfig) -> dict[str, list[Section]]:
    """The published tensors of each of our parameters."""
    hidden, ffn = config.hidden_dim, config.ffn_dim
    inner, heads = config.mamba_inner_dim, config.mamba_num_heads
    channels = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    q_dim, kv_dim = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    in_proj, conv, qkv = (
        order(config) if letter in config.pattern else None
        for order, letter in ((mamba_in_proj_order, "M"), (mamba_conv_order, "M"), (qkv_order, "*"))
    )
    in_proj, conv = (None if order is None else order.argsort() for order in (in_proj, conv))
    found = {"embedding.weight": [Section("backbone.embeddings.weight", (config.vocab_size, hidden))]}
    for block, letter in enumerate(config.pattern):
        ours, theirs = f"blocks.{block}", f"backbone.layers.{block}"
        found[f"{ours}.norm.weight"] = [Section(f"{theirs}.norm.weight", (hidden,))]
        ours, theirs = f"{ours}.mixer", f"{theirs}.mixer"
        if letter == "M":
            found |= {
                f"{ours}.in_proj.weight": [
                    Section(f"{theirs}.in_proj.weight", (inner + channels + heads, hidden), in_proj)
                ],
                f"{ours}.conv.weight": [
                    Section(f"{theirs}.conv1d.weight", (channels, 1, config.mamba_conv_width), conv)
                ],
                f"{ours}.conv.bias": [Section(f"{theirs}.conv1d.bias", (channels,), conv)],
                **{
                    f"{ours}.ssm.{name}": [Section(f"{theirs}.{name}", (heads,), fp32=True)]
                    for name in ("A_log", "D", "dt_bias")
                },
                f"{ours}.norm.weight": [Section(f"{theirs}.norm.weight", (inner,))],
                f"{ours}.out_proj.weight": [Section(f"{theirs}.out_proj.weight", (hidden, inner))],
            }
        elif letter == "*":
            assert qkv is not None
            names = [f"{theirs}.{part}_proj.weight" for part in "qkv"]
            found |= {
                f"{ours}.qkv_proj.weight": in_sections(names, (q_dim, kv_dim, kv_dim), qkv, hidden),
                f"{ours}.out_proj.weight": [Section(f"{theirs}.o_proj.weight", (hidden, q_dim))],
            }
        else:
            found |= {
                f"{ours}.up_proj.weight": [Section(f"{theirs}.up_proj.weight", (ffn, hidden))],
                f"{ours}.down_proj.weight": [Section(f"{theirs}.down_proj.weight", (hidden, ffn))],
            }
    found["final_norm.weight"] = [Section("backbone.norm_f.weight", (hidden,))]
    # Said by itself: tying is not honoured, whatever the configuration says.
    found["head.weight"] = [Section("lm_head.weight", (config.vocab_size, hidden))]
    return found


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of the model."""
    inner, hidden = config.mamba_inner_dim, config.hidden_dim
    return {
        "architectures": [CLASS],
        "model_type": MODEL_TYPE,
        "hybrid_override_pattern": config.pattern,
        "num_hidden_layers": config.num_blocks,
        **{theirs: getattr(config, ours) for ours, theirs in _KEYS.items()},
        **{key: value for key, value in _FIXED.items() if value is not None},
        **({"expand": inner // hidden} if inner % hidden == 0 else {}),
        "time_step_min": 0.0,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "rescale_prenorm_residual": True,
        # Without attention, transformers' cache does not know how long it is, and a forward pass with one fails.
        "use_cache": "*" in config.pattern,
    }


def from_hf(found: Mapping[str, Any]) -> dict[str, Any]:
    """Our `model` settings of a config.json. Raises ValueError for what we have not, naming key and value."""
    config = {**_LEGACY_DEFAULTS, **found}
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={config[key]}, where only {value} can be imported")
    limits = [_number(limit) for limit in config.get("time_step_limit") or (0.0, math.inf)]
    if limits != [0.0, math.inf]:
        raise ValueError(f"time_step_limit={limits}; training here does not clamp the step sizes of Mamba-2")
    return {
        "pattern": _pattern(config),
        "rope": False,
        **{ours: config[theirs] for ours, theirs in _KEYS.items() if config.get(theirs) is not None},
    }


# What transformers takes a key for that is not there.
_LEGACY_DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
}


def _number(value: Any) -> float:
    """JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _pattern(config: Mapping[str, Any]) -> str:
    types = config.get("layers_block_type") or config.get("layer_types")
    if types is None:
        pattern = config.get("hybrid_override_pattern")
        if not isinstance(pattern, str):
            raise ValueError("neither hybrid_override_pattern nor layers_block_type says which blocks there are")
    else:
        unknown = next((kind for kind in types if kind not in _LETTERS), None)
        if unknown is not None:
            raise ValueError(f"layers_block_type has {unknown!r}; {', '.join(_LETTERS)} are known")
        pattern = "".join(_LETTERS[kind] for kind in types)
    return pattern
