"""Token streams, and Megatron's file format for them: `<prefix>.bin` has the raw tokens, `<prefix>.idx` the index.

`.idx`, little endian:

    9 bytes   magic "MMIDIDX\\0\\0"
    u64       version, 1
    u8        dtype code (see DTYPE_CODES)
    u64       number of sequences S
    u64       length of the document index, D + 1
    i32[S]    sequence lengths, in tokens
    i64[S]    sequence pointers, in bytes into `.bin`
    i64[D+1]  document index: document d is the sequences [index[d], index[d + 1])
    i8[S]     modes; only in multimodal data, which is refused

`<prefix>.json` is optional and has facts about the pair: its tokenizer, counts and hashes.

The sequences are contiguous in `.bin`, so a dataset is also one stream of tokens, from which samples are cut
(order.py). The index is never read into memory as a whole: for a billion documents it has 20 GB. Opening checks the
header, the size, both ends and evenly spaced blocks; `prepare_data.py check` checks every byte. Megatron-LM opens files
that are written here, and its files open here.

`Concatenation` makes one stream of several; `TokenRange` is a part of one. The documents of a sample are numbered from
0 in their order, including those that are only partly in the sample, without empty ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from data.storage import LocalFile, RemoteFile, is_url

if TYPE_CHECKING:  # loader workers do not import the tokenizers
    from data.tokenizer import TextTokenizer

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""The integer types; 6 and 7 are FP64 and FP32."""

# Blocks of an index that opening checks; of an index in a store only both ends, because each block is one request.
_CHECKED_BLOCKS, _CHECKED_BLOCKS_REMOTE = 16, 2
_CHECKED_ENTRIES = 1024  # of each array, in a block
INDEX_BLOCK = 1 << 20
"""Entries of an index that are computed, written or checked at once."""
_FACTS_BYTES = 1 << 20  # a larger `.json` is something else
_IDENTITY_BLOCKS, _IDENTITY_BYTES = 16, 4096


class TokenSource(Protocol):
    """One stream of tokens: the concatenated documents, from which samples are cut.

    It is pickled for loader workers, so it should reopen large things instead of copying them. `str()` gives its origin
    for error messages. A slice outside the stream is an AssertionError.

    num_sequences: the sequences of the `.idx`, which Megatron shuffles; a document has one or more, an empty one none.
    parts: the sources that this one concatenates, in order; [self] if it is not a concatenation.
    """

    num_tokens: int
    num_documents: int

    @property
    def num_sequences(self) -> int: ...

    @property
    def parts(self) -> Sequence[TokenSource]: ...

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream, integers [length]."""

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        """Where the documents [first, last) begin in the stream and the last one ends: int64 [last - first + 1]."""

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        """As `document_offsets`, for the sequences [first, last)."""

    def identity(self) -> str:
        """A string that is equal only for sources with the same tokens; checkpoints save it."""


Facts = Mapping[str, Mapping[str, Any] | None]
"""What is known of how data was made: "tokenizer" (with a "fingerprint"), and the tokens that end ("eod") and begin
("bos") every document, each with "token" and "id"; None for no token. Without a key nothing is known about it."""


def document_tokens_text(facts: Facts) -> str:
    """One line about the tokens that begin and end documents, for people."""

    def named(key: str) -> str:
        if key not in facts:
            return "unknown"
        mark = facts[key]
        return "no token" if mark is None else f"{mark['token']} (id {mark['id']})"

    return f"documents begin with: {named('bos')}, end with: {named('eod')}"


@dataclass(frozen=True)
class DataBundle:
    """Opened sources by name. tokenizer: that of their tokens, if given. facts: of all. warnings: lines."""

    train: Mapping[str, TokenSource]
    validation: Mapping[str, TokenSource]
    tokenizer: TextTokenizer | None
    facts: Facts = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def summary(self) -> str:
        """A line with documents and tokens for each source of each split (at most 24), one about the tokens that begin
        and end documents, the warnings, and one for each file that is read twice."""
        lines = []
        for split, sources in (("train", self.train), ("validation", self.validation)):
            for name, source in list(sources.items())[:24]:
                files = f" in {len(source.parts):,} files" if len(source.parts) > 1 else ""
                counts = f"{source.num_documents:>10,} documents {source.num_tokens:>14,} tokens"
                lines.append(f"{split:<10} {name:<12} {counts}{files}")
            if len(sources) > 24:
                lines.append(f"{split:<10} and {len(sources) - 24:,} more")
        lines.append(document_tokens_text(self.facts))
        return "\n".join([*lines, *self.warnings, *self._read_twice()])

    def _read_twice(self) -> list[str]:
        """A warning for each file that two sources, or training and validation, have in common."""
        users: dict[str, dict[str, str]] = {}
        for key, sources in (("data.sources", self.train), ("data.validation", self.validation)):
            for name, source in sources.items():
                for part in source.parts:
                    users.setdefault(part.identity(), {})[f"{key}.{name}"] = str(part)
        found = []
        for path_by_key in users.values():
            if len(path_by_key) < 2:
                continue
            is_held_out = len({key.split(".")[1] for key in path_by_key}) > 1
            why = "the validation loss includes training text" if is_held_out else "epochs are counted for each of them"
            named = " and ".join(f"{key} ({path})" for key, path in list(path_by_key.items())[:3])
            found.append(f"warning: {named} read the same tokens; {why}")
        return found[:8] + ([f"warning: and {len(found) - 8} more files are read twice"] if len(found) > 8 else [])


class TokenIdError(ValueError):
    """A token id outside the model's vocabulary: another start would fail in the same way."""


