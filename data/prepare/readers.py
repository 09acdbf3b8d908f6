"""A file's bytes in bounded pieces, unpacked by its ending in any spelling: .gz, .bz2, .xz, .zst.

Records, and tasks: bounded pieces of input that are cut in one process and read in another.

A task carries what is needed to read it, so that any process gives the same records. Cutting is cheap, reading (JSON,
UTF-8) is left to the processes that tokenize.

Documents above the largest size, in memory that does not grow with them.

Such a document is split into consecutive documents, refused or skipped. Its text is never held: a long JSON line is
scanned as it streams by, the text goes to a file without a name, and from there in pieces. Its hash, which decides
the side of the split, is that of the whole text, so all of its pieces fall on the side of an unsplit copy.

JSON Lines and text files, cut into tasks as they stream by; compressed or not.

Tables, row by row: Parquet files, `datasets` folders that `save_to_disk` wrote, and datasets of the hub.

What a corpus is made of: files by patterns, or a dataset by name, as parts that can be read any number of times.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import hashlib
import importlib
import json
import lzma
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol

READ_BYTES = 1 << 20
_ENDINGS: dict[str, str] = {".gz": "gzip", ".gzip": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".gzip": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
# Archives of several files, and compressions that we have no reader for.
_REFUSED = (".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".lz4", ".br", ".lzma", ".z", ".lzo", ".sz")
_LARGEST_WINDOW = 1 << 31  # of `zstd --long=31`; the memory is taken only for files that ask for it

# What is read at once unpacks as a whole, to 30,000 times its size at worst.
_ZSTANDARD_READ_BYTES = 1 << 13

# Called with the position in the packed file, now and then.
Watch = Callable[[int], None]


class DamagedFile(ValueError):
    """What a file holds cannot be unpacked."""


def refuse_archives(path: Path) -> None:
    """Raise ValueError for a file that `unpacked` cannot read by its name."""
    endings = [ending.lower() for ending in path.suffixes[-2:]]
    for ending in endings[-1:] + [ending for ending in endings[:-1] if ending == ".tar"]:
        if ending in _REFUSED:
            raise ValueError(
                f"{path} is packed as {ending}; unpack it, or compress each file as .gz, .bz2, .xz or .zst"
            )


def unpacked(path: Path, watch: Watch = lambda position: None) -> Iterator[bytes]:
    """The content of a file, in pieces of at most some MiB, none empty.

    Raises DamagedFile if it is damaged, cut short, or not compressed as its ending says; OSError if it cannot be read.
    """
    ending = path.suffix.lower()
    with open(path, "rb") as file:
        pieces = _unpacked_zstandard(file) if ending == ".zst" else _read(_OPENERS.get(ending, _as_it_is)(file))
        try:
            for piece in pieces:
                watch(file.tell())
                yield piece
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise _damaged(path, ending, error) from error
        except OSError as error:
            # bz2 has no type of its own for damage; errors of the system have a number.
            if error.errno is None:
                raise _damaged(path, ending, error) from error
            raise OSError(error.errno, error.strerror, str(path)) from error


def _damaged(path: Path, ending: str, error: Exception) -> DamagedFile:
    return DamagedFile(
        f"{path} is damaged, was cut short or is not compressed by {_ENDINGS.get(ending, 'its ending')} ({error}); "
        "copy it again, or give it its right ending"
    )


def _as_it_is(file: BinaryIO) -> BinaryIO:
    return file


def _read(file: Any) -> Iterator[bytes]:
    while piece := file.read(READ_BYTES):
        yield piece


def _unpacked_zstandard(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a file. The library's own reader takes a frame that was cut short for a whole one.

    Raises EOFError where one is cut short, and for what is no frame.
    """
    import zstandard  # only who reads such a file needs it

    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    frame: Any = None
    while packed := file.read(_ZSTANDARD_READ_BYTES):
        while packed:
            frame = frame or decompressor.decompressobj()
            try:
                piece = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            if piece:
                yield piece
            packed = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the last frame does not end")


