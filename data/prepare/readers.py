"""Reads a corpus, files or a dataset, as a stream of tasks.

A task is a piece of input of limited size: a `functools.partial` of one of the `*_records` functions below that
includes its input, so it gives the same records in every process. Cutting is cheap; workers parse JSON.

Of a table one column is read, as bytes or strings; no reader guesses types, and other columns do not matter.
"""

from __future__ import annotations

import bz2
import codecs
import csv
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
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

FORMATS = ("json", "text")
# Characters of input in a task: large enough that sending it is cheap, small enough that no core waits long at the end.
TASK_SIZE = 1 << 20
READ_BYTES = 1 << 20
MAX_CHARACTERS = 1 << 30
"""The longest line or text file that is read, in characters: it must fit into memory."""
_FILES_IN_A_TASK = 256
_FILES_IN_A_PART = 1000
_ROWS_AT_ONCE = 1000  # a text column of so many rows fits into memory
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
NOT_JSON = "not JSON (one object a line is read)"
_NOT_AN_OBJECT = "not a JSON object"
_NOT_A_ROW = "not a row of CSV with a cell for each name in the first line"
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
    """A part of a corpus: a file, some small text files, or a dataset. tasks: the same at each call."""

    tasks: Callable[[], Tasks]
    files: tuple[Path, ...] = ()

    def stamp(self) -> list[Any]:
        """[bytes of the files, hash of their paths, sizes and modification times]."""
        states = [(str(path), path.stat()) for path in self.files]
        facts = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in states]
        return [sum(size for _, size, _ in facts), hashlib.sha256(repr(facts).encode()).hexdigest()]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files of all paths and glob patterns (also with `**`), sorted within each pattern, without duplicates. Raises
    FileNotFoundError for a pattern without a file."""
    by_target: dict[Path, Path] = {}
    for pattern in patterns:
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            what = "is a folder" if Path(pattern).is_dir() else "matches no file"
            raise FileNotFoundError(f"{pattern} {what}; give a path or a quoted pattern of files: 'corpus/**/*.jsonl'")
        for file in files:
            by_target.setdefault(file.resolve(), file)
    return list(by_target.values())


def open_files(format: str, files: Sequence[Path], field: str = "text") -> list[Part]:
    """The files, plain or compressed as .gz, .bz2, .xz or .zst, as parts of a corpus, in this order.

    format: "json": one JSON object per line with the text in `field`; `a.b` is the field b of the object a, unless
    there is a field with the name "a.b". "text": UTF-8; each file is a document.

    Raises ValueError for an archive and for a table; OSError for a file that cannot be opened.
    """
    assert format in FORMATS, format
    for path in files:
        endings = [ending.lower() for ending in path.suffixes[-2:]]
        if refused := [e for e in endings if e in _REFUSED and (e == endings[-1] or e == ".tar")]:
            raise ValueError(f"{path} is compressed as {refused[-1]}; unpack it, or use .gz, .bz2, .xz or .zst")
        with open(path, "rb") as file:  # a file that cannot be opened fails now, not after hours
            if file.read(4) in (b"PAR1", b"ARRO", b"\xff\xff\xff\xff"):
                raise ValueError(f"{path} is a Parquet or Arrow file, not {format}; give it as --dataset")
    if format == "json":
        return [Part(partial(_json_tasks, path, field), (path,)) for path in files]
    groups = [tuple(files[i : i + _FILES_IN_A_PART]) for i in range(0, len(files), _FILES_IN_A_PART)]
    return [Part(partial(_document_tasks, group), group) for group in groups]


def open_dataset(
    names: Sequence[str], split: str | None = None, field: str = "text", subset: str | None = None
) -> list[Part]:
    """One split of a dataset as parts of a corpus.

    names: a folder written by `save_to_disk`, a folder of data files, a name on the Hugging Face hub, or data files and
    patterns of them; their endings are those of TABLES, and CSV, JSON and text may be compressed. split: None if there
    is only one; on the hub it may be a slice (`train[:1%]`).

    Raises FileNotFoundError for a pattern without a file; ValueError for a split or subset that is missing or has no
    effect, a file of unknown kind or whose field is missing or not text, and for a package that is not installed.
    """
    first = Path(names[0])
    if len(names) > 1 or first.is_file() or glob.has_magic(names[0]) or first.suffix.lower() in TABLES:
        if subset is not None or split not in (None, "train"):
            option = f"--split {split}" if subset is None else f"--subset {subset}"
            raise ValueError(f"{option} has no effect with files, which are read as a whole; leave it out")
        files = find_files(names)
    elif first.is_dir():
        files = _files_of_split(names[0], split, subset)
    elif split is None:
        raise ValueError(f"--dataset {names[0]} needs --split, such as train or train[:1%]")
    else:
        return [Part(partial(_hub_tasks, names[0], split, field, subset))]
    parts = []
    for path in files:
        endings = [ending.lower() for ending in path.suffixes]
        kinds = [ending for ending in endings if ending in TABLES]
        if not kinds or endings[-1] not in (kinds[-1], *_DECOMPRESSORS, ".zst"):
            raise ValueError(f"--dataset {path}: give files ending in {', '.join(TABLES)}")
        tasks = partial(TABLES[kinds[-1]], path, field)
        next(tasks(), None)  # a wrong column fails now, not after hours
        parts.append(Part(tasks, (path,)))
    return parts


def _files_of_split(folder: str, split: str | None, subset: str | None) -> list[Path]:
    """The data files of a split of a folder; `datasets` knows which they are."""
    if any((Path(folder) / file).is_file() for file in ("state.json", "dataset_dict.json")):
        if subset is not None:
            raise ValueError(f"{folder} has no subset {subset!r}; leave it out")
        saved = _call_datasets(folder, lambda datasets: datasets.load_from_disk(folder))
        tables = dict(saved) if isinstance(saved, dict) else {saved.split or "train": saved}
        splits = {str(name): [file["filename"] for file in table.cache_files] for name, table in tables.items()}
        split = next(iter(splits)) if split is None and len(splits) == 1 else split
    else:
        builder = _call_datasets(folder, lambda datasets: datasets.load_dataset_builder(folder, subset))
        splits = {str(name): files for name, files in (builder.config.data_files or {}).items()}
    if split not in splits:
        raise ValueError(f"--dataset {folder}: name one of its splits with --split: {', '.join(splits)}")
    return [Path(file) for file in splits[split]]


def _call_datasets(what: str, call: Callable[[Any], Any]) -> Any:
    """What `call` returns for the package `datasets`. Raises ValueError that names `what`."""
    try:
        import datasets  # an optional package
    except ImportError as error:
        raise _needs_package(error) from error
    try:
        return call(datasets)
    except Exception as error:  # `datasets` raises many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"datasets cannot read {what}: {reason}") from error


def _needs_package(error: ImportError) -> ValueError:
    return ValueError(f"--dataset needs a package ({error}); pip install -e '.[datasets]'")


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
            yield Record(where, "", NOT_JSON)
        else:
            is_object = isinstance(value, dict)
            yield _record(where, _value(value, field), field) if is_object else Record(where, "", _NOT_AN_OBJECT)


def line_records(path: str, first_line: int, text: str) -> Iterator[Record]:
    """The lines of a text file as records. first_line: the number of the first line."""
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=first_line):
        yield _record(f"{path}:{number}", line)


def file_records(files: list[tuple[str, str]]) -> Iterator[Record]:
    """The records of text files, given as (path, text); each is a document."""
    for path, text in files:
        yield _record(path, text)


def row_records(where: str, first_row: int, values: list[Any], field: str) -> Iterator[Record]:
    """The records of values of one column: strings, bytes of UTF-8, None, or errors that say what is wrong with a row.
    first_row: the number of the first value's row, from 1."""
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
    if isinstance(value, ValueError):
        return Record(where, "", str(value))
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str):
        return Record(where, "", f"whose field {field!r} is not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # a surrogate: of bytes that are not UTF-8, or an escape in JSON
        return Record(where, "", _NOT_UTF8)
    return Record(where, value, None if value.strip() else EMPTY)


# Files.


def _json_tasks(path: Path, field: str) -> Tasks:
    for position, line, text in _blocks(path):
        yield position, partial(json_records, str(path), line, text, field)


def _line_tasks(path: Path, field: str) -> Tasks:
    for position, line, text in _blocks(path):
        yield position, partial(line_records, str(path), line, text)


def _document_tasks(paths: Sequence[Path]) -> Tasks:
    files: list[tuple[str, str]] = []
    size = position = 0
    for path in paths:
        text = "".join(block for _, _, block in _blocks(path, in_lines=False, translate=False))
        files.append((str(path), text))
        size += len(text)
        position += path.stat().st_size
        if size >= TASK_SIZE or len(files) >= _FILES_IN_A_TASK:
            yield position, partial(file_records, files)
            files, size = [], 0
    if files:
        yield position, partial(file_records, files)


def _blocks(path: Path, in_lines: bool = True, translate: bool = True) -> Iterator[tuple[int, int, str]]:
    """(position in the file, number of the first line, text) of blocks of complete lines with about TASK_SIZE
    characters each. in_lines: False for one block with the whole file. translate: as for `_text`."""
    position, line, held = 0, 1, ""
    for position, piece in _text(path, translate):
        held += piece
        if in_lines and len(held) >= TASK_SIZE and (end := held.rfind("\n") + 1):
            yield position, line, held[:end]
            line, held = line + held.count("\n", 0, end), held[end:]
        if len(held) > MAX_CHARACTERS:
            raise ValueError(f"{path}: a document after line {line} has over {MAX_CHARACTERS:,} characters; split it")
    if held:
        yield position, line, held


def _text(path: Path, translate: bool = True) -> Iterator[tuple[int, str]]:
    r"""(position after it, piece) of a file's text, without a byte order mark. Bytes that are not UTF-8 become
    surrogates. translate: "\n" ends every line, whatever does so in the file."""
    decoder: Any = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    if translate:
        decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
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


def _row_tasks(where: str, batches: Iterator[tuple[int, list[Any]]], field: str) -> Tasks:
    """batches: (position in the file, values of the next rows)."""
    first, size, position = 1, 0, 0  # the row of the first value, and the characters of all of them
    values: list[Any] = []
    for position, batch in batches:
        for value in batch:
            values.append(value)
            size += len(value) if isinstance(value, str | bytes) else 8
            if size >= TASK_SIZE or len(values) >= _ROWS_IN_A_TASK:
                yield position, partial(row_records, where, first, values, field)
                first, values, size = first + len(values), [], 0
    if values:
        yield position, partial(row_records, where, first, values, field)


def _array_or_json_tasks(path: Path, field: str) -> Tasks:
    """A file that is one array of objects, or has one object on each line."""
    start = next((piece.lstrip() for _, piece in _text(path) if piece.strip()), "")
    if not start.startswith("["):
        return _json_tasks(path, field)
    _, _, text = next(_blocks(path, in_lines=False))
    try:
        objects = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} begins as an array of JSON, but is not one ({error}); correct it") from error
    return _row_tasks(str(path), iter([(0, [_value(each, field) for each in objects])]), field)


