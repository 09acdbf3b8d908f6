"""A model as Megatron-LM's arguments, and back.

Names are those of Megatron-LM's argument namespace (core_v0.16.1, megatron/training/arguments.py), which a checkpoint
keeps in `common.pt` and `--use-checkpoint-args` takes from there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from exchange.megatron.names import model_class
from megatron_fp4.config.schema import ModelConfig

# What MambaMixer has fixed.
_CONV_WIDTH, _GATED_NORM_EPS = 4, 1e-5
_SPEC = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
TOKENIZER = "tokenizer"
"""Folder of an export's tokenizer."""
SCRIPTS = {"gpt": "pretrain_gpt.py", "mamba": "pretrain_mamba.py"}

# Argument -> flag; one that is true is a flag without a value.
_FLAGS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "group_query_attention": "--group-query-attention",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "hybrid_override_pattern": "--hybrid-override-pattern",
    "is_hybrid_model": "--is-hybrid-model",
    "mamba_num_heads": "--mamba-num-heads",
    "mamba_head_dim": "--mamba-head-dim",
    "mamba_num_groups": "--mamba-num-groups",
    "mamba_state_dim": "--mamba-state-dim",
    "spec": "--spec",
    "squared_relu": "--squared-relu",
    "disable_bias_linear": "--disable-bias-linear",
    "normalization": "--normalization",
    "norm_epsilon": "--norm-epsilon",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "position_embedding_type": "--position-embedding-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "padded_vocab_size": "--padded-vocab-size",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
    "seq_length": "--seq-length",
    "max_position_embeddings": "--max-position-embeddings",
    "attention_dropout": "--attention-dropout",
    "hidden_dropout": "--hidden-dropout",
    "init_method_std": "--init-method-std",
    "bf16": "--bf16",
    "ckpt_format": "--ckpt-format",
}


def check_fits(config: ModelConfig) -> None:
    """Raise ValueError, naming key and value, for what Megatron's model of this kind cannot be told."""
    if model_class(config) == "mamba":
        if config.norm_eps != _GATED_NORM_EPS and "M" in config.pattern:
            raise ValueError(
                f"model.norm_eps={config.norm_eps}: the norm behind Megatron's Mamba-2 scan has {_GATED_NORM_EPS}, "
                "which no argument changes"
            )
        if config.mamba_conv_width != _CONV_WIDTH and "M" in config.pattern:
            raise ValueError(
                f"model.mamba_conv_width={config.mamba_conv_width}: Megatron's Mamba-2 convolution has {_CONV_WIDTH}, "
                "which no argument changes"
            )
    if config.rope and config.rope_base != int(config.rope_base):
        raise ValueError(f"model.rope_base={config.rope_base}: Megatron's --rotary-base is a whole number")


def arguments_of(config: ModelConfig, sequence_length: int, bf16: bool) -> dict[str, Any]:
    """What makes Megatron-LM build this model. bf16: in which type it trains it."""
    kind = model_class(config)
    arguments: dict[str, Any] = {
        "num_layers": len(config.pattern) // (2 if kind == "gpt" else 1),
        "hidden_size": config.hidden_dim,
        "ffn_hidden_size": config.ffn_dim,
        "num_attention_heads": config.num_query_heads,
        "group_query_attention": True,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "squared_relu": True,
        "swiglu": False,
        "disable_bias_linear": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "normalization": "RMSNorm",
        "norm_epsilon": config.norm_eps,
        "layernorm_epsilon": config.norm_eps,
        "apply_layernorm_1p": False,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope" if config.rope else "none",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "padded_vocab_size": config.vocab_size,
        # Then Megatron pads it no further, as long as the tensor-parallel size divides what is left.
        "make_vocab_size_divisible_by": min(config.vocab_size & -config.vocab_size, 128),
        "seq_length": sequence_length,
        "max_position_embeddings": sequence_length,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": config.init_std,
        "bf16": bf16,
        "ckpt_format": "torch_dist",
    }
    if config.rope:
        arguments["rotary_base"] = int(config.rope_base)
    if kind == "mamba":
        arguments |= {
            "hybrid_override_pattern": config.pattern,
            "is_hybrid_model": True,
            "mamba_num_heads": config.mamba_num_heads,
            "mamba_head_dim": config.mamba_head_dim,
            "mamba_num_groups": config.mamba_num_groups,
            "mamba_state_dim": config.mamba_state_dim,
            "spec": _SPEC,
        }
    return arguments


def flags_of(arguments: Mapping[str, Any]) -> list[list[str]]:
    """The same on a command line, each flag with its values."""
    flags = []
    for name, flag in _FLAGS.items():
        value = arguments.get(name)
        if value is True:
            flags.append([flag])
        elif value is not None and value is not False:
            flags.append([flag, *(map(str, value) if isinstance(value, list) else (str(value),))])
    return flags


def as_shell(arguments: Mapping[str, Any]) -> str:
    """The flags as a bash array `MEGATRON_ARGS`: a pattern has stars, which a shell must not look up."""
    lines = "\n".join(f"  {shlex.join(flag)}" for flag in flags_of(arguments))
    return f"MEGATRON_ARGS=(\n{lines}\n)\n"


# Argument -> the values with which a model here computes the same; without the argument it is the first.
_WANTED: dict[str, tuple[Any, ...]] = {
    "squared_relu": (True,),
    "swiglu": (False,),
    "quick_geglu": (False,),
    "normalization": ("RMSNorm",),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "position_embedding_type": ("none", "rope"),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None,),
    "use_rope_scaling": (False,),
    "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "multi_latent_attention": (False,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "num_experts": (None,),
    "mtp_num_layers": (None, 0),
    "untie_embeddings_and_output_weights": (True,),
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError, naming argument and value, if Megatron's model computes what none here does."""
    for name, wanted in _WANTED.items():
        if name in arguments and arguments[name] not in wanted:
            able = " or ".join(map(str, wanted))
            raise ValueError(f"Megatron's {name}={arguments[name]}; models here have {able}, and nothing else")


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ModelConfig that Megatron's arguments tell and shapes do not; those that it does not name are
    missing. Raises ValueError, naming the argument, for one that is no number above 0."""

    def number(name: str, kind: type) -> Any:
        value = arguments.get(name)
        if value is not None and (type(value) not in (int, kind) or not value > 0):
            raise ValueError(f"Megatron's {name}={value!r} is no number above 0; the checkpoint is damaged")
        return value

    heads, hidden = number("num_attention_heads", int), number("hidden_size", int)
    found: dict[str, Any] = {
        "num_query_heads": heads,
        "num_kv_heads": number("num_query_groups", int),
        "head_dim": number("kv_channels", int),
        "mamba_num_groups": number("mamba_num_groups", int),
        "norm_eps": number("norm_epsilon", float) or number("layernorm_epsilon", float),
        "init_std": number("init_method_std", float),
    }
    if arguments.get("group_query_attention") is False:
        found["num_kv_heads"] = heads
    if found["head_dim"] is None and heads and hidden:
        found["head_dim"] = hidden // heads
    if "position_embedding_type" in arguments:
        found["rope"] = arguments["position_embedding_type"] == "rope"
        base = number("rotary_base", float)
        found["rope_base"] = None if base is None else float(base)
    return {name: value for name, value in found.items() if value is not None}
