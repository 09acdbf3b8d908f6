"""Several pairs into one: the bytes of preparing their inputs with one command, without memory for any of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.indexed import HEADER, IndexedDataset, index_path, tokens_path
from data.prepare.prepare import BLOCK, Lengths, WorkFolder, facts_path, refuse_existing, write_facts, write_index
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

    def lengths(self) -> Lengths:
        return Lengths(index_path(self.prefix), self.sequences, HEADER.size)

    def ends(self) -> Iterator[np.ndarray]:
        with open(index_path(self.prefix), "rb") as file:
            file.seek(HEADER.size + 12 * self.sequences + 8)  # behind lengths, pointers, and the first entry: 0
            left = self.documents
            while left:
                block = np.fromfile(file, dtype="<i8", count=min(BLOCK, left))
                left -= len(block)
                yield block


def merge(prefixes: Sequence[str | Path], output: str | Path, report: Callable[[str], None]) -> SplitCount:
    """Write the documents of all pairs, in their order, to the pair `output`; what is in it (text_bytes 0 if unknown).

    The facts beside the pairs are merged too if all of them have some. report: called with a line if not.

    Nothing appears under its name before all is written. Raises FileExistsError rather than overwrite;
    FileNotFoundError or ValueError for a pair that is missing or damaged, of another type of token, of another
    tokenizer, or with modes (multimodal data).
    """
    output = Path(output)
    if len(prefixes) < 2:
        raise ValueError("to merge takes two or more pairs; name their paths without ending")
    pairs = [_open(Path(prefix)) for prefix in prefixes]
    _check_alike(pairs)
    work = WorkFolder(output, {"merge of": [str(pair.prefix.resolve()) for pair in pairs]})
    try:
        without = [str(pair.prefix) for pair in pairs if pair.facts is None]
        if not work.state.published:
            targets = [index_path(output), tokens_path(output), facts_path(output)]
            refuse_existing(targets)
            if without:
                report(
                    f"without a .json: {', '.join(without)}; whether the tokenizer is the same was not checked, and no "
                    f"{facts_path(output)} is written"
                )
            count = _write(pairs, work.path)
        else:
            count = _count(pairs)
        work.publish(
            {
                **({} if without else {"train.json": facts_path(output)}),
                "train.bin": tokens_path(output),
                "train.idx": index_path(output),
            }
        )
    except BaseException:
        if work.saved:
            work.close()
        else:
            work.remove()
        raise
    return count


def _open(prefix: Path) -> _Pair:
    dataset = IndexedDataset(prefix)
    index = index_path(prefix)
    with open(index, "rb") as file:
        _, _, _, sequences, entries = HEADER.unpack(file.read(HEADER.size))
    if index.stat().st_size != HEADER.size + 12 * sequences + 8 * entries:
        raise ValueError(f"{index} has modes of sequences, as multimodal data do; these cannot be merged here")
    facts = None
    if facts_path(prefix).is_file():
        try:
            facts = json.loads(facts_path(prefix).read_bytes())
            facts["tokenizer"]["fingerprint"], facts["text_bytes"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{facts_path(prefix)} is damaged; remove it to merge without its facts") from error
    return _Pair(prefix, dataset.dtype, sequences, entries - 1, dataset.num_tokens, facts)


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


def _write(pairs: Sequence[_Pair], folder: Path) -> SplitCount:
    files = {"bin": folder / "train.bin", "idx": folder / "train.idx"}
    with open(files["bin"], "wb") as target:
        for pair in pairs:
            with open(tokens_path(pair.prefix), "rb") as source:
                shutil.copyfileobj(source, target, _COPY_BYTES)
    expected = sum(pair.tokens for pair in pairs) * pairs[0].dtype.itemsize
    if files["bin"].stat().st_size != expected:
        raise ValueError("one of the pairs changed while it was read; merge again")
    write_index(files["idx"], pairs[0].dtype, [pair.lengths() for pair in pairs], [pair.ends() for pair in pairs])
    count = _count(pairs)
    facts = [pair.facts for pair in pairs if pair.facts is not None]
    if len(facts) == len(pairs):
        write_facts(folder / "train.json", count, files, _merged(facts))
    return count


def _count(pairs: Sequence[_Pair]) -> SplitCount:
    known = all(pair.facts for pair in pairs)
    text_bytes = sum(pair.facts["text_bytes"] for pair in pairs if pair.facts) if known else 0
    return SplitCount(sum(pair.documents for pair in pairs), sum(pair.tokens for pair in pairs), text_bytes)


def _merged(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all facts agree on, the counts aside; None where they do not."""
    first = facts[0]
    counts = {"format", "documents", "tokens", "text_bytes", "sha256"}
    found = {
        key: value if all(other.get(key) == value for other in facts) else None
        for key, value in first.items()
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
