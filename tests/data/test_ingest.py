from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import assembly
import pretrain
from data.indexed_dataset import IndexedDataset
from data.ingest import Part, find_files, ingest, is_held_out, open_files, open_hub, train_on, validation_prefix
from data.kinds import KINDS
from data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from megatron_fp4.config.compose import compose_config
from scripts import prepare_data

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"
TEXTS = [f"Document {i} says:\nnaïve ☕ {i * i}, and no more.\n" for i in range(120)]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(TEXTS, 300)


def json_lines(path: Path, texts: Iterable[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def documents(prefix: Path, tokenizer: TextTokenizer) -> list[str]:
    """The texts of a dataset; asserts that each document ends with the end of a document, and only there."""
    dataset = IndexedDataset(prefix)
    ids = [dataset.document(d).tolist() for d in range(dataset.num_documents)]
    assert all(tokens.index(tokenizer.eod_id) == len(tokens) - 1 for tokens in ids)
    return [tokenizer.decode(tokens[:-1]) for tokens in ids]


def parts_of(format: str, folder: Path) -> list[Part]:
    """TEXTS in two files of a format, the second one's name full of characters that patterns know."""
    halves = {"a": TEXTS[:50], "b [1]*": TEXTS[50:]}
    for name, texts in halves.items():
        if format == "json":
            json_lines(folder / (f"{name}.jsonl" if name == "a" else f"{name}.jsonl.gz"), texts, "content")
        elif format in ("parquet", "hub"):
            rows = {"id": list(range(len(texts))), "content": texts}
            pq.write_table(pa.table(rows), folder / f"{name}.parquet", row_group_size=7)
        else:
            for i, text in enumerate(texts):
                (folder / f"{name} {i:03}.txt").write_text(text, encoding="utf-8")
    if format == "hub":
        return open_hub(str(folder), "train", "content")
    return open_files(format, find_files([str(folder / "*")]), "content")


@pytest.mark.parametrize("format", ["json", "parquet", "text", "hub"])
def test_every_format_round_trips(format: str, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    done = ingest(parts_of(format, tmp_path / "in"), tmp_path / "new" / "web", tokenizer, validation=0.2)
    train, held_out = (documents(p, tokenizer) for p in (done.output, validation_prefix(done.output)))
    assert train == [text for text in TEXTS if not is_held_out(text, 0.2)]
    assert held_out == [text for text in TEXTS if is_held_out(text, 0.2)]
    assert (done.train.documents, done.validation.documents) == (len(train), len(held_out))
    assert done.train.tokens == IndexedDataset(done.output).num_tokens
    assert done.train.text_bytes == len("".join(train).encode())
    assert not done.malformed and not list(tmp_path.rglob("*.tmp-*"))


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("document", ["one\ntwo\n\nthree 文\n"]),
        ("paragraph", ["one\ntwo", "three 文\n"]),
        ("line", ["one", "two", "three 文"]),
    ],
)
def test_units_of_text(unit: str, expected: list[str], tokenizer: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\ntwo\n\nthree 文\n", encoding="utf-8")
    ingest(open_files("text", [path], text_unit=unit), tmp_path / "out", tokenizer, validation=0)
    assert documents(tmp_path / "out", tokenizer) == expected
    assert not Path(f"{validation_prefix(tmp_path / 'out')}.idx").exists()


def test_malformed_records_are_counted_reported_and_skipped(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "good"}',
        b'{"text": "cut sh',
        b"",
        b'{"body": "x"}',
        b'{"text": 3}',
        b'{"text": null}',
        b'{"text": " \\n"}',
        b'["text"]',
        b'{"text": "\xff"}',
        b'{"text": "half a pair \\ud83d"}',
        b'{"text": "also good"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    reports: list[str] = []
    done = ingest(open_files("json", [path]), tmp_path / "out", tokenizer, 0, max_malformed=0.8, report=reports.append)
    assert documents(tmp_path / "out", tokenizer) == ["good", "also good"]
    assert done.malformed == {
        "not JSON (one object a line is read)": 1,
        "without a field 'text'": 1,
        "whose field 'text' is no string": 2,
        "empty": 1,
        "not a JSON object": 1,
        "not UTF-8": 2,
    }
    assert reports[:2] == [
        f"skipped {path}:2: not JSON (one object a line is read)",
        f"skipped {path}:4: without a field 'text'",
    ]
    assert len(reports) == 5
    assert "8 of 10 records skipped" in done.summary() and "2 not UTF-8" in done.summary()


def test_malformed_rows_and_texts(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["good", None, ""]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "b.parquet")
    reports: list[str] = []
    parts = open_files("parquet", find_files([str(tmp_path / "*")]))
    ingest(parts, tmp_path / "rows", tokenizer, 0, max_malformed=0.8, report=reports.append)
    assert documents(tmp_path / "rows", tokenizer) == ["good"]
    assert reports == [
        f"skipped {tmp_path}/a.parquet, row 2: whose field 'text' is no string",
        f"skipped {tmp_path}/a.parquet, row 3: empty",
        f"skipped {tmp_path}/b.parquet, row 1: without a field 'text'",
    ]
    (tmp_path / "c.txt").write_bytes(b"good \xc3\xa9\nbad \xe9\n\nfine")
    (tmp_path / "d.txt").write_bytes(b"")
    reports.clear()
    with pytest.raises(ValueError, match="2 of 2 records are malformed"):
        parts = open_files("text", find_files([str(tmp_path / "*.txt")]))
        ingest(parts, tmp_path / "texts", tokenizer, 0, report=reports.append)
    assert reports == [f"skipped {tmp_path}/c.txt: not UTF-8", f"skipped {tmp_path}/d.txt: empty"]
    done = ingest(
        open_files("text", find_files([str(tmp_path / "*.txt")]), text_unit="line"),
        tmp_path / "lines",
        tokenizer,
        0,
        max_malformed=0.5,
    )
    assert documents(tmp_path / "lines", tokenizer) == ["good é", "fine"]
    assert done.malformed == {"not UTF-8": 1}


def test_too_many_malformed_records_leave_nothing(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    path = json_lines(tmp_path / "in" / "a.jsonl", ["good"] * 98 + ["", ""])
    with pytest.raises(ValueError, match=r"2 of 100 records are malformed \(2 empty\), more than the share 0.01"):
        ingest(open_files("json", [path]), tmp_path / "out", tokenizer, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert ingest(open_files("json", [path]), tmp_path / "out", tokenizer, 0, max_malformed=0.02).records == 100


def test_split_is_by_content(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """Copies fall on one side, wherever they stand; what is held out stays held out as the share grows."""
    path = json_lines(tmp_path / "a.jsonl", [*TEXTS, *reversed(TEXTS)])
    ingest(open_files("json", [path]), tmp_path / "out", tokenizer, validation=0.3)
    train = documents(tmp_path / "out", tokenizer)
    held_out = documents(validation_prefix(tmp_path / "out"), tokenizer)
    assert not set(train) & set(held_out) and sorted(train + held_out) == sorted(TEXTS * 2)
    assert 0.15 < len(held_out) / len(TEXTS * 2) < 0.45
    assert all(is_held_out(text, 0.3) for text in TEXTS if is_held_out(text, 0.1))


def test_nothing_is_overwritten(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS)])
    for name in ("out.idx", "out.bin", "out_validation.idx", "out_validation.bin"):
        (tmp_path / name).write_bytes(b"precious")
        with pytest.raises(FileExistsError, match=rf"{name} exists already; choose another name"):
            ingest(parts, tmp_path / "out", tokenizer)
        assert (tmp_path / name).read_bytes() == b"precious"
        (tmp_path / name).unlink()


def test_what_cannot_be_read_is_explained(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    good = json_lines(tmp_path / "a.jsonl", TEXTS[:3])
    for arguments, expected in (
        ({"validation": 1.0}, "it must be at least 0 and below 1"),
        ({"max_malformed": -1}, "it must be from 0 to 1"),
        ({"validation": 1e-9}, "none of the 3 documents is for validation"),
    ):
        with pytest.raises(ValueError, match=expected):
            ingest(open_files("json", [good]), tmp_path / "out", tokenizer, **arguments)
    with pytest.raises(FileNotFoundError, match="no file matches"):
        find_files([str(tmp_path / "*.json")])
    with pytest.raises(ValueError, match="unpack it"):
        open_files("json", [tmp_path / "a.jsonl.zst"])
    (tmp_path / "a.parquet").write_text("not parquet")
    whole = json_lines(tmp_path / "cut.jsonl.gz", TEXTS).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    for format, name, expected in (
        ("parquet", "a.parquet", "datasets cannot read .*a.parquet: "),
        ("json", "cut.jsonl.gz", "cut.jsonl.gz is damaged or was cut short"),
    ):
        with pytest.raises(ValueError, match=expected):
            ingest(open_files(format, [tmp_path / name]), tmp_path / "out", tokenizer, 0)
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_learns_from_training_documents_only(tmp_path: Path) -> None:
    train_texts = [text for text in TEXTS if not is_held_out(text, 0.3)]
    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS)])
    assert train_on(parts, 300, 0.3).fingerprint() == train_tokenizer(train_texts, 300).fingerprint()


@pytest.mark.slow
def test_workers_change_no_byte(tmp_path: Path) -> None:
    """The command as its user starts it, at two numbers of threads."""
    json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS * 30)
    results = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        command = f"--format json --files {tmp_path}/corpus/*.jsonl --output {folder}/web --workers {workers}"
        more = f"--tokenizer {folder}/tokenizer.json --train-tokenizer 320"
        result = subprocess.run(
            [sys.executable, str(SCRIPT), *command.split(), *more.split()], capture_output=True, text=True, check=True
        )
        assert result.stderr == ""
        results.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert results[0] == results[1] and len(results[0]) == 5


