"""Several pairs into one: the bytes of preparing them together."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from data.indexed import HEADER, IndexedDataset, IndexedDatasetWriter
from data.prepare import prepare as index
from data.prepare.prepare import Options, ingest
from data.prepare.readers import open_files
from data.tokenizer import HuggingFaceTokenizer, train_tokenizer
from scripts import merge_data
from tests.data.prepare.corpus import TEXTS, contents, json_lines


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer(TEXTS, 300)


def prepare(folder: Path, tokenizer: HuggingFaceTokenizer, options: Options | None = None) -> None:
    """TEXTS in three pairs `0`, `1`, `2` and their validation sets; and all of them in `together/all`."""
    thirds = [json_lines(folder / "in" / f"{i}.jsonl", TEXTS[40 * i : 40 * i + 40]) for i in range(3)]
    for i, path in enumerate(thirds):
        ingest(open_files("json", [path]), folder / str(i), tokenizer, options or Options(0.3))
    ingest(open_files("json", thirds), folder / "together" / "all", tokenizer, options or Options(0.3))


def merge(folder: Path, *names: str, output: str = "merged/all") -> int:
    (folder / output).parent.mkdir(exist_ok=True)
    return merge_data.main(["--inputs", *(str(folder / name) for name in names), "--output", str(folder / output)])


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_a_merge_has_the_bytes_of_preparing_together(
    block: int,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index, "BLOCK", block)
    monkeypatch.setattr("data.prepare.merge.BLOCK", block)
    prepare(tmp_path, tokenizer)
    assert merge(tmp_path, "0", "1", "2") == 0
    printed = capsys.readouterr()
    dataset = IndexedDataset(tmp_path / "merged" / "all")
    assert printed.err == ""
    assert f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens" in printed.out
    assert merge(tmp_path, "[0-2]_validation.idx", output="merged/all_validation") == 0
    assert contents(tmp_path / "merged") == contents(tmp_path / "together")


def test_pairs_of_megatron_merge_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several sequences a document, and no facts beside them."""
    for name, starts in (("a", [0, 2, 3]), ("b", [0, 0, 1, 4])):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for i in range(starts[-1]):
                writer.add_document([i + 1] * (i + 1))
        path = tmp_path / f"{name}.idx"
        content = path.read_bytes()[: HEADER.size + 12 * starts[-1]] + struct.pack(f"<{len(starts)}q", *starts)
        magic, version, code, sequences, _ = HEADER.unpack(content[: HEADER.size])
        path.write_bytes(HEADER.pack(magic, version, code, sequences, len(starts)) + content[HEADER.size :])
    assert merge(tmp_path, "a", "b") == 0
    assert "without a .json" in capsys.readouterr().err
    pairs = [IndexedDataset(tmp_path / name) for name in ("a", "b", "merged/all")]
    documents = [[pair.document(d).tolist() for d in range(pair.num_documents)] for pair in pairs]
    assert documents[2] == documents[0] + documents[1] and documents[2][2] == []
    assert sorted(os.listdir(tmp_path / "merged")) == ["all.bin", "all.idx"]


def test_what_does_not_fit_is_one_line(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, tokenizer, Options(0))
    (part,) = open_files("json", [tmp_path / "in" / "0.jsonl"])
    ingest([part], tmp_path / "other", train_tokenizer(TEXTS, 299), Options(0))
    ingest([part], tmp_path / "without", tokenizer, Options(0, eod=False))
    with IndexedDatasetWriter(tmp_path / "wide", np.int32) as writer:
        writer.add_document([1])
    (tmp_path / "cut.idx").write_bytes((tmp_path / "0.idx").read_bytes()[:-8])
    (tmp_path / "cut.bin").write_bytes((tmp_path / "0.bin").read_bytes())
    with IndexedDatasetWriter(tmp_path / "modes", np.uint16) as writer:
        writer.add_document([1])
    with open(tmp_path / "modes.idx", "ab") as file:
        file.write(b"\1")
    for name in ("bin", "idx"):
        (tmp_path / f"facts.{name}").write_bytes((tmp_path / f"0.{name}").read_bytes())
    (tmp_path / "facts.json").write_text("[]")
    before = contents_of_pairs(tmp_path)
    for names, expected in (
        (["0"], "to merge takes two or more pairs"),
        (["0", "0"], "0 comes twice; its documents would be in the output twice"),
        (["0", "none"], "no pair matches"),
        (["0", "other"], "0 and .*other differ in the tokenizer".replace(".*", f"{tmp_path}/")),
        (["0", "without"], "without differ in the end of a document (<|endoftext|>, none); prepare them alike"),
        (["0", "wide"], "0 holds uint16 and"),
        (["0", "cut"], "cut.idx"),
        (["0", "modes"], "modes.idx has modes of sequences, as multimodal data do"),
        (["0", "facts"], "facts.json is damaged; remove it to merge without its facts"),
    ):
        assert merge(tmp_path, *names) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and expected in printed.err, printed.err
        assert os.listdir(tmp_path / "merged") == []
    assert merge(tmp_path, "0", "1") == 0
    assert merge(tmp_path, "1", "2") == 2
    assert "all.idx exists already; choose another name" in capsys.readouterr().err
    assert contents_of_pairs(tmp_path) == before and not list(tmp_path.rglob("*.parts"))


def contents_of_pairs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_facts_tell_what_the_pairs_agree_on(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    (part,) = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS)])
    for name, options, source in (
        ("0", Options(0), {"format": "json", "field": "text"}),
        ("1", Options(0, max_document_bytes=1000), {"format": "json", "field": "body"}),
    ):
        ingest([part], tmp_path / name, tokenizer, options, source=source)
    assert merge(tmp_path, "0", "1") == 0
    facts = json.loads((tmp_path / "merged" / "all.json").read_bytes())
    assert facts["options"] == {"format": "json", "validation": 0, "huge": "split"}
    assert facts["documents"] == 240 and facts["text_bytes"] == 2 * len("".join(TEXTS).encode())
    assert facts["sha256"]["idx"] == index.sha256_of(tmp_path / "merged" / "all.idx")
