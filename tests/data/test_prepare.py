"""Preparing text as tokens: what is written, what is skipped, and that a killed command resumes to the same bytes."""

import bz2
import gzip
import json
import lzma
import math
import multiprocessing
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data.indexed import IndexedDataset
from data.prepare import prepare as prepare_module
from data.prepare import readers
from data.prepare.prepare import NewTokenizer, State, prepare
from data.prepare.readers import Part, find_files, open_dataset, open_files
from data.prepare.tokenize import Options, WorkerDied, is_held_out, pieces_of
from data.provider import KINDS
from data.tokenizer import HuggingFaceTokenizer, TextTokenizer, train_tokenizer
from megatron_fp4.config.compose import compose_config
from scripts import prepare_data
from tests.data import killed
from tests.data.streams import document, write
from tests.data.test_megatron_order import write_pair
from tests.programs import ROOT, as_child

TEXTS = [f"Document {i} says:\nnaïve ☕ {i * i}, and no more.\n" for i in range(120)]
ALL = Options(validation=0)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def json_lines(path: Path, texts: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def documents(prefix: Path, tokenizer: TextTokenizer) -> list[str]:
    """The texts of a dataset. Asserts that the end-of-document token ends each document and is nowhere else."""
    dataset = IndexedDataset(prefix)
    ids = [document(dataset, d) for d in range(dataset.num_documents)]
    assert all(tokens.index(tokenizer.eod_id) == len(tokens) - 1 for tokens in ids)
    return [tokenizer.decode(tokens[:-1]) for tokens in ids]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def run(*arguments: object) -> int:
    return prepare_data.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in killed.CUT_SMALL.items():
        monkeypatch.setattr(readers, name, value)


def parts_of(format: str, folder: Path) -> list[Part]:
    """Write TEXTS to two files, one of whose names has the special characters of patterns, and open them."""
    rows = [{"id": i, "meta": {"text": text, "n": {"a": 1}}} for i, text in enumerate(TEXTS)]
    for name, chosen in {"a": slice(0, 50), "b [1]*": slice(50, None)}.items():
        if format == "json":
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[chosen])))
        elif format in ("folder", "files"):
            pq.write_table(pa.Table.from_pylist(rows[chosen]), folder / f"{name}.parquet", row_group_size=7)
        elif format == "text":
            for i, text in enumerate(TEXTS[chosen]):
                (folder / f"{name} {i:03}.txt").write_text(text, encoding="utf-8")
    if format == "folder":
        return open_dataset([str(folder)], "train", "meta.text")
    if format == "files":
        return open_dataset([f"{folder}/a*", str(folder / "b [1]*.parquet")], None, "meta.text")
    if format == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
        return open_dataset([str(folder / "saved")], None, "meta.text")
    return open_files(format, find_files([str(folder / "*")]), "meta.text")


@pytest.mark.parametrize("format", ["json", "text", "folder", "files", "saved"])
def test_every_format_round_trips(format: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    done = prepare(parts_of(format, tmp_path / "in"), tmp_path / "new" / "web", tokenizer, Options(0.2, 0.0))
    train, held_out = (documents(tmp_path / "new" / name, tokenizer) for name in ("web", "web_validation"))
    assert train == [text for text in TEXTS if not is_held_out(text, 0.2)]
    assert held_out == [text for text in TEXTS if is_held_out(text, 0.2)]
    count = done.state.counts["train"]
    assert count.tokens == IndexedDataset(done.output).num_tokens
    assert count.text_bytes == len("".join(train).encode()) and not done.state.malformed
    names = [f"web{split}.{ending}" for split in ("", "_validation") for ending in ("bin", "idx", "json")]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names)


