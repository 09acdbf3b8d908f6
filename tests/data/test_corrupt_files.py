"""Pairs of files that are no dataset: each is refused in one line that says what is wrong with which file."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.indexed import HEADER, MAGIC, IndexedDataset, IndexedDatasetWriter

SIZES = [3, 1, 5]  # tokens of the documents; uint16, so the .bin has 18 bytes and the .idx 34 + 12 + 24 + 32 = 102
LENGTHS, POINTERS, DOCUMENTS = 34, 46, 70  # where the arrays of the .idx begin


def header(version: int = 1, code: int = 8, sequences: int = 3, entries: int = 4, magic: bytes = MAGIC) -> bytes:
    return HEADER.pack(magic, version, code, sequences, entries)


def put(offset: int, data: bytes) -> Callable[[Path], None]:
    """Overwrite bytes of the .idx."""

    def damage(prefix: Path) -> None:
        with open(f"{prefix}.idx", "r+b") as file:
            file.seek(offset)
            file.write(data)

    return damage


def cut(ending: str, size: int) -> Callable[[Path], None]:
    return lambda prefix: os.truncate(f"{prefix}{ending}", size)


def add(ending: str, data: bytes) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        with open(f"{prefix}{ending}", "ab") as file:
            file.write(data)

    return damage


def remove(ending: str) -> Callable[[Path], None]:
    return lambda prefix: Path(f"{prefix}{ending}").unlink()


def folder(ending: str) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        Path(f"{prefix}{ending}").unlink()
        Path(f"{prefix}{ending}").mkdir()

    return damage


def other_index(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix.with_name("other"), np.uint16) as writer:
        writer.add_document([1] * 8)
    os.replace(f"{prefix.with_name('other')}.idx", f"{prefix}.idx")


def big_endian(prefix: Path) -> None:
    arrays = struct.pack(">3i3q4q", 3, 1, 5, 0, 6, 8, 0, 1, 2, 3)
    Path(f"{prefix}.idx").write_bytes(struct.pack(">9sQBQQ", MAGIC, 1, 8, 3, 4) + arrays)


def empty_sequences(prefix: Path) -> None:
    arrays = struct.pack("<3i3q4q", 0, 0, 0, 0, 0, 0, 0, 1, 2, 3)
    Path(f"{prefix}.idx").write_bytes(header() + arrays)
    Path(f"{prefix}.bin").write_bytes(b"")


def swapped(prefix: Path) -> None:
    os.rename(f"{prefix}.idx", f"{prefix}.tmp")
    os.rename(f"{prefix}.bin", f"{prefix}.idx")
    os.rename(f"{prefix}.tmp", f"{prefix}.bin")


NO_INDEX = "{}.idx does not start with Megatron's b'MMIDIDX\\x00\\x00': it is not an .idx file, or it was cut short; "
DAMAGED = "the index is damaged: prepare the dataset again"
NOT_A_PAIR = "the two files are not of one dataset or a copy was cut short; copy or prepare the dataset again"
BACK_TO_BACK = "the index is damaged or its sequences are not back to back: prepare the dataset again"
MISSING = "does not exist; a dataset is named by the path of its .idx and .bin without the ending"
AGAIN = "prepare the dataset again"
SIZE = "it is truncated or damaged; prepare the dataset again"

CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no .idx": (remove(".idx"), f"{{}}.idx {MISSING}"),
    "no .bin": (remove(".bin"), f"{{}}.bin {MISSING}"),
    "a folder called .idx": (folder(".idx"), "[Errno 21] this is a folder, not a file: '{}.idx'"),
    "a folder called .bin": (folder(".bin"), "[Errno 21] this is a folder, not a file: '{}.bin'"),
    "an empty .idx": (cut(".idx", 0), NO_INDEX + AGAIN),
    "a cut header": (cut(".idx", 33), NO_INDEX + AGAIN),
    "a header alone": (cut(".idx", 34), f"{{}}.idx has 34 bytes where its header announces 102: {SIZE}"),
    "an .idx cut at its end": (cut(".idx", 101), f"{{}}.idx has 101 bytes where its header announces 102: {SIZE}"),
    "an .idx that goes on": (add(".idx", b"12"), f"{{}}.idx has 104 bytes where its header announces 102: {SIZE}"),
    "the names swapped": (swapped, NO_INDEX + AGAIN),
    "another format": (put(0, b"\x1f\x8b"), NO_INDEX + AGAIN),
    "fairseq's older format": (
        put(0, b"TNTIDX\x00\x00"),
        "{}.idx is of Megatron's older format without memory mapping (TNTIDX); prepare the dataset again, with a "
        "dataset_impl of mmap",
    ),
    "a later version": (put(0, header(version=2)), "{}.idx is of version 2; only version 1 is known"),
    "big-endian": (big_endian, "{}.idx is big-endian; the format is little-endian: write the dataset again"),
    "an unknown dtype": (
        put(0, header(code=99)),
        "{}.idx has dtype code 99 (unknown); token ids are integers: prepare the data again",
    ),
    "a float dtype": (
        put(0, header(code=7)),
        "{}.idx has dtype code 7 (float32); token ids are integers: prepare the data again",
    ),
    "another integer dtype": (put(0, header(code=4)), f"{{}}.idx: the pointer of sequence 1 is not the end of the "
        f"sequence before it; {BACK_TO_BACK}"),
    "no sequences": (
        put(0, header(sequences=0)),
        "{}.idx holds no documents; prepare the dataset again from non-empty text",
    ),
    "no documents": (
        put(0, header(entries=1)),
        "{}.idx holds no documents; prepare the dataset again from non-empty text",
    ),
    "more sequences than fit": (
        put(0, header(sequences=4)),
        f"{{}}.idx has 102 bytes where its header announces 114: {SIZE}",
    ),
    "absurdly many sequences": (
        put(0, header(sequences=2**63)),
        f"{{}}.idx has 102 bytes where its header announces {34 + 2**63 * 12 + 32}: {SIZE}",
    ),
    "a negative length": (
        put(LENGTHS, struct.pack("<i", -3)),
        f"{{}}.idx: sequence 0 has a negative length; {AGAIN}",
    ),
    "a wrong length": (
        put(LENGTHS, struct.pack("<i", 2)),
        f"{{}}.idx: the pointer of sequence 1 is not the end of the sequence before it; {BACK_TO_BACK}",
    ),
    "pointers that go back": (
        put(POINTERS + 8, struct.pack("<q", 8) + struct.pack("<q", 6)),
        f"{{}}.idx: the pointer of sequence 1 is not the end of the sequence before it; {BACK_TO_BACK}",
    ),
    "all pointers shifted": (
        put(POINTERS, struct.pack("<3q", 2, 8, 10)),
        f"{{}}.idx: sequence 0 begins at byte 2 of the .bin; {AGAIN}",
    ),
    "a pointer beyond every file": (
        put(POINTERS + 16, struct.pack("<q", 2**63 - 1)),
        f"{{}}.idx: the last sequence begins at byte {2**63 - 1} of the .bin and has 5 tokens; {DAMAGED}",
    ),
    "a document index from 1": (
        put(DOCUMENTS, struct.pack("<q", 1)),
        f"{{}}.idx: the document index runs from 1 to 3 over 3 sequences; {DAMAGED}",
    ),
    "a document index to 2": (
        put(DOCUMENTS + 24, struct.pack("<q", 2)),
        f"{{}}.idx: the document index runs from 0 to 2 over 3 sequences; {DAMAGED}",
    ),
    "a document index that goes back": (
        put(DOCUMENTS + 8, struct.pack("<2q", 2, 1)),
        f"{{}}.idx: by the document index, document 1 is the sequences from 2 to 1 of 3; {DAMAGED}",
    ),
    "documents off the end": (
        put(DOCUMENTS + 8, struct.pack("<2q", 5, 5)),
        f"{{}}.idx: by the document index, document 0 is the sequences from 0 to 5 of 3; {DAMAGED}",
    ),
    "a .bin cut short": (cut(".bin", 17), f"{{}}.bin has 17 bytes where d.idx describes 18: {NOT_A_PAIR}"),
    "a .bin that goes on": (add(".bin", b"ab"), f"{{}}.bin has 20 bytes where d.idx describes 18: {NOT_A_PAIR}"),
    "an empty .bin": (cut(".bin", 0), f"{{}}.bin has 0 bytes where d.idx describes 18: {NOT_A_PAIR}"),
    "the index of another .bin": (other_index, f"{{}}.bin has 18 bytes where d.idx describes 16: {NOT_A_PAIR}"),
    "only empty sequences": (
        empty_sequences,
        "{}.idx holds no tokens, only empty sequences; prepare the dataset again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_pair_that_is_none_is_refused(tmp_path: Path, case: str) -> None:
    prefix = tmp_path / "d"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for size in SIZES:
            writer.add_document([7] * size)
    damage, message = CASES[case]
    damage(prefix)
    with pytest.raises((ValueError, OSError)) as refusal:
        IndexedDataset(prefix)
    assert str(refusal.value) == message.format(prefix)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([7])
    (tmp_path / "d.idx").chmod(0)
    with pytest.raises(PermissionError, match=r"d\.idx"):
        IndexedDataset(tmp_path / "d")


def test_an_index_that_may_not_be_read_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for root: what the operating system refuses passes with the path."""
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([7])

    def refuse(path: str, *others: object) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError) as refusal:
        IndexedDataset(tmp_path / "d")
    assert str(refusal.value) == f"[Errno 13] Permission denied: '{tmp_path}/d.idx'"


