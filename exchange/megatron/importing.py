"""A checkpoint of Megatron-core's GPTModel or MambaModel as one of ours, without optimizer state.

The model's configuration is what shapes tell, and Megatron-LM's arguments in `common.pt` where they do not (heads,
state groups, RoPE, the norm's eps). Where the checkpoint kept no arguments, a config of ours has to say it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from exchange.hf.sections import ours_of
from exchange.megatron.arguments import check_arguments, settings_of
from exchange.megatron.names import EMBEDDING, FINAL_NORMS, HEAD, Layers, Parameter, parameters
from exchange.megatron.reading import MegatronFolder
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ModelConfig
from models.pattern import check_model

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_LETTERS = {"mixer": "M", "self_attention": "*", "mlp": "-"}
# Parts of keys -> what a model here has not.
_UNKNOWN = {
    ".bias": "biases",
    "experts": "a mixture of experts",
    "router": "a mixture of experts",
    "q_layernorm": "norms of queries and keys",
    "k_layernorm": "norms of queries and keys",
    "linear_q_": "latent attention",
    "linear_kv_": "latent attention",
    "position_embeddings": "learned positions",
    "mtp.": "heads that predict several tokens",
    "post_": "norms behind a layer",
    "softmax_offset": "attention sinks",
}


class Imported(NamedTuple):
    """What came of it: the configuration, and how many parameters it has."""

    config: Config
    parameters: int


def import_megatron(
    folder: Path,
    checkpoint: Path,
    config_dir: Path,
    *,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Write `checkpoint`, which must not exist, whole or not at all, from what Megatron-LM saved to `folder`.

    model: a config of `config_dir`/model that the weights have to fit. overrides: `model.key=value`, for what neither
    shapes nor arguments tell; `model.vocab_size` cuts the rows that Megatron padded with.
    Raises ValueError, in one line, for a model that none here is, and OSError.
    """
    opened = MegatronFolder(folder)
    config, layers = _configuration(opened, config_dir, model, overrides)
    expected = list(parameters(config.model, layers))
    _check_tensors(opened, expected, config.model)
    new = [
        NewTensor(parameter.name, parameter.shape, lambda parameter=parameter: _load(opened, parameter))
        for parameter in expected
    ]
    source = {"from": "megatron-core", "folder": str(opened.folder), "iteration": opened.iteration}
    write_weights_only(checkpoint, config, new, imported=source)
    return Imported(config, sum(_numel(parameter.shape) for parameter in expected))


def _configuration(
    opened: MegatronFolder, config_dir: Path, model: str | None, overrides: Sequence[str]
) -> tuple[Config, Layers]:
    """The configuration that fits, and how the layers are stored."""
    for override in overrides:
        if not override.startswith("model.") or "=" not in override:
            raise ValueError(f"{override}: give model.key=value, such as model.num_kv_heads=8")
    given = {override.partition("=")[0].removeprefix("model.") for override in overrides}
    if not opened.arguments and model is None:
        raise ValueError(
            f"{opened.folder} keeps no arguments (common.pt), so shapes alone are known; say which model it is by "
            "--model NAME"
        )
    check_arguments(opened.arguments)
    pattern, layers = _pattern(opened)
    found = {"pattern": pattern, **settings_of(opened.arguments)}
    needed = ["norm_eps"] + ["num_query_heads", "num_kv_heads", "head_dim", "rope"] * ("*" in pattern)
    needed += ["mamba_num_groups"] * ("M" in pattern)
    groups = [o.partition("=")[2] for o in overrides if o.startswith("model.mamba_num_groups=")]
    found |= _sizes(opened, pattern, layers, int(groups[0]) if groups else found.get("mamba_num_groups"))
    if model is None:
        if missing := [name for name in needed if name not in found and name not in given]:
            listing = " ".join(f"model.{name}=..." for name in missing)
            raise ValueError(f"{opened.folder}: neither shapes nor arguments tell {listing}; give it, or --model NAME")
        start = [*_reset(), "model.name=imported"]
    else:
        start = [f"model={model}"]
    texts = [f"model.{name}={_text(value)}" for name, value in found.items() if name not in given] if not model else []
    config = compose_config([*start, *texts, *overrides], config_dir)
    check_model(config.model)
    for name, value in found.items():
        have = getattr(config.model, name)
        if have != value and not (name == "vocab_size" and have < value) and name != "init_std" and name not in given:
            raise ValueError(
                f"model.{name}={have} in {model}, and {value} in {opened.folder}; choose another --model, or none"
            )
    return config, layers


def _reset() -> list[str]:
    """Overrides that set what a model's config file would choose back to the schema's defaults."""
    default = ModelConfig()
    plain = (field.name for field in fields(ModelConfig) if field.name not in ("name", "pattern"))
    keep = {name: getattr(default, name) for name in plain if isinstance(getattr(default, name), (bool, int, float))}
    blocks = [f"model.{key}_bf16_blocks={{first: 0, last: 0}}" for key in ("nvfp4", "fp8")]
    return [*(f"model.{name}={_text(value)}" for name, value in keep.items()), *blocks]


