"""Text from tokens while they come: never half a character, and in the end all of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from data.tokenizer import load_tokenizer, train_tokenizer
from inference.generation import TextStream, prompt_tokens
from tests.data.test_tokenizer import KINDS

TEXT = "def naïve(): return '日本語 🙂 é' # 🇩🇪 ok\n\n"


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(KINDS[kind][0](tmp_path))
    text = "return argument + 5 def function_3(argument):" if tokenizer.kind == "sentencepiece" else TEXT
    ids = tokenizer.encode_batch([text])[0]
    for cut in range(len(ids)):
        stream, before = TextStream(tokenizer, ids[:cut]), tokenizer.decode(ids[:cut])
        pieces = [stream.add(token) for token in ids[cut:]]
        if "\ufffd" not in before:
            assert "\ufffd" not in "".join(pieces)  # whole characters only
            assert stream.end() == ""
            assert before + "".join(pieces) == tokenizer.decode(ids)


def test_whatever_a_model_says_comes_out_in_the_end() -> None:
    """Tokens at random: parts of characters, characters that never end, special ones. A piece comes with the token that
    completes it."""
    tokenizer, generator = train_tokenizer(["abc"], 300), random.Random(0)
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode_batch(["a🙂b"])[0]] == ["a", "", "", "", "🙂", "b"]
    for _ in range(30):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(40)]
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.add, ids), stream.end()]) == tokenizer.decode(ids)
    assert prompt_tokens(tokenizer, "") == [tokenizer.eod_id]
    with pytest.raises(ValueError, match="is not UTF-8"):
        prompt_tokens(tokenizer, "a\udcff")
