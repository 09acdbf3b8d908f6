"""Our models as Megatron-core's: the tensors of its distributed checkpoints, and Megatron-LM's arguments.

A model with the pattern `*-*-...` (or `*G*G...`) is Megatron's GPTModel, in which each pair is one layer. Any other is
its MambaModel, in which each letter is one layer. Names are those of `sharded_state_dict` in megatron-core 0.16. They
are the same for Transformer Engine's layers and for Megatron's own, whose separate norms get these keys too:

    embedding.word_embeddings.weight, output_layer.weight
    decoder.layers.    GPT: the layers are stacked into one tensor with the layer as first axis (or, with
                       non_homogeneous_layers, numbered as below)
    decoder.layers.i.  Mamba, where i counts letters:
        mixer.in_proj.layer_norm_weight, mixer.in_proj.weight.{z,x,B,C,dt}, mixer.conv1d.{weight,bias}.{x,B,C},
        mixer.{A_log,D,dt_bias}, mixer.norm.weight, mixer.out_proj.weight
        self_attention.linear_qkv.{layer_norm_weight,weight}, self_attention.linear_proj.weight
        mlp.linear_fc1.{layer_norm_weight,weight}, mlp.linear_fc2.weight
    decoder.final_layernorm.weight (GPT), decoder.final_norm.weight (Mamba)

Arguments have the names of Megatron-LM's namespace (core_v0.16.1, megatron/training/arguments.py). A checkpoint saves
it in `common.pt`, from which `--use-checkpoint-args` reads it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from megatron_fp4.config.schema import ModelConfig
from models.attention import Attention
from models.mixer import Mixer
from models.mlp import MLP, GatedMLP
from models.pattern import blocks_of, pattern_of
from models.published import MegatronBlock, Section

Layers = Literal["stacked", "numbered"]
"""Whether the layers of a GPTModel are stacked in one tensor or separate. Those of a MambaModel are numbered."""

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def gpt_layer(gated: bool) -> list[type[Mixer]]:
    """The blocks of a layer of a GPTModel. gated: whether its FFNs are."""
    return [Attention, GatedMLP if gated else MLP]


GPT_NORM, MAMBA_NORM = "decoder.final_layernorm.weight", "decoder.final_norm.weight"


class Parameter(NamedTuple):
    """One of our parameters. sections: its tensors in Megatron, without the axis of stacked layers. layer: (index,
    size) on that axis; None if there is no such axis."""

    name: str
    sections: list[Section]
    layer: tuple[int, int] | None = None

    def stored_shape(self, section: Section) -> tuple[int, ...]:
        """The shape of the complete tensor in the checkpoint."""
        return section.shape if self.layer is None else (self.layer[1], *section.shape)


def is_gpt(config: ModelConfig) -> bool:
    """Whether the model is a GPTModel in Megatron; otherwise it is a MambaModel."""
    return any(blocks_of(config) == gpt_layer(gated) * (config.num_blocks // 2) for gated in (False, True))


def _forms(config: ModelConfig) -> list[MegatronBlock]:
    """Megatron's form of every block. Raises ValueError for a block that it does not have."""
    blocks = blocks_of(config)
    if config.mtp_patterns:
        raise ValueError(f"model.pattern={config.pattern} has multi-token prediction, which only export-hf writes")
    if missing := [mixer.name for mixer in blocks if mixer.megatron is None]:
        raise ValueError(f"Megatron has no model like this: model.pattern={config.pattern} has {missing[0]} blocks")
    return [mixer.megatron for mixer in blocks if mixer.megatron is not None]


def parameters(config: ModelConfig, layers: Layers = "stacked") -> Iterator[Parameter]:
    """All parameters of the model, in its order. Raises ValueError for a block that Megatron does not have."""
    vocabulary = (config.vocab_size, config.hidden_dim)
    yield Parameter("embedding.weight", [Section(EMBEDDING, vocabulary)])
    for block, (form, (prefix, layer)) in enumerate(zip(_forms(config), _places(config, layers), strict=True)):
        norm = Section(f"{prefix}{form.module}.{form.linears[0]}.layer_norm_weight", (config.hidden_dim,))
        yield Parameter(f"blocks.{block}.norm.weight", [norm], layer)
        for name, sections in form.sections(config).items():
            inside = [section.inside(f"{prefix}{form.module}") for section in sections]
            yield Parameter(f"blocks.{block}.mixer.{name}", inside, layer)
    yield Parameter("final_norm.weight", [Section(GPT_NORM if is_gpt(config) else MAMBA_NORM, (config.hidden_dim,))])
    yield Parameter("head.weight", [Section(HEAD, vocabulary)])


def extra_states(config: ModelConfig, layers: Layers = "stacked") -> list[str]:
    """The keys of the modules' extra states. Megatron requires them by default; empty without delayed scaling."""
    keys = []
    for form, (prefix, layer) in zip(_forms(config), _places(config, layers), strict=True):
        number, count = layer or (0, 1)
        modules = (f"{prefix}{form.module}.{linear}" for linear in form.linears)
        keys += [f"{module}._extra_state/shard_{number}_{count}" for module in modules]
    final = (GPT_NORM if is_gpt(config) else MAMBA_NORM).removesuffix("weight")
    return [*keys, f"{final}_extra_state/shard_0_1", "output_layer._extra_state/shard_0_1"]


