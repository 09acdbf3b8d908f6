"""Byte ranges of files and of a store's objects, and folders that are built once.

Local: a read is one `pread`. It touches the disk blocks that it needs and no more (a memory-mapped file is read ahead,
some hundred times as much for a sample), and has no file position that forked processes would share. Files are opened
when they are first read; only so many stay open at a time.

Objects (`s3://bucket/key`, `gs://`, whatever fsspec opens): a sample is some kilobytes, and asking a store for them
takes as long as for a megabyte. So what is read comes in blocks of 1 MiB, and each is kept as a file of its own under
the cache folder: an epoch fetches each block of a corpus once a node. A block is written under another name, synced
and renamed. So ranks and workers share a folder without locks, the worst being a block that two of them fetch, and a
process may be killed at any time. Blocks of an object that was replaced are not found again: their folder is named
after the object's size and version, too.

Nothing is ever thrown out: every block is needed once an epoch, in no order, and of those that do not fit all are
equally good to have. On a disk that is nearly full no more are kept, and reads fetch what they need and no more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import random
import resource
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/megatron_fp4`, or `~/.cache/megatron_fp4`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron_fp4"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, first calling build(temporary folder) and renaming it if it does not exist.

    Blocks while another process builds. An exception of `build` removes what it wrote and is raised; the next
    process in the queue then tries for itself. The kernel releases the lock of a process that dies.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it would let a late comer lock a new file while an early one holds the old.
        file = open(folder.with_name(folder.name + ".lock"), "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        remedy = "name a folder that can be written to by data.cache_dir or XDG_CACHE_HOME"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(folder.parent)) from error
    with file as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        temporary = folder.with_name(folder.name + ".tmp")
        if temporary.exists():  # left by a build that was killed; no other process can be in it under the lock
            shutil.rmtree(temporary)
        temporary.mkdir()
        try:
            build(temporary)
            os.rename(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary)
            raise
    return folder


BLOCK_BYTES = 1 << 20
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""How long to wait before each further attempt, within a quarter at random."""

# Less than this share of the disk free, and nothing more is kept.
_FREE_SHARE = 0.05
# Requests of one large read at a time.
_THREADS = 8
_ABANDONED_SECONDS = 3600.0
# Of a kept block: how much of it a hash is of, and the hash's size.
_HASHED_BYTES, _DIGEST_BYTES = 1 << 14, 8
_KEPT_FORMAT = 2
# The stores' own errors where no credentials are found; another attempt would not change them.
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
# What another attempt would not change.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
# What stores call the version of an object.
_VERSIONS = ("ETag", "etag", "md5Hash", "checksum", "generation", "LastModified", "last_modified", "mtime", "created")

log = logging.getLogger(__name__)
# They tell of each process where it found its credentials.
for chatty in ("aiobotocore", "botocore"):
    logging.getLogger(chatty).setLevel(logging.WARNING)
Found = TypeVar("Found")


def default_remote_cache() -> Path:
    """`remote` in the cache folder of the user."""
    return default_cache_dir() / "remote"


def check_url(url: str) -> None:
    """Raise ValueError for a URL of a kind that is not opened here, naming the package to install if there is one."""
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        remedy = "pip install 'megatron_fp4[remote]'" if protocol in ("s3", "s3a") else "pip install what it names"
        raise ValueError(f"{url}: a package for {protocol}:// is missing ({error}); {remedy}") from error
    except ValueError as error:
        raise ValueError(
            f"{url}: {protocol}:// is no kind of store that fsspec knows; give s3://, gs:// or a path"
        ) from error


def list_objects(pattern: str) -> list[str]:
    """The URLs that match a pattern (`s3://bucket/web_*.idx`), sorted. Raises OSError for a store that is not there."""
    protocol = pattern.partition("://")[0]

    def found() -> list[str]:
        file_system, path = _file_system(pattern)
        return [f"{protocol}://{name.lstrip('/')}" for name in file_system.glob(path)]

    return sorted(attempted(pattern, found))


