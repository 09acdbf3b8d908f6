"""Own data (`data.kind=indexed`): resolves `data.sources` and `data.validation` to `.bin`/`.idx` pairs. Each value is:

    a prefix       /data/web        the files /data/web.idx and /data/web.bin; either ending may be given
    a pattern      /data/web_*      every prefix that matches, sorted by name; ** also matches folders
    a URL          s3://bucket/web  a prefix or a pattern in a store that fsspec opens
    a YAML file    web.yaml         a list of these; relative paths in it are relative to its folder
    a list of these

A pair that a source names twice counts twice. No pair may be in both `data.sources` and `data.validation`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import yaml

from data.indexed import Concatenation, DataBundle, IndexedDataset, TokenSource, check_ids
from data.storage import is_url, list_objects, map_in_threads
from data.tokenizer import TextTokenizer, load_tokenizer

_ENDINGS = (".idx", ".bin")
_ENDS_READ = 16  # documents of a dataset whose last token is read


def entries(key: str, value: Any) -> list[str]:
    """The prefixes and patterns in the value of `key` (such as `data.sources.web`), without looking for the files.
    Raises ValueError, with key and value, for an invalid value."""
    found = list(_flattened(key, value, ()))
    for url in filter(is_url, found):
        try:
            fsspec.get_filesystem_class(url.partition("://")[0])
        except (ImportError, ValueError) as error:  # they name the package to install, or the unknown protocol
            raise ValueError(f"{key}={url}: {error}") from error
    return found


def _flattened(key: str, value: Any, inside: tuple[Path, ...]) -> Iterator[str]:
    """inside: the nested YAML files that contain this value."""
    place = f" (in {inside[-1]})" if inside else ""
    if isinstance(value, list | tuple) and value:
        for entry in value:
            yield from _flattened(key, entry, inside)
        return
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError(
            f"{key}={value!r}{place}: expected a path, a pattern, a URL, or a list of these; weights belong into the "
            "blends of data.phases"
        )
    text = str(value)
    path = (inside[-1].parent if inside else Path()) / text
    if text.startswith("file://"):
        yield text.removeprefix("file://")
    elif is_url(text):
        yield text
    elif not text.endswith((".yaml", ".yml")):
        yield str(path)
    elif path in inside:
        raise ValueError(f"{key}={value}{place}: this list includes itself; remove the entry")
    else:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{key}={path}: cannot be read ({why}); name a YAML file with a list of paths") from error
        if not isinstance(found, list):
            raise ValueError(f"{key}={path}: has {found!r:.40}, not a list; write a line `- /data/web_00` for each")
        yield from _flattened(key, found, (*inside, path))


def prefixes(key: str, value: Any) -> list[str]:
    """The prefixes in the value of `key`, in order, with patterns expanded. Raises ValueError as `entries` does, and
    for a pattern that matches nothing; OSError if a store does not answer."""
    found = []
    for entry in entries(key, value):
        if not _is_pattern(entry):
            found.append(_without_ending(entry))
            continue
        pattern = f"{entry[:-4] if entry.endswith(_ENDINGS) else entry}.idx"
        matching = list_objects(pattern) if is_url(entry) else sorted(glob.glob(pattern, recursive=True))
        if not matching:
            raise ValueError(f"{key}={entry}: no file matches {pattern}; correct it or quote a plain name")
        found += [name[:-4] for name in matching]
    return found


def _is_pattern(entry: str) -> bool:
    """Whether an entry is a pattern, and not a file that has such characters in its name."""
    return glob.has_magic(entry) and (is_url(entry) or not os.path.exists(f"{_without_ending(entry)}.idx"))


def _without_ending(path: str) -> str:
    if not is_url(path) and os.path.exists(f"{path}.idx"):  # the pair web.bin.idx and web.bin.bin
        return path
    return path[:-4] if path.endswith(_ENDINGS) else path


def check_indexed(data: Any) -> None:
    """Raise ValueError for a configuration's `data` without sources, with invalid ones, or unknown ones in blends."""
    if not data.sources:
        raise ValueError("data.sources is empty; name .bin/.idx pairs without ending: 'data.sources={web: /data/web}'")
    _refuse_shared(_plain_prefixes("data.sources", data.sources), _plain_prefixes("data.validation", data.validation))
    for index, phase in enumerate(data.phases):
        for source in phase.blend if phase.blend != "tokens" else ():
            if source not in data.sources:
                raise ValueError(
                    f"data.phases[{index}].blend names {source}, which is not in data.sources; its sources: "
                    f"{', '.join(data.sources)}"
                )


