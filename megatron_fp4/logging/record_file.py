"""A file of JSON lines that survives what happens to disks and processes: `metrics.jsonl`, as bytes.

A line that `write` took is in the file at once (a killed process loses none) and down on the disk after the next `sync`
(a power cut loses none). Until then it is also kept in memory: if the disk refuses a line or a sync, nothing is raised,
and what is missing is written when the disk takes it again.

    metrics.jsonl              one record a line
    metrics.jsonl.damaged      (.1, .2, ...) the whole file as it was, before lines that are no records were taken out
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megatron_fp4.checkpoint.files import sync_folder
from megatron_fp4.logging.outage import RETRY_SECONDS, Outage

# Some 3 MB of training steps, which no host misses.
MAX_PENDING = 10_000
# A record of diagnostics of a large model has some hundred kB; a longer "line" is what a power cut left.
MAX_LINE = 64 * 2**20
EMPTY, UNFINISHED = "empty", "not finished"


class RecordFile:
    """Appends lines to `path`; every method may be called from any thread, and none raises OSError.

    prepare: called before the file is first opened; it may raise OSError, and is then called again at the next try.
    pending: how many lines that are not known to be on the disk are kept in memory.
    """

    def __init__(
        self,
        path: Path,
        prepare: Callable[[], None] = lambda: None,
        *,
        pending: int = MAX_PENDING,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.path, self.lost = path, 0
        self.outage = Outage(str(path), f"records are kept in memory, the last {pending:,} of them", retry_seconds)
        self._prepare, self._max_pending = prepare, pending
        self._lock, self._sync_lock = threading.RLock(), threading.Lock()
        self._descriptor: int | None = None
        self._prepared = self._closed = False
        # Lines behind byte `_synced`, the first `_written` of which are in the file, up to byte `_end`.
        self._lines: list[bytes] = []
        self._written = self._synced = self._end = 0
        self._rollbacks = 0
        with self._lock:
            self._attempt(self._open)

    def write(self, line: str) -> None:
        """Append `line`, which has no line break."""
        with self._lock:
            assert not self._closed
            self._lines.append(line.encode(errors="backslashreplace") + b"\n")
            if self.outage.may_try:
                self._attempt(self._push)
            if self.outage.on and len(self._lines) > self._max_pending:
                del self._lines[min(self._written, len(self._lines) - 1)]
                self.lost += 1
            full = len(self._lines) >= self._max_pending
        if full and not self.outage.on:
            self.sync()

    def sync(self) -> None:
        """Return when all that was written before is on the disk, or the disk has refused it, which was said then.

        Other threads may go on to write meanwhile.
        """
        with self._sync_lock:
            with self._lock:
                if self._closed or not self._attempt(self._push):
                    return
                assert self._descriptor is not None
                # Of its own, because a write that fails meanwhile closes the other.
                descriptor, count, end, rollbacks = os.dup(self._descriptor), self._written, self._end, self._rollbacks
            try:
                os.fsync(descriptor)
            except OSError as error:
                with self._lock:
                    # What was handed over since the last sync may be gone from the system's cache: write it again.
                    self._drop_descriptor()
                    self._written, self._end = 0, self._synced
                    self._rollbacks += 1
                    self.outage.failed(error)
                return
            finally:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            with self._lock:
                if rollbacks == self._rollbacks:
                    del self._lines[:count]
                    self._written -= count
                    self._synced = end

    def close(self) -> None:
        """Sync and close; what the disk still refuses is lost, and said to be. A second call does nothing."""
        self.sync()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_descriptor()
            missing = len(self._lines) - self._written + self.lost
            if self.outage.on and missing:
                self.outage.failed(OSError(f"{missing} records are lost"))

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            self._drop_descriptor()
            self.outage.failed(error)
            return False
        if self.outage.on:
            lost, self.lost = self.lost, 0
            self.outage.worked(f"{lost} records are lost, all others are written" if lost else "nothing is lost")
            if lost:
                step = 0
                with contextlib.suppress(ValueError, LookupError, TypeError):
                    step = json.loads(self._lines[-1])["step"]
                note = {"kind": "event", "step": step, "event": "records_lost", "count": lost}
                self._lines.append(json.dumps(note).encode() + b"\n")
                return self._attempt(self._push)
        return True

    def _push(self) -> None:
        """Write the lines that are not in the file."""
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        for line in self._lines[self._written :]:
            rest = line
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._written += 1
            self._end += len(line)
        if self.outage.on:
            os.fsync(self._descriptor)  # else a disk that only refuses this would seem to work again

    def _open(self) -> None:
        if not self._prepared:
            self._prepare()
        created = not self.path.exists()
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not self._prepared:
            self._synced = self._end = os.fstat(self._descriptor).st_size
            if created:
                sync_folder(self.path.parent)
            self._prepared = True
        elif os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)  # the part of a line that a full disk took

    def _drop_descriptor(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


@dataclass
class Cut:
    """What `cut_after` did: how many records it removed, the numbers (from 1) of lines that are no records, and where
    the file with them was put."""

    removed: int = 0
    bad_lines: list[int] = field(default_factory=list)
    kept_as: Path | None = None


def cut_after(path: str | Path, step: int) -> Cut:
    """Remove the records of steps after `step` from a file of records, and lines that are no records.

    A last line that was not finished is removed without a word: a killed run leaves one. Other lines that are no
    records are damage: the file as it was is kept beside it. The file is replaced whole or shortened at its end, so
    that a kill leaves the old or the new one. A missing file counts as empty. Raises OSError.
    """
    path, cut = Path(path), Cut()
    if not path.exists():
        return cut
    offset = shorter = 0
    scattered = False  # something is kept behind something that is not
    kept: list[list[int]] = []  # first and last bytes of what is kept, in one piece as far as it goes
    with path.open("rb") as file:
        for number, line, length in lines_of(file):
            offset += length
            record = record_of(line)
            if line is not None and isinstance(record, dict) and record["step"] <= step:
                shorter += length
                scattered |= shorter != offset or not line.endswith(b"\n")
                if kept and kept[-1][1] == offset - length:
                    kept[-1][1] = offset
                else:
                    kept.append([offset - length, offset])
            elif isinstance(record, dict):
                cut.removed += 1
            elif record not in (UNFINISHED, EMPTY):
                cut.bad_lines.append(number)
    if shorter == offset and not scattered:
        return cut
    if cut.bad_lines:
        cut.kept_as = _keep(path)
    if cut.bad_lines or scattered:
        _rewrite(path, kept)
    else:  # needs no room on the disk
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, shorter)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return cut


def lines_of(file: BinaryIO) -> Iterator[tuple[int, bytes | None, int]]:
    """The lines of a file as (number from 1, with its line break if it has one, length in bytes); None instead of a
    line that is longer than `MAX_LINE`, so that memory stays bounded whatever is in the file."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        length = len(line)
        if length < MAX_LINE or line.endswith(b"\n"):
            yield number, line, length
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE)
            length += len(line)
        yield number, None, length


