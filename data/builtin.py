"""The built-in corpus: Python's standard library, tokenized on first use and cached.

Two sources, each split into training and validation, and a BPE tokenizer trained on the training splits:

    code     the library's `*.py` files
    prose    the language reference that `help()` prints (`pydoc_data`), docstrings (of the modules compiled into the
             interpreter too), the licence and other text files

Some three million tokens: enough to train the tiny model without a network.

The split is by a hash of a document's origin (its file or help topic). So a file stays in its split when other files
are added or removed, and its code and docstrings are in the same split. Origins also repeat each other's text (the help
topic "compound" contains "while"), so an origin that shares a long paragraph with the training split moves there.
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
from pathlib import Path
from types import ModuleType
from typing import Any

from data.indexed import DataBundle, IndexedDataset, dtype_for_vocabulary, write_dataset
from data.storage import build_once, default_cache_dir
from data.tokenizer import load_tokenizer, train_tokenizer

CODE = "code"
PROSE = "prose"
SOURCES = (CODE, PROSE)
SPLITS = ("train", "validation")

# Part of the cache's name: increase it with any change to the collected text, the split or the tokenizer.
FORMAT_VERSION = 1
# Tests and installed packages differ between installations, encodings has tables of characters, and pydoc_data is
# prose, which `_from_help_topics` reads.
_EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
_MIN_DOCUMENT_CHARACTERS = 160
# A full standard library has some 9 MB of code and 2 MB of prose.
MIN_CHARACTERS = {CODE: 1_000_000, PROSE: 200_000}
# Share of files and help topics. Some move back because they repeat training text; about 5% of the text remains.
HELD_OUT_FRACTION = 0.07
# A shorter paragraph that is repeated is an idiom or a copyright line, not a leak.
MIN_SHARED_CHARACTERS = 120
# Chosen from a dozen salts: its validation split has the most even mix of files and help topics.
_SALT = 8
_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Document:
    """One text of a source (CODE or PROSE). origin: its file or help topic; several texts may have the same one."""

    source: str
    origin: str
    text: str


def check_builtin(data: Any) -> None:
    """Raise ValueError for settings in a configuration's `data` that only the kind `indexed` has."""
    for key in ("sources", "validation", "tokenizer", "eod_token"):
        if value := getattr(data, key):
            raise ValueError(f"data.{key}={value} has no effect with data.kind=builtin; use data=indexed for your data")


def open_builtin(vocab_size: int, cache_dir: str | Path | None = None) -> DataBundle:
    """Open the corpus with a tokenizer of at most vocab_size ids from the cache. The first process builds it.

    cache_dir: the cache folder; None: default_cache_dir(). Raises ValueError if this Python has too little text,
    vocab_size is below 257, or the cache is damaged.
    """
    library = standard_library()
    identity = f"{FORMAT_VERSION}\n{sys.version}\n{library}\n{vocab_size}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    version = ".".join(map(str, sys.version_info[:3]))
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache / f"builtin-python{version}-vocab{vocab_size}-{key}"

    def build(folder: Path) -> None:
        _say(f"building the built-in corpus once, in about ten seconds: {folder.parent}")
        documents = collect_documents(library)
        check_enough(documents, library)
        build_corpus(folder, documents, vocab_size)

    build_once(folder, build)
    try:
        train, validation = ({name: IndexedDataset(folder / split / name) for name in SOURCES} for split in SPLITS)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        return DataBundle(train, validation, tokenizer, tokenizer.document_tokens)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"the cached corpus {folder} is damaged ({error}); delete the folder to rebuild it") from error


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect_documents(library: Path) -> list[Document]:
    """Every document of a standard library folder and of this interpreter's built-in modules, in a fixed order. Left
    out is what is too short, cannot be decoded, or is not valid Python for this version."""
    documents: list[Document] = []
    for path in _files(library, ".py"):
        documents += _from_code(path, path.relative_to(library).as_posix())
    for path in _files(library, ".txt"):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        documents.append(Document(PROSE, path.relative_to(library).as_posix(), text))
    documents += _from_help_topics(library / "pydoc_data" / "topics.py")
    for name in sorted(sys.builtin_module_names):
        documents += _from_builtin_module(importlib.import_module(name))
    return [document for document in documents if len(document.text) >= _MIN_DOCUMENT_CHARACTERS]


