"""Exported tokenizers of every kind, read by transformers."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from data.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TextTokenizer,
    TiktokenTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from exchange.tokenizer import compare_auto_tokenizer, keep_tokenizer, tokenizer_files
from tests.data.test_tokenizer import KINDS as FILES

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


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_encodes_as_in_training(kind: str, begin: bool, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    if begin:
        tokenizer.bos_token, tokenizer.bos_id = tokenizer.eod_token, tokenizer.eod_id
    for name, content in tokenizer_files(tokenizer, 128).items():
        (tmp_path / name).write_bytes(content)
    compare_auto_tokenizer(tmp_path, tokenizer, TEXTS)
    back = load_tokenizer(tmp_path)
    assert back.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (back.eod_token, back.eod_id) == (tokenizer.eod_token, tokenizer.eod_id)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "again")  # another file, the same tokenizer
    assert load_tokenizer(tmp_path / "again").fingerprint() == back.fingerprint()
    # The last text is not compared: only transformers reads a special token in a text.
    expected = [[tokenizer.eod_id] * begin + ids for ids in tokenizer.encode_batch(TEXTS[:-1])]
    assert [theirs(text)["input_ids"] for text in TEXTS[:-1]] == expected
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.eod_id and theirs.model_max_length == 128


OF_FOLDERS: dict[str, dict[str, Any]] = {
    "a prefix space": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
    "a class that is rebuilt": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False},
    "a begin token": {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
    "code of its own": {"auto_map": {"AutoTokenizer": ["own.py", None]}},
    "what changes no ids": {"chat_template": "{{ messages }}", "pad_token": "<pad>", "padding_side": "left"},
}


@pytest.mark.parametrize("begin", [None, "<s>"])
@pytest.mark.parametrize("kind", OF_FOLDERS)
def test_a_folder_is_exported_as_the_data_was_made(kind: str, begin: str | None, tmp_path: Path) -> None:
    """Whatever the folder's configuration and its tokenizer.json add to a text, AutoTokenizer of the export gives the
    ids that `tokenizers` gives without additions, after the token that begins the documents."""
    (tmp_path / "own").mkdir()
    (tmp_path / "out").mkdir()
    made = Tokenizer.from_str(train_tokenizer(CORPUS, 300).content)
    made.add_special_tokens(["<s>", "</s>", "<pad>"])
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 300), ("</s>", 301)])
    made.save(str(tmp_path / "own/tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", **OF_FOLDERS[kind]}
    (tmp_path / "own/tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path / "own", bos_token=begin)
    for name, content in tokenizer_files(tokenizer, 128).items():
        (tmp_path / "out" / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    before = [300] if begin else []
    assert [theirs(text).input_ids for text in TEXTS[:-1]] == [
        before + made.encode(text, add_special_tokens=False).ids for text in TEXTS[:-1]
    ]
    assert (theirs.bos_token, theirs.eos_token) == (begin, "</s>")
    if kind == "what changes no ids":
        assert (theirs.chat_template, theirs.pad_token, theirs.padding_side) == ("{{ messages }}", "<pad>", "left")
    else:  # the folder's own configuration does not agree with the data
        (tmp_path / "out/tokenizer.json").write_bytes((tmp_path / "own/tokenizer.json").read_bytes())
        (tmp_path / "out/tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=r"(AutoTokenizer of the exported folder gives|cannot open).*no-tokenizer"):
            compare_auto_tokenizer(tmp_path / "out", tokenizer, TEXTS)


@pytest.mark.parametrize("kind", FILES)
def test_a_run_keeps_the_files(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("of another tokenizer")
    make, *_ = FILES[kind]
    (tmp_path / "own").mkdir()
    own = load_tokenizer(make(tmp_path / "own"))
    for _ in range(2):
        keep_tokenizer(tmp_path, own)
    kept = load_tokenizer(tmp_path / "tokenizer")
    assert (kept.fingerprint(), kept.eod_token, kept.vocab_size) == (own.fingerprint(), own.eod_token, own.vocab_size)
    assert not (tmp_path / "tokenizer.tmp").exists()


def test_a_conversion_that_changes_ids_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = train_tokenizer(["other text"], 258)
    monkeypatch.setattr("exchange.tokenizer._from_tiktoken", lambda *_: other.content)
    for name, content in tokenizer_files(ranks(), 128).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"gives \[.* for .Hello.* by tiktoken:mine; .*--no-tokenizer") as caught:
        compare_auto_tokenizer(tmp_path, ranks(), ())
    assert "\n" not in str(caught.value) and isinstance(other, HuggingFaceTokenizer)
