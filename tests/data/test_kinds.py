from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.indexed import IndexedDataset
from data.opening import KINDS
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


def test_held_out_files_are_recognised_by_other_names(make_dataset: MakeDataset, tmp_path: Path) -> None:
    prefix = Path(make_dataset("web").prefix)
    with pytest.raises(ValueError, match=r"which data\.validation\.web reads; narrow the pattern"):
        open_indexed(1000, {"web": f"{prefix.parent}/*"}, {"web": f"{prefix.parent}/../{prefix.parent.name}/web"})
