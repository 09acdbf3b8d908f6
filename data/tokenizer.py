"""Tokenizers: text to token ids and back, for each of these file formats:

    tokenizer.json    the format of `tokenizers`, a single file or in the folder of a Hugging Face model
    NAME.model        SentencePiece, used by Llama 2, Gemma and T5
    NAME.tiktoken     tiktoken's ranks: a token in base64 and its rank on each line. The file has neither the pattern
                      that cuts text into words nor the special tokens, so NAME.json beside it must have both:
                      {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}

`load_tokenizer` opens all of them. `train_tokenizer` trains a byte-level BPE, saved as `tokenizer.json`.

A byte-level BPE cuts a text into words by a regular expression, then encodes each word separately. `WordCache` caches
the ids of ASCII words, which is twice as fast as `tokenizers`. For equal results it must cut the same words, so it
supports three regular expressions only. Parts of a text with other characters are encoded by `tokenizers`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import sentencepiece
import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "ranks.tiktoken",
    "ranks.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The files of a tokenizer in a folder: transformers' own, and a rank file with its settings."""
KINDS = "a tokenizer.json, a folder with one, a SentencePiece .model, or a .tiktoken rank file"
END_OF_DOCUMENT = "<|endoftext|>"
_SPACE = "\u2581"  # a space in a SentencePiece piece

# The regular expressions that cut text into words.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_CHARACTERS_AT_ONCE = 512
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")  # they do not change ASCII
_CACHE_WORDS = 500_000
_CACHE_CHARACTERS = 32  # longer words rarely occur again
_MAX_ADDED_TOKENS = 16  # searching each text for more added tokens takes longer than the cache saves


class TextTokenizer(ABC):
    """Text to token ids and back. It can be pickled.

    kind: the file format. file_name: of such a file in a folder. name: the path of the file. eod_token, eod_id: the
    token that ends a document. bos_token: the token that begins a document of the data; None if none does, whatever the
    file names. vocab_size: the largest id of all tokens, including special ones, plus one; ids may have gaps.
    """

    kind: ClassVar[str]
    file_name: ClassVar[str]
    vocab_size: int

    def __init__(self, name: str, eod_token: str, bos_token: str | None, special: Sequence[str]) -> None:
        """special: the special tokens. Raises ValueError, with these in the message, if eod_token does not exist."""
        self.name, self.eod_token = name, eod_token
        eod_id = self.token_id(eod_token)
        if eod_id is None:
            more = " ..." if len(special) > 8 else ""
            has = f" (its special tokens: {', '.join(special[:8])}{more})" if special else ""
            raise ValueError(f"{name} has no token {eod_token!r} to end a document; name the one that it has{has}")
        self.eod_id = eod_id
        self.bos_token = bos_token
        self.bos_id = None if bos_token is None else self.id_of(bos_token)

    @property
    def ids_before(self) -> list[int]:
        """The ids before the text of every document of the data: that of bos_token, or none."""
        return [] if self.bos_id is None else [self.bos_id]

    @property
    def document_tokens(self) -> dict[str, dict[str, Any] | None]:
        """The tokens that end ("eod") and begin ("bos") a document, as in the `.json` of a dataset."""
        bos = None if self.bos_token is None else {"token": self.bos_token, "id": self.bos_id}
        return {"eod": {"token": self.eod_token, "id": self.eod_id}, "bos": bos}

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without those around a document. Special tokens spelled out are normal text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""

    @abstractmethod
    def byte_lengths(self) -> np.ndarray | None:
        """The bytes of UTF-8 text that each token stands for: int64 [vocab_size], 0 for special tokens and gaps. Exact
        unless the tokenizer normalizes text. None if the bytes of a token depend on other tokens."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A sha256 of what decides about ids: tokenizers with equal fingerprints encode every text equally."""

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies it in the `.json` of a dataset, without the path of its file."""
        return {"kind": self.kind, "fingerprint": self.fingerprint(), "vocab_size": self.vocab_size}

    def made(self, fingerprint: str) -> bool:
        """Whether `fingerprint`, of a dataset or a checkpoint, is this tokenizer's, also by an earlier version."""
        return fingerprint in (self.fingerprint(), self.facts.get("file"))

    def files(self) -> dict[str, Path]:
        """The files at `name`, by the names under which `load_tokenizer` finds them in a folder."""
        path = Path(self.name)
        if path.is_dir():
            return {name: path / name for name in TOKENIZER_FILES if os.path.lexists(path / name)}
        return {self.file_name: path}

    def id_of(self, token: str) -> int:
        """The id of a token. Raises ValueError if there is no such token."""
        found = self.token_id(token)
        if found is None:
            raise ValueError(f"{self.name} has no token {token!r}; name one that it has")
        return found


