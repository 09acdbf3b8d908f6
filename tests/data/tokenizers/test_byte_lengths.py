"""The bytes of a text's tokens sum to the bytes of the text."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from data.tokenizer import (
    HuggingFaceTokenizer,
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


def byte_fallback() -> TextTokenizer:
    """As Llama 2's tokenizer.json has it."""
    tokens = {"<unk>": 0, "<|endoftext|>": 1, **{f"<0x{i:02X}>": 2 + i for i in range(256)}}
    tokens |= {token: 258 + i for i, token in enumerate(["\u2581", "a", "f", "c", "t", "h", "e", "th"])}
    made = Tokenizer(models.BPE(tokens, [("t", "h")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    made.add_tokens([AddedToken("café")])
    return HuggingFaceTokenizer(made.to_str(), "fallback")


@pytest.mark.parametrize("make", [byte_level, ranks, sentence_piece, byte_fallback])
def test_sums_to_the_text(make: Callable[[], TextTokenizer]) -> None:
    tokenizer = make()
    lengths = tokenizer.byte_lengths()
    assert lengths is not None and lengths.shape == (tokenizer.vocab_size,) and lengths.dtype.name == "int64"
    assert lengths[tokenizer.eod_id] == 0
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert lengths[ids].sum() == len(text.encode()), text
        assert tokenizer.decode(ids) == text


def test_added_tokens_are_their_text() -> None:
    made = byte_fallback()
    lengths = made.byte_lengths()
    assert lengths is not None and lengths[made.id_of("café")] == 5


def test_unknown_where_a_token_does_not_say() -> None:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "<|endoftext|>": 3}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    assert HuggingFaceTokenizer(made.to_str(), "words").byte_lengths() is None
