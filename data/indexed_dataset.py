"""Megatron's token format: `<prefix>.idx` describes (see index_file.py), `<prefix>.bin` holds the raw tokens.

Sequences lie in `.bin` back to back, so the whole dataset is also one token stream; training samples are cut
from that stream (`samples.py`). Files written here open in Megatron-LM, and the other way round.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from data.byte_file import ByteFile, is_url, open_file
from data.identity import blocks_identity, has_scheme, identity_before
from data.index_file import DTYPE_CODES, HEADER, MAGIC, VERSION, IndexFile

CHECKED_BLOCKS = 256
"""Of an index, when it is opened."""
_CHECKED_BLOCKS_REMOTE = 2
# Entries of the index that are computed and written at once.
_INDEX_BLOCK = 1 << 20


def dtype_for_vocabulary(vocab_size: int) -> np.dtype[Any]:
    """Megatron's rule: uint16 for a vocabulary below 65500 tokens, else int32."""
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be positive, got {vocab_size}")
    return DTYPE_CODES[8] if vocab_size < 65500 else DTYPE_CODES[4]


def index_path(prefix: str | Path) -> Path:
    """`<prefix>.idx`; the prefix may itself contain dots."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str | Path) -> Path:
    """`<prefix>.bin`."""
    return Path(f"{prefix}.bin")


class IndexedDatasetWriter:
    """Writes documents one after another; the dataset appears under its name only when it is whole.

    Both files are written under temporary names, flushed to disk and renamed, `.idx` last: a crash leaves no
    `.idx`, hence no dataset. As a context manager it finalizes on a clean exit and cleans up after an
    exception. Each document is one sequence. `dtype` must be an integer type of the format.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type[np.integer[Any]]) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _code_of(self.dtype)
        self._lengths = array("i")  # 4 bytes a document
        # The process id keeps two writers of one prefix from writing into one temporary file.
        self._temporary_tokens = Path(f"{tokens_path(prefix)}.tmp-{os.getpid()}")
        self._temporary_index = Path(f"{index_path(prefix)}.tmp-{os.getpid()}")
        self._file: BinaryIO | None = open(self._temporary_tokens, "wb")  # noqa: SIM115 - open between calls

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document, [num_tokens] integers.

        Raises ValueError for an empty document, one that is not one-dimensional, or an id that the dtype
        cannot hold (numpy would wrap it round silently).
        """
        if self._file is None:
            raise ValueError(f"{self.prefix}: this writer is finished; open a new one to write again")
        document = len(self._lengths)
        values = np.asarray(tokens)
        if values.ndim != 1 or values.size == 0:
            raise ValueError(
                f"document {document} of {self.prefix} has shape {values.shape}; it must be [num_tokens] "
                "with at least one token: skip empty documents before writing"
            )
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"document {document} of {self.prefix} holds {values.dtype}, not integer token ids")
        if values.size > np.iinfo(np.int32).max:
            raise ValueError(
                f"document {document} of {self.prefix} has {values.size} tokens; the format holds at most "
                f"{np.iinfo(np.int32).max} in one: split it"
            )
        limits = np.iinfo(self.dtype)
        low, high = int(values.min()), int(values.max())
        if low < max(0, limits.min) or high > limits.max:
            raise ValueError(
                f"document {document} of {self.prefix} has token ids from {low} to {high}; {self.dtype.name} "
                f"holds 0 to {limits.max}: choose the type with dtype_for_vocabulary(vocab_size)"
            )
        self._file.write(values.astype(self.dtype).tobytes())
        self._lengths.append(values.size)

    def finalize(self) -> None:
        """Write the index and give both files their names. Raises ValueError when no document was added."""
        if self._file is None:
            raise ValueError(f"{self.prefix}: this writer is already finished")
        if not self._lengths:
            self.abort()
            raise ValueError(f"{self.prefix}: no document was added, and an empty dataset cannot be read back")
        _sync_and_close(self._file)
        self._file = None

        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        with open(self._temporary_index, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(lengths) + 1))
            position = 0
            for first in range(0, len(lengths), _INDEX_BLOCK):
                file.write(lengths[first : first + _INDEX_BLOCK].astype("<i4").tobytes())
            for first in range(0, len(lengths), _INDEX_BLOCK):
                sizes = lengths[first : first + _INDEX_BLOCK].astype("<i8") * self.dtype.itemsize
                ends = position + np.cumsum(sizes)
                file.write((ends - sizes).astype("<i8").tobytes())
                position = int(ends[-1])
            for first in range(0, len(lengths) + 1, _INDEX_BLOCK):
                file.write(np.arange(first, min(first + _INDEX_BLOCK, len(lengths) + 1), dtype="<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())
        # An old index must not describe the new tokens, not even between two renames.
        index_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._temporary_tokens, tokens_path(self.prefix))
        os.replace(self._temporary_index, index_path(self.prefix))

    def abort(self) -> None:
        """Remove what was written so far; an earlier dataset of the same name is left alone."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._temporary_tokens.unlink(missing_ok=True)
        self._temporary_index.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._file is not None:
            self.finalize()


