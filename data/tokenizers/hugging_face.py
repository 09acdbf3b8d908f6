"""`tokenizer.json`, the format of `tokenizers`, alone or in the folder of a Hugging Face model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data.tokenizers.interface import END_OF_DOCUMENT, TextTokenizer, end_of_document
from data.tokenizers.words import WordMemo, word_expression

# `tokenizers` keeps some 40 to 110 bytes of record for each byte of a batch.
_BATCH_CHARACTERS = 1 << 20
_CONFIGURATIONS = ("tokenizer_config.json", "special_tokens_map.json")


class HuggingFaceTokenizer(TextTokenizer):
    """The content of a `tokenizer.json`; `name` tells where it is from.

    Truncation and padding that it asks for are switched off: a corpus is encoded whole. Raises ValueError for
    content that `tokenizers` cannot read, dropout, or no end-of-document token.
    """

    kind = "tokenizer.json"

    def __init__(
        self, content: str, name: str, eod_token: str | None = None, bos_token: str | None = None, reserved: int = 0
    ) -> None:
        """eod_token: END_OF_DOCUMENT if None. reserved: at least so many ids, whatever the content says."""
        try:
            settings: dict[str, Any] = json.loads(content)
            tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises no other type
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{name} cannot be read as a tokenizer.json ({reason}); save it again, or update tokenizers"
            ) from error
        if settings["model"].get("dropout"):
            raise ValueError(
                f"{name} has dropout {settings['model']['dropout']}, which encodes a text differently each time; set "
                "it to null in the file"
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Text that happens to spell a special token must not end a document. Not part of the content.
        tokenizer.encode_special_tokens = True
        eod_token = eod_token or END_OF_DOCUMENT
        special = [token["content"] for token in settings.get("added_tokens", []) if token["special"]]
        eod_id = end_of_document(name, tokenizer.token_to_id(eod_token), eod_token, special)
        super().__init__(name, eod_token, eod_id, bos_token)
        self._content = content
        self._reserved = reserved
        self._tokenizer = tokenizer
        self._vocab_size = max(reserved, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
        self._settings = {key: settings.get(key) for key in ("normalizer", "pre_tokenizer", "added_tokens")}
        self._expression = word_expression(settings)
        self._words: WordMemo | None = None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """What `encode_batch` gives, as int32 each; faster where words tell all (`words.py`)."""
        if self._expression is None:
            return self._encode_some(texts)
        if self._words is None:
            self._words = WordMemo(self._settings, self._expression, self._encode_word)
        encoded = map(self._words.encode, texts)
        return [self._encode_some([text])[0] if ids is None else ids for text, ids in zip(texts, encoded, strict=True)]

    def _encode_word(self, word: str) -> list[int]:
        return self._tokenizer.encode(word, add_special_tokens=False).ids

    def _encode_some(self, texts: Sequence[str]) -> list[np.ndarray]:
        """By `tokenizers`, as many at once as its records have room for."""
        found: list[np.ndarray] = []
        start = size = 0
        for end, text in enumerate(texts, start=1):
            size += len(text)
            if size >= _BATCH_CHARACTERS or end == len(texts):
                found += [np.array(ids, dtype=np.int32) for ids in self.encode_batch(texts[start:end])]
                start, size = end, 0
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def byte_lengths(self) -> np.ndarray | None:
        settings = json.loads(self._content)
        decoder = settings.get("decoder") or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        added = {token["id"]: token for token in settings.get("added_tokens", [])}
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if number in added:
                lengths[number] = 0 if added[number]["special"] else len(token.encode())
            elif "ByteLevel" in kinds:
                lengths[number] = len(token)  # a character for each byte
            elif kinds & {"ByteFallback", "Metaspace"}:
                is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
                lengths[number] = 1 if is_byte else len(token.replace("\u2581", " ").encode())
            else:
                return None
        return lengths

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    @property
    def content(self) -> str:
        """Of its `tokenizer.json`."""
        return self._content

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json`, which `tokenizers` and `transformers` also read."""
        Path(path).write_text(self._content, encoding="utf-8")

    def fingerprint(self) -> str:
        return hashlib.sha256(self._content.encode("utf-8")).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._content, self.name, self.eod_token, self.bos_token, self._reserved)


def read_hugging_face(file: Path, eod_token: str | None) -> HuggingFaceTokenizer:
    """A `tokenizer.json`. Raises ValueError if it is none."""
    return HuggingFaceTokenizer(_text_of(file), str(file), eod_token)


def read_hugging_face_folder(folder: Path, eod_token: str | None) -> HuggingFaceTokenizer:
    """The `tokenizer.json` of a folder, with the tokens that its configuration beside it names.

    A document ends with the configuration's `eos_token` if eod_token is None.
    """
    eos, bos, reserved = special_tokens(folder)
    return HuggingFaceTokenizer(_text_of(folder / "tokenizer.json"), str(folder), eod_token or eos, bos, reserved)


def special_tokens(folder: Path) -> tuple[str | None, str | None, int]:
    """(eos_token, bos_token, largest id of an added token plus one) that a folder's configuration names."""
    merged: dict[str, Any] = {}
    for name in reversed(_CONFIGURATIONS):
        if (folder / name).is_file():
            try:
                merged.update(json.loads(_text_of(folder / name)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{folder / name} is no JSON object ({error}); save the tokenizer again") from error
    eos, bos = (_content(merged.get(key)) for key in ("eos_token", "bos_token"))
    added = merged.get("added_tokens_decoder") or {}
    return eos, bos, max((int(number) + 1 for number in added), default=0)


def _content(token: Any) -> str | None:
    """A token's text; configurations have it plain, or in an object with its options."""
    return token.get("content") if isinstance(token, dict) else token


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8, so no tokenizer.json; give the right file") from error