def record_of(line: bytes | None) -> dict[str, Any] | str:
    """The record in a line as `lines_of` gives it, or what is wrong with it, in a few words.

    `EMPTY` and `UNFINISHED` are no damage: people's editors and killed runs leave them.
    """
    if line is None:
        return "too long"
    if not line.strip():
        return EMPTY
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return "not UTF-8" if line.endswith(b"\n") else UNFINISHED
    except (ValueError, RecursionError):
        return "not JSON" if line.endswith(b"\n") else UNFINISHED
    if not isinstance(record, dict):
        return "not an object"
    step, kind = record.get("step"), record.get("kind")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return "without a step"
    return record if isinstance(kind, str) else "without a kind"


def listed(numbers: list[int]) -> str:
    """`line 3`, or `lines 3, 8-10`; of many the first ones."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    more = f" and {len(texts) - 8} more places" if len(texts) > 8 else ""
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(texts[:8])}{more}"


def move_aside(path: Path) -> Path | None:
    """Rename a file or folder, if there is one, to its first free name with a number behind; returns that."""
    if not path.exists():
        return None
    target = _free(lambda number: path.with_name(f"{path.name}.{number}"), first=1)
    path.rename(target)
    sync_folder(path.parent)
    return target


def _free(name: Callable[[int], Path], first: int) -> Path:
    number = first
    while os.path.lexists(target := name(number)):
        number += 1
    return target


def _keep(path: Path) -> Path:
    """A second name for a file that is about to be replaced."""
    for kept in path.parent.glob(f"{path.name}.damaged*"):
        if kept.samefile(path):  # killed in between, the last time
            return kept
    target = _free(lambda number: path.with_name(f"{path.name}.damaged{f'.{number}' if number else ''}"), first=0)
    try:
        os.link(path, target)
    except OSError:  # a file system without second names
        _replace_with(target, lambda file: _copy(path, file))
    sync_folder(path.parent)
    return target


def _copy(path: Path, target: BinaryIO, first: int = 0, last: int | None = None) -> bytes:
    """Copy the bytes of a file from `first` up to, not including, `last`; returns the last piece."""
    piece = b""
    with path.open("rb") as source:
        source.seek(first)
        left = os.fstat(source.fileno()).st_size - first if last is None else last - first
        while left > 0 and (chunk := source.read(min(2**20, left))):
            target.write(piece := chunk)
            left -= len(chunk)
    return piece


def _rewrite(path: Path, kept: list[list[int]]) -> None:
    def write(target: BinaryIO) -> None:
        for first, last in kept:
            if not _copy(path, target, first, last).endswith(b"\n"):
                target.write(b"\n")

    _replace_with(path, write)


def _replace_with(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
