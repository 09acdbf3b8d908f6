"""A checkpoint of Megatron-core's GPTModel or MambaModel as one of ours, without optimizer state.

The model's configuration is what shapes tell, and Megatron-LM's arguments in `common.pt` where they do not (heads,
state groups, RoPE, the norm's eps). What neither tells, overrides have to say.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from data.tokenizer import load_tokenizer
from exchange.hf.sections import ours_of
from exchange.megatron.arguments import TOKENIZER, check_arguments, settings_of
from exchange.megatron.names import EMBEDDING, FINAL_NORMS, HEAD, Layers, Parameter, parameters
from exchange.megatron.reading import COMMON, MegatronFolder
from exchange.tokenizer import TOKENIZER_FILES
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ModelConfig
from models.pattern import check_model

FORMAT = "megatron"
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


def import_megatron(
    folder: Path,
    checkpoint: Path,
    config_dir: Path,
    *,
    name: str | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write `checkpoint`, which must not exist, whole or not at all, from what Megatron-LM saved to `folder`; returns
    its `model` settings. Weights become FP32 masters, exactly.

    name: what `model.name` becomes; None: the folder's. model: a config of `config_dir`/model that the weights have to
    fit. overrides: `model.key=value`, for what neither shapes nor arguments tell; `model.vocab_size` cuts rows that
    Megatron padded with. tokenizer: a folder or a file of it, to be kept; None: what an export of ours has beside it.
    Raises ValueError, in one line, for what is not such a folder or none of our models, and OSError.
    """
    opened = MegatronFolder(folder)
    given, base = _given(overrides, model, config_dir)
    try:
        check_arguments(opened.arguments)
        told = settings_of(opened.arguments)
    except ValueError as error:
        raise ValueError(f"{opened.folder / COMMON}: {error}") from error
    pattern, layers = _pattern(opened)
    settings = _settings(opened, pattern, layers, {**told, **given})
    if model is None:
        settings = {"name": name or _name_of(folder), **settings, **given}
    else:
        _check_same(settings, {**dataclasses.asdict(base.model), **given}, given, model, opened)
        settings = {**dataclasses.asdict(base.model), **({"name": name} if name else {})}
    try:
        config = dataclasses.replace(
            base, model=dataclasses.replace(base.model if model else ModelConfig(), **settings)
        )
        check_model(config.model)
    except ValueError as error:  # ConfigError is one, pydantic's another, of several lines
        raise ValueError(f"{opened.folder}: {' '.join(str(error).split())}") from error
    expected = list(parameters(config.model, layers))
    _check_tensors(opened, expected, config.model)
    kept, fingerprint = _tokenizer(tokenizer or _beside(folder), config.model.vocab_size)
    source = {"format": FORMAT, "from": folder.resolve().name, "iteration": opened.iteration}
    write_weights_only(
        checkpoint,
        config,
        (NewTensor(parameter.name, parameter.shape, _loader(opened, parameter)) for parameter in expected),
        imported=source,
        tokenizer=fingerprint,
        extra_files=kept,
    )
    return settings


def _beside(folder: Path) -> Path | None:
    """The tokenizer that `export_megatron` writes beside the iteration."""
    for parent in (folder, folder.resolve().parent):
        if (found := parent / TOKENIZER).is_dir():
            return found
    return None


def _tokenizer(path: Path | None, vocab_size: int) -> tuple[dict[str, bytes], str | None]:
    """The files of a tokenizer by the names of a Hugging Face folder, and its fingerprint."""
    if path is None:
        return {}, None
    found = {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}
    if path.is_file():
        found = {"tokenizer.model" if path.suffix == ".model" else "tokenizer.json": path}
    if not {"tokenizer.json", "tokenizer.model"} & {*found}:
        raise ValueError(f"{path} has neither tokenizer.json nor tokenizer.model; give a folder or a file that has")
    opened = load_tokenizer(path)
    if opened.vocab_size > vocab_size:
        raise ValueError(f"{path} has {opened.vocab_size} ids and the model only {vocab_size}; give its own tokenizer")
    return {name: file.read_bytes() for name, file in found.items()}, opened.fingerprint()


def _given(overrides: Sequence[str], model: str | None, config_dir: Path) -> tuple[dict[str, Any], Config]:
    """What the overrides set, and a run's configuration with them."""
    for override in overrides:
        if not override.startswith("model.") or "=" not in override:
            raise ValueError(f"{override}: give model.key=value, such as model.num_kv_heads=8")
    config = compose_config([*([f"model={model}"] if model else []), *overrides], config_dir)
    keys = (override.partition("=")[0].removeprefix("model.") for override in overrides)
    return {key: getattr(config.model, key) for key in keys}, config


def _settings(opened: MegatronFolder, pattern: str, layers: Layers, known: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model, what shapes and `known` tell. Raises ValueError if something is told by none of them."""
    wanted = ["norm_eps"] + ["num_query_heads", "num_kv_heads", "head_dim", "rope"] * ("*" in pattern)
    wanted += ["mamba_num_groups"] * ("M" in pattern) + ["rope_base"] * bool("*" in pattern and known.get("rope"))
    if missing := [key for key in wanted if key not in known]:
        listing = " ".join(f"model.{key}=..." for key in missing)
        raise ValueError(f"{opened.folder}: neither shapes nor arguments ({COMMON}) tell all; add {listing}")
    try:
        settings = {"pattern": pattern, **_sizes(opened, pattern, layers, known.get("mamba_num_groups"))}
    except (IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{opened.folder}: shapes of its tensors are those of no model; copy it again") from error
    settings |= {key: known[key] for key in wanted}
    if "init_std" in known:
        settings["init_std"] = known["init_std"]
    return settings


def _check_same(
    found: Mapping[str, Any], have: Mapping[str, Any], given: Mapping[str, Any], model: str, opened: MegatronFolder
) -> None:
    """Raise ValueError, naming the key, unless the config is that of the weights."""
    for key, value in found.items():
        cut = key == "vocab_size" and have[key] < value
        if have[key] != value and key not in given and key != "init_std" and not cut:
            raise ValueError(
                f"model.{key} is {have[key]} in {model}, and {value} in {opened.folder}; leave --model out"
            )


def _name_of(folder: Path) -> str:
    """Of what Megatron-LM saved to."""
    folder = folder.resolve()
    return folder.parent.name if folder.name.startswith("iter_") or folder.name == "release" else folder.name


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
            return "*-" * (opened.shape(key) or (1,))[0], "stacked"
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
        # Megatron's chunk; it moves rounding only.
        sizes |= {"mamba_num_heads": heads[0], "mamba_head_dim": z[0] // heads[0], "mamba_chunk_size": 128}
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


def _loader(opened: MegatronFolder, parameter: Parameter) -> Callable[[], Tensor]:
    layer = None if parameter.layer is None else parameter.layer[0]

    def load() -> Tensor:
        if len(parameter.sections) == 1:
            key, rows = parameter.sections[0].name, parameter.shape[0]
            return opened.tensor(key, layer, rows if key in (EMBEDDING, HEAD) else None)
        values = {section.name: opened.tensor(section.name, layer) for section in parameter.sections}
        return ours_of(parameter.sections, values, parameter.shape)

    return load
