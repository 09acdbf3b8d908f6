"""Our parameters as the tensors of Megatron-core's distributed checkpoints.

A model of the pattern `*-*-...` is Megatron's GPTModel, each `*-` one of its layers; any other is its MambaModel, each
letter one of its layers. Names are those of `sharded_state_dict` of megatron-core 0.16, which are the same with
Transformer Engine's layers and with its own (where the norm before a projection is a module, its key is mapped):

    embedding.word_embeddings.weight, output_layer.weight
    decoder.layers.    of GPT: all layers of a kind as one tensor with the layer as first axis (or, with
                       non_homogeneous_layers, as below)
    decoder.layers.i.  of Mamba, i counts letters:
        mixer.in_proj.layer_norm_weight, mixer.in_proj.weight.{z,x,B,C,dt}, mixer.conv1d.{weight,bias}.{x,B,C},
        mixer.{A_log,D,dt_bias}, mixer.norm.weight, mixer.out_proj.weight
        self_attention.linear_qkv.{layer_norm_weight,weight}, self_attention.linear_proj.weight
        mlp.linear_fc1.{layer_norm_weight,weight}, mlp.linear_fc2.weight
    decoder.final_layernorm.weight (GPT), decoder.final_norm.weight (Mamba)

The rows of linear_qkv are, for each KV head, its query heads, its key, its value: our own order. The sections of
in_proj and of the convolution are tensors of their own, because each rank has a part of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from exchange.hf.sections import Section, in_sections
from megatron_fp4.config.schema import ModelConfig
from models.mamba2 import mamba_conv_order, mamba_in_proj_order

Layers = Literal["stacked", "numbered"]
"""Whether a GPTModel's layers are one tensor or several. A MambaModel's are numbered."""

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORMS = {"gpt": "decoder.final_layernorm.weight", "mamba": "decoder.final_norm.weight"}
_EXTRA = "_extra_state"


@dataclass(frozen=True)
class Parameter:
    """One of our parameters. name, shape: ours. sections: Megatron's tensors of it, without the axis of the layers.
    layer: its place on that axis, and how many there are; None if there is no such axis."""

    name: str
    shape: tuple[int, ...]
    sections: tuple[Section, ...]
    layer: tuple[int, int] | None = None

    def stored_shape(self, section: Section) -> tuple[int, ...]:
        """Of the whole tensor in the checkpoint."""
        return section.shape if self.layer is None else (self.layer[1], *section.shape)


def model_class(config: ModelConfig) -> Literal["gpt", "mamba"]:
    """Which of Megatron's models computes what `config` computes."""
    return "gpt" if re.fullmatch(r"(\*-)+", config.pattern) else "mamba"