def _csv_tasks(path: Path, field: str) -> Tasks:
    """CSV by RFC 4180 with a line of names; each cell is text exactly as it is in the file."""
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        for reached, _, block in _blocks(path, translate=False):
            position = reached
            yield from io.StringIO(block, newline="")

    def batches() -> Iterator[tuple[int, list[Any]]]:
        csv.field_size_limit(MAX_CHARACTERS)
        reader = csv.reader(lines(), strict=True)
        names: list[str] = []
        for number in count():
            row: list[str] = []
            try:
                while not row:  # blank lines
                    row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise ValueError(
                        f"{path}: row {number} opens a quote that is never closed; double the quotes inside of cells"
                    ) from error
            if number == 0:
                names = row
                column = names.index(_column(path, field, names))
            else:
                yield position, [row[column] if len(row) == len(names) else ValueError(_NOT_A_ROW)]

    return _row_tasks(str(path), batches(), field)


def _arrow_tasks(read: Callable[[Path, str], Iterator[Any]], path: Path, field: str) -> Tasks:
    def batches() -> Iterator[tuple[int, list[Any]]]:
        try:
            import pyarrow  # an optional package
        except ImportError as error:
            raise _needs_package(error) from error
        done = 0
        try:
            for batch in read(path, field):
                yield 0, _texts(path, batch, field)
                done += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} cannot be read after row {done} ({reason}); copy it again") from error

    return _row_tasks(str(path), batches(), field)


