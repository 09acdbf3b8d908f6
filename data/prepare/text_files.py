"""JSON Lines and text files, cut into tasks as they stream by; compressed or not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from data.prepare.compressed import Watch, unpacked
from data.prepare.huge import Limit, tasks_of_long_line, tasks_of_long_text
from data.prepare.records import TASK_BYTES, JsonLines, Task, TextFiles, TextUnits

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
