"""What is done with finished pairs: several become one, and a pair is checked to its last byte.

A merge has the bytes of preparing its inputs with one command. Neither takes memory for what a pair holds.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data.indexed import HEADER, INDEX_BLOCK, IndexedDataset, document_at, write_index
from data.prepare.prepare import WorkFolder, refuse_existing, write_facts
from data.prepare.tokenize import SplitCount
from data.storage import is_url

_COPY_BYTES = 8 << 20
# Facts that must be the same in all inputs.
_SAME = ("tokenizer", "eod", "bos")


def merge(prefixes: Sequence[str], output: Path, report: Callable[[str], None]) -> SplitCount:
    """Write the documents of all pairs, in their order, to the pair `output`; what is in it (text_bytes 0 if unknown).
    The facts beside the pairs are merged too if all of them have some; `report` is called with a line if not.

    Raises FileExistsError rather than overwrite; FileNotFoundError or ValueError for a pair that is missing, damaged or
    named twice, of another type of token, of another tokenizer, or with modes (multimodal data).
    """
    if len({Path(prefix).resolve() for prefix in prefixes}) < max(2, len(prefixes)):
        raise ValueError("to merge takes two or more pairs, each named once, by their paths without ending")
    pairs = [IndexedDataset(prefix) for prefix in prefixes]
    for pair in pairs:
        if pair.has_modes:
            raise ValueError(f"{pair}.idx has modes of sequences (multimodal data), which cannot be merged here")
    facts = [_facts(prefix) for prefix in prefixes if Path(f"{prefix}.json").is_file()]
    if len({pair.dtype for pair in pairs}) > 1:
        types = ", ".join(f"{pair} {pair.dtype.name}" for pair in pairs)
        raise ValueError(f"the pairs hold different types of tokens ({types}); prepare them with one tokenizer")
    for one, other in pairwise(facts):
        for key in _SAME:
            if one.get(key) != other.get(key):
                raise ValueError(
                    f"the .json of the pairs differ in {key} ({one.get(key)}, {other.get(key)}); prepare them alike"
                )
    if len(facts) < len(pairs):
        facts = []
    documents, tokens = sum(pair.num_documents for pair in pairs), sum(pair.num_tokens for pair in pairs)
    count = SplitCount(documents, tokens, sum(of["text_bytes"] for of in facts))
    work = WorkFolder(output, {"merge of": [str(Path(prefix).resolve()) for prefix in prefixes]})
    with work.kept_if_saved():
        if not work.state.published:
            refuse_existing([Path(f"{output}.{ending}") for ending in ("idx", "bin", "json")])
            if not facts:
                report(f"not every pair has a .json: tokenizers were not compared, and {output}.json is not written")
            _write(pairs, work.path, count, facts)
        endings = ("json", "bin", "idx") if facts else ("bin", "idx")
        work.publish({f"train.{ending}": Path(f"{output}.{ending}") for ending in endings})
    return count


def _facts(prefix: str) -> dict[str, Any]:
    try:
        facts = json.loads(Path(f"{prefix}.json").read_bytes())
        facts["tokenizer"]["fingerprint"], facts["text_bytes"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{prefix}.json is damaged; remove it to merge without its facts") from error
    return facts


def _write(pairs: Sequence[IndexedDataset], folder: Path, count: SplitCount, facts: Sequence[dict[str, Any]]) -> None:
    files = {"bin": folder / "train.bin", "idx": folder / "train.idx"}
    with open(files["bin"], "wb") as target:
        for pair in pairs:
            with open(f"{pair}.bin", "rb") as source:
                shutil.copyfileobj(source, target, _COPY_BYTES)
    if files["bin"].stat().st_size != count.tokens * pairs[0].dtype.itemsize:
        raise ValueError("one of the pairs changed while it was read; merge again")

    def index_of(pair: IndexedDataset) -> tuple[np.ndarray, np.ndarray]:
        path, sequences = f"{pair}.idx", pair.num_sequences
        lengths = np.memmap(path, "<i4", "r", HEADER.size, (sequences,))
        # After lengths, pointers, and the first entry, 0.
        return lengths, np.memmap(path, "<i8", "r", HEADER.size + 12 * sequences + 8, (pair.num_documents,))

    write_index(files["idx"], pairs[0].dtype, [index_of(pair) for pair in pairs])
    if facts:
        counts = {"format", "documents", "tokens", "text_bytes", "sha256"}
        agreed = {**_agreed(facts), "options": _agreed([of.get("options") or {} for of in facts])}
        merged = {key: agreed.get(key) for key in facts[0] if key not in counts}
        write_facts(folder / "train.json", count, files, merged)


def _agreed(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all say alike."""
    return {key: value for key, value in facts[0].items() if all(other.get(key) == value for other in facts)}


def check_whole(prefix: str | Path) -> str:
    """Check the whole index, that no token id is negative, and that `<prefix>.json`, if it is there, says the same;
    what was counted, in words.

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
                f"is {dataset.tokens(place, 1)[0]}; no id is negative: the file is damaged"
            )
        smallest, largest = min(smallest, low), max(largest, high)
    found = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, ids {smallest} to {largest}"
    if is_url(str(prefix)) or not Path(f"{prefix}.json").exists():
        return found
    _compare_facts(dataset, digest.hexdigest())
    return f"{found}, as its .json says"


def _compare_facts(dataset: IndexedDataset, digest: str) -> None:
    """Raise ValueError where the dataset, whose `.bin` has this sha256, is not what its facts say."""
    try:
        facts = dict(json.loads(Path(f"{dataset}.json").read_bytes()))
        facts |= dict(facts.get("sha256", {}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{dataset}.json does not hold facts by name ({error}); restore or delete it") from error
    with open(f"{dataset}.idx", "rb") as file:
        of_index = hashlib.file_digest(file, "sha256").hexdigest()
    found = {"documents": dataset.num_documents, "tokens": dataset.num_tokens, "bin": digest, "idx": of_index}
    for name, actual in found.items():
        if (said := facts.get(name, actual)) != actual:
            raise ValueError(
                f"{dataset}.json says {str(said)[:12]} of {name} where the dataset has {str(actual)[:12]}: it was "
                "changed since it was prepared; copy or prepare the dataset again"
            )
