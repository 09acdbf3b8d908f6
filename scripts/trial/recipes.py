"""The recipes of a command line as configurations of a checkpoint's run, all checked before the first is trained."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from data import provider as data
from megatron_fp4.checkpoint.config_diff import flatten, identity_differences, other_run, run_identity
from megatron_fp4.checkpoint.files import Manifest
from megatron_fp4.checkpoint.find import refuse_weights_only
from megatron_fp4.config.compose import config_from_saved, group_options
from megatron_fp4.config.environment import as_saved
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision.recipe import recipe_from_config
from megatron_fp4.training.build import execution_of, graphs_of, plans_of
from megatron_fp4.training.check import check
from models import provider as models
from pretrain import CONFIGS

# What decides which tokens a step has, and what is computed besides recipes.
_COMMON = ("model", "data", "train", "parallel", "validation")


@dataclass(frozen=True)
class Recipe:
    """A name of the command line, and the run's configuration with its overrides."""

    name: str
    config: Config

    @property
    def fingerprint(self) -> str:
        """Of everything that its losses are a function of besides the checkpoint: also what a plan file says."""
        plans = [None if plan is None else plan.as_dict() for plan in plans_of(self.config, models)]
        saved = as_saved(self.config)
        told = {key: saved[key] for key in saved if key not in ("run", "checkpoint", "logging")}
        content = json.dumps([told, self.config.run.seed, self.config.run.deterministic, plans], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def recipes_of(
    arguments: Sequence[str], checkpoint: Path, manifest: Manifest, trainer: dict[str, Any], steps: int, ranks: int
) -> list[Recipe]:
    """The recipes that `arguments` name, the base first, as configurations of the run that made `checkpoint`.

    arguments: names of precision configs, NAME=OVERRIDES, and KEY=VALUE with a key of a configuration, for all of
    them. trainer: of the checkpoint. Raises ConfigError for the first that cannot be trained for `steps` steps, on
    `ranks` ranks, from there.
    """
    shared, named = told_apart(arguments)
    if len(named) < 2:
        raise ConfigError("name two recipes at least, first the one to hold the others against, such as bf16 nvfp4")
    refuse_weights_only(checkpoint, manifest)
    if (switched := trainer["switch"]["switched_at"]) is not None:
        raise ConfigError(
            f"{checkpoint} is from behind the precision switch of its run (before step {switched + 1}), whose target "
            "every recipe would train in; take a checkpoint from before"
        )
    run_as_before = settings_kept(trainer["config"])
    recipes: list[Recipe] = []
    for name, overrides in named.items():
        try:
            config = _config(trainer["config"], [*run_as_before, *shared, *overrides])
            _check(config, manifest.step, steps, ranks)
            if recipes:
                _check_common(config, recipes[0])
            _check_identity(config, checkpoint, manifest)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        recipes.append(Recipe(name, config))
    return recipes


def told_apart(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides for all recipes, and the overrides of each by its name. Raises ConfigError."""
    sections = {field.name for field in fields(Config)}
    known = group_options(CONFIGS)["precision"]
    shared: list[str] = []
    named: dict[str, list[str]] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        section, dot, _ = name.partition(".")
        if equals and dot and section in sections:
            shared.append(argument)
            continue
        if not equals and name not in known:
            raise ConfigError(
                f"{argument} is no precision config ({', '.join(known)}); give one of these, or a name of your own "
                f'with overrides, such as "{argument}=precision=nvfp4 precision.wgrad.rht=0"'
            )
        try:
            overrides = shlex.split(text) if equals else [f"precision={name}"]
        except ValueError as error:
            raise ConfigError(f"{argument}: {error}; quote as in a shell") from error
        if not name or not overrides:
            raise ConfigError(
                f'{argument}: give NAME=OVERRIDES, such as "no RHT=precision=nvfp4 precision.wgrad.rht=0"'
            )
        if "|" in name or name in named:
            raise ConfigError(f"{argument}: give every recipe a name of its own, without |")
        named[name] = overrides
    return shared, named


def trained_in(saved: dict[str, Any]) -> str | None:
    """The name of the recipe that the run in `saved` quantizes by; None if it quantizes nothing."""
    precision = config_from_saved(saved, [], CONFIGS).precision
    return precision.name if recipe_from_config(precision).quantized else None


def settings_kept(saved: dict[str, Any]) -> list[str]:
    """What a recipe does not change of the run in `saved`: who computes, and in what dtype; and what no trial does."""
    before = config_from_saved(saved, [], CONFIGS).precision
    return [
        f"precision.compute_dtype={before.compute_dtype}",
        f"precision.backend={before.backend}",
        "precision.switch.when=never",
        "checkpoint.resume=auto",
        "checkpoint.initialize_from=null",
    ]


def _config(saved: dict[str, Any], overrides: list[str]) -> Config:
    config = config_from_saved(saved, overrides, CONFIGS)
    return replace(config, checkpoint=replace(config.checkpoint, asynchronous=False))


def _check(config: Config, start: int, steps: int, ranks: int) -> None:
    if start + steps > config.train.steps:
        raise ConfigError(
            f"steps {start + 1} to {start + steps} lie beyond the run's end (train.steps={config.train.steps}); take "
            "an earlier checkpoint, fewer --steps, or give more train.steps, which change the learning rates"
        )
    check(config, models, data, ranks, "cuda" if torch.cuda.is_available() else "cpu")
    execution_of(config, models)
    graphs_of(config, models)


def _check_common(config: Config, base: Recipe) -> None:
    """Raise ConfigError if the recipe would be held against the base on other data, or with another model."""
    here, there = (
        flatten({section: saved[section] for section in _COMMON}) for saved in map(as_saved, (config, base.config))
    )
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if not different and config.data_seed != base.config.data_seed:
        raise ConfigError(
            f"run.seed={config.run.seed} is that of the data's order, too, which would differ from {base.name}'s; give "
            f"data.seed={base.config.data_seed} as an argument of its own, which is for all recipes"
        )
    if different:
        raise ConfigError(
            f"{', '.join(different)} would differ from {base.name}'s, so that gaps were not the recipe's; give it as "
            "an argument of its own, which is for all recipes"
        )


def _check_identity(config: Config, checkpoint: Path, manifest: Manifest) -> None:
    """Raise ConfigError for what can be seen before data is open: not the checkpoint's model, batch or seed."""
    mine = {key: value for key, value in run_identity(config, {}).items() if not key.startswith("data")}
    saved = {key: value for key, value in manifest.identity.items() if key in mine}
    if not config.checkpoint.allow_mismatch and (lines := identity_differences(saved, mine)):
        raise ConfigError(other_run(checkpoint, lines))
