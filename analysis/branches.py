"""Some steps of each recipe from BF16 checkpoints, one after the other in one process: what `price.py` measures.

Branches that begin with the same weights and moments and read the same tokens differ in their losses of a step by what
quantization does there, while from step to step the losses themselves go up and down by ten times as much. So

    gap = mean over steps of (loss - loss of BF16 in the same step)

Neighbouring steps are not independent, for a weight that rounding has moved stays moved: the interval of one start is
that of the means of six blocks of steps. Another start, of other weights and data, has something of its own: over
several, the gap is the mean of theirs, with the interval of their scatter.
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
from megatron_fp4.checkpoint.files import MANIFEST, read_manifest, read_trainer
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
from megatron_fp4.runtime.revision import revision
from megatron_fp4.training.build import check, execution_of, plans_of, why_eager
from megatron_fp4.training.callbacks.bad_steps import SkippedSteps, Spikes
from megatron_fp4.training.callbacks.kernels import Kernels
from megatron_fp4.training.callbacks.numerics import LinearCheck, SelfTest, Switch
from megatron_fp4.training.trainer import Trainer
from models import provider as models

BASE = "bf16"
# What decides which tokens a step has, and what is computed besides recipes.
_COMMON = ("model", "data", "train", "parallel", "validation")


@dataclass(frozen=True)
class Branch:
    """losses: mean training loss of each step, nats per token, None where it was not finite. seconds: of each. notes:
    what else there is to know, such as a spike. ended: why it did not get to its last step."""

    losses: list[float | None]
    seconds: list[float]
    notes: list[str] = field(default_factory=list)
    ended: str | None = None

    def counted(self) -> np.ndarray | None:
        """Losses of the steps that count; None if it did not get to its end, or one is not finite."""
        losses = self.losses[first_steps(len(self.losses)) :]
        return None if self.ended or None in losses else np.array(losses, dtype=float)

    @property
    def seconds_of_a_step(self) -> float:
        """The median."""
        return float(np.median(self.seconds[first_steps(len(self.seconds)) :] or [math.nan]))


def first_steps(steps: int) -> int:
    """How many of `steps` do not count: a sixth, at most ten."""
    return min(10, steps // 6)


def recipes_of_branches(starts: Sequence[Mapping[str, Branch]]) -> list[RecipeCost]:
    """Gaps and times of all recipes but BF16. starts: of each checkpoint, the branches by the names of the recipes."""
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
    return estimates(pd.DataFrame([{name: of.mean() for name, of in start.items()} for start in by_step]))


class Kept:
    """Branches in the JSON file at `path`, there or not (None: in no file), by keys of everything that decides them.
    writes: on the first rank.

    Raises ValueError for a file of something else, OSError for one that cannot be read or written.
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
                raise ValueError(f"{path} holds no branches; name a file that --output has written") from error
        self._write()  # what cannot be written is refused before anything is trained

    def add(self, key: str, facts: Mapping[str, Any], branch: Branch) -> None:
        """Take up what was trained, and write. facts: what it is of, for readers of the file."""
        self._records[key] = {**facts, "branch": asdict(branch)}
        self._write()

    def _write(self) -> None:
        if self._path is not None and self._writes:
            replace_text(self._path, json.dumps({"branches": self._records}, indent=1, allow_nan=False) + "\n")


def train_all(
    recipes: Mapping[str, Config], checkpoint: Path, mesh: ParallelMesh, steps: int, kept: Kept
) -> dict[str, Branch]:
    """The branches of `recipes` from `checkpoint`, trained unless the first rank has kept them.

    Collective. Raises as `train`, and OSError on the first rank where branches can no longer be written.
    """
    start, first = read_manifest(checkpoint).step, mesh.rank == 0
    facts = {
        "checkpoint": hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()[:16],
        "steps": [start + 1, start + steps],
        "commit": revision(),
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu",
        "ranks": mesh.world_size,
    }
    branches = {}
    for name, config in recipes.items():
        key = _key(facts, config)
        box = [kept.branches.get(key)]
        dist.broadcast_object_list(box, src=0)
        branch = box[0]
        if branch is None:
            branch = train(config, checkpoint, mesh, start, steps)
            gc.collect()  # the model of the recipe before
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            kept.add(key, {"recipe": name, **facts}, branch)
        if first:
            losses = branch.counted()
            outcome = branch.ended or (f"training loss {losses.mean():.4f}" if losses is not None else "not finite")
            seconds = f"{counted(len(branch.losses), 'step')} in {short_seconds(sum(branch.seconds))}"
            print("; ".join([f"{checkpoint.name}, {name}: {seconds}", outcome, *branch.notes]), flush=True)
        branches[name] = branch
    return branches