class HuggingFaceTokenizer(TextTokenizer):
    """A `tokenizer.json` with this content; its truncation and padding are ignored. eod_token: None for
    END_OF_DOCUMENT. reserved: the least vocab_size.

    Raises ValueError for content that `tokenizers` cannot read, for dropout, and without an end-of-document token.
    """

    kind = file_name = "tokenizer.json"

    def __init__(
        self, content: str, name: str, eod_token: str | None = None, bos_token: str | None = None, reserved: int = 0
    ) -> None:
        try:
            settings: dict[str, Any] = json.loads(content)
            self._tokenizer = tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises no other type
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{name} cannot be read as a tokenizer.json ({reason}); save it anew, or update tokenizers"
            ) from error
        if dropout := settings["model"].get("dropout"):
            raise ValueError(f"{name} has dropout {dropout}, so its ids are random; set it to null in the file")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # A special token that is spelled out in a text must not end the document. The file cannot set this.
        tokenizer.encode_special_tokens = True
        # Without the large vocabulary, which `tokenizers` has in memory already.
        self._settings = {key: settings.get(key) for key in ("normalizer", "pre_tokenizer", "added_tokens", "decoder")}
        special = [token["content"] for token in self._settings["added_tokens"] or [] if token["special"]]
        super().__init__(name, eod_token or END_OF_DOCUMENT, bos_token, special)
        self.content, self._reserved = content, reserved
        self.vocab_size = max(reserved, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        words = self._words
        found = [None if words is None else words.encode(text) for text in texts]
        others = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        rest = iter(self._tokenizer.encode_batch_fast(others, add_special_tokens=False))
        return [next(rest).ids if ids is None else ids for ids in found]

    @cached_property
    def _words(self) -> WordCache | None:
        return WordCache.of(self._settings, lambda word: self._tokenizer.encode(word, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def byte_lengths(self) -> np.ndarray | None:
        decoder = self._settings["decoder"] or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        added = {token["id"]: token for token in self._settings["added_tokens"] or []}
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if number in added:
                lengths[number] = 0 if added[number]["special"] else len(token.encode())
            elif "ByteLevel" in kinds:
                lengths[number] = len(token)  # a character for each byte
            elif kinds & {"ByteFallback", "Metaspace"}:
                is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
                lengths[number] = 1 if is_byte else len(token.replace(_SPACE, " ").encode())
            else:
                return None
        return lengths

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.content, encoding="utf-8")

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        settings = json.loads(self.content)
        meaning = [
            _meaning(settings.get("normalizer")),
            _meaning(settings.get("pre_tokenizer")),
            _model_meaning(settings),
        ]
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "file": hashlib.sha256(self.content.encode("utf-8", "surrogateescape")).hexdigest()}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.content, self.name, self.eod_token, self.bos_token, self._reserved)


