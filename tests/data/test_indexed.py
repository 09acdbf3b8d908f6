from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import data.indexed
from data.indexed import HEADER, MAGIC, Checked, IndexedDataset, IndexedDatasetWriter, check_whole, dtype_for_vocabulary

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 65535]]


def write(
    prefix: Path, documents: Sequence[Sequence[int] | np.ndarray] = DOCUMENTS, dtype: type = np.uint16
) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def test_files_are_megatrons_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "d")
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 8)
        + struct.pack("<Q", 3)
        + struct.pack("<Q", 4)
        + struct.pack("<3i", 3, 1, 5)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert (tmp_path / "d.idx").read_bytes() == expected
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<9H", 1, 2, 3, 4, 5, 6, 7, 8, 65535)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_round_trip(tmp_path: Path, dtype: type) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 120, n) for n in (1, 50, 7)]
    with IndexedDatasetWriter(tmp_path / "a.b", dtype) as writer:
        for document in documents:
            writer.add_document(document)
    dataset = IndexedDataset(tmp_path / "a.b")
    assert (dataset.num_documents, dataset.num_tokens) == (3, 58)
    for i, document in enumerate(documents):
        assert np.array_equal(dataset.document(i), document)
    stream = np.concatenate(documents)
    assert np.array_equal(dataset.tokens(0, 58), stream)
    assert np.array_equal(dataset.tokens(49, 5), stream[49:54])
    assert dataset.tokens(0, 1).dtype == dtype


def test_dtype_follows_the_vocabulary() -> None:
    assert dtype_for_vocabulary(65499) == np.uint16
    assert dtype_for_vocabulary(65500) == np.int32


def test_nothing_appears_before_the_dataset_is_whole(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "d", np.uint16)
    writer.add_document([1])
    assert not (tmp_path / "d.bin").exists() and not (tmp_path / "d.idx").exists()
    writer.finalize()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_an_exception_leaves_the_older_dataset_alone(tmp_path: Path) -> None:
    write(tmp_path / "d")
    before = (tmp_path / "d.bin").read_bytes()
    with pytest.raises(RuntimeError), IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([9])
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]
    assert (tmp_path / "d.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "with 1 to"),
        ([[1, 2]], "shape"),
        ([1.5], "not integer"),
        ([65536], "dtype_for_vocabulary"),
        ([-1], "dtype_for_vocabulary"),
    ],
)
def test_bad_documents_are_refused(tmp_path: Path, document: list[int], message: str) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        with pytest.raises(ValueError, match=message):
            writer.add_document(document)
        writer.add_document([1])


def test_an_empty_dataset_and_a_float_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document"), IndexedDatasetWriter(tmp_path / "d", np.uint16):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="float32"):
        IndexedDatasetWriter(tmp_path / "d", np.dtype("float32"))


def test_access_outside_is_an_error(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d")
    for start, length in ((-1, 2), (0, 10), (9, 1)):
        with pytest.raises(IndexError, match="outside"):
            dataset.tokens(start, length)
    for document in (-1, 3):
        with pytest.raises(IndexError, match="outside"):
            dataset.document(document)


def test_identity_follows_content_and_not_place(tmp_path: Path) -> None:
    dataset = write(tmp_path / "a")
    assert write(tmp_path / "b").identity() == dataset.identity()
    assert write(tmp_path / "c", [[1, 2, 3], [4], [5, 6, 7, 8, 9]]).identity() != dataset.identity()
    assert write(tmp_path / "e", [[1, 2, 3, 4], [5, 6, 7, 8, 65535]]).identity() != dataset.identity()


def test_pickles_as_its_prefix(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [list(range(5000))])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).tokens(0, 5000), dataset.tokens(0, 5000))


def test_identity_is_of_blocks_of_both_files(tmp_path: Path) -> None:
    """Against the definition, and for files that are larger than the blocks together."""
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


