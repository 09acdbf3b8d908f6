"""In which settings two compared runs differ besides the recipe: what those do is in their gap, too.

Left out is what changes no loss, or nothing but its rounding (mesh, kernels, micro-batches, loader processes), and what
is itself a recipe (`precision`, which blocks a model keeps in BF16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fp4.checkpoint.config_diff import NOT_OF_THE_MODEL

_SECTIONS = {
    "model": None,
    "data": None,
    "train": ("steps", "global_batch_size", "sequence_length"),
    "optimizer": None,
    "schedule": None,
    "validation": ("num_samples",),
}
"""Section -> keys that count; None: all but those below."""
_NO_MATTER = (
    *(f"model.{key}" for key in NOT_OF_THE_MODEL),
    *("data.cache_dir", "data.remote_cache", "data.num_workers", "data.prefetch", "data.max_epochs", "data.blends"),
)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a saved configuration, `section.key` -> value; `data.seed` under a name that says that `run.seed` may stand in
    for it."""
    found: dict[str, Any] = {}
    for section, keys in _SECTIONS.items():
        values = config.get(section)
        for key, value in values.items() if isinstance(values, Mapping) else ():
            name = f"{section}.{key}"
            if name not in _NO_MATTER and (keys is None or key in keys):
                found[name] = _told(value)
    run = config.get("run")
    seed = run.get("seed") if isinstance(run, Mapping) else None
    of_data = found.pop("data.seed", None)
    if (order := seed if of_data is None else of_data) is not None:
        found["data.seed or run.seed"] = order
    return found


def _told(value: Any) -> Any:
    """Without keys that are null, of which newer versions have more."""
    if isinstance(value, Mapping):
        return {key: _told(item) for key, item in value.items() if item is not None}
    return [_told(item) for item in value] if isinstance(value, list) else value


def differences(of_run: Mapping[str, Any], of_other: Mapping[str, Any]) -> list[str]:
    """The settings that both runs have and that are not the same, with both values where these are short. Of held-out
    sources, those that both have."""
    found = []
    for name, mine in of_run.items():
        if name not in of_other:  # one of them is of another version
            continue
        theirs = of_other[name]
        if name == "data.validation" and isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            both = [source for source in mine if source in theirs]
            mine, theirs = ({source: of[source] for source in both} for of in (mine, theirs))
        if mine != theirs:
            short = not isinstance(mine, Mapping | list) and not isinstance(theirs, Mapping | list)
            found.append(f"{name} ({mine}, not {theirs})" if short else name)
    return found


def difference_line(name: str, other: str, found: list[str]) -> str:
    """For below a table with the gap of run `name` to run `other`."""
    return f"not the recipe alone: {name} differs from {other} in {', '.join(found)}, too"
