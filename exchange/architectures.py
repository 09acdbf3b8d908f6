"""Our models as architectures of transformers: name, shape and row order of every tensor, and config.json in both
directions.

nemotron_h   hybrids of Mamba-2, attention without positions, and squared-ReLU FFNs
arcee        Transformers with RoPE, grouped queries and squared-ReLU FFNs; one of its layers is two of our blocks

Names and meanings are those of transformers 5.23. nemotron_h supports FFN blocks since 5.6; every version that does
reads `hybrid_override_pattern`, which has our letters. It clamps dt = softplus(dt + dt_bias) from below at
`time_step_min` (versions 5.4 to 5.10 at `time_step_limit`, which has no clamp by default), except when it decodes a
single token. Training here does not clamp dt, so time_step_min is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.config.schema import ModelConfig
from models.attention import qkv_order
from models.mamba2 import mamba_conv_order, mamba_in_proj_order

NEMOTRON_H, ARCEE = "nemotron_h", "arcee"


@dataclass(frozen=True)
class Section:
    """A tensor of a published format that consists of rows of one of our parameters. The rows of our packed projections
    are ordered by group, those of published tensors by section (such as q, k, v).

    name, shape: of the published tensor. rows: int64, for each of its rows the number of our row; None if it is our
    complete parameter in our order. fp32: whether it is always written in FP32.
    """

    name: str
    shape: tuple[int, ...]
    rows: Tensor | None = None
    fp32: bool = False

    @property
    def module(self) -> str:
        """The published name of the module that has this weight."""
        return self.name.removesuffix(".weight")

    def published(self, ours: Tensor) -> Tensor:
        """This tensor, contiguous, from our parameter and in its dtype."""
        return (ours if self.rows is None else ours[self.rows]).contiguous().view(self.shape)


Sections = Mapping[str, Sequence[Section]]
"""Name of our parameter -> its published tensors."""


def split_rows(names: Sequence[str], sizes: Sequence[int], order: Tensor, *columns: int) -> list[Section]:
    """The sections of a parameter whose rows are `published[order]`. sizes: rows of each section. columns: their other
    axes."""
    rows = order.argsort().split(list(sizes))
    return [Section(name, (size, *columns), at) for name, size, at in zip(names, sizes, rows, strict=True)]


def from_published(sections: Sequence[Section], published: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `Section.published`: our parameter in FP32, from the published tensors by name."""
    shape = shape_of(sections)
    ours = torch.empty(shape)
    for section in sections:
        values = published[section.name].to(torch.float32)
        if section.rows is None:
            ours.copy_(values.view(shape))
        else:
            ours[section.rows] = values.view(-1, *shape[1:])
    return ours


def shape_of(sections: Sequence[Section]) -> torch.Size:
    """The shape of our parameter: the rows of all sections, and their columns without the axis of size 1 that published
    convolutions have."""
    rows, columns = sum(section.shape[0] for section in sections), sections[0].shape[1:]
    return torch.Size((rows, *(size for size in columns if size != 1 or len(columns) == 1)))


