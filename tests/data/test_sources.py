"""The values of `data.sources`, and which files they name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.sources import open_indexed, prefixes
from data.tokenizer import train_tokenizer
from tests.data.streams import write, write_random

KEY = "data.sources.web"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty pairs named web_0, web_1, web_10, deep/web_2 and code.bin (code.bin.idx), and files that are no pairs."""
    (tmp_path / "deep").mkdir()
    for name in ("web_0", "web_1", "web_10", "deep/web_2", "code.bin"):
        for ending in ("idx", "bin"):
            (tmp_path / f"{name}.{ending}").touch()
    for name in ("web_3.bin", "web_4.json", "web_5.idx.tmp-1"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("web_0.idx", ["web_0"]),
        ("code.bin", ["code.bin"]),
        ("code.bin.bin", ["code.bin"]),
        ("web_*", ["web_0", "web_1", "web_10"]),
        ("**/web_*", ["deep/web_2", "web_0", "web_1", "web_10"]),
        (["web_1", ["web_*"], "web_1"], ["web_1", "web_0", "web_1", "web_10", "web_1"]),
    ],
)
def test_which_pairs_a_value_names(folder: Path, value: object, found: list[str]) -> None:
    assert prefixes(KEY, value) == found


def test_a_value_may_be_a_file_with_a_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the file that lists them, whatever the current folder."""
    (folder / "deep" / "list.yaml").write_text("- web_2\n- [/abs/a, '../web_?']\n")
    (folder / "all.yml").write_text("- deep/list.yaml\n- web_10\n")
    monkeypatch.chdir("/")
    expected = [folder / "deep/web_2", Path("/abs/a"), folder / "web_0", folder / "web_1", folder / "web_10"]
    assert [Path(found).resolve() for found in prefixes(KEY, f"{folder}/all.yml")] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "={}: cannot be read ([Errno 2] No such file"),
        ("web: /data/web", "={}: has {{'web': '/data/web'}}, not a list; write a line `- /data/web_00` for each"),
        ("- []", "=[] (in {}): expected a path, a pattern, a URL, or a list of these"),
        ("- list.yaml", "=list.yaml (in {}): this list includes itself; remove the entry"),
        ("- nothing_*", "=nothing_*: no file matches"),
    ],
)
def test_wrong_entries_are_named_with_their_file(folder: Path, content: str | None, message: str) -> None:
    path = Path("list.yaml")
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as refusal:
        prefixes(KEY, str(path))
    assert str(refusal.value).startswith(KEY + message.format(path)) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [["web_*"], ["web_held_out"], ["web_0", "link.idx"]])
def test_training_on_a_validation_file_is_refused(tmp_path: Path, value: list[str]) -> None:
    """The sources name it by a pattern, by its name, or by a link to it."""
    for name in ("web_0", "web_held_out"):
        write_random(tmp_path / name, 100)
    for ending in ("idx", "bin"):
        (tmp_path / f"link.{ending}").symlink_to(tmp_path / f"web_held_out.{ending}")
    held_out = {"web": "web_held_out"}
    with pytest.raises(ValueError, match=r"data\.sources\.web has .*, which data\.validation\.web reads too: "):
        open_indexed(1000, {"web": value}, held_out)
    open_indexed(1000, {"web": "web_[0-9]*"}, held_out)


def test_a_tokenizer_that_did_not_make_the_files_is_refused(tmp_path: Path) -> None:
    prefix = write_random(tmp_path / "web").prefix
    tokenizer = train_tokenizer(["some text"] * 3, 260)
    tokenizer.save(tmp_path / "tokenizer.json")
    facts = tmp_path / "web.json"
    file = {"fingerprint": tokenizer.facts["file"]}  # version 0.2 has the hash of the file
    for content in ({"tokenizer": {"fingerprint": tokenizer.fingerprint()}}, {"tokenizer": file}, {"text_bytes": 1}):
        facts.write_text(json.dumps(content))
        open_indexed(1000, {"web": prefix}, tokenizer=tmp_path / "tokenizer.json")
    facts.write_text(json.dumps({"tokenizer": {"fingerprint": "0123456789abcdef"}}))
    with pytest.raises(ValueError, match=r"data\.sources\.web: .*web was made with another tokenizer \(0123456789ab"):
        open_indexed(1000, {"web": prefix}, tokenizer=tmp_path / "tokenizer.json")
    assert open_indexed(1000, {"web": prefix}).tokenizer is None


def test_ids_outside_the_vocabulary_are_refused_where_a_sample_shows_them(tmp_path: Path) -> None:
    """The sample: 16 blocks of 4 KiB, evenly spaced. Here some begin and end within a token."""
    starts = np.array([block * (200_000 - 4096) // 15 for block in range(16)])
    assert {*starts % 4} != {0}
    first, end = -(-starts // 4), (starts + 4096) // 4  # the tokens that are in a block as a whole
    for held_out in (False, True):
        for place, is_seen in ((first[1], True), (end[7] - 1, True), (end[7] + 1, False), (first[9] - 2, False)):
            tokens = np.full(50_000, 5)
            tokens[place] = 1000
            prefix = write(tmp_path / "web_1", [tokens], np.int32).prefix
            sources = {"web": [write_random(tmp_path / "web_0").prefix, prefix]}
            given = ({"more": write_random(tmp_path / "more").prefix}, sources) if held_out else (sources,)
            open_indexed(1001, *given)
            if not is_seen:
                open_indexed(1000, *given)
                continue
            with pytest.raises(ValueError) as refusal:
                open_indexed(1000, *given)
            key = "data.validation.web" if held_out else "data.sources.web"
            expected = f"{key} ({prefix}) has the token id 1000, outside the model's vocabulary of 1000: it was made"
            assert str(refusal.value).startswith(expected)


EOD, SEP = {"token": "<|endoftext|>", "id": 0}, {"token": "!", "id": 1}
FACTS: dict[str, Any] = {"tokenizer": {"kind": "tokenizer.json"}, "eod": EOD, "bos": None}


@pytest.mark.parametrize(
    ("where", "changed", "expected"),
    [
        ("more", {"tokenizer": {"fingerprint": "0" * 64}}, "were made with different tokenizers (fingerprint {}; "),
        ("web_1", {"eod": SEP}, "have documents that end with different tokens (<|endoftext|>, id 0; !, id 1) by"),
        ("held_out", {"bos": EOD}, "have documents that begin with different tokens (none; <|endoftext|>, id 0) by"),
        ("held_out", {"tokens": 7}, "describes other tokens: tokens 7, here 500; restore "),
        ("more", {"documents": 3}, "describes other tokens: documents 3, here "),
        ("web_0", {"dtype": "int32"}, "describes other tokens: dtype int32, here uint16"),
        ("web_0", {"eod": "x"}, "does not have the facts of a dataset ("),
    ],
)
def test_datasets_that_disagree_are_refused(where: str, changed: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Two files of a source, two sources, and validation sets, with and without data.tokenizer."""
    tokenizer = train_tokenizer(["some text!"] * 3, 260)
    tokenizer.save("tokenizer.json")
    facts = {**FACTS, "tokenizer": tokenizer.facts}
    for name in ("web_0", "web_1", "more", "held_out"):
        write_random(tmp_path / name, 500)
        Path(f"{name}.json").write_text(json.dumps(facts | (changed if name == where else {})))
    write_random(tmp_path / "unknown", 500)
    sources, held_out = {"web": ["web_0", "web_1"], "more": "more", "megatron": "unknown"}, {"own": "held_out"}
    for given in (None, "tokenizer.json"):
        with pytest.raises(ValueError) as refusal:
            open_indexed(1000, sources, held_out, given)
        assert expected.format(tokenizer.fingerprint()[:12]) in str(refusal.value)
        assert f"{where}" in str(refusal.value) and "\n" not in str(refusal.value)
    for older in ("web_0", where):
        Path(f"{older}.json").write_text(json.dumps(facts | {"tokenizer": {"fingerprint": tokenizer.facts["file"]}}))
    bundle = open_indexed(1000, sources, held_out)
    assert "documents begin with: no token, end with: <|endoftext|> (id 0)" in bundle.summary()


