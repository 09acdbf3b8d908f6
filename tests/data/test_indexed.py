"""Megatron's file format against its definition; faulty files; concatenated and partial streams."""

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import data.indexed
from data.indexed import HEADER, MAGIC, Concatenation, IndexedDataset, TokenRange, dtype_for_vocabulary
from data.prepare import merge
from data.prepare.merge import check_pair
from tests.data.streams import document, write

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 65535]]


def test_written_files_are_megatrons_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "d", DOCUMENTS)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 4)
    arrays = struct.pack("<3i", 3, 1, 5) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "d.idx").read_bytes() == header + arrays
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<9H", 1, 2, 3, 4, 5, 6, 7, 8, 65535)
    assert dtype_for_vocabulary(65499) == np.uint16 and dtype_for_vocabulary(65500) == np.int32


def test_invalid_documents_are_not_written(tmp_path: Path) -> None:
    for wrong in ([], [[]], [[[1], [2]]], [[1.5]], [[65536]], [[-1]]):
        with pytest.raises(AssertionError):
            write(tmp_path / "e", wrong)
        assert not (tmp_path / "e.idx").exists()


def test_the_identity_hashes_blocks_of_both_files(tmp_path: Path) -> None:
    """The identity of files that are smaller than all blocks together hashes them whole."""
    rng = np.random.default_rng(0)
    dataset = write(tmp_path / "d", [rng.integers(0, 60000, 20) for _ in range(9000)])
    digest = hashlib.sha256()
    for ending in ("idx", "bin"):
        content = (tmp_path / f"d.{ending}").read_bytes()
        assert len(content) > 16 * 4096
        digest.update(struct.pack("<Q", len(content)))
        for i in range(16):
            start = i * (len(content) - 4096) // 15
            digest.update(content[start : start + 4096])
    assert dataset.identity() == f"blocks-1:{digest.hexdigest()}"
    small = write(tmp_path / "a", DOCUMENTS)
    assert write(tmp_path / "b", DOCUMENTS).identity() == small.identity()
    for other in ([[1, 2, 3], [4], [5, 6, 7, 8, 9]], [[1, 2, 3, 4], [5, 6, 7, 8, 65535]]):
        assert write(tmp_path / "c", other).identity() != small.identity()


def test_documents_may_have_several_sequences_or_none(tmp_path: Path) -> None:
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 6)
    arrays = struct.pack("<3i", 2, 0, 3) + struct.pack("<3q", 0, 4, 4) + struct.pack("<6q", 0, 2, 2, 3, 3, 3)
    (tmp_path / "m.idx").write_bytes(header + arrays)
    (tmp_path / "m.bin").write_bytes(struct.pack("<5H", *range(5)))
    dataset = IndexedDataset(tmp_path / "m")
    expected = [0, 2, 2, 5, 5, 5]
    for first in range(6):
        for last in range(first, 6):
            assert dataset.document_offsets(first, last).tolist() == expected[first : last + 1]
    assert dataset.sequence_offsets(0, 3).tolist() == [0, 2, 2, 5]
    assert [document(dataset, i) for i in range(5)] == [[0, 1], [], [2, 3, 4], [], []]


def put(offset: int, data: bytes, ending: str = ".idx") -> Callable[[Path], None]:
    """A change that overwrites bytes of a file."""

    def damage(prefix: Path) -> None:
        with open(f"{prefix}{ending}", "r+b") as file:
            file.seek(offset)
            file.write(data)

    return damage


def cut(ending: str, size: int) -> Callable[[Path], None]:
    """A change that cuts a file, or extends it by zeros, to `size` bytes."""
    return lambda prefix: os.truncate(f"{prefix}{ending}", size)


def empty_sequences(prefix: Path) -> None:
    arrays = struct.pack("<3i3q4q", 0, 0, 0, 0, 0, 0, 0, 1, 2, 3)
    Path(f"{prefix}.idx").write_bytes(header() + arrays)
    Path(f"{prefix}.bin").write_bytes(b"")


def header(version: int = 1, code: int = 8, sequences: int = 3, entries: int = 4) -> bytes:
    return HEADER.pack(MAGIC, version, code, sequences, entries)


LENGTHS, POINTERS, ENTRIES = 34, 46, 70  # where the arrays of the .idx begin
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no .bin": (lambda prefix: Path(f"{prefix}.bin").unlink(), "d.bin does not exist; name a dataset by"),
    "a cut header": (cut(".idx", 33), "d.idx starts with b'MMIDIDX"),
    "fairseq's older format": (put(0, b"TNTIDX\x00\x00"), r"d.idx starts with b'TNTIDX.*, not with .*prepare the"),
    "a later version": (put(0, header(version=2)), "d.idx has version 2"),
    "an .idx cut at its end": (cut(".idx", 101), "d.idx has 101 bytes, but by its header it should have 102"),
    "a float dtype": (put(0, header(code=7)), "d.idx has dtype code 7; token ids are integers"),
    "another integer dtype": (put(0, header(code=4)), "d.idx says that sequence 0 has 3 tokens from byte 0"),
    "no sequences": (put(0, header(sequences=0)), "d.idx has no documents"),
    "a negative length": (put(LENGTHS, struct.pack("<i", -3)), "sequence 0 has -3 tokens from byte 0"),
    "pointers shifted": (put(POINTERS, struct.pack("<3q", 2, 8, 10)), "sequence 0 has 3 tokens from byte 2"),
    "documents from 1": (put(ENTRIES, struct.pack("<q", 1)), "has a document index from 1 to 3 over 3 sequences"),
    "documents that go back": (
        put(ENTRIES + 8, struct.pack("<2q", 2, 1)),
        "document 2 begins with sequence 1 of 3, and",
    ),
    "a .bin cut short": (cut(".bin", 17), "d.bin has 17 bytes, but by d.idx it should have 18"),
    "only empty sequences": (empty_sequences, "d.idx has no tokens, only empty sequences"),
}


