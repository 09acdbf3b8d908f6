"""Byte ranges of files and of a store's objects, and folders that are built once.

Local: a read is one `pread` of what is needed (a memory-mapped file is read ahead, some hundred times as much for a
sample). Files are opened when they are first read; only so many stay open at a time.

Objects (`s3://bucket/key`, `gs://`, whatever fsspec opens): a store takes as long for a sample as for a megabyte. So
what is read comes in blocks of 1 MiB, each kept as a file under the cache folder: an epoch fetches each block once a
node. A block is written under another name and renamed, so ranks and workers share a folder without locks: at worst two
of them fetch the same block. The folder of an object's blocks is named after its size and version, too. No block is
evicted; a disk that is nearly full gets no more of them, and reads fetch just what they need.
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
"""How long to wait before each further attempt, within a quarter at random."""

# A disk with less than this share free keeps no more blocks.
_FREE_SHARE = 0.05
_THREADS = 32
_MOST_OPEN = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
# Of a kept block: how much of it a hash is of, and the hash's size.
_HASHED_BYTES, _DIGEST_BYTES = 1 << 14, 8
_KEPT_FORMAT = 2
# Threads of a process that want one block fetch it once.
_FETCHING = [threading.Lock() for _ in range(1024)]
_PATIENCE = 5.0  # seconds
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
Item = TypeVar("Item")
Result = TypeVar("Result")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/megatron_fp4`, or `~/.cache/megatron_fp4`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron_fp4"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, first calling build(temporary folder) and renaming it if it does not exist. Blocks while another
    process builds. An exception of `build` removes what it wrote and is raised; the next in the queue then tries."""
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


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """function of each item, in order, by threads that end with this call. The first error is raised."""
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
def in_turn(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock, or, while another thread holds it for long, go on without: where a store is gone, threads shall not
    try one after the other."""
    is_held = lock.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if is_held:
            lock.release()


class LocalFile:
    """A file of this machine, of which ranges are read. Raises FileNotFoundError, PermissionError; ValueError from a
    later read if another file lies under the path by then."""

    def __init__(self, path: str) -> None:
        found = os.stat(path)
        self.name, self.size = path, found.st_size
        self._opened_as = (found.st_size, found.st_mtime_ns, found.st_ino)

    def read(self, offset: int, length: int, alone: bool = False) -> bytes:
        """Bytes [offset, offset + length). Raises ValueError when the file has fewer by now, OSError."""
        descriptor = _opened(self.name, self._opened_as)
        found = b""
        try:
            while len(found) < length:  # 2 GiB come at a time, and a network's file system may give less
                if not (more := os.pread(descriptor.number, length - len(found), offset + len(found))):
                    raise ValueError(f"{self.name} ends at byte {offset + len(found)}; it was cut short while in use")
                found += more
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or errno.EIO), self.name) from error
        return found


class _Descriptor:
    """An open file; closed with the last reference to it, so never while a thread reads."""

    def __init__(self, path: str, opened_as: tuple[int, int, int]) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # A read shall not bring what lies after it.
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)
        found, (size, mtime, inode) = os.fstat(self.number), opened_as
        # Either alone may change under the same content: by `touch`, or where a file system makes its inodes up.
        if found.st_size != size or (found.st_mtime_ns != mtime and found.st_ino != inode):
            raise ValueError(
                f"{path} is not the file any more that this run opened; put it back, or start the run again"
            )

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


_opened = lru_cache(_MOST_OPEN)(_Descriptor)


class RemoteFile:
    """An object of a store, of which ranges are read. cache: the folder that keeps its blocks, None: the user's. After
    each block that is fetched, the object's version is looked up again.

    Raises FileNotFoundError, PermissionError, ValueError for an object that was replaced, and ConnectionError after the
    last attempt.
    """

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.name = url
        info = _attempted(url, partial(_info, url))
        if info.get("size") is None:
            raise ValueError(f"{url}: its server does not say how long it is; copy it to a disk or another store")
        self.size = int(info["size"])
        self._version = _version_of(info)
        key = hashlib.sha256(f"{url}\n{self._version}\n{BLOCK_BYTES}\n{_KEPT_FORMAT}".encode()).hexdigest()[:32]
        self._folder = (cache or default_cache_dir() / "remote") / key[:2] / key
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self, offset: int, length: int, alone: bool = False) -> bytes:
        """Bytes [offset, offset + length). alone: of an object of several blocks fetched and kept without the rest of
        theirs; checks and identities look at the same few ranges at each start."""
        end = offset + length
        if alone and self.size > BLOCK_BYTES:
            return self._piece(self._folder / f"{offset}-{length}", offset, end, offset, end)

        def part(block: int) -> bytes:
            start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size)
            kept = self._folder / str(block // 1000) / str(block)  # a thousand to a folder
            return self._piece(kept, start, stop, max(offset, start), min(end, stop))

        return b"".join(side_by_side(part, range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES))))

    def _piece(self, kept: Path, start: int, end: int, first: int, last: int) -> bytes:
        """Bytes [first, last) out of [start, end), which the file `kept` has or will have."""
        if first >= last:
            return b""
        place = end - start, first - start, last - start
        if (found := _read_kept(kept, *place)) is not None:
            return found
        with in_turn(_FETCHING[hash(kept) % len(_FETCHING)]):
            if (found := _read_kept(kept, *place)) is not None:  # another thread has fetched it meanwhile
                return found
            return self._fetched(kept, start, end, first, last)

    def _fetched(self, kept: Path, start: int, end: int, first: int, last: int) -> bytes:
        """The same, of the store."""
        if kept.exists():
            log.warning("%s: a block of %s is damaged; fetched again", kept, self.name)
        disk = shutil.disk_usage(self._folder)
        has_room = disk.free > _FREE_SHARE * disk.total
        if not has_room:
            start, end = first, last
        content = _attempted(self.name, partial(_range, self.name, start, end))
        if _version_of(_attempted(self.name, partial(_info, self.name))) != self._version:
            raise ValueError(
                f"{self.name} is not the object any more that this run opened; put it back, or start the run again"
            )
        if has_room:
            self._keep(kept, content)
        return content[first - start : last - start]

    def _keep(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f"{path.name}-{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content + _hashes(content))
            os.replace(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            log.warning("%s: no room to keep a block of %s", path.parent, self.name)


def _read_kept(path: Path, size: int, first: int, last: int) -> bytes | None:
    """Bytes [first, last) of a kept block of so many; None if it is not there, or damaged. Those around them alone are
    hashed."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size + _DIGEST_BYTES * -(-size // _HASHED_BYTES):
            return None  # cut off when the machine lost its power
        begin, end = first // _HASHED_BYTES, -(-last // _HASHED_BYTES)
        start = begin * _HASHED_BYTES
        content = os.pread(file.fileno(), min(end * _HASHED_BYTES, size) - start, start)
        hashes = os.pread(file.fileno(), (end - begin) * _DIGEST_BYTES, size + begin * _DIGEST_BYTES)
        return content[first - start : last - start] if _hashes(content) == hashes else None
    return None


def _hashes(content: bytes) -> bytes:
    """A hash of each _HASHED_BYTES; they follow a kept block."""
    pieces = (content[at : at + _HASHED_BYTES] for at in range(0, len(content), _HASHED_BYTES))
    return b"".join(hashlib.blake2b(piece, digest_size=_DIGEST_BYTES).digest() for piece in pieces)


def _version_of(info: dict[str, Any]) -> str:
    """Size and version of an object, as its store tells them."""
    return f"{info.get('size')} {next((info[name] for name in _VERSIONS if info.get(name)), '')}"


def is_url(path: str) -> bool:
    """Whether a path is fsspec's: `s3://bucket/key`."""
    return "://" in path


def url_problem(url: str) -> str | None:
    """Why a URL of its kind cannot be opened here, with the remedy; None if it can."""
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        remedy = "pip install 'megatron_fp4[remote]'" if protocol in ("s3", "s3a") else "pip install what it names"
        return f"a package for {protocol}:// is missing ({error}); {remedy}"
    except ValueError:
        return f"{protocol}:// is no kind of store that fsspec knows; give s3://, gs:// or a path"
    return None


def list_objects(pattern: str) -> list[str]:
    """The URLs that match a pattern (`s3://bucket/web_*.idx`), sorted. Raises OSError for a store that is not there."""
    protocol = pattern.partition("://")[0]

    def found() -> list[str]:
        file_system, path = fsspec.core.url_to_fs(pattern)
        return [f"{protocol}://{name.lstrip('/')}" for name in file_system.glob(path)]

    return sorted(_attempted(pattern, found))


def _info(url: str) -> dict[str, Any]:
    # The file system is asked for each time: fsspec gives a forked process a new one, with connections of its own.
    file_system, path = fsspec.core.url_to_fs(url)
    file_system.invalidate_cache(path)
    return file_system.info(path)


def _range(url: str, start: int, end: int) -> bytes:
    file_system, path = fsspec.core.url_to_fs(url)
    content = file_system.cat_file(path, start=start, end=end)
    if len(content) != end - start:
        raise OSError(f"gave {len(content)} bytes of the {end - start} from byte {start} on")
    return content


def _attempted(url: str, ask: Callable[[], Result]) -> Result:
    """What `ask` returns, called again after an error that may pass. Raises ConnectionError after the last attempt."""
    began = time.monotonic()
    for seconds in (*RETRY_SECONDS, None):
        try:
            return ask()
        except Exception as error:  # each kind of store has its own
            said = " ".join(str(error).split())
            line = f"{url}: {type(error).__name__}" + (f", {said}" if said and said != url else "")
            if isinstance(error, _FINAL):
                raise type(error)(line) from error
            if type(error).__name__ in _NO_CREDENTIALS:
                raise PermissionError(f"{line}; log in to the store on every host") from error
            if seconds is None:
                spent = f"{len(RETRY_SECONDS) + 1} attempts in {time.monotonic() - began:.0f} s"
                raise ConnectionError(f"{line} ({spent})") from error
            log.warning("%s; trying again in %.0f s", line, seconds)
            # Ranks that failed together shall not come back together.
            time.sleep(seconds * random.uniform(0.75, 1.25))
    raise AssertionError("the loop ends by a return or a raise")
