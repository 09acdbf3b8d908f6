"""Documents above the largest size, in memory that does not grow with them.

Such a document is split into consecutive documents, refused or skipped. Its text is never held: a long JSON line is
scanned as it streams by, the text goes to a file without a name, and from there in pieces. Its hash, which decides
the side of the split, is that of the whole text, so all of its pieces fall on the side of an unsplit copy.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

from data.prepare.compressed import DamagedFile
from data.prepare.records import (
    EMPTY,
    NOT_AN_OBJECT,
    NOT_JSON,
    NOT_UTF8,
    Record,
    Single,
    Task,
    digest_side,
    not_a_string,
    without_field,
)

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
