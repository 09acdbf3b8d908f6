"""SentencePiece models (`.model`), as Llama 2, Gemma and T5 have them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data.tokenizers.interface import TextTokenizer, end_of_document

_SPACE = "\u2581"  # how pieces write one


class SentencePieceTokenizer(TextTokenizer):
    """The bytes of a SentencePiece model; `name` tells where they are from.

    It normalizes text as the model says, so decoding need not give the same text. A document ends with the model's
    own end of a sentence, `</s>` for most, if eod_token is None. Raises ValueError for bytes that are no model, or
    no such token.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, name: str, eod_token: str | None = None) -> None:
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except Exception as error:  # it raises no other type
            raise ValueError(f"{name} is no SentencePiece model; give a whole .model file") from error
        self._processor = processor
        self._model = model
        size = processor.get_piece_size()
        special = [processor.id_to_piece(i) for i in range(size) if processor.is_control(i)]
        bos, eos = processor.bos_id(), processor.eos_id()
        if eod_token is None and eos < 0:
            raise ValueError(f"{name} has no end of a sentence to end a document; name one of {', '.join(special)}")
        eod_token = eod_token or processor.id_to_piece(eos)
        eod_id = end_of_document(name, self.token_id(eod_token), eod_token, special)
        super().__init__(name, eod_token, eod_id, processor.id_to_piece(bos) if bos >= 0 else None)

    @property
    def model(self) -> bytes:
        """Of the `.model` file."""
        return self._model

    @property
    def has_bytes(self) -> bool:
        """Whether bytes that no piece has are tokens of their own."""
        return any(self._processor.is_byte(number) for number in range(self.vocab_size))

    @property
    def vocab_size(self) -> int:
        return self._processor.get_piece_size()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def byte_lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for number in range(self.vocab_size):
            if self._processor.is_byte(number):
                lengths[number] = 1
            elif not (self._processor.is_control(number) or self._processor.is_unknown(number)):
                lengths[number] = len(self._processor.id_to_piece(number).replace(_SPACE, " ").encode())
        return lengths

    def token_id(self, token: str) -> int | None:
        found = self._processor.piece_to_id(token)
        return found if self._processor.id_to_piece(found) == token else None

    def fingerprint(self) -> str:
        return hashlib.sha256(self._model).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model, self.name, self.eod_token)


def read_sentence_piece(file: Path, eod_token: str | None) -> SentencePieceTokenizer:
    """A `.model` file. Raises ValueError if it is none."""
    return SentencePieceTokenizer(file.read_bytes(), str(file), eod_token)
