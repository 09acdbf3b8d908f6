"""`arcee` of transformers: Transformers with RoPE, grouped queries and squared-ReLU FFNs, without biases.

Names and meaning are those of transformers 5.23 (models/arcee; known since 4.53). A layer there is two blocks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exchange.hf.sections import Section, in_sections
from megatron_fp4.config.schema import ModelConfig
from models.attention import qkv_order

MODEL_TYPE = "arcee"
CLASS = "ArceeForCausalLM"
_FIXED = {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "num_query_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
}
"""What transformers takes a key for that is not there."""


def misfit(config: ModelConfig) -> str | None:
    """Why a model cannot be an `arcee`; None if it can."""
    if config.pattern != "*-" * (config.num_blocks // 2) or not config.pattern:
        return f"model.pattern={config.pattern}, and its layers are attention and FFN in turn (*-*-...)"
    if not config.rope:
        return "model.rope=false, and its attention has rotary positions"
    if config.hidden_dim % config.num_query_heads:
        return (
            f"model.hidden_dim={config.hidden_dim} is not a multiple of model.num_query_heads="
            f"{config.num_query_heads}, which transformers asks of it"
        )
    return None


def sections(config: ModelConfig) -> dict[str, list[Section]]:
    """The published tensors of each of our parameters."""
    hidden, ffn = config.hidden_dim, config.ffn_dim
    q_dim, kv_dim = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    order = qkv_order(config)
    found = {"embedding.weight": [Section("model.embed_tokens.weight", (config.vocab_size, hidden))]}
    for layer in range(config.num_blocks // 2):
        attention, ffn_block, theirs = f"blocks.{2 * layer}", f"blocks.{2 * layer + 1}", f"model.layers.{layer}"
        names = [f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"]
        found |= {
            f"{attention}.norm.weight": [Section(f"{theirs}.input_layernorm.weight", (hidden,))],
            f"{attention}.mixer.qkv_proj.weight": in_sections(names, (q_dim, kv_dim, kv_dim), order, hidden),
            f"{attention}.mixer.out_proj.weight": [Section(f"{theirs}.self_attn.o_proj.weight", (hidden, q_dim))],
            f"{ffn_block}.norm.weight": [Section(f"{theirs}.post_attention_layernorm.weight", (hidden,))],
            f"{ffn_block}.mixer.up_proj.weight": [Section(f"{theirs}.mlp.up_proj.weight", (ffn, hidden))],
            f"{ffn_block}.mixer.down_proj.weight": [Section(f"{theirs}.mlp.down_proj.weight", (hidden, ffn))],
        }
    found["final_norm.weight"] = [Section("model.norm.weight", (hidden,))]
    found["head.weight"] = [Section("lm_head.weight", (config.vocab_size, hidden))]
    return found


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of the model."""
    return {
        "architectures": [CLASS],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": config.num_blocks // 2,
        **{theirs: getattr(config, ours) for ours, theirs in _KEYS.items()},
        **_FIXED,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "rope_theta": config.rope_base,  # the only place where transformers before 5.0 and engines with it look
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def from_hf(found: Mapping[str, Any]) -> dict[str, Any]:
    """Our `model` settings of a config.json. Raises ValueError for what we have not, naming key and value."""
    config = {**_DEFAULTS, **found}
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={config[key]}, where only {value} can be imported")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_parameters.rope_type={kind}, where only default can be imported")
    heads = config["num_attention_heads"]
    derived = {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }
    return {
        "pattern": "*-" * config["num_hidden_layers"],
        "rope": True,
        "rope_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        **{ours: {**config, **derived}[theirs] for ours, theirs in _KEYS.items()},
    }
