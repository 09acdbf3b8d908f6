from __future__ import annotations

import os
import shlex
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pretrain
from data.indexed import IndexedDataset
from data.opening import KINDS
from data.prepare.prepare import Options, ingest, train_on, validation_prefix
from data.prepare.readers import Part, find_files, is_held_out, open_dataset, open_files
from data.tokenizer import HuggingFaceTokenizer, load_tokenizer, train_tokenizer
from megatron_fp4.config.compose import compose_config
from scripts import prepare_data
from tests.data.prepare.corpus import TEXTS, documents, json_lines

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "prepare_data.py"
ALL = Options(validation=0)


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer(TEXTS, 300)


def parts_of(format: str, folder: Path) -> list[Part]:
    """TEXTS in two files of a format, the second one's name full of characters that patterns know."""
    halves = {"a": TEXTS[:50], "b [1]*": TEXTS[50:]}
    for name, texts in halves.items():
        if format == "json":
            json_lines(folder / (f"{name}.jsonl" if name == "a" else f"{name}.jsonl.gz"), texts, "content")
        elif format == "saved":
            continue
        elif format in ("parquet", "hub"):
            rows = {"id": list(range(len(texts))), "content": texts}
            pq.write_table(pa.table(rows), folder / f"{name}.parquet", row_group_size=7)
        else:
            for i, text in enumerate(texts):
                (folder / f"{name} {i:03}.txt").write_text(text, encoding="utf-8")
    if format == "hub":
        return open_dataset(str(folder), "train", "content")
    if format == "saved":
        datasets.Dataset.from_dict({"content": TEXTS}).save_to_disk(str(folder / "saved"))
        return open_dataset(str(folder / "saved"), None, "content")
    return open_files(format, find_files([str(folder / "*")]), "content")


@pytest.mark.parametrize("format", ["json", "parquet", "text", "hub", "saved"])
def test_every_format_round_trips(format: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    done = ingest(parts_of(format, tmp_path / "in"), tmp_path / "new" / "web", tokenizer, Options(validation=0.2))
    train, held_out = (documents(p, tokenizer) for p in (done.output, validation_prefix(done.output)))
    assert train == [text for text in TEXTS if not is_held_out(text, 0.2)]
    assert held_out == [text for text in TEXTS if is_held_out(text, 0.2)]
    assert (done.train.documents, done.validation.documents) == (len(train), len(held_out))
    assert done.train.tokens == IndexedDataset(done.output).num_tokens
    assert done.train.text_bytes == len("".join(train).encode())
    assert not done.state.malformed
    names = [f"web{split}.{ending}" for split in ("", "_validation") for ending in ("bin", "idx", "json")]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("document", ["one\ntwo\n\nthree 文\n"]),
        ("paragraph", ["one\ntwo", "three 文"]),
        ("line", ["one", "two", "three 文"]),
    ],
)
def test_units_of_text(unit: str, expected: list[str], tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\ntwo\n\nthree 文\n", encoding="utf-8")
    ingest(open_files("text", [path], text_unit=unit), tmp_path / "out", tokenizer, ALL)
    assert documents(tmp_path / "out", tokenizer) == expected
    assert not Path(f"{validation_prefix(tmp_path / 'out')}.idx").exists()


def test_malformed_records_are_counted_reported_and_skipped(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
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
    options = Options(validation=0, max_malformed=0.8)
    done = ingest(open_files("json", [path]), tmp_path / "out", tokenizer, options, report=reports.append)
    assert documents(tmp_path / "out", tokenizer) == ["good", "also good"]
    assert done.state.malformed == {
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


def test_malformed_rows_and_texts(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["good", None, ""]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "b.parquet")
    reports: list[str] = []
    parts = open_files("parquet", find_files([str(tmp_path / "*")]))
    ingest(parts, tmp_path / "rows", tokenizer, Options(0, max_malformed=0.8), report=reports.append)
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
        ingest(parts, tmp_path / "texts", tokenizer, ALL, report=reports.append)
    assert reports == [f"skipped {tmp_path}/c.txt: not UTF-8", f"skipped {tmp_path}/d.txt: empty"]
    done = ingest(
        open_files("text", find_files([str(tmp_path / "*.txt")]), text_unit="line"),
        tmp_path / "lines",
        tokenizer,
        Options(0, max_malformed=0.5),
    )
    assert documents(tmp_path / "lines", tokenizer) == ["good é", "fine"]
    assert done.state.malformed == {"not UTF-8": 1}


def test_too_many_malformed_records_leave_nothing(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = json_lines(tmp_path / "in" / "a.jsonl", ["good"] * 98 + ["", ""])
    with pytest.raises(ValueError, match=r"2 of 100 records are malformed \(2 empty\), more than the share 0.01"):
        ingest(open_files("json", [path]), tmp_path / "out", tokenizer, ALL)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    options = Options(0, max_malformed=0.02)
    assert ingest(open_files("json", [path]), tmp_path / "out", tokenizer, options).state.records == 100


def test_split_is_by_content(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    """Copies fall on one side, wherever they stand; what is held out stays held out as the share grows."""
    path = json_lines(tmp_path / "a.jsonl", [*TEXTS, *reversed(TEXTS)])
    ingest(open_files("json", [path]), tmp_path / "out", tokenizer, Options(0.3))
    train = documents(tmp_path / "out", tokenizer)
    held_out = documents(validation_prefix(tmp_path / "out"), tokenizer)
    assert not set(train) & set(held_out) and sorted(train + held_out) == sorted(TEXTS * 2)
    assert 0.15 < len(held_out) / len(TEXTS * 2) < 0.45
    assert all(is_held_out(text, 0.3) for text in TEXTS if is_held_out(text, 0.1))


def test_nothing_is_overwritten(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS)])
    for name in ("out.idx", "out.bin", "out.json", "out_validation.idx", "out_validation.bin"):
        (tmp_path / name).write_bytes(b"precious")
        with pytest.raises(FileExistsError, match=rf"{name} exists already; choose another name"):
            ingest(parts, tmp_path / "out", tokenizer)
        assert (tmp_path / name).read_bytes() == b"precious"
        (tmp_path / name).unlink()


def test_a_tokenizer_learns_from_training_documents_only(tmp_path: Path) -> None:
    train_texts = [text for text in TEXTS if not is_held_out(text, 0.3)]
    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS)])
    assert train_on(parts, 300, Options(0.3)).fingerprint() == train_tokenizer(train_texts, 300).fingerprint()


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
    config = compose_config(words, pretrain.CONFIGS)
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
        ("--format json --files a --max-document-bytes 9", "the largest document is 9 bytes; it must be from 64 to"),
        ("--format json --files a --validation 1", "is 1.0; it must be at least 0 and below 1"),
        ("--format json --files a --max-malformed -1", "is -1.0; it must be from 0 to 1"),
        ("--format json --files a --eod-token x --no-eod", "--eod-token x has no effect with --no-eod"),
        ("--format json --files a --train-tokenizer 300 --bos x", "has no token for --bos but <|endoftext|>"),
        ("--format json", "one of the two"),
        ("--format json --files a --split train", "--split train has no effect with --files"),
        ("--dataset a --split b --format json", "--format json has no effect with --dataset"),
        ("--format text --files a --field b", "--field b has no effect with --format text"),
        ("--format json --files a --text-unit line", "--text-unit line has no effect"),
        ("--format json --files a --train-tokenizer 300 --eod-token x", "no effect with --train-tokenizer"),
        ("--format json --files a --workers 0", "--workers 0 is no number of processes"),
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