def _meaning(part: Any) -> Any:
    """What decides about ids in a part of a `tokenizer.json`: without values that are defaults, which programs write or
    leave out, and without the offsets that nothing here uses."""
    if isinstance(part, list):
        return [_meaning(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    defaults = {"ByteLevel": {"use_regex": True}, "Metaspace": {"split": True}}.get(str(part.get("type")), {})
    found = {key: _meaning(value) for key, value in (defaults | part).items() if key != "trim_offsets"}
    return {key: value for key, value in found.items() if value not in (None, "") and value is not False}


def _model_meaning(settings: dict[str, Any]) -> list[Any]:
    model, added = settings["model"], settings.get("added_tokens") or []
    vocab, merges = model["vocab"], model.get("merges") or []
    if isinstance(vocab, list):  # pieces and scores, whose last digit changes when `tokenizers` reads and writes them
        vocab = [[piece, f"{score:.9g}"] for piece, score in vocab]
    # No text becomes a special token: only its id and name count.
    tokens = [[token["id"], token["content"]] if token["special"] else _meaning(token) for token in added]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    return [_meaning(rest), vocab, pairs, sorted(tokens, key=str)]


class WordCache(dict[str, list[int]]):
    """Word -> ids. encode_word: computes the ids of a word that is not cached yet."""

    def __init__(self, expression: str, looked_for: list[str], encode_word: Callable[[str], list[int]]) -> None:
        """looked_for: tokens that the tokenizer searches for before it cuts words."""
        super().__init__()
        expression = expression.replace(r"\p{L}\p{N}]", "A-Za-z0-9]")
        expression = expression.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
        self._find = re.compile(expression, re.ASCII).findall
        self._looked_for, self._encode_word = looked_for, encode_word

    @classmethod
    def of(cls, settings: dict[str, Any], encode_word: Callable[[str], list[int]]) -> WordCache | None:
        """The cache for the settings in a `tokenizer.json`; None if the ids of a text are not those of its words."""
        normalizer = settings["normalizer"]
        # `tokenizers` searches texts for added tokens that are not special (see encode_special_tokens).
        looked_for = [token["content"] for token in settings["added_tokens"] or [] if not token["special"]]
        if len(looked_for) > _MAX_ADDED_TOKENS or (normalizer and normalizer.get("type") not in _NORMAL_FORMS):
            return None
        if (expression := cls.expression_of(settings)) is None:
            return None
        return cls(expression, looked_for, encode_word)

    @staticmethod
    def expression_of(settings: dict[str, Any]) -> str | None:
        """The regular expression that cuts text into words; None if it is not one of those above."""
        match settings["pre_tokenizer"]:
            case {"type": "ByteLevel", "add_prefix_space": False, **more} if more.get("use_regex", True):
                return GPT2
            case {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": str(found)}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            } if found in (GPT2, CL100K, QWEN2):
                return found
        return None

    def __missing__(self, word: str) -> list[int]:
        ids = self._encode_word(word)
        if len(word) <= _CACHE_CHARACTERS:
            self[word] = ids
        return ids

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text; None if it contains an added token."""
        if any(token in text for token in self._looked_for):
            return None
        if len(self) > _CACHE_WORDS:
            self.clear()
        ids: list[int] = []
        # A text may be cut before these spaces without changing its words: in none of the expressions a word continues
        # with a space after another character than white space, and none looks behind.
        for part in re.findall(rf"(?s).{{{_CHARACTERS_AT_ONCE}}}.*?(?<=\S)(?= )|.+", text):
            if part.isascii():
                ids.extend(chain.from_iterable(map(self.__getitem__, self._find(part))))
            else:
                ids.extend(self._encode_word(part))
        return ids


class SentencePieceTokenizer(TextTokenizer):
    """A SentencePiece model, from the bytes of its file; it normalizes text. eod_token: None for the model's end of
    sentence, usually `</s>`. Raises ValueError for bytes that are not a model, and without such a token."""

    kind, file_name = "sentencepiece", "tokenizer.model"

    def __init__(self, model: bytes, name: str, eod_token: str | None = None, bos_token: str | None = None) -> None:
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except Exception as error:  # the only type that it raises
            raise ValueError(f"{name} is not a complete SentencePiece model; give another .model file") from error
        self.model, self.vocab_size = model, processor.get_piece_size()
        special = [processor.id_to_piece(i) for i in range(self.vocab_size) if processor.is_control(i)]
        eos = processor.eos_id()
        if eod_token is None and eos < 0:
            raise ValueError(f"{name} has no end-of-sentence token to end a document; name one of {', '.join(special)}")
        super().__init__(name, eod_token or processor.id_to_piece(eos), bos_token, special)

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
        return hashlib.sha256(self.model).hexdigest()


class TiktokenTokenizer(TextTokenizer):
    """A tokenizer of tiktoken. parts: the ranks of tokens, the pattern that cuts words, the ids of special tokens.
    Raises ValueError for ranks or a pattern that tiktoken refuses, and without an end-of-document token."""

    kind, file_name = "tiktoken", "ranks.tiktoken"

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str,
        special_tokens: Mapping[str, int],
        name: str,
        eod_token: str | None = None,
        bos_token: str | None = None,
    ) -> None:
        if len(set(ranks.values())) < len(ranks) or len({token for token in ranks if len(token) == 1}) < 256:
            raise ValueError(f"{name} is not a complete rank file: a rank occurs twice, or one of 256 bytes is missing")
        self.parts = (dict(ranks), pattern, dict(special_tokens))
        try:
            self._encoding = tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=self.parts[0], special_tokens=self.parts[2]
            )
        except BaseException as error:  # a wrong pattern is a Rust panic, which is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = " ".join(str(error).split())
            raise ValueError(f"{name} cannot be read by tiktoken ({reason}); correct its pattern") from None
        self.vocab_size = self._encoding.max_token_value + 1
        super().__init__(name, eod_token or END_OF_DOCUMENT, bos_token, list(special_tokens))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        special = set(self.parts[2].values())
        return self._encoding.decode([int(i) for i in ids if int(i) not in special])

    def byte_lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, rank in self.parts[0].items():
            lengths[rank] = len(token)
        return lengths

    def token_id(self, token: str) -> int | None:
        return self.parts[2].get(token)

    def files(self) -> dict[str, Path]:
        return {self.file_name: Path(self.name), "ranks.json": Path(self.name).with_suffix(".json")}

    def fingerprint(self) -> str:
        ranks, pattern, special = self.parts
        digest = hashlib.sha256(json.dumps([pattern, sorted(special.items())]).encode())
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d " % (rank, len(token)) + token)
        return digest.hexdigest()


Read = Callable[[Path], bytes]


def load_tokenizer(
    path: str | Path, eod_token: str | None = None, bos_token: str | None = None, read: Read = Path.read_bytes
) -> TextTokenizer:
    """Open a tokenizer of one of KINDS, recognized by its files. eod_token: the token that ends a document; None: the
    one that the file names (`eos_token` of a Hugging Face folder), or "<|endoftext|>" if the file names none.
    bos_token: the token that begins a document; None: none does. read: reads every file.

    Raises FileNotFoundError, and ValueError for another kind of file, a damaged file, or one without the tokens.
    """
    path = Path(path)
    if (path / "tokenizer.json").is_file():
        eos, reserved = _special_tokens(path, read)
        text = _text_of(read(path / "tokenizer.json"))
        return HuggingFaceTokenizer(text, str(path), eod_token or eos, bos_token, reserved)
    for name in (SentencePieceTokenizer.file_name, TiktokenTokenizer.file_name):
        if (path / name).is_file():
            return load_tokenizer(path / name, eod_token, bos_token, read)
    if path.is_dir():
        raise FileNotFoundError(
            f"the folder {path} has no tokenizer.json, tokenizer.model or ranks.tiktoken; write one with transformers: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained(...)"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer at {path}; give {KINDS}")
    content = read(path)
    if path.suffix.lower() == ".tiktoken" or _has_ranks(content):
        return _read_ranks(path, content, eod_token, bos_token, read)
    if path.suffix.lower() == ".model":
        return SentencePieceTokenizer(content, str(path), eod_token, bos_token)
    return HuggingFaceTokenizer(_text_of(content), str(path), eod_token, bos_token)


def _text_of(content: bytes) -> str:
    return content.decode(errors="surrogateescape")  # bytes that are not UTF-8 fail later as JSON


def _special_tokens(folder: Path, read: Read) -> tuple[str | None, int]:
    """(eos_token, largest id of an added token plus one) in a folder's configuration files."""
    merged: dict[str, Any] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if file.is_file():
            try:
                merged.update(json.loads(_text_of(read(file))))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file} is not a JSON object ({error}); save the tokenizer again") from error
    eos = merged.get("eos_token")
    if isinstance(eos, dict):  # an object with options
        eos = eos.get("content")
    return eos, max((int(number) + 1 for number in merged.get("added_tokens_decoder") or {}), default=0)


def _has_ranks(content: bytes) -> bool:
    """Whether a file begins like a rank file. Its name does not tell: Llama 3's is `tokenizer.model`."""
    words = content[:4096].partition(b"\n")[0].split()
    try:
        return len(words) == 2 and words[1].isdigit() and bool(base64.b64decode(words[0], validate=True))
    except ValueError:
        return False


def _read_ranks(
    file: Path, content: bytes, eod_token: str | None, bos_token: str | None, read: Read
) -> TiktokenTokenizer:
    """The tokenizer of a rank file and the settings beside it."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{file}:{number} is no token in base64 with its rank; give a whole rank file") from error
    settings_file = file.with_suffix(".json")
    try:
        settings = json.loads(read(settings_file))
        pattern = str(settings["pattern"])
        special = {str(token): int(number) for token, number in settings["special_tokens"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = '{"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}'
        raise ValueError(f"{file} needs a pattern and special tokens: write {settings_file} with {wanted}") from error
    if taken := set(special.values()) & set(ranks.values()):
        raise ValueError(f"{settings_file} gives a special token the id {min(taken)}, which another has in {file.name}")
    return TiktokenTokenizer(ranks, pattern, special, str(file), eod_token, bos_token)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Train a byte-level BPE until it has vocab_size ids or no pair of tokens occurs twice. The same texts in the same
    order give the same file. Raises ValueError if vocab_size is below 256 bytes and the end-of-document token."""
    if vocab_size < 256 + 1:
        raise ValueError(f"vocab_size is {vocab_size}; 256 bytes and {END_OF_DOCUMENT} need at least 257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        # Sorted, because alphabet() is a hash set, whose order differs each time.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(tokenizer.to_str(), "the trained tokenizer")