def _plain_prefixes(key: str, values: Mapping[str, Any]) -> dict[str, list[str]]:
    found = {}
    for name, value in values.items():
        named = entries(f"{key}.{name}", value)
        found[name] = [_without_ending(entry) for entry in named if not _is_pattern(entry)]
    return found


def _refuse_shared(trained: Mapping[str, list[str]], held_out: Mapping[str, list[str]]) -> None:
    def real(prefix: str) -> str:
        return prefix if is_url(prefix) else os.path.realpath(f"{prefix}.idx")

    held_out_by = {real(prefix): name for name, found in held_out.items() for prefix in found}
    for name, found in trained.items():
        for prefix in found:
            if real(prefix) in held_out_by:
                raise ValueError(
                    f"data.sources.{name} has {prefix}, which data.validation.{held_out_by[real(prefix)]} reads too: "
                    "the validation loss would include training text; remove it from one of them, or narrow the pattern"
                )


def open_indexed(
    vocab_size: int,
    sources: Mapping[str, Any],
    validation: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    eod_token: str | None = None,
    remote_cache: Path | None = None,
) -> DataBundle:
    """Open the user's own data for a model with vocab_size ids.

    sources, validation: the files of each source by its name (see above). tokenizer: the one that made the files, if it
    is known; its `eod_token` ends a document. remote_cache: as for IndexedDataset.

    Raises FileNotFoundError; ValueError for a damaged file, a pattern that matches nothing, a file in both training and
    validation data, a tokenizer with more ids than the model, files that another tokenizer made by their `.json`, or
    ids outside the model's vocabulary in a sample of a file.
    """
    named = {
        key: {name: prefixes(f"{key}.{name}", value) for name, value in (values or {}).items()}
        for key, values in (("data.sources", sources), ("data.validation", validation))
    }
    _refuse_shared(*named.values())
    # The files of all sources in one call, because threads that start threads would be a thousand. Each file once.
    files = [
        (f"{key}.{name}", path)
        for key, of in named.items()
        for name, found in of.items()
        for path in dict.fromkeys(found)
    ]

    def open_one(file: tuple[str, str]) -> IndexedDataset:
        key, prefix = file
        try:
            dataset = IndexedDataset(prefix, remote_cache)
            _ = dataset.facts, dataset.identity()  # here in the thread, because both are slow in a store; both are kept
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{key}: {error}") from error
        return dataset

    datasets = dict(zip(files, map_in_threads(open_one, files), strict=True))
    facts = {f"{key}: {dataset}": dataset.facts for (key, _), dataset in datasets.items()}
    known = common_facts(facts)
    num_ids, warnings, opened = known.get("tokenizer", {}).get("vocab_size", 0), [], None
    if tokenizer is not None:
        opened = _load_tokenizer(tokenizer, eod_token, known, next((name for name in facts if facts[name]), ""))
        num_ids, warnings = opened.vocab_size, _without_end(datasets, opened)
        if not warnings:
            known.setdefault("eod", opened.document_tokens["eod"])
    if num_ids > vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer or 'of the data'} has {num_ids} ids and the model only {vocab_size}: "
            f"set model.vocab_size to {num_ids} or more"
        )
    for (key, _), dataset in datasets.items():
        check_ids(key, dataset, dataset.sampled_ids, vocab_size)

    def streams(key: str) -> dict[str, TokenSource]:
        parts = {name: [datasets[f"{key}.{name}", path] for path in found] for name, found in named[key].items()}
        return {name: of[0] if len(of) == 1 else Concatenation(of) for name, of in parts.items()}

    return DataBundle(streams("data.sources"), streams("data.validation"), opened, known, warnings)


