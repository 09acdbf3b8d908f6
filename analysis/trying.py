"""Some steps of each recipe from one checkpoint, one after the other in one process: what `compare.py try` does."""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from analysis.runs import difference_line, differences, settings_of
from analysis.trials import Trial, TrialFile, draw_trials, first_steps, trial_line, trial_table
from data import provider as data
from data.storage import default_cache_dir
from megatron_fp4.checkpoint.files import MANIFEST, checkpoint_in, read_manifest, read_trainer
from megatron_fp4.checkpoint.find import refuse_weights_only
from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.compose import as_saved, config_from_saved, group_options
from megatron_fp4.config.removed_keys import leaves
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.files import check_place
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed
from megatron_fp4.precision.recipe import recipe_from_config
from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.runtime.revision import revision
from megatron_fp4.training.build import check, device_type_of, execution_of, plans_of, set_determinism, why_eager
from megatron_fp4.training.callbacks.bad_steps import SkippedSteps, Spikes
from megatron_fp4.training.callbacks.kernels import Kernels
from megatron_fp4.training.callbacks.numerics import LinearCheck, SelfTest, Switch
from megatron_fp4.training.callbacks.validation import held_out_losses
from megatron_fp4.training.optimizer import WSDSchedule
from megatron_fp4.training.trainer import Trainer
from models import provider as models

T = TypeVar("T")

# What decides which tokens a step has, and what is computed besides recipes.
_COMMON = ("model", "data", "train", "parallel", "validation")


def try_recipes(options: argparse.Namespace, configs: Path) -> None:
    """Check everything, train what is missing, print. options: of `scripts/compare.py try`.

    Collective. Raises ValueError, OSError, CheckpointError and DamagedCheckpointError for what cannot be tried, and
    SelfTestError for kernels that compute something else.
    """
    skip = first_steps(options.steps) if options.skip is None else options.skip
    if options.steps < 1 or not 0 <= skip < options.steps:
        raise ConfigError(f"--steps {options.steps} --skip {skip}: at least one step must count")
    if options.output is not None:
        check_place(options.output)
    checkpoint = checkpoint_in(options.checkpoint)
    recipes = recipes_of(options.recipes, checkpoint, options.steps, configs, options.trust_config)
    start, names = read_manifest(checkpoint).step, list(recipes)
    base, config = names[0], recipes[names[0]]
    against = options.against or (names[1] if len(names) > 2 else None)
    if against is not None and against not in names:
        raise ConfigError(f"--against {against}: no recipe has this name; they are {', '.join(names)}")

    device = init_distributed(device_type_of(config), config.parallel.timeout_seconds)
    set_determinism(config.run.deterministic)
    mesh = build_mesh(config.parallel, device)
    facts = {
        "checkpoint": hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()[:16],
        "start": start,
        "number of steps": options.steps,
        "commit": revision(),
        "version of torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "number of ranks": mesh.world_size,
    }
    first, file = mesh.rank == 0, None
    if first:
        print(_introduction(checkpoint, config, start, options.steps, configs), flush=True)
    if options.output is not None:
        fingerprints = {name: _fingerprint(of) for name, of in recipes.items()}
        file = _on_first(mesh, lambda: TrialFile(options.output, facts, fingerprints))
    trials = {} if file is None else dict(file.trials)
    for name, of in recipes.items():
        if name in trials and (trials[name].held_out or trials[name].ended or not options.validate):
            continue
        trials[name] = train(of, checkpoint, mesh, start, options.steps, options.validate)
        gc.collect()  # the model of the recipe before
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if first:
            print(trial_line(name, trials[name], trials.get(base) if name != base else None, skip), flush=True)
        if file is not None:
            _on_first(mesh, lambda: file.add(name, trials[name]))  # noqa: B023
    if first:
        ordered = {name: trials[name] for name in names}
        print(f"\n{trial_table(ordered, against, start, skip)}", flush=True)
        settings = {name: settings_of(as_saved(of)) for name, of in recipes.items()}
        for name in names[1:]:
            if found := differences(settings[name], settings[base]):
                print(difference_line(name, base, found), flush=True)
        if options.picture is not None:
            print(draw_trials(ordered, against, skip, options.picture), flush=True)


