"""Configurations for tests: composed once, changed cheaply."""

import copy
import json
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from data import provider as data
from megatron_fp4.checkpoint.find import check_resume
from megatron_fp4.config import compose
from megatron_fp4.config.compose import as_saved, compose_config
from megatron_fp4.config.schema import Config
from megatron_fp4.precision.plan import Plan
from megatron_fp4.training import build
from models import provider as models


def validate(config: Config, ranks: int, device_type: str) -> None:
    """Check a configuration with this project's models and data, and the checkpoint that the run would resume from."""
    build.check(config, models, data, ranks, device_type)
    check_resume(config)


def plans_of(config: Config) -> tuple[Plan, Plan | None]:
    """The precision plans with this project's models: before the switch, and after it."""
    return build.plans_of(config, models)


CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def compose_once() -> None:
    """From now on, let Hydra read the project's files only once for each choice of groups."""
    real, known = compose.compose_groups, dict[Any, Any]()

    def quick(name: str, groups: list[str], folders: list[Path]) -> Any:
        if folders != [CONFIGS]:
            return real(name, groups, folders)
        if (key := (name, *groups)) not in known:
            known[key] = real(name, groups, folders)
        return copy.deepcopy(known[key])

    compose.compose_groups = quick  # type: ignore[assignment]


@cache
def composed(*overrides: str) -> Config:
    return compose_config(list(overrides), CONFIGS)


def saved_of(config: Config) -> dict[str, Any]:
    """The configuration as a checkpoint has it."""
    content: dict[str, Any] = json.loads(json.dumps(as_saved(config)))
    return content


def changed(node: Any, changes: dict[str, Any]) -> Any:
    """A copy of a dataclass with the values at dotted keys replaced; cheaper than composing again."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        child = getattr(node, name)
        node = replace(node, **{name: changed(child, {rest: value}) if rest and is_dataclass(child) else value})
    return node
