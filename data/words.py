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

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
EXPRESSIONS = (GPT2, CL100K, QWEN2)
# None of them has a word in which a space follows anything but white space, and none looks back: a text may be cut
# there, and its parts have the words of the whole.
_PLACE_TO_CUT = re.compile(r"(?<=\S) ")

# Forms that leave ASCII as it is.
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
# The plane that Python's `re` matches by tables: ranges beyond it would be searched one by one, ten times as slow.
_CLASSIFIED = 0x10000
_CHARACTERS_AT_ONCE, _UNUSUAL_CHARACTERS_AT_ONCE = 1 << 18, 256
_MEMO_WORDS = 500_000
_MEMO_CHARACTERS = 32  # longer words hardly come again
_MOST_LOOKED_FOR = 16  # tokens; to look for more of them in each text would take longer than is gained


class WordMemo(dict[str, list[int]]):
    """The ids of words by their text. encode_word: gives those of a word that is met for the first time."""

    def __init__(
        self, expression: str, ascii_only: bool, looked_for: list[str], encode_word: Callable[[str], list[int]]
    ) -> None:
        """ascii_only: other characters are normalized. looked_for: tokens that are found before words are cut."""
        super().__init__()
        self._find = re.compile(_with_classes(expression)).findall
        self._unclassified = re.compile(f"[{chr(_CLASSIFIED)}-\U0010ffff]").search
        self._ascii_only, self._looked_for, self._encode_word = ascii_only, looked_for, encode_word

    @classmethod
    def of(cls, settings: dict[str, Any], encode_word: Callable[[str], list[int]]) -> WordMemo | None:
        """For the settings in a `tokenizer.json`; None where words alone do not decide."""
        normalizer = settings["normalizer"]
        # Special tokens are never looked for in a text, others always.
        looked_for = [token["content"] for token in settings["added_tokens"] or [] if not token["special"]]
        if len(looked_for) > _MOST_LOOKED_FOR or (normalizer and normalizer.get("type") not in _NORMAL_FORMS):
            return None
        match settings["pre_tokenizer"]:
            case {"type": "ByteLevel", "add_prefix_space": False, **more} if more.get("use_regex", True):
                expression = GPT2
            case {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": str(found)}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            } if found in EXPRESSIONS:
                expression = found
            case _:
                return None
        return cls(expression, normalizer is not None, looked_for, encode_word)

    def __missing__(self, word: str) -> list[int]:
        ids = self._encode_word(word)
        if len(word) <= _MEMO_CHARACTERS:
            self[word] = ids
        return ids

    def encode(self, text: str) -> np.ndarray | None:
        """The ids of a text, int32 [their number]; None if it spells a token that is looked for before words."""
        if any(token in text for token in self._looked_for):
            return None
        if len(self) > _MEMO_WORDS:
            self.clear()
        found = []
        for part in parts_of(text, _CHARACTERS_AT_ONCE):
            unusual = self._is_unusual(part)
            for piece in parts_of(part, _UNUSUAL_CHARACTERS_AT_ONCE) if unusual else [part]:
                if unusual and self._is_unusual(piece):
                    found.append(np.array(self._encode_word(piece), dtype=np.int32))
                else:
                    words = map(self.__getitem__, self._find(piece))
                    found.append(np.fromiter(chain.from_iterable(words), dtype=np.int32))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _is_unusual(self, text: str) -> bool:
        """Whether it has characters that words do not tell the ids of."""
        return not text.isascii() and (self._ascii_only or self._unclassified(text) is not None)


def parts_of(text: str, at_once: int) -> Iterator[str]:
    """A text in parts of some at_once characters, cut before a space that follows anything but white space."""
    start = 0
    while len(text) - start > at_once:
        cut = _PLACE_TO_CUT.search(text, start + at_once)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


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
    # A stretch of neighbours in `points` may reach over the surrogates, which are in no text.
    ranges = (f"\\U{points[start]:08x}-\\U{points[end - 1]:08x}" for _, (start, end) in matching)
    return "".join(ranges)
