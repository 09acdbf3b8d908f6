"""From the YAML files under `configs/` and the overrides of a command line to one frozen `Config`.

Hydra composes plain dictionaries, and the dataclasses of `megatron_fp4.config.schema` check them: what a user got wrong
is a `ConfigError` of one line. Nothing depends on the time or the rank: every rank composes the same configuration by
itself, and no OmegaConf object leaves this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_fp4.config.errors import choose, explain, explain_value, unknown_key
from megatron_fp4.config.precision_schema import ComposedException, ExceptionConfig, PrecisionConfig, RecipeConfig
from megatron_fp4.config.schema import Config, ConfigError


def compose_config(overrides: list[str], config_dir: str | Path) -> Config:
    """The configuration that `config_dir`/config.yaml and `overrides` (`train.steps=100`, `model=tiny`) make.

    Raises ConfigError, one line naming the value and the remedy, for everything a user can get wrong in a key, a value,
    a group option or the syntax. Whether values fit together is for `megatron_fp4.checks` to say.
    """
    directory = Path(config_dir).resolve()
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"config_dir={config_dir} has no config.yaml; name the folder that holds it")
    for override in overrides:
        if override.startswith("~"):
            raise ConfigError(f"{override}: nothing can be deleted; set another value or choose another option instead")
        if override.lstrip("+").startswith("hydra.") and "hydra.searchpath" not in override:
            raise ConfigError(
                f"{override}: Hydra's own settings have no effect here; drop it (the output folder is run.dir)"
            )
    keys = _resolved(_compose("config", overrides, directory), overrides, directory)
    return _with_switch(_config(keys, directory), directory)


def config_from_saved(saved: Mapping[str, Any], overrides: list[str], config_dir: str | Path) -> Config:
    """The configuration `saved` (`asdict` of a run's `Config`, as JSON brings it back), changed by `overrides`.

    overrides: `key=value` with a full key, such as `parallel.tensor=1`; and `precision=<name>`, which replaces the
    whole precision config by the one under `config_dir`/precision before the other overrides apply.

    Raises ConfigError for a saved configuration of another version, and for a key or value that is wrong.
    """
    directory = Path(config_dir).resolve()
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or key.startswith(("+", "~")) or ("." not in key and key != "precision"):
            raise ConfigError(f"{override}: give key=value, such as parallel.tensor=1 or precision=nvfp4")
    config = _config(_written(saved), directory)
    for name in (override.partition("=")[2] for override in overrides if override.startswith("precision=")):
        config = replace(config, precision=_precision("precision", name, config, directory))
    changes = [override for override in overrides if not override.startswith("precision=")]
    try:
        merged = OmegaConf.merge(_written(asdict(config)), OmegaConf.from_dotlist(changes))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, changes, directory)) from error
    return _with_switch(_config(_resolved(merged, changes, directory), directory), directory)


def to_yaml(config: Config) -> str:
    """The configuration as YAML from which the same can be composed, in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.create(_written(asdict(config))))


def group_options(config_dir: str | Path) -> dict[str, list[str]]:
    """Every config group (a folder of `config_dir`) and its options, sorted."""
    folders = sorted(path for path in Path(config_dir).iterdir() if path.is_dir())
    options = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}
    return {group: names for group, names in options.items() if names}


def _compose(name: str, overrides: list[str], directory: Path) -> DictConfig:
    ConfigStore.instance().store(name="schema", node=_defaults())
    # Hydra's state is global and one failed or foreign initialization would make the next one fail.
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(directory), version_base="1.3", job_name="pretrain"):
            return compose(name, overrides=overrides)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:  # ValueError: Hydra's own
        raise ConfigError(explain(error, overrides, directory)) from error


def _defaults() -> DictConfig:
    """The schema's defaults, to which no file and no override can add a key but in empty mappings, such as
    `data.sources`."""
    defaults = OmegaConf.create(_written(asdict(Config())))
    nodes = [defaults]
    while nodes:
        node = nodes.pop()
        OmegaConf.set_struct(node, len(node) > 0)
        nodes += [child for child in node.values() if isinstance(child, DictConfig)]
    return defaults


def _resolved(composed: Any, overrides: list[str], directory: Path) -> dict[str, Any]:
    if "${now:" in OmegaConf.to_yaml(composed):
        raise ConfigError(
            "${now:...} differs between ranks and restarts; write a fixed name, such as run.dir=runs/name"
        )
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, overrides, directory)) from error


def _config(keys: dict[str, Any], directory: Path) -> Config:
    """`keys` checked, with the recipes of exceptions written out, but not yet the precision after a switch."""
    if "after_switch" in keys:
        raise ConfigError(unknown_key("after_switch"))
    try:
        config = Config(**keys)
    except ValidationError as error:
        raise ConfigError(explain_value(error, keys, directory)) from error
    return replace(config, precision=_with_recipes(config.precision, config, directory))


def _with_switch(config: Config, directory: Path) -> Config:
    """`config` with the precision after its switch; a switch that is off may name any target."""
    switch = config.precision.switch
    if switch.when == "never":
        return config
    after = _precision("precision.switch.target", switch.target, config, directory)
    return replace(config, after_switch=_with_recipes(after, config, directory))


def _precision(key: str, name: str, config: Config, directory: Path) -> PrecisionConfig:
    """The file `name` under precision/, which `key` asks for, as it resolves for the model of `config`; overrides of
    the run's own precision do not carry over to it."""
    if name not in (names := group_options(directory)["precision"]):
        raise ConfigError(f"{key}={name} is not a precision config; {choose(name, names)}")
    own = _compose(f"precision/{name}", [], directory)
    merged = OmegaConf.merge(asdict(replace(config, precision=PrecisionConfig())), own)
    keys = _resolved(merged.precision, [], directory)
    try:
        return PrecisionConfig(**keys)
    except ValidationError as error:
        raise ConfigError(explain_value(error, keys, directory, "precision")) from error


def _with_recipes(precision: PrecisionConfig, config: Config, directory: Path) -> PrecisionConfig:
    """`precision` with the recipe of every exception written out."""
    exceptions: list[ExceptionConfig] = []
    for i, exception in enumerate(precision.exceptions):
        key, name = f"precision.exceptions[{i}].precision", exception.precision
        other = _precision(key, name, config, directory)
        if other.exceptions:
            raise ConfigError(f"{key}={name} has exceptions of its own; choose a precision config without")
        recipe = RecipeConfig(**{field.name: getattr(other, field.name) for field in fields(RecipeConfig)})
        exceptions.append(ComposedException(exception.names, exception.blocks, name, recipe))
    return replace(precision, exceptions=exceptions)


def _written(keys: Mapping[str, Any]) -> dict[str, Any]:
    """`asdict` of a `Config` without what composing writes out: recipes of exceptions, the precision after a switch."""
    precision = dict(keys.get("precision", {}))
    given = [field.name for field in fields(ExceptionConfig)]
    precision["exceptions"] = [{key: one[key] for key in given} for one in precision.get("exceptions", [])]
    return {**{key: keys[key] for key in keys if key != "after_switch"}, "precision": precision}