@pytest.mark.parametrize("ending", PACKERS)
def test_compressed_files_are_read_in_pieces_of_any_size(
    ending: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = tmp_path / f"a.jsonl{ending.upper()}", tmp_path / f"a.txt{ending}"
    path.write_bytes(PACKERS[ending](json_lines(tmp_path / "plain", TEXTS).read_bytes()))
    text.write_bytes(PACKERS[ending]("\ufeff{}".format("\r\n".join(TEXTS)).encode()))
    for piece, task in ((1, 50), (1 << 20, 1 << 20)):
        monkeypatch.setattr(readers, "READ_BYTES", piece)
        monkeypatch.setattr(readers, "TASK_SIZE", task)
        parts = [*open_files("json", [path]), *open_files("text", [text])]
        found = [record for part in parts for _, task in part.tasks() for record in task()]
        assert [record.text for record in found] == [*TEXTS, "\r\n".join(TEXTS)]
        assert [record.where for record in found] == [*(f"{path}:{line}" for line in range(1, 121)), str(text)]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if ending:
        with pytest.raises(ValueError, match="is damaged, was cut short or is not compressed as"):
            prepare(open_files("json", [path]), tmp_path / "out", tokenizer, ALL)
        assert not list(tmp_path.glob("out*"))


def test_malformed_and_empty_records_are_counted_and_skipped(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "good"}', b'{"text": "cut sh', b"", b'{"body": "x"}', b'{"text": 3}', b'{"text": null}',
        b'{"text": " \\n"}', b'["text"]', b'{"text": "\xff"}', b'{"text": "half a pair \\ud83d"}',
        b'{"text": "also good"}',
    ]  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    reports: list[str] = []
    options = Options(validation=0, max_malformed=0.8)
    done = prepare(open_files("json", [path]), tmp_path / "out", tokenizer, options, report=reports.append)
    assert documents(tmp_path / "out", tokenizer) == ["good", "also good"]
    assert done.state.malformed == {
        "not JSON (one object a line is read)": 1,
        "without a field 'text'": 1,
        "whose field 'text' is not a string": 1,
        "not a JSON object": 1,
        "not UTF-8": 2,
    }
    assert done.state.empty == 2 and "empty: 2 records" in done.summary()
    assert reports[0] == f"skipped {path}:2: not JSON (one object a line is read)" and len(reports) == 5
    with pytest.raises(ValueError, match=r"6 of 8 records are malformed .*share 0.5; .* raise --max-malformed to 0.75"):
        prepare(open_files("json", [path]), tmp_path / "more", tokenizer, Options(0, 0.5))
    prepare(open_files("json", [path]), tmp_path / "more", tokenizer, Options(0, 0.75))
    path.write_bytes(b"a,text\n" * 3)  # a share above which nothing is left is no remedy
    only = r"share 0\.5; correct them, or give Parquet, Arrow and CSV as --dataset [^-]*--format text$"
    with pytest.raises(ValueError, match=only):
        prepare(open_files("json", [path]), tmp_path / "csv", tokenizer, Options(0, 0.5))
    pq.write_table(pa.table({"text": ["good", None, ""] * 40}), tmp_path / "a.parquet")
    done = prepare(open_dataset([f"{tmp_path}/a.parquet"]), tmp_path / "rows", tokenizer, Options(0, 0.0))
    assert done.state.empty == 80 and done.state.records == 40


class Limited(HuggingFaceTokenizer):
    """A tokenizer that panics at a text, as tiktoken does after a million equal characters."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        class PanicException(BaseException):
            pass

        if any("too much" in text for text in texts):
            raise PanicException("called `unwrap()`\non an Err value")
        return super().encode_batch(texts)


def test_a_document_that_the_tokenizer_cannot_encode_is_skipped_and_named(tokenizer, tmp_path: Path) -> None:
    path, limited = tmp_path / "a.jsonl", Limited(tokenizer.content, "t.json")
    json_lines(path, ["good", "too much", "long " * 30 + "too much", "also good"])
    parts, reports, options = open_files("json", [path]), list[str](), Options(0, max_document_bytes=64)
    done = prepare(parts, tmp_path / "out", limited, options, report=reports.append)
    assert documents(tmp_path / "out", tokenizer) == ["good", "also good"]
    why = "not encodable by the tokenizer (called `unwrap()` on an Err value)"
    assert reports == [f"skipped {path}:{line}: {why}" for line in (2, 3)]
    assert "malformed: 2 of 4 records skipped\n  2 not encodable by the tokenizer" in done.summary()
    with pytest.raises(ValueError, match=r"2 of .* malformed \(2 not encodable .* or raise --max-malformed to 0\.5"):
        prepare(parts, tmp_path / "none", limited, Options(0, 0.0))
    json_lines(path, ["good", *["too much"] * 30] * 40)  # of many records: not the tokenizer of this text
    with pytest.raises(ValueError, match=r"allowed share 0.01; correct them, or give another --tokenizer, or raise"):
        prepare(open_files("json", [path]), tmp_path / "many", limited, ALL)


def test_documents_above_the_largest_size_are_split(tokenizer: HuggingFaceTokenizer, tmp_path, monkeypatch) -> None:
    long = " ".join(f"wörd{i}" for i in range(200))
    for size in (64, 65, 66, 100, 1000):
        pieces = pieces_of(long + "文" * 200, size)
        assert "".join(pieces) == long + "文" * 200 and max(len(piece.encode()) for piece in pieces) <= size
        assert sum(len(piece.encode()) for piece in pieces[:-1]) > (len(pieces) - 1) * (size - 12) - size
    texts = ["short", *(f"{i} {long}" for i in range(20))]
    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", texts)])
    done = prepare(parts, tmp_path / "web", tokenizer, Options(0.5, max_document_bytes=100))
    assert "20 documents above" in done.summary()
    for prefix, side in (("web", False), ("web_validation", True)):  # all pieces of a document are on the same side
        expected = [text for text in texts if is_held_out(text, 0.5) == side]
        assert "".join(documents(tmp_path / prefix, tokenizer)) == "".join(expected)
    monkeypatch.setattr(readers, "MAX_CHARACTERS", 500)
    monkeypatch.setattr(readers, "READ_BYTES", 100)
    with pytest.raises(ValueError, match=r"a.jsonl: a document after line \d has over 500 characters"):
        prepare(parts, tmp_path / "out", tokenizer, ALL)


def test_the_command_prints_overrides_that_train_on_its_output(tmp_path: Path, capsys) -> None:
    """The command also trains a tokenizer, without the held-out documents."""
    json_lines(tmp_path / "in, here" / "a.jsonl", TEXTS)
    prefix = tmp_path / "it's, here" / "2 web-é"
    given = ["--format", "json", "--files", f"{tmp_path}/in*/*.jsonl", "--output", prefix, "--validation", 0.2]
    given += ["--tokenizer", tmp_path / "t.json", "--train-tokenizer", 300, "--bos-token", "<|endoftext|>"]
    assert run(*given, "--workers", 1) == 0
    said, _, printed = capsys.readouterr().out.partition("pretrain.py")
    assert "t.json: a new tokenizer of 300 ids\n" in said
    assert "documents begin with: <|endoftext|> (id 0), end with: <|endoftext|> (id 0)\n" in said
    config = compose_config(shlex.split(printed.replace("\\\n", " ")), ROOT / "configs")
    bundle = KINDS["indexed"].open(config.data, config.model.vocab_size)
    (stream,), (held_out,) = bundle.train.values(), bundle.validation.values()
    assert stream.num_documents + held_out.num_documents == 120 and config.model.vocab_size % 128 == 0
    assert bundle.tokenizer is not None and stream.tokens(0, 1)[0] == bundle.tokenizer.eod_id
    expected = train_tokenizer([text for text in TEXTS if not is_held_out(text, 0.2)], 300)
    assert bundle.tokenizer.fingerprint() == expected.fingerprint()
    assert run(*given) == 2 and "exists already" in capsys.readouterr().err
    more = ["--tokenizer", tmp_path / "more.json", "--train-tokenizer", 5000, "--output", tmp_path / "more"]
    assert run(*given, *more, "--workers", 1) == 0
    assert " ids, not 5,000: no further pair of tokens occurs twice in this text\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--files a.jsonl --dataset x", "either as --files with --format"),
        ("--dataset x", "--dataset x needs --split"),
        ("--dataset a.jsonl --split test", "--split test has no effect with files, which are read as a whole"),
        ("--dataset a.jsonl --subset en", "--subset en has no effect with files, which are read as a whole"),
        ("--dataset none.parquet", "none.parquet matches no file"),
        ("--dataset a.tar.gz", "--dataset a.tar.gz: give files ending in .parquet, .arrow, .jsonl, .json, .csv, .txt"),
        ("--format json --files a.bin", "a.bin is a Parquet or Arrow file, not json; give it as --dataset"),
        ("--format json --files a.jsonl --split train", "--split train has no effect with --files"),
        ("--format json --files a.tar.gz", "is compressed as .tar; unpack it"),
        ("--format json --files a.jsonl --bos-token <s>", "has no token '<s>'"),
        ("--format json --files a.jsonl --validation 1", "at least 0 and below 1"),
        ("merge --inputs a b --output out", "a.idx does not exist"),
        ("check none", "none.idx does not exist"),
        ("check a.jsonl none_*", "none_*: no file matches none_*.idx"),
    ],
)
def test_refusals_are_one_line(
    arguments: str, expected: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.save("t.json")
    json_lines(Path("a.jsonl"), TEXTS)
    Path("a.tar.gz").write_bytes(b"")
    Path("a.bin").write_bytes(b"PAR1")
    of_command = arguments.startswith(("merge", "check"))
    assert run(*arguments.split(), *([] if of_command else ["--tokenizer", "t.json", "--output", "out"])) == 2
    printed = capsys.readouterr().err
    assert expected in printed and printed.count("\n") == 1 and not list(tmp_path.glob("out*"))


def started(*arguments: object) -> subprocess.Popen[str]:
    """Start killed.py with these arguments."""
    return subprocess.Popen(
        as_child([sys.executable, "-m", "tests.data.killed", *map(str, arguments)]),
        env={**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_command_killed_at_any_place_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", [*TEXTS[:20], "long words " * 300, "", *TEXTS[20:40]])
    json_lines(tmp_path / "b.jsonl", TEXTS[40:70])
    child = started(tmp_path, 1, 23)
    places, kills = map(int, child.communicate()[0].split())
    expected = contents(tmp_path / "undisturbed")
    outputs = [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "undisturbed"]
    assert places > 80 and len(outputs) == len(range(1, places, 23)) and kills >= len(outputs)
    for output in outputs:
        assert contents(output) == expected, output.name


@pytest.mark.slow
def test_workers_end_with_a_killed_command(tmp_path: Path) -> None:
    """Workers have the command's stdout open, so `communicate` returns when they end."""
    json_lines(tmp_path / "a.jsonl", TEXTS)
    child = started(tmp_path)
    assert child.stdout is not None and child.stdout.readline() == "saved\n"
    child.kill()
    child.communicate(timeout=300)


@pytest.mark.usefixtures("small_tasks")
def test_an_interrupted_command_keeps_what_is_done(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare_module, "SAVE_SECONDS", 0.0)
    path, before = json_lines(tmp_path / "a.jsonl", TEXTS), multiprocessing.active_children()
    tokenizer.save(tmp_path / "t.json")
    given = ["--format", "json", "--files", path, "--tokenizer", tmp_path / "t.json", "--workers", 1]

    def interrupt(position: int, total: int, state: State) -> None:
        if (tmp_path / "out/web.parts/state.json").is_file():
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare_data, "_progress_printer", lambda: interrupt)
    assert run(*given, "--output", tmp_path / "out/web") == 130
    assert f"the work so far is in {tmp_path}/out/web.parts" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["web.parts"] and {*multiprocessing.active_children()} <= {*before}
    monkeypatch.setattr(prepare_data, "_progress_printer", lambda: lambda *_: None)
    assert run(*given, "--output", tmp_path / "out/web") == run(*given, "--output", tmp_path / "undisturbed/web") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_workers_do_not_import_torch() -> None:
    """Importing it takes seconds and hundreds of MB. Each worker of the command imports the command's file."""
    check = "import sys, data.indexed, data.workers, scripts.prepare_data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0