def _key(facts: Mapping[str, Any], config: Config) -> str:
    """Of everything that losses are a function of: also what a plan file says."""
    plans = [None if plan is None else plan.as_dict() for plan in plans_of(config, models)]
    saved = as_saved(config)
    told = {key: saved[key] for key in saved if key not in ("run", "checkpoint", "logging")}
    content = json.dumps([facts, told, config.run.seed, config.run.deterministic, plans], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def train(config: Config, checkpoint: Path, mesh: ParallelMesh, start: int, steps: int) -> Branch:
    """Train `steps` steps of `config` from `checkpoint`, which has `start` of them done, as a branch by pretrain.py
    does, without writing anything.

    Collective. Raises ValueError and CheckpointError for a checkpoint that does not fit, SelfTestError for kernels that
    compute something else.
    """
    callbacks = [
        Kernels(default_cache_dir() / "autotuning"),
        SelfTest(),
        *([LinearCheck()] if config.precision.recheck_interval else []),
        Switch(),
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
    """BF16 and the recipes that `arguments` name, as configurations of the run that made `checkpoint`.

    arguments: names of precision configs, NAME=OVERRIDES, and KEY=VALUE with a key of a configuration, for all of
    them. Raises ConfigError for the first that cannot be trained for `steps` steps from there.
    """
    shared, named = named_recipes(arguments, configs)
    manifest, trainer = read_manifest(checkpoint), read_trainer(checkpoint)
    check_resumable(checkpoint, manifest)
    before = config_from_saved(trainer["config"], [], configs, opens_data=False).precision
    if (switched := trainer["switch"]["switched_at"]) is not None:
        raise ConfigError(
            f"{checkpoint} is from after the precision switch of its run (before step {switched + 1}), whose target "
            "every recipe would train in; take a checkpoint from before"
        )
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
            _check(config, manifest.step, steps, recipes.get(BASE))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        recipes[name] = config
    return recipes


def cautions(checkpoint: Path, configs: Path, steps: int) -> Iterator[str]:
    """Lines: if the weights of `checkpoint` have come to fit a quantized recipe, and if it is not from about where
    `GROWTH` was measured, a fifth of a run of `steps` steps."""
    precision = config_from_saved(read_trainer(checkpoint)["config"], [], configs, opens_data=False).precision
    if recipe_from_config(precision).quantized:
        yield f"{checkpoint}: its run trains in {precision.name}, which its weights fit; a BF16 run's say more"
    if not 0.1 <= (share := read_manifest(checkpoint).step / steps) <= 0.4:
        yield (
            f"{checkpoint}: after {share:.0%} of the run; prices suppose that gaps change as after a fifth, "
            "and later they change less"
        )


def named_recipes(arguments: Sequence[str], configs: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides for all recipes, and the overrides of each by its name, BF16's first. Raises ConfigError."""
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
                f"{argument} is no precision config ({', '.join(known)}); give one of these, or a name of your own "
                f'with overrides, such as "{argument}={example}"'
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
            raise ConfigError(f"{argument}: give every recipe a name of its own, without |, and not {BASE}")
        named[name] = overrides
    if len(named) < 2:
        raise ConfigError("name one recipe at least to compare with BF16, such as nvfp4")
    return shared, named


def _check(config: Config, start: int, steps: int, base: Config | None) -> None:
    """Raise ConfigError for what cannot be trained, or would be compared with BF16 on other data or with another
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
    here, there = (
        dict(leaves({section: saved[section] for section in _COMMON})) for saved in map(as_saved, (config, base))
    )
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    different += ["data.seed or run.seed"] if config.data_seed != base.data_seed else []
    if different:
        raise ConfigError(
            f"{', '.join(different)} would differ from BF16's, so that gaps were not the recipe's; give it as an "
            "argument of its own, which is for all recipes"
        )
