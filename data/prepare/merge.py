"""Merging finished `.bin`/`.idx` pairs, and checking every byte of one.

A merge gives the same bytes as preparing all inputs with one command. Neither reads a pair into memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.indexed import HEADER, INDEX_BLOCK, IndexedDataset, document_at, write_index
from data.prepare.prepare import WorkFolder, refuse_existing, write_facts
from data.prepare.tokenize import SplitCount
from data.sources import common_facts
from data.storage import is_url

_COPY_BYTES = 8 << 20


def merge(prefixes: Sequence[str], output: Path, report: Callable[[str], None]) -> SplitCount:
    """Write the documents of all pairs, in this order, to the pair `output`; returns its counts (text_bytes is 0 if
    unknown). The `.json` files are merged too if every pair has one; otherwise `report` is called with a line.

    Raises FileExistsError if the output exists; FileNotFoundError or ValueError for a pair that is missing, damaged,
    named twice, or has another token dtype, another tokenizer, or documents of several sequences.
    """
    if len({Path(prefix).resolve() for prefix in prefixes}) < max(2, len(prefixes)):
        raise ValueError("a merge needs two or more different pairs; name them by their paths without ending")
    pairs = [IndexedDataset(prefix) for prefix in prefixes]
    for pair in pairs:
        if pair.num_documents != pair.num_sequences:
            raise ValueError(f"{pair} has documents of several sequences; name both pairs in data.sources instead")
    facts = [pair.facts for pair in pairs if pair.facts]
    if len({pair.dtype for pair in pairs}) > 1:
        types = ", ".join(f"{pair} {pair.dtype.name}" for pair in pairs)
        raise ValueError(f"the pairs have different token dtypes ({types}); prepare them with one tokenizer")
    common_facts({prefix: pair.facts for prefix, pair in zip(prefixes, pairs, strict=True)})
    if len(facts) < len(pairs):
        facts = []
    documents, tokens = sum(pair.num_documents for pair in pairs), sum(pair.num_tokens for pair in pairs)
    count = SplitCount(documents, tokens, sum(of.get("text_bytes", 0) for of in facts))
    work = WorkFolder(output, {"merge of": [str(Path(prefix).resolve()) for prefix in prefixes]})
    with work.remove_unless_saved():
        if not work.state.published:
            refuse_existing([Path(f"{output}.{ending}") for ending in ("idx", "bin", "json")])
            if not facts:
                report(f"not every pair has a .json, so {output}.json is not written")
            _write(pairs, work.path, count, facts)
        endings = ("json", "bin", "idx") if facts else ("bin", "idx")
        work.publish({f"train.{ending}": Path(f"{output}.{ending}") for ending in endings})
    return count


def _write(pairs: Sequence[IndexedDataset], folder: Path, count: SplitCount, facts: Sequence[dict[str, Any]]) -> None:
    files = {"bin": folder / "train.bin", "idx": folder / "train.idx"}
    with open(files["bin"], "wb") as target:
        for pair in pairs:
            with open(f"{pair}.bin", "rb") as source:
                shutil.copyfileobj(source, target, _COPY_BYTES)
    if files["bin"].stat().st_size != count.tokens * pairs[0].dtype.itemsize:
        raise ValueError("one of the pairs changed while it was read; merge again")
    lengths = [np.memmap(f"{pair}.idx", "<i4", "r", HEADER.size, (pair.num_documents,)) for pair in pairs]
    write_index(files["idx"], pairs[0].dtype, lengths)
    if facts:
        counts = {"format", "documents", "tokens", "text_bytes", "sha256"}
        agreed = {**_agreed(facts), "options": _agreed([of.get("options") or {} for of in facts])}
        merged = {key: agreed.get(key) for key in facts[0] if key not in counts}
        write_facts(folder / "train.json", count, files, merged)


def _agreed(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in facts[0].items() if all(other.get(key) == value for other in facts)}


def check_pair(prefix: str | Path) -> str:
    """Check the whole index, that no token id is negative, and that the counts and hashes in `<prefix>.json`, if it
    exists, are right. Returns the counts as text.

    Raises ValueError with the place of the first fault, and what IndexedDataset raises.
    """
    dataset, block = IndexedDataset(prefix), INDEX_BLOCK
    dataset.check_index(block)
    digest = hashlib.sha256()
    smallest, largest = np.iinfo(np.int64).max, -1
    for start in range(0, dataset.num_tokens, block):
        tokens = dataset.tokens(start, min(block, dataset.num_tokens - start))
        digest.update(tokens.data)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0:
            place = start + int((tokens < 0).argmax())
            document = document_at(dataset, place)
            begin = int(dataset.document_offsets(document, document)[0])
            raise ValueError(
                f"{dataset}.bin: token {place - begin} of document {document} (byte {place * dataset.dtype.itemsize}) "
                f"is {dataset.tokens(place, 1)[0]}, but ids are not negative: the file is damaged"
            )
        smallest, largest = min(smallest, low), max(largest, high)
    found = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, ids {smallest} to {largest}"
    if is_url(str(prefix)) or not Path(f"{prefix}.json").exists():
        return found
    _compare_facts(dataset, digest.hexdigest())
    return f"{found}, as in its .json"


def _compare_facts(dataset: IndexedDataset, digest: str) -> None:
    try:
        facts = dict(json.loads(Path(f"{dataset}.json").read_bytes()))
        facts |= dict(facts.get("sha256", {}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{dataset}.json is not a JSON object of facts ({error}); restore or delete it") from error
    with open(f"{dataset}.idx", "rb") as file:
        of_index = hashlib.file_digest(file, "sha256").hexdigest()
    found = {"documents": dataset.num_documents, "tokens": dataset.num_tokens, "bin": digest, "idx": of_index}
    for name, actual in found.items():
        if (expected := facts.get(name, actual)) != actual:
            raise ValueError(
                f"{name} is {str(actual)[:12]}, but {str(expected)[:12]} in {dataset}.json: the dataset has changed "
                "since it was prepared; copy or prepare it again"
            )
