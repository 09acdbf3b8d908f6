"""Turn errors of pydantic, Hydra and OmegaConf into one line: the key, its value, and a remedy."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_fp4.config.removed_keys import why_removed
from megatron_fp4.config.schema import ADDED, Config

HELP = "`python pretrain.py --help` lists every key and option"


def explain_value(error: ValidationError, values: Mapping[str, Any], path: Sequence[str]) -> str:
    """The line for the first of `values` that the schema refuses. path: of their section."""
    located = [(*_located(one["loc"], values), one) for one in error.errors()]
    # A key of several types has an error for each type; the deepest error is of the type that the user meant.
    first = located[0][0]
    place, wrong, _ = max((one for one in located if one[0][: len(first)] == first), key=lambda one: len(one[0]))
    found, key = [one for its, _, one in located if its == place], key_of([*path, *place])
    if found[0]["type"] == "unexpected_keyword_argument":
        return unknown_key(key)
    said = " or ".join(dict.fromkeys(re.sub(r"^Value error, | or an instance of \w+", "", one["msg"]) for one in found))
    together = isinstance(wrong, Mapping) and found[0]["type"] == "value_error"  # settings of a section
    return f"{key}{'' if together else '=' + shown(wrong)}: {said}".removeprefix(": ")


def _located(parts: Sequence[str | int], value: Any) -> tuple[list[str | int], Any]:
    """The keys of pydantic's location of an error, without the types that it has between them, and the value there."""
    found: list[str | int] = []
    for part in parts:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            value = value[part]
            found.append(part)
    return found, value


def explain(error: Exception, folders: Sequence[Path]) -> str:
    """The line for an error of Hydra, OmegaConf or the YAML parser about the files in `folders` and the overrides."""
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else getattr(error, "name", folders[0])
        return f"{where}: not valid YAML ({getattr(error, 'problem', 'unreadable')}); correct that line"
    by = re.match(r"In '([^']+)'", str(error))
    named = [path for folder in folders if by and (path := folder / f"{by[1]}.yaml").exists() and by[1] != "config"]
    where = f"{named[0]}: " if named else ""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        names = [name for name in error.options or [] if name]
        known = f"there is no {group} config of that name; {suggest(option, names)}"
        return f"{where}{group}={option}: {known}, or {_where_to_add(group, option, folders)}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    key = str(getattr(cause, "full_key", "") or "")
    if key and type_at(parts_of(key)) is None:
        return where + unknown_key(key)
    message = str(cause or error).strip().splitlines()[0].rstrip(".")
    message = re.sub(r'^KeyError raised while resolving interpolation: "(.*)"$', r"\1", message)
    if key:
        return f"{where}{key}: {message}; set it, or give {key.partition('[')[0]}=..."
    for path in named or [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]:
        try:
            content = yaml.safe_load(path.read_text())
        except UnicodeDecodeError:
            return f"{path} is not UTF-8 text, so it is not a config file; choose another, or remove it"
        except yaml.YAMLError:
            continue
        if content is not None and not isinstance(content, Mapping):
            return f"{path} has no keys, but {shown(content)[:40]}; write each `key: value` on its own line"
    return f"{where}{message}; {HELP}"


def unknown_key(key: str) -> str:
    """The line for a key that does not exist, with the closest existing ones."""
    if why := why_removed(key):
        return why
    parts = parts_of(key)
    section, siblings = key.removesuffix(parts[-1]), keys_of(type_at(parts[:-1]))
    known = [*(section + name for name in siblings), *all_keys()]
    close = [one for one in known if one.rpartition(".")[2] == parts[-1]]
    if not close and parts[-1] in _ELSEWHERE:
        close = [_ELSEWHERE[parts[-1]]]
    if not close:  # by the last part; the name of a section is no reason to guess one of its keys
        names = [one.rpartition(".")[2] for one in known]
        begun = [name for name in siblings if name.startswith(parts[-1])]
        alike = begun or difflib.get_close_matches(parts[-1], names, n=2, cutoff=0.7)
        close = [one for one in known if one.rpartition(".")[2] in alike]
    if close:
        return f"{key} is not a key; did you mean {' or '.join(dict.fromkeys(close[:3]))}?"
    there = f"{section.rstrip('.') or 'the top level'} has {', '.join(siblings)}" if siblings else HELP
    return f"{key} is not a key; {there}"


