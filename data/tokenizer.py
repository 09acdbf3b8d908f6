"""What every tokenizer does, whatever file it comes from.

`tokenizer.json`, the format of `tokenizers`, alone or in the folder of a Hugging Face model.

SentencePiece models (`.model`), as Llama 2, Gemma and T5 have them.

tiktoken: named encodings (from its cache or the network), and rank files with their settings beside them.

A rank file (`NAME.tiktoken`: a token in base64 and its rank on each line) says neither how text is cut into words nor
which special tokens there are, so `NAME.json` has to: {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}.

The tokenizer of a corpus: opened from any kind of file, or trained.

A trained one is a byte-level BPE, kept as one `tokenizer.json`. Byte-level: any text encodes without an unknown
token and decodes to itself. Training is deterministic: the same texts in the same order and the same vocab_size
give the same file, whatever the number of threads.
"""

from __future__ import annotations

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import sentencepiece
import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.words import WordMemo, word_expression

END_OF_DOCUMENT = "<|endoftext|>"


class TextTokenizer(ABC):
    """Text to token ids and back. It pickles, so that a process that tokenizes gets its own.

    kind: how its file is written; name: where it came from, for errors and records. eod_token, eod_id: what ends a
    document. bos_token: what the file itself says begins one, None if it does not say.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, eod_token: str, eod_id: int, bos_token: str | None) -> None:
        self.name = name
        self.eod_token = eod_token
        self.eod_id = eod_id
        self.bos_token = bos_token

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest id of all tokens, special ones included, plus one: ids may have gaps."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin or end of a document, even where the text spells such a token out."""

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """What `encode_batch` gives, as int32 [its number of ids] each."""
        return [np.array(ids, dtype=np.int32) for ids in self.encode_batch(texts)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of a token by its name; None if there is no such token."""

    @abstractmethod
    def byte_lengths(self) -> np.ndarray | None:
        """Bytes of UTF-8 text that each token stands for: int64 [vocab_size]; 0 of special tokens and gaps.

        The tokens of a text sum to its bytes, or nearly so where the tokenizer changes text before it cuts it (spaces
        that it puts in front, unknown characters). None if a token alone does not say.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of what it was read from: equal fingerprints encode every text equally."""

    def id_of(self, token: str) -> int:
        """The id of a token by its name. Raises ValueError if there is no such token."""
        found = self.token_id(token)
        if found is None:
            raise ValueError(f"{self.name} has no token {token!r}; name one that it has")
        return found


def end_of_document(name: str, found: int | None, token: str, others: Sequence[str]) -> int:
    """The id `found` of the end-of-document token. Raises ValueError, with the other special tokens, if it is None."""
    if found is None:
        has = f" (its special tokens: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''})" if others else ""
        raise ValueError(f"{name} has no token {token!r} to end a document; name the one that it has{has}")
    return found


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


PREFIX = "tiktoken:"


class TiktokenTokenizer(TextTokenizer):
    """Ranks of tokens, the pattern that cuts words, ids of special tokens; `name` tells where they are from.

    Raises ValueError for ranks or a pattern that tiktoken refuses, or no end-of-document token.
    """

    kind = "tiktoken"

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str,
        special_tokens: Mapping[str, int],
        name: str,
        eod_token: str | None = None,
    ) -> None:
        if len(set(ranks.values())) < len(ranks) or len({token for token in ranks if len(token) == 1}) < 256:
            raise ValueError(f"{name} is no whole rank file: a rank comes twice, or one of the 256 bytes is missing")
        try:
            self._encoding = tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special_tokens)
            )
        except BaseException as error:  # it panics over a pattern, which is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = " ".join(str(error).split())
            raise ValueError(f"{name} cannot be read by tiktoken ({reason}); correct its pattern") from None
        eod_token = eod_token or END_OF_DOCUMENT
        eod_id = end_of_document(name, special_tokens.get(eod_token), eod_token, list(special_tokens))
        super().__init__(name, eod_token, eod_id, None)
        self._parts = (dict(ranks), pattern, dict(special_tokens))

    @property
    def parts(self) -> tuple[dict[bytes, int], str, dict[str, int]]:
        """Ranks of tokens, the pattern that cuts words, ids of special tokens."""
        return self._parts

    @property
    def vocab_size(self) -> int:
        return self._encoding.max_token_value + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encoding.encode_ordinary(text) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, dtype=np.int32) for ids in map(self._encoding.encode_ordinary, texts)]

    def decode(self, ids: Sequence[int]) -> str:
        special = set(self._parts[2].values())
        return self._encoding.decode([int(i) for i in ids if int(i) not in special])

    def byte_lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, rank in self._parts[0].items():
            lengths[rank] = len(token)
        return lengths

    def token_id(self, token: str) -> int | None:
        return self._parts[2].get(token)

    def fingerprint(self) -> str:
        ranks, pattern, special = self._parts
        digest = hashlib.sha256(json.dumps([pattern, sorted(special.items())]).encode())
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d " % (rank, len(token)) + token)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self._parts, self.name, self.eod_token)


def is_rank_file(file: Path) -> bool:
    """Whether a file begins as rank files do, whatever its name (Llama 3 calls its own `tokenizer.model`)."""
    with open(file, "rb") as opened:
        words = opened.readline(4096).split()
    if len(words) != 2 or not words[1].isdigit():
        return False
    try:
        return bool(base64.b64decode(words[0], validate=True))
    except ValueError:
        return False


def read_ranks(file: Path, eod_token: str | None) -> TiktokenTokenizer:
    """A rank file and the settings beside it. Raises ValueError if one of them is missing or not as it should be."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{file}:{number} is no token in base64 and its rank; give a whole rank file") from error
    settings_file = file.with_suffix(".json")
    wanted = '{"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}'
    if not settings_file.is_file():
        raise ValueError(f"{file} says neither pattern nor special tokens: write {settings_file} with {wanted}")
    try:
        settings = json.loads(settings_file.read_bytes())
        pattern, special = settings["pattern"], settings["special_tokens"]
        right = isinstance(pattern, str) and all(type(number) is int and number >= 0 for number in special.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        right = False
    if not right:
        raise ValueError(f"{settings_file} does not hold {wanted}; correct it")
    if taken := set(special.values()) & set(ranks.values()):
        raise ValueError(f"{settings_file} gives a special token the id {min(taken)}, which {file.name} gives another")
    return TiktokenTokenizer(ranks, pattern, special, str(file), eod_token)


def read_encoding(name: str, eod_token: str | None) -> TiktokenTokenizer:
    """An encoding that tiktoken knows by name. Raises ValueError if it does not, or cannot fetch it."""
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f"tiktoken knows no encoding {name!r}; it knows {', '.join(sorted(known))}")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # of requests, which tiktoken uses; and of a damaged cache
        reason = " ".join(str(error).split())
        raise ValueError(
            f"tiktoken cannot fetch {name} ({reason}); connect to a network, set TIKTOKEN_CACHE_DIR, or give a rank "
            "file"
        ) from error
    return TiktokenTokenizer(
        encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens, f"{PREFIX}{name}", eod_token
    )


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