def check_ids(what: str, stream: TokenSource, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise TokenIdError for an id outside the model's vocabulary, before an embedding kernel fails on it."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise TokenIdError(
            f"{what} ({stream}) has the token id {low if low < 0 else high}, outside the model's vocabulary of "
            f"{vocab_size}: it was made with another tokenizer; raise model.vocab_size or prepare the data again"
        )


def document_at(source: TokenSource, token: int) -> int:
    """The last document that begins at or before a token."""
    documents = range(source.num_documents)
    return bisect_right(documents, token, key=lambda document: int(source.document_offsets(document, document)[0])) - 1


def documents_after(source: TokenSource, first: int, end: int, block: int) -> np.ndarray:
    """The first tokens of the documents that begin after token `first` and before `end`: int64. block: how many
    documents to read first; each further read is larger, until a document begins at or after `end`."""
    found = [np.zeros(0, dtype=np.int64)]
    document = document_at(source, first) + 1
    while document < source.num_documents:
        offsets = source.document_offsets(document, min(document + block, source.num_documents))
        found.append(offsets[:-1][offsets[:-1] < end])
        if offsets[-1] >= end:
            break
        document, block = document + block, 4 * block
    return np.concatenate(found)


def document_numbers(source: TokenSource, start: int, length: int) -> np.ndarray:
    """Of the tokens [start, start + length) of a stream, the number of its document, from 0: int32 [length]."""
    begins = np.zeros(length, dtype=np.int32)
    begins[documents_after(source, start, start + length, block=16) - start] = 1
    return begins.cumsum(dtype=np.int32)


def dtype_for_vocabulary(vocab_size: int) -> np.dtype[Any]:
    """Megatron's rule: uint16 for fewer than 65500 ids, otherwise int32."""
    assert vocab_size >= 1, vocab_size
    return DTYPE_CODES[8] if vocab_size < 65500 else DTYPE_CODES[4]