def _text(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _pattern(opened: MegatronFolder) -> tuple[str, Layers]:
    """The letters, from which modules each layer has; and how layers are stored."""
    modules: dict[int | None, set[str]] = {}
    for key in opened.tensors:
        if match := _LAYER.fullmatch(key):
            number = None if match[1] is None else int(match[1])
            modules.setdefault(number, set()).add(match[2].partition(".")[0])
    if not modules:
        raise ValueError(f"{opened.folder} has no tensor decoder.layers...; it is no GPTModel and no MambaModel")
    if FINAL_NORMS["gpt"] in opened.tensors:
        if None in modules:
            key = next(k for k in opened.tensors if k.startswith("decoder.layers."))
            return "*-" * opened.shape(key)[0], "stacked"
        return "*-" * len(modules), "numbered"
    if None in modules or sorted(modules, key=int) != list(range(len(modules))):  # type: ignore[arg-type]
        raise ValueError(f"{opened.folder}: its layers are not numbered 0 to {len(modules) - 1}; copy it again")
    letters = []
    for number in range(len(modules)):
        kinds = [letter for module, letter in _LETTERS.items() if module in modules[number]]
        if len(kinds) != 1:
            listing = ", ".join(sorted(modules[number]))
            raise ValueError(
                f"{opened.folder}: layer {number} has {listing}; a layer of a hybrid is one of {', '.join(_LETTERS)}"
            )
        letters += kinds
    return "".join(letters), "numbered"


def _sizes(opened: MegatronFolder, pattern: str, layers: Layers, groups: int | None) -> dict[str, Any]:
    """What shapes tell."""
    if HEAD not in opened.tensors:
        raise ValueError(
            f"{opened.folder} has no {HEAD}: its embedding and head are one, and models here have two; train with "
            "--untie-embeddings-and-output-weights"
        )
    rows = opened.shape(EMBEDDING)
    if len(rows) != 2:
        raise ValueError(f"{opened.folder} has no {EMBEDDING}; it is not the whole of a model")
    sizes: dict[str, Any] = {"vocab_size": rows[0], "hidden_dim": rows[1]}

    def shape(letter: str, module: str) -> tuple[int, ...]:
        place = pattern.index(letter)
        if layers == "stacked":
            return opened.shape(f"decoder.layers.{module}")[1:]
        number = place // 2 if FINAL_NORMS["gpt"] in opened.tensors else place
        return opened.shape(f"decoder.layers.{number}.{module}")

    if "-" in pattern and (up := shape("-", "mlp.linear_fc1.weight")) and (down := shape("-", "mlp.linear_fc2.weight")):
        if up[0] == 2 * down[1]:
            raise ValueError(
                f"{opened.folder}: linear_fc1 has twice the rows of linear_fc2's columns, a gate that no FFN here has"
            )
        sizes["ffn_dim"] = down[1]
    if "M" in pattern and (heads := shape("M", "mixer.A_log")) and (z := shape("M", "mixer.in_proj.weight.z")):
        sizes |= {"mamba_num_heads": heads[0], "mamba_head_dim": z[0] // heads[0]}
        if (conv := shape("M", "mixer.conv1d.weight.x")) and len(conv) == 3:
            sizes["mamba_conv_width"] = conv[2]
        if (b := shape("M", "mixer.in_proj.weight.B")) and groups:
            sizes["mamba_state_dim"] = b[0] // groups
    return sizes


def _check_tensors(opened: MegatronFolder, expected: Sequence[Parameter], model: ModelConfig) -> None:
    """Raise ValueError, naming the first tensor, unless the model has exactly these."""
    known = set()
    for key, shape in _stored(expected):
        known.add(key)
        have = opened.shape(key)
        if not have:
            raise ValueError(f"{opened.folder} has no {key}, which a model of the pattern {model.pattern} has")
        cut = key in (EMBEDDING, HEAD) and have[0] > shape[0] and have[1:] == shape[1:]
        if have != shape and not cut:
            raise ValueError(
                f"{opened.folder}: {key} is {list(have)} there, {list(shape)} in the model that it says it is"
            )
    for key in opened.tensors:
        if key not in known:
            reason = next(
                (f"{words}, which no model here has" for part, words in _UNKNOWN.items() if part in key), None
            )
            raise ValueError(f"{opened.folder} has {key}: {reason or 'no model here has such a tensor'}")


def _stored(expected: Sequence[Parameter]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for parameter in expected:
        for section in parameter.sections:
            yield section.name, parameter.stored_shape(section)


def _load(opened: MegatronFolder, parameter: Parameter) -> Tensor:
    layer = None if parameter.layer is None else parameter.layer[0]
    if len(parameter.sections) == 1:
        key, rows = parameter.sections[0].name, parameter.shape[0]
        return opened.tensor(key, layer, rows if key in (EMBEDDING, HEAD) else None)
    values = {section.name: opened.tensor(section.name, layer) for section in parameter.sections}
    return ours_of(parameter.sections, values, parameter.shape)


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
