"""Megatron's token format: `<prefix>.idx` describes, `<prefix>.bin` holds the raw tokens.

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

Sequences lie in `.bin` back to back, so the whole dataset is also one token stream; training samples are cut from that
stream (order.py). Nothing here is proportional to the index in memory: a billion documents are 20 GB of it. Opening
checks the header, the size, both ends and evenly spaced blocks; `check_whole` looks at every byte.

Files written here open in Megatron-LM, and the other way round.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_OLDER_MAGIC = b"TNTIDX\x00\x00"
_PAIR = struct.Struct("<2q")

CHECKED_BLOCKS = 256
"""Of an index, when it is opened."""
_CHECKED_BLOCKS_REMOTE = 2
_CHECKED_ENTRIES = 1024  # of each array, in a block
_READ_WHOLE = 1 << 16  # bytes of an index that is read in one piece, and checked whole
INDEX_BLOCK = 1 << 20
"""Entries of an index that are computed, written or fully checked at once."""
_TOKENS_BYTES = 1 << 23
_IDENTITY_BLOCKS, _IDENTITY_BYTES = 16, 4096


def dtype_for_vocabulary(vocab_size: int) -> np.dtype[Any]:
    """Megatron's rule: uint16 for a vocabulary below 65500 tokens, else int32."""
    assert vocab_size >= 1, vocab_size
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