# Of input in a task: enough that sending it costs little, little enough that no core waits for the last one.
TASK_BYTES = 1 << 20
# Stands for the value of a row that has no such field; no table holds it, and it is the same in all processes.
MISSING = ...


class Record(NamedTuple):
    """One record: where it stands, and its text or, if there is none, the problem.

    held_out: the side of the split, where something else than this text decides: the document that it is a part of.
    """

    where: str
    text: str
    problem: str | None = None
    held_out: bool | None = None


class Task(Protocol):
    """A bounded piece of one input."""

    def records(self) -> Iterator[Record]:
        """Its records in order, the same at every call."""


@dataclass(frozen=True)
class JsonLines:
    """Whole lines of a JSON Lines file, the first of them number first_line."""

    path: str
    first_line: int
    data: bytes
    field: str

    def records(self) -> Iterator[Record]:
        for number, line in enumerate(self.data.split(b"\n"), start=self.first_line):
            if line.strip():
                yield record_of_json(f"{self.path}:{number}", line, self.field)


@dataclass(frozen=True)
class TextUnits:
    """Whole lines or paragraphs of a text file, by what separates them; the first line is number first_line."""

    path: str
    first_line: int
    data: bytes
    separator: bytes

    def records(self) -> Iterator[Record]:
        number = self.first_line
        for unit in self.data.split(self.separator):
            text = unit.lstrip(b"\n")
            if text.strip():
                yield record_of_text(f"{self.path}:{number + len(unit) - len(text)}", text.rstrip(b"\n"))
            number += unit.count(b"\n") + self.separator.count(b"\n")


@dataclass(frozen=True)
class TextFiles:
    """Whole text files, each a document: their paths and contents."""

    files: list[tuple[str, bytes]]

    def records(self) -> Iterator[Record]:
        for path, data in self.files:
            yield record_of_text(path, data)


@dataclass(frozen=True)
class Rows:
    """Values of one column, the first of them in row number first_row."""

    where: str
    first_row: int
    values: list[Any]
    field: str

    def records(self) -> Iterator[Record]:
        for number, value in enumerate(self.values, start=self.first_row):
            yield record_of_value(f"{self.where}, row {number}", value, self.field)


@dataclass(frozen=True)
class Single:
    """One record that was read already: a part of a huge document, or what is wrong with one.

    huge: documents above the limit that it stands for: 1 for the first part of one, or for one that is skipped.
    """

    record: Record | None
    huge: int = 0

    def records(self) -> Iterator[Record]:
        if self.record is not None:
            yield self.record


def record_of_json(where: str, line: bytes, field: str) -> Record:
    """The record of a line of JSON."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Record(where, "", NOT_UTF8)
    except (ValueError, RecursionError):
        return Record(where, "", NOT_JSON)
    if not isinstance(value, dict):
        return Record(where, "", NOT_AN_OBJECT)
    return record_of_value(where, value.get(field, MISSING), field)


def record_of_value(where: str, value: Any, field: str) -> Record:
    """The record of a field's value, which may be of any type, or MISSING."""
    if value is MISSING:
        return Record(where, "", without_field(field))
    if not isinstance(value, str):
        return Record(where, "", not_a_string(field))
    if not value.strip():
        return Record(where, "", EMPTY)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        return Record(where, "", NOT_UTF8)
    return Record(where, value)


def record_of_text(where: str, data: bytes) -> Record:
    """The record of a text file's bytes, or of a line or paragraph of one."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return Record(where, "", NOT_UTF8)
    return Record(where, text) if text.strip() else Record(where, "", EMPTY)


NOT_UTF8 = "not UTF-8"
NOT_JSON = "not JSON (one object a line is read)"
NOT_AN_OBJECT = "not a JSON object"
EMPTY = "empty"


def without_field(field: str) -> str:
    """The problem of a row or an object that has no such field."""
    return f"without a field {field!r}"


def not_a_string(field: str) -> str:
    """The problem of a field whose value is no string."""
    return f"whose field {field!r} is no string"


def digest_side(digest: bytes, share: float) -> bool:
    """Whether the document with this sha256 of its UTF-8 is for validation."""
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is for validation: about `share` of all are; equal documents are on the same side."""
    return digest_side(hashlib.sha256(text.encode("utf-8")).digest(), share)


