"""Tables: one column is read, as it is in the file, whatever the others are; an error names the file and the row."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from data.prepare import readers
from data.prepare.readers import Record, open_dataset

WORDS = ["one", None, "zwei é", "", "NA"]
TEXT_TYPES: dict[str, Callable[[list[str | None]], pa.Array]] = {
    "string": pa.array,
    "large string": lambda words: pa.array(words, pa.large_string()),
    "string view": lambda words: pa.array(words, pa.string_view()),
    "bytes": lambda words: pa.array([word and word.encode() for word in words], pa.binary()),
    "byte view": lambda words: pa.array([None if w is None else w.encode() for w in words], pa.binary_view()),
    "dictionary": lambda words: pa.array(words).dictionary_encode(),
    "runs": lambda words: pc.run_end_encode(pa.array(words)),
    "JSON": lambda words: pa.ExtensionArray.from_storage(pa.json_(), pa.array(words)),
}


def records(*names: Path, field: str = "text", split: str | None = None) -> list[Record]:
    parts = open_dataset([str(name) for name in names], split, field)
    return [record for part in parts for _, task in part.tasks() for record in task()]


def write_arrow(path: Path, table: pa.Table, is_stream: bool) -> None:
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("kind", TEXT_TYPES)
def test_every_type_of_text_and_bytes_is_read(kind: str, tmp_path: Path) -> None:
    table = pa.table({"n": [0, 1, 2, 3, 4], "text": TEXT_TYPES[kind](WORDS)})
    write_arrow(tmp_path / "a.arrow", table, is_stream=True)
    write_arrow(tmp_path / "b.arrow", table, is_stream=False)
    paths = [tmp_path / "a.arrow", tmp_path / "b.arrow"]
    if kind != "runs":  # Parquet has none
        pq.write_table(table, tmp_path / "c.parquet", row_group_size=3)
        paths.append(tmp_path / "c.parquet")
    found = records(*paths)
    assert [record.text for record in found] == ["one", "", "zwei é", "", "NA"] * len(paths)
    assert [record.problem for record in found] == [None, "empty", None, "empty", None] * len(paths)
    assert found[-1].where == f"{paths[-1]}, row 5"


def test_shards_may_differ_in_all_but_the_text(tmp_path: Path) -> None:
    shards = {
        "a": {"text": ["one"], "score": [1.5]},
        "b": {"score": ["high"], "meta": [{"x": 1}], "text": ["two"]},
        "no_rows": {"text": pa.array([], pa.string())},
        "no_rows_of_numbers": {"text": pa.array([], pa.int64())},
        "no_columns": {},
        "nulls": {"text": pa.nulls(3)},
        "z": {"text": ["three"], "text.lang": [1]},
    }
    for name, columns in shards.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    (tmp_path / "more.csv").write_text("")
    (tmp_path / "names_only.csv").write_text("id,text\n")
    found = records(tmp_path / "*.parquet", tmp_path / "*.csv")
    assert [record.text for record in found if record.problem is None] == ["one", "two", "three"]
    nulls = [record.where for record in found if record.problem]
    assert nulls == [f"{tmp_path}/nulls.parquet, row {n}" for n in (1, 2, 3)]


def test_a_field_inside_a_column(tmp_path: Path) -> None:
    rows = [{"text": "one", "n": 1}, None, {"text": None, "n": 1}]
    pq.write_table(pa.table({"meta": rows, "meta.name": ["a", "b", "c"]}), tmp_path / "a.parquet")
    found = records(tmp_path / "a.parquet", field="meta.text")
    assert [(record.text, record.problem) for record in found] == [("one", None), ("", "empty"), ("", "empty")]
    assert [record.text for record in records(tmp_path / "a.parquet", field="meta.name")] == ["a", "b", "c"]


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_cells_of_csv_are_text_as_they_are(end: str, piece: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", piece)
    monkeypatch.setattr(readers, "TASK_SIZE", 10)
    cells = ["NA", "None", "007", "1.0", "2024-01-01", "true", '"a, ""b"""', '"two\r\nlines\r"', "", "é", "n/a"]
    lines = ["\ufeffid,text", *(f"{number},{cell}" for number, cell in enumerate(cells)), ""]
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(end.join(lines).encode() + b"11,\xff" + f"{end}12{end}13,a,b{end}".encode()))
    found = records(path)
    texts = [*cells[:6], 'a, "b"', "two\r\nlines\r", "", "é", "n/a", "", "", ""]
    assert [record.text for record in found] == texts
    bad = "not a row of CSV with a cell for each name in the first line"
    assert [(r.where, r.problem) for r in found if r.problem] == [
        (f"{path}, row 9", "empty"),
        (f"{path}, row 12", "not UTF-8"),
        (f"{path}, row 13", bad),
        (f"{path}, row 14", bad),
    ]