@pytest.mark.usefixtures("small_tasks")
def test_a_killed_worker_is_reported(tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_module, "SAVE_SECONDS", math.inf)
    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS * 3)])
    before = multiprocessing.active_children()

    def kill(*_: object) -> None:
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()  # unlike os.kill, no error if another thread has reaped it

    (tmp_path / "out").mkdir()
    with pytest.raises(WorkerDied, match="ran out of memory"):
        prepare(parts, tmp_path / "out" / "web", tokenizer, ALL, workers=1, progress=kill)
    assert os.listdir(tmp_path / "out") == []  # nothing was saved


@pytest.mark.usefixtures("small_tasks")
def test_what_may_and_may_not_change_before_a_resume(tokenizer: HuggingFaceTokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_module, "SAVE_SECONDS", 0.0)
    path = json_lines(tmp_path / "a.jsonl", TEXTS[:10])
    json_lines(tmp_path / "b.jsonl", TEXTS[10:])

    def call(**changed: Any) -> object:
        given = {"tokenizer": tokenizer, "options": Options(), **changed}
        parts = open_files("json", find_files([str(tmp_path / "*.jsonl")]))
        return prepare(parts, tmp_path / "web", **given)

    def end(position: int, total: int, state: State) -> None:
        if position > total // 2:
            with pytest.raises(ValueError, match="another command is preparing"):
                call()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(progress=end)
    assert (tmp_path / "web.parts/state.json").is_file() and not (tmp_path / "web.idx").exists()
    for changed, expected in (
        ({"options": Options(validation=0.5)}, r"unfinished preparation with validation 0.01 instead of 0.5"),
        ({"source": {"field": "body"}}, r'source field null instead of "body"'),
        ({"tokenizer": NewTokenizer(300, tmp_path / "t.json")}, r"tokenizer \{.*\.\.\. instead of"),
    ):
        with pytest.raises(ValueError, match=expected):
            call(**changed)
    stat, content = path.stat(), path.read_bytes()
    path.write_bytes(content + b"\n")
    with pytest.raises(ValueError, match=r"a.jsonl has changed since it was prepared; remove .*web.parts"):
        call()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "web.bin").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"web.bin exists already"):
        call()
    assert (tmp_path / "web.bin").read_bytes() == b"precious"
    (tmp_path / "web.bin").unlink()
    json_lines(tmp_path / "c.jsonl", ["one more"])  # sorted after the files that were read
    call(options=Options(max_malformed=0.5))
    assert IndexedDataset(tmp_path / "web").num_documents > 100 and not (tmp_path / "web.parts").exists()