POLICIES = ("split", "refuse", "skip")
SMALLEST_LIMIT = 64
# A document has at most a token for each byte and a few more, and the index counts them in an int32.
LARGEST_LIMIT = 1 << 30


@dataclass(frozen=True)
class Limit:
    """The largest document in bytes of UTF-8, and what becomes of larger ones: a row of POLICIES.

    validation: the share of documents held out. scratch: where nameless files go, None for the system's folder.
    """

    max_bytes: int
    policy: str
    validation: float
    scratch: Path | None = None

    def __post_init__(self) -> None:
        if not SMALLEST_LIMIT <= self.max_bytes <= LARGEST_LIMIT:
            raise ValueError(
                f"the largest document is {self.max_bytes} bytes; it must be from {SMALLEST_LIMIT} to {LARGEST_LIMIT}"
            )
        if self.policy not in POLICIES:
            raise ValueError(f"huge documents are to {self.policy!r}; choose one of {', '.join(POLICIES)}")

    def exceeded_by(self, text: str) -> bool:
        """Whether the text is longer in UTF-8."""
        if len(text) > self.max_bytes:
            return True
        return 4 * len(text) > self.max_bytes and len(text.encode("utf-8")) > self.max_bytes

    def records_of(self, record: Record) -> list[Single]:
        """What becomes of a record that exceeds the limit, its text in memory."""
        data = record.text.encode("utf-8")
        held_out = digest_side(hashlib.sha256(data).digest(), self.validation)
        return list(self._singles(record.where, BytesIO(data), len(data), held_out))

    def _singles(self, where: str, file: IO[bytes], size: int, held_out: bool) -> Iterator[Single]:
        if self.policy == "refuse":
            raise ValueError(
                f"{where} is a document of {size:,} bytes, above the largest size of {self.max_bytes:,}; allow more "
                "with --max-document-bytes, or let --huge split or skip it"
            )
        if self.policy == "skip":
            yield Single(None, huge=1)
            return
        for number, text in enumerate(_pieces(file, self.max_bytes)):
            yield Single(Record(where, text, held_out=held_out), huge=int(number == 0))


