"""A byte-level BPE tokenizer, trained by `tokenizers` and kept as one `tokenizer.json`.

Byte-level: any text encodes without an unknown token and decodes to itself. Training is deterministic: the
same texts in the same order and the same vocab_size give the same file, whatever the number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
_MIN_VOCAB_SIZE = 256 + 1  # every byte, and the end of a document


class TextTokenizer:
    """Text to token ids and back, from the content of a `tokenizer.json`.

    Make one with `train_tokenizer` or `load_tokenizer`; `origin` names it in errors. Raises ValueError if it
    has no end-of-document token.
    """

    def __init__(self, content: str, origin: str, eod_token: str = END_OF_DOCUMENT) -> None:
        tokenizer = Tokenizer.from_str(content)
        # Text that happens to spell a special token must not end a document. Not part of the content.
        tokenizer.encode_special_tokens = True
        eod_id = tokenizer.token_to_id(eod_token)
        if eod_id is None:
            raise ValueError(f"{origin} has no token {eod_token!r} to end a document; name the one that it has")
        self._content = content
        self._tokenizer = tokenizer
        self.eod_token = eod_token
        self.eod_id: int = eod_id

    @property
    def vocab_size(self) -> int:
        """The number of ids, special tokens included; the largest id is at most vocab_size - 1."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without an end-of-document, even where the text spells that token out."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json`, which `tokenizers` and `transformers` also read."""
        Path(path).write_text(self._content, encoding="utf-8")

    def fingerprint(self) -> str:
        """sha256 of the content, as saved: equal fingerprints encode every text equally."""
        return hashlib.sha256(self._content.encode("utf-8")).hexdigest()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train on texts until vocab_size ids exist or no pair of tokens occurs twice: read `.vocab_size` for
    which.

    Raises ValueError when vocab_size cannot hold the 256 bytes and the end-of-document token.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {_MIN_VOCAB_SIZE} (256 bytes "
            f"and {END_OF_DOCUMENT})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        # Sorted, because alphabet() comes from a hash set whose order would number the bytes differently each
        # time.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer.to_str(), "the trained tokenizer")


def load_tokenizer(path: str | Path, eod_token: str = END_OF_DOCUMENT) -> TextTokenizer:
    """Read a `tokenizer.json`. Raises FileNotFoundError, or ValueError if it has no eod_token."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer at {path}; give the path of a tokenizer.json")
    return TextTokenizer(path.read_text(encoding="utf-8"), str(path), eod_token)
