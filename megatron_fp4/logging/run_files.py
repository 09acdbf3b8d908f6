"""Files of a run for people: replaced whole, and a disk that refuses one does not end the run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


def check_place(path: Path) -> None:
    """Raise ValueError if no file could be written there: before the work whose result it is to hold."""
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}; make it, or name another")


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file under a temporary name of the same suffix, bring it to the disk, and give it the name
    `path`: at every moment that is the old file or the new one. Raises what `write` raises, and OSError."""
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
    """Replace a text file, see `replace_file`."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def attempt(what: str, action: Callable[[], T]) -> T | None:
    """What `action` returns; None if it raised an Exception, which is said: what is `what` is not worth the run."""
    try:
        return action()
    except Exception as error:
        logger.error("%s could not be written (%s: %s); the run is not affected", what, type(error).__name__, error)
        return None
