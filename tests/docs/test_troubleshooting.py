"""Messages that the troubleshooting page quotes are in the source, so that nobody looks for one that has changed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
OURS = PAGE.read_text().split("## Messages of other programs")[0]
MESSAGES = re.findall(r"^\| `([^`]+)` \|", OURS, flags=re.MULTILINE)
_SOURCES = ("megatron_fp4", "data", "models", "exchange", "inference", "scripts")


@cache
def texts() -> list[str]:
    """Every text of the source, with a gap where a value is put in."""
    files = [*ROOT.glob("*.py"), *(path for folder in _SOURCES for path in (ROOT / folder).rglob("*.py"))]
    found = [text for file in files for text in _texts(ast.parse(file.read_text()))]
    return [re.sub(r"%(?:\.\d+)?[sdrf]", "\0", text) for text in found]


def _texts(tree: ast.Module) -> Iterator[str]:
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if node not in docstrings and (text := _text(node)):
            yield text


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return ""


def is_in(message: str, text: str) -> bool:
    """Whether the words of `message` come in `text` in this order, with something put in wherever it has `...`."""
    pieces = [re.escape(piece.strip(" ")) for piece in message.split("...")]
    return re.search(r"[^\n]*".join(filter(None, pieces)), text) is not None


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    assert len(message.replace("...", "").strip()) > 8, "too short to find anything"
    assert any(is_in(message, text) for text in texts()), "no text of the source has these words; see what it says now"


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) > 40
    rows = [line for line in OURS.splitlines() if line.startswith("| `")]
    assert len(rows) == len(MESSAGES), "a row whose first cell is not one message"


def _other_messages() -> Iterator[str]:
    yield "there are no checkpoints under ..., none is whole"
    yield "is a key; did you mean"


def test_words_that_are_not_there_are_seen() -> None:
    for message in _other_messages():
        assert not any(is_in(message, text) for text in texts())
