from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedDataset, IndexedDatasetWriter
from data.order import SampleSource
from data.sources import entries, open_indexed, prefixes
from data.token_source import Concatenation

MakeDataset = Callable[..., IndexedDataset]
KEY = "data.sources.web"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Empty pairs called web_0, web_1, web_10, deep/web_2 and code.bin (of code.bin.idx), and files that are none."""
    (tmp_path / "deep").mkdir()
    for name in ("web_0", "web_1", "web_10", "deep/web_2", "code.bin"):
        for ending in ("idx", "bin"):
            (tmp_path / f"{name}.{ending}").touch()
    for name in ("web_3.bin", "web_4.json", "web_5.idx.tmp-1"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("web_0", ["web_0"]),
        ("web_0.idx", ["web_0"]),
        ("file:///data/web_0", ["/data/web_0"]),
        ("web_0.bin", ["web_0"]),
        ("code.bin", ["code.bin"]),
        ("code.bin.bin", ["code.bin"]),
        ("missing", ["missing"]),
        ("web_*", ["web_0", "web_1", "web_10"]),
        ("web_*.bin", ["web_0", "web_1", "web_10"]),
        ("web_?", ["web_0", "web_1"]),
        ("web_[01].idx", ["web_0", "web_1"]),
        ("**/web_*", ["deep/web_2", "web_0", "web_1", "web_10"]),
        (["web_1", "web_0"], ["web_1", "web_0"]),
        (["web_1", "web_*", "web_1"], ["web_1", "web_0", "web_1", "web_10", "web_1"]),
        (["deep/*", ["code.bin"]], ["deep/web_2", "code.bin"]),
    ],
)
def test_what_a_value_names(folder: Path, monkeypatch: pytest.MonkeyPatch, value: object, found: list[str]) -> None:
    monkeypatch.chdir(folder)
    assert prefixes(KEY, value) == found


def test_a_list_in_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in it are relative to it, lists in it to themselves, wherever the run starts."""
    (folder / "deep" / "list.yaml").write_text("- web_2\n- ../web_1\n- [/abs/a, '../web_?']\n")
    (folder / "all.yml").write_text("- deep/list.yaml\n- web_10\n")
    monkeypatch.chdir("/")
    d = str(folder)
    assert [str(Path(p).resolve()) for p in prefixes(KEY, f"{d}/all.yml")] == [
        f"{d}/deep/web_2",
        f"{d}/web_1",
        "/abs/a",
        f"{d}/web_0",
        f"{d}/web_1",
        f"{d}/web_10",
    ]


LISTS = {
    "empty.yaml": ("", "holds nothing, not a list; write `- /data/web_00` on a line each"),
    "text.yaml": ("/data/web", "holds a str, not a list; write `- /data/web_00` on a line each"),
    "mapping.yaml": ("web: /data/web", "holds a dict, not a list; write `- /data/web_00` on a line each"),
    "broken.yaml": ("- a\n- [b", "not valid YAML in line 2; write a list, `- /data/web_00` on a line each"),
    "missing.yaml": (None, "cannot be read (No such file or directory); name a YAML file with a list of paths"),
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- []", "=[] (in {}): the list is empty; name at least one pair of files"),
        ("- 7", "=7 (in {}): expected a path, a pattern, a URL, or a list of these"),
        ("- ''", "='' (in {}): expected a path, a pattern, a URL, or a list of these"),
        ("- list.yaml", "=list.yaml (in {}): this list is part of itself; take it out"),
        (
            "- {a: 0.3}",
            "={{'a': 0.3}} (in {}): expected a path or a list of paths; what is to have a weight of its own is a "
            "source of its own, and weights are given in the blends of data.phases",
        ),
    ],
)
def test_wrong_entries_are_named_with_their_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(content)
    with pytest.raises(ValueError) as refusal:
        entries(KEY, str(path))
    assert str(refusal.value) == KEY + message.format(path)


def test_a_source_of_several_files(make_dataset: MakeDataset, tmp_path: Path) -> None:
    sizes = {"web_0": 100, "web_1": 50, "web_2": 7}
    parts = [make_dataset(name, size) for name, size in sizes.items()]
    (tmp_path / "twice.yaml").write_text("- web_1\n- web_0\n- web_1\n")
    bundle = open_indexed(
        1000,
        {"all": f"{tmp_path}/web_*", "twice": f"{tmp_path}/twice.yaml", "one": [f"{tmp_path}/web_2.bin"]},
    )
    everything, twice, one = (bundle.train[name] for name in ("all", "twice", "one"))
    stream = np.concatenate([part.tokens(0, part.num_tokens) for part in parts])
    assert np.array_equal(everything.tokens(0, 157), stream)
    assert isinstance(twice, Concatenation) and twice.parts[0] is twice.parts[2]
    assert np.array_equal(twice.tokens(0, 200), np.concatenate([stream[100:150], stream[:100], stream[100:150]]))
    # A list of one is that one, for checkpoints too.
    assert one.identity() == parts[2].identity() and one.parts == [one]
    assert "157 tokens in 3 files" in bundle.summary()


def test_samples_are_those_of_one_merged_file(make_dataset: MakeDataset, tmp_path: Path) -> None:
    parts = [make_dataset(name, size) for name, size in (("a", 300), ("b", 41), ("c", 500))]
    with IndexedDatasetWriter(tmp_path / "merged", np.uint16) as writer:
        for part in parts:
            for document in range(part.num_documents):
                writer.add_document(part.document(document))
    bundle = open_indexed(1000, {"many": [str(part) for part in parts], "one": str(tmp_path / "merged")})
    many, one = (SampleSource("web", bundle.train[name], 16, 0, 1000) for name in ("many", "one"))
    assert many.num_samples == one.num_samples == 52
    for sample in range(104):
        assert np.array_equal(many.sample(sample), one.sample(sample))


def test_a_pattern_must_not_match_what_validates(make_dataset: MakeDataset, tmp_path: Path) -> None:
    for name in ("web_0", "web_validation"):
        make_dataset(name, 100)
    held_out = {"web": f"{tmp_path}/web_validation"}
    with pytest.raises(ValueError) as refusal:
        open_indexed(1000, {"web": f"{tmp_path}/web_*"}, held_out)
    assert str(refusal.value) == (
        f"data.sources.web={tmp_path}/web_* matches {tmp_path}/web_validation, which data.validation.web reads; narrow "
        "the pattern, or keep held-out files in another folder"
    )
    open_indexed(1000, {"web": f"{tmp_path}/web_[0-9]*"}, held_out)