class IndexedDataset:
    """A dataset opened for reading: two files, or two objects of a store (`s3://bucket/prefix`).

    Nothing is loaded, and opening takes the same time whatever the size: checked_blocks evenly spaced blocks of the
    index are looked at (index_file.py; None: 256, of an object 2, its ends), what is read is checked then, and
    `scripts/check_data.py` checks all.
    remote_cache: the folder where parts of objects are kept (remote.py), default_remote_cache() if None.

    Raises FileNotFoundError when a file is missing and ValueError when the two are not a whole dataset. Pickles as what
    it found in them: a loader worker opens the files without checking again, and refuses others in their place.
    """

    def __init__(self, prefix: str | Path, checked_blocks: int | None = None, remote_cache: Path | None = None) -> None:
        self._identity: str | None = None
        self.prefix: str | Path = str(prefix) if is_url(str(prefix)) else Path(prefix)
        self._described = self._open(".idx", remote_cache)
        self._tokens = self._open(".bin", remote_cache)
        if checked_blocks is None:
            checked_blocks = _CHECKED_BLOCKS_REMOTE if is_url(str(prefix)) else CHECKED_BLOCKS
        self.index = IndexFile(self._described, checked_blocks)
        self.dtype = self.index.dtype
        self.num_tokens = self.index.num_tokens
        if self._tokens.size != self.index.num_bytes:
            described = self._described.name.rpartition("/")[2]
            raise ValueError(
                f"{self._tokens.name} has {self._tokens.size} bytes where {described} describes "
                f"{self.index.num_bytes}: the two files are not of one dataset or a copy was cut short; copy or "
                "prepare the dataset again"
            )

    def _open(self, ending: str, remote_cache: Path | None) -> ByteFile:
        path = f"{self.prefix}{ending}"
        try:
            return open_file(path, remote_cache)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} does not exist; a dataset is named by the path of its .idx and .bin without the ending"
            ) from None

    def __str__(self) -> str:
        return str(self.prefix)

    @property
    def num_documents(self) -> int:
        return self.index.num_documents

    @property
    def parts(self) -> list[IndexedDataset]:
        """The datasets that this source is made of: itself."""
        return [self]

    @property
    def num_sequences(self) -> int:
        """A document is one or more of them, or none if it is empty."""
        return self.index.num_sequences

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the sequences [first, last) begin in the stream, and where the last one ends: int64 [last - first + 1].

        Raises IndexError off the end, ValueError where the index is damaged.
        """
        if not 0 <= first <= last <= self.num_sequences:
            raise IndexError(f"sequences [{first}, {last}) are outside {self.prefix}, which has {self.num_sequences}")
        return self.index.sequence_offsets(first, last)

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the whole stream, read-only [length] of the file's dtype.

        Raises IndexError when the slice leaves the stream; ValueError when the file was cut short or replaced
        since it was opened, OSError when it cannot be read.
        """
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(
                f"tokens [{start}, {start + length}) are outside {self.prefix}, which has {self.num_tokens}"
            )
        size = self.dtype.itemsize
        return np.frombuffer(self._tokens.read(start * size, length * size), self.dtype)

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin in the stream, and where the last one ends: int64 [last - first + 1].

        Raises IndexError off the end, ValueError where the index is damaged.
        """
        if not 0 <= first <= last <= self.num_documents:
            raise IndexError(f"documents [{first}, {last}) are outside {self.prefix}, which has {self.num_documents}")
        return self.index.document_offsets(first, last)

    def document(self, document: int) -> np.ndarray:
        """All tokens of one document, read-only [its length]. Raises IndexError off the end."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} is outside {self.prefix}, which has {self.num_documents}")
        start, end = self.index.document_span(document)
        return self.tokens(start, end - start)

    def identity(self) -> str:
        """A name that two datasets share only if they hold the same tokens (see identity.py); the same wherever the
        files lie."""
        if self._identity is None:
            self._identity = blocks_identity(self._described, self._tokens)
        return self._identity

    def same_identity(self, saved: str) -> bool:
        """Whether `saved`, of a checkpoint, is of this dataset; also as checkpoints of version 0.2 have it, for which
        all of the index is read."""
        if has_scheme(saved):
            return saved == self.identity()
        return saved == identity_before(self._described, self._tokens)


def _code_of(dtype: np.dtype[Any]) -> int:
    for code, known in DTYPE_CODES.items():
        if known == dtype and np.issubdtype(dtype, np.integer):
            return code
    names = ", ".join(d.name for d in DTYPE_CODES.values() if np.issubdtype(d, np.integer))
    raise ValueError(f"tokens cannot be stored as {dtype}; use one of {names}")


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
