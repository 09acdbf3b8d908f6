"""One clear line for what Hydra, OmegaConf and pydantic raise over several."""

from __future__ import annotations

import contextlib
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import ValidationError

from megatron_fp4.config.gone import why_gone
from megatron_fp4.config.schema import Config

_HELP = "`python pretrain.py --help` lists every key and option"
_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")


def explain_value(error: ValidationError, keys: Mapping[str, Any], directory: Path, *path: str) -> str:
    """One line for the first value that the schema refuses, with the config file that has it, if one has.

    keys: what was to become the part of a `Config` at `path` (`precision`; without: all of it).
    """
    first = error.errors()[0]
    location = _without_branches([*path, *first["loc"]])
    value = _value_at(keys, location[len(path) :])
    for file in sorted(directory.rglob("*.yaml")):
        with contextlib.suppress(yaml.YAMLError, ValueError, OSError):  # a broken file that the run does not read
            text = file.read_text()
            if (
                str(location[-1]) in text
                and _value_at(yaml.safe_load(text), location[file.parent.name == location[0] :]) == value
            ):
                return f"{file}: {_wrong_value(first['type'], location, value)}"
    return _wrong_value(first["type"], location, value)


def _without_branches(location: Sequence[str | int]) -> list[str | int]:
    """A place without what pydantic puts behind a key of several types: which of them it means."""
    found: list[str | int] = []
    skip = False
    for part in location:
        if not skip:
            found.append(part)
        skip = not skip and len(_branches(_type_at(found))) > 1
    return found


def _branches(hint: Any) -> list[Any]:
    """The types that a key may have, null left out."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [branch for branch in typing.get_args(hint) if branch is not types.NoneType]
    return [hint]


def _value_at(keys: Any, location: Sequence[str | int]) -> Any:
    """The value at a dotted key's parts; an object equal to nothing else if there is none."""
    try:
        for part in location:
            keys = keys[part]
    except (KeyError, IndexError, TypeError):
        return object()
    return keys


def _wrong_value(wrong: str, location: Sequence[str | int], value: Any) -> str:
    """wrong: pydantic's name for what is."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if wrong == "unexpected_keyword_argument":
        return unknown_key(key)
    hint = _type_at(location)
    if value is None:
        return f"{key}=null: a value is needed here; give {_describe(hint)}"
    if wrong == "literal_error":
        hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        return f"{key}={shown(value)} is not known; choose one of {', '.join(map(str, typing.get_args(hint)))}"
    if wrong in _RANGE:
        return f"{key}={shown(value)} is out of range; give {_range(hint, wrong)}{_such_as(location)}"
    return f"{key}={shown(value)}: expected {_describe(hint)}"


def shown(value: Any) -> str:
    """A value on one line, as one would write it on the command line; of named things in a list their names."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(getattr(item, "name", item)) for item in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def explain(error: Exception, overrides: list[str], directory: Path) -> str:
    """One line for a user: what is wrong with which value, and what would be right.

    error: what Hydra, OmegaConf or the YAML parser raised. overrides: the command line's, to show the one at
    fault. directory: the folder of config files.
    """
    if isinstance(error, OverrideParseException):
        return _unparsable(error.override or "", overrides)
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else str(getattr(error, "name", directory))
        return f"{where}: not valid YAML ({getattr(error, 'problem', None) or 'unreadable'}); correct that line"
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, UnicodeDecodeError):
        return f"{_not_text(directory)} is no text in UTF-8, so no config file; choose another, or remove it"
    file = re.match(r"In '([^']+)':", str(error))
    path = directory / f"{file[1]}.yaml" if file else None
    prefix = f"{path}: " if file else ""
    if path is not None and (wrong := _no_mapping(path)):
        return f"{path} {wrong}"
    cause = None if "Could not append" in str(error) else _omegaconf_cause(error)
    if cause is None:
        return prefix + _hydra_line(str(error), overrides)
    key = str(cause.full_key or "")
    if isinstance(cause, InterpolationKeyError):
        needed = re.search(r"Interpolation key '([^']+)'", str(cause))
        name = needed[1] if needed else "a key"
        remedy = f"set {name} in a config file or as '{name}=...'"
        return f"{prefix}{key} refers to {name}, which is not set; {remedy}"
    variable = re.search(r"Environment variable '([^']+)' not found", str(cause))
    if isinstance(cause, InterpolationResolutionError) and variable:
        return (
            f"{prefix}{key} takes its value from the environment variable {variable[1]}, which is not set; "
            f"export {variable[1]}=..., or give '{key}=...'"
        )
    if isinstance(cause, MissingMandatoryValue):
        return f"{prefix}{key} is not set and has no default; set it in a config file or as '{key}=...'"
    if "Cannot merge" in str(cause) and (found := [o for o in overrides if not o.startswith("+") and "=" in o]):
        for override in found:
            expected = _type_at(_parts(override.split("=")[0]))
            if typing.get_origin(expected) in (list, dict):
                return f"{override}: expected {_describe(expected)}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return prefix + unknown_key(key)
    return f"{prefix}{_override_of(key, overrides) or key}: {_first_line(str(cause))}; {_HELP}"


