"""One line for what pydantic, Hydra and OmegaConf say in several: the key, its value, what would be right."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_fp4.config.removed_keys import why_removed
from megatron_fp4.config.schema import ADDED, Config

# How a value is written here, for pydantic's words.
_PLAINER = {
    "a valid dictionary": "a mapping, {name: ...}",
    "a valid list": "a list, [...]",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid number": "a number",
}
HELP = "`python pretrain.py --help` lists every key and option"


def explain_value(error: ValidationError, value: Any, *path: str | int) -> str:
    """What is wrong with the first value that the schema refuses. value: what the schema was given for the key `path`
    (without: for a whole `Config`)."""
    location, found = _first(error, value)
    keys = [*path, *location]
    if found[0]["type"] == "unexpected_keyword_argument":
        return unknown_key(key_of(keys))
    value = _at(value, location)
    said = " or ".join(dict.fromkeys(_plain(one["msg"]) for one in found))
    if is_dataclass(hint := type_at(keys)) and not isinstance(value, Mapping):
        said = f"should be keys of it: {', '.join(keys_of(hint))}"
    settings = isinstance(value, Mapping) and found[0]["type"] == "value_error"  # which do not go together
    return f"{key_of(keys)}{'' if settings else '=' + shown(value)}: {said}".removeprefix(": ")


def file_of(error: ValidationError, value: Any, folders: Sequence[Path], *path: str | int) -> str:
    """`FILE: ` of the config file that has what `explain_value` explains; nothing if none has it."""
    location, _ = _first(error, value)
    wrong, keys = _at(value, location), [*path, *location]
    for file in config_files(folders):
        with contextlib.suppress(yaml.YAMLError, ValueError, OSError):  # a broken file that the run does not read
            text = file.read_text()
            below = keys[file.parent.name == keys[0] :] if keys else []
            if below and str(below[-1]) in text and _at(yaml.safe_load(text), below) == wrong:
                return f"{file}: "
    return ""


def _at(value: Any, location: Sequence[str | int]) -> Any:
    """The value at a key's parts; an object equal to nothing else if there is none."""
    try:
        return functools.reduce(lambda node, part: node[part], location, value)
    except (KeyError, IndexError, TypeError):
        return object()


def _first(error: ValidationError, value: Any) -> tuple[list[str | int], list[ErrorDetails]]:
    """The place of the first error and what is wrong there: of a key of several types something for each. An error
    deeper in the same key is of the type that was meant."""
    located = [(_location(one, value), one) for one in error.errors()]
    first = located[0][0]
    deepest = max((place for place, _ in located if place[: len(first)] == first), key=len)
    return deepest, [one for place, one in located if place == deepest]


def _location(error: ErrorDetails, value: Any) -> list[str | int]:
    """pydantic's place of an error without the types that it names between keys."""
    found: list[str | int] = []
    for part in error["loc"]:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            value = value[part]
            found.append(part)
    return found


def _plain(message: str) -> str:
    message = re.sub(r"^Value error, |, unable to .*", "", message).replace("Input should", "should")
    for words, plainer in _PLAINER.items():
        message = message.replace(words, plainer)
    return message


def config_files(folders: Sequence[Path]) -> list[Path]:
    """All of them."""
    return [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]


def explain(error: Exception, overrides: Sequence[str], folders: Sequence[Path]) -> str:
    """What is wrong with the files in `folders`, or with how `overrides` and they go together. error: what Hydra,
    OmegaConf or the YAML parser raised."""
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else str(getattr(error, "name", folders[0]))
        return f"{where}: not valid YAML ({getattr(error, 'problem', None) or 'unreadable'}); correct that line"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        by = re.match(r"In '([^']+)'", str(error))
        where = _where(by[1], folders) if by and by[1] != "config" else ""
        names = [name for name in error.options or [] if name]
        return f"{where}{group}={option}: there is no {group} config of that name; {suggest(option, names)}"
    file = re.match(r"In '([^']+)':", str(error))
    where = _where(file[1], folders) if file else ""
    suspects = [Path(where.removesuffix(": "))] if where else config_files(folders)
    for path in suspects if where or isinstance(error, UnicodeDecodeError) else ():
        if wrong := _no_keys(path):
            return f"{path} {wrong}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    message = str(cause or error).strip().splitlines()[0].rstrip(".")
    key = str(getattr(cause, "full_key", "") or "")
    given = next((f"{one}: " for one in overrides if one.lstrip("+").partition("=")[0] == key), where or f"{key}: ")
    if isinstance(cause, InterpolationKeyError):
        name = re.search(r"Interpolation key '([^']+)'", message)
        return f"{where}{key} refers to {name[1] if name else 'a key'}, which is not set; set it, or give {key}=..."
    if variable := re.search(r"Environment variable '([^']+)' not found", message):
        return (
            f"{where}{key} takes its value from the environment variable {variable[1]}, which is not set; "
            f"export {variable[1]}=..., or give {key}=..."
        )
    if isinstance(cause, MissingMandatoryValue):
        return f"{where}{key} is not set and has no default; give {key}=..."
    if key and type_at(parts_of(key)) is None:
        return f"{where}{unknown_key(key)}"
    remedy = f"give the list whole: {key.partition('[')[0]}=[...]" if "[" in key else HELP
    return f"{given.removeprefix(': ')}{message}; {remedy}"