class IndexedDataset:
    """A dataset opened for reading, a `TokenSource`: two files, or two objects in a store (`s3://bucket/prefix`).

    Opening takes the same time for any size: it checks some evenly spaced blocks of the index; each read checks the
    part that it uses. remote_cache: the folder that caches blocks of objects (storage.py); None: the user's.

    Raises FileNotFoundError if a file is missing, and ValueError if the two files are not a complete dataset. A read
    raises ValueError too if a file was cut short or replaced, or its part of the index is damaged.
    """

    def __init__(self, prefix: str | Path, remote_cache: Path | None = None) -> None:
        self.prefix, self._remote_cache = str(prefix), remote_cache
        self._index, self._tokens = (self._open(ending, remote_cache) for ending in (".idx", ".bin"))
        self._opening = True
        self.dtype, self.num_sequences, self.num_documents = self._read_header()
        self._pointers_at = HEADER.size + 4 * self.num_sequences
        self._entries_at = HEADER.size + 12 * self.num_sequences
        size = self._entries_at + 8 * (self.num_documents + 1)
        if self._index.size != size:
            raise self._damaged(f"has {self._index.size} bytes, but by its header it should have {size}")
        last = self.num_sequences - 1
        pointer, length = int(self._pointers(last, last + 1)[0]), int(self._lengths(last, last + 1)[0])
        self._num_bytes = pointer + length * self.dtype.itemsize  # of the .bin
        if not 0 <= self._num_bytes < 1 << 60:
            raise self._damaged(f"says that the last sequence has {length} tokens from byte {pointer} of the .bin")
        ends = [int(self._entries(document, document + 1)[0]) for document in (0, self.num_documents)]
        if ends != [0, self.num_sequences]:
            raise self._damaged(f"has a document index from {ends[0]} to {ends[1]} over {self.num_sequences} sequences")
        blocks = _CHECKED_BLOCKS_REMOTE if is_url(self.prefix) else _CHECKED_BLOCKS
        self.check_index(_CHECKED_ENTRIES, blocks)
        if self._num_bytes == 0:
            raise ValueError(f"{self}.idx has no tokens, only empty sequences; prepare the dataset again")
        self._opening = False
        self.num_tokens = self._num_bytes // self.dtype.itemsize
        if self._tokens.size != self._num_bytes:
            raise ValueError(
                f"{self}.bin has {self._tokens.size} bytes, but by {self._index.name.rpartition('/')[2]} it should "
                f"have {self._num_bytes}: the two files are not of the same dataset, or a copy was cut short; copy or "
                "prepare the dataset again"
            )

    def _open(self, ending: str, remote_cache: Path | None) -> LocalFile | RemoteFile:
        path = f"{self.prefix}{ending}"
        try:
            return RemoteFile(path, remote_cache) if is_url(path) else LocalFile(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} does not exist; name a dataset by the path of its .idx and .bin without the ending; "
                "scripts/prepare_data.py makes these files from text"
            ) from None

    def __str__(self) -> str:
        return self.prefix

    @property
    def parts(self) -> list[IndexedDataset]:
        return [self]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of `<prefix>.json`; {} if there is none. Raises ValueError for damage."""
        remedy = f"restore {self}.json, or remove it if the tokens are right"
        try:
            file = self._open(".json", self._remote_cache)
            facts = dict(json.loads(file.read(0, min(file.size, _FACTS_BYTES))))
            for key, inside in (("tokenizer", "fingerprint"), ("eod", "id"), ("bos", "id")):
                if facts.get(key) is not None:
                    facts[key][inside]
        except (FileNotFoundError, PermissionError):  # stores that do not list their objects refuse a missing one
            return {}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self}.json does not have the facts of a dataset ({error}); {remedy}") from error
        for name, own in (("tokens", self.num_tokens), ("documents", self.num_documents), ("dtype", self.dtype.name)):
            if facts.get(name, own) != own:
                raise ValueError(f"{self}.json describes other tokens: {name} {facts[name]}, here {own}; {remedy}")
        return facts

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream: [length] in the file's dtype, read-only."""
        assert 0 <= start <= start + length <= self.num_tokens, (self.prefix, start, length)
        size = self.dtype.itemsize
        return np.frombuffer(self._tokens.read(start * size, length * size), self.dtype)

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        assert 0 <= first <= last <= self.num_documents, (self.prefix, first, last)
        entries = self._checked_entries(first, last)
        begin = int(entries[0])
        return self.sequence_offsets(begin, int(entries[-1]))[entries - begin]

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        assert 0 <= first <= last <= self.num_sequences, (self.prefix, first, last)
        pointers = self._borders(first, last)
        offsets, odd = np.divmod(pointers, self.dtype.itemsize)
        if pointers[0] < 0 or pointers[-1] > self._num_bytes or (offsets[1:] < offsets[:-1]).any() or odd.any():
            raise self._damaged(f"has impossible pointers for the sequences {first} to {last}")
        return offsets

    @cached_property
    def _sampled(self) -> tuple[str, np.ndarray]:
        """The identity, and the least and largest id of each block of tokens that it covers."""
        digest, ids = hashlib.sha256(), list[int]()
        for file in (self._index, self._tokens):
            digest.update(file.size.to_bytes(8, "little"))
            starts, length = [0], file.size
            if file.size > _IDENTITY_BLOCKS * _IDENTITY_BYTES:
                places, length = range(_IDENTITY_BLOCKS), _IDENTITY_BYTES
                starts = [block * (file.size - _IDENTITY_BYTES) // (_IDENTITY_BLOCKS - 1) for block in places]
            for start in starts:
                content = file.read(start, length, exact=True)
                digest.update(content)
                if file is self._tokens:  # a block may begin and end within a token
                    begin, size = -start % self.dtype.itemsize, self.dtype.itemsize
                    tokens = np.frombuffer(content, self.dtype, (length - begin) // size, begin)
                    ids += [int(tokens.min()), int(tokens.max())]
        return f"blocks-1:{digest.hexdigest()}", np.array(ids)

    @property
    def sampled_ids(self) -> np.ndarray:
        """Ids of the dataset, among them the least and the largest one of the tokens that `identity` covers: int64."""
        return self._sampled[1]

    def identity(self) -> str:
        """`blocks-1:` and a sha256 over the `.idx` and then the `.bin`. Of each file it covers the size (u64) and 16
        blocks of 4 KiB, evenly spaced from end to end (block i begins at byte i * (size - 4096) // 15), or the whole
        content if the file has at most 64 KiB.

        It differs for another tokenizer, corpus or preparation and takes milliseconds for any size. It does not depend
        on the path, and does not detect a changed bit between the blocks.
        """
        return self._sampled[0]

    def check_index(self, entries: int, blocks: int | None = None) -> None:
        """Check `blocks` blocks of `entries` entries of the index each, evenly spaced from end to end; None: check the
        whole index. Raises ValueError with the place of the first fault."""
        for total, check in ((self.num_sequences, self._check_sequences), (self.num_documents, self._checked_entries)):
            firsts: Iterable[int] = range(0, total, entries)
            if blocks is not None and total > blocks * entries:
                firsts = (i * (total - entries) // (blocks - 1) for i in range(blocks))
            for first in firsts:
                check(first, min(first + entries, total))

    def _check_sequences(self, first: int, last: int) -> None:
        """Check that the sequences [first, last) are contiguous in `.bin`, up to the next one."""
        lengths = self._lengths(first, last)
        pointers = self._borders(first, last)
        wrong = (lengths < 0) | (pointers[1:] - pointers[:-1] != lengths * np.int64(self.dtype.itemsize))
        if wrong.any() or (first == 0 and pointers[0] != 0):
            place = int(wrong.argmax())
            raise self._damaged(
                f"says that sequence {first + place} has {lengths[place]} tokens from byte {pointers[place]} of the "
                f".bin, and that the next one begins at byte {pointers[place + 1]}"
            )

    def _checked_entries(self, first: int, last: int) -> np.ndarray:
        """The first sequence of each of the documents [first, last]; `last` may be the number of documents."""
        entries = self._entries(first, last + 1)
        wrong = (entries < 0) | (entries > self.num_sequences)
        wrong[1:] |= entries[1:] < entries[:-1]
        if wrong.any():
            place = int(wrong.argmax())
            raise self._damaged(
                f"says that document {first + place} begins with sequence {entries[place]} of {self.num_sequences}, "
                f"and the one before it with {entries[max(0, place - 1)]}"
            )
        return entries

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"{self}.idx {what}: it was cut short or is damaged (scripts/prepare_data.py check finds the place); copy "
            "or prepare the dataset again"
        )

    def _borders(self, first: int, last: int) -> np.ndarray:
        """Where the sequences [first, last) and the one after them begin, in bytes."""
        pointers = self._pointers(first, min(last + 1, self.num_sequences))
        return np.append(pointers, self._num_bytes) if last == self.num_sequences else pointers

    def _lengths(self, first: int, last: int) -> np.ndarray:
        return np.frombuffer(self._bytes(HEADER.size + 4 * first, 4 * (last - first)), "<i4")

    def _pointers(self, first: int, last: int) -> np.ndarray:
        return np.frombuffer(self._bytes(self._pointers_at + 8 * first, 8 * (last - first)), "<i8")

    def _entries(self, first: int, last: int) -> np.ndarray:
        return np.frombuffer(self._bytes(self._entries_at + 8 * first, 8 * (last - first)), "<i8")

    def _bytes(self, offset: int, length: int) -> bytes:
        return self._index.read(offset, length, exact=self._opening)

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        header = self._bytes(0, min(HEADER.size, self._index.size))
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise self._damaged(f"starts with {header[:9]!r}, not with Megatron's {MAGIC!r}")
        _, version, code, num_sequences, num_entries = HEADER.unpack(header)
        if version != VERSION:
            raise ValueError(f"{self}.idx has version {version} or is big-endian; only version {VERSION} is known")
        dtype = DTYPE_CODES.get(code)
        if dtype is None:
            raise ValueError(f"{self}.idx has dtype code {code}; token ids are integers: prepare the data again")
        if num_sequences == 0 or num_entries < 2:
            raise ValueError(f"{self}.idx has no documents; prepare the dataset again from non-empty text")
        return dtype, num_sequences, num_entries - 1


class Concatenation:
    """`parts`, one after the other, as one `TokenSource`. A part may occur twice and then counts twice."""

    def __init__(self, parts: Sequence[TokenSource]) -> None:
        self.parts = list(parts)
        self._token_starts = list(accumulate((part.num_tokens for part in parts), initial=0))
        self._document_starts = list(accumulate((part.num_documents for part in parts), initial=0))
        self.num_tokens, self.num_documents = self._token_starts[-1], self._document_starts[-1]

    @cached_property
    def _sequence_starts(self) -> list[int]:
        return list(accumulate((part.num_sequences for part in self.parts), initial=0))

    @property
    def num_sequences(self) -> int:
        return self._sequence_starts[-1]

    def __str__(self) -> str:
        return f"{self.parts[0]} and {len(self.parts) - 1} more"

    def tokens(self, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= self.num_tokens, (str(self), start, length)
        places = self._places(self._token_starts, start, start + length)
        pieces = [self.parts[part].tokens(first, last - first) for part, first, last in places]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_offsets(self, first: int, last: int) -> np.ndarray:
        return self._offsets("document_offsets", self._document_starts, first, last)

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        return self._offsets("sequence_offsets", self._sequence_starts, first, last)

    def _offsets(
        self, name: Literal["document_offsets", "sequence_offsets"], starts: list[int], first: int, last: int
    ) -> np.ndarray:
        assert 0 <= first <= last <= starts[-1], (str(self), name, first, last)
        pieces = [
            getattr(self.parts[part], name)(begin, end) + self._token_starts[part]
            for part, begin, end in self._places(starts, first, last)
        ]
        # The last offset of a piece is the first of the next.
        return np.concatenate([*(piece[:-1] for piece in pieces[:-1]), pieces[-1]])

    def _places(self, starts: list[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(part, first, last in this part) for the tokens, documents or sequences [first, last), at least one."""
        part = min(bisect_right(starts, first), len(self.parts)) - 1
        while True:
            end = min(last, starts[part + 1])
            yield part, first - starts[part], end - starts[part]
            if end == last:
                return
            first, part = end, part + 1

    def identity(self) -> str:
        """`parts-1:` and a sha256 over the sizes and identities of the parts in order."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{part.num_tokens} {part.identity()}\n".encode())
        return f"parts-1:{digest.hexdigest()}"


class TokenRange:
    """The sequences [first, end) of `stream` as a `TokenSource`; each sequence counts as a document."""

    def __init__(self, stream: TokenSource, first: int, end: int) -> None:
        self.stream, self._first = stream, first
        self.num_documents = self.num_sequences = end - first
        borders = stream.sequence_offsets(first, end)
        self._start = int(borders[0])
        self.num_tokens = int(borders[-1]) - self._start

    def __str__(self) -> str:
        return f"{self.stream}, sequences [{self._first}, {self._first + self.num_sequences})"

    @property
    def parts(self) -> list[TokenSource]:
        return [self]

    def tokens(self, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= self.num_tokens, (str(self), start, length)
        return self.stream.tokens(self._start + start, length)

    def sequence_offsets(self, first: int, last: int) -> np.ndarray:
        assert 0 <= first <= last <= self.num_sequences, (str(self), first, last)
        return self.stream.sequence_offsets(self._first + first, self._first + last) - self._start

    document_offsets = sequence_offsets

    def identity(self) -> str:
        """`range-1:`, the range of sequences, and the identity of the stream."""
        return f"range-1:{self._first}-{self._first + self.num_sequences} of {self.stream.identity()}"


def write_index(path: Path, dtype: np.dtype[Any], pieces: Sequence[np.ndarray]) -> None:
    """Write the `.idx` of contiguous documents of one sequence each, and sync it to disk.

    pieces: lengths of documents. The arrays are read in blocks, so they may be memory-mapped.
    """
    code = next(code for code, known in DTYPE_CODES.items() if known == dtype)
    documents = sum(map(len, pieces))
    blocks = [piece[at : at + INDEX_BLOCK] for piece in pieces for at in range(0, len(piece), INDEX_BLOCK)]
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
        for block in blocks:
            file.write(block.astype("<i4").tobytes())
        pointer = 0
        for block in blocks:
            sizes = block.astype("<i8") * dtype.itemsize
            file.write((pointer + np.cumsum(sizes) - sizes).astype("<i8").tobytes())
            pointer += int(sizes.sum())
        for first in range(0, documents + 1, INDEX_BLOCK):
            file.write(np.arange(first, min(first + INDEX_BLOCK, documents + 1), dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_dataset(
    prefix: str | Path, documents: Iterable[Sequence[int] | np.ndarray], dtype: np.dtype[Any] | type[np.integer[Any]]
) -> None:
    """Write documents, integers [num_tokens] each, as a dataset of `dtype` in which each document is one sequence. The
    `.idx` is written last, so an incomplete dataset cannot be opened."""
    stored = np.dtype(dtype).newbyteorder("<")
    limits = np.iinfo(stored)
    lengths = array("i")  # 4 bytes a document
    index = Path(f"{prefix}.idx")
    index.unlink(missing_ok=True)
    with open(f"{prefix}.bin", "wb") as file:
        for document in documents:
            values = np.asarray(document)
            assert values.ndim == 1 and values.size and values.dtype.kind in "iu", (prefix, values.shape)
            assert max(0, limits.min) <= values.min() and values.max() <= limits.max, (prefix, len(lengths), stored)
            file.write(values.astype(stored).tobytes())
            lengths.append(values.size)
        file.flush()
        os.fsync(file.fileno())
    assert lengths, f"{prefix}: an empty dataset cannot be read back"
    write_index(index, stored, [np.frombuffer(lengths, dtype=np.int32)])