def test_document_offsets(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d")
    assert dataset.document_offsets(0, 3).tolist() == [0, 3, 4, 9]
    assert dataset.document_offsets(1, 2).tolist() == [3, 4]
    assert dataset.document_offsets(3, 3).tolist() == [9]
    assert dataset.document_offsets(0, 3).dtype == np.int64
    for first, last in ((-1, 1), (2, 1), (0, 4)):
        with pytest.raises(IndexError, match="outside"):
            dataset.document_offsets(first, last)


def test_document_offsets_of_documents_of_several_sequences_and_of_none(tmp_path: Path) -> None:
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 6)
    arrays = struct.pack("<3i", 2, 0, 3) + struct.pack("<3q", 0, 4, 4) + struct.pack("<6q", 0, 2, 2, 3, 3, 3)
    (tmp_path / "m.idx").write_bytes(header + arrays + b"\0\1\0")  # with modes
    (tmp_path / "m.bin").write_bytes(struct.pack("<5H", *range(5)))
    dataset = IndexedDataset(tmp_path / "m")
    assert dataset.document_offsets(0, 5).tolist() == [0, 2, 2, 5, 5, 5]
    assert dataset.document_offsets(3, 5).tolist() == [5, 5, 5]
    for i in range(5):  # one by one, which goes another way
        assert dataset.document_offsets(i, i + 1).tolist() == dataset.document_offsets(0, 5).tolist()[i : i + 2]
    assert [dataset.document(i).tolist() for i in range(5)] == [[0, 1], [], [2, 3, 4], [], []]


def put(offset: int, data: bytes, ending: str = ".idx") -> Callable[[Path], None]:
    """Overwrite bytes of a file."""

    def damage(prefix: Path) -> None:
        with open(f"{prefix}{ending}", "r+b") as file:
            file.seek(offset)
            file.write(data)

    return damage


def cut(ending: str, size: int) -> Callable[[Path], None]:
    """Shorter, or longer by zeros."""
    return lambda prefix: os.truncate(f"{prefix}{ending}", size)


def folder(prefix: Path) -> None:
    Path(f"{prefix}.bin").unlink()
    Path(f"{prefix}.bin").mkdir()


def empty_sequences(prefix: Path) -> None:
    arrays = struct.pack("<3i3q4q", 0, 0, 0, 0, 0, 0, 0, 1, 2, 3)
    Path(f"{prefix}.idx").write_bytes(header() + arrays)
    Path(f"{prefix}.bin").write_bytes(b"")


def header(version: int = 1, code: int = 8, sequences: int = 3, entries: int = 4) -> bytes:
    return HEADER.pack(MAGIC, version, code, sequences, entries)


