from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

import data.indexed
from data.indexed import Checked, IndexedDataset, IndexedDatasetWriter, check_whole
from scripts.check_data import main


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Documents of 1 to 9 tokens; ids 3 to 999."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "web", np.int32) as writer:
        writer.add_document([3, 999])
        for _ in range(5000):
            writer.add_document(rng.integers(4, 999, rng.integers(1, 10)))
    return tmp_path / "web"


def put(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_counts(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(prefix)
    expected = Checked(5001, dataset.num_tokens, 3, 999, False)
    for entries, size in ((1 << 20, 1 << 23), (7, 64)):  # in one block, and in many
        monkeypatch.setattr(data.indexed, "_ENTRIES", entries)
        monkeypatch.setattr(data.indexed, "_TOKENS_BYTES", size)
        shares: list[float] = []
        assert check_whole(prefix, 1000, shares.append) == expected
        assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] == pytest.approx(1, abs=1e-3)


def test_the_place_of_a_token_that_cannot_be(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    start = int(dataset.document_offsets(4321, 4321)[0])
    last = len(dataset.document(4321)) - 1
    for token, vocab_size, limit in ((-5, None, "no id is negative"), (1000, 1000, "ids are from 0 to 999")):
        put(f"{prefix}.bin", 4 * (start + last), struct.pack("<i", token))
        with pytest.raises(ValueError) as fault:
            check_whole(prefix, vocab_size)
        assert str(fault.value) == (
            f"{prefix}.bin: token {last} of document 4321 (byte {4 * (start + last)}) is {token}; {limit}: the file is "
            "damaged, or of another tokenizer"
        )


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (34 + 4 * 3000, struct.pack("<i", 77), r"the pointer of sequence 3001 is not the end"),
        (34 + 4 * 5001 + 8 * 4000, struct.pack("<q", 8), r"the pointer of sequence 4000 is not the end"),
        (34 + 12 * 5001 + 8 * 4500, struct.pack("<q", 9), r"document 4499 is the sequences from 4499 to 9 of 5001"),
    ],
)
def test_a_fault_that_opening_does_not_look_at(
    prefix: Path, offset: int, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.indexed, "_CHECKED_ENTRIES", 2)
    monkeypatch.setattr(data.indexed, "_READ_WHOLE", 0)
    put(f"{prefix}.idx", offset, content)
    IndexedDataset(prefix, checked_blocks=10)
    with pytest.raises(ValueError, match=message):
        check_whole(prefix)


def test_facts_beside_it(prefix: Path) -> None:
    tokens = IndexedDataset(prefix).num_tokens
    facts = Path(f"{prefix}.json")
    facts.write_text(json.dumps({"documents": 5001, "tokens": tokens, "text_bytes": 7}))
    assert check_whole(prefix).agreed
    hashes = {ending: hashlib.sha256(Path(f"{prefix}.{ending}").read_bytes()).hexdigest() for ending in ("bin", "idx")}
    facts.write_text(json.dumps({"documents": 5001, "sha256": hashes}))
    assert str(check_whole(prefix)).endswith("ids 3 to 999, as its .json says")
    for ending in hashes:
        facts.write_text(json.dumps({"sha256": {**hashes, ending: "0" * 64}}))
        with pytest.raises(ValueError, match=rf"web\.{ending} has the sha256 {hashes[ending][:12]} where .* says 0000"):
            check_whole(prefix)
    facts.write_text(json.dumps({"documents": 5001, "tokens": tokens + 1}))
    with pytest.raises(ValueError) as fault:
        check_whole(prefix)
    assert (
        str(fault.value) == f"{prefix} has {tokens} tokens where {facts} says {tokens + 1}: they are not of one dataset"
    )
    for wrong in ("{", "[]"):
        facts.write_text(wrong)
        with pytest.raises(ValueError, match=r"web\.json"):
            check_whole(prefix)


def test_the_command(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetWriter(tmp_path / "code", np.uint16) as writer:
        writer.add_document([5, 70])
    assert main([f"{tmp_path}/*", "--vocab-size", "1000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/code: 1 documents, 2 tokens, ids 5 to 70"
    assert lines[1].startswith(f"{prefix}: 5,001 documents, ") and lines[1].endswith("ids 3 to 999")
    # The others are still checked.
    put(f"{tmp_path}/code.bin", 0, b"\xff\xff")
    assert main([f"{tmp_path}/*", "--vocab-size", "1000"]) == 2
    written = capsys.readouterr()
    assert written.err.startswith(f"check_data.py: {tmp_path}/code.bin: token 0 of document 0") and "web" in written.out
    for arguments in ([f"{tmp_path}/no_*"], [f"{tmp_path}/gone"]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("check_data.py: ") and error.count("\n") == 1
