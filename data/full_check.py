"""Every byte of a dataset looked at: what opening one does not do, in blocks, whatever its size."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.byte_file import is_url
from data.indexed_dataset import IndexedDataset

_ENTRIES = 1 << 20
_TOKENS_BYTES = 1 << 23


@dataclass(frozen=True)
class Checked:
    """What was counted in a dataset without a fault. agreed: whether there is a `<prefix>.json`, which then
    says the same."""

    documents: int
    tokens: int
    smallest_id: int
    largest_id: int
    agreed: bool

    def __str__(self) -> str:
        agreed = ", as its .json says" if self.agreed else ""
        ids = f"ids {self.smallest_id} to {self.largest_id}"
        return f"{self.documents:,} documents, {self.tokens:,} tokens, {ids}{agreed}"


def check_whole(
    prefix: str | Path, vocab_size: int | None = None, report: Callable[[float], None] = lambda share: None
) -> Checked:
    """Check the whole index, that every token id is from 0 to below vocab_size (None: whatever is not negative), and
    that `<prefix>.json`, if it is there, says the same.

    report gets the share of the work that is done, from time to time.

    Raises ValueError with the place of the first fault, and what IndexedDataset raises.
    """
    dataset = IndexedDataset(prefix)
    index, total = dataset.index, dataset.index.num_bytes + dataset.index.size
    for first in range(0, index.num_sequences, _ENTRIES):
        index.check_sequences(first, min(first + _ENTRIES, index.num_sequences))
        report(12 * first / total)
    for first in range(0, index.num_documents, _ENTRIES):
        index.check_documents(first, min(first + _ENTRIES, index.num_documents))
        report((12 * index.num_sequences + 8 * first) / total)
    facts = None if is_url(str(prefix)) else _facts(dataset)
    smallest, largest, digest = _check_tokens(dataset, vocab_size, lambda done: report((index.size + done) / total))
    if facts is not None:
        _compare(dataset, facts, digest)
    return Checked(dataset.num_documents, dataset.num_tokens, smallest, largest, facts is not None)


def _check_tokens(
    dataset: IndexedDataset, vocab_size: int | None, report: Callable[[int], None]
) -> tuple[int, int, str]:
    """(smallest id, largest id, sha256 of the `.bin`)."""
    digest, size = hashlib.sha256(), dataset.dtype.itemsize
    smallest, largest = np.iinfo(np.int64).max, -1
    block = _TOKENS_BYTES // size
    for start in range(0, dataset.num_tokens, block):
        tokens = dataset.tokens(start, min(block, dataset.num_tokens - start))
        digest.update(tokens.data)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            wrong = (tokens < 0) if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
            place = start + int(wrong.argmax())
            document = _document_of(dataset, place)
            limit = "no id is negative" if vocab_size is None else f"ids are from 0 to {vocab_size - 1}"
            raise ValueError(
                f"{dataset}.bin: token {place - int(dataset.document_offsets(document, document)[0])} of document "
                f"{document} (byte {place * size}) is {tokens[place - start]}; {limit}: the file is damaged, or of "
                "another tokenizer"
            )
        smallest, largest = min(smallest, low), max(largest, high)
        report((start + len(tokens)) * size)
    return smallest, largest, digest.hexdigest()


def _document_of(dataset: IndexedDataset, token: int) -> int:
    starts = _Starts(dataset)
    return bisect_right(starts, token) - 1


class _Starts:
    """Where each document begins, as a sequence to search in."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return self._dataset.num_documents

    def __getitem__(self, document: int) -> int:
        return int(self._dataset.document_offsets(document, document)[0])


def _facts(dataset: IndexedDataset) -> dict[str, Any] | None:
    """What `<prefix>.json` holds, if it is there. Raises ValueError where that is no facts."""
    path = Path(f"{dataset}.json")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore or delete it") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{path} does not hold facts by name; restore or delete it")
    return facts


def _compare(dataset: IndexedDataset, facts: dict[str, Any], digest: str) -> None:
    """Raise ValueError where the dataset, whose `.bin` has this sha256, is not what the facts say; those that are not
    there say nothing."""
    found = {"documents": dataset.num_documents, "tokens": dataset.num_tokens}
    for name, count in found.items():
        if name in facts and facts[name] != count:
            raise ValueError(
                f"{dataset} has {count} {name} where {dataset}.json says {facts[name]}: they are not of one dataset"
            )
    hashes = facts.get("sha256")
    if not isinstance(hashes, dict):
        return
    with open(f"{dataset}.idx", "rb") as file:
        of_index = hashlib.file_digest(file, "sha256").hexdigest()
    for ending, actual in (("bin", digest), ("idx", of_index)):
        if ending in hashes and hashes[ending] != actual:
            said = str(hashes[ending])[:12]
            raise ValueError(
                f"{dataset}.{ending} has the sha256 {actual[:12]} where {dataset}.json says {said}: "
                "it was changed since it was prepared; copy or prepare the dataset again"
            )