def _files(library: Path, ending: str) -> list[Path]:
    """Files with this ending outside the excluded folders, sorted by their path in the library."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(library):
        # In place, so that os.walk skips these folders: site-packages can be far larger than the rest.
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        # _sysconfigdata has paths and flags of the machine that built this Python.
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


def _from_help_topics(path: Path) -> Iterator[Document]:
    """The topics of help(), each with its own origin. The file is parsed, not imported: it may be of another Python."""
    if not path.is_file():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            for topic in sorted(topics):
                yield Document(PROSE, f"pydoc_data/topics.py:{topic}", topics[topic])


def _from_builtin_module(module: ModuleType) -> Iterator[Document]:
    """The docstrings of a module written in C, of its functions and classes, and of their methods."""
    docstrings = {module.__doc__: None}  # a dict as an ordered set; aliases have the same docstring
    for _, member in sorted(vars(module).items()):
        if inspect.isroutine(member):
            docstrings[member.__doc__] = None
        elif inspect.isclass(member) and member.__module__ == module.__name__:
            docstrings[member.__doc__] = None
            for _, method in sorted(vars(member).items()):
                docstrings[getattr(method, "__doc__", None)] = None
    for docstring in docstrings:
        if isinstance(docstring, str):
            yield Document(PROSE, f"builtin:{module.__name__}", inspect.cleandoc(docstring))


def check_enough(documents: Sequence[Document], library: Path) -> None:
    """Raise ValueError if this Python has too little text to train and validate on."""
    for source, minimum in MIN_CHARACTERS.items():
        found = sum(len(document.text) for document in documents if document.source == source)
        if found < minimum:
            raise ValueError(
                f"the standard library at {library} has {found} characters of {source}, fewer than {minimum}; install "
                "the full Python (Debian: apt install python3-full), or train on your own data with data=indexed"
            )


def paragraphs(text: str) -> set[str]:
    """The paragraphs of a text that are long enough to show repeated text, with normalized white space."""
    blocks = (" ".join(block.split()) for block in _BLANK_LINES.split(text))
    return {block for block in blocks if len(block) >= MIN_SHARED_CHARACTERS}


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, validation): validation gets about `fraction` of the origins, without repeated text."""
    by_origin: dict[str, set[str]] = {}
    for document in documents:
        by_origin.setdefault(document.origin, set()).update(paragraphs(document.text))
    hashes = {origin: hashlib.sha256(f"{_SALT}/{origin}".encode()).digest()[:8] for origin in by_origin}
    held_out = {origin for origin in by_origin if int.from_bytes(hashes[origin], "big") / 2**64 < fraction}
    seen: set[str] = set().union(*(by_origin[origin] for origin in by_origin if origin not in held_out))
    # An origin that moves adds its own paragraphs to training, which another held-out origin may contain.
    while leaking := [origin for origin in held_out if not seen.isdisjoint(by_origin[origin])]:
        held_out.difference_update(leaking)
        seen.update(*(by_origin[origin] for origin in leaking))
    training = [document for document in documents if document.origin not in held_out]
    validation = [document for document in documents if document.origin in held_out]
    return training, validation


def build_corpus(folder: Path, documents: Sequence[Document], vocab_size: int) -> None:
    """Split, train the tokenizer on the training splits, write both splits of both sources under `folder`."""
    training, validation = split_documents(documents, HELD_OUT_FRACTION)
    _say(f"training a tokenizer of {vocab_size:,} ids on {len(training):,} documents")
    tokenizer = train_tokenizer((document.text for document in training), vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    for split, chosen in zip(SPLITS, (training, validation), strict=True):
        (folder / split).mkdir()
        for source in SOURCES:
            texts = [document.text for document in chosen if document.source == source]
            tokens = ([*tokenizer.encode_batch([text])[0], tokenizer.eod_id] for text in texts)
            write_dataset(folder / split / source, tokens, dtype_for_vocabulary(tokenizer.vocab_size))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