def architecture_of(config: ModelConfig) -> str:
    """The architecture that computes what `config` computes. Raises ValueError, with the reason, if there is none."""
    if not (config.rope and "*" in config.pattern):
        return NEMOTRON_H
    problem = None
    if config.pattern != "*-" * (config.num_blocks // 2):
        problem = f"{ARCEE} alternates attention and FFN (*-*-...), but model.pattern={config.pattern}"
    elif config.hidden_dim % config.num_query_heads:
        problem = f"{ARCEE} needs model.hidden_dim to be a multiple of model.num_query_heads={config.num_query_heads}"
    if problem:
        raise ValueError(
            f"transformers has no architecture for this model: model.rope=true, but {NEMOTRON_H} has attention without "
            f"positions; {problem}"
        )
    return ARCEE


def sections_of(config: ModelConfig) -> dict[str, list[Section]]:
    """The published tensors of each of our parameters. Raises ValueError as `architecture_of` does."""
    is_arcee = architecture_of(config) == ARCEE
    hidden, vocab, root = config.hidden_dim, config.vocab_size, "model" if is_arcee else "backbone"
    embedding, final_norm = ("embed_tokens", "norm") if is_arcee else ("embeddings", "norm_f")
    found = {"embedding.weight": [Section(f"{root}.{embedding}.weight", (vocab, hidden))]}
    for block, letter in enumerate(config.pattern):
        layer, norm, mixer = f"{root}.layers.{block}", "norm", "mixer"
        if is_arcee:
            layer = f"{root}.layers.{block // 2}"
            norm, mixer = {"*": ("input_layernorm", "self_attn"), "-": ("post_attention_layernorm", "mlp")}[letter]
        found[f"blocks.{block}.norm.weight"] = [Section(f"{layer}.{norm}.weight", (hidden,))]
        sections = {"M": _mamba, "*": _attention, "-": _ffn}[letter]
        found |= sections(config, f"blocks.{block}.mixer", f"{layer}.{mixer}")
    found["final_norm.weight"] = [Section(f"{root}.{final_norm}.weight", (hidden,))]
    # lm_head is always written: nemotron_h never ties weights, even if its configuration says so.
    return found | {"head.weight": [Section("lm_head.weight", (vocab, hidden))]}


def _attention(config: ModelConfig, ours: str, theirs: str) -> dict[str, list[Section]]:
    hidden = config.hidden_dim
    q_dim, kv_dim = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names = [f"{theirs}.{part}_proj.weight" for part in "qkv"]
    return {
        f"{ours}.qkv_proj.weight": split_rows(names, (q_dim, kv_dim, kv_dim), qkv_order(config), hidden),
        f"{ours}.out_proj.weight": [Section(f"{theirs}.o_proj.weight", (hidden, q_dim))],
    }


def _ffn(config: ModelConfig, ours: str, theirs: str) -> dict[str, list[Section]]:
    hidden, ffn = config.hidden_dim, config.ffn_dim
    return {
        f"{ours}.up_proj.weight": [Section(f"{theirs}.up_proj.weight", (ffn, hidden))],
        f"{ours}.down_proj.weight": [Section(f"{theirs}.down_proj.weight", (hidden, ffn))],
    }


def _mamba(config: ModelConfig, ours: str, theirs: str) -> dict[str, list[Section]]:
    hidden, inner, heads = config.hidden_dim, config.mamba_inner_dim, config.mamba_num_heads
    channels = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    in_proj, conv = mamba_in_proj_order(config).argsort(), mamba_conv_order(config).argsort()
    return {
        f"{ours}.in_proj.weight": [Section(f"{theirs}.in_proj.weight", (inner + channels + heads, hidden), in_proj)],
        f"{ours}.conv.weight": [Section(f"{theirs}.conv1d.weight", (channels, 1, config.mamba_conv_width), conv)],
        f"{ours}.conv.bias": [Section(f"{theirs}.conv1d.bias", (channels,), conv)],
        **{f"{ours}.ssm.{n}": [Section(f"{theirs}.{n}", (heads,), fp32=True)] for n in ("A_log", "D", "dt_bias")},
        f"{ours}.norm.weight": [Section(f"{theirs}.norm.weight", (inner,))],
        f"{ours}.out_proj.weight": [Section(f"{theirs}.out_proj.weight", (hidden, inner))],
    }


# Our setting -> its key in config.json, and the default in transformers (None: it follows from other keys).
_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    ARCEE: {
        "vocab_size": ("vocab_size", 32000),
        "hidden_dim": ("hidden_size", 2560),
        "ffn_dim": ("intermediate_size", 18432),
        "num_query_heads": ("num_attention_heads", 32),
        "num_kv_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "init_std": ("initializer_range", 0.02),
        "norm_eps": ("rms_norm_eps", 1e-5),
    },
    NEMOTRON_H: {
        "vocab_size": ("vocab_size", 131072),
        "hidden_dim": ("hidden_size", 4096),
        "ffn_dim": ("intermediate_size", 21504),
        "num_query_heads": ("num_attention_heads", 32),
        "num_kv_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", 128),
        "init_std": ("initializer_range", 0.02),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "mamba_num_heads": ("mamba_num_heads", 128),
        "mamba_head_dim": ("mamba_head_dim", 64),
        "mamba_num_groups": ("n_groups", 8),
        "mamba_state_dim": ("ssm_state_size", 128),
        "mamba_conv_width": ("conv_kernel", 4),
        "mamba_chunk_size": ("chunk_size", 128),
    },
}
# Values that a model must have to be one of ours; a missing key is accepted.
_FIXED = {
    ARCEE: {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    NEMOTRON_H: {
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
    },
}
# A key of nemotron_h -> its name in the configurations of other programs.
_OTHER_NAMES = {"head_dim": "attention_head_dim", "layer_norm_epsilon": "rms_norm_eps"}


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of the model. Raises ValueError as `architecture_of` does."""
    name = architecture_of(config)
    described = {
        "model_type": name,
        **{theirs: getattr(config, ours) for ours, (theirs, _) in _KEYS[name].items()},
        **{key: value for key, value in _FIXED[name].items() if value is not None},
        "attention_dropout": 0.0,
    }
    if name == ARCEE:
        return described | {
            "architectures": ["ArceeForCausalLM"],
            "num_hidden_layers": config.num_blocks // 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
            "rope_theta": config.rope_base,  # for transformers before 5.0 and engines that use it
            "use_cache": True,
        }
    inner, hidden = config.mamba_inner_dim, config.hidden_dim
    return described | {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": config.pattern,
        "num_hidden_layers": config.num_blocks,
        **({"expand": inner // hidden} if inner % hidden == 0 else {}),
        "time_step_min": 0.0,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
        "hidden_dropout": 0.0,
        "rescale_prenorm_residual": True,
        # As in NVIDIA's published configurations: vLLM and TensorRT-LLM read the first two instead of
        # layer_norm_epsilon and head_dim; older versions of vLLM need the third to store Mamba's states in FP32.
        "rms_norm_eps": config.norm_eps,
        "attention_head_dim": config.head_dim,
        "mamba_ssm_cache_dtype": "float32",
        # A forward pass with a cache fails in transformers if the model has no attention.
        "use_cache": "*" in config.pattern,
    }


def from_hf(found: Mapping[str, Any]) -> dict[str, Any]:
    """Our `model` settings from a config.json. Raises ValueError, with key and value, for anything that our models do
    not have."""
    name = found.get("model_type")
    if name not in _KEYS:
        raise ValueError(f"model_type={name} cannot be imported; {', '.join(_KEYS)} can")
    config = {theirs: default for theirs, default in _KEYS[name].values() if default is not None}
    if name == NEMOTRON_H:
        config |= {key: found[other] for key, other in _OTHER_NAMES.items() if other in found}
    config |= found
    for key, value in _FIXED[name].items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={config[key]}, but only {value} can be imported")
    if name == ARCEE:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope_parameters.rope_type={kind}, but only default can be imported")
        heads = config["num_attention_heads"]
        config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
        config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        special = {"pattern": "*-" * config.get("num_hidden_layers", 32), "rope": True, "rope_base": float(theta)}
    else:
        # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
        given = config.get("time_step_limit") or (0.0, math.inf)
        limits = [float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in given]
        if limits != [0.0, math.inf]:
            raise ValueError(f"time_step_limit={limits}; training here does not clamp the step sizes of Mamba-2")
        special = {"pattern": _pattern(config), "rope": False}
    return special | {
        ours: config[theirs] for ours, (theirs, _) in _KEYS[name].items() if config.get(theirs) is not None
    }


def _pattern(config: Mapping[str, Any]) -> str:
    """The pattern of a nemotron_h. Its letters are checked later, with the model."""
    if (types := config.get("layers_block_type") or config.get("layer_types")) is not None:
        letters = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
        if unknown := [kind for kind in types if kind not in letters]:
            raise ValueError(f"layers_block_type has {unknown[0]!r}; {', '.join(letters)} can be imported")
        return "".join(letters[kind] for kind in types)
    if not isinstance(pattern := config.get("hybrid_override_pattern"), str):
        raise ValueError("it has neither hybrid_override_pattern nor layers_block_type, so its blocks are unknown")
    return pattern
