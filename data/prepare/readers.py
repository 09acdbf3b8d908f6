"""Reads a corpus, files or a dataset, as a stream of tasks.

A task is a piece of input of limited size: a `functools.partial` of one of the `*_records` functions below that
includes its input, so it gives the same records in every process. Cutting the input is cheap; the processes that
tokenize also parse the JSON.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

FORMATS = ("json", "text")
# File endings that `datasets` reads, and its names for these formats.
DATA_FILES = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
}

# Characters of input in a task: large enough that sending it is cheap, small enough that no core waits long at the end.
TASK_SIZE = 1 << 20
READ_BYTES = 1 << 20
MAX_CHARACTERS = 1 << 30
"""The longest line or text file that is read, in characters: it must fit into memory."""
_FILES_IN_A_TASK = 256
_FILES_IN_A_PART = 1000
_ROWS_AT_ONCE = 1000
_ROWS_IN_A_TASK = 8000

_DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".gzip": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
# Archives with several files, and compressions without a reader here.
_REFUSED = (".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".lz4", ".br", ".lzma", ".z", ".lzo", ".sz")
_MAX_WINDOW = 1 << 31  # of `zstd --long=31`; only files with such a window take the memory
_ZSTANDARD_READ_BYTES = 1 << 13  # small, because it decompresses at once to up to 30,000 times its size

EMPTY = "empty"
_NOT_UTF8 = "not UTF-8"
_NOT_JSON = "not JSON (one object a line is read)"
_NOT_AN_OBJECT = "not a JSON object"
# The value of a row without the field; no table contains it, and it is the same object in all processes.
_MISSING = ...


class Record(NamedTuple):
    """One record: its place in the input, and its text or a problem. The problem is EMPTY for a record without text."""

    where: str
    text: str
    problem: str | None = None


Task = Callable[[], Iterator[Record]]
# (position, task): how many bytes of the part's files were read for it and the tasks before it; 0 if unknown.
Tasks = Iterator[tuple[int, Task]]


@dataclass(frozen=True)
class Part:
    """A part of a corpus: a file, some small text files, or a dataset. tasks: gives the same tasks at each call. files:
    must not change while they are read."""

    tasks: Callable[[], Tasks]
    files: tuple[Path, ...] = ()

    def stamp(self) -> list[Any]:
        """[bytes of the files, hash of their paths, sizes and modification times]."""
        found = [(str(path), path.stat()) for path in self.files]
        facts = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]
        return [sum(size for _, size, _ in facts), hashlib.sha256(repr(facts).encode()).hexdigest()]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files of all paths and glob patterns (also with `**`), sorted within each pattern, without duplicates. Raises
    FileNotFoundError for a pattern without a file."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            what = "is a folder" if Path(pattern).is_dir() else "matches no file"
            raise FileNotFoundError(f"{pattern} {what}; give a path or a quoted pattern of files: 'corpus/**/*.jsonl'")
        for file in files:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def open_files(format: str, files: Sequence[Path], field: str = "text") -> list[Part]:
    """The files, plain or compressed as .gz, .bz2, .xz or .zst, as parts of a corpus, in this order.

    format: "json": one JSON object per line with the text in `field`; `a.b` is the field b of the object a, unless
    there is a field with the name "a.b". "text": UTF-8; each file is a document.

    Raises ValueError for an archive; OSError for a file that cannot be opened.
    """
    assert format in FORMATS, format
    for path in files:
        endings = [ending.lower() for ending in path.suffixes[-2:]]
        if refused := [e for e in endings if e in _REFUSED and (e == endings[-1] or e == ".tar")]:
            raise ValueError(
                f"{path} is compressed as {refused[-1]}; unpack it, or compress each file as .gz, .bz2, .xz or .zst"
            )
        with open(path, "rb"):
            pass  # fail now, not after hours
    if format == "json":
        return [Part(partial(_line_tasks, path, field), (path,)) for path in files]
    groups = [tuple(files[i : i + _FILES_IN_A_PART]) for i in range(0, len(files), _FILES_IN_A_PART)]
    return [Part(partial(_document_tasks, group), group) for group in groups]


def open_dataset(
    names: Sequence[str], split: str | None = None, field: str = "text", subset: str | None = None
) -> list[Part]:
    """One split of a dataset that `datasets` reads, as one part of a corpus. A slice of a split (`train[:1%]`) works
    except for a saved folder.

    names: a folder written by `save_to_disk`, a folder of data files, a name on the Hugging Face hub, or data files and
    patterns of them, all of one kind of DATA_FILES. split: None if there is only one.

    Raises FileNotFoundError for a pattern without a file; ValueError for a split or subset that is missing or has no
    effect, for files of unknown or different kinds, and if the package `datasets` is not installed.
    """
    try:
        import datasets  # noqa: F401 - an optional package
    except ImportError as error:
        raise ValueError(f'--dataset needs a package ({error}); pip install "megatron_fp4[datasets]"') from error
    are_files = len(names) > 1 or Path(names[0]).is_file() or glob.has_magic(names[0])
    has_one_split = are_files or _is_saved(names[0])
    if has_one_split and subset is not None:
        raise ValueError(f"{names[0]} has no subset {subset!r}; leave it out")
    if not has_one_split and split is None:
        raise ValueError(f"--dataset {names[0]} needs --split, such as train or train[:1%]")
    if are_files:
        files = find_files(names)
        kinds = {DATA_FILES.get(path.suffix.lower(), "") for path in files}
        if len(kinds) > 1 or "" in kinds:
            raise ValueError(f"--dataset {names[0]}: give files of one kind, ending in {', '.join(DATA_FILES)}")
        source = (*kinds, *(glob.escape(str(path)) for path in files))  # `datasets` takes patterns
    else:
        source, files = (names[0],), sorted(path for path in Path(names[0]).rglob("*") if path.is_file())
    return [Part(partial(_dataset_tasks, source, split, field, subset), tuple(files))]


def _is_saved(name: str) -> bool:
    return any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))


# The processes that tokenize call these.


def json_records(path: str, first_line: int, text: str, field: str) -> Iterator[Record]:
    """The records of lines of JSON; blank lines are skipped. first_line: the number of the first line."""
    for number, line in enumerate(text.split("\n"), start=first_line):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            yield Record(where, "", _NOT_JSON)
        else:
            is_object = isinstance(value, dict)
            yield _record(where, _value(value, field), field) if is_object else Record(where, "", _NOT_AN_OBJECT)


def file_records(files: list[tuple[str, str]]) -> Iterator[Record]:
    """The records of text files, given as (path, text); each is a document."""
    for path, text in files:
        yield _record(path, text)


def row_records(where: str, first_row: int, values: list[Any], field: str) -> Iterator[Record]:
    """The records of values of one column. first_row: the number of the first value's row."""
    for number, value in enumerate(values, start=first_row):
        yield _record(f"{where}, row {number}", value, field)


