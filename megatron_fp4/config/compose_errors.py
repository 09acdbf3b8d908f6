"""One clear line for what Hydra and OmegaConf raise over several."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from megatron_fp4.config.schema import Config

_HELP = "`python pretrain.py --help` lists every key and option"


def explain(error: Exception, overrides: list[str], directory: Path) -> str:
    """One line for a user: what is wrong with which value, and what would be right.

    error: what Hydra, OmegaConf or the YAML parser raised. overrides: the command line's, to show the one at
    fault. directory: the folder of config files.
    """
    if isinstance(error, OverrideParseException):
        return _unparsable(error.override or "")
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else str(directory)
        return f"{where}: not valid YAML ({getattr(error, 'problem', None) or 'unreadable'}); correct that line"
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    file = re.match(r"In '([^']+)':", str(error))
    prefix = f"{directory / file[1]}.yaml: " if file else ""
    cause = _omegaconf_cause(error)
    if cause is None:
        return prefix + _hydra_line(str(error), overrides)
    key = str(cause.full_key or "")
    if isinstance(cause, InterpolationKeyError):
        needed = re.search(r"Interpolation key '([^']+)'", str(cause))
        name = needed[1] if needed else "a key"
        remedy = f"set {name} in a config file or as '{name}=...'"
        return f"{prefix}{key} refers to {name}, which is not set; {remedy}"
    if isinstance(cause, MissingMandatoryValue):
        return f"{prefix}{key} is not set and has no default; set it in a config file or as '{key}=...'"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return prefix + unknown_key(_with_parent(key, overrides))
    if isinstance(cause, ValidationError):
        return prefix + _wrong_type(cause, key, overrides)
    return f"{prefix}{_override_of(key, overrides) or key}: {_first_line(str(cause))}; {_HELP}"


def unknown_key(key: str) -> str:
    """The line for a key that does not exist, with the closest ones that do."""
    parts = _parts(key)
    known = list(_keys(Config, ""))
    leaf = parts[-1]
    same_leaf = [name for name in known if name.split(".")[-1] == leaf]
    parent = _type_at(parts[:-1])
    siblings = list(typing.get_type_hints(parent)) if is_dataclass(parent) else []
    stem = key[: -len(leaf)]
    close = [stem + name for name in difflib.get_close_matches(leaf, siblings, n=3, cutoff=0.6)]
    close += same_leaf + difflib.get_close_matches(key, known, n=2, cutoff=0.8)
    suggestions = [name for name in dict.fromkeys(close) if not key.startswith(name)][:3]
    if suggestions:
        return f"{key} is not a key; did you mean {' or '.join(suggestions)}?"
    if siblings:
        return f"{key} is not a key; {stem.rstrip('.') or 'the top level'} has {', '.join(siblings)}"
    return f"{key} is not a key; {_HELP}"


def _unparsable(override: str) -> str:
    if override.startswith("-"):
        return f"{override} is not an option; overrides are written key=value, as in train.steps=100; {_HELP}"
    if "=" not in override:
        return f"{override!r} has no value; write it key=value, as in train.steps=100"
    key, value = override.split("=", 1)
    quoted = f"'{key}=\"{value}\"'"
    return f"cannot parse {override!r}; check the brackets, and quote text with special characters: {quoted}"


def _missing_option(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    group, _, option = missing.rpartition("/")
    if not group:
        return f"{missing}: no such config file; {_HELP}"
    options = [name for name in error.options or [] if name]
    return f"{group}={option}: there is no {group} config of that name; {choose(option, options)}"


def choose(wrong: str, options: list[str]) -> str:
    """The remedy for a name that is none of `options`."""
    close = difflib.get_close_matches(wrong, options, n=1, cutoff=0.6)
    return (f"did you mean {close[0]}? There are " if close else "choose one of ") + ", ".join(options)


def _hydra_line(message: str, overrides: list[str]) -> str:
    ambiguous = re.match(r"Ambiguous value for argument '([^']+)'", message)
    if ambiguous:
        key, _, value = ambiguous[1].partition("=")
        return f"{ambiguous[1]} gives several values; give one, or write a list as {key}=[{value}]"
    twice = re.match(r"(\S+) appears more than once", message)
    if twice:
        return f"+{twice[1]}: a {twice[1]} is chosen already; write {twice[1]}=... without the plus sign"
    named = re.search(r"'([^']+)'", message)
    close = difflib.get_close_matches(named[1], [o.split("=")[0] for o in overrides], n=1) if named else []
    where = f"{_override_of(close[0], overrides)}: " if close else ""
    return f"{where}{_first_line(message)}; {_HELP}"


def _wrong_type(error: ValidationError, key: str, overrides: list[str]) -> str:
    message = str(error)
    key = _with_parent(key, overrides)
    expected = _describe(_type_at(_parts(key)))
    value = re.search(r"Value '(.*?)' (?:of type|is not)", message) or re.search(r"Value (\S+) \(", message)
    if "is not Optional" in message:
        return f"{key}=null: a value is needed here; give {expected}"
    if "incompatible with type hint 'float'" in message and value:
        return f"{key}: {value[1]} is an integer and numbers here need a decimal point; write {value[1]}.0"
    shown = f"{key}={value[1]}" if value else _override_of(key, overrides) or key
    return f"{shown}: expected {expected}"


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None:
        if isinstance(error, OmegaConfBaseException):
            return error
        error = error.__cause__ or error.__context__
    return None


def _with_parent(key: str, overrides: list[str]) -> str:
    """OmegaConf names a key inside a list element without the list; the override that sets the list knows."""
    if _type_at(_parts(key)) is not None or _type_at(_parts(key)[:1]) is not None:
        return key
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        if value.startswith("[") and re.search(rf"\b{re.escape(key)}\b", value):
            return f"{name}[].{key}"
    return key


def _override_of(key: str, overrides: list[str]) -> str | None:
    found = [override for override in overrides if override.lstrip("+~").split("=")[0] == key]
    return found[-1] if found else None


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0].rstrip(".")


def _keys(kind: type, path: str) -> Iterator[str]:
    for name, hint in typing.get_type_hints(kind).items():
        yield path + name
        if is_dataclass(hint):
            yield from _keys(typing.cast(type, hint), f"{path}{name}.")


def _parts(key: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]+", key.replace("[]", "[0]")) if part]


def _type_at(parts: list[str]) -> typing.Any:
    """The type of the field that a dotted key names; None if there is none."""
    kind: typing.Any = Config
    for part in parts:
        if is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(part)
        elif typing.get_origin(kind) in (list, dict):
            kind = typing.get_args(kind)[-1]
        else:
            return None
    return kind


def _describe(kind: typing.Any) -> str:
    simple = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    if kind in simple:
        return simple[kind]
    if is_dataclass(kind):
        return f"keys from {', '.join(typing.get_type_hints(kind))}"
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return f"a list like [...] whose elements are {_describe(arguments[0])}"
    if typing.get_origin(kind) is dict:
        return f"a mapping like {{name: ...}} of {_describe(arguments[1])}"
    if arguments:
        return " or ".join(_describe(argument) for argument in arguments)
    return "another type"