def test_from_text_to_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the command prints is what pretrain.py takes, even where paths need quotes."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    folder = tmp_path / "o'data, 2: [x]"
    json_lines(folder / "in.jsonl", TEXTS)
    arguments = ["--format", "json", "--files", str(folder / "in.jsonl"), "--output", str(folder / "my-web")]
    arguments += ["--tokenizer", str(folder / "tokenizer.json"), "--train-tokenizer", "300", "--validation", "0.2"]
    assert prepare_data.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "documents" in printed.out
    words = shlex.split(printed.out.split("pretrain.py")[1].replace("\\\n", " "))
    assert pretrain.main(["--check", *words, "train.sequence_length=64"]) == 0
    config = compose_config(words, assembly.CONFIGS)
    bundle = KINDS[config.data.kind].open(config.data, config.model.vocab_size)
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.fingerprint() == load_tokenizer(folder / "tokenizer.json").fingerprint()
    assert set(bundle.train) == set(bundle.validation) == {"my_web"}
    assert bundle.train["my_web"].num_documents + bundle.validation["my_web"].num_documents == len(TEXTS)
    assert bundle.train["my_web"].dtype == np.uint16

    assert prepare_data.main(arguments) == 2
    error = capsys.readouterr().err
    assert "exists already" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--files a", "--files needs --format"),
        ("--dataset a", "--dataset needs --split"),
        ("--format json", "one of the two"),
        ("--format json --files a --split train", "--split train has no effect with --files"),
        ("--dataset a --split b --format json", "--format json has no effect with --dataset"),
        ("--format text --files a --field b", "--field b has no effect with --format text"),
        ("--format json --files a --text-unit line", "--text-unit line has no effect"),
        ("--format json --files a --train-tokenizer 300 --eod-token x", "no effect with --train-tokenizer"),
        ("--format json --files a --workers 0", "--workers 0 is no number of threads"),
        ("--format json --files a", "no file matches 'a'"),
    ],
)
def test_wrong_command_is_one_line(
    arguments: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare_data.main([*arguments.split(), "--output", "out", "--tokenizer", "tokenizer.json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and expected in printed.err
    assert list(tmp_path.iterdir()) == []