class IndexFile:
    """An open `.idx`. Sequences and documents count from 0.

    checked_blocks: how many blocks are checked now, both ends among them; an index that has no more is checked whole.

    Raises ValueError, with the first fault that is found.
    """

    def __init__(self, file: ByteFile, checked_blocks: int = CHECKED_BLOCKS) -> None:
        self.name = file.name
        self._file = file
        # Thousands of small files: one read for all of the checks.
        self._whole = file.peek(0, file.size) if file.size <= _READ_WHOLE else None
        if self._whole is not None:
            checked_blocks = max(checked_blocks, _READ_WHOLE // _CHECKED_ENTRIES)
        self._opening = True
        self.dtype, self.num_sequences, entries = self._read_header()
        self.num_documents = entries - 1
        self._pointers_at = HEADER.size + 4 * self.num_sequences
        self._entries_at = HEADER.size + 12 * self.num_sequences
        size = self._entries_at + 8 * entries
        if file.size not in (size, size + self.num_sequences):
            raise self._damaged(f"has {file.size} bytes where its header announces {size}")
        pointer, length = int(self._pointers(self.num_sequences - 1)[0]), int(self._lengths(self.num_sequences - 1)[0])
        self.num_bytes = pointer + length * self.dtype.itemsize
        """Of the `.bin`."""
        if not 0 <= self.num_bytes < 1 << 60:
            raise self._damaged(f"says that the last sequence has {length} tokens from byte {pointer} of the .bin on")
        ends = int(self._entries(0, 1)[0]), int(self._entries(self.num_documents, entries)[0])
        if ends != (0, self.num_sequences):
            raise self._damaged(f"has a document index from {ends[0]} to {ends[1]} over {self.num_sequences} sequences")
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

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin in the stream, and where the last one ends, in tokens: int64
        [last - first + 1].

        Raises ValueError for entries that cannot be right.
        """
        if last == first + 1:
            return np.array(self.document_span(first), np.int64)
        entries = self._entries(first, last + 1)
        if (entries[1:] < entries[:-1]).any() or entries[0] < 0 or entries[-1] > self.num_sequences:
            self.check_documents(first, last)
        begin = int(entries[0])
        return self.sequence_offsets(begin, int(entries[-1]))[entries - begin]

    def sequence_offsets(self, begin: int, end: int) -> np.ndarray:
        """The same of the sequences [begin, end): int64 [end - begin + 1]. Raises ValueError likewise."""
        pointers = self._borders(begin, end)
        offsets, odd = np.divmod(pointers, self.dtype.itemsize)
        if pointers[0] < 0 or pointers[-1] > self.num_bytes or (offsets[1:] < offsets[:-1]).any() or odd.any():
            raise self._damaged(f"has pointers of sequences {begin} to {end} that cannot be right")
        return offsets

    def document_span(self, document: int) -> tuple[int, int]:
        """Where one document begins and ends in the stream, in tokens: `document_offsets` of one, several times as
        quick."""
        begin, end = _PAIR.unpack(self._bytes(self._entries_at + 8 * document, 16))
        if not 0 <= begin <= end <= self.num_sequences:
            self.check_documents(document, document + 1)
        if end == begin + 1 and end < self.num_sequences:
            start, stop = _PAIR.unpack(self._bytes(self._pointers_at + 8 * begin, 16))
        else:
            ends = [begin, end]
            start, stop = (self.num_bytes if e == self.num_sequences else int(self._pointers(e)[0]) for e in ends)
        size = self.dtype.itemsize
        if not 0 <= start <= stop <= self.num_bytes or start % size or stop % size:
            raise self._damaged(f"has pointers of sequences {begin} to {end} that cannot be right")
        return start // size, stop // size

    def check_sequences(self, first: int, last: int) -> None:
        """Raise ValueError unless the sequences [first, last) lie in `.bin` back to back, up to the next one."""
        lengths = self._lengths(first, last)
        pointers = self._borders(first, last)
        wrong = (lengths < 0) | (pointers[1:] - pointers[:-1] != lengths * np.int64(self.dtype.itemsize))
        if wrong.any() or (first == 0 and pointers[0] != 0):
            place = int(wrong.argmax())
            raise self._damaged(
                f"says that sequence {first + place} has {lengths[place]} tokens from byte {pointers[place]} of the "
                f".bin on, and that the next one begins at byte {pointers[place + 1]}"
            )

    def check_documents(self, first: int, last: int) -> None:
        """Raise ValueError unless each of the documents [first, last) is a range of sequences."""
        entries = self._entries(first, last + 1)
        wrong = (entries[1:] < entries[:-1]) | (entries[:-1] < 0) | (entries[1:] > self.num_sequences)
        if wrong.any():
            place = int(wrong.argmax())
            raise self._damaged(
                f"says that document {first + place} is the sequences from {entries[place]} to {entries[place + 1]} of "
                f"{self.num_sequences}"
            )

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"{self.name} {what}: it was cut short or is damaged (scripts/prepare_data.py check finds the place); copy "
            "or prepare the dataset again"
        )

    def _borders(self, first: int, last: int) -> np.ndarray:
        """Where the sequences [first, last) begin, and where the last one's successor does, in bytes."""
        pointers = self._pointers(first, min(last + 1, self.num_sequences))
        return np.append(pointers, self.num_bytes) if last == self.num_sequences else pointers

    def _lengths(self, first: int, last: int | None = None) -> np.ndarray:
        return self._array("<i4", HEADER.size, first, last)

    def _pointers(self, first: int, last: int | None = None) -> np.ndarray:
        return self._array("<i8", self._pointers_at, first, last)

    def _entries(self, first: int, last: int) -> np.ndarray:
        return self._array("<i8", self._entries_at, first, last)

    def _array(self, dtype: str, offset: int, first: int, last: int | None) -> np.ndarray:
        count, item = 1 if last is None else last - first, int(dtype[2])
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
            raise self._damaged(f"does not start with Megatron's {MAGIC!r}, so it is not a whole .idx file")
        _, version, code, num_sequences, num_entries = HEADER.unpack(header)
        if version != VERSION:
            raise ValueError(f"{self.name} is of version {version} or big-endian; only version {VERSION} is known")
        dtype = DTYPE_CODES.get(code)
        if dtype is None or not np.issubdtype(dtype, np.integer):
            raise ValueError(f"{self.name} has dtype code {code}; token ids are integers: prepare the data again")
        if num_sequences == 0 or num_entries < 2:
            raise ValueError(f"{self.name} holds no documents; prepare the dataset again from non-empty text")
        return dtype, num_sequences, num_entries


def _spaced(total: int, blocks: int) -> list[int]:
    """Where as many blocks of _CHECKED_ENTRIES begin, evenly spaced from end to end; all if they are fewer."""
    if total <= blocks * _CHECKED_ENTRIES:
        return list(range(0, total, _CHECKED_ENTRIES))
    return [i * (total - _CHECKED_ENTRIES) // max(1, blocks - 1) for i in range(max(2, blocks))]


class IndexedDataset:
    """A dataset opened for reading: two files, or two objects of a store (`s3://bucket/prefix`).

    Nothing is loaded, and opening takes the same time whatever the size: checked_blocks evenly spaced blocks of the
    index are looked at (None: 256, of an object 2, its ends), and what is read is checked then.
    remote_cache: the folder where parts of objects are kept (storage.py), default_remote_cache() if None.

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
        self.num_tokens = self.index.num_bytes // self.dtype.itemsize
        self.num_documents, self.num_sequences = self.index.num_documents, self.index.num_sequences
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
    def parts(self) -> list[IndexedDataset]:
        return [self]

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

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the sequences [first, last) begin in the stream, and where the last one ends: int64 [last - first + 1].

        Raises IndexError off the end, ValueError where the index is damaged.
        """
        if not 0 <= first <= last <= self.num_sequences:
            raise IndexError(f"sequences [{first}, {last}) are outside {self.prefix}, which has {self.num_sequences}")
        return self.index.sequence_offsets(first, last)

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """The same of documents, each one or more sequences, or none if it is empty."""
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
        """`blocks-1:` and a sha256 of, for the `.idx` and then the `.bin`: the size (u64), and 16 blocks of 4 KiB,
        evenly spaced from end to end (block i begins at byte i * (size - 4096) // 15). A file of 64 KiB or less enters
        whole.

        It tells another tokenizer, corpus or preparation apart, in milliseconds for any size and wherever the files
        lie; it is no guard against a bit flipped between the blocks.
        """
        if self._identity is None:
            digest = hashlib.sha256()
            for file in (self._described, self._tokens):
                digest.update(file.size.to_bytes(8, "little"))
                if file.size <= _IDENTITY_BLOCKS * _IDENTITY_BYTES:
                    digest.update(file.peek(0, file.size))
                    continue
                for block in range(_IDENTITY_BLOCKS):
                    start = block * (file.size - _IDENTITY_BYTES) // (_IDENTITY_BLOCKS - 1)
                    digest.update(file.peek(start, _IDENTITY_BYTES))
            self._identity = f"blocks-1:{digest.hexdigest()}"
        return self._identity


def write_index(
    path: Path,
    dtype: np.dtype[Any],
    sequences: int,
    lengths: Callable[[], Iterable[np.ndarray]],
    documents: int | None = None,
    ends: Callable[[], Iterable[np.ndarray]] | None = None,
) -> None:
    """Write an `.idx` of so many sequences that lie back to back, in blocks, and sync it to disk.

    lengths: gives their lengths in blocks, each time it is called. ends: likewise the sequence after the last one of
    each of the documents; None: each sequence is a document.
    """
    code = next(code for code, known in DTYPE_CODES.items() if known == dtype)
    documents = sequences if documents is None else documents
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        for block in lengths():
            file.write(block.astype("<i4").tobytes())
        pointer = 0
        for block in lengths():
            sizes = block.astype("<i8") * dtype.itemsize
            file.write((pointer + np.cumsum(sizes) - sizes).astype("<i8").tobytes())
            pointer += int(sizes.sum())
        file.write(np.zeros(1, dtype="<i8").tobytes())
        for block in _counting(sequences) if ends is None else ends():
            file.write(block.astype("<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
        expected = HEADER.size + 12 * sequences + 8 * (documents + 1)
        if file.tell() != expected:
            raise ValueError(f"{path} would have {file.tell()} bytes instead of {expected}: an input was cut short")


def _counting(number: int) -> Iterator[np.ndarray]:
    for start in range(0, number, INDEX_BLOCK):
        yield np.arange(start + 1, min(start + INDEX_BLOCK, number) + 1, dtype=np.int64)


class IndexedDatasetWriter:
    """Writes documents one after another; the dataset appears under its name only when it is whole.

    Both files are written under temporary names, flushed to disk and renamed, `.idx` last: a crash leaves no
    `.idx`, hence no dataset. As a context manager it finalizes on a clean exit and cleans up after an
    exception. Each document is one sequence. `dtype` must be an integer type of the format.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type[np.integer[Any]]) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPE_CODES.values() or not np.issubdtype(self.dtype, np.integer):
            raise ValueError(f"tokens cannot be stored as {self.dtype}; use uint16 or int32")
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
        assert self._file is not None, "this writer is finished"
        values, which = np.asarray(tokens), f"document {len(self._lengths)} of {self.prefix}"
        if values.ndim != 1 or values.size == 0 or values.size > np.iinfo(np.int32).max:
            raise ValueError(
                f"{which} has shape {values.shape}; it must be [num_tokens] with 1 to {np.iinfo(np.int32).max} tokens: "
                "skip empty documents, split long ones"
            )
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"{which} holds {values.dtype}, not integer token ids")
        limits = np.iinfo(self.dtype)
        low, high = int(values.min()), int(values.max())
        if low < max(0, limits.min) or high > limits.max:
            raise ValueError(
                f"{which} has token ids from {low} to {high}; {self.dtype.name} holds 0 to {limits.max}: choose the "
                "type with dtype_for_vocabulary(vocab_size)"
            )
        self._file.write(values.astype(self.dtype).tobytes())
        self._lengths.append(values.size)

    def finalize(self) -> None:
        """Write the index and give both files their names. Raises ValueError when no document was added."""
        assert self._file is not None, "this writer is finished"
        if not self._lengths:
            self.abort()
            raise ValueError(f"{self.prefix}: no document was added, and an empty dataset cannot be read back")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        blocks = [lengths[first : first + INDEX_BLOCK] for first in range(0, len(lengths), INDEX_BLOCK)]
        write_index(self._temporary_index, self.dtype, len(lengths), lambda: blocks)
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


def check_whole(prefix: str | Path, vocab_size: int | None = None) -> Checked:
    """Check the whole index, that every token id is from 0 to below vocab_size (None: whatever is not negative), and
    that `<prefix>.json`, if it is there, says the same.

    Raises ValueError with the place of the first fault, and what IndexedDataset raises.
    """
    dataset = IndexedDataset(prefix)
    index = dataset.index
    for first in range(0, index.num_sequences, INDEX_BLOCK):
        index.check_sequences(first, min(first + INDEX_BLOCK, index.num_sequences))
    for first in range(0, index.num_documents, INDEX_BLOCK):
        index.check_documents(first, min(first + INDEX_BLOCK, index.num_documents))
    digest, size = hashlib.sha256(), dataset.dtype.itemsize
    smallest, largest = np.iinfo(np.int64).max, -1
    for start in range(0, dataset.num_tokens, _TOKENS_BYTES // size):
        tokens = dataset.tokens(start, min(_TOKENS_BYTES // size, dataset.num_tokens - start))
        digest.update(tokens.data)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            wrong = (tokens < 0) | (tokens >= (high + 1 if vocab_size is None else vocab_size))
            raise _wrong_id(dataset, start + int(wrong.argmax()), vocab_size)
        smallest, largest = min(smallest, low), max(largest, high)
    agreed = not is_url(str(prefix)) and facts_path(prefix).exists()
    if agreed:
        _compare_facts(dataset, digest.hexdigest())
    return Checked(dataset.num_documents, dataset.num_tokens, smallest, largest, agreed)


def _wrong_id(dataset: IndexedDataset, place: int, vocab_size: int | None) -> ValueError:
    def begin(document: int) -> int:
        return int(dataset.document_offsets(document, document)[0])

    document = bisect_right(range(dataset.num_documents), place, key=begin) - 1
    limit = "no id is negative" if vocab_size is None else f"ids are from 0 to {vocab_size - 1}"
    byte = place * dataset.dtype.itemsize
    return ValueError(
        f"{dataset}.bin: token {place - begin(document)} of document {document} (byte {byte}) is "
        f"{dataset.tokens(place, 1)[0]}; {limit}: the file is damaged, or of another tokenizer"
    )


def _compare_facts(dataset: IndexedDataset, digest: str) -> None:
    """Raise ValueError where the dataset, whose `.bin` has this sha256, is not what its facts say; those that are not
    there say nothing."""
    try:
        facts = dict(json.loads(facts_path(dataset.prefix).read_text(encoding="utf-8")))
        hashes = dict(facts.get("sha256", {}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{dataset}.json does not hold facts by name ({error}); restore or delete it") from error
    with open(f"{dataset}.idx", "rb") as file:
        of_index = hashlib.file_digest(file, "sha256").hexdigest()
    found = {"documents": dataset.num_documents, "tokens": dataset.num_tokens, "bin": digest, "idx": of_index}
    for name, actual in found.items():
        said = (hashes if name in ("bin", "idx") else facts).get(name, actual)
        if said != actual:
            raise ValueError(
                f"{dataset}.json says {str(said)[:12]} of {name} where the dataset has {str(actual)[:12]}: it was "
                "changed since it was prepared; copy or prepare the dataset again"
            )