def parameters(config: ModelConfig, layers: Layers = "stacked") -> Iterator[Parameter]:
    """All parameters of the model, in its order."""
    kind, hidden = model_class(config), config.hidden_dim
    yield _whole("embedding.weight", EMBEDDING, config.vocab_size, hidden)
    for block, letter in enumerate(config.pattern):
        number, layer = block, None
        if kind == "gpt":
            number = block // 2
            layer = (number, len(config.pattern) // 2) if layers == "stacked" else None
        prefix = "decoder.layers." if layer else f"decoder.layers.{number}."
        for parameter in _BLOCKS[letter](config, f"blocks.{block}.", prefix):
            yield Parameter(parameter.name, parameter.shape, parameter.sections, layer)
    yield _whole("final_norm.weight", FINAL_NORMS[kind], hidden)
    yield _whole("head.weight", HEAD, config.vocab_size, hidden)


def extra_states(config: ModelConfig, layers: Layers = "stacked") -> list[str]:
    """The keys of the modules' extra states, which Megatron asks for by default and which are empty without FP8's
    delayed scaling."""
    kind = model_class(config)
    modules = {
        "M": ("mixer.in_proj", "mixer.out_proj"),
        "*": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    }
    modules["-"] = ("mlp.linear_fc1", "mlp.linear_fc2")
    keys = []
    for block, letter in enumerate(config.pattern):
        number, prefix, place = block, f"decoder.layers.{block}.", "shard_0_1"
        if kind == "gpt":
            number = block // 2
            stacked = layers == "stacked"
            prefix = "decoder.layers." if stacked else f"decoder.layers.{number}."
            place = f"shard_{number}_{len(config.pattern) // 2}" if stacked else place
        keys += [f"{prefix}{module}.{_EXTRA}/{place}" for module in modules[letter]]
    final = FINAL_NORMS[kind].removesuffix("weight")
    return [*keys, f"{final}{_EXTRA}/shard_0_1", f"output_layer.{_EXTRA}/shard_0_1"]


def _whole(name: str, key: str, *shape: int, fp32: bool = False) -> Parameter:
    return Parameter(name, shape, (Section(key, shape, fp32=fp32),))


def _mamba(config: ModelConfig, ours: str, theirs: str) -> Iterator[Parameter]:
    hidden, inner, heads = config.hidden_dim, config.mamba_inner_dim, config.mamba_num_heads
    state, width = config.mamba_num_groups * config.mamba_state_dim, config.mamba_conv_width
    ours, norm, theirs = f"{ours}mixer.", f"{ours}norm.weight", f"{theirs}mixer."
    yield _whole(norm, f"{theirs}in_proj.layer_norm_weight", hidden)
    sizes = (inner, inner, state, state, heads)
    names = [f"{theirs}in_proj.weight.{section}" for section in ("z", "x", "B", "C", "dt")]
    sections = in_sections(names, sizes, mamba_in_proj_order(config), hidden)
    yield Parameter(f"{ours}in_proj.weight", (sum(sizes), hidden), tuple(sections))
    channels, order = (inner, state, state), mamba_conv_order(config)
    rows = order.argsort().split(channels)
    for name, shape, published in (("weight", (width,), (1, width)), ("bias", (), ())):
        conv = (
            Section(f"{theirs}conv1d.{name}.{section}", (size, *published), at)
            for section, size, at in zip(("x", "B", "C"), channels, rows, strict=True)
        )
        yield Parameter(f"{ours}conv.{name}", (sum(channels), *shape), tuple(conv))
    for name in ("A_log", "D", "dt_bias"):
        yield _whole(f"{ours}ssm.{name}", f"{theirs}{name}", heads, fp32=True)
    yield _whole(f"{ours}norm.weight", f"{theirs}norm.weight", inner)
    yield _whole(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", hidden, inner)


def _attention(config: ModelConfig, ours: str, theirs: str) -> Iterator[Parameter]:
    hidden, query = config.hidden_dim, config.num_query_heads * config.head_dim
    packed = query + 2 * config.num_kv_heads * config.head_dim
    theirs = f"{theirs}self_attention."
    yield _whole(f"{ours}norm.weight", f"{theirs}linear_qkv.layer_norm_weight", hidden)
    yield _whole(f"{ours}mixer.qkv_proj.weight", f"{theirs}linear_qkv.weight", packed, hidden)
    yield _whole(f"{ours}mixer.out_proj.weight", f"{theirs}linear_proj.weight", hidden, query)


def _mlp(config: ModelConfig, ours: str, theirs: str) -> Iterator[Parameter]:
    hidden, ffn = config.hidden_dim, config.ffn_dim
    theirs = f"{theirs}mlp."
    yield _whole(f"{ours}norm.weight", f"{theirs}linear_fc1.layer_norm_weight", hidden)
    yield _whole(f"{ours}mixer.up_proj.weight", f"{theirs}linear_fc1.weight", ffn, hidden)
    yield _whole(f"{ours}mixer.down_proj.weight", f"{theirs}linear_fc2.weight", hidden, ffn)


_BLOCKS = {"M": _mamba, "*": _attention, "-": _mlp}
