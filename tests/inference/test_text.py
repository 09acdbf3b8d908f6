"""Text from tokens while they come: never half a character, and in the end all of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from inference.generation import TextStream, prompt_tokens
from tests.data.test_tokenizer import KINDS

TEXT = "def naïve(): return '日本語 🙂 é' # 🇩🇪 ok\n\n"


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> TextTokenizer:
    return load_tokenizer(KINDS[request.param][0](tmp_path))


def test_pieces_are_the_text(tokenizer: TextTokenizer) -> None:
    text = "return argument + 5 def function_3(argument):" if tokenizer.kind == "sentencepiece" else TEXT
    ids = tokenizer.encode_batch([text])[0]
    for cut in range(len(ids)):
        prompt, new = ids[:cut], ids[cut:]
        stream = TextStream(tokenizer, prompt)
        pieces = [stream.add(token) for token in new]
        if "\ufffd" not in tokenizer.decode(prompt):
            assert "\ufffd" not in "".join(pieces)  # whole characters only
            assert stream.end() == ""
            assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(ids)


def test_a_piece_comes_with_the_token_that_completes_it() -> None:
    tokenizer = train_tokenizer(["abc"], 300)
    ids = tokenizer.encode_batch(["a🙂b"])[0]
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in ids] == ["a", "", "", "", "🙂", "b"]


def test_whatever_a_model_says_comes_out_in_the_end() -> None:
    """Tokens at random: parts of characters, characters that never end, special ones."""
    tokenizer = train_tokenizer([TEXT], 300)
    generator = random.Random(0)
    for _ in range(30):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(40)]
        stream = TextStream(tokenizer)
        pieces = [stream.add(token) for token in ids]
        assert "".join([*pieces, stream.end()]) == tokenizer.decode(ids)
        assert stream.end() == ""


def test_prompts() -> None:
    tokenizer = train_tokenizer([TEXT], 300)
    assert prompt_tokens(tokenizer, "def") == tokenizer.encode_batch(["def"])[0]
    assert prompt_tokens(tokenizer, "") == [tokenizer.eod_id]
    with pytest.raises(ValueError, match="is not UTF-8"):
        prompt_tokens(tokenizer, "a\udcff")