def _not_text(directory: Path) -> Path:
    """The first config file that is not UTF-8; the folder if none can be found."""
    for file in sorted(directory.rglob("*.yaml")):
        try:
            file.read_text()
        except UnicodeDecodeError:
            return file
        except OSError:
            continue
    return directory


def _no_mapping(path: Path) -> str | None:
    """What a config file has instead of keys; None if it has keys, or cannot be read."""
    with contextlib.suppress(yaml.YAMLError, ValueError, OSError):
        content = yaml.safe_load(path.read_text())
        if content is not None and not isinstance(content, Mapping):
            what = "a list" if isinstance(content, list) else f"the text {str(content)[:40]!r}"
            return f"holds {what} instead of keys; write `key: value` on a line each"
    return None


def unknown_key(key: str) -> str:
    """The line for a key that does not exist, with the closest ones that do."""
    if why := why_gone(key):
        return why
    parts = _parts(key)
    known = list(_keys(Config, ""))
    leaf = parts[-1]
    same_leaf = [name for name in known if name.split(".")[-1] == leaf]
    for end in range(len(parts) - 1, 0, -1):
        if (above := ".".join(parts[:end])) in known and _is_plain(_type_at(parts[:end])):
            return f"{key} is not a key: {above} is {_describe(_type_at(parts[:end]))}; write {above}=..."
    parent = _type_at(parts[:-1])
    siblings = list(_hints(parent)) if is_dataclass(parent) else []
    stem = key[: -len(leaf)]
    close = [stem + name for name in difflib.get_close_matches(leaf, siblings, n=3, cutoff=0.6)]
    close += same_leaf + difflib.get_close_matches(key, known, n=2, cutoff=0.8)
    suggestions = [name for name in dict.fromkeys(close) if not key.startswith(name)][:3]
    if suggestions:
        return f"{key} is not a key; did you mean {' or '.join(suggestions)}?"
    if siblings:
        return f"{key} is not a key; {stem.rstrip('.') or 'the top level'} has {', '.join(siblings)}"
    return f"{key} is not a key; {_HELP}"


def _is_plain(hint: Any) -> bool:
    """Whether a key of this type has no keys below it."""
    return not is_dataclass(hint) and all(typing.get_origin(branch) not in (list, dict) for branch in _branches(hint))


