"""Trains branches, a few steps of each recipe from a BF16 checkpoint, in one process: what `price.py` measures.

Branches of one checkpoint begin with the same weights and moments and read the same tokens, so their losses of a step
differ only by the quantization. From step to step the losses vary ten times as much. So

    gap = mean over steps of (loss - loss of BF16 in the same step)

Neighbouring steps are not independent, because a weight that rounding has moved stays moved. So the confidence interval
of one start (a checkpoint) comes from the means of six blocks of steps. Starts differ in weights and data; with several
starts the gap is the mean of their gaps, and the interval comes from their variance.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from analysis.price import RecipeCost
from analysis.statistics import Estimate, block_estimate, estimates
from data import provider as data
from data.storage import default_cache_dir
from megatron_fp4.checkpoint.files import MANIFEST, TRAINER, read_manifest, read_trainer, well_formed
from megatron_fp4.checkpoint.find import check_resumable
from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.compose import as_saved, config_from_saved, group_options
from megatron_fp4.config.removed_keys import leaves
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.console import counted, short_seconds
from megatron_fp4.logging.files import replace_text
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.recipe import recipe_from_config
from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.runtime.revision import made_by
from megatron_fp4.training.build import check, execution_of, plans_of, why_eager
from megatron_fp4.training.callbacks.bad_steps import SkippedSteps, Spikes
from megatron_fp4.training.callbacks.experts import Experts
from megatron_fp4.training.callbacks.kernels import Kernels
from megatron_fp4.training.callbacks.numerics import LinearCheck, SelfTest, Switch
from megatron_fp4.training.trainer import Trainer
from models import provider as models

BASE = "bf16"
# Sections of the configuration that must be equal in all branches: they determine the tokens and the model.
_COMMON = ("model", "data", "train", "parallel", "validation")


@dataclass(frozen=True)
class Branch:
    """losses: mean training loss of each step in nats per token; None if it was not finite. seconds: of each step.
    notes: remarks, for example about a spike. ended: why it ended before its last step; None if it did not."""

    losses: list[float | None]
    seconds: list[float]
    notes: list[str] = field(default_factory=list)
    ended: str | None = None

    def counted(self) -> np.ndarray | None:
        """The losses without the first steps; None if the branch ended early or one of them is not finite."""
        losses = self.losses[first_steps(len(self.losses)) :]
        return None if self.ended or None in losses else np.array(losses, dtype=float)

    @property
    def seconds_of_a_step(self) -> float:
        """The median over the steps, without the first ones."""
        return float(np.median(self.seconds[first_steps(len(self.seconds)) :] or [math.nan]))


def first_steps(steps: int) -> int:
    """How many of the first of `steps` steps are ignored: a sixth, at most ten."""
    return min(10, steps // 6)


def recipes_of_branches(starts: Sequence[Mapping[str, Branch]]) -> list[RecipeCost]:
    """Gaps and times of all recipes except BF16; a recipe that ended early from one start has none. starts: for each
    checkpoint, its branches by recipe."""
    names = [name for name in starts[0] if name != BASE]
    percent, nats = (_gaps(starts, names, in_percent) for in_percent in (True, False))
    found = []
    for name in names:
        ratios = [of[name].seconds_of_a_step / of[BASE].seconds_of_a_step for of in starts]
        known = all(of[name].ended is None and of[BASE].ended is None for of in starts)
        found.append(RecipeCost(name, percent.get(name), nats.get(name), float(np.mean(ratios)) if known else None))
    return found


def _gaps(starts: Sequence[Mapping[str, Branch]], names: Iterable[str], in_percent: bool) -> dict[str, Estimate]:
    by_step: list[dict[str, np.ndarray]] = []
    for start in starts:
        base = start[BASE].counted()
        losses = {} if base is None else {name: of for name in names if (of := start[name].counted()) is not None}
        by_step.append({name: 100 * (of / base - 1) if in_percent else of - base for name, of in losses.items()})
    if len(starts) == 1:
        return {name: block_estimate(list(of)) for name, of in by_step[0].items()}
    everywhere = [name for name in names if all(name in start for start in by_step)]
    return estimates(pd.DataFrame([{name: start[name].mean() for name in everywhere} for start in by_step]))


class BranchFile:
    """Trained branches, saved in the JSON file `path` (None: in no file) by a hash of everything that determines them.
    writes: whether this rank writes the file.

    Raises ValueError for a file with other content, OSError for a file that cannot be read or written.
    """

    def __init__(self, path: Path | None, writes: bool) -> None:
        self._path, self._writes = path, writes
        self._records: dict[str, Any] = {}
        self.branches: dict[str, Branch] = {}
        if path is not None and path.exists():
            try:
                self._records = dict(json.loads(path.read_text(encoding="utf-8"))["branches"])
                self.branches = {key: Branch(**record["branch"]) for key, record in self._records.items()}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} has no branches; name a file that --output has written") from error
        self._write()  # fails before training if the file cannot be written

    def add(self, key: str, facts: Mapping[str, Any], branch: Branch) -> None:
        """Add a trained branch and write the file. facts: about the branch, for readers of the file."""
        self._records[key] = {**facts, "branch": asdict(branch)}
        self._write()

    def _write(self) -> None:
        if self._path is not None and self._writes:
            replace_text(self._path, json.dumps({"branches": self._records}, indent=1, allow_nan=False) + "\n")


def train_all(
    recipes: Mapping[str, Config], checkpoint: Path, mesh: ParallelMesh, steps: int, saved: BranchFile
) -> dict[str, Branch]:
    """The branches of `recipes` from `checkpoint`. Those that rank 0 has in `saved` are not trained again.

    A collective. Raises as `train` does, and OSError on rank 0 if the file cannot be written.
    """
    start, first = read_manifest(checkpoint).step, mesh.rank == 0
    facts = {
        "checkpoint": hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()[:16],
        "steps": [start + 1, start + steps],
        **made_by(mesh.device),
        "ranks": mesh.world_size,
    }
    branches: dict[str, Branch] = {}
    label = "/".join(checkpoint.parts[-3::2])  # RUN/step_...
    for name, config in recipes.items():
        key = _key(facts, config)
        box = [saved.branches.get(key)]
        dist.broadcast_object_list(box, src=0)
        branch = box[0]
        if branch is None:
            if first:
                print(f"{label}, {name}: {len(branches) + 1} of {len(recipes)}, {counted(steps, 'step')}", flush=True)
            branch = train(config, checkpoint, mesh, start, steps)
            gc.collect()  # frees the model of this branch
            torch.cuda.empty_cache()
            saved.add(key, {"recipe": name, **facts}, branch)
        if first:
            losses = branch.counted()
            outcome = branch.ended or (f"training loss {losses.mean():.4f}" if losses is not None else "not finite")
            seconds = f"{counted(len(branch.losses), 'step')} in {short_seconds(sum(branch.seconds))}"
            print("; ".join([f"{label}, {name}: {seconds}", outcome, *branch.notes]), flush=True)
        branches[name] = branch
    return branches


def _key(facts: Mapping[str, Any], config: Config) -> str:
    """A hash of everything that determines the losses, including the content of a plan file."""
    plans = [None if plan is None else plan.as_dict() for plan in plans_of(config, models)]
    saved = as_saved(config)
    settings = {key: saved[key] for key in saved if key not in ("run", "checkpoint", "logging")}
    content = json.dumps([facts, settings, config.run.seed, config.run.deterministic, plans], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def train(config: Config, checkpoint: Path, mesh: ParallelMesh, start: int, steps: int) -> Branch:
    """Train `steps` steps of `config` from `checkpoint`, which is after step `start`, like a branch of pretrain.py, but
    without writing anything.

    A collective. Raises ValueError and CheckpointError for a checkpoint that does not fit, SelfTestError for kernels
    that compute wrong results.
    """
    callbacks = [
        Kernels(default_cache_dir() / "autotuning"),
        SelfTest(),
        *([LinearCheck()] if config.precision.recheck_interval else []),
        Switch(),
        Experts(),
        SkippedSteps(config.train.max_skipped_steps, config.train.steps),
        Spikes(config.spikes),
    ]
    trainer = Trainer(config, models, data, callbacks, mesh, quiet=True)
    trainer.begin_from(checkpoint, allow_mismatch=config.checkpoint.allow_mismatch)
    notes = [f"the data has changed: {change}" for change in trainer.data.loader.changes]
    losses: list[float | None] = []
    seconds: list[float] = []
    skipped, ended, began = 0, None, time.perf_counter()
    with contextlib.closing(trainer.steps(start, start + steps)) as trained:
        try:
            for step in trained:
                losses.append(step.result.loss if math.isfinite(step.result.loss) else None)
                seconds.append(time.perf_counter() - began)
                skipped += step.result.skipped
                if step.result.spike:
                    notes.append(f"step {step.done:,} was a spike ({config.spikes.action})")
                began = time.perf_counter()
        except DivergedError as error:
            ended = f"ended after step {start + len(losses) + 1:,}: {str(error).strip()}"
    notes += [f"{counted(skipped, 'step')} made no update"] if skipped else []
    switched_at = trainer.precision.switch.switched_at
    if switched_at is not None and switched_at >= start:
        notes.append(f"switched to {config.precision.switch.target} before step {switched_at + 1:,}")
    return Branch(losses, seconds, notes, ended)


def recipes_from(
    arguments: Sequence[str], checkpoint: Path, steps: int, configs: Path, trusted: bool
) -> dict[str, Config]:
    """Configurations of BF16 and of the recipes in `arguments`, for the run that made `checkpoint`.

    arguments: names of precision configs, NAME=OVERRIDES, and KEY=VALUE with a key of a configuration, which is for all
    recipes. Raises ConfigError for the first one that cannot be trained for `steps` steps from the checkpoint.
    """
    shared, named = named_recipes(arguments, configs)
    manifest = read_manifest(checkpoint)
    trainer = read_trainer(checkpoint, manifest)
    check_resumable(checkpoint, manifest)
    with well_formed(checkpoint / TRAINER):
        saved, switched = trainer["config"], trainer["switch"]["switched_at"]
        before = config_from_saved(saved, [], configs, opens_data=False).precision
    if switched is not None:
        raise ConfigError(
            f"{checkpoint} is from after the precision switch of its run (before step {switched + 1}), so every recipe "
            "would train in the target of the switch; take an earlier checkpoint"
        )
    same = [
        f"precision.compute_dtype={before.compute_dtype}",
        f"precision.backend={before.backend}",
        "precision.switch.when=never",
        "checkpoint.resume=auto",
        "checkpoint.initialize_from=null",
    ]
    recipes: dict[str, Config] = {}
    for name, overrides in named.items():
        try:
            config = config_from_saved(saved, [*same, *shared, *overrides], configs, trusted=trusted)
            config = replace(config, checkpoint=replace(config.checkpoint, asynchronous=False))
            _check(config, manifest.step, steps, recipes.get(BASE))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        recipes[name] = config
    return recipes


def cautions(checkpoint: Path, configs: Path, steps: int) -> Iterator[str]:
    """Warnings: if the run of `checkpoint` trained in a quantized recipe, and if the checkpoint is far from a fifth of
    its run of `steps` steps, where `GROWTH` was measured."""
    manifest = read_manifest(checkpoint)
    precision = config_from_saved(read_trainer(checkpoint, manifest)["config"], [], configs, opens_data=False).precision
    if recipe_from_config(precision).quantized:
        yield f"{checkpoint}: its run trains in {precision.name}, so its weights favor it; better take a BF16 run's"
    if not 0.1 <= (share := manifest.step / steps) <= 0.4:
        yield (
            f"{checkpoint}: after {share:.0%} of the run; prices assume that gaps grow as they do after a fifth of a "
            "run, and later they change less"
        )


def named_recipes(arguments: Sequence[str], configs: Path) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides for all recipes, and the overrides of each recipe by its name, BF16 first. Raises ConfigError."""
    known, sections = group_options(configs)["precision"], {of.name for of in fields(Config)}
    shared: list[str] = []
    named = {BASE: [f"precision={BASE}"]}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        section, dot, _ = name.partition(".")
        if equals and dot and section in sections:
            shared.append(argument)
            continue
        example = "precision=nvfp4 precision.wgrad.rht=0"
        if not equals and name not in known:
            raise ConfigError(
                f"{argument} is not a precision config ({', '.join(known)}); give one of these, or a new name with "
                f'overrides, such as "{argument}={example}"'
            )
        try:
            overrides = shlex.split(text) if equals else [f"precision={name}"]
        except ValueError as error:
            raise ConfigError(f"{argument}: {error}; quote as in a shell") from error
        if argument == BASE:
            continue
        if not name or not overrides:
            raise ConfigError(f'{argument}: give NAME=OVERRIDES, such as "no RHT={example}"')
        if "|" in name or name in named:
            raise ConfigError(f"{argument}: give every recipe a different name, without |, and not {BASE}")
        named[name] = overrides
    if len(named) < 2:
        raise ConfigError("name at least one recipe to compare with BF16, such as nvfp4")
    return shared, named


def _check(config: Config, start: int, steps: int, base: Config | None) -> None:
    """Raise ConfigError if `config` cannot be trained, or if its data or model differs from that of BF16 (`base`)."""
    if start + steps > config.train.steps:
        raise ConfigError(
            f"steps {start + 1} to {start + steps} are after the end of the run (train.steps={config.train.steps}); "
            "take an earlier checkpoint, fewer --steps, or raise train.steps, which changes the learning rates"
        )
    check(config, models, data, place_in_run().world_size, "cuda" if torch.cuda.is_available() else "cpu")
    execution_of(config, models)
    why_eager(config, models)
    if base is None:
        return
    here, there = (
        dict(leaves({section: saved[section] for section in _COMMON})) for saved in map(as_saved, (config, base))
    )
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    different += ["data.seed or run.seed"] if config.data_seed != base.data_seed else []
    if different:
        raise ConfigError(
            f"{', '.join(different)} would differ from BF16's, so gaps would not be the recipe's alone; give it as a "
            "separate argument, which is for all recipes"
        )