class LongText:
    """A text of any size on its way to tokens: hashed, and written to a file that is gone with the process."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._file = tempfile.TemporaryFile(dir=limit.scratch)  # noqa: SIM115 - closed by `tasks` or `close`
        self._digest = hashlib.sha256()
        self._size = 0
        self._is_blank = True

    def write(self, text: str) -> None:
        """Append. Raises UnicodeEncodeError for half a surrogate pair."""
        data = text.encode("utf-8")
        self._is_blank = self._is_blank and not text.strip()
        self._digest.update(data)
        self._size += len(data)
        self._file.write(data)

    def close(self) -> None:
        """Let go of the text."""
        self._file.close()

    def tasks(self, where: str) -> Iterator[Task]:
        """The text as tasks: whole if it is within the limit after all, else as the policy says."""
        self._file.seek(0)
        try:
            if self._is_blank:
                yield Single(Record(where, "", EMPTY))
            elif self._size <= self._limit.max_bytes:
                yield Single(Record(where, self._file.read().decode("utf-8")))
            else:
                held_out = digest_side(self._digest.digest(), self._limit.validation)
                yield from self._limit._singles(where, self._file, self._size, held_out)
        finally:
            self._file.close()


def tasks_of_long_text(where: str, pieces: Iterable[bytes], limit: Limit) -> Iterator[Task]:
    """The tasks of a plain text that comes in pieces."""
    text = LongText(limit)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in pieces:
            text.write(decoder.decode(piece))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        text.close()
        yield Single(Record(where, "", NOT_UTF8))
        return
    yield from text.tasks(where)


def tasks_of_long_line(where: str, pieces: Iterable[bytes], field: str, limit: Limit) -> Iterator[Task]:
    """The tasks of a line of JSON that comes in pieces."""
    scanner = _LineScanner(pieces, field, limit)
    try:
        text, problem = scanner.text(), None
    except DamagedFile:
        raise
    except UnicodeError:
        problem = NOT_UTF8
    except (ValueError, RecursionError):
        problem = NOT_JSON
    except _OtherProblem as error:
        problem = str(error)
    if problem is not None:
        scanner.close()
        yield Single(Record(where, "", problem))
    else:
        yield from text.tasks(where)


class _OtherProblem(Exception):
    pass


_STRUCTURE = re.compile(r'["{}\[\],:]')
# As far as it is whole: what is left is a quote, an escape that was cut in the middle, or wrong.
_WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_LONGEST_ESCAPE = 6
_PLACEHOLDER = '"long"'
_KEPT_CHARACTERS = 1 << 16


class _LineScanner:
    """One line of JSON, read in pieces: the text of a field at its top goes to a LongText.

    What is left when long strings are taken out is a short line of JSON; the standard library judges it.
    """

    def __init__(self, pieces: Iterable[bytes], field: str, limit: Limit) -> None:
        self._pieces = iter(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._field = field
        self._limit = limit
        self._buffer, self._position = "", 0
        self._skeleton: list[str] = []
        self._skeleton_size = 0
        self._text: LongText | None = None

    def close(self) -> None:
        """Read to the end of the line and let go of the text."""
        for _ in self._pieces:
            pass
        if self._text is not None:
            self._text.close()

    def text(self) -> LongText:
        """Raises ValueError for what is no JSON, UnicodeError, or _OtherProblem."""
        depth = 0
        last_string: str | None = None
        key: str | None = None  # of the value to come, at the top
        while True:
            found = _STRUCTURE.search(self._buffer, self._position)
            self._keep(self._buffer[self._position : found.start() if found else len(self._buffer)])
            if found is None:
                self._position = len(self._buffer)
                if not self._fill():
                    break
                continue
            self._position = found.end()
            mark = found[0]
            if mark == '"':
                last_string = self._string(wanted=depth == 1 and key == self._field)
                continue
            self._keep(mark)
            if mark in "{[":
                depth += 1
            elif mark in "}]":
                depth -= 1
            elif depth == 1:
                key = last_string if mark == ":" else None
        value = json.loads("".join(self._skeleton))
        if not isinstance(value, dict):
            raise _OtherProblem(NOT_AN_OBJECT)
        if self._field not in value:
            raise _OtherProblem(without_field(self._field))
        if not isinstance(value[self._field], str) or self._text is None:
            raise _OtherProblem(not_a_string(self._field))
        return self._text

    def _fill(self) -> bool:
        """Read on; False at the end of the line."""
        piece = next(self._pieces, None)
        text = self._decoder.decode(piece or b"", final=piece is None)
        self._buffer = self._buffer[self._position :] + text
        self._position = 0
        return piece is not None

    def _keep(self, skeleton: str) -> None:
        self._skeleton.append(skeleton)
        self._skeleton_size += len(skeleton)
        if self._skeleton_size > self._limit.max_bytes + _KEPT_CHARACTERS:
            raise _OtherProblem(f"whose other fields than {self._field!r} are above the largest size")

    def _string(self, wanted: bool) -> str | None:
        """Read a string behind its first quote; what it says, None if it is long or the wanted one."""
        if wanted:
            if self._text is not None:
                self._text.close()  # a field that comes twice counts the last time, as in the standard library
            self._text = LongText(self._limit)
        kept: list[str] | None = [] if not wanted else None
        while True:
            match = _WHOLE_CHARACTERS.match(self._buffer, self._position)
            assert match is not None  # it matches the empty string
            closed = self._buffer.startswith('"', match.end())
            if not closed and len(self._buffer) - match.end() > _LONGEST_ESCAPE:
                raise ValueError("no such escape")
            raw = match[0]
            end = match.end()
            text = json.loads(f'"{raw}"')
            if not closed and text and "\ud800" <= text[-1] <= "\udbff":
                # The other half of a pair of escapes may follow.
                text, end, raw = text[:-1], end - _LONGEST_ESCAPE, raw[:-_LONGEST_ESCAPE]
            if wanted:
                assert self._text is not None
                self._text.write(text)
            elif kept is not None:
                kept.append(raw)
                if sum(map(len, kept)) > _KEPT_CHARACTERS:
                    kept = None
            self._position = end + 1 if closed else end
            if closed:
                self._keep(_PLACEHOLDER if kept is None else f'"{"".join(kept)}"')
                return None if kept is None else json.loads(f'"{"".join(kept)}"')
            if not self._fill():
                raise ValueError("a string does not end")


def _pieces(file: IO[bytes], limit: int) -> Iterator[str]:
    """The text of a file in pieces of at most `limit` bytes, cut before white space, blank ones left out.

    Where `limit` bytes have no white space they are cut at a character.
    """
    rest = b""
    while True:
        data = rest + file.read(limit + 1 - len(rest))
        if len(data) <= limit:
            text = data.decode("utf-8")
            if text.strip():
                yield text
            return
        cut = max(data.rfind(blank, 1) for blank in (b" ", b"\n", b"\t", b"\r"))
        if cut < 1:
            cut = limit
            while cut > 1 and data[cut] & 0xC0 == 0x80:  # not the first byte of a character
                cut -= 1
        text = data[:cut].decode("utf-8")
        if text.strip():
            yield text
        rest = data[cut:]


SEPARATORS = {"paragraph": b"\n\n", "line": b"\n"}
TEXT_UNITS = ("document", *SEPARATORS)
_FILES_IN_A_TASK = 256
_MARK = b"\xef\xbb\xbf"  # which some editors begin UTF-8 with


class LongUnit:
    """A line or paragraph that is too long to hold: the number of its first line, and its bytes to be read once."""

    def __init__(self, number: int, pieces: Iterator[bytes]) -> None:
        self.number = number
        self.newlines = 0  # read so far
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self.newlines += piece.count(b"\n")
            yield piece


class Cutter:
    """Cuts a stream of bytes into blocks of whole lines or paragraphs, of some TASK_BYTES, and units above `longest`.

    Iterates over (number of its first line, block) and LongUnit. What is not read of a LongUnit is skipped. A separator
    that reaches over two pieces is not seen.
    """

    def __init__(self, pieces: Iterator[bytes], longest: int, separator: bytes = b"\n") -> None:
        self._pieces = pieces
        self._longest = longest
        self._separator = separator
        self._waiting: bytes | None = None  # to be read again

    def __iter__(self) -> Iterator[tuple[int, bytes] | LongUnit]:
        number = 1
        whole: list[bytes] = []  # lines with their ends
        begun: list[bytes] = []  # the line after them
        whole_size = begun_size = 0
        while (piece := self._next()) is not None:
            end = piece.rfind(self._separator)
            if end >= 0:
                end += len(self._separator)
                whole += [*begun, piece[:end]]
                whole_size += begun_size + end
                begun, begun_size = [], 0
            if end < len(piece):
                begun.append(piece[max(end, 0) :])
                begun_size += len(begun[-1])
            is_long = begun_size > self._longest
            if whole and (is_long or whole_size >= TASK_BYTES):
                block = b"".join(whole)
                yield number, block
                number += block.count(b"\n")
                whole, whole_size = [], 0
            if is_long:
                unit = LongUnit(number, chain(begun, self._rest_of_unit()))
                yield unit
                for _ in unit:
                    pass
                number += unit.newlines + self._separator.count(b"\n")
                begun, begun_size = [], 0
        if whole or begun:
            yield number, b"".join(whole + begun)

    def _next(self) -> bytes | None:
        piece, self._waiting = self._waiting, None
        return piece if piece is not None else next(self._pieces, None)

    def _rest_of_unit(self) -> Iterator[bytes]:
        while (piece := self._next()) is not None:
            end = piece.find(self._separator)
            if end >= 0:
                self._waiting = piece[end + len(self._separator) :] or None
                yield piece[:end]
                return
            yield piece


def json_tasks(path: Path, field: str, limit: Limit, watch: Watch) -> Iterator[Task]:
    """A JSON Lines file: an object a line, the text under `field`."""
    for block in Cutter(_without_mark(unpacked(path, watch)), limit.max_bytes):
        if isinstance(block, LongUnit):
            yield from tasks_of_long_line(f"{path}:{block.number}", block, field, limit)
        else:
            yield JsonLines(str(path), block[0], block[1], field)


def unit_tasks(path: Path, unit: str, limit: Limit, watch: Watch) -> Iterator[Task]:
    """A text file, each line or paragraph (what blank lines separate) a document."""
    separator = SEPARATORS[unit]
    for block in Cutter(_plain_text(path, watch), limit.max_bytes, separator):
        if isinstance(block, LongUnit):
            yield from tasks_of_long_text(f"{path}:{block.number}", block, limit)
        else:
            yield TextUnits(str(path), block[0], block[1], separator)


def document_tasks(paths: list[Path], limit: Limit, watch: Watch) -> Iterator[Task]:
    """Text files, each a document; small ones share a task. Positions are counted over all of them together."""
    files: list[tuple[str, bytes]] = []
    size = position = 0
    for path in paths:
        pieces = _plain_text(path, partial(_watch_behind, watch, position))
        read: list[bytes] = []
        read_size = 0
        for piece in pieces:
            read.append(piece)
            read_size += len(piece)
            if read_size > limit.max_bytes:
                if files:
                    yield TextFiles(files)
                    files, size = [], 0
                yield from tasks_of_long_text(str(path), chain(read, pieces), limit)
                break
        else:
            files.append((str(path), b"".join(read)))
            size += read_size
            if size >= TASK_BYTES or len(files) >= _FILES_IN_A_TASK:
                yield TextFiles(files)
                files, size = [], 0
        position += path.stat().st_size
        watch(position)
    if files:
        yield TextFiles(files)


def _watch_behind(watch: Watch, before: int, inside: int) -> None:
    watch(before + inside)


def _without_mark(pieces: Iterator[bytes]) -> Iterator[bytes]:
    begin = b""
    for piece in pieces:
        begin += piece
        if len(begin) >= len(_MARK):
            break
    begin = begin.removeprefix(_MARK)
    if begin:
        yield begin
    yield from pieces


def _plain_text(path: Path, watch: Watch) -> Iterator[bytes]:
    r"""A text file's bytes, "\r\n" as "\n"; two newlines are never torn apart if no third is with them."""
    held = b""
    for piece in _without_mark(unpacked(path, watch)):
        piece, held = held + piece, b""
        if piece.endswith(b"\r"):
            piece, held = piece[:-1], b"\r"
        piece = piece.replace(b"\r\n", b"\n")
        if not held and piece.endswith(b"\n") and not piece.endswith(b"\n\n"):
            piece, held = piece[:-1], b"\n"
        if piece:
            yield piece
    if held:
        yield held


