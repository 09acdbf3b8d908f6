"""One's own data: files in Megatron's format, as `prepare` or Megatron-LM make them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.bundle import DataBundle
from data.indexed_dataset import IndexedDataset
from data.tokenizer import load_tokenizer


def check_indexed(data: Any) -> None:
    """Raise ValueError for a configuration's `data` without sources, with a cache, or with unknown names in blends."""
    if data.cache_dir is not None:
        raise ValueError(
            f"data.cache_dir={data.cache_dir} has no effect with data.kind=indexed; leave it out (indexed files are "
            "read where they lie)"
        )
    if not data.sources:
        raise ValueError(
            "data.sources is empty; name your .bin/.idx pairs without the ending: 'data.sources={web: /data/web}'"
        )
    for index, phase in enumerate(data.phases):
        for source in phase.blend:
            if source not in data.sources:
                raise ValueError(
                    f"data.phases[{index}].blend names {source}, which is not in data.sources; its sources: "
                    f"{', '.join(data.sources)}"
                )


def open_indexed(
    vocab_size: int,
    sources: Mapping[str, str | Path],
    validation: Mapping[str, str | Path] | None = None,
    tokenizer: str | Path | None = None,
    eod_token: str | None = None,
) -> DataBundle:
    """Open one's own data for a model with vocab_size ids.

    sources, validation: the prefix of an IndexedDataset by source name. tokenizer: the tokenizer.json that made them,
    if it is known; a document ends with its `eod_token`, "<|endoftext|>" if None.

    Raises FileNotFoundError for a missing file; ValueError for a damaged one, or a tokenizer with more ids than the
    model.
    """
    opened = None if tokenizer is None else load_tokenizer(tokenizer, eod_token)
    if opened is not None and opened.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer} has {opened.vocab_size} ids and the model only {vocab_size}: "
            f"set model.vocab_size to {opened.vocab_size} or more"
        )
    return DataBundle(
        train={name: IndexedDataset(prefix) for name, prefix in sources.items()},
        validation={name: IndexedDataset(prefix) for name, prefix in (validation or {}).items()},
        tokenizer=opened,
    )
