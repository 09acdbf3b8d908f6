"""Byte ranges of local files and of objects in a store, and folders that are built once.

Local files: a read is one `pread` of the bytes that are needed. (The kernel reads a memory-mapped file ahead, for one
sample about a hundred times as much.) A file is opened at its first read, and a limited number stays open.

Objects (`s3://bucket/key`, `gs://`, everything that fsspec opens): a store takes as long for one sample as for a
megabyte. So reads fetch blocks of 1 MiB and cache each block as a file: an epoch fetches each block once per node. A
block is written under a temporary name and then renamed, so ranks, workers and threads share the cache folder without
locks; at worst some of them fetch the same block. The name of an object's folder depends on the object's size and
version. The cache evicts nothing; when the disk is nearly full, reads fetch only the bytes that they need and cache
nothing.
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

BLOCK_BYTES = 1 << 20
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Wait before each retry; the actual wait differs from it by up to a quarter, at random."""

# Below this share of free disk space no block is cached.
_MIN_FREE_SHARE = 0.05
_THREADS = 32
_MAX_OPEN_FILES = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
# A cached block ends with hashes: one of _DIGEST_BYTES for each _HASHED_BYTES of it.
_HASHED_BYTES, _DIGEST_BYTES = 1 << 14, 8
_BLOCK_FORMAT = 2
_LOCK_SECONDS = 5.0
# What the stores' libraries raise without credentials; a retry does not help.
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
# Errors that a retry does not help.
_NOT_RETRIED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
# The names that stores give the version of an object.
_VERSIONS = ("ETag", "etag", "md5Hash", "checksum", "generation", "LastModified", "last_modified", "mtime", "created")

log = logging.getLogger(__name__)
# They log for each process where they found the credentials.
for chatty in ("aiobotocore", "botocore"):
    logging.getLogger(chatty).setLevel(logging.WARNING)
