from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.indexed import IndexedDataset
from data.provider import KINDS
from data.sources import open_indexed
from data.tokenizer import train_tokenizer

MakeDataset = Callable[..., IndexedDataset]


def test_opens_ones_own_data(make_dataset: MakeDataset, tmp_path: Path) -> None:
    web, held_out = make_dataset("web"), make_dataset("held_out", 100)
    tokenizer = train_tokenizer(["some text"] * 3, 260)
    tokenizer.save(tmp_path / "tokenizer.json")
    configured = SimpleNamespace(
        sources={"web": web.prefix},
        validation={"web": str(held_out.prefix)},
        tokenizer=tmp_path / "tokenizer.json",
        eod_token=None,
        cache_dir=None,
    )
    bundle = KINDS["indexed"].open(configured, 1000)
    assert bundle.train["web"].num_tokens == 500 and bundle.validation["web"].num_tokens == 100
    assert bundle.tokenizer is not None and bundle.tokenizer.fingerprint() == tokenizer.fingerprint()
    assert bundle.train["web"].identity() == web.identity()
    assert "500 tokens" in bundle.summary()
    bare = open_indexed(1000, {"web": web.prefix})
    assert bare.tokenizer is None and bare.validation == {}


def test_another_tokenizer_than_made_the_files_is_refused(make_dataset: MakeDataset, tmp_path: Path) -> None:
    prefix = make_dataset("web").prefix
    tokenizer = train_tokenizer(["some text"] * 3, 260)
    tokenizer.save(tmp_path / "tokenizer.json")
    facts = tmp_path / "web.json"
    for fingerprint in (tokenizer.fingerprint(), None):  # as it was made, and facts of other kinds
        facts.write_text(json.dumps({"tokenizer": {"fingerprint": fingerprint}} if fingerprint else {"tokens": 1}))
        open_indexed(1000, {"web": prefix}, tokenizer=tmp_path / "tokenizer.json")
    facts.write_text(json.dumps({"tokenizer": {"fingerprint": "0123456789abcdef"}}))
    with pytest.raises(ValueError, match=r"data\.sources\.web: .*web was made with another tokenizer \(0123456789ab"):
        open_indexed(1000, {"web": prefix}, tokenizer=tmp_path / "tokenizer.json")
    assert open_indexed(1000, {"web": prefix}).tokenizer is None


def test_tokens_that_are_read_twice_are_named(make_dataset: Callable[..., IndexedDataset], tmp_path: Path) -> None:
    """By whatever name: another path, a copy, a part of a list."""
    for name in ("web", "more", "held_out"):
        make_dataset(name, 400)
    for name, copy in (("web", "copy"), ("more", "other")):
        for ending in ("idx", "bin"):
            (tmp_path / f"{copy}.{ending}").write_bytes((tmp_path / f"{name}.{ending}").read_bytes())
    alone = open_indexed(1000, {"web": f"{tmp_path}/web"}, {"held_out": f"{tmp_path}/held_out"})
    assert alone.repeated() == []
    sources = {"web": f"{tmp_path}/web", "mixed": [f"{tmp_path}/more", f"{tmp_path}/copy"]}
    bundle = open_indexed(1000, sources, {"other": f"{tmp_path}/other"})
    twice, validating = bundle.repeated()
    assert f"data.sources.web ({tmp_path}/web) and data.sources.mixed ({tmp_path}/copy) read the same" in twice
    assert "data.sources.mixed" in validating and "data.validation.other" in validating
    assert "its loss is of text that is trained on" in validating and twice in bundle.summary()