_ROWS_AT_ONCE = 1000
_PARQUET_ROWS_AT_ONCE = 128  # of any size each; the reader unpacks them at once


def package(name: str, what: str) -> Any:
    """A package that not everybody installs; `what` needs it. Raises ValueError, with the remedy, where it is not."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = name.partition(".")[0].replace("pyarrow", "parquet")
        raise ValueError(f'{what} needs a package ({error}); pip install "megatron_fp4[{extra}]"') from error


def parquet_tasks(path: Path, field: str, limit: Limit, watch: Watch) -> Iterator[Task]:
    """A Parquet file: its column `field`. Raises ValueError if it is damaged or none."""
    pq = package("pyarrow.parquet", str(path))
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            rows, size = file.metadata.num_rows, path.stat().st_size

            def columns() -> Iterator[list[Any]]:
                if field not in file.schema_arrow.names:
                    yield from missing(rows)
                    return
                number = 0
                for batch in file.iter_batches(_PARQUET_ROWS_AT_ONCE, columns=[field]):
                    number += batch.num_rows
                    watch(size * number // max(rows, 1))
                    yield _values(batch.column(0))

            yield from row_tasks(str(path), columns(), field, limit)
    except (package("pyarrow", str(path)).ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(
            f"{path} is damaged or no Parquet file ({_in_a_line(error)}); copy or write it again"
        ) from error


def row_tasks(where: str, batches: Iterable[list[Any]], field: str, limit: Limit) -> Iterator[Task]:
    """Values of one column, batch by batch."""
    first = 1  # row of the first of `values`
    values: list[Any] = []
    size = 0
    for batch in batches:
        for value in batch:
            if isinstance(value, str) and len(value) * 4 > limit.max_bytes:
                record = record_of_value(f"{where}, row {first + len(values)}", value, field)
                if record.problem is None and limit.exceeded_by(value):
                    if values:
                        yield Rows(where, first, values, field)
                    yield from limit.records_of(record)
                    first, values, size = first + len(values) + 1, [], 0
                    continue
            values.append(value)
            size += len(value) if isinstance(value, str) else 8
            if size >= TASK_BYTES or len(values) >= 8 * _ROWS_AT_ONCE:
                yield Rows(where, first, values, field)
                first, values, size = first + len(values), [], 0
    if values:
        yield Rows(where, first, values, field)


def is_saved_folder(name: str) -> bool:
    """Whether `save_to_disk` wrote this folder: one split, or several of a dictionary."""
    return any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))


def saved_folder_tasks(name: str, split: str | None, field: str, limit: Limit, watch: Watch) -> Iterator[Task]:
    """A folder that `datasets` saved, or a split or slice of it (`train[:1%]`). Raises ValueError if it is damaged."""
    datasets = package("datasets", name)
    where = " ".join(filter(None, (name, split)))
    try:
        found = datasets.load_from_disk(name)
    except Exception as error:  # it promises no type
        raise ValueError(f"datasets cannot read {where}: {_in_a_line(error)}") from error
    splits = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    if split is None:
        if len(splits) > 1:
            raise ValueError(f"{name} has several splits; name one with --split: {', '.join(splits)}")
        tables = list(splits.values())
    else:
        try:
            lengths = {key: len(table) for key, table in splits.items()}
            chosen = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
            tables = [splits[part.splitname].select(range(part.from_, part.to)) for part in chosen]
        except (ValueError, KeyError, AssertionError) as error:
            raise ValueError(
                f"{name} has no split {split!r} ({_in_a_line(error)}); its splits: {', '.join(splits)}"
            ) from error
    total, size = sum(map(len, tables)), size_of(Path(name))

    def columns() -> Iterator[list[Any]]:
        number = 0
        for table in tables:
            if field not in table.column_names:
                yield from missing(len(table))
                continue
            for batch in table.select_columns([field]).with_format("arrow").iter(_ROWS_AT_ONCE):
                number += batch.num_rows
                watch(number * size // total)
                yield _values(batch.column(0))

    yield from row_tasks(where, _explained(where, columns()), field, limit)


def _values(column: Any) -> list[Any]:
    """The values of an Arrow column; those that are not UTF-8 as strings that do not encode."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(package("pyarrow", "text that is not UTF-8").large_binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "surrogateescape") for value in values]