Item = TypeVar("Item")
Result = TypeVar("Result")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/megatron_fp4`, or `~/.cache/megatron_fp4`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron_fp4"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`. If it does not exist, call `build` with a temporary folder, which is then renamed to `folder`.

    Waits while another process builds. If `build` raises, the temporary folder is removed, and the next in line builds.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The lock file is not removed: a process could then lock a new file while another holds the old one.
        file = open(folder.with_name(folder.name + ".lock"), "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        remedy = "set data.cache_dir or XDG_CACHE_HOME to a folder that you can write to"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(folder.parent)) from error
    with file as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        temporary = folder.with_name(folder.name + ".tmp")
        if temporary.exists():  # a killed build left it; this process holds the lock, so no other one uses it
            shutil.rmtree(temporary)
        temporary.mkdir()
        try:
            build(temporary)
            os.rename(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary)
            raise
    return folder


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`function` of each item, in order, computed by threads. Raises the first error."""
    items = list(items)
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def lock_or_timeout(lock: threading.Lock) -> Iterator[None]:
    """Hold the lock, or continue without it if it is not free after _LOCK_SECONDS: when a store is down, the threads
    must not wait for their timeouts one after the other."""
    is_held = lock.acquire(timeout=_LOCK_SECONDS)
    try:
        yield
    finally:
        if is_held:
            lock.release()


class LocalFile:
    """Reads byte ranges of a local file. Raises FileNotFoundError and PermissionError; a later read raises ValueError
    if the file was replaced in the meantime."""

    def __init__(self, path: str) -> None:
        found = os.stat(path)
        self.name, self.size = path, found.st_size
        self._opened_as = (found.st_size, found.st_mtime_ns, found.st_ino)

    def read(self, offset: int, length: int, exact: bool = False) -> bytes:
        """Bytes [offset, offset + length). Raises OSError, and ValueError if the file was cut short. exact: unused."""
        descriptor = _opened(self.name, self._opened_as)
        found = b""
        try:
            while len(found) < length:  # one call returns at most 2 GiB, on a network file system perhaps less
                if not (more := os.pread(descriptor.number, length - len(found), offset + len(found))):
                    raise ValueError(f"{self.name} ends at byte {offset + len(found)}; it was cut short while in use")
                found += more
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or errno.EIO), self.name) from error
        return found


class _Descriptor:
    """An open file. It is closed with the last reference to it, so never while a thread reads."""

    def __init__(self, path: str, opened_as: tuple[int, int, int]) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # No read-ahead.
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)
        found, (size, mtime, inode) = os.fstat(self.number), opened_as
        # One of the two alone may change while the content stays, by `touch` or invented inodes.
        if found.st_size != size or (found.st_mtime_ns != mtime and found.st_ino != inode):
            raise ValueError(f"{path} was replaced while this run used it; restore the old file, or start again")

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


_opened = lru_cache(_MAX_OPEN_FILES)(_Descriptor)


class RemoteFile:
    """Reads byte ranges of an object in a store. cache: the folder for its blocks; None: the user's cache folder. The
    object's version is compared again after each block that is fetched.

    Raises FileNotFoundError, PermissionError, ValueError for an object that was replaced, and ConnectionError after
    the last attempt.
    """

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.name = url
        info = _with_retries(url, partial(_info, url))
        if info.get("size") is None:
            raise ValueError(f"{url}: its server does not say how long it is; copy it to a disk or another store")
        self.size = int(info["size"])
        self._version = _version_of(info)
        key = hashlib.sha256(f"{url}\n{self._version}\n{BLOCK_BYTES}\n{_BLOCK_FORMAT}".encode()).hexdigest()[:32]
        self._folder = (cache or default_cache_dir() / "remote") / key[:2] / key
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self, offset: int, length: int, exact: bool = False) -> bytes:
        """Bytes [offset, offset + length). exact: fetch and cache only these bytes, not the whole blocks around them.
        Checks and identities do so: they read the same few ranges at each start."""
        end = offset + length
        if exact and self.size > BLOCK_BYTES:
            return self._piece(self._folder / f"{offset}-{length}", offset, end, offset, end)

        def part(block: int) -> bytes:
            start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size)
            cached = self._folder / str(block // 1000) / str(block)  # a thousand files in a folder
            return self._piece(cached, start, stop, max(offset, start), min(end, stop))

        return b"".join(map_in_threads(part, range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES))))

    def _piece(self, cached: Path, start: int, end: int, first: int, last: int) -> bytes:
        """Bytes [first, last) of the block [start, end), from the file `cached`, or from the store, which fills it."""
        if first >= last:
            return b""
        found = _read_cached(cached, end - start, first - start, last - start)
        return self._fetch(cached, start, end, first, last) if found is None else found

    def _fetch(self, cached: Path, start: int, end: int, first: int, last: int) -> bytes:
        if cached.exists():
            log.warning("%s: a block of %s is damaged; fetching it again", cached, self.name)
        disk = shutil.disk_usage(self._folder)
        has_room = disk.free > _MIN_FREE_SHARE * disk.total
        if not has_room:
            start, end = first, last
        content = _with_retries(self.name, partial(_range, self.name, start, end))
        if _version_of(_with_retries(self.name, partial(_info, self.name))) != self._version:
            raise ValueError(f"{self.name} was replaced while this run used it; restore it, or start again")
        if has_room:
            self._cache(cached, content)
        return content[first - start : last - start]

    def _cache(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f"{path.name}-{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content + _hashes(content))
            os.replace(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            log.warning("%s: no room to cache a block of %s", path.parent, self.name)


def _read_cached(path: Path, size: int, first: int, last: int) -> bytes | None:
    """Bytes [first, last) of a cached block of `size` bytes; None if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size + _DIGEST_BYTES * -(-size // _HASHED_BYTES):
            return None  # cut short, for example by a power failure
        begin, end = first // _HASHED_BYTES, -(-last // _HASHED_BYTES)
        start = begin * _HASHED_BYTES
        content = os.pread(file.fileno(), min(end * _HASHED_BYTES, size) - start, start)
        hashes = os.pread(file.fileno(), (end - begin) * _DIGEST_BYTES, size + begin * _DIGEST_BYTES)
        return content[first - start : last - start] if _hashes(content) == hashes else None
    return None


def _hashes(content: bytes) -> bytes:
    pieces = (content[at : at + _HASHED_BYTES] for at in range(0, len(content), _HASHED_BYTES))
    return b"".join(hashlib.blake2b(piece, digest_size=_DIGEST_BYTES).digest() for piece in pieces)


def _version_of(info: dict[str, Any]) -> str:
    return f"{info.get('size')} {next((info[name] for name in _VERSIONS if info.get(name)), '')}"


def is_url(path: str) -> bool:
    """Whether a path is a URL for fsspec, such as `s3://bucket/key`."""
    return "://" in path


def list_objects(pattern: str) -> list[str]:
    """The URLs that match a pattern (`s3://bucket/web_*.idx`), sorted. Raises OSError if the store does not answer."""
    protocol = pattern.partition("://")[0]

    def found() -> list[str]:
        file_system, path = fsspec.core.url_to_fs(pattern)
        return [f"{protocol}://{name.lstrip('/')}" for name in file_system.glob(path)]

    return sorted(_with_retries(pattern, found))


def _info(url: str) -> dict[str, Any]:
    # Ask fsspec for the file system each time: a forked process then gets its own connections.
    file_system, path = fsspec.core.url_to_fs(url)
    file_system.invalidate_cache(path)
    return file_system.info(path)


def _range(url: str, start: int, end: int) -> bytes:
    file_system, path = fsspec.core.url_to_fs(url)
    content = file_system.cat_file(path, start=start, end=end)
    if len(content) != end - start:
        raise OSError(f"returned {len(content)} of {end - start} bytes from byte {start}")
    return content


def _with_retries(url: str, ask: Callable[[], Result]) -> Result:
    """The result of `ask`, retried after an error that may be temporary. Raises ConnectionError after the last
    attempt."""
    began = time.monotonic()
    for seconds in (*RETRY_SECONDS, None):
        try:
            return ask()
        except Exception as error:  # each kind of store has its own
            message = " ".join(str(error).split())
            line = f"{url}: {type(error).__name__}" + (f", {message}" if message and message != url else "")
            if isinstance(error, _NOT_RETRIED):
                raise type(error)(line) from error
            if type(error).__name__ in _NO_CREDENTIALS:
                raise PermissionError(f"{line}; log in to the store on every host") from error
            if seconds is None:
                spent = f"{len(RETRY_SECONDS) + 1} attempts in {time.monotonic() - began:.0f} s"
                raise ConnectionError(f"{line} ({spent})") from error
            log.warning("%s; trying again in %.0f s", line, seconds)
            # At random, so that ranks that failed together do not retry together.
            time.sleep(seconds * random.uniform(0.75, 1.25))
    raise AssertionError("the loop ends by a return or a raise")
