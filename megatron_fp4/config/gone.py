"""Keys that earlier versions had: why they went, and how a run that was saved with one goes on.

Commands and files that still give one are refused with the remedy. What was saved with one (checkpoints of whatever
version) is read as if it had never been there; where its value was not the one that holds now, a resume says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

# key -> (the value that always holds now, why, with the remedy)
_GONE = {
    "optimizer.implementation": (
        "torch",
        "is no key any more: torch's fused AdamW, faster than Transformer Engine's where both were measured, is the "
        "only one; leave it out",
    ),
}


def why_gone(key: str) -> str | None:
    """What to say of a dotted key that an earlier version had; None for every other key."""
    return f"{key} {_GONE[key][1]}" if key in _GONE else None


def without_gone(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration without these keys."""
    found = copy.deepcopy(dict(saved))
    for key in _GONE:
        *parents, leaf = key.split(".")
        node: Any = found
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(leaf, None)
    return found


def gone_values(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, its value in `saved`, the value that holds now) where these differ."""
    for key, (now, _) in _GONE.items():
        value: Any = saved
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != now:
            yield key, value, now
