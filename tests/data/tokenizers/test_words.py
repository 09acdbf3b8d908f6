"""Words seen before give the ids that `tokenizers` gives."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from data import words
from data.tokenizer import HuggingFaceTokenizer, train_tokenizer

TEXTS = [
    f"def function_{i}(argument):\n    return argument + {i}  # it's naïve, isn't it? 文字\r\n" for i in range(200)
]
CONTENT = train_tokenizer(TEXTS, 400)._content
# Everything that the expressions tell apart, and what Python and `tokenizers` might see differently.
ALPHABET = [
    *"  \t\n\r\v\f\x1c\x1f\x85\xa0\u2003\u3000\u180e'sStTrReEvVmMlLdD09.,_-#",
    "\u017f",
    "\u212a",
    "é",
    "e\u0301",
]
ALPHABET += [
    "文",
    "٣",
    "²",
    "Ⅻ",
    "\u0660",
    "😀",
    "\U00020000",
    "\u200b",
    "ǅ",
    "ﬀ",
    "ß",
    "İ",
    "it's",
    "IT'S",
    "  ",
    "\n\n",
]


def tokenizer(expression: str, normalizer: str | None = None, added: str | None = None) -> HuggingFaceTokenizer:
    """The trained tokenizer, its words cut by an expression instead of GPT-2's own."""
    settings: dict[str, Any] = json.loads(CONTENT)
    if expression != words._GPT2:
        settings["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    settings["normalizer"] = {"type": normalizer} if normalizer else None
    if added:
        token = {"id": 400, "content": added, "special": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        settings["added_tokens"].append({**token, **flags})
    return HuggingFaceTokenizer(json.dumps(settings), "a test")


def random_texts(seed: int, number: int) -> list[str]:
    draw = random.Random(seed)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randint(0, 60))) for _ in range(number)]
    return texts + [text + draw.choice(TEXTS) for text in texts[::5]]


@pytest.mark.parametrize("normalizer", [None, "NFC", "NFKD"])
@pytest.mark.parametrize("expression", words._EXPRESSIONS)
def test_any_text_gets_the_ids_of_tokenizers(
    expression: str, normalizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "_UNUSUAL_CHARACTERS_AT_ONCE", 8)
    subject = tokenizer(expression, normalizer)
    assert subject._expression == expression
    texts = [*random_texts(1, 1500), "x".join(random_texts(2, 400)), ""]
    for text, ids, expected in zip(texts, subject.encode_arrays(texts), subject.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == expected, repr(text)


def test_every_character_is_classified_as_tokenizers_does() -> None:
    """Beside a letter, a digit, a mark and a space: a character of another class would cut other words."""
    subject = tokenizer(words._GPT2)
    points = [point for point in range(0x3000) if not 0xD800 <= point < 0xE000]
    text = "".join(f"a{chr(point)}1{chr(point)}. {chr(point)}" for point in points)
    assert subject.encode_arrays([text])[0].tolist() == subject.encode_batch([text])[0]


def test_a_long_text_is_cut_where_it_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tokenizer(words._CL100K)
    text = "".join(random_texts(3, 200))
    expected = subject.encode_batch([text])[0]
    for at_once in (1, 7, 100):
        monkeypatch.setattr(words.parts_of, "__defaults__", (at_once,))
        assert len(list(words.parts_of(text))) > len(text) / at_once / 60
        assert subject.encode_arrays([text])[0].tolist() == expected


def test_a_token_that_is_looked_for_first_is_found() -> None:
    subject = tokenizer(words._GPT2, added="return argument")
    texts = ["we return arguments", "return", "x return argument\n"]
    encoded = [ids.tolist() for ids in subject.encode_arrays(texts)]
    assert encoded == subject.encode_batch(texts)
    assert [400 in ids for ids in encoded] == [True, False, True]