LENGTHS, POINTERS, ENTRIES = 34, 46, 70  # where the arrays of the .idx begin
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no .bin": (lambda prefix: Path(f"{prefix}.bin").unlink(), "d.bin does not exist; a dataset is named by"),
    "a folder called .bin": (folder, "this is a folder, not a file: .*d.bin"),
    "an empty .idx": (cut(".idx", 0), "d.idx does not start with"),
    "a cut header": (cut(".idx", 33), "d.idx does not start with"),
    "an .idx cut at its end": (cut(".idx", 101), "d.idx has 101 bytes where its header announces 102"),
    "an .idx that is too long": (cut(".idx", 104), "d.idx has 104 bytes where its header announces 102"),
    "fairseq's older format": (put(0, b"TNTIDX\x00\x00"), "d.idx is of Megatron's older format"),
    "a later version": (put(0, header(version=2)), "d.idx is of version 2"),
    "an unknown dtype": (put(0, header(code=99)), "d.idx has dtype code 99; token ids are integers"),
    "a float dtype": (put(0, header(code=7)), "d.idx has dtype code 7; token ids are integers"),
    "another integer dtype": (put(0, header(code=4)), "d.idx says that sequence 0 has 3 tokens from byte 0"),
    "no sequences": (put(0, header(sequences=0)), "d.idx holds no documents"),
    "absurdly many": (put(0, header(sequences=2**63)), "d.idx has 102 bytes where its header announces"),
    "a negative length": (put(LENGTHS, struct.pack("<i", -3)), "sequence 0 has -3 tokens from byte 0"),
    "a wrong length": (put(LENGTHS, struct.pack("<i", 2)), "sequence 0 has 2 tokens .* the next one begins at byte 6"),
    "pointers shifted": (put(POINTERS, struct.pack("<3q", 2, 8, 10)), "sequence 0 has 3 tokens from byte 2"),
    "a pointer beyond": (put(POINTERS + 16, struct.pack("<q", 2**63 - 1)), "the last sequence has 5 tokens from"),
    "documents from 1": (put(ENTRIES, struct.pack("<q", 1)), "has a document index from 1 to 3 over 3 sequences"),
    "documents that go back": (put(ENTRIES + 8, struct.pack("<2q", 2, 1)), "document 1 is the sequences from 2 to 1"),
    "documents off the end": (put(ENTRIES + 8, struct.pack("<2q", 5, 5)), "document 0 is the sequences from 0 to 5"),
    "a .bin cut short": (cut(".bin", 17), "d.bin has 17 bytes where d.idx describes 18"),
    "only empty sequences": (empty_sequences, "d.idx holds no tokens, only empty sequences"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_pair_that_is_none_is_refused(tmp_path: Path, case: str) -> None:
    write(tmp_path / "d")
    damage, message = FAULTS[case]
    damage(tmp_path / "d")
    with pytest.raises((ValueError, OSError), match=message) as refusal:
        IndexedDataset(tmp_path / "d")
    assert "\n" not in str(refusal.value)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """5001 documents of 1 to 9 tokens; ids 3 to 999."""
    rng = np.random.default_rng(0)
    write(tmp_path / "web", [[3, 999], *(rng.integers(4, 999, rng.integers(1, 10)) for _ in range(5000))], np.int32)
    return tmp_path / "web"


@pytest.mark.parametrize(
    ("offset", "content", "message", "document"),
    [
        (34 + 4 * 3000, struct.pack("<i", 77), r"sequence 3000 has 77 tokens", None),
        (34 + 4 * 5001 + 8 * 4000, struct.pack("<q", 8), r"next one begins at byte 8\b", 3999),
        (34 + 12 * 5001 + 8 * 4500, struct.pack("<q", 9), r"document 4499 is the sequences from 4499 to 9", 4499),
    ],
)
def test_a_fault_that_opening_does_not_look_at(
    prefix: Path, offset: int, content: bytes, message: str, document: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full check finds it, and so does who reads there."""
    monkeypatch.setattr(data.indexed, "_CHECKED_ENTRIES", 2)
    monkeypatch.setattr(data.indexed, "_READ_WHOLE", 0)
    put(offset, content)(prefix)
    dataset = IndexedDataset(prefix, checked_blocks=10)
    with pytest.raises(ValueError, match=message):
        check_whole(prefix)
    if document is not None:
        for read in (dataset.document, lambda d: dataset.document_offsets(d - 3, d + 3)):
            with pytest.raises(ValueError, match=r"web\.idx .* damaged"):
                read(document)


def test_every_token_and_fact_is_checked(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(prefix)
    for entries, size in ((1 << 20, 1 << 23), (7, 64)):  # in one block, and in many
        monkeypatch.setattr(data.indexed, "INDEX_BLOCK", entries)
        monkeypatch.setattr(data.indexed, "_TOKENS_BYTES", size)
        assert check_whole(prefix, 1000) == Checked(5001, dataset.num_tokens, 3, 999, False)
    facts = Path(f"{prefix}.json")
    hashes = {ending: hashlib.sha256(Path(f"{prefix}.{ending}").read_bytes()).hexdigest() for ending in ("bin", "idx")}
    facts.write_text(json.dumps({"documents": 5001, "sha256": hashes}))
    assert str(check_whole(prefix)).endswith("ids 3 to 999, as its .json says")
    for wrong in ({"sha256": {**hashes, "idx": "0" * 64}}, {"sha256": {"bin": "0"}}, {"tokens": 7}, [1]):
        facts.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"web\.json"):
            check_whole(prefix)
    facts.unlink()
    start = int(dataset.document_offsets(4321, 4321)[0])
    last = len(dataset.document(4321)) - 1
    for token, vocab_size, limit in ((-5, None, "no id is negative"), (1000, 1000, "ids are from 0 to 999")):
        put(4 * (start + last), struct.pack("<i", token), ".bin")(prefix)
        with pytest.raises(ValueError, match=rf"token {last} of document 4321 \(byte \d+\) is {token}; {limit}"):
            check_whole(prefix, vocab_size)