def _introduction(checkpoint: Path, config: Config, start: int, steps: int, configs: Path) -> str:
    rates = [WSDSchedule.of(config).lr(step) for step in (start, start + steps - 1)]
    span = f"steps {start + 1:,} to {start + steps:,} of {config.train.steps:,}"
    line = f"{checkpoint}: {span}, learning rate {rates[0]:.3g} to {rates[1]:.3g}"
    precision = config_from_saved(read_trainer(checkpoint)["config"], [], configs, opens_data=False).precision
    if not recipe_from_config(precision).quantized:
        return line
    return (
        f"{line}\nits run trains in {precision.name}, to which its weights have come to fit: gaps of a checkpoint in "
        "BF16 say more"
    )


def _fingerprint(config: Config) -> str:
    """Of everything that losses are a function of besides the checkpoint: also what a plan file says."""
    plans = [None if plan is None else plan.as_dict() for plan in plans_of(config, models)]
    saved = as_saved(config)
    told = {key: saved[key] for key in saved if key not in ("run", "checkpoint", "logging")}
    content = json.dumps([told, config.run.seed, config.run.deterministic, plans], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _on_first(mesh: ParallelMesh, action: Callable[[], T]) -> T:
    """What `action` returns on the first rank, on all ranks; ValueError on all of them for what it refuses there."""
    box: list[Any] = [None, None]
    if mesh.rank == 0:
        try:
            box[0] = action()
        except (ValueError, OSError) as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ValueError(box[1])
    return box[0]  # type: ignore[no-any-return]


def train(config: Config, checkpoint: Path, mesh: ParallelMesh, start: int, steps: int, validate: bool) -> Trial:
    """Train `steps` steps of `config` from `checkpoint`, which has `start` of them done, as a branch by pretrain.py
    does, without writing anything.

    validate: measure the held-out loss after them. Collective. Raises ValueError and CheckpointError for a checkpoint
    that does not fit, SelfTestError for kernels that compute something else.
    """
    notes: list[str] = []
    callbacks = [
        Kernels(default_cache_dir() / "autotuning", write=False),
        SelfTest(),
        *([LinearCheck()] if config.precision.recheck_interval else []),
        Switch(),
        SkippedSteps(config.train.max_skipped_steps, config.train.steps),
        Spikes(config.spikes),
    ]
    trainer = Trainer(config, models, data, callbacks, mesh, quiet=True)
    if validate and not trainer.data.validation:
        raise ConfigError("--validate: the run has no held-out data; give data.validation=..., or leave --validate out")
    trainer.begin_from(checkpoint, allow_mismatch=config.checkpoint.allow_mismatch)
    notes += [f"the data has changed: {change}" for change in trainer.data.loader.changes]
    trial, ended, began = Trial([], []), None, time.perf_counter()
    num_skipped = 0
    with contextlib.closing(trainer.steps(start, start + steps)) as trained:
        try:
            for step in trained:
                trial.losses.append(step.result.loss if math.isfinite(step.result.loss) else None)
                trial.seconds.append(time.perf_counter() - began)
                num_skipped += step.result.skipped
                if step.result.spike:
                    notes.append(f"step {step.done:,} was a spike ({config.spikes.action})")
                began = time.perf_counter()
        except DivergedError as error:
            ended = f"ended after step {start + len(trial.losses) + 1:,}: {str(error).strip()}"
    switched_at = trainer.precision.switch.switched_at
    if switched_at is not None and switched_at >= start:
        notes.append(f"switched to {config.precision.switch.target} before step {switched_at + 1:,}")
    held_out: dict[str, float] = {}
    if validate and ended is None:
        held_out = held_out_losses(trainer)
        if not all(map(math.isfinite, held_out.values())):
            held_out = {}
            notes.append("its held-out loss is not finite")
    return Trial(trial.losses, trial.seconds, held_out, num_skipped, notes, ended)


def recipes_of(
    arguments: Sequence[str], checkpoint: Path, steps: int, configs: Path, trusted: bool
) -> dict[str, Config]:
    """The recipes that `arguments` name, the base first, as configurations of the run that made `checkpoint`.

    arguments: names of precision configs, NAME=OVERRIDES, and KEY=VALUE with a key of a configuration, for all of
    them. Raises ConfigError for the first that cannot be trained for `steps` steps from there.
    """
    shared, named = _split(arguments, group_options(configs)["precision"])
    if len(named) < 2:
        raise ConfigError("name two recipes at least, first the one to compare the others with, such as bf16 nvfp4")
    manifest, trainer = read_manifest(checkpoint), read_trainer(checkpoint)
    refuse_weights_only(checkpoint, manifest)
    if (switched := trainer["switch"]["switched_at"]) is not None:
        raise ConfigError(
            f"{checkpoint} is from after the precision switch of its run (before step {switched + 1}), whose target "
            "every recipe would train in; take a checkpoint from before"
        )
    before = config_from_saved(trainer["config"], [], configs, opens_data=False).precision
    kept = [
        f"precision.compute_dtype={before.compute_dtype}",
        f"precision.backend={before.backend}",
        "precision.switch.when=never",
        "checkpoint.resume=auto",
        "checkpoint.initialize_from=null",
    ]
    recipes: dict[str, Config] = {}
    for name, overrides in named.items():
        try:
            config = config_from_saved(trainer["config"], [*kept, *shared, *overrides], configs, trusted=trusted)
            config = replace(config, checkpoint=replace(config.checkpoint, asynchronous=False))
            _check(config, manifest.step, steps, next(iter(recipes.items()), None))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        recipes[name] = config
    return recipes


def _split(arguments: Sequence[str], known: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides for all recipes, and the overrides of each by its name. Raises ConfigError."""
    sections = {field.name for field in fields(Config)}
    shared: list[str] = []
    named: dict[str, list[str]] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        section, dot, _ = name.partition(".")
        if equals and dot and section in sections:
            shared.append(argument)
            continue
        example = "precision=nvfp4 precision.wgrad.rht=0"
        if not equals and name not in known:
            raise ConfigError(
                f"{argument} is no precision config ({', '.join(known)}); give one of these, or a name of your own "
                f'with overrides, such as "{argument}={example}"'
            )
        try:
            overrides = shlex.split(text) if equals else [f"precision={name}"]
        except ValueError as error:
            raise ConfigError(f"{argument}: {error}; quote as in a shell") from error
        if not name or not overrides:
            raise ConfigError(f'{argument}: give NAME=OVERRIDES, such as "no RHT={example}"')
        if "|" in name or name in named:
            raise ConfigError(f"{argument}: give every recipe a name of its own, without |")
        named[name] = overrides
    return shared, named


def _check(config: Config, start: int, steps: int, base: tuple[str, Config] | None) -> None:
    """Raise ConfigError for what cannot be trained, or would be compared with the base on other data or with another
    model."""
    if start + steps > config.train.steps:
        raise ConfigError(
            f"steps {start + 1} to {start + steps} lie beyond the run's end (train.steps={config.train.steps}); take "
            "an earlier checkpoint, fewer --steps, or give more train.steps, which change the learning rates"
        )
    check(config, models, data, place_in_run().world_size, "cuda" if torch.cuda.is_available() else "cpu")
    execution_of(config, models)
    why_eager(config, models)
    if base is None:
        return
    name, other = base
    here, there = (
        dict(leaves({section: saved[section] for section in _COMMON})) for saved in map(as_saved, (config, other))
    )
    if different := [key for key in {**there, **here} if there.get(key) != here.get(key)]:
        raise ConfigError(
            f"{', '.join(different)} would differ from {name}'s, so that gaps were not the recipe's; give it as an "
            "argument of its own, which is for all recipes"
        )
    if config.data_seed != other.data_seed:
        raise ConfigError(
            f"run.seed={config.run.seed} is that of the data's order, too, which would differ from {name}'s; give "
            f"data.seed={other.data_seed} as an argument of its own, which is for all recipes"
        )
