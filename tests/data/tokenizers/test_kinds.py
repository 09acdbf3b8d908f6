"""Tokenizers of every kind of file, made here: the same interface, and what is wrong with a file in one line."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken

from data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

TEXTS = [f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(200)]
PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
SPECIAL = {"<|endoftext|>": 300, "<|begin|>": 299}


def hugging_face_file(folder: Path) -> Path:
    train_tokenizer(TEXTS, 300).save(folder / "tokenizer.json")
    return folder / "tokenizer.json"


def hugging_face_folder(folder: Path) -> Path:
    hugging_face_file(folder)
    settings = json.loads((folder / "tokenizer.json").read_text())
    for number, name in ((300, "<s>"), (307, "</s>")):  # 301 to 306 are a gap
        settings["added_tokens"].append({**settings["added_tokens"][0], "id": number, "content": name})
        settings["model"]["vocab"][name] = number
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>", "lstrip": false}}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return folder


def sentence_piece(folder: Path) -> Path:
    (folder / "text").write_text("".join(TEXTS))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "text"), model_prefix=str(folder / "m"), vocab_size=100, minloglevel=5
    )
    return folder / "m.model"


def ranks(folder: Path) -> Path:
    tokens = {bytes([i]): i for i in range(256)} | {b" argument": 256, b"return": 257, b"re": 258, b"tu": 259}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in tokens.items()]
    (folder / "r.tiktoken").write_bytes(b"".join(lines))
    (folder / "r.json").write_text(json.dumps({"pattern": PATTERN, "special_tokens": SPECIAL}))
    return folder / "r.tiktoken"


KINDS: dict[str, tuple[Callable[[Path], Path], str, str | None, int]] = {
    "tokenizer.json": (hugging_face_file, "<|endoftext|>", None, 300),
    "folder": (hugging_face_folder, "</s>", "<s>", 308),
    "sentencepiece": (sentence_piece, "</s>", "<s>", 100),
    "tiktoken": (ranks, "<|endoftext|>", None, 301),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_does_the_same(kind: str, tmp_path: Path) -> None:
    make, eod, bos, vocab_size = KINDS[kind]
    tokenizer = load_tokenizer(make(tmp_path))
    assert (tokenizer.eod_token, tokenizer.bos_token, tokenizer.vocab_size) == (eod, bos, vocab_size)
    assert tokenizer.eod_id == tokenizer.id_of(eod)
    texts = [TEXTS[3], f"def {eod} argument", "return it"]
    encoded = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in tokenizer.encode_arrays(texts)] == encoded
    assert all(0 <= i < vocab_size and i != tokenizer.eod_id for ids in encoded for i in ids)
    assert tokenizer.decode(encoded[2]) == "return it"
    assert tokenizer.decode([*encoded[2], tokenizer.eod_id]) == "return it"
    copy: TextTokenizer = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode_batch(texts) == encoded
    assert (copy.fingerprint(), copy.eod_id, copy.bos_token) == (tokenizer.fingerprint(), tokenizer.eod_id, bos)
    with pytest.raises(ValueError, match="has no token 'no such'"):
        tokenizer.id_of("no such")
    with pytest.raises(ValueError, match=r"has no token 'no such' to end a document.*its special tokens: "):
        load_tokenizer(make(tmp_path), "no such")


def test_sentence_piece_and_tiktoken_give_the_ids_of_their_libraries(tmp_path: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece(tmp_path)))
    assert load_tokenizer(tmp_path / "m.model").encode_batch(TEXTS) == [processor.encode(text) for text in TEXTS]
    tokenizer = load_tokenizer(ranks(tmp_path))
    assert tokenizer.encode_batch([" argument,return"]) == [[256, 44, 257]]
    # By any other name, as Llama 3 has it.
    (tmp_path / "r.tiktoken").rename(tmp_path / "tokenizer.model")
    with pytest.raises(
        ValueError, match=r"tokenizer.model says neither pattern nor special tokens: write .*\.json with"
    ):
        load_tokenizer(tmp_path / "tokenizer.model")


def test_named_encodings_come_from_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: the library's own loading is replaced, which is all that a network would do."""
    encoding = tiktoken.Encoding(
        "cl100k_base", pat_str=PATTERN, mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens=SPECIAL
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"cl100k_base": encoding}.__getitem__)
    tokenizer = load_tokenizer("tiktoken:cl100k_base")
    assert tokenizer.name == "tiktoken:cl100k_base" and tokenizer.encode_batch(["ab"]) == [[97, 98]]
    with pytest.raises(ValueError, match=r"tiktoken knows no encoding 'mine'; it knows .*cl100k_base"):
        load_tokenizer("tiktoken:mine")

    def unreachable(name: str) -> Any:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(
        ValueError, match=r"cannot fetch cl100k_base \(no route to host\); connect to a network, set TIK"
    ):
        load_tokenizer("tiktoken:cl100k_base")


WRONG: dict[str, tuple[str, bytes, str]] = {
    "no JSON": (
        "tokenizer.json",
        b"{",
        r"cannot be read as a tokenizer\.json \(.*\); save it again, or update tokenizers",
    ),
    "other JSON": ("tokenizer.json", b"[1]", r"cannot be read as a tokenizer\.json"),
    "no UTF-8": ("tokenizer.json", b"\xff\xfe{", r"tokenizer\.json is not UTF-8, so no tokenizer\.json"),
    "no model": ("m.model", b"\x00garbage", r"m\.model is no SentencePiece model; give a whole \.model file"),
    "an empty model": ("m.model", b"", r"m\.model is no SentencePiece model"),
    "no rank": ("r.tiktoken", b"IQ== 0\nIg==\n", r"r\.tiktoken:2 is no token in base64 and its rank"),
    "no settings": ("r.tiktoken", b"IQ== 0\n", r"r\.tiktoken says neither pattern nor special tokens: write .*r\.json"),
}
