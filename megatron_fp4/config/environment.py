"""Values that come from environment variables: used in a run, but written nowhere.

`data.cache_dir=${oc.env:SCRATCH}/corpus` may stand in a config file because the value is another on every machine, or
is nobody's business. So what a run saves of its configuration keeps the text, and who reads it resolves it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from megatron_fp4.config.schema import Config

_RESOLVER = "oc.env"


def environment_texts(composed: Any, path: str = "") -> dict[str, str]:
    """By key (`data.phases[0].fraction`): the text of every value that an environment variable has a part in, be it
    through other keys that it refers to.

    composed: an OmegaConf configuration that can be resolved. path: the key of the whole.
    """
    texts: dict[str, str] = {}
    asked: list[str] = []
    with _recording(asked.append):
        for key, text, resolve in _interpolations(composed, path):
            asked.clear()
            resolve()
            if asked:
                texts[key] = text
    return texts


def as_saved(config: Config) -> dict[str, Any]:
    """`asdict` of a configuration as it may be written: with the texts of `config.from_environment` in their places."""
    keys = asdict(config)
    for key, text in keys.pop("from_environment").items():
        parts = [int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", key)]
        node: Any = keys
        try:
            for part in parts[:-1]:
                node = node[part]
            node[parts[-1]]
        except (KeyError, IndexError, TypeError):  # code has put something else there since
            continue
        node[parts[-1]] = text
    return keys


@contextmanager
def _recording(asked: Callable[[str], None]) -> Iterator[None]:
    """Inside, every look into the environment by a configuration is told to `asked`."""

    def env(key: str, *default: Any) -> Any:
        asked(key)
        return oc.env(key, *default)

    OmegaConf.register_new_resolver(_RESOLVER, env, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver(_RESOLVER, oc.env, replace=True)


def _interpolations(node: Any, path: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Every value that is an interpolation: its key, its text, and a function that resolves all of it."""
    if not isinstance(node, DictConfig | ListConfig):
        return
    keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
    for key in keys:
        inner = f"{path}[{key}]" if isinstance(node, ListConfig) else f"{path}.{key}" if path else str(key)
        child: Any = node._get_node(key)
        if OmegaConf.is_interpolation(node, key):
            yield inner, str(child._value()), lambda: _resolved(node[key])  # noqa: B023 (called before the next one)
        elif not OmegaConf.is_missing(node, key):
            yield from _interpolations(child, inner)


def _resolved(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