def _places(config: ModelConfig, layers: Layers) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """For each block, the prefix of its keys, and (index, size) on the axis of stacked layers."""
    for block in range(config.num_blocks):
        if not is_gpt(config):
            yield f"decoder.layers.{block}.", None
        elif layers == "numbered":
            yield f"decoder.layers.{block // 2}.", None
        else:
            yield "decoder.layers.", (block // 2, config.num_blocks // 2)


# Arguments of every model here: an export writes them, an import requires them.
_SAME_FACTS = {
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "untie_embeddings_and_output_weights": True,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}


def arguments_of(config: ModelConfig, sequence_length: int, bf16: bool) -> dict[str, Any]:
    """The arguments with which Megatron-LM builds this model. bf16: whether it trains in BF16. Raises ValueError, with
    key and value, for a setting that Megatron's model does not have."""
    forms, gated = _forms(config), GatedMLP in blocks_of(config)
    if gated and MLP in blocks_of(config):
        raise ValueError(f"model.pattern={config.pattern}: all FFNs of a model in Megatron are gated, or none")
    for mixer, form in zip(blocks_of(config), forms, strict=True):
        for key, value in form.fixed.items():
            if (ours := getattr(config, key)) != value:
                raise ValueError(f"model.{key}={ours}: Megatron's {mixer.name} has {value}, which no argument changes")
    if config.rope and config.rope_base != int(config.rope_base):
        raise ValueError(f"model.rope_base={config.rope_base}: Megatron's --rotary-base is a whole number")
    arguments: dict[str, Any] = {
        **_SAME_FACTS,
        "squared_relu": not gated,
        "swiglu": gated,
        "num_layers": config.num_blocks // (2 if is_gpt(config) else 1),
        "hidden_size": config.hidden_dim,
        "ffn_hidden_size": config.ffn_dim,
        "num_attention_heads": config.num_query_heads,
        "group_query_attention": True,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "disable_bias_linear": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "norm_epsilon": config.norm_eps,
        "layernorm_epsilon": config.norm_eps,
        "position_embedding_type": "rope" if config.rope else "none",
        "padded_vocab_size": config.vocab_size,
        # A divisor of the vocabulary, so that Megatron does not pad it if the tensor-parallel size divides it too.
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
    if not is_gpt(config):
        arguments |= {
            "hybrid_override_pattern": config.pattern.replace(pattern_of([GatedMLP]), pattern_of([MLP])),
            "is_hybrid_model": True,
            **{name: getattr(config, name) for form in forms for name in form.arguments},
            "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        }
    return arguments


def as_shell(arguments: Mapping[str, Any]) -> str:
    """Megatron-LM's flags as a bash array `MEGATRON_ARGS`, quoted, because a pattern has stars."""
    lines = []
    for name, value in arguments.items():
        if value is False or value is None or name == "layernorm_epsilon":  # this argument has no flag
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        lines.append(f"  {shlex.join(['--' + name.replace('_', '-'), *map(str, values)])}\n")
    return f"MEGATRON_ARGS=(\n{''.join(lines)})\n"


# Argument -> the values for which our models compute the same.
_WANTED: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in _SAME_FACTS.items()},
    **dict.fromkeys(("quick_geglu", "layernorm_zero_centered_gamma", "use_rope_scaling"), (False,)),
    **dict.fromkeys(("qk_layernorm", "qk_l2_norm", "multi_latent_attention"), (False,)),
    "apply_residual_connection_post_layernorm": (False,),
    **dict.fromkeys(("rotary_seq_len_interpolation_factor", "no_rope_freq", "window_size"), (None,)),
    **dict.fromkeys(("softmax_scale", "num_experts"), (None,)),
    "position_embedding_type": ("none", "rope"),
    "softmax_type": ("vanilla",),
    "mtp_num_layers": (None, 0),
}


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelConfig that Megatron's arguments tell and shapes do not. Raises ValueError, with argument
    and value, for a model that computes something that no model here does."""
    for name, wanted in _WANTED.items():
        if name in arguments and arguments[name] not in wanted:
            known = " or ".join(map(str, wanted))
            raise ValueError(f"Megatron's {name}={arguments[name]}; models here support only {known}")
    if not arguments.get("squared_relu", True) and not arguments.get("swiglu", True):
        raise ValueError("Megatron's squared_relu=False, swiglu=False; models here support only one of them")

    def number(name: str) -> Any:
        value = arguments.get(name)
        if value is not None and (type(value) not in (int, float) or not value > 0):
            raise ValueError(f"Megatron's {name}={value!r} is not a positive number; the checkpoint is damaged")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    settings: dict[str, Any] = {
        "num_query_heads": heads,
        "num_kv_heads": heads if arguments.get("group_query_attention") is False else number("num_query_groups"),
        "head_dim": number("kv_channels") or (hidden // heads if heads and hidden else None),
        "mamba_num_groups": number("mamba_num_groups"),
        "norm_eps": number("norm_epsilon") or number("layernorm_epsilon"),
        "init_std": number("init_method_std"),
    }
    if "position_embedding_type" in arguments:
        settings["rope"] = arguments["position_embedding_type"] == "rope"
        settings["rope_base"] = number("rotary_base")
    return {name: value for name, value in settings.items() if value is not None}
