from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedDataset, IndexedDatasetWriter, dtype_for_vocabulary

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


def test_documents_of_several_sequences_and_modes(tmp_path: Path) -> None:
    """What Megatron's own tools may write and this writer does not."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 3, 3)
    arrays = struct.pack("<3i", 2, 1, 3) + struct.pack("<3q", 0, 8, 12) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "m.idx").write_bytes(header + arrays + b"\x00\x01\x00")
    (tmp_path / "m.bin").write_bytes(struct.pack("<6i", *range(6)))
    dataset = IndexedDataset(tmp_path / "m")
    assert (dataset.num_documents, dataset.num_tokens) == (2, 6)
    assert dataset.document(0).tolist() == [0, 1, 2]
    assert dataset.document(1).tolist() == [3, 4, 5]


def test_dtype_follows_the_vocabulary() -> None:
    assert dtype_for_vocabulary(65499) == np.uint16
    assert dtype_for_vocabulary(65500) == np.int32
    with pytest.raises(ValueError, match="positive"):
        dtype_for_vocabulary(0)


def test_nothing_appears_before_the_dataset_is_whole(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "d", np.uint16)
    writer.add_document([1])
    assert not (tmp_path / "d.bin").exists() and not (tmp_path / "d.idx").exists()
    writer.finalize()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]
    with pytest.raises(ValueError, match="finished"):
        writer.add_document([1])


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
        ([], "empty"),
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


def damage(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"X", "does not start with"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "float32"),
        (17, b"\x63", "unknown"),
        (17, b"\x04", "pointer"),
        (18, b"\x00", "no documents"),
        (18, b"\x04", "truncated"),
        (34, b"\x02", "pointer of sequence 1"),
        (37, b"\xff", "negative length"),
        (54, b"\x05", "pointer of sequence 1"),
        (70, b"\x01", "document index"),
        (78, b"\x05", "document index"),
        (94, b"\x02", "document index"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, offset: int, data: bytes, message: str) -> None:
    write(tmp_path / "d")
    damage(tmp_path / "d.idx", offset, data)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "d")


def test_truncated_and_missing_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "d")
    tokens = (tmp_path / "d.bin").read_bytes()
    (tmp_path / "d.bin").write_bytes(tokens[:-1])
    with pytest.raises(ValueError, match=r"17 bytes where d.idx describes 18"):
        IndexedDataset(tmp_path / "d")
    (tmp_path / "d.idx").write_bytes((tmp_path / "d.idx").read_bytes()[:20])
    with pytest.raises(ValueError, match="cut short"):
        IndexedDataset(tmp_path / "d")
    with pytest.raises(FileNotFoundError, match="without the ending"):
        IndexedDataset(tmp_path / "d.idx")


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
    assert dataset.identity() == dataset.identity()
    assert dataset.identity() != dataset.identity()[:-1] + "x"


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
    (tmp_path / "m.idx").write_bytes(header + arrays)
    (tmp_path / "m.bin").write_bytes(struct.pack("<5H", *range(5)))
    dataset = IndexedDataset(tmp_path / "m")
    assert dataset.document_offsets(0, 5).tolist() == [0, 2, 2, 5, 5, 5]
    assert dataset.document_offsets(3, 5).tolist() == [5, 5, 5]
    for i in range(5):  # one by one, which goes another way
        assert dataset.document_offsets(i, i + 1).tolist() == dataset.document_offsets(0, 5).tolist()[i : i + 2]
    assert [dataset.document(i).tolist() for i in range(5)] == [[0, 1], [], [2, 3, 4], [], []]
