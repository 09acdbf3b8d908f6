"""Our models as architectures of transformers: name, shape and row order of every tensor, and config.json.

nemotron_h   hybrids of Mamba-2, attention without positions, squared-ReLU FFNs, and experts; its multi-token
             prediction has the tensors `mtp.*`, which vLLM computes and transformers ignores
arcee        Transformers with RoPE, grouped queries and squared-ReLU FFNs; one of its layers is two of our blocks
llama        the same with gated FFNs (SwiGLU)

Names and meanings are those of transformers 5.23. nemotron_h supports FFN blocks since 5.6; every version that does
reads `hybrid_override_pattern`, which has our letters. It clamps dt = softplus(dt + dt_bias) from below at
`time_step_min` (versions 5.4 to 5.10 at `time_step_limit`, which has no clamp by default), except when it decodes a
single token. Training here does not clamp dt, so time_step_min is SMALLEST_STEP; versions 5.6 and 5.7 cannot load 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from exchange.megatron_model import arguments_of
from megatron_fp4.config.schema import ModelConfig
from models.attention import Attention
from models.mixer import Mixer
from models.mlp import MLP, GatedMLP
from models.pattern import MIXERS, blocks_of, mixers_of, pattern_of
from models.published import HuggingFaceBlock, Section

NEMOTRON_H, ARCEE, LLAMA = "nemotron_h", "arcee", "llama"
SMALLEST_STEP = 1e-30
# The blocks of a layer of a Transformer, and the names of their norm and their mixer in it.
_LAYERS: dict[str, dict[type[Mixer], tuple[str, str]]] = {
    name: {Attention: ("input_layernorm", "self_attn"), mlp: ("post_attention_layernorm", "mlp")}
    for name, mlp in ((ARCEE, MLP), (LLAMA, GatedMLP))
}


def architecture_of(config: ModelConfig) -> str:
    """The architecture that computes what `config` computes. Raises ValueError, with the reason, if there is none."""
    blocks, no_architecture = blocks_of(config), "transformers has no architecture for this model: "
    if unpublished := [mixer.name for mixer in mixers_of(config.pattern) if mixer.hugging_face is None]:
        raise ValueError(f"{no_architecture}model.pattern={config.pattern} has {unpublished[0]} blocks")
    alternating = [name for name, layer in _LAYERS.items() if blocks == [*layer] * (config.num_blocks // 2)]
    if config.rope and config.mtp_patterns:
        raise ValueError(
            f"{no_architecture}model.rope=true and multi-token prediction in model.pattern={config.pattern}; only "
            f"{NEMOTRON_H} has the latter"
        )
    if not (config.rope and Attention in blocks):
        if gated := [mixer.name for mixer in mixers_of(config.pattern) if (of := mixer.hugging_face) and not of.types]:
            without = "without positions" if alternating else f"in model.pattern={config.pattern}"
            raise ValueError(f"{no_architecture}{NEMOTRON_H} has no {gated[0]} blocks, and {LLAMA} none {without}")
        for key, value in (item for block in _of_pattern(config.pattern) for item in block.without_key.items()):
            if (ours := getattr(config, key)) != value:
                raise ValueError(f"{no_architecture}model.{key}={ours}, and {NEMOTRON_H} has only {value}")
        return NEMOTRON_H
    problem = None
    if not alternating:
        layers = " and ".join(f"{name} ({pattern_of(layer) * 2}...)" for name, layer in _LAYERS.items())
        problem = f"{layers} alternate attention and FFN, but model.pattern={config.pattern}"
    elif config.hidden_dim % config.num_query_heads:
        heads = config.num_query_heads
        problem = f"{alternating[0]} needs model.hidden_dim to be a multiple of model.num_query_heads={heads}"
    if problem:
        raise ValueError(f"{no_architecture}model.rope=true, but {NEMOTRON_H} attends without positions; {problem}")
    return alternating[0]


def export_command(config: ModelConfig) -> str | None:
    """The command of scripts/convert.py that exports such a model, `export-hf` if both can; None: neither can."""
    with suppress(ValueError):
        architecture_of(config)
        return "export-hf"
    with suppress(ValueError):
        arguments_of(config, sequence_length=1, bf16=True)
        return "export-megatron"
    return None


def sections_of(config: ModelConfig) -> dict[str, list[Section]]:
    """The published tensors of each of our parameters. Raises ValueError as `architecture_of` does."""
    transformer_layer = _LAYERS.get(architecture_of(config))
    hidden, vocab, root = config.hidden_dim, config.vocab_size, "model" if transformer_layer else "backbone"
    embedding, final_norm = ("embed_tokens", "norm") if transformer_layer else ("embeddings", "norm_f")
    sections = {"embedding.weight": [Section(f"{root}.{embedding}.weight", (vocab, hidden))]}
    for block, mixer in enumerate(blocks_of(config)):
        layer = f"{root}.layers.{block // 2 if transformer_layer else block}"
        norm, module = transformer_layer[mixer] if transformer_layer else ("norm", "mixer")
        sections |= _of_block(config, f"blocks.{block}", mixer, f"{layer}.{norm}", f"{layer}.{module}")
    sections["final_norm.weight"] = [Section(f"{root}.{final_norm}.weight", (hidden,))]
    for number, pattern in enumerate(config.mtp_sets):
        sections |= _of_mtp(config, f"mtp.{number}", pattern, first=number * len(pattern))
    # lm_head is always written: nemotron_h never ties weights, even if its configuration says so.
    return sections | {"head.weight": [Section("lm_head.weight", (vocab, hidden))]}


def _of_block(config: ModelConfig, ours: str, mixer: type[Mixer], norm: str, module: str) -> dict[str, list[Section]]:
    """The tensors of the block `ours`, whose norm and mixer have the published names `norm` and `module`."""
    assert mixer.hugging_face is not None
    parts = mixer.hugging_face.sections(config).items()
    inside = {f"{ours}.mixer.{name}": [part.inside(module) for part in its_parts] for name, its_parts in parts}
    return {f"{ours}.norm.weight": [Section(f"{norm}.weight", (config.hidden_dim,))], **inside}


def _of_mtp(config: ModelConfig, ours: str, pattern: str, first: int) -> dict[str, list[Section]]:
    """The tensors of a set of weights of multi-token prediction. Its blocks are the layers from `first` on; what is
    around them is in the first and the last one."""
    hidden, last = config.hidden_dim, first + len(pattern) - 1
    shapes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    sections = {f"{ours}.{n}.weight": [Section(f"mtp.layers.{first}.{n}.weight", at)] for n, at in shapes.items()}
    for block, letter in enumerate(pattern):
        layer = f"mtp.layers.{first + block}"
        sections |= _of_block(config, f"{ours}.blocks.{block}", MIXERS[letter], f"{layer}.norm", f"{layer}.mixer")
    return sections | {f"{ours}.final_norm.weight": [Section(f"mtp.layers.{last}.final_layernorm.weight", (hidden,))]}


def _of_pattern(pattern: str) -> list[HuggingFaceBlock]:
    """The forms of nemotron_h's blocks whose keys the config.json of a model with this pattern has."""
    return [block for letter, block in _published() if block.keys_always or letter in pattern]


