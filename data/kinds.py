"""The kinds of data, by the name that `data.kind` of a configuration gives them; each opens to a DataBundle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from data.builtin import open_builtin
from data.bundle import DataBundle
from data.indexed import open_indexed

# From the group `data` of a configuration, and the ids of its model. What a kind opens may be missing or may not fit
# the model; it then raises FileNotFoundError or ValueError.
KINDS: dict[str, Callable[[Any, int], DataBundle]] = {
    "builtin": lambda data, vocab_size: open_builtin(vocab_size, data.cache_dir),
    "indexed": lambda data, vocab_size: open_indexed(
        vocab_size, data.sources, data.validation, data.tokenizer, data.eod_token
    ),
}