def test_merged_datasets_have_the_bytes_of_preparing_their_files_together(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("indexed", "prepare.merge"):
        monkeypatch.setattr(f"data.{module}.INDEX_BLOCK", 7)
    thirds = [json_lines(tmp_path / "in" / f"{i}.jsonl", TEXTS[40 * i : 40 * i + 40]) for i in range(3)]
    for i, path in enumerate(thirds):
        prepare(open_files("json", [path]), tmp_path / str(i), tokenizer, Options(0.3))
    prepare(open_files("json", thirds), tmp_path / "together" / "all", tokenizer, Options(0.3))
    (tmp_path / "merged").mkdir()
    inputs = [tmp_path / name for name in ("0", "1", "2")]
    assert run("merge", "--inputs", *inputs, "--output", tmp_path / "merged/all") == 0
    pattern = tmp_path / "[0-2]_validation.idx"
    assert run("merge", "--inputs", pattern, "--output", tmp_path / "merged/all_validation") == 0
    assert contents(tmp_path / "merged") == contents(tmp_path / "together")
    assert run("check", f"{tmp_path}/merged/*") == 0


def test_pairs_that_do_not_fit_are_not_merged(tokenizer: HuggingFaceTokenizer, tmp_path: Path, capsys) -> None:
    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS)])
    begun = HuggingFaceTokenizer(tokenizer.content, "t.json", bos_token="<|endoftext|>")
    for name, of_pair in (("0", tokenizer), ("begun", begun)):
        prepare(parts, tmp_path / name, of_pair, ALL)
    write(tmp_path / "wide", [[1]], np.int32)
    write_pair(tmp_path / "sentences", np.array([2, 1, 4, 0], np.int32), first_token=7)
    for names, expected in (
        (["0", "0"], "a merge needs two or more different pairs"),
        (["0", "begun"], "begun have documents that begin with different tokens (none; <|endoftext|>, id 0)"),
        (["0", "wide"], "0 uint16, "),
        (["0", "sentences"], "sentences has documents of several sequences; name both pairs in data.sources"),
    ):
        assert run("merge", "--inputs", *(tmp_path / name for name in names), "--output", tmp_path / "all") == 2
        assert expected in capsys.readouterr().err and not list(tmp_path.glob("all*"))
