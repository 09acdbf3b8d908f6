"""One's own data: files in Megatron's format, as `prepare` or Megatron-LM make them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.bundle import DataBundle, TokenSource
from data.byte_file import is_url
from data.concatenation import Concatenation, side_by_side
from data.indexed_dataset import CHECKED_BLOCKS, IndexedDataset
from data.prepare.index import facts_path
from data.source_lists import entries, is_pattern, prefixes
from data.tokenizer import load_tokenizer
from data.tokenizers.interface import TextTokenizer


def check_indexed(data: Any) -> None:
    """Raise ValueError for a configuration's `data` without sources, with sources that cannot be, with a cache that
    nothing would use, or with unknown names in blends."""
    if data.cache_dir is not None and data.order != "megatron":
        raise ValueError(
            f"data.cache_dir={data.cache_dir} has no effect with data.kind=indexed; leave it out (indexed files are "
            "read where they lie, and only data.order=megatron keeps indices)"
        )
    if not data.sources:
        raise ValueError(
            "data.sources is empty; name your .bin/.idx pairs without the ending: 'data.sources={web: /data/web}'"
        )
    named = [
        entry
        for group, values in (("sources", data.sources), ("validation", data.validation))
        for name, value in values.items()
        for entry in entries(f"data.{group}.{name}", value)
    ]
    if data.remote_cache is not None and not any(map(is_url, named)):
        raise ValueError(
            f"data.remote_cache={data.remote_cache} has no effect without a URL in data.sources or data.validation; "
            "leave it out (files on disks are read where they lie)"
        )
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

    sources, validation: by source name which files it is made of (see source_lists.py). tokenizer: the tokenizer.json
    that made them, if it is known; a document ends with its `eod_token`, "<|endoftext|>" if None. remote_cache: where
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
