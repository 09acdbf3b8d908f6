"""What `data.sources` may say for a source: which pairs of files it is made of, in which order.

    a prefix       /data/web        the files /data/web.idx and /data/web.bin; their endings may be there
    a pattern      /data/web_*      every prefix that it matches, sorted by name; ** matches folders, too
    a URL          s3://bucket/web  a prefix or a pattern in a store that fsspec opens
    a YAML file    web.yaml         a list of any of these; relative paths in it are relative to its folder
    a list of any of these, in its order

What is named twice counts twice.

One's own data: files in Megatron's format, as `prepare` or Megatron-LM make them.

How many bytes of text tokens stand for, so that losses of different tokenizers can be compared.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from data.indexed import CHECKED_BLOCKS, IndexedDataset, facts_path
from data.storage import check_url, is_url, list_objects
from data.token_source import Concatenation, DataBundle, TokenRange, TokenSource, side_by_side
from data.tokenizer import TextTokenizer, load_tokenizer

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


def check_indexed(data: Any) -> None:
    """Raise ValueError for a configuration's `data` without sources, with ones that cannot be, or unknown in blends."""
    if not data.sources:
        raise ValueError(
            "data.sources is empty; name your .bin/.idx pairs without the ending: 'data.sources={web: /data/web}'"
        )
    for group, values in (("sources", data.sources), ("validation", data.validation)):
        for name, value in values.items():
            entries(f"data.{group}.{name}", value)
    for index, phase in enumerate(data.phases):
        for source in phase.blend if phase.blend != "tokens" else ():
            if source not in data.sources:
                raise ValueError(
                    f"data.phases[{index}].blend names {source}, which is not in data.sources; its sources: "
                    f"{', '.join(data.sources)}"
                )


def open_indexed(
    vocab_size: int,
    sources: Mapping[str, Any],
    validation: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    eod_token: str | None = None,
    remote_cache: str | Path | None = None,
) -> DataBundle:
    """Open one's own data for a model with vocab_size ids.

    sources, validation: by source name which files it is made of (see above). tokenizer: the tokenizer.json that
    made them, if it is known; a document ends with its `eod_token`, "<|endoftext|>" if None. remote_cache: where
    parts of the objects of a store are kept; None: the user's cache folder.

    Raises FileNotFoundError for a missing file; ValueError for a damaged one, a pattern that matches nothing or what
    validates, a tokenizer with more ids than the model, or another one than made the files, where they say so.
    """
    opened = None if tokenizer is None else load_tokenizer(tokenizer, eod_token)
    if opened is not None and opened.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer} has {opened.vocab_size} ids and the model only {vocab_size}: "
            f"set model.vocab_size to {opened.vocab_size} or more"
        )
    held_out = {name: prefixes(f"data.validation.{name}", value) for name, value in (validation or {}).items()}
    trained = {name: prefixes(f"data.sources.{name}", value) for name, value in sources.items()}
    for name, value in sources.items():
        _refuse_held_out(f"data.sources.{name}", value, held_out)
    cache = None if remote_cache is None else Path(remote_cache)
    bundle = DataBundle(
        train={name: _opened(f"data.sources.{name}", found, cache) for name, found in trained.items()},
        validation={name: _opened(f"data.validation.{name}", found, cache) for name, found in held_out.items()},
        tokenizer=opened,
    )
    if opened is not None:
        for key, streams in (("data.sources", bundle.train), ("data.validation", bundle.validation)):
            for name, stream in streams.items():
                _check_tokenizer(f"{key}.{name}", stream, opened, tokenizer)
    return bundle


def _check_tokenizer(key: str, stream: TokenSource, opened: TextTokenizer, path: str | Path | None) -> None:
    """Raise ValueError if a file's facts name another tokenizer than `opened`; Megatron's files have no facts."""
    for part in stream.parts:
        try:
            made_with = json.loads(facts_path(str(part)).read_bytes())["tokenizer"]["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if made_with != opened.fingerprint():
            raise ValueError(
                f"{key}: {part} was made with another tokenizer ({made_with[:12]}, says its .json) than data.tokenizer="
                f"{path} ({opened.fingerprint()[:12]}); name the one that made it, or, if its ids mean the same to "
                f"both, remove {part}.json"
            )


def _opened(key: str, found: list[str], remote_cache: Path | None) -> TokenSource:
    """`open_source`, whose refusals then name the key."""
    try:
        return open_source(found, remote_cache)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from error


def open_source(found: list[str], remote_cache: Path | None = None) -> TokenSource:
    """The datasets of these prefixes as one source, in their order; one that is named twice is opened once.

    Raises FileNotFoundError, ValueError and OSError as IndexedDataset does, for the first that cannot be opened.
    """
    different = list(dict.fromkeys(found))
    # Thousands of files together are looked at about as often as one of their size would be.
    share = max(2, CHECKED_BLOCKS // len(different))

    def opened(prefix: str) -> IndexedDataset:
        return IndexedDataset(prefix, None if is_url(prefix) else share, remote_cache)

    datasets = dict(zip(different, side_by_side(opened, different), strict=True))
    return datasets[found[0]] if len(found) == 1 else Concatenation([datasets[prefix] for prefix in found])


def _real(prefix: str) -> str:
    return prefix if is_url(prefix) else os.path.realpath(prefix)


def _refuse_held_out(key: str, value: Any, held_out: Mapping[str, list[str]]) -> None:
    """A pattern such as /data/web_* also matches /data/web_validation; what is named in full is meant."""
    for entry in filter(is_pattern, entries(key, value)):
        for prefix in prefixes(key, entry):
            for name, validating in held_out.items():
                if _real(prefix) in map(_real, validating):
                    raise ValueError(
                        f"{key}={entry} matches {prefix}, which data.validation.{name} reads; narrow the pattern, or "
                        "keep held-out files in another folder"
                    )


def bytes_per_token(stream: TokenSource) -> float | None:
    """The average of a source, from what preparing it wrote beside its files (`<prefix>.json`); None if one has none,
    or if it is of other tokens."""
    text_bytes = tokens = 0
    for part in (stream.stream if isinstance(stream, TokenRange) else stream).parts:
        if not isinstance(part, IndexedDataset):
            return None
        try:
            facts = json.loads(facts_path(part.prefix).read_bytes())
            if facts["tokens"] != part.num_tokens or facts["text_bytes"] <= 0:
                return None
            text_bytes += facts["text_bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        tokens += part.num_tokens
    return text_bytes / tokens
