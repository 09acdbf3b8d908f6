"""Our models as Megatron-core's: the tensors of its distributed checkpoints, and Megatron-LM's arguments.

A model with the pattern `*-*-...` (or `*G*G...`) is Megatron's GPTModel, in which each pair is one layer. Any other is
its MambaModel, in which each letter is one layer. Names are those of `sharded_state_dict` in megatron-core 0.16, of
experts and multi-token prediction in 0.19; each mixer's `megatron` has those of its block. They are the same for
Transformer Engine's layers and for Megatron's own, whose separate norms have the keys of fused ones. GPT's layers are
stacked into one tensor with the layer as first axis, or with non_homogeneous_layers numbered as in a MambaModel.

Arguments have the names of Megatron-LM's namespace (core_v0.16.1, megatron/training/arguments.py). A checkpoint saves
it in `common.pt`, from which `--use-checkpoint-args` reads it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from megatron_fp4.config.schema import ModelConfig
from models.attention import Attention
from models.mixer import Mixer
from models.mlp import MLP, GatedMLP
from models.pattern import MIXERS, blocks_of, mixers_of, pattern_of
from models.published import MegatronBlock, Section

Layers = Literal["stacked", "numbered"]
"""Whether the layers of a GPTModel are stacked in one tensor or separate. Those of a MambaModel are numbered."""

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def gpt_layer(gated: bool) -> list[type[Mixer]]:
    """The blocks of a layer of a GPTModel. gated: whether its FFNs are."""
    return [Attention, GatedMLP if gated else MLP]


GPT_NORM, MAMBA_NORM = "decoder.final_layernorm.weight", "decoder.final_norm.weight"
# Our parts of multi-token prediction besides the blocks -> Megatron's.
_MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_norm": "final_layernorm"}


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
    layers = (gpt_layer(gated) * (config.num_blocks // 2) for gated in (False, True))
    return not config.mtp_patterns and blocks_of(config) in layers


def _form(mixer: type[Mixer], config: ModelConfig) -> MegatronBlock:
    if mixer.megatron is None:
        raise ValueError(f"Megatron has no model like this: model.pattern={config.pattern} has {mixer.name} blocks")
    return mixer.megatron


def _blocks(config: ModelConfig, layers: Layers) -> Iterator[tuple[str, str, MegatronBlock, tuple[int, int] | None]]:
    """For each block its name, the prefix of its keys, its form, and (index, size) on the axis of stacked layers.
    Raises ValueError for a block that Megatron does not have."""
    for block, mixer in enumerate(blocks_of(config)):
        prefix, place = f"decoder.layers.{block // 2 if is_gpt(config) else block}.", None
        if is_gpt(config) and layers == "stacked":
            prefix, place = "decoder.layers.", (block // 2, config.num_blocks // 2)
        yield f"blocks.{block}", prefix, _form(mixer, config), place
    for depth, pattern in enumerate(config.mtp_sets):
        for block, letter in enumerate(pattern):
            prefix = f"mtp.layers.{depth}.mtp_model_layer.layers.{block}."
            yield f"mtp.{depth}.blocks.{block}", prefix, _form(MIXERS[letter], config), None


def parameters(config: ModelConfig, layers: Layers = "stacked") -> Iterator[Parameter]:
    """All parameters of the model. Raises ValueError for a block that Megatron does not have."""
    hidden, vocabulary = (config.hidden_dim,), (config.vocab_size, config.hidden_dim)
    yield Parameter("embedding.weight", [Section(EMBEDDING, vocabulary)])
    for block, prefix, form, layer in _blocks(config, layers):
        yield Parameter(f"{block}.norm.weight", [Section(f"{prefix}{form.norm_key}", hidden)], layer)
        for name, sections in form.sections(config).items():
            inside = [section.inside(f"{prefix}{form.module}") for section in sections]
            yield Parameter(f"{block}.mixer.{name}", inside, layer)
    yield Parameter("final_norm.weight", [Section(GPT_NORM if is_gpt(config) else MAMBA_NORM, hidden)])
    yield Parameter("head.weight", [Section(HEAD, vocabulary)])
    for depth in range(len(config.mtp_sets)):
        for ours, theirs in _MTP.items():
            shape = (config.hidden_dim, 2 * config.hidden_dim) if ours == "eh_proj" else hidden
            yield Parameter(f"mtp.{depth}.{ours}.weight", [Section(f"mtp.layers.{depth}.{theirs}.weight", shape)])


def extra_states(config: ModelConfig, layers: Layers = "stacked") -> list[str]:
    """The keys of the modules' extra states. Megatron requires them by default; they are empty unless FP8 has delayed
    scaling."""
    modules = [(GPT_NORM if is_gpt(config) else MAMBA_NORM).removesuffix(".weight"), "output_layer"]
    modules += [f"mtp.layers.{depth}.{module}" for depth in range(len(config.mtp_sets)) for module in _MTP.values()]
    keys = [f"{module}._extra_state/shard_0_1" for module in modules]
    for _, prefix, form, layer in _blocks(config, layers):
        if form.norm:
            keys.append(f"{prefix}{form.norm.removesuffix('weight')}_extra_state/shard_0_1")
        shapes = {part.name: part.shape for parts in form.sections(config).values() for part in parts}
        for linear in form.linears:
            if found := [shape for name, shape in shapes.items() if name.startswith(f"{linear}.")]:
                number, count = layer or (0, 1)
                experts = found[0][0] if len(found[0]) == 3 else 1  # each has a state
                for shard in range(number, number + experts):
                    keys.append(f"{prefix}{form.module}.{linear}._extra_state/shard_{shard}_{max(count, experts)}")
    return keys


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
    forms = {mixer: _form(mixer, config) for mixer in mixers_of(config.pattern)}
    gated = {form.gated(config) for form in forms.values()} - {None}
    if len(gated) == 2:
        raise ValueError(f"model.pattern={config.pattern}: all FFNs of a model in Megatron are gated, or none")
    for mixer, form in forms.items():
        for key, value in form.fixed(config).items():
            if (ours := getattr(config, key)) != value:
                raise ValueError(f"model.{key}={ours}: Megatron's {mixer.name} block has {value} only")
    if config.rope and config.rope_base != int(config.rope_base):
        raise ValueError(f"model.rope_base={config.rope_base}: Megatron's --rotary-base is a whole number")
    arguments: dict[str, Any] = {
        **_SAME_FACTS,
        "squared_relu": True not in gated,
        "swiglu": True in gated,
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
        if config.mtp_patterns:
            arguments |= {name: getattr(config, name) for name in ("mtp_use_repeated_layer", "mtp_loss_scaling_factor")}
            arguments["mtp_num_layers"] = len(config.mtp_patterns)
        arguments |= {
            "hybrid_override_pattern": config.pattern.replace(pattern_of([GatedMLP]), pattern_of([MLP])),
            "is_hybrid_model": True,
            **{argument: value for form in forms.values() for argument, value in _arguments(form, config)},
            "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        }
    return arguments


def _arguments(form: MegatronBlock, config: ModelConfig) -> Iterator[tuple[str, Any]]:
    yield from form.constants.items()
    for ours, (argument, if_none) in form.arguments.items():
        value = getattr(config, ours)
        yield argument, None if value == if_none == 0 else value


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
    **dict.fromkeys(("rotary_seq_len_interpolation_factor", "no_rope_freq", "window_size", "softmax_scale"), (None,)),
    "position_embedding_type": ("none", "rope"),
    "softmax_type": ("vanilla",),
}


def settings_of(arguments: Mapping[str, Any], mixers: Iterable[type[Mixer]]) -> dict[str, Any]:
    """The fields of a ModelConfig with these blocks that Megatron's arguments tell. Raises ValueError, with argument
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
        "norm_eps": number("norm_epsilon") or number("layernorm_epsilon"),
        "init_std": number("init_method_std"),
        "mtp_loss_scaling_factor": number("mtp_loss_scaling_factor"),
    }
    for form in (mixer.megatron for mixer in mixers if mixer.megatron is not None):
        for ours, (argument, if_none) in form.arguments.items():
            if argument in arguments:
                settings[ours] = if_none if arguments[argument] is None else arguments[argument]
    if "position_embedding_type" in arguments:
        settings["rope"] = arguments["position_embedding_type"] == "rope"
        settings["rope_base"] = number("rotary_base")
    return {name: value for name, value in settings.items() if value is not None}