def _unparsable(override: str, overrides: Sequence[str]) -> str:
    key, separator, value = (part.strip() for part in override.partition("="))
    if separator and re.fullmatch(r"[\w.@]+", key) and f"{key}={value}" != override:
        return f"{override!r} has blanks around the equals sign; write {key}={value}"
    if not separator and "=" in overrides:
        return f"{override!r} has blanks around its equals sign; write key=value as one word, as in train.steps=100"
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
    if "item is already at" in message or "Could not append" in message:
        for override in overrides:
            if override.startswith("+") and not override.startswith("++"):
                return f"{override}: {override[1:].split('=')[0]} is a key already; write {override[1:]}, without +"
    twice = re.match(r"(\S+) appears more than once", message)
    if twice:
        return f"+{twice[1]}: a {twice[1]} is chosen already; write {twice[1]}=... without the plus sign"
    named = re.search(r"'([^']+)'", message)
    close = difflib.get_close_matches(named[1], [o.split("=")[0] for o in overrides], n=1) if named else []
    where = f"{_override_of(close[0], overrides)}: " if close else ""
    return f"{where}{_first_line(message)}; {_HELP}"


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None:
        if isinstance(error, OmegaConfBaseException):
            return error
        error = error.__cause__ or error.__context__
    return None


def _override_of(key: str, overrides: list[str]) -> str | None:
    found = [override for override in overrides if override.lstrip("+~").split("=")[0] == key]
    return found[-1] if found else None


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0].rstrip(".")


def _hints(hint: Any) -> dict[str, Any]:
    """The keys that a user can set in a dataclass, and their types."""
    found = typing.get_type_hints(hint, include_extras=True)
    for own in ("after_switch", "from_environment"):
        found.pop(own, None)
    return found


def _keys(hint: Any, path: str) -> Iterator[str]:
    for name, inner in _hints(hint).items():
        yield path + name
        if is_dataclass(inner):
            yield from _keys(inner, f"{path}{name}.")


def _parts(key: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]+", key) if part]


def _type_at(location: Sequence[str | int]) -> Any:
    """The type of the field at a dotted key's parts; None if there is none."""
    hint: Any = Config
    for part in location:
        hint = next((branch for branch in _branches(hint) if typing.get_origin(branch) in (list, dict)), hint)
        if is_dataclass(hint):
            hint = _hints(hint).get(str(part))
        elif typing.get_origin(hint) in (list, dict):
            hint = typing.get_args(hint)[-1]
        else:
            return None
    return hint


def _describe(hint: Any) -> str:
    simple = {
        int: "an integer, such as 1000, 1e3, 10k or 2M",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    if hint in simple:
        return simple[hint]
    if is_dataclass(hint):
        return f"keys from {', '.join(_hints(hint))}"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _describe(arguments[0])
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else f"the word {arguments[0]}"
    if origin is list:
        return f"a list like [...] whose elements are {_describe(arguments[0])}"
    if origin is dict:
        return f"a mapping like {{name: {_describe(arguments[1])}}}"
    return " or ".join(map(_describe, arguments)) or "another type"


def _range(hint: Any, wrong: str) -> str:
    """The bounds of an annotated number: `1 or more`, `above 0 and at most 1`; of one that has a bound only because no
    larger number makes sense, the one that was overstepped (wrong: pydantic's name for which)."""
    words = {"ge": "{} or more", "gt": "a number above {}", "le": "at most {}", "lt": "below {}"}
    numbers = [branch for branch in _branches(hint) if typing.get_origin(branch) is typing.Annotated]
    marks = [mark for number in numbers for field in number.__metadata__ for mark in getattr(field, "metadata", ())]
    bounds = {name: getattr(mark, name) for mark in marks for name in words if hasattr(mark, name)}
    if bounds.get("le", 0) > 1 and "ge" in bounds:
        return f"at most {bounds['le']:,}" if wrong == "less_than_equal" else f"{bounds['ge']} or more"
    if bounds.keys() == {"ge", "le"}:
        return f"a number between {bounds['ge']} and {bounds['le']}"
    return " and ".join(words[name].format(bound) for name, bound in bounds.items()) or "a finite number"


def _such_as(location: Sequence[str | int]) -> str:
    """The default as an example, where the key has one."""
    parent = _type_at(location[:-1])
    defaults = {field.name: field.default for field in fields(parent)} if is_dataclass(parent) else {}
    default = defaults.get(str(location[-1]), MISSING)
    return "" if default in (MISSING, None) else f", such as {shown(default)}"
