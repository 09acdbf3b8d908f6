"""Documents above the largest size: cut at white space, refused or skipped, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare import compressed, huge
from data.prepare.encode import Encoded, records_within
from data.prepare.huge import Limit
from data.prepare.ingest import Options, ingest, validation_prefix
from data.prepare.inputs import open_files
from data.prepare.records import Record, is_held_out
from data.prepare.text_files import json_tasks
from data.tokenizer import train_tokenizer
from data.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.prepare.corpus import PACKERS, documents

WORDS = 'naïve ☕ words,\n\tand 文字 \\ "quoted" more 😀 of them ' * 40
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer([WORDS], 300)


def write(format: str, path: Path, text: str) -> None:
    """A file of one record between two short ones, where the format has records."""
    rows = ["before", text, "behind"]
    if format == "parquet":
        pq.write_table(pa.table({"text": rows}), path)
    elif format == "json":
        lines = [
            json.dumps({"id": [1, {"text": "x"}], "text": row, "more": "}] \\"}, ensure_ascii=False) for row in rows
        ]
        path.write_text("\n".join(lines))
    elif format == "escaped":
        path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    else:
        path.write_text(text)


@pytest.mark.parametrize("read_bytes", [5, 100_000])
@pytest.mark.parametrize("format", ["json", "escaped", "parquet", "text"])
def test_a_huge_document_is_split_at_white_space(
    format: str, read_bytes: int, tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "READ_BYTES", read_bytes)
    write(format, tmp_path / "in", WORDS)
    parts = open_files("json" if format == "escaped" else format, [tmp_path / "in"])
    done = ingest(parts, tmp_path / "out", tokenizer, Options(validation=0, max_document_bytes=200))
    found = documents(tmp_path / "out", tokenizer)
    pieces = found if format == "text" else found[1:-1]
    assert format == "text" or (found[0], found[-1]) == ("before", "behind")
    assert "".join(pieces) == WORDS.rstrip() or "".join(pieces) == WORDS
    assert all(100 < len(piece.encode()) <= 200 for piece in pieces[:-1])
    assert all(piece[0].isspace() for piece in pieces[1:])
    assert done.state.huge == 1 and "huge: 1 documents above the largest size split into several" in done.summary()


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_huge_lines_and_paragraphs(unit: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    long = " ".join(str(i) for i in range(300)) if unit == "line" else "\n".join(str(i) for i in range(300))
    separator = {"line": "\n", "paragraph": "\n\n"}[unit]
    for ending in ("", ".zst"):
        (tmp_path / f"in{ending}").write_bytes(
            PACKERS[ending](separator.join(["a", long, "b", "c\xff"]).encode("latin-1"))
        )
        reports: list[str] = []
        options = Options(validation=0, max_document_bytes=100, max_malformed=0.5)
        parts = open_files("text", [tmp_path / f"in{ending}"], text_unit=unit)
        ingest(parts, tmp_path / f"out{ending}", tokenizer, options, report=reports.append)
        found = documents(tmp_path / f"out{ending}", tokenizer)
        assert (found[0], found[-1]) == ("a", "b") and len(found) > 10
        assert "".join(found[1:-1]) == long
        line = 4 if unit == "line" else 7 + long.count("\n")
        assert reports == [f"skipped {tmp_path}/in{ending}:{line}: not UTF-8"]


@pytest.mark.parametrize("format", ["json", "parquet", "text"])
@pytest.mark.parametrize("read_bytes", [50, 100_000])
def test_a_huge_document_is_refused_or_skipped(
    format: str, read_bytes: int, tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "READ_BYTES", read_bytes)
    write(format, tmp_path / "in", WORDS)
    (tmp_path / "small").write_text("small")
    parts = open_files(format, [tmp_path / "in"])
    if format == "text":
        parts = open_files(format, [tmp_path / "in", tmp_path / "small"])
    where = {"json": "in:2", "parquet": "in, row 2", "text": "in"}[format]
    size = len(WORDS.encode())
    with pytest.raises(
        ValueError,
        match=rf"{where} is a document of {size:,} bytes, above the largest size of 200; allow more",
    ):
        ingest(parts, tmp_path / "out", tokenizer, Options(validation=0, max_document_bytes=200, huge="refuse"))
    done = ingest(parts, tmp_path / "out", tokenizer, Options(validation=0, max_document_bytes=200, huge="skip"))
    assert documents(tmp_path / "out", tokenizer) == (["small"] if format == "text" else ["before", "behind"])
    assert "huge: 1 documents above the largest size skipped" in done.summary() and not done.state.malformed
    whole = ingest(parts, tmp_path / "whole", tokenizer, Options(validation=0, max_document_bytes=size))
    assert whole.state.huge == 0 and WORDS in documents(tmp_path / "whole", tokenizer)


def test_all_pieces_are_on_the_side_of_the_whole(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    texts = [f"{i} " + WORDS for i in range(12)]
    (tmp_path / "in").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    options = Options(validation=0.5, max_document_bytes=400)
    ingest(open_files("json", [tmp_path / "in"]), tmp_path / "out", tokenizer, options)
    held_out = "".join(documents(validation_prefix(tmp_path / "out"), tokenizer))
    assert held_out.split() == "".join(text for text in texts if is_held_out(text, 0.5)).split()


def test_text_without_white_space_is_cut_at_a_character(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("文" * 100 + " " + "x" * 150)
    ingest(open_files("text", [tmp_path / "in"]), tmp_path / "out", tokenizer, Options(0, max_document_bytes=100))
    assert documents(tmp_path / "out", tokenizer) == ["文" * 33] * 3 + ["文", " " + "x" * 99, "x" * 51]


LONG = "a long text " * 50
LINES: dict[str, tuple[bytes, str]] = {
    "cut": (json.dumps({"text": LONG}).encode()[:-20], "not JSON (one object a line is read)"),
    "no object": (json.dumps([LONG]).encode(), "not a JSON object"),
    "a string": (json.dumps(LONG).encode(), "not a JSON object"),
    "another field": (json.dumps({"body": LONG}).encode(), "without a field 'text'"),
    "deeper": (json.dumps({"body": {"text": LONG}}).encode(), "without a field 'text'"),
    "a list": (json.dumps({"text": [LONG]}).encode(), "whose field 'text' is no string"),
    "as a value": (json.dumps({"body": "text", "more": LONG}).encode(), "without a field 'text'"),
    "a wrong escape": (b'{"text": "' + LONG.encode() + rb'\x41 and more"}', "not JSON (one object a line is read)"),
    "half an escape": (b'{"text": "' + LONG.encode() + rb"\u00", "not JSON (one object a line is read)"),
    "a control character": (b'{"text": "' + LONG.encode() + b'\x01"}', "not JSON (one object a line is read)"),
    "half a pair": (b'{"text": "' + LONG.encode() + rb'\ud83d"}', "not UTF-8"),
    "half a pair and a letter": (b'{"text": "' + LONG.encode() + rb'\ud83dx"}', "not UTF-8"),
    "no UTF-8": (b'{"text": "' + LONG.encode() + b'\xff"}', "not UTF-8"),
    "no comma": (b'{"text": "' + LONG.encode() + b'" "id": 1}', "not JSON (one object a line is read)"),
    "blank": (b'{"text": "' + b" " * 500 + b'"}', "empty"),
    "two": (b'{"text": "' + LONG.encode() + b'"} {}', "not JSON (one object a line is read)"),
}


def records_of(path: Path, max_bytes: int) -> list[Record]:
    limit = Limit(max_bytes, "split", 0.0)
    tasks = json_tasks(path, "text", limit, lambda position: None)
    return [record for task in tasks for record in records_within(task, limit, Encoded())]


@pytest.mark.parametrize("read_bytes", [7, 100_000])
@pytest.mark.parametrize("case", LINES)
def test_a_long_line_has_the_problem_of_a_short_one(
    case: str, read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, problem = LINES[case]
    monkeypatch.setattr(compressed, "READ_BYTES", read_bytes)
    (tmp_path / "in").write_bytes(line + b'\n{"text": "next"}\n')
    for max_bytes in (100, 100_000):  # streamed, and as a whole
        found = records_of(tmp_path / "in", max_bytes)
        assert [(r.where, r.problem) for r in found] == [(f"{tmp_path}/in:1", problem), (f"{tmp_path}/in:2", None)]


@pytest.mark.parametrize("read_bytes", [1, 3, 7, 100_000])
def test_a_long_line_has_the_text_of_a_short_one(
    read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "READ_BYTES", read_bytes)
    monkeypatch.setattr(huge, "_KEPT_CHARACTERS", 40)
    lines = [
        {"a": {"text": "no"}, "text": WORDS, "b": ["text", LONG], "c": 'x"' * 50, LONG: 1},
        {"text": "short", "other": WORDS},
        {"text": "\ud83d\ude00" * 100},
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines) + '{"text": "' + LONG + '", "\\u0074ext": "last"}\n'
    (tmp_path / "in").write_text(content)
    streamed = records_of(tmp_path / "in", 64)
    texts: dict[str, str] = {}
    for record in streamed:
        texts[record.where[-1]] = texts.get(record.where[-1], "") + record.text
    if read_bytes < 100:  # else they never were too long to hold
        assert [record.problem for record in streamed if record.problem] == []
    assert list(texts.values()) == [WORDS.rstrip() + " ", "short", "😀" * 100, "last"]


def test_other_fields_above_the_limit_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps({"text": "x", "numbers": list(range(30_000))}))
    (record,) = records_of(tmp_path / "in", 1000)
    assert record.problem == "whose other fields than 'text' are above the largest size"


READ = """
import resource, sys
from pathlib import Path
from data.prepare.huge import Limit
from data.prepare.inputs import open_files
(part,) = open_files(sys.argv[2], [Path(sys.argv[1])])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = 0
for task in part.tasks(Limit(4 << 20, "split", 0.01, Path(".")), lambda position: None):
    for record in task.records():
        assert record.problem is None
        size += len(record.text)
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["json", "text"])
def test_memory_does_not_grow_with_a_document(format: str, tmp_path: Path) -> None:
    """200 MB on one line."""
    block = "a line without an end " * 5000
    number = 200_000_000 // len(block)
    with open(tmp_path / "in", "w") as file:
        file.write('{"text": "' if format == "json" else "")
        for _ in range(number):
            file.write(block)
        file.write('"}\n' if format == "json" else "")
    environment: dict[str, Any] = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READ, str(tmp_path / "in"), format]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    size, kilobytes = map(int, result.stdout.split())
    assert number * len(block) - 100 < size <= number * len(block)
    assert kilobytes < 80_000
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
