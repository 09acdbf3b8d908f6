"""Several pairs into one: the bytes of preparing their inputs with one command, without memory for any of it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from data.indexed import HEADER, IndexedDataset, facts_path, index_path, tokens_path, write_index
from data.prepare.prepare import WorkFolder, blocks_of, refuse_existing, write_facts
from data.prepare.tokenize import SplitCount

_COPY_BYTES = 8 << 20
# What must be the same in all facts, and how it is called.
_SAME = {"tokenizer": "tokenizer", "eod": "end of a document", "bos": "begin of a document"}


@dataclass(frozen=True)
class _Pair:
    """One input, checked."""

    prefix: Path
    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int
    facts: dict[str, Any] | None


def merge(prefixes: Sequence[str | Path], output: str | Path, report: Callable[[str], None]) -> SplitCount:
    """Write the documents of all pairs, in their order, to the pair `output`; what is in it (text_bytes 0 if unknown).

    The facts beside the pairs are merged too if all of them have some. report: called with a line if not.

    Nothing appears under its name before all is written. Raises FileExistsError rather than overwrite;
    FileNotFoundError or ValueError for a pair that is missing, damaged or named twice, of another type of token, of
    another tokenizer, or with modes (multimodal data).
    """
    output = Path(output)
    if len(prefixes) < 2:
        raise ValueError("to merge takes two or more pairs; name their paths without ending")
    for path, times in Counter(Path(prefix).resolve() for prefix in prefixes).items():
        if times > 1:
            raise ValueError(f"{path} comes twice; its documents would be in the output twice")
    pairs = [_open(Path(prefix)) for prefix in prefixes]
    _check_alike(pairs)
    without = [str(pair.prefix) for pair in pairs if pair.facts is None]
    known = [] if without else [pair.facts for pair in pairs if pair.facts]
    count = SplitCount(
        sum(pair.documents for pair in pairs),
        sum(pair.tokens for pair in pairs),
        sum(facts["text_bytes"] for facts in known),
    )
    work = WorkFolder(output, {"merge of": [str(pair.prefix.resolve()) for pair in pairs]})
    with work.kept_if_saved():
        if not work.state.published:
            refuse_existing([index_path(output), tokens_path(output), facts_path(output)])
            if without:
                report(
                    f"without a .json: {', '.join(without)}; whether the tokenizer is the same was not checked, and no "
                    f"{facts_path(output)} is written"
                )
            _write(pairs, work.path, count, known)
        of_facts = {"train.json": facts_path(output)} if known else {}
        work.publish({**of_facts, "train.bin": tokens_path(output), "train.idx": index_path(output)})
    return count


def _open(prefix: Path) -> _Pair:
    dataset, index = IndexedDataset(prefix), index_path(prefix)
    sequences, documents = dataset.num_sequences, dataset.num_documents
    if index.stat().st_size != HEADER.size + 12 * sequences + 8 * (documents + 1):
        raise ValueError(f"{index} has modes of sequences, as multimodal data do; these cannot be merged here")
    facts = None
    if facts_path(prefix).is_file():
        try:
            facts = json.loads(facts_path(prefix).read_bytes())
            facts["tokenizer"]["fingerprint"], facts["text_bytes"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{facts_path(prefix)} is damaged; remove it to merge without its facts") from error
    return _Pair(prefix, dataset.dtype, sequences, documents, dataset.num_tokens, facts)


def _check_alike(pairs: Sequence[_Pair]) -> None:
    first = pairs[0]
    for other in pairs[1:]:
        if other.dtype != first.dtype:
            raise ValueError(
                f"{first.prefix} holds {first.dtype.name} and {other.prefix} {other.dtype.name}, so they are of "
                "different tokenizers; prepare them with one"
            )
    known = [pair for pair in pairs if pair.facts is not None]
    for other in known[1:]:
        for key, name in _SAME.items():
            ours, theirs = ((pair.facts or {}).get(key) for pair in (known[0], other))
            if ours != theirs:
                raise ValueError(
                    f"{known[0].prefix} and {other.prefix} differ in the {name} ({_shown(ours)}, {_shown(theirs)}); "
                    "prepare them alike"
                )


def _write(pairs: Sequence[_Pair], folder: Path, count: SplitCount, facts: Sequence[dict[str, Any]]) -> None:
    files = {"bin": folder / "train.bin", "idx": folder / "train.idx"}
    with open(files["bin"], "wb") as target:
        for pair in pairs:
            with open(tokens_path(pair.prefix), "rb") as source:
                shutil.copyfileobj(source, target, _COPY_BYTES)
    if files["bin"].stat().st_size != count.tokens * pairs[0].dtype.itemsize:
        raise ValueError("one of the pairs changed while it was read; merge again")
    starts = np.cumsum([0, *(pair.sequences for pair in pairs)]).tolist()
    write_index(
        files["idx"],
        pairs[0].dtype,
        starts[-1],
        lambda: chain.from_iterable(
            blocks_of(index_path(pair.prefix), "<i4", HEADER.size, pair.sequences) for pair in pairs
        ),
        count.documents,
        # After lengths, pointers, and the first entry, 0.
        lambda: (
            block + start
            for pair, start in zip(pairs, starts, strict=False)
            for block in blocks_of(
                index_path(pair.prefix), "<i8", HEADER.size + 12 * pair.sequences + 8, pair.documents
            )
        ),
    )
    if facts:
        write_facts(folder / "train.json", count, files, _merged(facts))


def _merged(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all facts agree on, the counts aside; None where they do not."""
    counts = {"format", "documents", "tokens", "text_bytes", "sha256"}
    found = {
        key: value if all(other.get(key) == value for other in facts) else None
        for key, value in facts[0].items()
        if key not in counts
    }
    options = [other.get("options") or {} for other in facts]
    found["options"] = {
        key: value for key, value in options[0].items() if all(other.get(key) == value for other in options)
    }
    return found


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("token") or str(value.get("fingerprint"))[:12])
    return "none" if value is None else str(value)