def missing(rows: int) -> Iterator[list[Any]]:
    """So many rows without the field."""
    for start in range(0, rows, _ROWS_AT_ONCE):
        yield [MISSING] * min(_ROWS_AT_ONCE, rows - start)


def hub_tasks(name: str, split: str, field: str, subset: str | None, limit: Limit) -> Iterator[Task]:
    """A split of a dataset of the hub, or of a local folder of data files, as `datasets` reads it.

    A whole split streams; a slice (`train[:1%]`) is first loaded into the cache of `datasets`, which alone can slice.
    Raises ValueError for whatever it raises.
    """
    datasets = package("datasets", name)
    where = " ".join(filter(None, (name, subset, split)))

    def columns() -> Iterator[list[Any]]:
        rows: Any = datasets.load_dataset(name, subset, split=split, streaming="[" not in split and "+" not in split)
        if rows.column_names:
            # Reading the others takes time; if there is no such field, one column counts the rows.
            rows = rows.select_columns([field if field in rows.column_names else rows.column_names[0]])
        for batch in rows.iter(_ROWS_AT_ONCE):
            values = next(iter(batch.values()))
            yield values if field in batch else [MISSING] * len(values)

    yield from row_tasks(where, _explained(where, columns()), field, limit)


def _explained(where: str, rows: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """The rows; ValueError for whatever `datasets` raises, which promises no type."""
    try:
        yield from rows
    except Exception as error:
        raise ValueError(f"datasets cannot read {where}: {_in_a_line(error)}") from error


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


FORMATS = ("json", "parquet", "text")
_FILES_AT_ONCE = 1000


@dataclass(frozen=True)
class Part:
    """A piece of a corpus: a file, some small text files, or a dataset.

    tasks: called with the limit of documents and a function that hears the position in the part's `size`; gives the
    same tasks each time. files: what it is read from, which must not change while it is; none for a dataset.
    """

    tasks: Callable[[Limit, Watch], Iterator[Task]]
    files: tuple[Path, ...] = ()

    def stamps(self) -> list[tuple[str, int, int]]:
        """(path, bytes, time of the last change in ns) of each file: what tells a changed one."""
        found = [(path, path.stat()) for path in self.files]
        return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files of all paths and glob patterns (`**` too), each pattern's sorted, none twice.

    Raises FileNotFoundError for a pattern without a file.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        literal = Path(pattern)
        names = [pattern] if literal.is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files and literal.is_dir():
            raise FileNotFoundError(
                f"{pattern} is a folder; give a quoted pattern of its files: '{pattern}/**/*.jsonl'"
            )
        if not files:
            raise FileNotFoundError(f"no file matches {pattern!r}; give a path or a quoted pattern: 'corpus/*.jsonl'")
        for file in files:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def open_files(format: str, files: Sequence[Path], field: str = "text", text_unit: str = "document") -> list[Part]:
    """The files as parts of a corpus, in their order.

    format "json": one JSON object a line, the text under `field`. "parquet": the text is the column `field`. "text":
    plain UTF-8; a document is a whole file, or with text_unit a paragraph or a line of it. JSON and text may be
    compressed: .gz, .bz2, .xz, .zst.

    Raises ValueError for another format or unit, an archive, or a package that is missing; OSError for a file that
    cannot be opened.
    """
    if format not in FORMATS:
        raise ValueError(f"the format is {format!r}; choose one of {', '.join(FORMATS)}")
    if text_unit not in TEXT_UNITS:
        raise ValueError(f"the unit of text is {text_unit!r}; choose one of {', '.join(TEXT_UNITS)}")
    if format == "parquet":
        package("pyarrow", "--format parquet")
    for path in files:
        refuse_archives(path)
        with open(path, "rb"):
            pass  # rather now than after hours
    if format == "text" and text_unit == "document":
        groups = [tuple(files[i : i + _FILES_AT_ONCE]) for i in range(0, len(files), _FILES_AT_ONCE)]
        return [Part(partial(document_tasks, list(group)), group) for group in groups]
    if format == "text":
        return [Part(partial(unit_tasks, path, text_unit), (path,)) for path in files]
    read = json_tasks if format == "json" else parquet_tasks
    return [Part(partial(read, path, field), (path,)) for path in files]


def open_dataset(name: str, split: str | None, field: str = "text", subset: str | None = None) -> list[Part]:
    """One split, or slice of a split, of a dataset as one part of a corpus.

    name: a folder that `save_to_disk` wrote, a local folder of data files, or a name of the Hugging Face hub, which
    is read over the network each time. Raises ValueError for a split or subset that is missing or means nothing, and
    where the package `datasets` is not installed.
    """
    package("datasets", f"the dataset {name}")
    if is_saved_folder(name):
        if subset is not None:
            raise ValueError(f"{name} was written by save_to_disk and has no subset {subset!r}; leave it out")
        files = tuple(sorted(path for path in Path(name).rglob("*") if path.is_file()))
        return [Part(partial(saved_folder_tasks, name, split, field), files)]
    if split is None:
        raise ValueError(f"of the dataset {name} a split is needed, such as train or train[:1%]; name it with --split")
    return [Part(partial(_hub_tasks, name, split, field, subset))]


def _hub_tasks(name: str, split: str, field: str, subset: str | None, limit: Limit, watch: Watch) -> Iterator[Task]:
    return hub_tasks(name, split, field, subset, limit)
