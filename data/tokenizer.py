"""The tokenizer of a corpus: opened from any kind of file, or trained.

A trained one is a byte-level BPE, kept as one `tokenizer.json`. Byte-level: any text encodes without an unknown
token and decodes to itself. Training is deterministic: the same texts in the same order and the same vocab_size
give the same file, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.tokenizers.hugging_face import HuggingFaceTokenizer, read_hugging_face, read_hugging_face_folder
from data.tokenizers.interface import END_OF_DOCUMENT, TextTokenizer
from data.tokenizers.sentence_piece import read_sentence_piece
from data.tokenizers.tiktoken_ranks import PREFIX, is_rank_file, read_encoding, read_ranks

_MIN_VOCAB_SIZE = 256 + 1  # every byte, and the end of a document
KINDS = "a tokenizer.json, a folder with one, a SentencePiece .model, a .tiktoken rank file, or tiktoken:NAME"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
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
    return HuggingFaceTokenizer(tokenizer.to_str(), "the trained tokenizer")


def load_tokenizer(path: str | Path, eod_token: str | None = None) -> TextTokenizer:
    """Open a tokenizer of any of KINDS, told apart by what lies there.

    eod_token: the token that ends a document; None means what the file says does (`eos_token` of a Hugging Face
    folder, the end of a sentence of SentencePiece), or "<|endoftext|>" where it says nothing.

    Raises FileNotFoundError, or ValueError if it is none of them, damaged, or has no such token.
    """
    if str(path).startswith(PREFIX):
        return read_encoding(str(path).removeprefix(PREFIX), eod_token)
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, eod_token)
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer at {path}; give {KINDS}")
    if path.suffix.lower() == ".tiktoken" or is_rank_file(path):
        return read_ranks(path, eod_token)
    if path.suffix.lower() == ".model":
        return read_sentence_piece(path, eod_token)
    return read_hugging_face(path, eod_token)


def is_tokenizer(path: str | Path) -> bool:
    """Whether `load_tokenizer` would find something to open: quick, and no promise that it is whole."""
    return str(path).startswith(PREFIX) or Path(path).is_file() or Path(path).is_dir()


def _open_folder(folder: Path, eod_token: str | None) -> TextTokenizer:
    """The tokenizer of a Hugging Face model's folder."""
    if (folder / "tokenizer.json").is_file():
        return read_hugging_face_folder(folder, eod_token)
    if (folder / "tokenizer.model").is_file():
        return load_tokenizer(folder / "tokenizer.model", eod_token)
    raise FileNotFoundError(
        f"the folder {folder} has no tokenizer.json and no tokenizer.model; write one with transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(...)"
    )
