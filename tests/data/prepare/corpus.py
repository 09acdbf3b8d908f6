"""Small corpora for the tests of preparing, and what came of them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Iterable
from pathlib import Path

import zstandard

from data.indexed import IndexedDataset
from data.tokenizer import TextTokenizer

TEXTS = [f"Document {i} says:\nnaïve ☕ {i * i}, and no more.\n" for i in range(120)]
PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def json_lines(path: Path, texts: Iterable[str], field: str = "text") -> Path:
    """A JSON Lines file of the texts, compressed as its ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(PACKERS.get(path.suffix.lower(), bytes)(content.encode()))
    return path


def documents(prefix: Path, tokenizer: TextTokenizer) -> list[str]:
    """The texts of a dataset; asserts that each document ends with the end of a document, and only there."""
    dataset = IndexedDataset(prefix)
    ids = [dataset.document(d).tolist() for d in range(dataset.num_documents)]
    assert all(tokens.index(tokenizer.eod_id) == len(tokens) - 1 for tokens in ids)
    return [tokenizer.decode(tokens[:-1]) for tokens in ids]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
