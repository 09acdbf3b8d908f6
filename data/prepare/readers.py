"""What a corpus is made of: files or a dataset, cut into tasks as they stream by.

A task is a bounded piece of input: a `functools.partial` of one of the `*_records` functions below, which carries what
it reads, so that any process gets the same records from it. Cutting is cheap; JSON is left to the processes that
tokenize.
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
# Endings of files that `datasets` reads, and what it calls them.
DATA_FILES = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
}

# Characters of input in a task: enough that sending it costs little, little enough that no core waits for the last one.
TASK_SIZE = 1 << 20
READ_BYTES = 1 << 20
LONGEST_UNIT = 1 << 30
"""Characters of the longest line or text file that is read: it has to fit into memory."""
_FILES_IN_A_TASK = 256
_FILES_IN_A_PART = 1000
_ROWS_AT_ONCE = 1000
_ROWS_IN_A_TASK = 8000

_PACKED: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".gzip": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
# Archives of several files, and compressions that we have no reader for.
_REFUSED = (".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".lz4", ".br", ".lzma", ".z", ".lzo", ".sz")
_LARGEST_WINDOW = 1 << 31  # of `zstd --long=31`; the memory is taken only for files that ask for it
_ZSTANDARD_READ_BYTES = 1 << 13  # what is read at once unpacks as a whole, to 30,000 times its size at worst

EMPTY = "empty"
_NOT_UTF8 = "not UTF-8"
_NOT_JSON = "not JSON (one object a line is read)"
_NOT_AN_OBJECT = "not a JSON object"
# Stands for the value of a row that has no such field; no table holds it, and it is the same in all processes.
_MISSING = ...


class Record(NamedTuple):
    """One record: where it stands, and its text or the problem, which is EMPTY for one without text."""

    where: str
    text: str
    problem: str | None = None


Task = Callable[[], Iterator[Record]]
# Each with how far the part's files are read when it is cut, in bytes; 0 where that is not known.
Tasks = Iterator[tuple[int, Task]]


@dataclass(frozen=True)
class Part:
    """A piece of a corpus: a file, some small text files, or a dataset. tasks: gives the same each time. files: must
    not change while they are read."""

    tasks: Callable[[], Tasks]
    files: tuple[Path, ...] = ()

    def stamp(self) -> list[Any]:
        """[bytes of the files, hash of their paths, sizes and times of the last change]."""
        found = [(str(path), path.stat()) for path in self.files]
        facts = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]
        return [sum(size for _, size, _ in facts), hashlib.sha256(repr(facts).encode()).hexdigest()]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files of all paths and glob patterns (`**` too), each pattern's sorted, none twice. Raises
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
    """The files, plain or .gz, .bz2, .xz, .zst, as parts of a corpus, in their order.

    format "json": one JSON object a line, the text under `field`; `a.b` is the field b of the object a, unless there is
    a field of that very name. "text": UTF-8; a document is a whole file.

    Raises ValueError for an archive; OSError for a file that cannot be opened.
    """
    assert format in FORMATS, format
    for path in files:
        endings = [ending.lower() for ending in path.suffixes[-2:]]
        if refused := [e for e in endings if e in _REFUSED and (e == endings[-1] or e == ".tar")]:
            raise ValueError(
                f"{path} is packed as {refused[-1]}; unpack it, or compress each file as .gz, .bz2, .xz or .zst"
            )
        with open(path, "rb"):
            pass  # rather now than after hours
    if format == "json":
        return [Part(partial(_line_tasks, path, field), (path,)) for path in files]
    groups = [tuple(files[i : i + _FILES_IN_A_PART]) for i in range(0, len(files), _FILES_IN_A_PART)]
    return [Part(partial(_document_tasks, group), group) for group in groups]


def open_dataset(
    names: Sequence[str], split: str | None = None, field: str = "text", subset: str | None = None
) -> list[Part]:
    """One split, or slice of a split (`train[:1%]`, not of a saved folder), of what `datasets` reads, as one part of a
    corpus.

    names: a folder that `save_to_disk` wrote, a folder of data files, a name of the Hugging Face hub, or data files and
    patterns of them, all of one kind of DATA_FILES. split: None where there is only one.

    Raises FileNotFoundError for a pattern without a file; ValueError for a split or subset that is missing or means
    nothing, files of no or several kinds, and where the package `datasets` is not installed.
    """
    try:
        import datasets  # noqa: F401 - not everybody installs it
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


# What the processes that tokenize call.


def json_records(path: str, first_line: int, text: str, field: str) -> Iterator[Record]:
    """Lines of JSON, the first of them number first_line; blank ones are no records."""
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
    """Whole text files, each a document: their paths and texts."""
    for path, text in files:
        yield _record(path, text)


def row_records(where: str, first_row: int, values: list[Any], field: str) -> Iterator[Record]:
    """Values of one column, the first of them in row number first_row."""
    for number, value in enumerate(values, start=first_row):
        yield _record(f"{where}, row {number}", value, field)


def _value(value: Any, field: str) -> Any:
    """The field of an object, or the field b of its object a for `a.b`."""
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
        return Record(where, "", f"whose field {field!r} is no string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # bytes that are not UTF-8 were read as surrogates, and JSON can spell half a pair
        return Record(where, "", _NOT_UTF8)
    return Record(where, value, None if value.strip() else EMPTY)


# Files.


def _line_tasks(path: Path, field: str) -> Tasks:
    for position, line, text in _blocks(path):
        yield position, partial(json_records, str(path), line, text, field)


def _document_tasks(paths: Sequence[Path]) -> Tasks:
    """Text files, each a document; small ones share a task."""
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
    """Whole lines of a file, some TASK_SIZE characters of them at a time, after the position in the file and the number
    of the first; or all of it at once. Raises ValueError for a line, or a file that is read at once, that is too
    long."""
    position, line, held = 0, 1, ""
    for position, piece in _text(path):
        held += piece
        if in_lines and len(held) >= TASK_SIZE and (end := held.rfind("\n") + 1):
            yield position, line, held[:end]
            line, held = line + held.count("\n", 0, end), held[end:]
        if len(held) > LONGEST_UNIT:
            raise ValueError(
                f"{path}: a document after line {line} is longer than {LONGEST_UNIT:,} characters, the most that is "
                "read in one piece; split it"
            )
    if held:
        yield position, line, held


def _text(path: Path) -> Iterator[tuple[int, str]]:
    r"""A file's text in pieces, without a byte order mark, each end of a line as "\n", and the position after it. Bytes
    that are not UTF-8 become surrogates."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    position = 0
    for position, piece in _unpacked(path):
        yield position, decoder.decode(piece)
    yield position, decoder.decode(b"", final=True)


