"""A file's bytes in bounded pieces, unpacked by its ending in any spelling: .gz, .bz2, .xz, .zst."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

READ_BYTES = 1 << 20
_ENDINGS: dict[str, str] = {".gz": "gzip", ".gzip": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".gzip": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
# Archives of several files, and compressions that we have no reader for.
_REFUSED = (".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".lz4", ".br", ".lzma", ".z", ".lzo", ".sz")
_LARGEST_WINDOW = 1 << 31  # of `zstd --long=31`; the memory is taken only for files that ask for it

# What is read at once unpacks as a whole, to 30,000 times its size at worst.
_ZSTANDARD_READ_BYTES = 1 << 13

# Called with the position in the packed file, now and then.
Watch = Callable[[int], None]


class DamagedFile(ValueError):
    """What a file holds cannot be unpacked."""


def refuse_archives(path: Path) -> None:
    """Raise ValueError for a file that `unpacked` cannot read by its name."""
    endings = [ending.lower() for ending in path.suffixes[-2:]]
    for ending in endings[-1:] + [ending for ending in endings[:-1] if ending == ".tar"]:
        if ending in _REFUSED:
            raise ValueError(
                f"{path} is packed as {ending}; unpack it, or compress each file as .gz, .bz2, .xz or .zst"
            )


def unpacked(path: Path, watch: Watch = lambda position: None) -> Iterator[bytes]:
    """The content of a file, in pieces of at most some MiB, none empty.

    Raises DamagedFile if it is damaged, cut short, or not compressed as its ending says; OSError if it cannot be read.
    """
    ending = path.suffix.lower()
    with open(path, "rb") as file:
        pieces = _unpacked_zstandard(file) if ending == ".zst" else _read(_OPENERS.get(ending, _as_it_is)(file))
        try:
            for piece in pieces:
                watch(file.tell())
                yield piece
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise _damaged(path, ending, error) from error
        except OSError as error:
            # bz2 has no type of its own for damage; errors of the system have a number.
            if error.errno is None:
                raise _damaged(path, ending, error) from error
            raise OSError(error.errno, error.strerror, str(path)) from error


def _damaged(path: Path, ending: str, error: Exception) -> DamagedFile:
    return DamagedFile(
        f"{path} is damaged, was cut short or is not compressed by {_ENDINGS.get(ending, 'its ending')} ({error}); "
        "copy it again, or give it its right ending"
    )


def _as_it_is(file: BinaryIO) -> BinaryIO:
    return file


def _read(file: Any) -> Iterator[bytes]:
    while piece := file.read(READ_BYTES):
        yield piece


def _unpacked_zstandard(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a file. The library's own reader takes a frame that was cut short for a whole one.

    Raises EOFError where one is cut short, and for what is no frame.
    """
    import zstandard  # only who reads such a file needs it

    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    frame: Any = None
    while packed := file.read(_ZSTANDARD_READ_BYTES):
        while packed:
            frame = frame or decompressor.decompressobj()
            try:
                piece = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            if piece:
                yield piece
            packed = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the last frame does not end")
