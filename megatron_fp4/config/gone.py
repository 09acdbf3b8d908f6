"""Keys that earlier versions had: why they went, and how a run that was saved with one goes on.

Commands and files that still give one are refused with the remedy. What was saved with one (checkpoints of whatever
version) is read as if it had never been there; where its value was not the one that holds now, a resume says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

_NO_MEANS = "is no key any more: operands are never without their means; leave it out"
_MEANS = tuple(
    f"precision.{gemm}.{tensor}.mean"
    for gemm, tensors in (
        ("fprop", "activation weight"),
        ("dgrad", "gradient weight"),
        ("wgrad", "gradient activation"),
    )
    for tensor in tensors.split()
)
# key or section -> (the value that always holds now, None: none does; why, with the remedy)
_GONE = {
    "optimizer.implementation": (
        "torch",
        "is no key any more: torch's fused AdamW, faster than Transformer Engine's where both were measured, is the "
        "only one; leave it out",
    ),
    "precision.mean_group": (None, _NO_MEANS),
    **dict.fromkeys(_MEANS, ("kept", _NO_MEANS)),
    "optimizer.deoscillation": (None, "is no key any more: master weights are never reset; leave it out"),
    "checkpoint.local_dir": (
        None,
        "is no key any more: checkpoints on the nodes' own disks are gone; save shared ones more often instead",
    ),
    "checkpoint.local_interval": (
        0,
        "is no key any more: checkpoints on the nodes' own disks are gone; lower checkpoint.interval instead",
    ),
}
# Abilities that are gone: key -> the value under which a run did without it. A run that used one cannot resume.
_ABILITIES = {"optimizer.deoscillation.interval": 0, **dict.fromkeys(_MEANS, "kept")}


def why_gone(key: str) -> str | None:
    """What to say of a dotted key that an earlier version had; None for every other key."""
    for gone, (_, why) in _GONE.items():
        if key == gone or key.startswith(f"{gone}."):
            return f"{key} {why}"
    return None


def refuse_gone(saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a run that was saved with this configuration used an ability that no run has any more."""
    for key, off in _ABILITIES.items():
        if (value := _value(saved, key)) is not None and value != off:
            raise ValueError(
                f"its run had {key}={value}, which this version cannot do; resume it with the version that wrote it or "
                "begin a new run with its weights (checkpoint.initialize_from)"
            )


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
        if now is not None and (value := _value(saved, key)) is not None and value != now:
            yield key, value, now


def _value(saved: Mapping[str, Any], key: str) -> Any:
    value: Any = saved
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
