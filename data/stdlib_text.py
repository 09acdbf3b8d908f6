"""The text that every Python carries: its standard library, as code and as prose.

Code is the `*.py` files. Prose is the language reference that `help()` prints (`pydoc_data`), the docstrings
of modules, classes and functions (of the modules compiled into the interpreter too), the licence and the
other text files. Each document knows its origin, the file or help topic it comes from: what shares an origin
must fall on the same side of the split between training and validation (`held_out.py`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

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
