"""`.idx` and the facts beside it, written in blocks: memory does not grow with the number of documents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.indexed_dataset import DTYPE_CODES, HEADER, MAGIC, VERSION
from data.prepare.encode import SplitCount
from data.tokenizers.interface import TextTokenizer

BLOCK = 1 << 20
FACTS_FORMAT = 1


@dataclass(frozen=True)
class Lengths:
    """int32 lengths of sequences in a file, `number` of them from byte `offset` on, read in blocks."""

    path: Path
    number: int
    offset: int = 0

    def blocks(self) -> Iterator[np.ndarray]:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            left = self.number
            while left:
                block = np.fromfile(file, dtype="<i4", count=min(BLOCK, left))
                if not len(block):
                    raise ValueError(f"{self.path} was cut short; prepare it again")
                left -= len(block)
                yield block


def write_index(
    path: Path, dtype: np.dtype[Any], lengths: list[Lengths], ends: list[Iterator[np.ndarray]] | None
) -> None:
    """Write an `.idx` of sequences that lie back to back in the order of `lengths`, and sync it to disk.

    ends: the sequence behind the last one of each document, int64, for each of `lengths` in blocks, counted within it;
    None: each sequence is a document.
    """
    sequences = sum(part.number for part in lengths)
    code = next(code for code, known in DTYPE_CODES.items() if known == dtype)
    with open(path, "wb") as file:
        # The number of documents is known at the end only, if it is not that of the sequences.
        file.write(HEADER.pack(MAGIC, VERSION, code, sequences, sequences + 1))
        for part in lengths:
            for block in part.blocks():
                file.write(block.astype("<i4").tobytes())
        pointer = 0
        for part in lengths:
            for block in part.blocks():
                sizes = block.astype("<i8") * dtype.itemsize
                starts = pointer + np.cumsum(sizes) - sizes
                file.write(starts.astype("<i8").tobytes())
                pointer += int(sizes.sum())
        file.write(np.zeros(1, dtype="<i8").tobytes())
        documents = first = 0
        for number, part in enumerate(lengths):
            for block in _counting(part.number) if ends is None else ends[number]:
                file.write((block + first).astype("<i8").tobytes())
                documents += len(block)
            first += part.number
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        file.flush()
        os.fsync(file.fileno())


def _counting(number: int) -> Iterator[np.ndarray]:
    for start in range(0, number, BLOCK):
        yield np.arange(start + 1, min(start + BLOCK, number) + 1, dtype=np.int64)


def facts_path(prefix: str | Path) -> Path:
    """`<prefix>.json`, what is known of a pair; optional for those who read it."""
    return Path(f"{prefix}.json")


def tokenizer_facts(tokenizer: TextTokenizer) -> dict[str, Any]:
    """What tells one tokenizer from another, its file's place aside."""
    return {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint(), "vocab_size": tokenizer.vocab_size}


def write_facts(path: Path, counts: SplitCount, files: dict[str, Path], facts: dict[str, Any]) -> None:
    """Write the facts of a pair whose `files` ("bin", "idx") are whole, and sync them to disk."""
    hashes = {name: sha256_of(file) for name, file in files.items()}
    content = {"format": FACTS_FORMAT, **asdict(counts), "sha256": hashes, **facts}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
