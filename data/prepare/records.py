"""Records, and tasks: bounded pieces of input that are cut in one process and read in another.

A task carries what is needed to read it, so that any process gives the same records. Cutting is cheap, reading (JSON,
UTF-8) is left to the processes that tokenize.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
