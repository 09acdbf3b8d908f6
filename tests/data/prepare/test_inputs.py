"""Awkward and corrupt inputs: what each one gives, or the one line that it ends in."""

from __future__ import annotations

import gzip
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data.prepare.prepare import Options, ingest
from data.prepare.readers import find_files, open_dataset, open_files, unpacked
from data.tokenizer import HuggingFaceTokenizer, train_tokenizer
from scripts import prepare_data
from tests.data.prepare.corpus import PACKERS, TEXTS, documents, json_lines

ALL = Options(validation=0)


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return train_tokenizer(TEXTS, 300)


def read(format: str, path: Path, tokenizer: HuggingFaceTokenizer, **more: Any) -> list[str]:
    """What a file gives, all problems allowed."""
    options = Options(validation=0, max_malformed=more.pop("max_malformed", 1.0))
    output = path.parent / f"{path.name}.out"
    ingest(open_files(format, [path], **more), output, tokenizer, options)
    return documents(output, tokenizer)


@pytest.mark.parametrize("ending", [*PACKERS, ".GZ", ".Gz", ".XZ", ".ZST"])
@pytest.mark.parametrize("format", ["json", "text"])
def test_any_spelling_of_any_compression(
    format: str, ending: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    texts = TEXTS[:3]
    content = "".join(json.dumps({"text": t}) + "\n" for t in texts) if format == "json" else texts[0]
    path = tmp_path / f"a.data{ending}"
    path.write_bytes(PACKERS[ending.lower()](content.encode()))
    assert read(format, path, tokenizer) == (texts if format == "json" else texts[:1])


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_files_packed_in_several_pieces_are_read_whole(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(b"".join(PACKERS[ending](piece) for piece in (b"one ", b"", b"two")))
    assert b"".join(unpacked(path)) == b"one two"
    path.write_bytes(PACKERS[ending](b""))
    assert list(unpacked(path)) == []


def test_a_large_window_of_zstandard_is_read(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    (tmp_path / "a.zst").write_bytes(
        zstandard.ZstdCompressor(compression_params=parameters).compress(b"x" * 140_000_000)
    )
    assert sum(map(len, unpacked(tmp_path / "a.zst"))) == 140_000_000


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def torn(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 0x5A for byte in content[middle : middle + 20]) + content[middle + 20 :]


NOISE = "".join(f'{{"text": "{os.urandom(30).hex()}"}}\n' for _ in range(2000)).encode()
DAMAGED = r"is damaged, was cut short or is not compressed by {} \(.*\); copy it again, or give it its right ending"
CORRUPT: dict[str, tuple[str, bytes, str, str]] = {
    **{
        f"{how.__name__} {ending}": (f"a.jsonl{ending}", how(PACKERS[ending](NOISE)), "json", DAMAGED.format(name))
        for ending, name in {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}.items()
        for how in (cut, torn)
    },
    "plain .gz": ("a.jsonl.gz", NOISE, "json", DAMAGED.format("gzip")),
    "plain .bz2": ("a.jsonl.bz2", NOISE, "json", DAMAGED.format("bzip2")),
    "plain .xz": ("a.jsonl.xz", NOISE, "json", DAMAGED.format("xz")),
    "plain .zst": ("a.jsonl.zst", NOISE, "json", DAMAGED.format("Zstandard")),
    "cut text.gz": ("a.txt.gz", cut(gzip.compress(NOISE)), "text", DAMAGED.format("gzip")),
    "no parquet": (
        "a.parquet",
        b"PAR1 or not",
        "parquet",
        r"is damaged or no Parquet file \(.*\); copy or write it again",
    ),
    "an empty parquet": ("a.parquet", b"", "parquet", r"is damaged or no Parquet file \(.*\)"),
    "zip": ("a.jsonl.zip", b"PK", "json", r"is packed as \.zip; unpack it, or compress each file as \.gz, \.bz2, \.xz"),
    "tar.gz": ("a.tar.GZ", b"", "json", r"is packed as \.tar; unpack it"),
    "nothing": ("a.jsonl", b"", "json", "the input holds no documents; nothing was written"),
    "blank lines": ("a.jsonl", b"\n\r\n \n", "json", "the input holds no documents; nothing was written"),
    "another field": (
        "a.jsonl",
        b'{"body": "x"}\n',
        "json",
        r"1 of 1 records are malformed \(1 without a field 'text'\)",
    ),
    "one array": ("a.jsonl", b'[{"text": "x"}]', "json", r"1 of 1 records are malformed \(1 not a JSON object\)"),
    "pretty JSON": (
        "a.jsonl",
        b'{\n "text": "x"\n}',
        "json",
        r"3 of 3 records are malformed \(3 not JSON \(one object a",
    ),
    "UTF-16": (
        "a.jsonl",
        '{"text": "x"}\n'.encode("utf-16"),
        "json",
        r"malformed \(.* not UTF-8.*\), more than the share",
    ),
    "deep JSON": ("a.jsonl", b'{"text":' + b"[" * 100_000, "json", r"1 of 1 records are malformed \(1 not JSON"),
    "Latin-1 text": ("a.txt", "naïve".encode("latin-1"), "text", r"1 of 1 records are malformed \(1 not UTF-8\)"),
    "blank text": ("a.txt", b" \n\t\n", "text", r"1 of 1 records are malformed \(1 empty\)"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_input_is_one_line_and_nothing_else(
    case: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, format, expected = CORRUPT[case]
    (tmp_path / name).write_bytes(content)
    tokenizer.save(tmp_path / "t")
    options = [
        "--format",
        format,
        "--files",
        str(tmp_path / name),
        "--tokenizer",
        str(tmp_path / "t"),
        "--workers",
        "1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch)
        assert prepare_data.main([*options, "--output", str(tmp_path / "out")]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("skipped ")]
    assert len(error) == 1 and error[0].startswith("prepare_data.py: ")
    with pytest.raises(ValueError, match=expected):
        raise ValueError(error[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "t"])


def in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Start no processes: what is read is the same."""
    patch.setattr(prepare_data, "ingest", lambda *args, **options: ingest(*args, **{**options, "workers": 0}))


def test_a_bad_tokenizer_and_an_unreadable_file_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    json_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "t").write_text("{}")
    common = ["--format", "json", "--tokenizer", str(tmp_path / "t"), "--output", str(tmp_path / "out")]
    assert prepare_data.main([*common, "--files", str(tmp_path / "a.jsonl")]) == 2
    assert "t cannot be read as a tokenizer.json" in (error := capsys.readouterr().err) and error.count("\n") == 1
    train_tokenizer(TEXTS, 300).save(tmp_path / "t")
    assert prepare_data.main([*common, "--files", str(tmp_path)]) == 2
    assert "is a folder; give a quoted pattern of its files" in (error := capsys.readouterr().err)
    assert prepare_data.main([*common, "--files", str(tmp_path / "a.jsonl"), "--bos"]) == 2
    assert "does not say what begins a document; name it: --bos TOKEN" in capsys.readouterr().err
    assert prepare_data.main([*common, "--files", str(tmp_path / "a.jsonl"), "--bos", "<x>"]) == 2
    assert "has no token '<x>'; name one that it has" in capsys.readouterr().err

    def refused(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path / "a.jsonl"))

    monkeypatch.setattr("builtins.open", refused)  # as root, who runs tests in containers, may read everything
    assert prepare_data.main([*common, "--files", str(tmp_path / "a.jsonl")]) == 2
    error = capsys.readouterr().err
    assert "Permission denied" in error and "a.jsonl" in error and error.count("\n") == 1


def test_ends_of_lines_marks_and_odd_names(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a [b]*?.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\x0bfour\r\n\r\n\r\n\nfive")
    for unit, expected in {
        "document": ["one\ntwo\n\nthree\x0bfour\n\n\n\nfive"],
        "paragraph": ["one\ntwo", "three\x0bfour", "five"],
        "line": ["one", "two", "three\x0bfour", "five"],
    }.items():
        (tmp_path / unit).mkdir()
        (tmp_path / unit / "x").write_bytes(path.read_bytes())
        assert read("text", tmp_path / unit / "x", tokenizer, text_unit=unit) == expected
    assert find_files([str(path)]) == [path]
    os.symlink(path, tmp_path / "link.txt")
    assert find_files([str(path), str(tmp_path / "*.txt")]) == [path]


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_where_files_are_torn_while_reading_makes_no_difference(
    unit: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"a\r\nb\n\n\nc d\r\n\r\n\r\ne\n\n\n\n\nf\n\xff\n\ng\r\rh\n"
    expected = None
    for size in (1, 2, 3, 5, 1000):
        monkeypatch.setattr("data.prepare.readers.READ_BYTES", size)
        for task in (1, 6, 1000):
            monkeypatch.setattr("data.prepare.readers.TASK_BYTES", task)
            folder = tmp_path / f"{size}-{task}"
            folder.mkdir()
            (folder / "x").write_bytes(content)
            reports: list[str] = []
            parts = open_files("text", [folder / "x"], text_unit=unit)
            options = Options(validation=0, max_malformed=0.9)
            ingest(parts, folder / "out", tokenizer, options, report=reports.append)
            found = documents(folder / "out", tokenizer), [line.replace(str(folder), "") for line in reports]
            expected = expected or found
            assert found == expected
    where = {"line": "/x:14", "paragraph": "/x:13"}[unit]
    assert expected is not None and expected[1] == [f"skipped {where}: not UTF-8"]


def test_any_values_of_rows(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    columns = {
        "large": pa.array(["one", "two"], pa.large_string()),
        "view": pa.array(["one", "two"]).dictionary_encode(),
        "binary": pa.array([b"one", b"two"]),
        "nested": pa.array([{"text": "x"}, {"text": "y"}]),
    }
    for name, column in columns.items():
        pq.write_table(pa.table({"text": column}), tmp_path / name)
        parts = open_files("parquet", [tmp_path / name])
        if name in ("large", "view"):
            ingest(parts, tmp_path / f"{name}.out", tokenizer, ALL)
            assert documents(tmp_path / f"{name}.out", tokenizer) == ["one", "two"]
        else:
            with pytest.raises(ValueError, match=r"2 of 2 records are malformed \(2 whose field 'text' is no string\)"):
                ingest(parts, tmp_path / f"{name}.out", tokenizer, ALL)


def test_strings_of_rows_that_are_not_utf8(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    column = pa.array([b"one", b"\xff", None, b"two"]).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    done = ingest(open_files("parquet", [tmp_path / "a.parquet"]), tmp_path / "out", tokenizer, Options(0, 0.5))
    assert documents(tmp_path / "out", tokenizer) == ["one", "two"]
    assert done.state.malformed == {"not UTF-8": 1, "whose field 'text' is no string": 1}


def test_a_torn_parquet_file_is_told(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [os.urandom(50).hex() for _ in range(1000)]}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[5000:5200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is damaged or no Parquet file \(.*\); copy or write it again"):
        ingest(open_files("parquet", [path]), tmp_path / "out", tokenizer, ALL)


def test_splits_and_slices_of_datasets(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    tables = {"train": datasets.Dataset.from_dict({"text": TEXTS}), "test": datasets.Dataset.from_dict({"text": ["x"]})}
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "saved"))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "train.parquet")
    (tmp_path / "files").mkdir()
    (tmp_path / "train.parquet").rename(tmp_path / "files" / "train.parquet")
    for i, (name, split, expected) in enumerate(
        [
            ("saved", "train", TEXTS),
            ("saved", "train[:10%]", TEXTS[:12]),
            ("saved", "train[-2:]+test", [*TEXTS[-2:], "x"]),
            ("files", "train[10:20]", TEXTS[10:20]),
            ("files", "train", TEXTS),
        ]
    ):
        ingest(open_dataset(str(tmp_path / name), split), tmp_path / str(i), tokenizer, ALL)
        assert documents(tmp_path / str(i), tokenizer) == expected
    for name, split, expected_error in (
        ("saved", None, r"saved has several splits; name one with --split: train, test"),
        ("saved", "dev", r"saved has no split 'dev' \(.*\); its splits: train, test"),
        ("saved", "train[:1", r"saved has no split 'train\[:1'"),
        ("files", "dev", r"datasets cannot read .*files dev: "),
        ("none", "train", r"datasets cannot read .*none train: "),
        ("files", None, r"a split is needed, such as train or train\[:1%\]"),
    ):
        with pytest.raises(ValueError, match=expected_error):
            ingest(open_dataset(str(tmp_path / name), split), tmp_path / "out", tokenizer, ALL)
    with pytest.raises(ValueError, match="was written by save_to_disk and has no subset 'x'"):
        open_dataset(str(tmp_path / "saved"), "train", subset="x")
    assert not list(tmp_path.glob("out*"))


def test_a_damaged_saved_folder_is_told(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"datasets cannot read .*saved: "):
        ingest(open_dataset(str(tmp_path / "saved"), None), tmp_path / "out", tokenizer, ALL)


def test_too_many_malformed_records_end_it_early(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    """Not at the end, but as soon as it is clear; and at once where none is allowed."""

    def lines(malformed: Callable[[int], bool], number: int) -> list[Any]:
        return [3 if malformed(i) else f"text {i}" for i in range(number)]

    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines(lambda i: i % 20 == 0, 20_000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.prepare.readers.TASK_BYTES", 10_000)
        patch.setattr("data.prepare.readers.READ_BYTES", 10_000)
        for share, expected in (
            (
                0.01,
                r"^\d\d of the first 1,\d\d\d records are malformed \(\d\d whose field 'text' is no string\), mor",
            ),
            (0.0, r"^\d\d of the first \d\d\d records are malformed"),
            (0.03, r"^1,000 of 20,000 records are malformed"),
        ):
            with pytest.raises(ValueError, match=expected):
                ingest(open_files("json", [path]), tmp_path / "out", tokenizer, Options(0, max_malformed=share))
    done = ingest(open_files("json", [path]), tmp_path / "out", tokenizer, Options(0, max_malformed=0.05))
    assert done.state.malformed.total() == 1000


def test_begin_and_end_of_a_document(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    from data.indexed import IndexedDataset

    parts = open_files("json", [json_lines(tmp_path / "a.jsonl", TEXTS[:3])])
    plain = tokenizer.encode_batch(TEXTS[:3])
    eod = tokenizer.eod_id
    letter = tokenizer.id_of("a")
    for i, (options, before, after) in enumerate(
        [
            (Options(0), [], [eod]),
            (Options(0, bos_token="a"), [letter], [eod]),
            (Options(0, bos_token="<|endoftext|>", eod=False), [eod], []),
            (Options(0, eod=False), [], []),
        ]
    ):
        ingest(parts, tmp_path / str(i), tokenizer, options)
        dataset = IndexedDataset(tmp_path / str(i))
        assert [dataset.document(d).tolist() for d in range(3)] == [[*before, *ids, *after] for ids in plain]
        facts = json.loads((tmp_path / f"{i}.json").read_bytes())
        assert (facts["eod"] or {}).get("id") == (eod if after else None)
        assert (facts["bos"] or {}).get("token") == options.bos_token
        assert facts["tokens"] == dataset.num_tokens and facts["documents"] == 3
        assert facts["text_bytes"] == len("".join(TEXTS[:3]).encode())
        assert facts["tokenizer"]["fingerprint"] == tokenizer.fingerprint()
        assert facts["dtype"] == "uint16" and facts["sha256"]["bin"]


def test_ids_above_65499_take_four_bytes(tmp_path: Path) -> None:
    settings = json.loads(train_tokenizer(TEXTS, 300)._content)
    settings["added_tokens"][0]["id"] = settings["model"]["vocab"]["<|endoftext|>"] = 70_000
    tokenizer = HuggingFaceTokenizer(json.dumps(settings), "a test")
    assert tokenizer.vocab_size == 70_001
    path = json_lines(tmp_path / "a.jsonl", TEXTS[:2])
    ingest(open_files("json", [path]), tmp_path / "out", tokenizer, ALL)
    tokens = struct.unpack("<i", (tmp_path / "out.bin").read_bytes()[-4:])
    assert tokens == (70_000,) and documents(tmp_path / "out", tokenizer) == TEXTS[:2]


@pytest.mark.parametrize(
    ("module", "extra", "call"),
    [
        ("pyarrow", "parquet", lambda: open_files("parquet", [])),
        ("datasets", "datasets", lambda: open_dataset("org/name", "train")),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    module: str, extra: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf'needs a package .*{module}.*; pip install "megatron_fp4\[{extra}\]"$'):
        call()
