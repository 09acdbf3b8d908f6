"""Collect source code and documentation from folders into JSON Lines that scripts/prepare_data.py reads.

    python scripts/gather_text.py --output text unpacked/django unpacked/linux-source /usr/lib/python3
    python scripts/prepare_data.py --format json --files 'text/python.jsonl' --output data/python --tokenizer ...

Writes python.jsonl, code.jsonl (other languages), prose.jsonl into OUTPUT, one document a file: {"text": ...}. A JSON
Lines file among the sources is taken over line by line, under the kind that its name begins with. Of texts that differ
in nothing but whitespace the first is kept, so the order of the sources counts; within a folder files are sorted. What
nobody wrote for readers is left out: very short or long files, long lines, tables of numbers, other than UTF-8.

Exit codes: 0 done; 2 a source is missing or the output exists, in one line on stderr.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

_SUFFIXES = {
    "python": ".py .pyi .pyx",
    "code": ".c .h .cc .cpp .cxx .hh .hpp .ipp .inl .cu .cuh .rs .go .java .el .pl .pm .s .rb .lua .vim .sh",
    "prose": ".rst .md .txt .texi .texinfo .adoc .org",
}
KINDS = tuple(_SUFFIXES)
_KIND_OF = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
_MIN_BYTES, _MAX_BYTES = 256, 256 << 10
_MAX_MEAN_LINE = 200
_MIN_LETTERS, _MAX_DIGITS = 0.4, 0.15  # shares of all characters
_FILES_AT_ONCE = 64
_SKIPPED_FOLDERS = {".git", "__pycache__", "node_modules"}


class Document(NamedTuple):
    """A document of some kind: what tells it from others, and its line in the output."""

    kind: str
    digest: bytes
    line: bytes


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help="folders, or .jsonl files")
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="a folder that does not exist yet")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes; changes no byte")
    options = parser.parse_args(arguments)
    try:
        for source in options.sources:
            if not source.exists():
                raise FileNotFoundError(f"{source} does not exist")
        options.output.mkdir(parents=True)
        print(gather(options.sources, options.output, options.workers))
    except (ValueError, OSError) as error:
        print(f"gather_text.py: {error}", file=sys.stderr)
        return 2
    return 0


def gather(sources: Sequence[Path], output: Path, workers: int) -> str:
    """Write the distinct documents of all sources, in their order; returns a line of counts for each kind."""
    seen: set[bytes] = set()
    counts = {kind: [0, 0, 0] for kind in KINDS}  # documents, bytes of JSON, duplicates
    files = {kind: (output / f"{kind}.jsonl").open("wb") for kind in KINDS}
    # Fresh processes, not forks of one that may have threads; one that dies is an error, where Pool would wait for it.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for documents in pool.map(read_files, _batches(sources)):
            for kind, digest, line in documents:
                count = counts[kind]
                if digest in seen:
                    count[2] += 1
                    continue
                seen.add(digest)
                files[kind].write(line)
                count[0] += 1
                count[1] += len(line)
    for file in files.values():
        file.close()
    return "\n".join(
        f"{kind}: {documents:,} documents, {size:,} bytes; {duplicates:,} duplicates left out"
        for kind, (documents, size, duplicates) in counts.items()
    )


def _batches(sources: Sequence[Path]) -> Iterator[list[Path]]:
    """The files of all sources in order, some at once."""
    for source in sources:
        files = [source] if source.is_file() else list(_files(source))
        for i in range(0, len(files), _FILES_AT_ONCE):
            yield files[i : i + _FILES_AT_ONCE]


def _files(folder: Path) -> Iterator[Path]:
    """The files below the folder that may be text, sorted; links are not followed."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        yield from (Path(root, name) for name in sorted(names) if kind_of(name))


def kind_of(name: str) -> str | None:
    """The kind of a file by its name, `.gz` aside; None for any other file."""
    return _KIND_OF.get(Path(name.lower().removesuffix(".gz")).suffix)


def read_files(paths: Sequence[Path]) -> list[Document]:
    """The documents of the files; those that cannot be read, or are no text for readers, are missing."""
    documents = []
    for path in paths:
        if path.suffix == ".jsonl":
            kind = next((kind for kind in KINDS if path.name.startswith(kind)), None)
            if kind is None:
                raise ValueError(f"{path} begins with none of the kinds {', '.join(KINDS)}")
            with path.open("rb") as lines:
                documents += [_document(kind, json.loads(line)["text"]) for line in lines]
        elif (kind := kind_of(path.name)) and (text := read_text(path)):
            documents.append(_document(kind, text))
    return documents


def _document(kind: str, text: str) -> Document:
    digest = hashlib.sha256("".join(text.split()).encode()).digest()
    return Document(kind, digest, json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")


def read_text(path: Path) -> str | None:
    """The text of a file that somebody wrote for readers, else None."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if not _MIN_BYTES <= len(content) <= _MAX_BYTES:
            return None
        text = content.decode("utf-8").replace("\r\n", "\n").removeprefix("\ufeff")
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    letters, digits = len(re.findall(r"[A-Za-z]", text)), len(re.findall(r"[0-9]", text))
    for_readers = (
        "\0" not in text
        and len(text) <= _MAX_MEAN_LINE * (text.count("\n") + 1)
        and letters >= _MIN_LETTERS * len(text)
        and digits <= _MAX_DIGITS * len(text)
    )
    return text if for_readers else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
