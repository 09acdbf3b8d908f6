"""Tokenizing by words seen before: the ids of `tokenizers`, four times as fast.

A byte-level BPE first cuts a text into words by a regular expression, then encodes each word by itself. So the ids
of a text are those of its words one after the other, and a word needs to be encoded once. This holds for any text,
provided that the words are cut at the same places. Hence the three expressions below and no others, letters,
numbers and white space as `tokenizers` itself classifies them (its Unicode is not Python's). What has other
characters, such as emoji, goes to `tokenizers` as it is, in short parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
# None of them has a word in which a space follows anything but white space, and none looks back: a text may be cut
# there, and its parts have the words of the whole.
_EXPRESSIONS = (_GPT2, _CL100K, _QWEN2)
_PLACE_TO_CUT = re.compile(r"(?<=\S) ")
CHARACTERS_AT_ONCE = 1 << 18

# Forms that leave ASCII as it is.
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")

# The plane that Python's `re` matches by tables: ranges beyond it would be searched one by one, ten times as slow.
_CLASSIFIED = 0x10000
_UNUSUAL_CHARACTERS_AT_ONCE = 256
_MEMO_WORDS = 500_000
_MEMO_CHARACTERS = 32  # longer words hardly come again


class WordMemo:
    """The ids of words by their text. `encode_word` gives those of a word that is met for the first time."""

    def __init__(self, settings: dict[str, Any], expression: str, encode_word: Callable[[str], list[int]]) -> None:
        self._find = re.compile(_with_classes(expression)).findall
        self._encode_word = encode_word
        self._unclassified = re.compile(f"[{chr(_CLASSIFIED)}-\U0010ffff]").search
        self._ascii_only = settings.get("normalizer") is not None
        # Special tokens are never looked for in a text, others always.
        self._looked_for = [token["content"] for token in settings.get("added_tokens", []) if not token["special"]]
        self._ids = _Memo(encode_word)

    def encode(self, text: str) -> np.ndarray | None:
        """The ids of a text, int32 [their number]; None if it spells a token that is looked for before words."""
        if any(token in text for token in self._looked_for):
            return None
        if len(self._ids) > _MEMO_WORDS:
            self._ids.clear()
        parts = [ids for part in parts_of(text) for ids in self._encode_part(part)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_part(self, text: str) -> Iterator[np.ndarray]:
        if not self._is_unusual(text):
            words = map(self._ids.__getitem__, self._find(text))
            yield np.fromiter(chain.from_iterable(words), dtype=np.int32)
        elif len(text) <= _UNUSUAL_CHARACTERS_AT_ONCE:
            yield np.array(self._encode_word(text), dtype=np.int32)
        else:
            parts = list(parts_of(text, _UNUSUAL_CHARACTERS_AT_ONCE))
            if len(parts) == 1:
                yield np.array(self._encode_word(text), dtype=np.int32)
            else:
                for part in parts:
                    yield from self._encode_part(part)

    def _is_unusual(self, text: str) -> bool:
        """Whether it has characters that words do not tell the ids of."""
        return not text.isascii() and (self._ascii_only or self._unclassified(text) is not None)


class _Memo(dict[str, list[int]]):
    def __init__(self, encode_word: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode_word = encode_word

    def __missing__(self, word: str) -> list[int]:
        ids = self._encode_word(word)
        if len(word) <= _MEMO_CHARACTERS:
            self[word] = ids
        return ids


def word_expression(settings: dict[str, Any]) -> str | None:
    """The expression that cuts words, of the settings in a `tokenizer.json`; None where words do not decide alone."""
    normalizer = settings.get("normalizer")
    if normalizer is not None and normalizer.get("type") not in _NORMAL_FORMS:
        return None
    if sum(not token["special"] for token in settings.get("added_tokens", [])) > 16:
        return None  # to look for each would take longer
    found = None
    match settings.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, **more} if more.get("use_regex", True):
            found = _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            found = expression
    return found if found in _EXPRESSIONS else None


def parts_of(text: str, at_once: int = CHARACTERS_AT_ONCE) -> Iterator[str]:
    """A text in parts of some at_once characters, cut before a space that follows anything but white space."""
    start = 0
    while len(text) - start > at_once:
        cut = _PLACE_TO_CUT.search(text, start + at_once)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text


def _with_classes(expression: str) -> str:
    r"""An expression for Python, \p{L}, \p{N}, \s and \S spelled out as `tokenizers` understands them."""
    letters, numbers, spaces = (_class_of(name) for name in (r"\p{L}", r"\p{N}", r"\s"))
    found = ""
    in_brackets = False
    for token in re.findall(r"\\p\{[LN]\}|\\.|[^\\]", expression):
        in_brackets = (in_brackets or token == "[") and token != "]"
        members = {r"\p{L}": letters, r"\p{N}": numbers, r"\s": spaces}.get(token)
        if token == r"\S":
            found += f"[^{spaces}]"
        elif members is None:
            found += token
        else:
            found += members if in_brackets else f"[{members}]"
    return found


@cache
def _class_of(name: str) -> str:
    """The code points below _CLASSIFIED that a class of `tokenizers` matches, as ranges for Python's brackets."""
    points = [point for point in range(_CLASSIFIED) if not 0xD800 <= point < 0xE000]
    matching = pre_tokenizers.Split(Regex(f"[^{name}]+"), "removed").pre_tokenize_str("".join(map(chr, points)))
    ranges = []
    for _, (start, end) in matching:
        # A stretch of neighbours in `points` may reach over the surrogates, which are in no text.
        ranges.append(f"\\U{points[start]:08x}-\\U{points[end - 1]:08x}")
    return "".join(ranges)