class RemoteFile:
    """A `ByteFile` that lies in a store. cache: the folder that keeps its blocks.

    A block is fetched, then the object's version is asked for again: of one that was replaced nothing is read any more.

    Raises FileNotFoundError, IsADirectoryError, PermissionError, ValueError for an object that was replaced, and
    ConnectionError after the last attempt.
    """

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.name = url
        info = attempted(url, lambda: _info(url))
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{url} is a folder, not an object")
        if info.get("size") is None:
            raise ValueError(f"{url}: its server does not say how long it is; copy it to a disk or another store")
        self.size = int(info["size"])
        self._version = _version_of(info)
        key = hashlib.sha256(f"{url}\n{self._version}\n{BLOCK_BYTES}\n{_KEPT_FORMAT}".encode()).hexdigest()[:32]
        cache = cache or default_remote_cache()
        self._folder, self._unfinished = cache / key[:2] / key, cache / "unfinished"
        self._folder.mkdir(parents=True, exist_ok=True)
        _tidy(self._unfinished)

    def read(self, offset: int, length: int) -> bytes:
        end = offset + length

        def part(block: int) -> bytes:
            start = block * BLOCK_BYTES
            stop = start + BLOCK_BYTES
            return self._part(self._block(block), start, min(stop, self.size), max(offset, start), min(end, stop))

        blocks = range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        if len(blocks) <= 2:  # a sample
            return b"".join(map(part, blocks))
        with ThreadPoolExecutor(min(_THREADS, len(blocks))) as pool:
            return b"".join(pool.map(part, blocks))

    def peek(self, offset: int, length: int) -> bytes:
        """The range alone, which is what is kept of it: checks and identities look at the same ones at each start."""
        block = self._block(offset // BLOCK_BYTES)
        if offset % BLOCK_BYTES + length <= BLOCK_BYTES and block.exists():
            return self.read(offset, length)
        return self._part(self._folder / f"{offset}-{length}", offset, offset + length, offset, offset + length)

    def _block(self, block: int) -> Path:
        # A thousand to a folder.
        return self._folder / str(block // 1000) / str(block)

    def _part(self, kept: Path, start: int, end: int, first: int, last: int) -> bytes:
        """Bytes [first, last) out of [start, end), which is what `kept` has or will have."""
        if first >= last:
            return b""
        with contextlib.suppress(FileNotFoundError):
            if (found := _read_kept(kept, end - start, first - start, last - start)) is not None:
                return found
            log.warning("%s: a block of %s is damaged; fetched again", kept, self.name)
        has_room = self._has_room()
        if not has_room:
            start, end = first, last
        content = attempted(self.name, lambda: _range(self.name, start, end))
        if _version_of(attempted(self.name, lambda: _info(self.name))) != self._version:
            raise ValueError(
                f"{self.name} is not the object any more that this run opened; put it back, or start the run again"
            )
        if has_room:
            self._keep(kept, content)
        return content[first - start : last - start]

    def _has_room(self) -> bool:
        disk = shutil.disk_usage(self._folder)
        return disk.free > _FREE_SHARE * disk.total

    def _keep(self, path: Path, content: bytes) -> None:
        temporary = self._unfinished / f"{self._folder.name}-{path.name}-{os.getpid()}-{threading.get_ident()}"
        try:
            for folder in (path.parent, self._unfinished):
                folder.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(content)
                for at in range(0, len(content), _HASHED_BYTES):
                    file.write(_digest(content[at : at + _HASHED_BYTES]))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            log.warning("%s: no room to keep a block of %s", path.parent, self.name)


def _read_kept(path: Path, size: int, first: int, last: int) -> bytes | None:
    """Bytes [first, last) of a kept block of so many; None if it is damaged.

    A block is followed by a hash of each _HASHED_BYTES of it, so that a sample's read does not hash all of it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != size + _DIGEST_BYTES * -(-size // _HASHED_BYTES):
            return None  # cut off when the machine lost its power
        begin, end = first // _HASHED_BYTES, -(-last // _HASHED_BYTES)
        start = begin * _HASHED_BYTES
        content = os.pread(descriptor, min(end * _HASHED_BYTES, size) - start, start)
        hashes = os.pread(descriptor, (end - begin) * _DIGEST_BYTES, size + begin * _DIGEST_BYTES)
    finally:
        os.close(descriptor)
    found = b"".join(_digest(content[at : at + _HASHED_BYTES]) for at in range(0, len(content), _HASHED_BYTES))
    return content[first - start : last - start] if found == hashes else None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _version_of(info: dict[str, Any]) -> str:
    """Size and version of an object, as its store tells them."""
    return f"{info.get('size')} {next((info[name] for name in _VERSIONS if info.get(name)), '')}"


@lru_cache
def _tidy(unfinished: Path) -> None:
    """Once a process: rid the folder of blocks that are being written of those whose writers were killed."""
    unfinished.mkdir(parents=True, exist_ok=True)
    for path in unfinished.iterdir():
        with contextlib.suppress(OSError):  # another process tidies, too
            if path.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                path.unlink()


def attempted(url: str, ask: Callable[[], Found]) -> Found:
    """What `ask` returns, which is asked again after an error that may pass.

    Raises the error if it cannot pass, and ConnectionError, naming the URL, after the last attempt.
    """
    began = time.monotonic()
    for seconds in (*RETRY_SECONDS, None):
        try:
            return ask()
        except _FINAL as error:
            raise type(error)(_one_line(url, error)) from error
        except Exception as error:  # each kind of store has its own
            if type(error).__name__ in _NO_CREDENTIALS:
                raise PermissionError(f"{_one_line(url, error)}; log in to the store on every host") from error
            if seconds is None:
                spent = f"{len(RETRY_SECONDS) + 1} attempts in {time.monotonic() - began:.0f} s"
                raise ConnectionError(f"{_one_line(url, error)} ({spent})") from error
            log.warning("%s; trying again in %.0f s", _one_line(url, error), seconds)
            # Ranks that failed together shall not come back together.
            time.sleep(seconds * random.uniform(0.75, 1.25))
    raise AssertionError("the loop ends by a return or a raise")


def _file_system(url: str) -> tuple[Any, str]:
    # Asked for each time: fsspec gives a forked process a new one, with connections of its own.
    return fsspec.core.url_to_fs(url)


def _info(url: str) -> dict[str, Any]:
    file_system, path = _file_system(url)
    file_system.invalidate_cache(path)
    return file_system.info(path)


def _range(url: str, start: int, end: int) -> bytes:
    file_system, path = _file_system(url)
    content = file_system.cat_file(path, start=start, end=end)
    if len(content) != end - start:
        raise OSError(f"gave {len(content)} bytes of the {end - start} from byte {start} on")
    return content


def _one_line(url: str, error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{url}: {type(error).__name__}" + (f", {said}" if said and said != url else "")


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
        # A read shall not bring what lies after it.
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

    Raises FileNotFoundError, IsADirectoryError or PermissionError; ValueError for a URL of an unknown kind;
    OSError for an object that cannot be reached.
    """
    return RemoteFile(path, cache) if is_url(path) else LocalFile(path)
