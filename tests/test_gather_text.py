"""scripts/gather_text.py: what is a document, of which kind, and that each comes once."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from scripts.gather_text import main

_CODE = "def double(number):\n    return number + number\n\n\n" * 10
_PROSE = "A paragraph about nothing in particular, long enough to count as a text.\n" * 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one good file of each kind and every sort of file that is to be left out."""
    folder = tmp_path / "sources"
    (folder / "deep" / "__pycache__").mkdir(parents=True)
    (folder / "deep" / "double.py").write_text(_CODE)
    (folder / "deep" / "again.py").write_text(_CODE.replace("\n", "\r\n") + "\n\n")  # the same but for whitespace
    (folder / "deep" / "__pycache__" / "hidden.py").write_text(_CODE + "# hidden")
    (folder / "double.c").write_text(_CODE + "// in another language")
    (folder / "manual.rst.gz").write_bytes(gzip.compress(_PROSE.encode()))
    (folder / "short.py").write_text("x = 1\n")
    (folder / "latin.txt").write_bytes(_PROSE.encode() + b"caf\xe9\n")
    (folder / "table.h").write_text("0x00000001, 0x00000002,\n" * 50)
    (folder / "minified.py").write_text("letters" * 500)
    (folder / "picture.png").write_text(_PROSE)
    (folder / "broken.txt.gz").write_bytes(b"not gzip")
    return folder


def _texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_one_document_of_each_kind(folder: Path, tmp_path: Path) -> None:
    assert main([str(folder), "--output", str(tmp_path / "out"), "--workers", "2"]) == 0
    assert [text.split() for text in _texts(tmp_path / "out" / "python.jsonl")] == [_CODE.split()]
    assert _texts(tmp_path / "out" / "code.jsonl") == [_CODE + "// in another language"]
    assert _texts(tmp_path / "out" / "prose.jsonl") == [_PROSE]


def test_what_was_gathered_before_is_taken_over_first(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([str(folder), "--output", str(first), "--workers", "1"]) == 0
    (folder / "new.py").write_text(_CODE + "double(2)\n")
    pieces = sorted(str(path) for path in first.iterdir())
    assert main([*pieces, str(folder), "--output", str(second), "--workers", "2"]) == 0
    assert _texts(second / "python.jsonl") == [*_texts(first / "python.jsonl"), _CODE + "double(2)\n"]
    assert _texts(second / "prose.jsonl") == [_PROSE]


def test_the_number_of_workers_changes_no_byte(folder: Path, tmp_path: Path) -> None:
    for workers in ("1", "3"):
        assert main([str(folder), "--output", str(tmp_path / workers), "--workers", workers]) == 0
    for kind in ("python", "code", "prose"):
        assert (tmp_path / "1" / f"{kind}.jsonl").read_bytes() == (tmp_path / "3" / f"{kind}.jsonl").read_bytes()


def test_wrong_input_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.jsonl").write_text('{"text": "x"}\n')
    for arguments, problem in (
        ([str(tmp_path / "nowhere"), "--output", str(tmp_path / "out")], "does not exist"),
        ([str(folder), "--output", str(folder)], "exists"),
        ([str(tmp_path / "other.jsonl"), "--output", str(tmp_path / "out2")], "begins with none of the kinds"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1
