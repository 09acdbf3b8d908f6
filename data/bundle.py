"""The one entry to data: open whatever the configuration names, built in or one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.builtin import prepare_builtin
from data.cache import default_cache_dir
from data.indexed_dataset import IndexedDataset
from data.tokenizer import END_OF_DOCUMENT, TextTokenizer, load_tokenizer

KINDS = ("builtin", "indexed")


@dataclass(frozen=True)
class DataBundle:
    """Opened datasets by source name, and the tokenizer that made them if it is known."""

    train: dict[str, IndexedDataset]
    validation: dict[str, IndexedDataset]
    tokenizer: TextTokenizer | None

    def fingerprint(self) -> dict[str, Any]:
        """Tokenizer and identities of all datasets, JSON types; equal on ranks that opened equal data."""
        return {
            "tokenizer": None if self.tokenizer is None else self.tokenizer.fingerprint(),
            "train": {name: dataset.identity() for name, dataset in self.train.items()},
            "validation": {name: dataset.identity() for name, dataset in self.validation.items()},
        }

    def summary(self) -> str:
        """One line for each split of each source: documents and tokens."""
        splits = {"train": self.train, "validation": self.validation}
        return "\n".join(
            f"{split:<10} {name:<12} {dataset.num_documents:>10,} documents {dataset.num_tokens:>14,} tokens"
            for split, datasets in splits.items()
            for name, dataset in datasets.items()
        )


def open_data(
    kind: str,
    vocab_size: int,
    cache_dir: str | Path | None = None,
    sources: Mapping[str, str | Path] | None = None,
    validation: Mapping[str, str | Path] | None = None,
    tokenizer: str | Path | None = None,
    eod_token: str | None = None,
) -> DataBundle:
    """Open the data of a run whose model has vocab_size ids.

    kind "builtin": the interpreter's standard library, prepared in cache_dir (default_cache_dir() if None) on
    first use; the other arguments must be left out. kind "indexed": `sources` and `validation` give the
    prefix of an IndexedDataset by source name, `tokenizer` an optional tokenizer.json, whose document end is
    `eod_token` ("<|endoftext|>" if None); cache_dir is not used and must be left out.

    Raises ValueError for an unknown kind, an argument of the other kind, no sources, or a tokenizer with more
    ids than the model; FileNotFoundError for a missing file.
    """
    if kind not in KINDS:
        raise ValueError(f"data.kind is {kind!r}; choose one of {', '.join(KINDS)}")
    if kind == "builtin":
        _refuse(
            kind,
            {"sources": sources, "validation": validation, "tokenizer": tokenizer, "eod_token": eod_token},
        )
        corpus = prepare_builtin(default_cache_dir() if cache_dir is None else cache_dir, vocab_size)
        return _open(corpus.train, corpus.validation, corpus.tokenizer_path, END_OF_DOCUMENT, vocab_size)
    _refuse(kind, {"cache_dir": cache_dir})
    if not sources:
        raise ValueError("data=indexed needs data.sources, e.g. {web: /path/to/web}, for web.idx and web.bin")
    return _open(sources, validation or {}, tokenizer, eod_token or END_OF_DOCUMENT, vocab_size)


def _refuse(kind: str, arguments: Mapping[str, Any]) -> None:
    given = [name for name, value in arguments.items() if value]
    if given:
        raise ValueError(f"data.{given[0]} means nothing with data.kind {kind!r}; leave it out")


def _open(
    train: Mapping[str, str | Path],
    validation: Mapping[str, str | Path],
    tokenizer_path: str | Path | None,
    eod_token: str,
    vocab_size: int,
) -> DataBundle:
    tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path, eod_token)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer_path} has {tokenizer.vocab_size} ids and the model only {vocab_size}: "
            f"set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    return DataBundle(
        train={name: IndexedDataset(prefix) for name, prefix in train.items()},
        validation={name: IndexedDataset(prefix) for name, prefix in validation.items()},
        tokenizer=tokenizer,
    )
