"""Files of a run: records that survive a kill and a full disk, and files that are replaced atomically."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from megatron_fp4.checkpoint.files import free_name, open_plain, sync_folder
from megatron_fp4.config.errors import printable

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Bytes of a record; a longer line is read, and skipped, in parts.
_LONGEST = 1 << 26
METRICS_FILE, SUMMARY_FILE, PICTURE_FILE, REPORT_FILE = "metrics.jsonl", "summary.json", "loss.png", "report.html"
TRANSCRIPT_FILE = "run.log"


class Outage:
    """Whether one destination of a run's log works. Logs when it starts to fail and when it works again.

    name: of the destination. meanwhile: a text that says what happens to data that cannot be written.
    """

    def __init__(self, name: str, meanwhile: str) -> None:
        self.name, self.meanwhile, self.on = name, meanwhile, False

    def failed(self, error: Exception) -> None:
        if not self.on:
            kind = type(error).__name__
            logger.error("LOGGING FAILED, training continues: %s: %s: %s; %s", self.name, kind, error, self.meanwhile)
        self.on = True

    def worked(self) -> None:
        if self.on:
            logger.warning("%s works again, and gets the waiting data", self.name)
        self.on = False


class RecordFile:
    """Appends lines to `path`. Any thread may call it, and no method raises OSError.

    A line is in the file when `write` returns, so a killed process loses none; it is on the disk when `sync` returns.
    Lines that the disk refuses wait in memory until a later call succeeds. prepare: called before the file is opened;
    if it raises OSError, it is called again later. If another file replaces this one, that is logged once.
    """

    def __init__(self, path: Path, prepare: Callable[[], object] = lambda: None) -> None:
        self.path, self._prepare = path, prepare
        self.outage = Outage(str(path), "records wait in memory until the disk takes them")
        self._prepared = self._was_replaced = False
        self._waiting, self._descriptor = bytearray(), -1
        self._lock = threading.Lock()
        with self._lock:
            self._push()

    def write(self, line: str) -> None:
        """Append `line`, which must not contain a line break."""
        with self._lock:
            self._waiting += line.encode(errors="backslashreplace") + b"\n"
            self._push()

    def sync(self) -> None:
        """Return when everything written so far is on the disk, or a failure is logged. Other threads may write on."""
        with self._lock:
            self._push()
            if self._descriptor < 0:
                return
            descriptor = os.dup(self._descriptor)
        try:
            os.fsync(descriptor)
        except OSError as error:
            logger.error("%s: its last records may not be on the disk (%s)", self.path, error)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self.sync()
        with self._lock:
            self._close()
            if self._waiting:
                logger.error("%s: its last records are lost", self.path)

    def _push(self) -> None:
        try:
            if not self._prepared:
                self._prepare()
                self._prepared = True
            if self._descriptor >= 0 and not self._is_at_path():
                self._close()
                if not self._was_replaced:
                    logger.error("%s was replaced or removed while the run writes it; new records go there", self.path)
                self._was_replaced = True
            if self._descriptor < 0:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            while self._waiting:  # after a partial write, the rest stays
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as error:
            self._close()
            self.outage.failed(error)
        else:
            self.outage.worked()

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


class Transcript(logging.Handler):
    """`run.log`: what the first rank prints and logs, each line with its time. Starts of a run follow each other.

    Values from the environment and control characters are shown as on the terminal. Lines wait until `open`, so that a
    start which is refused writes nothing. Lines that the disk refuses are lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[str] = []
        self._path: Path | None = None

    def open(self, path: Path) -> None:
        self._path, waiting, self._waiting = path, self._waiting, []
        self._append(waiting)

    def text(self, text: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = [f"{now}  {printable(line)}".rstrip() + "\n" for line in text.splitlines()]
        if self._path is None:
            self._waiting += lines
        else:
            self._append(lines)

    def emit(self, record: logging.LogRecord) -> None:
        self.text(self.format(record))

    def _append(self, lines: list[str]) -> None:
        assert self._path is not None
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)


def iterate_records(path: str | Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines, in order: objects with a `step` and a `kind`. kind: None: all.

    Skips an unfinished last line, which a killed run leaves. Skips other lines that are no records with a warning.
    Raises ValueError for a link or a pipe, OSError.
    """
    wrong: list[int] = []
    with open_plain(Path(path)) as raw, io.BufferedReader(raw) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1):
            record = _record(line)
            if record is not None and kind in (None, record["kind"]):
                yield record
            elif record is None and line.endswith(b"\n"):
                wrong.append(number)
    if wrong:
        logger.warning("%s: %d lines are no records and are skipped, the first is line %d", path, len(wrong), wrong[0])


def records_of(run_dir: str | Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """`iterate_records` of the run in `run_dir`; empty if it has no metrics.jsonl."""
    path = Path(run_dir) / METRICS_FILE
    return iterate_records(path, kind) if path.is_file() else iter(())


def cut_after(path: Path, step: int) -> None:
    """Remove the records of steps after `step`, and an unfinished last line, from a file of records.

    If the process is killed, the old or the new file is left. A missing file counts as empty. Raises OSError.
    """

    def is_kept(line: bytes) -> bool:
        record = _record(line)
        return line.endswith(b"\n") and (record is None or record["step"] <= step)

    def write(temporary: Path) -> None:
        with path.open("rb") as source, temporary.open("wb") as target:
            # Read all lines, because an event may be recorded late.
            target.writelines(line for line in source if is_kept(line))

    if path.exists():
        replace_file(path, write)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        valid = type(record["step"]) is int and isinstance(record["kind"], str)
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return record if valid else None


def move_aside(path: Path) -> Path | None:
    """Rename a file or folder, if it exists, to `name.1` or the first free number; returns the new path, or None."""
    if not os.path.lexists(path):
        return None
    target = path.rename(free_name(path))
    sync_folder(path.parent)
    return target


def check_place(path: Path) -> None:
    """Raise ValueError if no file can be written at `path`. Call it before the work whose result the file will have."""
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}; make it, or name another")


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path of the same suffix, sync the file, and rename it to `path`.

    At any moment `path` is the old file or the new one. Raises the errors of `write`, and OSError.
    """
    temporary = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace a text file; see `replace_file`."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def attempt(what: str, action: Callable[[], T]) -> T | None:
    """The result of `action`, or None if it raises; the error is only logged, because these files are not essential."""
    try:
        return action()
    except Exception as error:
        logger.error("%s could not be written (%s: %s); the run is not affected", what, type(error).__name__, error)
        return None