def _parquet_batches(path: Path, field: str) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        if file.metadata.num_rows:
            _column(path, field, file.schema_arrow.names)
            yield from file.iter_batches(_ROWS_AT_ONCE, columns=[field], use_threads=False)


def _arrow_batches(path: Path, field: str) -> Iterator[Any]:
    """Both formats of Arrow: files, and streams, which `datasets` writes."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            source.seek(0)
            batches = pyarrow.ipc.open_stream(source)
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(start, _ROWS_AT_ONCE)


def _column(where: Path | str, field: str, names: Sequence[str]) -> str:
    """Its name, or the object `a` of the field "a.b". Raises ValueError for none or two."""
    column = next((name for name in (field, field.partition(".")[0]) if name in names), None)
    if column is None:
        shown = ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")
        raise ValueError(f"{where} has no column {field!r}; name one of its columns with --field: {shown}")
    if names.count(column) > 1:
        raise ValueError(f"{where} has {names.count(column)} columns {column!r}; rename all but one")
    return column


def _texts(where: Path | str, batch: Any, field: str) -> list[bytes | None]:
    """The values of a field of an Arrow batch. Raises ValueError for another type than text and bytes."""
    import pyarrow.compute

    name = _column(where, field, batch.schema.names)
    values, inside = batch.column(name), field.removeprefix(name).removeprefix(".")
    try:
        if inside:
            values = pyarrow.compute.struct_field(values, inside.split("."))
        if isinstance(values, pyarrow.RunEndEncodedArray):
            values = pyarrow.compute.run_end_decode(values)
        return values.cast(pyarrow.large_binary()).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"{where}: the field {field!r} of {name} ({batch.column(name).type}) is not text; name another with --field"
        ) from error


def _hub_tasks(name: str, split: str, field: str, subset: str | None) -> Tasks:
    # `datasets` can stream a full split, but loads a split into its cache to slice it.
    streams = "[" not in split and "+" not in split
    where = " ".join(filter(None, (name, subset, split)))

    def batches() -> Iterator[tuple[int, list[Any]]]:
        table = _call_datasets(where, lambda hub: hub.load_dataset(name, subset, split=split, streaming=streams))
        if names := table.column_names:  # some streams do not know their columns before they are read
            table = table.select_columns([_column(where, field, names)])
        rows = table.with_format("arrow").iter(_ROWS_AT_ONCE)
        while (batch := _call_datasets(where, lambda _: next(rows, None))) is not None:
            yield 0, _texts(where, batch, field)

    return _row_tasks(where, batches(), field)


TABLES: dict[str, Callable[[Path, str], Tasks]] = {
    ".parquet": partial(_arrow_tasks, _parquet_batches),
    ".arrow": partial(_arrow_tasks, _arrow_batches),
    ".jsonl": _json_tasks,
    ".json": _array_or_json_tasks,
    ".csv": _csv_tasks,
    ".txt": _line_tasks,
}
"""How to read a data file, by its ending."""
