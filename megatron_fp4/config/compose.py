"""Compose one frozen `Config` from the YAML files under `configs/` and the overrides of a command line.

Hydra composes the groups into plain dictionaries. Then values of the command line are set, and the dataclasses of
`megatron_fp4.config.schema` check them: a user's error becomes a `ConfigError` of one line. Nothing depends on the time
or the rank, so every rank composes the same configuration by itself. No OmegaConf object leaves this file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from os.path import expanduser
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import ValidationError

from megatron_fp4.config.errors import LOOKED_UP, explain, explain_value, parts_of, shown, suggest, type_at, unknown_key
from megatron_fp4.config.precision_schema import WITH, ComposedException, ExceptionConfig, PrecisionConfig, RecipeConfig
from megatron_fp4.config.removed_keys import leaves, renewed, why_removed
from megatron_fp4.config.schema import ADDED, Config, ConfigError

_T = TypeVar("_T")
# The group of which a user may choose several options, or none.
_SEVERAL = "experiment"
# Keys of a configuration: those that name data, those that change the model, those about one start.
NAMES_DATA = ("data.sources", "data.validation", "data.tokenizer", "data.cache_dir")
_OF_THE_MODEL = ("model.", "precision.", "after_switch.")
_OF_A_START = ("run.dir", "checkpoint.", "logging.")
# What a name leaves out of an exception.
_UNSET = asdict(ExceptionConfig(precision=""))
# The keys that define a recipe.
_OF_RECIPES = tuple(
    f"precision.{key}" for key in ("amax", "rht_signs", "fp8_", "fprop", "dgrad", "wgrad", "bf16_blocks", "exceptions")
)


def compose_config(overrides: Sequence[str], config_dir: str | Path) -> Config:
    """Compose the configuration from `config_dir`/config.yaml and `overrides` (`train.steps=100`, `model=tiny`). A
    `--config-dir=FOLDER` among the overrides adds another folder with groups.

    Raises ConfigError, one line with the value and the remedy, for a wrong key, value, group option or syntax.
    `megatron_fp4.config.checks` checks whether values fit together.
    """
    overrides, folders = _folders(overrides, config_dir)
    if not (folders[0] / "config.yaml").is_file():
        raise ConfigError(f"config_dir={config_dir} has no config.yaml; name the folder that holds it")
    groups = group_options(*folders)
    checked = [_check_override(override, groups) for override in overrides]
    chosen = [override for override, parsed in zip(overrides, checked, strict=True) if parsed.key_or_group in groups]
    values = [parsed for parsed in checked if parsed.key_or_group not in groups]
    return _completed(compose_groups("config", chosen, folders), values, folders)


def config_from_saved(
    saved: Mapping[str, Any], overrides: list[str], config_dir: Path, *, opens_data: bool = True, trusted: bool = False
) -> Config:
    """The configuration `saved` (`as_saved` of a run's `Config`, read from JSON), changed by `overrides`.

    The author of the checkpoint chose these values. A URL among them could send a secret from this machine's
    environment to a stranger. So only the resolvers oc.env and oc.decode run. And unless the run is `trusted`, which
    the user says of their own runs, only the environment variables and data that `overrides` name are used. opens_data:
    whether data will be opened; if not, values from the environment that do not change the model are left out.

    overrides: `key=value` with a full key, such as `parallel.tensor=1`; and `precision=<name>`, which replaces the
    whole precision config by the one under `config_dir`/precision before the other overrides apply. References in that
    file follow the other overrides (`precision=nvfp4 precision.fprop.weight.block=1x16` changes dgrad's too).

    Raises ConfigError for a saved configuration of another version, for a wrong key or value, and for an environment
    variable that is not set.
    """
    overrides, folders = _folders(overrides, config_dir)
    recipe, changes = None, []
    for override in overrides:
        parsed = parse_override(override)
        if parsed.key_or_group == "precision" and isinstance(parsed.value(), str):
            recipe = str(parsed.value())
        elif "." not in parsed.key_or_group:
            raise ConfigError(f"{override}: give key=value, such as parallel.tensor=1 or precision=nvfp4")
        else:
            changes.append(_check_override(override, {}))
    try:
        _refuse_resolvers(saved)
        if not trusted:
            given = {key for change in changes for key, _ in leaves({change.key_or_group: change.value()})}
            saved = _without_environment(saved, given, opens_data)
        keys: Any = _without_added(saved)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the checkpoint's configuration is not one of this program ({error!r:.200})") from error
    if recipe is not None:
        keys = _with_precision("precision", recipe, keys, folders)
    return _completed(OmegaConf.create(keys), changes, folders)


def _refuse_resolvers(saved: Mapping[str, Any]) -> None:
    harmless = re.compile(r"\$\{(oc\.(env|decode):[^${}]*|[\w.\[\]]+)\}")
    for key, value in leaves(saved):
        text, replaced = str(value), 1
        while replaced:  # from the innermost out
            text, replaced = harmless.subn("", text)
        if "${" in text:
            raise ConfigError(
                f"the checkpoint's configuration has {key}={value}; only the resolvers oc.env and oc.decode are allowed"
            )


def _without_environment(saved: Mapping[str, Any], given: Collection[str], opens_data: bool) -> dict[str, Any]:
    """`saved` without values from the environment, except those of the `given` keys.

    Raises ConfigError for such a value that cannot be left out and, if opens_data, for data that would be opened.
    """
    kept: dict[str, Any] = copy.deepcopy(dict(saved))
    for key, value in [*leaves(saved)]:
        looked_up, used = "${" in str(value), opens_data or key.startswith(_OF_THE_MODEL)
        names_data = opens_data and key.startswith(NAMES_DATA) and value not in (None, {}, [])
        if key in given or not (looked_up or names_data):
            continue
        if names_data or (used and not key.startswith(_OF_A_START)):
            remedy = "give --trust-config if the run is yours, or " if opens_data else "give "
            raise ConfigError(
                f"the checkpoint's configuration has {key}={value}, which is not used without your consent; {remedy}"
                f"another value, as {key}=..."
            )
        *sections, name = key.split(".")
        del functools.reduce(lambda node, section: node[section], sections, kept)[name]
    return kept


def to_yaml(config: Config, resolve: bool = False) -> str:
    """The configuration as YAML, in the order of the dataclasses; the same one can be composed from it. Values from
    environment variables are written as references to these, unless `resolve`."""
    return OmegaConf.to_yaml(OmegaConf.create(_without_added(as_saved(config))), resolve=resolve)


def show_info(what: str, overrides: Sequence[str], config_dir: Path) -> None:
    """Print what Hydra knows of the composition. what: of its `--info`. Raises ConfigError."""
    shown = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    if what not in shown:
        raise ConfigError(f"--info {what}: write one of {', '.join(shown)}")
    overrides, folders = _folders(overrides, config_dir)
    with _hydra("config", overrides, folders) as given:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        hydra.show_info(what, "config", given)


def group_options(*config_dirs: str | Path) -> dict[str, list[str]]:
    """All config groups (folders in `config_dirs`) and their options, sorted."""
    found: dict[str, set[str]] = {}
    for path in (path for folder in config_dirs for path in Path(folder).glob("*/*.yaml")):
        found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(found[group]) for group in sorted(found)}


def one_word(arguments: Sequence[str]) -> list[str]:
    """`arguments` with `--config-dir FOLDER` as `--config-dir=FOLDER`."""
    found: list[str] = []
    for argument in arguments:
        if found and found[-1] == "--config-dir":
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def _folders(arguments: Sequence[str], config_dir: str | Path) -> tuple[list[str], list[Path]]:
    """The overrides among `arguments`, and the folders of config files, the project's first. In overrides, `~` becomes
    the home folder, because Hydra cannot read it."""
    overrides, folders = [], [Path(config_dir).resolve()]
    for argument in one_word(arguments):
        key, separator, value = argument.partition("=")
        value = expanduser(value) if value == "~" or value.startswith("~/") else value
        if key != "--config-dir":
            overrides.append(key + separator + value)
        elif value and Path(value).is_dir():
            folders.append(Path(value).resolve())
        else:
            raise ConfigError(f"{argument}: there is no such folder; give --config-dir=FOLDER with model/, data/, ...")
    return overrides, folders


def parse_override(override: str) -> Override:
    """Parse one argument of the command line. Raises ConfigError."""
    with contextlib.suppress(HydraException):
        if (parsed := OverridesParser.create().parse_override(override)).key_or_group:
            return parsed
    key, separator, value = override.partition("=")
    remedy = "write key=value as one word, such as train.steps=100"
    if key.startswith("-"):
        remedy = f"write {override.lstrip('-')}, without dashes" if separator else "there is no such option; see --help"
    elif value.startswith(("{", "[")):
        shape = "{name: ...}" if value[0] == "{" else "[...]"
        remedy = f"quote all of it for the shell, '{key}={shape}', and close every bracket and quote"
    elif separator and key:
        remedy += f"; quote text with special characters: '{key}=\"{value}\"'"
    raise ConfigError(f"cannot parse {override!r}; {remedy}")


def _check_override(override: str, groups: Mapping[str, Sequence[str]]) -> Override:
    """Parse and check an argument: a group and an option, or a key and a value. Raises ConfigError."""
    parsed = parse_override(override)
    key, parts = parsed.key_or_group, parts_of(parsed.key_or_group)
    hint = type_at(parts)
    if parsed.is_delete():
        raise ConfigError(f"{override}: nothing can be deleted; set another value or choose another option instead")
    if parsed.is_sweep_override():
        a_list = f", or a list: {key}=[...]" if get_origin(hint) is list else ""
        raise ConfigError(f"{override} gives several values; give one{a_list}, or add --multirun for a run with each")
    if key in groups:
        if parsed.package is not None or parsed.is_add():
            raise ConfigError(f"{override}: write {key}=..., without a sign or a package")
        if not isinstance(parsed.value(), str) and key != _SEVERAL:
            raise ConfigError(f"{override}: give one option of {key}; {suggest('', groups[key])}")
    elif hint is None or parts[0] in ADDED or why_removed(key):
        raise ConfigError(unknown_key(key))
    for place in range(1, len(parts)):
        if get_origin(type_at(parts[:place])) is list:
            raise ConfigError(f"{override}: give the whole list: {'.'.join(parts[:place])}=[...]")
    if key not in groups and "${" not in override:  # here, because later the error would name a key that refers to it
        first = fields(hint)[0].name if is_dataclass(hint) else "name"
        if (is_dataclass(hint) or get_origin(hint) is dict) and not isinstance(parsed.value(), Mapping):
            raise ConfigError(f"{override}: give a mapping, such as '{key}={{{first}: ...}}'")
        if get_origin(hint) is list and isinstance(parsed.value(), Mapping):
            raise ConfigError(f"{override}: give a list, such as '{key}=[...]'")
    return parsed


def compose_groups(name: str, groups: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    """The keys of the file `name` with these options of groups, not resolved. Raises ConfigError."""
    with _hydra(name, groups, folders) as overrides:
        return compose(name, overrides=overrides)


@contextlib.contextmanager
def _hydra(name: str, overrides: Sequence[str], folders: Sequence[Path]) -> Iterator[list[str]]:
    """Inside, Hydra composes the file `name` from `folders` with the overrides that this gives."""
    hydra_defaults()
    # Hydra's state is global: after a failed or another initialization, the next one would fail.
    GlobalHydra.instance().clear()
    # Hydra looks for its first file in one folder only.
    first = next((folder for folder in folders if (folder / f"{name}.yaml").exists()), folders[0])
    others = ",".join(f"'file://{folder}'" for folder in folders if folder != first)
    with _config_errors(folders), initialize_config_dir(config_dir=str(first), version_base="1.3", job_name="pretrain"):
        yield [*overrides, f"hydra.searchpath=[{others}]"] if others else list(overrides)


@contextlib.contextmanager
def _config_errors(folders: Sequence[Path]) -> Iterator[None]:
    """Inside, errors of Hydra and OmegaConf about the files in `folders` and their references become ConfigErrors."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:  # ValueError: Hydra's own
        raise ConfigError(explain(error, folders)) from error


def hydra_defaults() -> None:
    """Register the schema's defaults with Hydra, for config.yaml."""
    ConfigStore.instance().store(name="schema", node=_defaults())


@functools.cache
def _defaults() -> DictConfig:
    """The schema's defaults. Files and overrides can add keys only to empty mappings, such as `data.sources`."""
    defaults = OmegaConf.create(_without_added(as_saved(Config())))
    nodes = [defaults]
    while nodes:
        node = nodes.pop()
        OmegaConf.set_struct(node, len(node) > 0)
        nodes += [child for child in node.values() if isinstance(child, DictConfig)]
    return defaults


def _resolved(composed: Any, folders: Sequence[Path]) -> dict[str, Any]:
    if "${now:" in OmegaConf.to_yaml(composed):
        raise ConfigError("${now:...} differs between ranks and restarts; write a fixed name, as in run.dir=runs/name")
    with _config_errors(folders):
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def _completed(composed: DictConfig, changes: Sequence[Override], folders: Sequence[Path]) -> Config:
    """Apply `changes` to `composed`, resolve and check it, and fill in recipes of exceptions, the precision after a
    switch, and the texts of values from the environment."""
    with _config_errors(folders):
        for change in changes:
            OmegaConf.update(composed, change.key_or_group, change.value(), merge=True)
    keys = _resolved(composed, folders)
    for added in ADDED:
        if added in keys:
            raise ConfigError(unknown_key(added))
    config = _checked(Config, keys)
    config = replace(config, from_environment=_environment_texts(composed))
    config = replace(config, precision=_with_changes_in_name(config, changes, folders))
    precision, texts = _with_recipes(config.precision, config, folders, "precision")
    config = replace(config, precision=precision, from_environment={**config.from_environment, **texts})
    if (switch := config.precision.switch).when == "never":  # a switch that is off may name any target
        return config
    after, texts = _precision("precision.switch.target", switch.target, config, folders, "after_switch")
    after, of_recipes = _with_recipes(after, config, folders, "after_switch")
    return replace(config, after_switch=after, from_environment={**config.from_environment, **texts, **of_recipes})


def _with_changes_in_name(config: Config, changes: Sequence[Override], folders: Sequence[Path]) -> PrecisionConfig:
    """The precision of `config`. Values that differ from the file of its name become part of its name, so that two
    recipes never have the same name in logs."""
    precision = config.precision
    name = precision.name.partition(WITH)[0]
    given = any(change.key_or_group.startswith(_OF_RECIPES) for change in changes)
    if (name == precision.name and not given) or name not in group_options(*folders).get("precision", {}):
        return precision
    plain, _ = _precision("precision", name, config, folders, "precision")
    usual = dict(leaves(asdict(plain)))
    changed = {
        key: value
        for key, value in leaves(asdict(precision))
        if f"precision.{key}".startswith(_OF_RECIPES) and usual.get(key, value) != value
    }
    texts = []
    for key, value in changed.items():
        if key.startswith("dgrad.weight.") and changed.get(key.replace("dgrad", "fprop")) == value:
            continue  # the same as fprop's
        if key == "exceptions":
            value = [{name: item for name, item in each.items() if item != _UNSET.get(name)} for each in value]
        secret = any(at.startswith(f"precision.{key}") for at in config.from_environment)
        texts.append(f"{key}={'...' if secret else shown(value)}")
    return replace(precision, name=WITH.join([name, " ".join(texts)]) if texts else name)


def _with_precision(key: str, name: str, keys: Mapping[str, Any], folders: Sequence[Path]) -> DictConfig:
    """`keys` with the precision of the file `name` under precision/. key: the one that names it, for errors."""
    if name not in (names := group_options(*folders)["precision"]):
        raise ConfigError(f"{key}={name} is not a precision config; {suggest(name, names)}")
    plain = OmegaConf.create({**keys, "precision": asdict(PrecisionConfig())})
    return OmegaConf.merge(plain, compose_groups(f"precision/{name}", [], folders))  # type: ignore[return-value]


def _precision(
    key: str, name: str, config: Config, folders: Sequence[Path], path: str
) -> tuple[PrecisionConfig, dict[str, str]]:
    """The precision of the file `name` under precision/ for the model of `config`, without the run's overrides. Also
    texts of values from the environment, with keys under `path`. key: the one that names the file, for errors."""
    texts = {at: text for at, text in config.from_environment.items() if not at.startswith("precision")}
    merged = _with_precision(key, name, as_saved(replace(config, from_environment=texts)), folders)
    keys = _resolved(merged.precision, folders)
    return _checked(PrecisionConfig, keys, "precision"), _environment_texts(merged.precision, path)


def _with_recipes(
    precision: PrecisionConfig, config: Config, folders: Sequence[Path], path: str
) -> tuple[PrecisionConfig, dict[str, str]]:
    """`precision` with the recipes of all exceptions, and texts of values from the environment, as in `_precision`."""
    exceptions: list[ExceptionConfig] = []
    texts: dict[str, str] = {}
    for i, exception in enumerate(precision.exceptions):
        key, name = f"precision.exceptions[{i}].precision", exception.precision
        its_precision, its_texts = _precision(key, name, config, folders, f"{path}.exceptions[{i}].recipe")
        if its_precision.exceptions:
            raise ConfigError(f"{key}={name} has exceptions itself; choose a precision config without exceptions")
        recipe = RecipeConfig(**{field.name: getattr(its_precision, field.name) for field in fields(RecipeConfig)})
        given = (exception.names, exception.blocks, exception.sections, name, recipe)
        exceptions.append(ComposedException(*given, optional=exception.optional))
        texts |= its_texts
    return replace(precision, exceptions=exceptions), texts


def _checked(cls: type[_T], keys: Mapping[str, Any], *path: str) -> _T:
    """A `cls` with the values `keys`. path: of these keys in the configuration, for errors."""
    try:
        return cls(**keys)
    except ValidationError as error:
        raise ConfigError(explain_value(error, keys, path)) from error


def _without_added(keys: Mapping[str, Any]) -> dict[str, Any]:
    """`as_saved` of a `Config`, also of an earlier version, without what composing fills in."""
    keys = renewed(keys)
    precision = dict(keys.get("precision", {}))
    given = [field.name for field in fields(ExceptionConfig)]
    if isinstance(exceptions := precision.get("exceptions", []), list):  # it may be the text of a reference
        precision["exceptions"] = [{key: one[key] for key in given if key in one} for one in exceptions]
    return {**{key: keys[key] for key in keys if key not in ADDED}, "precision": precision}


# Values of environment variables differ between machines, or are private. So a run writes their texts, such as
# `${oc.env:SCRATCH}/corpus`, and whoever reads the configuration resolves them again.


def _environment_value(key: str, *default: Any) -> Any:
    LOOKED_UP.add(key)
    return oc.env(key, *default)


OmegaConf.register_new_resolver("oc.env", _environment_value, replace=True)


def _environment_texts(composed: DictConfig, path: str = "") -> dict[str, str]:
    """Key (`data.phases[0].fraction`) -> text, for every value that depends on an environment variable.

    composed: a configuration that can be resolved. path: its key.
    """
    texts: dict[str, str] = {}
    earlier = {*LOOKED_UP}

    def walk(node: Any, key: str) -> None:
        if isinstance(node, dict):
            for name, inner in node.items():
                if "${" in str(inner) and set(".[]") & set(str(name)):
                    raise ConfigError(f"{key}.{name}={inner}: a name with one of .[] takes no ${{...}}; rename it")
                walk(inner, f"{key}.{name}".lstrip("."))
        elif isinstance(node, list):
            for index, inner in enumerate(node):
                walk(inner, f"{key}[{index}]")
        elif "${" in str(node):
            earlier.update(LOOKED_UP)
            LOOKED_UP.clear()
            if OmegaConf.is_config(value := OmegaConf.select(composed, key)):
                OmegaConf.to_container(value, resolve=True)
            if LOOKED_UP:
                texts[f"{path}.{key}".lstrip(".")] = node

    try:
        walk(OmegaConf.to_container(composed), "")
    finally:
        LOOKED_UP.update(earlier)
    return texts


def as_saved(config: Config) -> dict[str, Any]:
    """`asdict` of a configuration for files: with the texts of `config.from_environment` instead of their values."""
    keys = asdict(config)
    for key, text in keys.pop("from_environment").items():
        parts = [int(part) if part.isdecimal() else part for part in parts_of(key)]
        node: Any = keys
        with contextlib.suppress(KeyError, IndexError, TypeError):  # code has replaced this part since
            for part in parts[:-1]:
                node = node[part]
            node[parts[-1]]
            node[parts[-1]] = text
    return keys