def common_facts(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is known of "tokenizer", "eod" and "bos" (the tokens that end and begin documents) of several datasets.
    facts: by name, the `.json` of each. Raises ValueError, with both names, if two differ."""
    known: dict[str, Any] = {}
    for key, what in _COMPARED.items():
        having = [(name, of[key]) for name, of in facts.items() if key in of]
        for name, value in having:
            known.setdefault(key, value)
            one, other = _fact_text(known[key]), _fact_text(value)
            if one != other and not _hashes(known[key]) & _hashes(value):
                raise ValueError(
                    f"{having[0][0]} and {name} {what} ({one}; {other}) by their .json: prepare one of them again like "
                    "the other, or leave it out"
                )
    return known


_COMPARED = {
    "tokenizer": "were made with different tokenizers",
    "eod": "have documents that end with different tokens",
    "bos": "have documents that begin with different tokens",
}


def _fact_text(fact: Mapping[str, Any] | None) -> str:
    if fact is None:
        return "none"
    return f"{fact['token']}, id {fact['id']}" if "token" in fact else f"fingerprint {fact['fingerprint'][:12]}"


def _hashes(fact: Mapping[str, Any] | None) -> set[str]:
    """The hashes of a tokenizer: version 0.2 has that of its file as the fingerprint."""
    return {fact[key] for key in ("fingerprint", "file") if key in fact} if fact else set()


def _load_tokenizer(path: str | Path, eod_token: str | None, known: Mapping[str, Any], name: str) -> TextTokenizer:
    """The tokenizer at `path`, with the tokens that end and begin documents by the datasets' `.json`. name: of the
    first dataset that has one. Raises ValueError if the data was made otherwise."""
    eod, bos = known.get("eod"), known.get("bos")
    if eod is not None and eod_token not in (None, eod["token"]):
        raise ValueError(
            f"data.eod_token={eod_token}, but documents of {name} end with {eod['token']} by its .json; leave "
            "data.eod_token out"
        )
    made_with = known["tokenizer"]["fingerprint"] if "tokenizer" in known else None
    try:
        opened = load_tokenizer(path, eod["token"] if eod else eod_token, bos and bos["token"])
    except ValueError as error:
        if made_with is None:
            raise
        raise ValueError(f"{error}; {name} was made with the tokenizer {made_with[:12]} by its .json") from error
    if made_with is not None and not opened.made(made_with):
        raise ValueError(
            f"{name} was made with another tokenizer ({made_with[:12]} by its .json) than data.tokenizer={path} "
            f"({opened.fingerprint()[:12]}); name that one, or remove the .json if both have the same ids"
        )
    return opened


def _without_end(datasets: Mapping[tuple[str, str], IndexedDataset], tokenizer: TextTokenizer) -> list[str]:
    """A warning for each local dataset of which nothing is known and whose documents do not end with the tokenizer's
    eod_token, by a few of them. Raises ValueError if they all end with another token."""
    warnings = []
    for (key, _), dataset in datasets.items():
        if "eod" in dataset.facts or is_url(dataset.prefix):
            continue
        ids = set()
        for number in range(_ENDS_READ):
            document = number * (dataset.num_documents - 1) // (_ENDS_READ - 1)
            begin, end = map(int, dataset.document_offsets(document, document + 1))
            if end > begin:
                ids.add(int(dataset.tokens(end - 1, 1)[0]))
        if tokenizer.eod_id in ids:
            continue
        wanted = f"{tokenizer.eod_token} (id {tokenizer.eod_id})"
        if len(ids) == 1:
            raise ValueError(
                f"{key}: documents of {dataset} end with the id {ids.pop()}, not with {wanted}; set data.eod_token to "
                "the token that ends them"
            )
        warnings.append(
            f"warning: {key}: documents of {dataset} do not end with {wanted}, where generation and exports stop"
        )
    return warnings[:8]