def _value(value: Any, field: str) -> Any:
    """The field of an object; for `a.b`, the field b of its object a."""
    if not isinstance(value, Mapping):
        return _MISSING
    if field in value:
        return value[field]
    first, dot, rest = field.partition(".")
    return _value(value.get(first), rest) if dot else _MISSING


def _record(where: str, value: Any, field: str = "") -> Record:
    if value is _MISSING:
        return Record(where, "", f"without a field {field!r}")
    if value is None:
        return Record(where, "", EMPTY)
    if not isinstance(value, str):
        return Record(where, "", f"whose field {field!r} is not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # a surrogate: of bytes that are not UTF-8, or an escape in JSON
        return Record(where, "", _NOT_UTF8)
    return Record(where, value, None if value.strip() else EMPTY)


# Files.


def _line_tasks(path: Path, field: str) -> Tasks:
    for position, line, text in _blocks(path):
        yield position, partial(json_records, str(path), line, text, field)


def _document_tasks(paths: Sequence[Path]) -> Tasks:
    """The tasks of text files; small files share a task."""
    files: list[tuple[str, str]] = []
    size = position = 0
    for path in paths:
        text = "".join(block for _, _, block in _blocks(path, in_lines=False))
        files.append((str(path), text))
        size += len(text)
        position += path.stat().st_size
        if size >= TASK_SIZE or len(files) >= _FILES_IN_A_TASK:
            yield position, partial(file_records, files)
            files, size = [], 0
    if files:
        yield position, partial(file_records, files)


def _blocks(path: Path, in_lines: bool = True) -> Iterator[tuple[int, int, str]]:
    """(position in the file, number of the first line, text) of blocks of complete lines with about TASK_SIZE
    characters each. in_lines: False for one block with the whole file. Raises ValueError for a line or a block that is
    too long."""
    position, line, held = 0, 1, ""
    for position, piece in _text(path):
        held += piece
        if in_lines and len(held) >= TASK_SIZE and (end := held.rfind("\n") + 1):
            yield position, line, held[:end]
            line, held = line + held.count("\n", 0, end), held[end:]
        if len(held) > MAX_CHARACTERS:
            raise ValueError(
                f"{path}: a document after line {line} has more than {MAX_CHARACTERS:,} characters, the limit; split it"
            )
    if held:
        yield position, line, held


def _text(path: Path) -> Iterator[tuple[int, str]]:
    r"""(position after it, piece) of a file's text, without a byte order mark and with "\n" as the end of each line.
    Bytes that are not UTF-8 become surrogates."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    position = 0
    for position, piece in _decompressed(path):
        yield position, decoder.decode(piece)
    yield position, decoder.decode(b"", final=True)


def _decompressed(path: Path) -> Iterator[tuple[int, bytes]]:
    """(position after it, piece) of a file's content, decompressed by the file's ending. Raises ValueError if the file
    is damaged, cut short, or not compressed as its ending says; OSError if it cannot be read."""
    ending = path.suffix.lower()
    with open(path, "rb") as file:
        reader = _DECOMPRESSORS.get(ending, lambda file: file)(file)
        try:
            for piece in _zstandard(file) if ending == ".zst" else iter(partial(reader.read, READ_BYTES), b""):
                yield file.tell(), piece
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            # Errors of the operating system have an errno; errors for damaged content have none.
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise ValueError(
                f"{path} is damaged, was cut short or is not compressed as {ending} ({error}); copy it again, or "
                "correct its ending"
            ) from error


def _zstandard(file: BinaryIO) -> Iterator[bytes]:
    """The content of all frames of a file. Raises EOFError for a frame that is cut short, which the library's own
    reader accepts, and for anything that is not a frame."""
    import zstandard  # an optional package

    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    frame: Any = None
    while packed := file.read(_ZSTANDARD_READ_BYTES):
        while packed:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            packed = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the last frame is incomplete")


# Tables.


def _dataset_tasks(source: tuple[str, ...], split: str | None, field: str, subset: str | None) -> Tasks:
    """source: (folder or name on the hub), or (kind of file, files ...)."""
    files = source[1:] or source
    more = f"and {len(files) - 1} more" if len(files) > 1 else None
    where = " ".join(filter(None, (files[0], more, subset, split)))
    first, size = 1, 0  # the row of the first value, and the characters of all of them
    values: list[Any] = []
    try:
        table = _table(source, split, subset)
        if names := table.column_names:  # some streams do not know their columns before they are read
            # Read only the column that is needed; if there is none, any other, to count the rows.
            wanted = [name for name in (field, field.partition(".")[0]) if name in names]
            table = table.select_columns([*wanted, names[0]][:1])
        for batch in table.with_format("arrow").iter(_ROWS_AT_ONCE):
            for value in _column(batch, field):
                values.append(value)
                size += len(value) if isinstance(value, str) else 8
                if size >= TASK_SIZE or len(values) >= _ROWS_IN_A_TASK:
                    yield 0, partial(row_records, where, first, values, field)
                    first, values, size = first + len(values), [], 0
    except Exception as error:  # `datasets` raises many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"datasets cannot read {where}: {reason}") from error
    if values:
        yield 0, partial(row_records, where, first, values, field)


def _table(source: tuple[str, ...], split: str | None, subset: str | None) -> Any:
    import datasets

    name = source[0]
    if len(source) == 1 and _is_saved(name):
        found = datasets.load_from_disk(name)
        splits = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
        if split not in splits and (split is not None or len(splits) > 1):
            raise ValueError(f"name one of its splits with --split: {', '.join(splits)}")
        return splits[split or next(iter(splits))]
    # `datasets` can stream a full split, but loads a split into its cache to slice it.
    streams = "[" not in (split or "") and "+" not in (split or "")
    given: dict[str, Any] = {"data_files": list(source[1:])} if len(source) > 1 else {"name": subset}
    return datasets.load_dataset(name, split=split or "train", streaming=streams, **given)


def _column(batch: Any, field: str) -> list[Any]:
    """The values of a field that is a column of an Arrow batch, or a field of a column."""
    column = field if field in batch.schema.names else field.partition(".")[0]
    if column not in batch.schema.names:
        return [_MISSING] * batch.num_rows
    values = batch.column(column)
    try:
        found = values.to_pylist()
    except UnicodeDecodeError:
        import pyarrow

        found = values.cast(pyarrow.large_binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "surrogateescape") for value in found]
    return found if column == field else [_value({column: value}, field) for value in found]
