"""From the YAML files under `configs/` and the overrides of a command line to one frozen `Config`.

Hydra composes; the dataclasses of `megatron_fp4.config.schema` are its schema, so a mistyped key or a value of the
wrong type fails here, as a `ConfigError` of one line. Nothing depends on the time or the rank: every rank
composes the same configuration by itself, and no OmegaConf object leaves this file.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_fp4.config.compose_errors import choose, explain, unknown_key
from megatron_fp4.config.schema import (
    ComposedException,
    Config,
    ConfigError,
    ExceptionConfig,
    ModelConfig,
    PrecisionConfig,
    RecipeConfig,
)

__all__ = ["ConfigError", "compose_config", "group_options", "help_text", "to_yaml"]


def compose_config(overrides: list[str], config_dir: str | Path) -> Config:
    """The configuration that `config_dir`/config.yaml and `overrides` (`train.steps=100`, `model=tiny`) make.

    Raises ConfigError, one line naming the value and the remedy, for everything a user can get wrong in a key,
    a value's type, a group option or the syntax. Whether values fit together is for
    `megatron_fp4.checks` to say.
    """
    directory = _config_directory(config_dir)
    for override in overrides:
        if override.startswith("~"):
            raise ConfigError(f"{override}: nothing can be deleted; set another value or choose another option instead")
        if override.lstrip("+").startswith("hydra.") and "hydra.searchpath" not in override:
            raise ConfigError(
                f"{override}: Hydra's own settings have no effect here; drop it (the output folder is run.dir)"
            )
    return _to_object(_compose("config", overrides, directory), overrides, directory)


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, in the order of the dataclasses; without what `precision.switch` names."""
    keys = asdict(config)
    del keys["after_switch"]
    return OmegaConf.to_yaml(OmegaConf.create(keys))


def group_options(config_dir: str | Path) -> dict[str, list[str]]:
    """Every config group (a folder of `config_dir`) and its options, sorted."""
    folders = sorted(path for path in Path(config_dir).iterdir() if path.is_dir())
    options = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}
    return {group: names for group, names in options.items() if names}


def help_text(config_dir: str | Path) -> str:
    """What `pretrain.py --help` prints: groups with their options, keys with their defaults, examples."""
    directory = _config_directory(config_dir)
    chosen = _default_options(directory)
    lines = [
        "usage: pretrain.py [key=value ...]        torchrun --nproc-per-node 8 pretrain.py [key=value ...]",
        "",
        "Groups (group=option; * is the default):",
    ]
    for group, options in group_options(directory).items():
        lines.append(f"  {group}")
        for option in options:
            mark = "*" if chosen.get(group) == option else " "
            lines.append(f"  {mark} {option:<20}{_summary(directory / group / f'{option}.yaml')}")
    lines += ["", "Keys and their values in the default run (megatron_fp4/config/schema.py explains each):"]
    default = compose_config([], directory)
    for section in fields(default):
        if section.name != "after_switch":
            lines += _key_lines(getattr(default, section.name), section.name)
    lines += [
        "",
        "Examples:",
        "  pretrain.py                                         a tiny model in NVFP4, minutes on a CPU",
        "  pretrain.py precision=bf16 run.dir=runs/bf16        the same run without quantization",
        "  pretrain.py precision.fprop.weight.block=1x16       1x16 weights in fprop and, following it, in dgrad",
        "  pretrain.py precision.switch.when=0.9               change precision after 90% of the steps",
        "  pretrain.py experiment=nemotron_h_8b data=my_corpus parallel=tensor_4",
        "  pretrain.py 'experiment=[nemotron_h_8b,qaf]' data=my_corpus",
    ]
    return "\n".join(lines)


def _config_directory(config_dir: str | Path) -> Path:
    directory = Path(config_dir).resolve()
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"config_dir={config_dir} has no config.yaml; name the folder that holds it")
    return directory


def _compose(name: str, overrides: list[str], directory: Path) -> DictConfig:
    ConfigStore.instance().store(name="schema", node=_schema())
    # Hydra's state is global and one failed or foreign initialization would make the next one fail.
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(directory), version_base="1.3", job_name="pretrain"):
            return compose(name, overrides=overrides)
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: Hydra's own
        raise ConfigError(explain(error, overrides, directory)) from error


def _schema() -> DictConfig:
    """`Config` as a structured config into which Hydra can merge."""
    schema = OmegaConf.structured(Config)
    _unlock(schema)
    return schema