def _unpacked(path: Path) -> Iterator[tuple[int, bytes]]:
    """The content of a file in pieces of at most some MiB, unpacked by its ending, and the position after each. Raises
    ValueError if it is damaged, cut short, or not compressed as its ending says; OSError if it cannot be read."""
    ending = path.suffix.lower()
    with open(path, "rb") as file:
        reader = _PACKED.get(ending, lambda file: file)(file)
        try:
            for piece in _zstandard(file) if ending == ".zst" else iter(partial(reader.read, READ_BYTES), b""):
                yield file.tell(), piece
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            # Damage has no number; errors of the system have one.
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise ValueError(
                f"{path} is damaged, was cut short or is not compressed as {ending} says ({error}); copy it again, or "
                "give it its right ending"
            ) from error


def _zstandard(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a file. Raises EOFError for one that is cut short, which the library's own reader takes for a
    whole one, and for what is no frame."""
    import zstandard  # only who reads such a file needs it

    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
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
        raise EOFError("the last frame does not end")


# Tables.


def _dataset_tasks(source: tuple[str, ...], split: str | None, field: str, subset: str | None) -> Tasks:
    """source: a folder or a name of the hub; or a kind of file, and files."""
    files = source[1:] or source
    more = f"and {len(files) - 1} more" if len(files) > 1 else None
    where = " ".join(filter(None, (files[0], more, subset, split)))
    first, size = 1, 0  # row of the first of `values`, and their characters
    values: list[Any] = []
    try:
        table = _table(source, split, subset)
        if names := table.column_names:  # unknown before some streams are read
            # Reading the others takes time; if there is no such field, one column counts the rows.
            wanted = [name for name in (field, field.partition(".")[0]) if name in names]
            table = table.select_columns([*wanted, names[0]][:1])
        for batch in table.with_format("arrow").iter(_ROWS_AT_ONCE):
            for value in _column(batch, field):
                values.append(value)
                size += len(value) if isinstance(value, str) else 8
                if size >= TASK_SIZE or len(values) >= _ROWS_IN_A_TASK:
                    yield 0, partial(row_records, where, first, values, field)
                    first, values, size = first + len(values), [], 0
    except Exception as error:  # `datasets` promises no type
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
    # A whole split streams; a slice is first loaded into the cache of `datasets`, which alone can slice.
    streams = "[" not in (split or "") and "+" not in (split or "")
    given: dict[str, Any] = {"data_files": list(source[1:])} if len(source) > 1 else {"name": subset}
    return datasets.load_dataset(name, split=split or "train", streaming=streams, **given)


def _column(batch: Any, field: str) -> list[Any]:
    """The values of a field that is a column of an Arrow batch or inside it."""
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