def test_the_data_says_which_tokens_begin_and_end_its_documents(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some text!"] * 3, 260)
    tokenizer.save("tokenizer.json")
    begin, end = ({"token": token, "id": tokenizer.token_id(token)} for token in ("s", "!"))
    facts = {"tokenizer": {"fingerprint": tokenizer.fingerprint(), "vocab_size": 260}, "eod": end, "bos": begin}
    write_random(tmp_path / "web", 500)
    Path("web.json").write_text(json.dumps(facts))
    opened = open_indexed(1000, {"web": "web"}, tokenizer="tokenizer.json")
    assert opened.tokenizer is not None and opened.tokenizer.document_tokens == {"eod": end, "bos": begin}
    assert opened.facts == open_indexed(1000, {"web": "web"}).facts == facts
    with pytest.raises(ValueError, match=r"data\.eod_token=x, but documents of .*web end with ! .*leave"):
        open_indexed(1000, {"web": "web"}, tokenizer="tokenizer.json", eod_token="x")
    with pytest.raises(ValueError, match=r"has 260 ids and the model only 259: set model\.vocab_size to 260 or more"):
        open_indexed(259, {"web": "web"})


def test_the_ends_of_documents_that_no_json_describes_are_read(tmp_path: Path) -> None:
    train_tokenizer(["some text!"] * 3, 260).save("tokenizer.json")
    for name, ends in (("right", [0]), ("other", [1]), ("none", [5, 6, 7])):
        write(tmp_path / name, [[2, 3, ends[i % len(ends)]] for i in range(30)])
    with pytest.raises(ValueError, match=r"other end with the id 1, not with <\|endoftext\|> \(id 0\); set data\.eod"):
        open_indexed(1000, {"right": "right", "other": "other"}, tokenizer="tokenizer.json")
    assert open_indexed(1000, {"other": "other"}, None, "tokenizer.json", "!").warnings == []
    (warning,) = open_indexed(1000, {"right": "right"}, {"none": "none"}, "tokenizer.json").warnings
    assert warning.startswith("warning: data.validation.none: documents of none do not end with <|endoftext|> (id 0)")
    assert "begin with: unknown, end with: unknown" in open_indexed(1000, {"right": "right"}).summary()


def test_tokens_that_are_read_twice_give_a_warning(tmp_path: Path) -> None:
    """A file that is a copy, or part of a list, is recognized."""
    for name in ("web", "more", "held_out"):
        write_random(tmp_path / name, 400)
    for name, copy in (("web", "copy"), ("more", "other")):
        for ending in ("idx", "bin"):
            shutil.copy(f"{name}.{ending}", f"{copy}.{ending}")
    assert "warning" not in open_indexed(1000, {"web": "web"}, {"held_out": "held_out"}).summary()
    bundle = open_indexed(1000, {"web": "web", "mixed": ["more", "copy"]}, {"other": "other"})
    twice, validating = [line for line in bundle.summary().splitlines() if line.startswith("warning")]
    assert "data.sources.web (web) and data.sources.mixed (copy) read the same" in twice
    assert "data.sources.mixed" in validating and "data.validation.other" in validating
    assert "the validation loss includes training text" in validating
