"""What `data.sources` may say for a source: which pairs of files it is made of, in which order.

    a prefix       /data/web        the files /data/web.idx and /data/web.bin; their endings may be there
    a pattern      /data/web_*      every prefix that it matches, sorted by name; ** matches folders, too
    a URL          s3://bucket/web  a prefix or a pattern in a store that fsspec opens
    a YAML file    web.yaml         a list of any of these; relative paths in it are relative to its folder
    a list of any of these, in its order

What is named twice counts twice.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from data.byte_file import is_url
from data.remote import check_url, list_objects

_ENDINGS = (".idx", ".bin")
_LISTS = (".yaml", ".yml")


def entries(key: str, value: Any) -> list[str]:
    """The prefixes and patterns that the value of `key` (such as `data.sources.web`) names, before any is looked for.

    Raises ValueError, naming key and value, for what is no path, an empty list, a YAML file that is missing or says
    something else, and a URL that nothing here can open.
    """
    found = list(_flattened(key, value, Path(), ()))
    for url in filter(is_url, found):
        try:
            check_url(url)
        except ValueError as error:
            raise ValueError(f"{key}={error}") from error
    return found


def prefixes(key: str, value: Any) -> list[str]:
    """The prefixes that the value of `key` names, in order, patterns expanded, without endings.

    Raises ValueError as `entries` does, and for a pattern that matches nothing; OSError for a store that cannot be
    reached.
    """
    return [prefix for entry in entries(key, value) for prefix in _expanded(key, entry)]


def is_pattern(entry: str) -> bool:
    """Whether this is a pattern. Files that have such characters in their names are meant by their names."""
    return glob.has_magic(entry) and (is_url(entry) or not os.path.exists(f"{without_ending(entry)}.idx"))


def without_ending(path: str) -> str:
    """The prefix of a pair that was named with or without the ending of one of its files."""
    if not is_url(path) and os.path.exists(f"{path}.idx"):  # of a pair that is called web.bin.idx and web.bin.bin
        return path
    return path[:-4] if path.endswith(_ENDINGS) else path


def _flattened(key: str, value: Any, folder: Path, inside: tuple[Path, ...]) -> Iterator[str]:
    """inside: the YAML files that this value stands in; folder: the last one's."""
    place = f" (in {inside[-1]})" if inside else ""
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError(f"{key}=[]{place}: the list is empty; name at least one pair of files")
        for entry in value:
            yield from _flattened(key, entry, folder, inside)
    elif isinstance(value, Mapping):
        raise ValueError(
            f"{key}={dict(value)}{place}: expected a path or a list of paths; what is to have a weight of its own is a "
            "source of its own, and weights are given in the blends of data.phases"
        )
    elif not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError(f"{key}={value!r}{place}: expected a path, a pattern, a URL, or a list of these")
    elif str(value).startswith("file://"):
        yield str(value).removeprefix("file://")
    elif is_url(str(value)):
        yield str(value)
    elif str(value).endswith(_LISTS):
        path = folder / value
        if path in inside:
            raise ValueError(f"{key}={value}{place}: this list is part of itself; take it out")
        yield from _flattened(key, _read_list(key, path), path.parent, (*inside, path))
    else:
        yield str(folder / value)


def _read_list(key: str, path: Path) -> list[Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{key}={path}: cannot be read ({error.strerror}); name a YAML file with a list of paths"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(
            f"{key}={path}: not valid YAML{line}; write a list, `- /data/web_00` on a line each"
        ) from error
    if not isinstance(found, list):
        held = "nothing" if found is None else f"a {type(found).__name__}"
        raise ValueError(f"{key}={path}: holds {held}, not a list; write `- /data/web_00` on a line each")
    return found


def _expanded(key: str, entry: str) -> list[str]:
    if not is_pattern(entry):
        return [without_ending(entry)]
    pattern = f"{entry[:-4] if entry.endswith(_ENDINGS) else entry}.idx"
    found = list_objects(pattern) if is_url(entry) else sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise ValueError(f"{key}={entry}: no file matches {pattern}; correct the pattern, or quote a name that is none")
    return [name[:-4] for name in found]