def _where(name: str, folders: Sequence[Path]) -> str:
    """`FILE: ` of the config file that Hydra calls by this name."""
    found = [folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").exists()]
    return f"{found[0]}: " if found else ""


def _no_keys(path: Path) -> str | None:
    """What a config file has instead of keys."""
    with contextlib.suppress(yaml.YAMLError, OSError):
        try:
            content = yaml.safe_load(path.read_text())
        except UnicodeDecodeError:
            return "is no text in UTF-8, so no config file; choose another, or remove it"
        if content is not None and not isinstance(content, Mapping):
            what = "a list" if isinstance(content, list) else f"the text {str(content)[:40]!r}"
            return f"holds {what} instead of keys; write `key: value` on a line each"
    return None


def unknown_key(key: str) -> str:
    """The line for a key that does not exist, with the closest ones that do."""
    if why := why_removed(key):
        return why
    parts = parts_of(key)
    parent = type_at(parts[:-1])
    if parent is not None and not is_dataclass(parent):
        return f"{key} is not a key: {key_of(parts[:-1])} is no section"
    siblings = list(keys_of(parent)) if is_dataclass(parent) else []
    stem = key.removesuffix(parts[-1])
    known = list(all_keys())
    close = [stem + name for name in difflib.get_close_matches(parts[-1], siblings, n=2)]
    close += [name for name in known if name.split(".")[-1] == parts[-1]]
    close += difflib.get_close_matches(key, known, n=2, cutoff=0.8)
    if close := list(dict.fromkeys(close))[:3]:
        return f"{key} is not a key; did you mean {' or '.join(close)}?"
    if siblings:
        return f"{key} is not a key; {stem.rstrip('.') or 'the top level'} has {', '.join(siblings)}"
    return f"{key} is not a key; {HELP}"


def suggest(wrong: str, options: Sequence[str]) -> str:
    """The remedy for a name that is none of `options`."""
    close = [name for name in options if wrong and name.startswith(wrong)]
    close = close or difflib.get_close_matches(wrong, options, n=1)
    return (f"did you mean {close[0]}? There are " if close else "choose one of ") + ", ".join(options)


def shown(value: Any) -> str:
    """A value on one line, as one would write it on the command line; of named things in a list their names."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(getattr(item, "name", item)) for item in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def key_of(parts: Sequence[str | int]) -> str:
    """`data.phases[0].name` of its parts."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def all_keys(hint: Any = Config, path: str = "") -> Iterator[str]:
    """Every key, sections before what they hold."""
    for name, inner in keys_of(hint).items():
        yield path + name
        if is_dataclass(inner):
            yield from all_keys(inner, f"{path}{name}.")


def keys_of(hint: Any) -> dict[str, Any]:
    """The keys that a user can set in a dataclass, and their types."""
    return {key: inner for key, inner in typing.get_type_hints(hint, include_extras=True).items() if key not in ADDED}


def type_at(location: Sequence[str | int]) -> Any:
    """The type of the field at a key's parts; None if there is none."""
    hint: Any = Config
    for part in location:
        hint = next((one for one in branches(hint) if typing.get_origin(one) in (list, dict)), hint)
        if is_dataclass(hint):
            hint = keys_of(hint).get(str(part))
        elif typing.get_origin(hint) in (list, dict):
            hint = typing.get_args(hint)[-1]
        else:
            return None
    return hint


def branches(hint: Any) -> list[Any]:
    """The types that a key may have, null left out."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [branch for branch in typing.get_args(hint) if branch is not types.NoneType]
    return [hint]


def parts_of(key: str) -> list[str]:
    """The parts of a dotted key."""
    return [part for part in re.split(r"[.\[\]]+", key) if part]
