from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.indexed import open_indexed
from data.indexed_dataset import IndexedDataset
from data.kinds import KINDS
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
        remote_cache=None,
    )
    bundle = KINDS["indexed"].open(configured, 1000)
    assert bundle.train["web"].num_tokens == 500 and bundle.validation["web"].num_tokens == 100
    assert bundle.tokenizer is not None and bundle.tokenizer.fingerprint() == tokenizer.fingerprint()
    assert bundle.train["web"].identity() == web.identity()
    assert "500 tokens" in bundle.summary()
    bare = open_indexed(1000, {"web": web.prefix})
    assert bare.tokenizer is None and bare.validation == {}


def test_misuse_is_explained(make_dataset: MakeDataset, tmp_path: Path) -> None:
    prefix = make_dataset("web").prefix
    train_tokenizer(["some text"] * 3, 260).save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"model.vocab_size to 2"):
        open_indexed(100, {"web": prefix}, tokenizer=tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_indexed(1000, {"web": tmp_path / "missing"})