def test_json_and_text_are_not_guessed_either(tmp_path: Path) -> None:
    rows = [{"text": "2024-01-01"}, {"other": [1, {"a": 2}], "text": "10"}, {"text": None, "other": "x"}, {"text": 3}]
    (tmp_path / "a.json").write_text("\n  " + json.dumps(rows, indent=1))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "c.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "d.txt").write_text("NA\r\n\n007\n")
    *found, first, blank, last = records(*(tmp_path / name for name in ("a.json", "b.jsonl", "c.json", "d.txt")))
    assert [record.text for record in found] == ["2024-01-01", "10", "", ""] * 3
    assert [r.problem for r in found] == [None, None, "empty", "whose field 'text' is not a string"] * 3
    assert found[3].where == f"{tmp_path}/a.json, row 4" and found[7].where == f"{tmp_path}/b.jsonl:4"
    assert (first.text, blank.problem, last) == ("NA", "empty", Record(f"{tmp_path}/d.txt:3", "007"))


def test_the_splits_of_a_saved_folder(tmp_path: Path) -> None:
    each = {name: datasets.Dataset.from_dict({"text": [name] * 3, "n": [1, 2, 3]}) for name in ("train", "test")}
    datasets.DatasetDict(each).save_to_disk(str(tmp_path / "both"), num_shards={"train": 2, "test": 1})
    assert [record.text for record in records(tmp_path / "both", split="train")] == ["train"] * 3
    for split in (None, "dev"):
        with pytest.raises(ValueError, match=r"both: name one of its splits with --split: train, test$"):
            records(tmp_path / "both", split=split)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"body": ["x"], "n": [1]}, r"a\.parquet has no column 'text'; .* with --field: body, n$"),
        ({"text": [1]}, r"a\.parquet: the field 'text' of text \(int64\) is not text; name another with --field$"),
        ({"text": [["x"]]}, r"a\.parquet: the field 'text' of text \(list<.*>\) is not text"),
        ({"text": [{"body": "x"}]}, r"a\.parquet: the field 'text' of text \(struct<.*>\) is not text"),
    ],
)
def test_a_column_that_is_not_text_is_refused_at_once(columns: dict[str, object], expected: str, tmp_path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=expected):
        open_dataset([str(tmp_path / "a.parquet")])


def test_damaged_tables_are_named_with_their_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{i} " * 400 for i in range(5000)]}), path, row_group_size=1000)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\0" * 900 + content[len(content) // 2 + 900 :])
    with pytest.raises(ValueError, match=rf"^{path} cannot be read after row [1-4]000 \(.*\); copy it again$"):
        records(path)
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=rf"^{path} cannot be read after row 0 "):
        open_dataset([str(path)])
    (tmp_path / "a.csv").write_text('id,text\n1,"closed"\n2,"open\n3,x\n')
    with pytest.raises(ValueError, match=r"a\.csv: row 2 opens a quote that is never closed"):
        open_dataset([str(tmp_path / "a.csv")])
    (tmp_path / "b.csv").write_text("text,text\n1,2\n")
    with pytest.raises(ValueError, match=r"b\.csv has 2 columns 'text'; rename all but one"):
        open_dataset([str(tmp_path / "b.csv")])
