"""A folder that is written under another name, OUTPUT.tmp, and renamed: there is a whole one, or none.

What already bears that other name is removed only if it is what a killed command left: it has our lock, and nobody
holds it. Two commands for one output do not mix their files, and somebody's own folder stays as it is.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_fp4.checkpoint.files import sync_folder

_LOCK = ".being_written"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of file systems that have none: nothing is removed there


def check_output(output: Path, checkpoint: Path | None = None) -> None:
    """Raise ValueError if `output` exists or lies inside `checkpoint`."""
    if output.exists() or output.is_symlink():
        raise ValueError(f"{output} exists already; name another folder, or remove it")
    if checkpoint is not None and checkpoint.resolve() in (output.resolve(), *output.resolve().parents):
        raise ValueError(f"{output} lies inside the checkpoint {checkpoint}; name a folder elsewhere")


@contextmanager
def new_folder(output: Path, checkpoint: Path | None = None) -> Iterator[Path]:
    """A folder to write into, which becomes `output` if nothing is raised, and goes otherwise.

    Raises ValueError as `check_output` does, and if another command is writing it; OSError.
    """
    check_output(output, checkpoint)
    staging = output.with_name(f"{output.name}.tmp")
    lock = _take(staging)
    try:
        yield staging
        (staging / _LOCK).unlink()  # nobody clears a folder without it
        lock.close()  # before the new name: NFS keeps a removed file until it is closed
        for path in (*staging.rglob("*"), staging):
            sync_folder(path)  # a file as well
        check_output(output, checkpoint)
        os.rename(staging, output)
        sync_folder(output.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        lock.close()


def _take(staging: Path) -> io.FileIO:
    """Make the folder, and hold its lock."""
    try:
        staging.mkdir(parents=True)
    except FileExistsError:
        _remove(staging)
    try:
        staging.mkdir(exist_ok=True)
        lock = os.open(staging / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileExistsError, FileNotFoundError):  # between two lines of ours
        raise _busy(staging) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if not os.path.samestat(os.fstat(lock), os.stat(staging / _LOCK)):
            raise _busy(staging)
    except (BlockingIOError, FileNotFoundError):
        os.close(lock)
        raise _busy(staging) from None
    except BaseException:
        os.close(lock)
        raise
    return io.FileIO(lock)


def _remove(staging: Path) -> None:
    """Raises ValueError unless it is what a killed command left."""
    if not staging.is_symlink() and staging.is_dir():
        with suppress(OSError):
            staging.rmdir()  # empty: the mark of an export that a run owes
            return
    try:
        lock = os.open(staging / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise ValueError(
            f"{staging} is in the way, which is written before it gets its name, and nothing that was left by a "
            "command like this; name another folder, or move it"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(staging)
    except BlockingIOError:
        raise _busy(staging) from None
    finally:
        os.close(lock)


def _busy(staging: Path) -> ValueError:
    return ValueError(f"another command is writing {staging}; wait for its end, or name another folder")
