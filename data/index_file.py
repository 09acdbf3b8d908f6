"""The `.idx` file of a dataset in Megatron's format: what it says, read and checked in blocks.

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

Nothing here is proportional to the file in memory, and in time only `check(0, ...)` of all of it is: a billion
documents are 20 GB of index. Opening checks the header, the size, both ends and evenly spaced blocks.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from data.byte_file import ByteFile

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
