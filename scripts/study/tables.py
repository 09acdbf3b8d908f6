"""Markdown tables, and the names in their cells."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def short(name: str) -> str:
    """`blocks.1 down_proj` of `blocks.1.mixer.down_proj`."""
    return name.replace(".mixer.", " ")