def _settings(name: str, pattern: str) -> dict[str, tuple[str, Any]]:
    """Our setting -> its key in config.json, and the default in transformers (None: it follows from other keys)."""
    blocks = _of_pattern(pattern) if name == NEMOTRON_H else []
    return _SETTINGS[name] | {ours: theirs for block in blocks for ours, theirs in block.settings.items()}


def _fixed(name: str, pattern: str) -> dict[str, Any]:
    """Values that a model must have to be one of ours; a missing key is accepted."""
    blocks = _of_pattern(pattern) if name == NEMOTRON_H else []
    return _FIXED[name] | {key: value for block in blocks for key, value in block.fixed.items()}


def _published() -> Iterator[tuple[str, HuggingFaceBlock]]:
    forms = ((letter, mixer.hugging_face) for letter, mixer in MIXERS.items())
    return ((letter, form) for letter, form in forms if form is not None and form.types)


def _transformer(hidden: int, ffn: int, eps: float) -> dict[str, tuple[str, Any]]:
    return {
        "vocab_size": ("vocab_size", 32000),
        "hidden_dim": ("hidden_size", hidden),
        "ffn_dim": ("intermediate_size", ffn),
        "num_query_heads": ("num_attention_heads", 32),
        "num_kv_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "init_std": ("initializer_range", 0.02),
        "norm_eps": ("rms_norm_eps", eps),
    }


