"""Megatron's memory-mapped token format: `<prefix>.idx` describes, `<prefix>.bin` holds the raw tokens.

`.idx`, little endian:

    9 bytes   magic "MMIDIDX\\0\\0"
    u64       version, 1
    u8        dtype code (see DTYPE_CODES)
    u64       number of sequences S
    u64       length of the document index, D + 1
    i32[S]    sequence lengths, in tokens
    i64[S]    sequence pointers, in bytes into `.bin`
    i64[D+1]  document index: document d is the sequences [index[d], index[d + 1])
    i8[S]     modes; only in multimodal data, accepted and not used

Sequences lie in `.bin` back to back, so the whole dataset is also one token stream; training samples are cut
from that stream (`samples.py`). Files written here open in Megatron-LM, and the other way round.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}

# How much of each end of `.bin` enters a dataset's identity: enough to notice another tokenizer, quick on any
# disk.
_IDENTITY_BYTES = 1 << 20


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
        self._lengths: list[int] = []
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

        lengths = np.asarray(self._lengths, dtype="<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        with open(self._temporary_index, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
            for array in (lengths, pointers, documents):
                file.write(array.tobytes())
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
    """A dataset opened for reading; nothing is loaded, the operating system pages the tokens in.

    Raises FileNotFoundError when a file is missing and ValueError when the two files are not a whole dataset.
    Pickles as its prefix, so a loader worker reopens the files instead of receiving a copy of the tokens.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        index, tokens = index_path(prefix), tokens_path(prefix)
        for path in (index, tokens):
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} does not exist; a dataset is named by the path of its .idx and .bin without the ending"
                )
        self.dtype, num_sequences, num_index_entries = _read_header(index)

        offset = HEADER.size
        size = offset + num_sequences * 12 + num_index_entries * 8
        actual = index.stat().st_size
        if actual not in (size, size + num_sequences):
            raise ValueError(
                f"{index} has {actual} bytes where its header announces {size}: it is truncated or damaged; "
                "prepare the dataset again"
            )
        mapped = np.memmap(index, mode="r", dtype=np.uint8)
        self._lengths = mapped[offset : offset + 4 * num_sequences].view("<i4")
        offset += 4 * num_sequences
        self._pointers = mapped[offset : offset + 8 * num_sequences].view("<i8")
        offset += 8 * num_sequences
        self._documents = mapped[offset : offset + 8 * num_index_entries].view("<i8")
        self.num_tokens = self._check_consistency(index)

        expected = self.num_tokens * self.dtype.itemsize
        actual = tokens.stat().st_size
        if actual != expected:
            raise ValueError(
                f"{tokens} has {actual} bytes where {index.name} describes {expected}: the two files are not "
                "of one dataset or a copy was cut short; copy or prepare the dataset again"
            )
        self._tokens = np.memmap(tokens, mode="r", dtype=self.dtype)

    def _check_consistency(self, index: Path) -> int:
        """The total number of tokens; ValueError unless lengths, pointers and documents agree."""
        lengths = self._lengths.astype(np.int64)
        if lengths.min() < 0:
            raise ValueError(f"{index}: sequence {int(lengths.argmin())} has a negative length; prepare it again")
        ends = np.cumsum(lengths)
        wrong = self._pointers != (ends - lengths) * self.dtype.itemsize
        if wrong.any():
            raise ValueError(
                f"{index}: the pointer of sequence {int(wrong.argmax())} is not the end of the sequence "
                "before it; the index is damaged or its sequences are not back to back: prepare the dataset "
                "again"
            )
        first, last = int(self._documents[0]), int(self._documents[-1])
        if first != 0 or last != len(lengths) or (np.diff(self._documents) < 0).any():
            raise ValueError(
                f"{index}: the document index runs from {first} to {last}, or not upwards, over "
                f"{len(lengths)} sequences; the index is damaged: prepare the dataset again"
            )
        return int(ends[-1])

    def __str__(self) -> str:
        return str(self.prefix)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the whole stream, as a read-only view [length] of the file's
        dtype.

        Raises IndexError when the slice leaves the stream.
        """
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(
                f"tokens [{start}, {start + length}) are outside {self.prefix}, which has {self.num_tokens}"
            )
        return self._tokens[start : start + length]

    def document(self, document: int) -> np.ndarray:
        """All tokens of one document, a read-only view [its length]. Raises IndexError off the end."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} is outside {self.prefix}, which has {self.num_documents}")
        first, last = int(self._documents[document]), int(self._documents[document + 1])
        if first == last:
            return self._tokens[:0]
        start = int(self._pointers[first]) // self.dtype.itemsize
        return self._tokens[start : start + int(self._lengths[first:last].sum(dtype=np.int64))]

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin, in tokens, and where the last ends: int64 [last - first + 1].

        Raises IndexError off the end.
        """
        if not 0 <= first <= last <= self.num_documents:
            raise IndexError(f"documents [{first}, {last}) are outside {self.prefix}, which has {self.num_documents}")
        if first == last:  # what a search asks for, many times
            sequence = int(self._documents[first])
            offset = self.num_tokens
            if sequence < len(self._pointers):
                offset = int(self._pointers[sequence]) // self.dtype.itemsize
            return np.array([offset], dtype=np.int64)
        sequences = self._documents[first : last + 1]
        # Behind the last sequence there is no pointer.
        at_end = sequences == len(self._pointers)
        pointers = self._pointers[np.where(at_end, 0, sequences)] // self.dtype.itemsize
        return np.where(at_end, self.num_tokens, pointers).astype(np.int64)

    def identity(self) -> str:
        """A sha256, the same wherever the files lie: all of `.idx` and the first and last MiB of `.bin`.

        It tells another tokenizer or another corpus apart, in a second even for terabytes; it is no guard
        against a bit flipped in the middle of `.bin`.
        """
        digest = hashlib.sha256()
        with open(index_path(self.prefix), "rb") as file:
            while block := file.read(_IDENTITY_BYTES):
                digest.update(block)
        with open(tokens_path(self.prefix), "rb") as file:
            digest.update(file.read(_IDENTITY_BYTES))
            file.seek(max(0, self.num_tokens * self.dtype.itemsize - _IDENTITY_BYTES))
            digest.update(file.read())
        return digest.hexdigest()

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[Path]]:
        return IndexedDataset, (self.prefix,)


def _code_of(dtype: np.dtype[Any]) -> int:
    for code, known in DTYPE_CODES.items():
        if known == dtype and np.issubdtype(dtype, np.integer):
            return code
    names = ", ".join(d.name for d in DTYPE_CODES.values() if np.issubdtype(d, np.integer))
    raise ValueError(f"tokens cannot be stored as {dtype}; use one of {names}")


def _read_header(index: Path) -> tuple[np.dtype[Any], int, int]:
    """(dtype, number of sequences, length of the document index) from a checked header."""
    with open(index, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(
            f"{index} does not start with Megatron's {MAGIC!r}: it is not an .idx file, or it was cut short; "
            "prepare the dataset again"
        )
    _, version, code, num_sequences, num_index_entries = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{index} is of version {version}; only version {VERSION} is known")
    dtype = DTYPE_CODES.get(code)
    if dtype is None or not np.issubdtype(dtype, np.integer):
        name = "unknown" if dtype is None else dtype.name
        raise ValueError(f"{index} has dtype code {code} ({name}); token ids are integers: prepare the data again")
    if num_sequences == 0 or num_index_entries < 2:
        raise ValueError(f"{index} holds no documents; prepare the dataset again from non-empty text")
    return dtype, num_sequences, num_index_entries


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
