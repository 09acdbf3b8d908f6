"""tiktoken: named encodings (from its cache or the network), and rank files with their settings beside them.

A rank file (`NAME.tiktoken`: a token in base64 and its rank on each line) says neither how text is cut into words nor
which special tokens there are, so `NAME.json` has to: {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.tokenizers.interface import END_OF_DOCUMENT, TextTokenizer, end_of_document

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