def test_invalid_pairs_are_refused(tmp_path: Path) -> None:
    for case, (damage, message) in FAULTS.items():
        (tmp_path / case).mkdir()
        write(tmp_path / case / "d", DOCUMENTS)
        damage(tmp_path / case / "d")
        with pytest.raises((ValueError, OSError), match=message) as refusal:
            IndexedDataset(tmp_path / case / "d")
        assert "\n" not in str(refusal.value), case


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A dataset of 5001 documents of 1 to 9 tokens with ids from 3 to 999."""
    rng = np.random.default_rng(0)
    write(tmp_path / "web", [[3, 999], *(rng.integers(4, 999, rng.integers(1, 10)) for _ in range(5000))], np.int32)
    return tmp_path / "web"


@pytest.mark.parametrize(
    ("offset", "content", "message", "document"),
    [
        (34 + 4 * 3100, struct.pack("<i", 77), r"sequence 3100 has 77 tokens", None),
        (34 + 4 * 5001 + 8 * 4100, struct.pack("<q", 8), r"next one begins at byte 8\b", 4099),
        (34 + 12 * 5001 + 8 * 4500, struct.pack("<q", 9), r"document 4500 begins with sequence 9 of 5001", 4499),
    ],
)
def test_a_fault_that_opening_does_not_notice(
    prefix: Path, offset: int, content: bytes, message: str, document: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full check finds it, and so does a read of the damaged place."""
    monkeypatch.setattr(data.indexed, "_CHECKED_ENTRIES", 2)
    put(offset, content)(prefix)
    dataset = IndexedDataset(prefix)
    with pytest.raises(ValueError, match=message):
        check_pair(prefix)
    if document is not None:
        for first, last in ((document, document + 1), (document - 3, document + 3)):
            with pytest.raises(ValueError, match=r"web\.idx .* damaged"):
                dataset.document_offsets(first, last)


def test_the_full_check_reads_every_token_and_compares_the_json_file(prefix: Path, monkeypatch) -> None:
    dataset = IndexedDataset(prefix)
    for entries in (1 << 20, 7):  # in one block, and in many
        monkeypatch.setattr(merge, "INDEX_BLOCK", entries)
        assert check_pair(prefix) == f"5,001 documents, {dataset.num_tokens:,} tokens, ids 3 to 999"
    facts = Path(f"{prefix}.json")
    hashes = {ending: hashlib.sha256(Path(f"{prefix}.{ending}").read_bytes()).hexdigest() for ending in ("bin", "idx")}
    facts.write_text(json.dumps({"documents": 5001, "sha256": hashes}))
    assert str(check_pair(prefix)).endswith("ids 3 to 999, as in its .json")
    for wrong in ({"sha256": {**hashes, "idx": "0" * 64}}, {"sha256": {"bin": "0"}}, {"tokens": 7}, [1]):
        facts.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"web\.json"):
            check_pair(prefix)
    facts.unlink()
    start, end = dataset.document_offsets(4321, 4322).tolist()
    put(4 * (end - 1), struct.pack("<i", -5), ".bin")(prefix)
    place = rf"token {end - 1 - start} of document 4321 \(byte {4 * (end - 1)}\) is -5, but ids are not negative"
    with pytest.raises(ValueError, match=place):
        check_pair(prefix)


def test_a_concatenation_is_one_stream_across_all_borders(tmp_path: Path) -> None:
    """The files have several dtypes, and one comes twice. A range and a pickled copy of the stream are right too."""
    rng = np.random.default_rng(0)
    lengths_of = {np.uint16: [20, 7, 43], np.int8: [1], np.int64: [50, 30, 2, 51]}
    parts = [
        write(tmp_path / dtype.__name__, [rng.integers(0, np.iinfo(dtype).max, n) for n in lengths], dtype)
        for dtype, lengths in lengths_of.items()
    ]
    parts.append(parts[1])
    source = Concatenation(parts)
    stream = np.concatenate([part.tokens(0, part.num_tokens) for part in parts])
    lengths = [len(document(part, i)) for part in parts for i in range(part.num_documents)]
    offsets, count = [0, *np.cumsum(lengths).tolist()], len(lengths)
    assert (source.num_tokens, source.num_documents) == (205, count)
    for start in range(206):
        for end in range(start, 206):
            assert np.array_equal(source.tokens(start, end - start), stream[start:end])
    for first in range(count + 1):
        for last in range(first, count + 1):
            assert source.document_offsets(first, last).tolist() == offsets[first : last + 1]
    piece = TokenRange(source, 3, count - 1)
    assert np.array_equal(piece.tokens(2, piece.num_tokens - 2), stream[offsets[3] + 2 : offsets[-2]])
    assert piece.document_offsets(1, 5).tolist() == [offset - offsets[3] for offset in offsets[4:9]]
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.tokens(60, 100), source.tokens(60, 100))
    assert source.identity() == Concatenation(list(parts)).identity() != Concatenation(parts[::-1]).identity()