def _unlock(node: DictConfig) -> None:
    # OmegaConf makes nodes of frozen dataclasses read-only, and then no YAML file could set anything. Plain
    # dictionaries, such as data.sources, must also accept keys that the schema cannot know.
    OmegaConf.set_readonly(node, None)
    if not is_dataclass(OmegaConf.get_type(node)):
        OmegaConf.set_struct(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _unlock(child)


def _precision_config(key: str, name: str, model: ModelConfig, directory: Path) -> PrecisionConfig:
    """The file `name` under precision/ as it resolves for `model`; overrides of the run's precision do not count."""
    if name not in (names := group_options(directory)["precision"]):
        raise ConfigError(f"{key}={name} is not a precision config; {choose(name, names)}")
    # The recipe may refer to the model: which blocks stay in BF16.
    model_node = OmegaConf.create({"model": asdict(model)})
    composed = OmegaConf.merge(_schema(), model_node, _compose(f"precision/{name}", [], directory))
    assert isinstance(composed, DictConfig)
    return _plain_object(composed, [], directory).precision


def _to_object(composed: DictConfig, overrides: list[str], directory: Path) -> Config:
    config = _plain_object(composed, overrides, directory)
    precision = _with_recipes(config.precision, config.model, directory)
    return replace(config, precision=precision, after_switch=_after_switch(precision, config.model, directory))


def _after_switch(precision: PrecisionConfig, model: ModelConfig, directory: Path) -> PrecisionConfig | None:
    if precision.switch.when == "never":
        return None
    after = _precision_config("precision.switch.target", precision.switch.target, model, directory)
    return _with_recipes(after, model, directory)


def _with_recipes(precision: PrecisionConfig, model: ModelConfig, directory: Path) -> PrecisionConfig:
    """`precision` with the recipe of every exception written out."""
    exceptions: list[ExceptionConfig] = []
    for i, exception in enumerate(precision.exceptions):
        key = f"precision.exceptions[{i}].precision"
        other = _precision_config(key, exception.precision, model, directory)
        if other.exceptions:
            raise ConfigError(
                f"{key}={exception.precision} has exceptions of its own; choose a precision config without"
            )
        recipe = RecipeConfig(**{field.name: getattr(other, field.name) for field in fields(RecipeConfig)})
        exceptions.append(ComposedException(exception.names, exception.blocks, exception.precision, recipe))
    return replace(precision, exceptions=exceptions)


def _plain_object(composed: DictConfig, overrides: list[str], directory: Path) -> Config:
    _refuse_unknown_keys(composed, "")
    if composed.after_switch is not None:
        raise ConfigError(unknown_key("after_switch"))
    if "${now:" in OmegaConf.to_yaml(composed):
        raise ConfigError(
            "${now:...} differs between ranks and restarts; write a fixed name, such as run.dir=runs/name"
        )
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, overrides, directory)) from error
    assert isinstance(config, Config)
    return config


def _refuse_unknown_keys(node: DictConfig | ListConfig, path: str) -> None:
    """`+key=value` adds keys that no dataclass has, past the schema."""
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    kind = OmegaConf.get_type(node)
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else None
    keys = list(node) if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        where = f"{path}.{key}".lstrip(".") if isinstance(node, DictConfig) else f"{path}[{key}]"
        if known is not None and key not in known:
            raise ConfigError(unknown_key(where))
        child = node._get_node(key)  # type: ignore[arg-type]
        if isinstance(child, DictConfig | ListConfig):
            _refuse_unknown_keys(child, where)


def _default_options(directory: Path) -> dict[str, str]:
    defaults = yaml.safe_load((directory / "config.yaml").read_text())["defaults"]
    return {group: name for entry in defaults if isinstance(entry, dict) for group, name in entry.items() if name}


def _summary(path: Path) -> str:
    """The first sentence of the comment at the top of a config file, cut to a line."""
    comment: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# "):
            break
        comment.append(line[2:])
    sentence = re.split(r"(?<=[.;]) (?=[A-Z0-9])", " ".join(comment))[0].rstrip(".;")
    return textwrap.shorten(sentence, width=84, placeholder=" ...")


def _key_lines(node: object, path: str) -> list[str]:
    """`path:` with the node's plain keys as key=value, wrapped, followed by the same for nested nodes."""
    assert is_dataclass(node)
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    plain = [f"{key}={_value(value)}" for key, value in values.items() if not is_dataclass(value)]
    text = textwrap.fill(
        "  ".join(plain),
        width=108,
        initial_indent=f"  {path}:  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
    )
    lines = text.splitlines() if plain else []
    return lines + [
        line for key, value in values.items() if is_dataclass(value) for line in _key_lines(value, f"{path}.{key}")
    ]


def _value(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(str(getattr(item, "name", item)) for item in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