def big(prefix: Path, documents: int = 2_000_000) -> np.ndarray:
    """An index of so many documents of 2 tokens, and a .bin with holes; the document index, to damage and write."""
    pointers, entries = np.arange(documents, dtype=np.int64) * 4, np.arange(documents + 1, dtype=np.int64)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(header(sequences=documents, entries=documents + 1))
        for array in (np.full(documents, 2, np.int32), pointers, entries):
            file.write(array.tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(4 * documents)
    return entries


def test_damage_between_the_checked_blocks_is_found_when_it_is_read(tmp_path: Path) -> None:
    documents, prefix = 2_000_000, tmp_path / "d"
    big(prefix, documents)
    # Past the first checked block, before the second: blocks of 1024 lie some 7800 apart.
    place = 3000
    put(34 + 12 * documents + 8 * place, struct.pack("<q", 17))(prefix)
    put(34 + 4 * documents + 8 * 5000, struct.pack("<q", 8))(prefix)
    put(34 + 4 * documents + 8 * 6000, struct.pack("<q", 24001))(prefix)
    dataset = IndexedDataset(prefix)
    assert dataset.document_offsets(0, 2000).tolist() == list(range(0, 4002, 2))
    with pytest.raises(ValueError, match="document 2999 is the sequences from 2999 to 17 of 2000000"):
        dataset.document_offsets(2500, 3500)
    for wrong in (5000, 6000):
        with pytest.raises(ValueError, match=rf"pointers of sequences {wrong - 1} to {wrong} cannot be right"):
            dataset.document(wrong - 1)
