from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data.bundle import open_data
from data.indexed_dataset import IndexedDataset
from data.tokenizer import train_tokenizer

MakeDataset = Callable[..., IndexedDataset]


def test_opens_ones_own_data(make_dataset: MakeDataset, tmp_path: Path) -> None:
    web, held_out = make_dataset("web"), make_dataset("held_out", 100)
    tokenizer = train_tokenizer(["some text"] * 3, 260)
    tokenizer.save(tmp_path / "tokenizer.json")
    bundle = open_data(
        "indexed",
        vocab_size=1000,
        sources={"web": web.prefix},
        validation={"web": str(held_out.prefix)},
        tokenizer=tmp_path / "tokenizer.json",
    )
    assert bundle.train["web"].num_tokens == 500 and bundle.validation["web"].num_tokens == 100
    fingerprint = bundle.fingerprint()
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert fingerprint["tokenizer"] == tokenizer.fingerprint()
    assert fingerprint["train"] == {"web": web.identity()}
    assert "500 tokens" in bundle.summary()
    bare = open_data("indexed", vocab_size=1000, sources={"web": web.prefix})
    assert bare.tokenizer is None and bare.validation == {}


def test_misuse_is_explained(make_dataset: MakeDataset, tmp_path: Path) -> None:
    prefix = make_dataset("web").prefix
    with pytest.raises(ValueError, match="'hub'; choose one of builtin, indexed"):
        open_data("hub", vocab_size=1000)
    with pytest.raises(ValueError, match=r"data.sources"):
        open_data("indexed", vocab_size=1000)
    with pytest.raises(ValueError, match=r"data.cache_dir means nothing with data.kind 'indexed'"):
        open_data("indexed", vocab_size=1000, sources={"web": prefix}, cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"data.sources means nothing with data.kind 'builtin'"):
        open_data("builtin", vocab_size=1000, sources={"web": prefix}, cache_dir=tmp_path)
    train_tokenizer(["some text"] * 3, 260).save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"model.vocab_size to 2"):
        open_data("indexed", vocab_size=100, sources={"web": prefix}, tokenizer=tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_data("indexed", vocab_size=1000, sources={"web": tmp_path / "missing"})
