"""The `.idx` file of a dataset in Megatron's format: what it says, read and checked in blocks.

`.idx`, little endian:

    9 bytes   magic "MMIDIDX\0\0"
    u64       version, 1
    u8        dtype code (see DTYPE_CODES)
    u64       number of sequences S
    u64       length of the document index, D + 1
    i32[S]    sequence lengths, in tokens
    i64[S]    sequence pointers, in bytes into `.bin`
    i64[D+1]  document index: document d is the sequences [index[d], index[d + 1])
    i8[S]     modes; only in multimodal data, accepted and not used

Nothing here is proportional to the file in memory, and in time only `check(0, ...)` of all of it is: a billion
documents are 20 GB of index. Opening checks the header, the size, both ends and evenly spaced blocks.

What a checkpoint remembers a dataset by: a hash that is the same wherever its two files lie.

It tells another tokenizer, another corpus or another preparation apart, in milliseconds for any size. It is no guard
against a bit flipped between the blocks that it reads.

Megatron's token format: `<prefix>.idx` describes (see index_file.py), `<prefix>.bin` holds the raw tokens.

Sequences lie in `.bin` back to back, so the whole dataset is also one token stream; training samples are cut
from that stream (`samples.py`). Files written here open in Megatron-LM, and the other way round.

Every byte of a dataset looked at: what opening one does not do, in blocks, whatever its size.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from data.storage import ByteFile, is_url, open_file

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

_PAIR = struct.Struct("<2q")
_OLDER_MAGIC = b"TNTIDX\x00\x00"
_CHECKED_ENTRIES = 1024  # of each array, in a block
_READ_WHOLE = 1 << 16  # bytes of an index that is read in one piece, and checked whole


class IndexFile:
    """An open `.idx`. Sequences and documents count from 0.

    checked_blocks: how many blocks are checked now, both ends among them; an index that has no more is checked whole.

    Raises ValueError, with the first fault that is found.
    """

    def __init__(self, file: ByteFile, checked_blocks: int = 256) -> None:
        self.name = file.name
        self._file = file
        # Thousands of small files: one read for all of the checks.
        self._whole = file.peek(0, file.size) if file.size <= _READ_WHOLE else None
        if self._whole is not None:
            checked_blocks = max(checked_blocks, _READ_WHOLE // _CHECKED_ENTRIES)
        self._opening = True
        self.dtype, self.num_sequences, self._num_entries = self._read_header()
        self._check_size()
        self._pointers_at = HEADER.size + 4 * self.num_sequences
        self._entries_at = HEADER.size + 12 * self.num_sequences
        pointer, length = self.pointers(self.num_sequences - 1), self.lengths(self.num_sequences - 1)
        self.num_bytes = int(pointer[0]) + int(length[0]) * self.dtype.itemsize
        """Of the `.bin`."""
        if not 0 <= self.num_bytes < 1 << 60:
            raise ValueError(
                f"{self.name}: the last sequence begins at byte {pointer[0]} of the .bin and has {length[0]} tokens; "
                "the index is damaged: prepare the dataset again"
            )
        self._check_ends()
        for first in _spaced(self.num_sequences, checked_blocks):
            self.check_sequences(first, min(first + _CHECKED_ENTRIES, self.num_sequences))
        for first in _spaced(self.num_documents, checked_blocks):
            self.check_documents(first, min(first + _CHECKED_ENTRIES, self.num_documents))
        if self.num_bytes == 0:
            raise ValueError(f"{self.name} holds no tokens, only empty sequences; prepare the dataset again")
        self._whole, self._opening = None, False

    @property
    def size(self) -> int:
        """Of the `.idx`, in bytes."""
        return self._file.size

    @property
    def num_documents(self) -> int:
        return self._num_entries - 1

    @property
    def num_tokens(self) -> int:
        return self.num_bytes // self.dtype.itemsize

    def lengths(self, first: int, last: int | None = None) -> np.ndarray:
        """Tokens in each of the sequences [first, last), by default of one: int32."""
        return self._array("<i4", HEADER.size, first, last)

    def pointers(self, first: int, last: int | None = None) -> np.ndarray:
        """Where each of the sequences [first, last), by default one, begins in `.bin`, in bytes: int64."""
        return self._array("<i8", self._pointers_at, first, last)

    def document_index(self, first: int, last: int) -> np.ndarray:
        """Entries [first, last) of the document index: int64."""
        return self._array("<i8", self._entries_at, first, last)

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin in the stream, and where the last one ends, in tokens: int64
        [last - first + 1].

        Raises ValueError for entries that cannot be right.
        """
        if last == first + 1:
            return np.array(self.document_span(first), np.int64)
        entries = self.document_index(first, last + 1)
        if (entries[1:] < entries[:-1]).any() or entries[0] < 0 or entries[-1] > self.num_sequences:
            self.check_documents(first, last)
        begin = int(entries[0])
        return self.sequence_offsets(begin, int(entries[-1]))[entries - begin]

    def sequence_offsets(self, begin: int, end: int) -> np.ndarray:
        """The same of the sequences [begin, end): int64 [end - begin + 1]. Raises ValueError likewise."""
        pointers = self._borders(begin, end)
        offsets, odd = np.divmod(pointers, self.dtype.itemsize)
        if pointers[0] < 0 or pointers[-1] > self.num_bytes or (offsets[1:] < offsets[:-1]).any() or odd.any():
            raise self._wrong_pointers(begin, end)
        return offsets

    def document_span(self, document: int) -> tuple[int, int]:
        """Where one document begins and ends in the stream, in tokens: `document_offsets` of one, several times as
        quick."""
        begin, end = _PAIR.unpack(self._bytes(self._entries_at + 8 * document, 16))
        if not 0 <= begin <= end <= self.num_sequences:
            self.check_documents(document, document + 1)
        if end < self.num_sequences:
            if end == begin + 1:
                start, stop = _PAIR.unpack(self._bytes(self._pointers_at + 8 * begin, 16))
            else:
                start, stop = int(self.pointers(begin)[0]), int(self.pointers(end)[0])
        else:
            start = self.num_bytes if begin == end else int(self.pointers(begin)[0])
            stop = self.num_bytes
        size = self.dtype.itemsize
        if not 0 <= start <= stop <= self.num_bytes or start % size or stop % size:
            raise self._wrong_pointers(begin, end)
        return start // size, stop // size

    def _wrong_pointers(self, first: int, last: int) -> ValueError:
        return ValueError(
            f"{self.name}: the pointers of sequences {first} to {last} cannot be right; the index is damaged "
            "(scripts/check_data.py finds the place): prepare the dataset again"
        )

    def check_sequences(self, first: int, last: int) -> None:
        """Raise ValueError unless the sequences [first, last) lie in `.bin` back to back, up to the next one."""
        lengths = self.lengths(first, last)
        if (negative := lengths < 0).any():
            sequence = first + int(negative.argmax())
            raise ValueError(f"{self.name}: sequence {sequence} has a negative length; prepare the dataset again")
        pointers = self._borders(first, last)
        if first == 0 and pointers[0] != 0:
            raise ValueError(
                f"{self.name}: sequence 0 begins at byte {pointers[0]} of the .bin; prepare the dataset again"
            )
        wrong = pointers[1:] - pointers[:-1] != lengths * np.int64(self.dtype.itemsize)
        if wrong.any():
            raise ValueError(
                f"{self.name}: the pointer of sequence {first + int(wrong.argmax()) + 1} is not the end of the "
                "sequence before it; the index is damaged or its sequences are not back to back: prepare the dataset "
                "again"
            )

    def check_documents(self, first: int, last: int) -> None:
        """Raise ValueError unless each of the documents [first, last) is a range of sequences."""
        entries = self.document_index(first, last + 1)
        wrong = (entries[1:] < entries[:-1]) | (entries[:-1] < 0) | (entries[1:] > self.num_sequences)
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(
                f"{self.name}: by the document index, document {first + place} is the sequences from {entries[place]} "
                f"to {entries[place + 1]} of {self.num_sequences}; the index is damaged: prepare the dataset again"
            )

    def _borders(self, first: int, last: int) -> np.ndarray:
        """Where the sequences [first, last) begin, and where the last one's successor does, in bytes."""
        pointers = self.pointers(first, min(last + 1, self.num_sequences))
        return np.append(pointers, self.num_bytes) if last == self.num_sequences else pointers

    def _array(self, dtype: str, offset: int, first: int, last: int | None) -> np.ndarray:
        count = 1 if last is None else last - first
        item = 4 if dtype == "<i4" else 8
        return np.frombuffer(self._bytes(offset + first * item, count * item), dtype)

    def _bytes(self, offset: int, length: int) -> bytes:
        if self._whole is not None:
            return self._whole[offset : offset + length]
        return self._file.peek(offset, length) if self._opening else self._file.read(offset, length)

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        """(dtype, number of sequences, length of the document index)."""
        header = self._bytes(0, min(HEADER.size, self._file.size))
        if header.startswith(_OLDER_MAGIC):
            raise ValueError(
                f"{self.name} is of Megatron's older format without memory mapping (TNTIDX); prepare the dataset "
                "again, with a dataset_impl of mmap"
            )
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ValueError(
                f"{self.name} does not start with Megatron's {MAGIC!r}: it is not an .idx file, or it was cut short; "
                "prepare the dataset again"
            )
        _, version, code, num_sequences, num_entries = HEADER.unpack(header)
        if version == int.from_bytes(VERSION.to_bytes(8, "little"), "big"):
            raise ValueError(f"{self.name} is big-endian; the format is little-endian: write the dataset again")
        if version != VERSION:
            raise ValueError(f"{self.name} is of version {version}; only version {VERSION} is known")
        dtype = DTYPE_CODES.get(code)
        if dtype is None or not np.issubdtype(dtype, np.integer):
            name = "unknown" if dtype is None else dtype.name
            raise ValueError(
                f"{self.name} has dtype code {code} ({name}); token ids are integers: prepare the data again"
            )
        if num_sequences == 0 or num_entries < 2:
            raise ValueError(f"{self.name} holds no documents; prepare the dataset again from non-empty text")
        return dtype, num_sequences, num_entries

    def _check_size(self) -> None:
        size, actual = HEADER.size + self.num_sequences * 12 + self._num_entries * 8, self._file.size
        if actual not in (size, size + self.num_sequences):
            raise ValueError(
                f"{self.name} has {actual} bytes where its header announces {size}: it is truncated or damaged; "
                "prepare the dataset again"
            )

    def _check_ends(self) -> None:
        first, last = (
            int(self.document_index(0, 1)[0]),
            int(self.document_index(self.num_documents, self._num_entries)[0]),
        )
        if first != 0 or last != self.num_sequences:
            raise ValueError(
                f"{self.name}: the document index runs from {first} to {last} over {self.num_sequences} sequences; the "
                "index is damaged: prepare the dataset again"
            )


