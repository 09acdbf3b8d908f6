"""The built-in corpus: real text on every machine, tokenized once and cached.

Two sources, `code` and `prose` (`stdlib_text.py`), each with a held-out validation split (`held_out.py`), and
a BPE tokenizer trained on the training splits. Some three million tokens: enough to train the tiny model and
see its loss fall below what token frequencies alone allow, without a network and without an account.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data.bundle import DataBundle
from data.cache import build_once, default_cache_dir
from data.held_out import split_documents
from data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, dtype_for_vocabulary
from data.stdlib_text import CODE, PROSE, Document, collect_documents, standard_library
from data.tokenizer import load_tokenizer, train_tokenizer
from data.tokenizers.interface import TextTokenizer

# Part of the cache's name: raise it with any change to what is collected, split or how it is tokenized.
FORMAT_VERSION = 1
# Of files and topics; some go back for repeating training text, and about 5% of the text remains.
HELD_OUT_FRACTION = 0.07
SOURCES = (CODE, PROSE)
SPLITS = ("train", "validation")

# A full standard library has some 9 MB of code and 2 MB of prose.
MIN_CHARACTERS = {CODE: 1_000_000, PROSE: 200_000}
_BATCH_DOCUMENTS = 256


def check_builtin(data: Any) -> None:
    """Raise ValueError for settings of a configuration's `data` that are for data of one's own."""
    for key in ("sources", "validation", "tokenizer", "eod_token", "remote_cache"):
        if getattr(data, key):
            raise ValueError(
                f"data.{key}={getattr(data, key)} has no effect with data.kind=builtin; choose data=indexed for your "
                "own data"
            )


def open_builtin(vocab_size: int, cache_dir: str | Path | None = None) -> DataBundle:
    """Open the built-in corpus at this vocab_size, from the cache, or built into it in some ten seconds.

    cache_dir: where it is kept, default_cache_dir() if None. Processes that share the disk build it once. The cache
    distinguishes the interpreter (its exact version and place), vocab_size and FORMAT_VERSION. The tokenizer has at
    most vocab_size ids.

    Raises ValueError when this Python carries too little text, vocab_size is below 257, or the cache is damaged.
    """
    library = standard_library()
    identity = f"{FORMAT_VERSION}\n{sys.version}\n{library}\n{vocab_size}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache / f"builtin-python{version}-vocab{vocab_size}-{key}"
    build_once(folder, partial(_collect_and_build, library=library, vocab_size=vocab_size))
    return open_corpus(folder)


def open_corpus(folder: Path) -> DataBundle:
    """Open a folder that build_corpus wrote. Raises ValueError if a file of it is missing or damaged."""
    try:
        train, validation = ({name: IndexedDataset(folder / split / name) for name in SOURCES} for split in SPLITS)
        return DataBundle(train, validation, load_tokenizer(folder / "tokenizer.json"))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"the cached corpus {folder} is damaged ({error}); delete the folder to rebuild it") from error


def _collect_and_build(folder: Path, library: Path, vocab_size: int) -> None:
    documents = collect_documents(library)
    check_enough(documents, library)
    build_corpus(folder, documents, vocab_size)


def check_enough(documents: Sequence[Document], library: Path) -> None:
    """Raise ValueError when a stripped Python leaves too little text to train and to validate on."""
    for source, minimum in MIN_CHARACTERS.items():
        found = sum(len(document.text) for document in documents if document.source == source)
        if found < minimum:
            raise ValueError(
                f"the standard library at {library} has {found} characters of {source}, fewer than "
                f"{minimum}: this Python was stripped of its sources or help texts. Install the full one "
                "(Debian: apt install libpython3-stdlib pydoc, or python3-full), or train on your own data "
                "with data=indexed"
            )


def build_corpus(folder: Path, documents: Sequence[Document], vocab_size: int) -> None:
    """Split, train the tokenizer on the training splits, write both splits of both sources under `folder`.

    Raises ValueError if a source has no document in a split.
    """
    training, validation = split_documents(documents, HELD_OUT_FRACTION)
    tokenizer = train_tokenizer((document.text for document in training), vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    for split, chosen in zip(SPLITS, (training, validation), strict=True):
        (folder / split).mkdir()
        for source in SOURCES:
            texts = [document.text for document in chosen if document.source == source]
            if not texts:
                raise ValueError(f"no {source} document fell into the {split} split; the corpus is too small")
            _write(folder / split / source, texts, tokenizer)


def _write(prefix: Path, texts: Sequence[str], tokenizer: TextTokenizer) -> None:
    with IndexedDatasetWriter(prefix, dtype_for_vocabulary(tokenizer.vocab_size)) as writer:
        # In batches: `tokenizers` spreads one over the cores, and keeps all of its results in memory.
        for start in range(0, len(texts), _BATCH_DOCUMENTS):
            for ids in tokenizer.encode_batch(texts[start : start + _BATCH_DOCUMENTS]):
                writer.add_document([*ids, tokenizer.eod_id])
