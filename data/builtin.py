"""The text that every Python carries: its standard library, as code and as prose.

Code is the `*.py` files. Prose is the language reference that `help()` prints (`pydoc_data`), the docstrings
of modules, classes and functions (of the modules compiled into the interpreter too), the licence and the
other text files. Each document knows its origin, the file or help topic it comes from: what shares an origin
must fall on the same side of the split between training and validation.

The split of documents into training and validation, such that no validation text was seen in training.

The hash of a document's origin decides, so a file stays on its side when others come and go, and a file's
code and its docstrings stay together. Text is also repeated between origins: the help topic "compound"
contains "while", docstrings are copied to subclasses. An origin that shares a long paragraph with training
goes to training.

The built-in corpus: real text on every machine, tokenized once and cached.

Two sources, `code` and `prose`, each with a held-out validation split, and
a BPE tokenizer trained on the training splits. Some three million tokens: enough to train the tiny model and
see its loss fall below what token frequencies alone allow, without a network and without an account.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from data.indexed import IndexedDataset, IndexedDatasetWriter, dtype_for_vocabulary
from data.storage import build_once, default_cache_dir
from data.token_source import DataBundle
from data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

CODE = "code"
PROSE = "prose"

# Tests and installed packages differ from one installation to the next; encodings is tables of characters,
# and pydoc_data is prose in quotes.
_EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
_MIN_DOCUMENT_CHARACTERS = 160


@dataclass(frozen=True)
class Document:
    """One text of a source (CODE or PROSE), and the origin it shares with other texts of the same file."""

    source: str
    origin: str
    text: str


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect_documents(library: Path) -> list[Document]:
    """Every document of a standard library folder and of this interpreter's built-in modules, in a fixed
    order.

    Files that are not text in their declared encoding, or not Python of this version, are left out; so is
    what a stripped installation lacks. Documents shorter than 160 characters are left out too.
    """
    documents: list[Document] = []
    for path in _files(library, ".py"):
        documents += _from_code(path, path.relative_to(library).as_posix())
    for path in _files(library, ".txt"):
        documents += _from_text_file(path, path.relative_to(library).as_posix())
    documents += _from_help_topics(library / "pydoc_data" / "topics.py")
    for name in sorted(sys.builtin_module_names):
        documents += _from_builtin_module(importlib.import_module(name))
    return [document for document in documents if len(document.text) >= _MIN_DOCUMENT_CHARACTERS]


def _files(library: Path, ending: str) -> list[Path]:
    """Files of this ending outside the excluded folders, sorted by their path within the library."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(library):
        # In place, so that os.walk stays out of them: site-packages can be larger than the rest by far.
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        # _sysconfigdata holds the paths and flags of the machine that built this Python.
        found += [Path(folder, n) for n in names if n.endswith(ending) and not n.startswith("_sysconfigdata")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(library).as_posix())


def _from_code(path: Path, origin: str) -> Iterator[Document]:
    try:
        with tokenize.open(path) as file:
            text = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the library's own old escapes
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return
    yield Document(CODE, origin, text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Document(PROSE, origin, docstring)


def _from_text_file(path: Path, origin: str) -> Iterator[Document]:
    try:
        yield Document(PROSE, origin, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return


def _from_help_topics(path: Path) -> Iterator[Document]:
    """The topics of help(), each with an origin of its own. Read, not imported: Python may differ."""
    if not path.is_file():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            for topic in sorted(topics):
                yield Document(PROSE, f"pydoc_data/topics.py:{topic}", topics[topic])


def _from_builtin_module(module: ModuleType) -> Iterator[Document]:
    """The docstrings of a module written in C, of its functions and classes, and of their methods."""
    origin = f"builtin:{module.__name__}"
    docstrings = {module.__doc__: None}  # a dict for its order; aliases share a docstring
    for _, member in sorted(vars(module).items()):
        if inspect.isroutine(member):
            docstrings[member.__doc__] = None
        elif inspect.isclass(member) and member.__module__ == module.__name__:
            docstrings[member.__doc__] = None
            for _, method in sorted(vars(member).items()):
                docstrings[getattr(method, "__doc__", None)] = None
    for docstring in docstrings:
        if isinstance(docstring, str):
            yield Document(PROSE, origin, inspect.cleandoc(docstring))


# Shorter repeated paragraphs are idioms and copyright lines, which are no leak.
MIN_SHARED_CHARACTERS = 120

# Of a dozen salts the one whose validation has the most even mix of files and help topics; some give no
# topics.
_SALT = 8

_BLANK_LINES = re.compile(r"\n\s*\n")


def paragraphs(text: str) -> set[str]:
    """The paragraphs of a text that are long enough to identify it, with their white space normalized."""
    blocks = (" ".join(block.split()) for block in _BLANK_LINES.split(text))
    return {block for block in blocks if len(block) >= MIN_SHARED_CHARACTERS}


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, validation): validation gets about `fraction` of the origins, less those that repeat
    training.

    Pure and independent of the order of documents; each list keeps that order.
    """
    by_origin: dict[str, set[str]] = {}
    for document in documents:
        by_origin.setdefault(document.origin, set()).update(paragraphs(document.text))
    held_out = {origin for origin in by_origin if _share(origin) < fraction}
    seen: set[str] = set().union(*(by_origin[origin] for origin in by_origin if origin not in held_out))
    # Each origin that moves brings its own paragraphs to training, which may give another one away.
    while leaking := [origin for origin in held_out if not seen.isdisjoint(by_origin[origin])]:
        held_out.difference_update(leaking)
        seen.update(*(by_origin[origin] for origin in leaking))
    training = [document for document in documents if document.origin not in held_out]
    validation = [document for document in documents if document.origin in held_out]
    return training, validation


def _share(origin: str) -> float:
    """A number in [0, 1) from the origin's name."""
    digest = hashlib.sha256(f"{_SALT}/{origin}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


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
    for key in ("sources", "validation", "tokenizer", "eod_token"):
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
