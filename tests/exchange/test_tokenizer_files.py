"""Exported tokenizers of every kind, read by transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from data.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TextTokenizer,
    TiktokenTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from exchange.tokenizer import tokenizer_files

CORPUS = [line for line in Path(__file__).read_text().splitlines() if line.strip() and "<|" not in line] * 3
# GPT-4's expression, shortened: contractions, words, up to three digits, punctuation, spaces.
PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def pieces(model_type: str, fallback: bool, rule: str) -> TextTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=420 if fallback else 160,
        model_type=model_type, byte_fallback=fallback, normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity", hard_vocab_limit=False, minloglevel=5,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue(), "pieces.model")


def ranks() -> TextTokenizer:
    tokens = {bytes([i]): i for i in range(256)}
    for word in (" the", "def", "    ", "ing", "tokenizer", " return", "12", "123", "ü".encode(), "你".encode()):
        for end in range(2, len(word) + 1):  # each piece is a merge with the previous one
            part = word[:end].encode() if isinstance(word, str) else word[:end]
            tokens.setdefault(part, len(tokens))
    return TiktokenTokenizer(tokens, PATTERN, {"<|endoftext|>": 1000, "<|pad|>": 1003}, "tiktoken:mine")


KINDS = {
    "tokenizer.json": lambda: train_tokenizer(CORPUS, 300),
    "tiktoken": ranks,
    "bpe, bytes": lambda: pieces("bpe", True, "identity"),
    "bpe, unknown, normalized": lambda: pieces("bpe", False, "nmt_nfkc"),
    "unigram, bytes, normalized": lambda: pieces("unigram", True, "nmt_nfkc"),
    "unigram, unknown": lambda: pieces("unigram", False, "identity"),
}
PROGRAM = "The tokenizer returns 12345 the 你好 ü\n\n    def x():\n\treturn   \n"
TEXTS = [*CORPUS[:60], PROGRAM, " a  b ", "<|endoftext|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_encodes_as_in_training(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    for name, content in tokenizer_files(tokenizer, 128).items():
        (tmp_path / name).write_bytes(content)
    back = load_tokenizer(tmp_path)
    assert back.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (back.eod_token, back.eod_id) == (tokenizer.eod_token, tokenizer.eod_id)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    # The last text is not compared: only transformers reads a special token in a text.
    assert [theirs(text)["input_ids"] for text in TEXTS[:-1]] == tokenizer.encode_batch(TEXTS[:-1])
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.eod_id and theirs.model_max_length == 128


def test_a_folder_keeps_its_configuration(tmp_path: Path) -> None:
    train_tokenizer(CORPUS, 300).save(tmp_path / "tokenizer.json")
    configuration = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}", "tokenizer_class": "Any"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
    files = tokenizer_files(load_tokenizer(tmp_path), 128)
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_conversion_that_changes_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = train_tokenizer(["other text"], 258)
    monkeypatch.setattr("exchange.tokenizer._from_tiktoken", lambda *_: other.content)
    with pytest.raises(
        ValueError, match=r"tiktoken:mine, a tiktoken tokenizer, gives other ids for .Hello.*--no-tokenizer"
    ) as caught:
        tokenizer_files(ranks(), 128)
    assert "\n" not in str(caught.value) and isinstance(other, HuggingFaceTokenizer)
