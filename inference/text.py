"""Tokens to text while they come, a whole character at a time."""

from __future__ import annotations

from collections.abc import Sequence

from data.tokenizer import TextTokenizer

# What an unfinished character decodes to.
_REPLACEMENT = "\ufffd"
# Tokens of the prompt that are decoded with the new ones: tokenizers leave out the space in front of a first word.
_CONTEXT = 64


class TextStream:
    """The text of new tokens behind `prompt`, in pieces that joined are the whole: a token may be part of a character,
    and then its text comes with the token that completes it."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._said = len(self._ids)

    def add(self, token: int) -> str:
        """What can be said now; may be empty."""
        self._ids.append(token)
        return self._new(end=False)

    def end(self) -> str:
        """What is left, with a replacement character for a part of one."""
        return self._new(end=True)

    def _new(self, end: bool) -> str:
        before, now = (self._tokenizer.decode(ids) for ids in (self._ids[: self._said], self._ids))
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not end):
            return ""
        # What has been said now is the context of what follows, and ends with a whole character.
        self._ids = self._ids[self._said :]
        self._said = len(self._ids)
        return now[len(before) :]


def prompt_tokens(tokenizer: TextTokenizer, text: str) -> list[int]:
    """The tokens of a prompt; of an empty one the end of a document, behind which another begins.

    Raises ValueError for text that is no Unicode, as a command line in another encoding makes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt {text!r} is not UTF-8") from error
    return tokenizer.encode_batch([text])[0] or [tokenizer.eod_id]
