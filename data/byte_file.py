"""Reading byte ranges of files: thousands of them, each of any size, by several threads and processes at once.

A read is one `pread`: it touches the disk blocks that it needs and no more (a memory-mapped file is read ahead, some
hundred times as much for a sample), counts as nobody's memory, and has no file position that forked processes would
share. Files are opened when they are first read; only so many stay open at a time.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from data.remote import RemoteFile

_MOST_OPEN = 512


class ByteFile(Protocol):
    """A file of which ranges are read. Pickles as where it lies. `name`: what messages call it; `size`: in bytes."""

    name: str
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), all of them. Raises ValueError when the file has fewer by now, OSError when
        it cannot be read."""

    def peek(self, offset: int, length: int) -> bytes:
        """The same for a small range that is read once, and of which nothing is to be kept."""


class LocalFile:
    """A `ByteFile` that the operating system knows by a path.

    Raises FileNotFoundError, IsADirectoryError, PermissionError; ValueError from a later read if another file lies
    under the path by then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self._descriptor: _Descriptor | None = None
        self._was_read = False
        found = os.stat(self.name)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "this is a folder, not a file", self.name)
        self.size = found.st_size
        self._opened_as = (found.st_size, found.st_mtime_ns, found.st_ino)

    def read(self, offset: int, length: int) -> bytes:
        # The local name keeps the descriptor open, should another thread close this file meanwhile.
        if (descriptor := self._descriptor) is None:
            descriptor = self._open()
        else:
            self._was_read = True
        try:
            found = os.pread(descriptor.number, length, offset)
            while len(found) < length:  # 2 GiB come at a time, and a network's file system may give less
                if not (more := os.pread(descriptor.number, length - len(found), offset + len(found))):
                    raise ValueError(f"{self.name} ends at byte {offset + len(found)}; it was cut short while in use")
                found += more
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or errno.EIO), self.name) from error
        return found

    peek = read

    def _open(self) -> _Descriptor:
        descriptor = _Descriptor(self.name)
        found = os.fstat(descriptor.number)
        size, mtime, inode = self._opened_as
        # Either alone may change under the same content: by `touch`, or where a file system makes its inodes up.
        if found.st_size != size or (found.st_mtime_ns != mtime and found.st_ino != inode):
            raise ValueError(
                f"{self.name} is not the file any more that this run opened; put it back, or start the run again"
            )
        self._descriptor = descriptor
        _open_files.add(self)
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None, "_was_read": False}


class _Descriptor:
    """An open file; closed with the last reference to it, so never while a thread reads."""

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # A read shall not bring what lies behind it.
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class _OpenFiles:
    """The files of this process that are open: beyond a number of them, one goes that was not read lately."""

    def __init__(self) -> None:
        self._files: deque[LocalFile] = deque()
        self._lock = threading.Lock()
        self._most = max(16, min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = threading.Lock()  # a thread that is not in the child may have held it

    def add(self, file: LocalFile) -> None:
        with self._lock:
            while len(self._files) >= self._most:
                # A second chance for each that was read again since it was opened or last looked at.
                oldest = self._files.popleft()
                if oldest._was_read and oldest is not file:
                    oldest._was_read = False
                    self._files.append(oldest)
                else:
                    oldest._descriptor = None
            self._files.append(file)


_open_files = _OpenFiles()


def is_url(path: str) -> bool:
    """Whether a path is fsspec's: `s3://bucket/key`."""
    return "://" in path


def open_file(path: str, cache: Path | None = None) -> ByteFile:
    """A file on this machine, or the object of a URL. cache: the folder where parts of objects are kept.

    Raises FileNotFoundError, IsADirectoryError or PermissionError; ValueError for a URL of a kind that nobody knows;
    OSError for an object that cannot be reached.
    """
    return RemoteFile(path, cache) if is_url(path) else LocalFile(path)
