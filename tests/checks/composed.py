"""Configurations for the tests of checks: composed once, changed cheaply."""

from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from assembly import check as validate
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
DATA = ("data.sources={web: /d/web}", "data.blends={first: {web: 1.0}, second: {web: 1.0}, third: {web: 1.0}}")


@cache
def composed(*overrides: str) -> Config:
    return compose_config(list(overrides), CONFIGS)


def changed(node: Any, changes: dict[str, Any]) -> Any:
    """A copy of a dataclass with values at dotted keys replaced; cheaper than composing again."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        child = getattr(node, name)
        node = replace(node, **{name: changed(child, {rest: value}) if rest and is_dataclass(child) else value})
    return node


def refusal(changes: dict[str, Any], *overrides: str, world_size: int = 1, device_type: str = "cpu") -> str:
    config = changed(composed(*overrides), changes)
    with pytest.raises(ConfigError) as error:
        validate(config, world_size, device_type)
    assert "\n" not in str(error.value)
    return str(error.value)
