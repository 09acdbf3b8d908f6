"""The bytes of a text's tokens sum to the bytes of the text."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import sentencepiece

from data.tokenizer import (
    SentencePieceTokenizer,
    TextTokenizer,
    TiktokenTokenizer,
    train_tokenizer,
)

TRAINED_ON = ["def f(x):\n    return x + 1\n" * 20, "the naïve façade of the café " * 20]
TEXTS = [*TRAINED_ON, "数据 🙂 \t <0x41>\r\n  ", "", "x"]


def byte_level() -> TextTokenizer:
    return train_tokenizer(TRAINED_ON, 300)


def ranks() -> TextTokenizer:
    tokens = {bytes([i]): i for i in range(256)} | {b"re": 256, b"tu": 257, "é".encode(): 258}
    return TiktokenTokenizer(tokens, r"\S+|\s+", {"<|endoftext|>": 300}, "ranks")


def sentence_piece() -> TextTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TRAINED_ON[1:]),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=5,
    )
    return SentencePieceTokenizer(model.getvalue(), "pieces")


@pytest.mark.parametrize("make", [byte_level, ranks, sentence_piece])
def test_sums_to_the_text(make: Callable[[], TextTokenizer]) -> None:
    tokenizer = make()
    lengths = tokenizer.byte_lengths()
    assert lengths is not None and lengths.shape == (tokenizer.vocab_size,) and lengths.dtype.name == "int64"
    assert lengths[tokenizer.eod_id] == 0
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert lengths[ids].sum() == len(text.encode()), text
        assert tokenizer.decode(ids) == text
