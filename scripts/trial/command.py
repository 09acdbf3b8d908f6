"""Some steps of each recipe from one checkpoint, in one process after the other: what `compare.py try` does."""

from __future__ import annotations

import argparse
import gc
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from analysis.runs import difference_line, differences, settings_of
from analysis.trials import TrialFile, draw_trials, first_steps, trial_line, trial_table
from exchange.checkpoint import checkpoint_in
from megatron_fp4 import __version__
from megatron_fp4.checkpoint.files import MANIFEST, DamagedCheckpointError, read_manifest, read_trainer
from megatron_fp4.checkpoint.sync import CheckpointError
from megatron_fp4.config.environment import as_saved
from megatron_fp4.config.launcher import place_in_run
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.logging.files import check_place
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed, leave_distributed
from megatron_fp4.precision.verify import SelfTestError
from megatron_fp4.runtime.errors import ExitCode
from megatron_fp4.training.build import device_type_of, set_determinism
from megatron_fp4.training.schedule import WSDSchedule
from scripts.trial.branch import branch
from scripts.trial.recipes import recipes_of, trained_in

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


def try_recipes(options: argparse.Namespace) -> int:
    """Run `compare.py try`; returns the exit code."""
    try:
        return _try_recipes(options)
    except (ValueError, OSError, DamagedCheckpointError, CheckpointError, SelfTestError) as error:
        if place_in_run().rank == 0:  # ConfigError is a ValueError
            print(f"compare.py: {error}", file=sys.stderr, flush=True)
        return ExitCode.WRONG_NUMBERS if isinstance(error, SelfTestError) else ExitCode.REFUSED
    finally:
        leave_distributed()


def _try_recipes(options: argparse.Namespace) -> int:
    """Check everything, train what is missing, print."""
    skip = first_steps(options.steps) if options.skip is None else options.skip
    if options.steps < 1 or not 0 <= skip < options.steps:
        raise ConfigError(f"--steps {options.steps} --skip {skip}: at least one step must count")
    if options.output is not None:
        check_place(options.output)
    checkpoint = checkpoint_in(options.checkpoint)
    manifest, ranks = read_manifest(checkpoint), place_in_run().world_size
    trainer = read_trainer(checkpoint)
    recipes = recipes_of(options.recipes, checkpoint, manifest, trainer, options.steps, ranks)
    names = [recipe.name for recipe in recipes]
    against = options.against or (names[1] if len(names) > 2 else None)
    if against is not None and against not in names:
        raise ConfigError(f"--against {against}: no recipe has this name; they are {', '.join(names)}")
    config = recipes[0].config

    device = init_distributed(device_type_of(config), config.parallel.timeout_seconds)
    set_determinism(config.run.deterministic)
    mesh = build_mesh(config.parallel, device)
    facts = {
        "checkpoint": hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()[:16],
        "start": manifest.step,
        "number of steps": options.steps,
        "commit": commit(),
        "version of torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "number of ranks": ranks,
    }
    if mesh.rank == 0:
        rates = [WSDSchedule.of(config).lr(step) for step in (manifest.step, manifest.step + options.steps - 1)]
        print(
            f"{checkpoint}: steps {manifest.step + 1:,} to {manifest.step + options.steps:,} of "
            f"{config.train.steps:,}, learning rate {rates[0]:.3g} to {rates[1]:.3g}",
            flush=True,
        )
        if (trained := trained_in(trainer["config"])) is not None:
            print(
                f"its run trains in {trained}, to which its weights have come to fit: gaps of a checkpoint in BF16 say "
                "more",
                flush=True,
            )
    file = None
    if options.output is not None:
        fingerprints = {recipe.name: recipe.fingerprint for recipe in recipes}
        file = on_first(mesh, lambda: TrialFile(options.output, facts, fingerprints))
    trials = {} if file is None else dict(file.trials)
    for recipe in recipes:
        name = recipe.name
        if name in trials and (trials[name].held_out or trials[name].ended or not options.validate):
            continue
        trial = branch(recipe.config, checkpoint, mesh, manifest.step, options.steps, options.validate)
        trials[name] = trial
        release()
        if mesh.rank == 0:
            print(trial_line(name, trial, trials.get(names[0]) if name != names[0] else None, skip), flush=True)
        if file is not None:
            on_first(mesh, lambda: file.add(name, trial))  # noqa: B023
    if mesh.rank == 0:
        ordered = {name: trials[name] for name in names}
        print(f"\n{trial_table(ordered, against, manifest.step, skip)}", flush=True)
        settings = {recipe.name: settings_of(as_saved(recipe.config)) for recipe in recipes}
        for name in names[1:]:
            if found := differences(settings[name], settings[names[0]]):
                print(difference_line(name, names[0], found), flush=True)
        if options.picture is not None:
            print(draw_trials(ordered, against, skip, options.picture), flush=True)
    return ExitCode.FINISHED


def on_first(mesh: ParallelMesh, action: Callable[[], T]) -> T:
    """What `action` returns on the first rank, on all ranks; ValueError on all of them for what it refuses there, so
    that none waits for one that has left."""
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


def release() -> None:
    """Give back the memory of a run that nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def commit() -> str:
    """What is checked out, with a fingerprint of what was changed since; without git the version."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    try:
        name, changes = git("rev-parse", "--short=12", "HEAD").strip(), git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError):
        return f"version {__version__}"
    return f"{name}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else name
