"""The configuration that a checkpoint holds, for commands that look at a run afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_fp4.config.compose import _precision_config, _schema, _to_object
from megatron_fp4.config.compose_errors import explain
from megatron_fp4.config.schema import Config, ConfigError


def config_from_saved(saved: Mapping[str, Any], overrides: list[str], config_dir: str | Path) -> Config:
    """The configuration `saved` (`asdict` of a run's `Config`, as JSON brings it back), changed by `overrides`.

    overrides: `key=value` with a full key, such as `parallel.tensor=1`; and `precision=<name>`, which replaces the
    whole precision config by the one under `config_dir`/precision before the other overrides apply.

    Raises ConfigError for a saved configuration of another version, and for a key or value that is wrong.
    """
    directory = Path(config_dir).resolve()
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or key.startswith(("+", "~")) or ("." not in key and key != "precision"):
            raise ConfigError(f"{override}: give key=value, such as parallel.tensor=1 or precision=nvfp4")
    config = _merge(saved, [], directory)
    for name in (override.partition("=")[2] for override in overrides if override.startswith("precision=")):
        config = replace(config, precision=_precision_config("precision", name, config.model, directory))
    return _merge(asdict(config), [o for o in overrides if not o.startswith("precision=")], directory)


def _merge(saved: Mapping[str, Any], overrides: list[str], directory: Path) -> Config:
    try:
        merged = OmegaConf.merge(_schema(), OmegaConf.create(_as_written(saved)), OmegaConf.from_dotlist(overrides))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, overrides, directory)) from error
    return _to_object(merged, overrides, directory)  # type: ignore[arg-type]


def _as_written(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Without the recipes of exceptions and of the switch, which composing writes out anew."""
    precision = dict(saved.get("precision", {}))
    given = ("names", "blocks", "precision")
    precision["exceptions"] = [{key: one[key] for key in given} for one in precision.get("exceptions", [])]
    return {**{key: saved[key] for key in saved if key != "after_switch"}, "precision": precision}
