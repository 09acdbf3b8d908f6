"""How many bytes of text tokens stand for, so that losses of different tokenizers can be compared."""

from __future__ import annotations

import json

from data.bundle import TokenSource
from data.indexed_dataset import IndexedDataset
from data.prepare.index import facts_path
from data.token_range import TokenRange


def bytes_per_token(stream: TokenSource) -> float | None:
    """The average of a source, from what preparing it wrote beside its files (`<prefix>.json`); None if one has none,
    or if it is of other tokens."""
    text_bytes = tokens = 0
    for part in (stream.stream if isinstance(stream, TokenRange) else stream).parts:
        if not isinstance(part, IndexedDataset):
            return None
        try:
            facts = json.loads(facts_path(part.prefix).read_bytes())
            if facts["tokens"] != part.num_tokens or facts["text_bytes"] <= 0:
                return None
            text_bytes += facts["text_bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        tokens += part.num_tokens
    return text_bytes / tokens