# Names that other frameworks have for keys.
_ELSEWHERE = {
    "num_layers": "model.pattern",
    "hidden_size": "model.hidden_dim",
    "ffn_hidden_size": "model.ffn_dim",
    "intermediate_size": "model.ffn_dim",
    "num_attention_heads": "model.num_query_heads",
    "seq_length": "train.sequence_length",
    "seq_len": "train.sequence_length",
    "train_iters": "train.steps",
    "max_steps": "train.steps",
    "save_interval": "checkpoint.interval",
    "tp": "parallel.tensor",
    "tensor_model_parallel_size": "parallel.tensor",
    "tensor_parallel_size": "parallel.tensor",
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch_size",
}


def _where_to_add(group: str, option: str, folders: Sequence[Path]) -> str:
    """How to add an option to a group of the folders: `--config-dir`, else the project's if it is a checkout."""
    file = f"{group}/{option}.yaml"
    if group.startswith("hydra/"):
        return "pip install the plugin of Hydra that has it"
    if len(folders) > 1:
        return f"write {folders[-1]}/{file}"
    if (folders[0].parent / "pyproject.toml").is_file():
        return f"write configs/{file}"
    return f"write FOLDER/{file} and add --config-dir=FOLDER"


def suggest(wrong: str, options: Sequence[str]) -> str:
    """The remedy for a name that is not among `options`."""
    close = [name for name in options if wrong and name.startswith(wrong)]
    close = close or difflib.get_close_matches(wrong, options, n=1)
    return (f"did you mean {close[0]}? There are " if close else "choose one of ") + ", ".join(options)


LOOKED_UP: set[str] = set()
"""The environment variables that a configuration of this process has looked up."""


def hidden(text: str) -> str:
    """A text for a person or a file, in which a value from the environment, such as the token in a URL, is shown as the
    configuration has it: `${oc.env:TOKEN}`. Absolute paths, and values of fewer than four characters, stay."""
    values = {value: name for name in LOOKED_UP if len(value := os.environ.get(name, "")) > 3 and value[0] != "/"}
    for value in sorted(values, key=len, reverse=True):  # one may be a part of another
        text = text.replace(value, f"${{oc.env:{values[value]}}}")
    return text


def printable(text: str) -> str:
    """`hidden`, for a terminal: control characters, which could move the cursor or hide text, are spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in hidden(text))


def shown(value: Any) -> str:
    """A value on one line, as on the command line; items of a list that have a name are shown by it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(getattr(item, "name", item)) for item in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def key_of(parts: Sequence[str | int]) -> str:
    """The dotted key of its parts, such as `data.phases[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def all_keys(hint: Any = Config, path: str = "") -> Iterator[str]:
    """All keys; a section comes before its keys."""
    for name, inner in keys_of(hint).items():
        yield path + name
        yield from all_keys(inner, f"{path}{name}.")


def keys_of(hint: Any) -> dict[str, Any]:
    """The keys that a user can set in a dataclass, and their types; empty for any other type."""
    hints = typing.get_type_hints(hint, include_extras=True) if is_dataclass(hint) else {}
    return {key: inner for key, inner in hints.items() if key not in ADDED}


def type_at(location: Sequence[str | int]) -> Any:
    """The type of the field at the parts of a key; None if there is no such field."""
    hint: Any = Config
    for part in location:
        inner = [one for one in (hint, *typing.get_args(hint)) if typing.get_origin(one) in (list, dict)]
        hint = typing.get_args(inner[0])[-1] if inner else keys_of(hint).get(str(part))
        if hint is None:
            return None
    return hint


def parts_of(key: str) -> list[str]:
    """The parts of a dotted key."""
    return [part for part in re.split(r"[.\[\]]+", key) if part]