def _spaced(total: int, blocks: int) -> list[int]:
    """Where as many blocks of _CHECKED_ENTRIES begin, evenly spaced from end to end; all if they are fewer."""
    if total <= blocks * _CHECKED_ENTRIES:
        return list(range(0, total, _CHECKED_ENTRIES))
    return [i * (total - _CHECKED_ENTRIES) // max(1, blocks - 1) for i in range(max(2, blocks))]


_SCHEME = "blocks-1"
_BLOCKS, _BLOCK_BYTES = 16, 4096


def blocks_identity(index: ByteFile, tokens: ByteFile) -> str:
    """`blocks-1:` and a sha256 of, for the `.idx` and then the `.bin`: the size (u64), and 16 blocks of 4 KiB, evenly
    spaced from end to end (block i begins at byte i * (size - 4096) // 15). A file of 64 KiB or less enters whole."""
    digest = hashlib.sha256()
    for file in (index, tokens):
        digest.update(file.size.to_bytes(8, "little"))
        if file.size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(file.peek(0, file.size))
        else:
            for block in range(_BLOCKS):
                digest.update(file.peek(block * (file.size - _BLOCK_BYTES) // (_BLOCKS - 1), _BLOCK_BYTES))
    return f"{_SCHEME}:{digest.hexdigest()}"


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


def facts_path(prefix: str | Path) -> Path:
    """`<prefix>.json`, what is known of a pair; optional for those who read it."""
    return Path(f"{prefix}.json")


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


_ENTRIES = 1 << 20
_TOKENS_BYTES = 1 << 23


@dataclass(frozen=True)
class Checked:
    """What was counted in a dataset without a fault. agreed: whether there is a `<prefix>.json`, which then
    says the same."""

    documents: int
    tokens: int
    smallest_id: int
    largest_id: int
    agreed: bool

    def __str__(self) -> str:
        agreed = ", as its .json says" if self.agreed else ""
        ids = f"ids {self.smallest_id} to {self.largest_id}"
        return f"{self.documents:,} documents, {self.tokens:,} tokens, {ids}{agreed}"


def check_whole(
    prefix: str | Path, vocab_size: int | None = None, report: Callable[[float], None] = lambda share: None
) -> Checked:
    """Check the whole index, that every token id is from 0 to below vocab_size (None: whatever is not negative), and
    that `<prefix>.json`, if it is there, says the same.

    report gets the share of the work that is done, from time to time.

    Raises ValueError with the place of the first fault, and what IndexedDataset raises.
    """
    dataset = IndexedDataset(prefix)
    index, total = dataset.index, dataset.index.num_bytes + dataset.index.size
    for first in range(0, index.num_sequences, _ENTRIES):
        index.check_sequences(first, min(first + _ENTRIES, index.num_sequences))
        report(12 * first / total)
    for first in range(0, index.num_documents, _ENTRIES):
        index.check_documents(first, min(first + _ENTRIES, index.num_documents))
        report((12 * index.num_sequences + 8 * first) / total)
    facts = None if is_url(str(prefix)) else _facts(dataset)
    smallest, largest, digest = _check_tokens(dataset, vocab_size, lambda done: report((index.size + done) / total))
    if facts is not None:
        _compare(dataset, facts, digest)
    return Checked(dataset.num_documents, dataset.num_tokens, smallest, largest, facts is not None)


def _check_tokens(
    dataset: IndexedDataset, vocab_size: int | None, report: Callable[[int], None]
) -> tuple[int, int, str]:
    """(smallest id, largest id, sha256 of the `.bin`)."""
    digest, size = hashlib.sha256(), dataset.dtype.itemsize
    smallest, largest = np.iinfo(np.int64).max, -1
    block = _TOKENS_BYTES // size
    for start in range(0, dataset.num_tokens, block):
        tokens = dataset.tokens(start, min(block, dataset.num_tokens - start))
        digest.update(tokens.data)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            wrong = (tokens < 0) if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
            place = start + int(wrong.argmax())
            document = _document_of(dataset, place)
            limit = "no id is negative" if vocab_size is None else f"ids are from 0 to {vocab_size - 1}"
            raise ValueError(
                f"{dataset}.bin: token {place - int(dataset.document_offsets(document, document)[0])} of document "
                f"{document} (byte {place * size}) is {tokens[place - start]}; {limit}: the file is damaged, or of "
                "another tokenizer"
            )
        smallest, largest = min(smallest, low), max(largest, high)
        report((start + len(tokens)) * size)
    return smallest, largest, digest.hexdigest()


def _document_of(dataset: IndexedDataset, token: int) -> int:
    starts = _Starts(dataset)
    return bisect_right(starts, token) - 1


class _Starts:
    """Where each document begins, as a sequence to search in."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return self._dataset.num_documents

    def __getitem__(self, document: int) -> int:
        return int(self._dataset.document_offsets(document, document)[0])


def _facts(dataset: IndexedDataset) -> dict[str, Any] | None:
    """What `<prefix>.json` holds, if it is there. Raises ValueError where that is no facts."""
    path = Path(f"{dataset}.json")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore or delete it") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{path} does not hold facts by name; restore or delete it")
    return facts


def _compare(dataset: IndexedDataset, facts: dict[str, Any], digest: str) -> None:
    """Raise ValueError where the dataset, whose `.bin` has this sha256, is not what the facts say; those that are not
    there say nothing."""
    found = {"documents": dataset.num_documents, "tokens": dataset.num_tokens}
    for name, count in found.items():
        if name in facts and facts[name] != count:
            raise ValueError(
                f"{dataset} has {count} {name} where {dataset}.json says {facts[name]}: they are not of one dataset"
            )
    hashes = facts.get("sha256")
    if not isinstance(hashes, dict):
        return
    with open(f"{dataset}.idx", "rb") as file:
        of_index = hashlib.file_digest(file, "sha256").hexdigest()
    for ending, actual in (("bin", digest), ("idx", of_index)):
        if ending in hashes and hashes[ending] != actual:
            said = str(hashes[ending])[:12]
            raise ValueError(
                f"{dataset}.{ending} has the sha256 {actual[:12]} where {dataset}.json says {said}: "
                "it was changed since it was prepared; copy or prepare the dataset again"
            )
