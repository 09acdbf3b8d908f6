"""The split of documents into training and validation, such that no validation text was seen in training.

The hash of a document's origin decides, so a file stays on its side when others come and go, and a file's
code and its docstrings stay together. Text is also repeated between origins: the help topic "compound"
contains "while", docstrings are copied to subclasses. An origin that shares a long paragraph with training
goes to training.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from data.stdlib_text import Document

# Shorter repeated paragraphs are idioms and copyright lines, which are no leak.
MIN_SHARED_CHARACTERS = 120

# Of a dozen salts the one whose validation has the most even mix of files and help topics; some give no
# topics.
_SALT = 8

_BLANK_LINES = re.compile(r"\n\s*\n")


def paragraphs(text: str) -> set[str]:
    """The paragraphs of a text that are long enough to identify it, with their white space normalized."""
    blocks = (" ".join(block.split()) for block in _BLANK_LINES.split(text))
    return {block for block in blocks if len(block) >= MIN_SHARED_CHARACTERS}


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, validation): validation gets about `fraction` of the origins, less those that repeat
    training.

    Pure and independent of the order of documents; each list keeps that order.
    """
    by_origin: dict[str, set[str]] = {}
    for document in documents:
        by_origin.setdefault(document.origin, set()).update(paragraphs(document.text))
    held_out = {origin for origin in by_origin if _share(origin) < fraction}
    seen: set[str] = set().union(*(by_origin[origin] for origin in by_origin if origin not in held_out))
    # Each origin that moves brings its own paragraphs to training, which may give another one away.
    while leaking := [origin for origin in held_out if not seen.isdisjoint(by_origin[origin])]:
        held_out.difference_update(leaking)
        seen.update(*(by_origin[origin] for origin in leaking))
    training = [document for document in documents if document.origin not in held_out]
    validation = [document for document in documents if document.origin in held_out]
    return training, validation


def _share(origin: str) -> float:
    """A number in [0, 1) from the origin's name."""
    digest = hashlib.sha256(f"{_SALT}/{origin}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