# `_settings` and `_fixed` without those of nemotron_h's blocks.
_SETTINGS: dict[str, dict[str, tuple[str, Any]]] = {
    ARCEE: _transformer(2560, 18432, 1e-5),
    LLAMA: _transformer(4096, 11008, 1e-6),
    NEMOTRON_H: {
        "vocab_size": ("vocab_size", 131072),
        "hidden_dim": ("hidden_size", 4096),
        "init_std": ("initializer_range", 0.02),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    },
}
_FIXED: dict[str, dict[str, Any]] = {
    **{
        name: {"hidden_act": activation, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
        for name, activation in ((ARCEE, "relu2"), (LLAMA, "silu"))
    },
    NEMOTRON_H: {"tie_word_embeddings": False, "residual_in_fp32": False},
}
# A key of nemotron_h -> its name in the configurations of other programs.
_ELSEWHERE = {"head_dim": "attention_head_dim", "layer_norm_epsilon": "rms_norm_eps"}


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of the model. Raises ValueError as `architecture_of` does."""
    name = architecture_of(config)
    described = {
        "model_type": name,
        **{theirs: getattr(config, ours) or None for ours, (theirs, _) in _settings(name, config.pattern).items()},
        **{key: value for key, value in _fixed(name, config.pattern).items() if value is not None},
        "attention_dropout": 0.0,
    }
    if name in _LAYERS:
        return described | {
            "architectures": [f"{name.capitalize()}ForCausalLM"],
            "num_hidden_layers": config.num_blocks // 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
            "rope_theta": config.rope_base,  # for transformers before 5.0 and engines that use it
            "use_cache": True,
        }
    inner, hidden = config.mamba_inner_dim, config.hidden_dim
    return described | {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": config.main_pattern,
        "num_nextn_predict_layers": len(config.mtp_sets),  # of sets of weights, as in published models
        **(_mtp_keys(config.mtp_patterns[0]) if config.mtp_patterns else {}),
        "num_hidden_layers": config.num_blocks,
        **({"expand": inner // hidden} if inner % hidden == 0 else {}),
        "time_step_min": SMALLEST_STEP,
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
        "use_cache": Attention in blocks_of(config),
    }


def _mtp_keys(pattern: str) -> dict[str, Any]:
    """Both keys of the blocks of a depth of multi-token prediction: vLLM and Megatron-Bridge read the first."""
    types = [form.types[0] for letter in pattern if (form := MIXERS[letter].hugging_face) is not None]
    return {"mtp_hybrid_override_pattern": pattern, "mtp_layers_block_type": types}


def from_hf(content: Mapping[str, Any]) -> dict[str, Any]:
    """Our `model` settings from a config.json. Raises ValueError for anything that ours lack."""
    name = content.get("model_type")
    if name not in _SETTINGS:
        raise ValueError(f"model_type={name} cannot be imported; {', '.join(_SETTINGS)} can")
    letters = _pattern(content) + _mtp_pattern(content) if name == NEMOTRON_H else ""
    settings = _settings(name, letters)
    config = {theirs: default for theirs, default in settings.values() if default is not None}
    if name == NEMOTRON_H:
        config |= {key: content[elsewhere] for key, elsewhere in _ELSEWHERE.items() if elsewhere in content}
    config |= content
    for key, value in _fixed(name, letters).items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={config[key]}, but only {value} can be imported")
    if name in _LAYERS:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope_parameters.rope_type={kind}, but only default can be imported")
        heads = config["num_attention_heads"]
        config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
        config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        pattern = pattern_of(_LAYERS[name]) * config.get("num_hidden_layers", 32)
        special = {"pattern": pattern, "rope": True, "rope_base": float(theta)}
    else:
        # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
        given = config.get("time_step_limit") or (0.0, math.inf)
        limits = [float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in given]
        if limits != [0.0, math.inf]:
            raise ValueError(f"time_step_limit={limits}; training here does not clamp the step sizes of Mamba-2")
        special = {"pattern": letters, "rope": False}
    return special | {ours: config[theirs] for ours, (theirs, _) in settings.items() if config.get(theirs) is not None}


def _mtp_pattern(config: Mapping[str, Any]) -> str:
    """What follows the pattern of a nemotron_h: a depth of multi-token prediction for each of its sets of weights. How
    many depths used a set is not published."""
    if not (depths := config.get("num_nextn_predict_layers") or 0):
        return ""
    if (types := config.get("mtp_layers_block_type")) is not None:
        return f"/{_letters('mtp_layers_block_type', types)}" * depths
    if not isinstance(pattern := config.get("mtp_hybrid_override_pattern"), str):
        raise ValueError(f"num_nextn_predict_layers={depths}, and there is no mtp_hybrid_override_pattern")
    return f"/{pattern}" * depths


def _letters(key: str, types: Iterable[str]) -> str:
    letters = {kind: letter for letter, block in _published() for kind in block.types}
    if unknown := [kind for kind in types if kind not in letters]:
        raise ValueError(f"{key} has {unknown[0]!r}; {', '.join(letters)} can be imported")
    return "".join(letters[kind] for kind in types)


def _pattern(config: Mapping[str, Any]) -> str:
    """The pattern of a nemotron_h. Its letters are checked later, with the model."""
    if (types := config.get("layers_block_type") or config.get("layer_types")) is not None:
        return _letters("layers_block_type", types)
    if not isinstance(pattern := config.get("hybrid_override_pattern"), str):
        raise ValueError("it has neither hybrid_override_pattern nor layers_block_type, so its blocks are unknown")
    return pattern
