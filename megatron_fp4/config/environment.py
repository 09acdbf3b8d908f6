"""Values that come from environment variables: used in a run, but written nowhere.

`data.cache_dir=${oc.env:SCRATCH}/corpus` may stand in a config file because the value is another on every machine, or
private. So what a run saves of its configuration keeps the text, and who reads it resolves it again.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from megatron_fp4.config.schema import Config


def environment_texts(composed: Any, path: str = "") -> dict[str, str]:
    """By key (`data.phases[0].fraction`): the text of every value that an environment variable has a part in, be it
    through other keys that it refers to.

    composed: an OmegaConf configuration that can be resolved. path: the key of the whole.
    """
    texts: dict[str, str] = {}
    asked: list[str] = []

    def env(key: str, *default: Any) -> Any:
        asked.append(key)
        return oc.env(key, *default)

    def walk(node: DictConfig | ListConfig, path: str) -> None:
        keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
        for key in keys:
            inner = f"{path}[{key}]" if isinstance(node, ListConfig) else f"{path}.{key}".lstrip(".")
            child: Any = node._get_node(key)
            if OmegaConf.is_interpolation(node, key):
                asked.clear()
                if isinstance(value := node[key], DictConfig | ListConfig):
                    OmegaConf.to_container(value, resolve=True)
                if asked:
                    texts[inner] = str(child._value())
            elif isinstance(child, DictConfig | ListConfig) and not OmegaConf.is_missing(node, key):
                walk(child, inner)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        walk(composed, path)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    return texts


def as_saved(config: Config) -> dict[str, Any]:
    """`asdict` of a configuration as it may be written: with the texts of `config.from_environment` in their places."""
    keys = asdict(config)
    for key, text in keys.pop("from_environment").items():
        parts = [int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", key)]
        node: Any = keys
        with contextlib.suppress(KeyError, IndexError, TypeError):  # code has put something else there since
            for part in parts[:-1]:
                node = node[part]
            node[parts[-1]]
            node[parts[-1]] = text
    return keys
