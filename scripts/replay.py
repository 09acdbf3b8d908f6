"""Repeat steps of a run, and compare loss and gradient norm with its metrics.jsonl, bit for bit.

    python scripts/replay.py runs/8b/checkpoints/step_00002000              the step after that checkpoint
    python scripts/replay.py runs/8b/checkpoints/step_00002000 --steps 20   the twenty steps after it
    python scripts/replay.py runs/8b --step 2345                            up to step 2345, from the newest checkpoint
                                                                            before it, or from the initial weights
    torchrun --nproc-per-node 8 scripts/replay.py ...                       a run of eight ranks

A deterministic run on the same kind of machine gives every number again, to the last bit. If a number differs, one of
the two machines computed wrongly, or something changed in the meantime: versions, drivers, the configuration. So a loss
spike that occurs again is caused by the data or the recipe; one that does not is caused by the machine.

The checkpoint's own configuration is used; `key=value` changes it, for example for a moved corpus
(`data.sources.web=...`). Its paths and environment variables are used only with `--trust-config`, because the author of
the checkpoint chose them. The precision switch, skipped steps and rollbacks happen as in the run. Nothing is written to
the run's folder. Exit code: 0 all equal; 4 something differs; 2 wrong arguments or nothing to compare with.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data import provider as data
from megatron_fp4.checkpoint.files import (
    MANIFEST,
    Origin,
    folder_name,
    list_checkpoints,
    read_manifest,
    read_trainer,
    step_of,
)
from megatron_fp4.checkpoint.sync import CheckpointError
from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.errors import printable
from megatron_fp4.config.schema import Config, ConfigError, SpikesConfig
from megatron_fp4.logging.files import METRICS_FILE, iterate_records
from megatron_fp4.runtime.errors import run_command
from megatron_fp4.runtime.revision import changed_facts, made_by
from megatron_fp4.training.build import check, join_ranks
from megatron_fp4.training.callbacks.bad_steps import Spikes
from megatron_fp4.training.callbacks.experts import Experts
from megatron_fp4.training.callbacks.kernels import Kernels
from megatron_fp4.training.callbacks.numerics import Switch
from megatron_fp4.training.callbacks.replicas import tensors_of
from megatron_fp4.training.trainer import Step, Trainer
from models import provider as models
from pretrain import CONFIGS


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    return run_command("replay.py", lambda: replay(options), refusals=(ValueError, OSError, CheckpointError))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint or, with --step, of a run")
    parser.add_argument("overrides", nargs="*", help="key=value: changes of the run's configuration")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", type=int, default=1, help="how many steps to repeat (default 1)")
    which.add_argument("--step", type=int, help="the last step to repeat, counted as in metrics.jsonl")
    parser.add_argument("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    return parser.parse_intermixed_args(arguments)


def replay(options: argparse.Namespace) -> int:
    """Load, repeat, compare, print; returns the exit code."""
    origin, start, run_dir = where_to_begin(options)
    last = start + options.steps if options.step is None else options.step
    if last <= start:
        raise ConfigError(f"step {last} is not after step {start} of the checkpoint; give --steps 1 or more")
    metrics = run_dir / METRICS_FILE
    records = list(iterate_records(metrics))
    recorded = {record["step"]: record for record in records if record["kind"] == "step"}
    if missing := [step for step in range(start + 1, last + 1) if step not in recorded]:
        raise ConfigError(
            f"{metrics} has no record of step {missing[0]}, only of the steps {min(recorded, default=0)} to "
            f"{max(recorded, default=0)}; name recorded steps, and a checkpoint before them"
        )
    rollbacks = {
        record["step"]: origin if record["checkpoint"] == start else origin.parent / folder_name(record["checkpoint"])
        for record in records
        if record.get("event") == "spike" and record["checkpoint"] is not None and record["step"] < last
    }
    trainer = open_run(origin, options.overrides, rollbacks, options.trust_config)
    if last > (planned := trainer.config.train.steps):
        raise ConfigError(
            f"{origin} is from a start with train.steps={planned}; give the train.steps of the start that made step "
            f"{last}"
        )
    begin(trainer, origin, start)
    differing = compare(trainer, start, last, recorded)
    name_wrong_ranks(trainer, [r for r in records if r.get("event") == "replicas" and r["step"] == last])
    say(trainer, f"{last - start - differing} of {last - start} steps are equal to the last bit")
    if differing and (made_with := read_trainer(origin, read_manifest(origin)).get("made_by")):
        for name, before, now in changed_facts(made_with, made_by(trainer.mesh.device)):
            say(trainer, f"changed since the checkpoint, so the numbers may: {name} {before} -> {now}")
    return 4 if differing else 0


def say(trainer: Trainer, line: str) -> None:
    """Print a line, on the first rank."""
    if trainer.mesh.rank == 0:
        print(printable(line), flush=True)


def where_to_begin(options: argparse.Namespace) -> tuple[Path, int, Path]:
    """(the checkpoint to read, the step after which to begin, the run's folder). Step 0: from the initial weights."""
    given: Path = options.checkpoint
    if (given / MANIFEST).is_file():
        return given, read_manifest(given).step, given.absolute().parent.parent
    folders = sorted(list_checkpoints(given / "checkpoints"), key=step_of) if given.is_dir() else []
    if not folders:
        raise ConfigError(
            f"{given} is neither a checkpoint nor a run with checkpoints; name one, such as "
            "runs/default/checkpoints/step_00000200"
        )
    if options.step is None:
        raise ConfigError(f"{given} is a run; give a step of it (--step 123), or one of its checkpoints")
    before = [folder for folder in folders if step_of(folder) < options.step]
    return (before[-1], step_of(before[-1]), given) if before else (folders[0], 0, given)


class RecordedSpikes(Spikes):
    """Skips the same steps as the run, and rolls back where it did. rollbacks: step of a spike -> checkpoint."""

    def __init__(self, config: SpikesConfig, rollbacks: Mapping[int, Path]) -> None:
        super().__init__(config)
        self._rollbacks = rollbacks

    def last_checkpoint(self) -> int | None:
        """Not used: the rollbacks are recorded."""
        return None

    def after_step(self, step: Step) -> None:
        self.observe(step.result)
        if step.done in self._rollbacks:
            self.trainer.roll_back(step.done, self._rollbacks[step.done])


def open_run(checkpoint: Path, overrides: list[str], rollbacks: Mapping[int, Path], trusted: bool = False) -> Trainer:
    """A trainer for the run of a checkpoint. Raises ConfigError if its bits cannot be reproduced here, or if it needs
    paths and is not `trusted`."""
    manifest = read_manifest(checkpoint)
    saved = read_trainer(checkpoint, manifest)
    config: Config = config_from_saved(saved["config"], overrides, CONFIGS, trusted=trusted)
    if not config.run.deterministic:
        raise ConfigError("the run had run.deterministic=false, so its bits cannot be reproduced")
    ranks, made_with = place_in_run().world_size, manifest.world_size
    if ranks != made_with and not config.parallel.reproducible:
        raise ConfigError(
            f"{checkpoint} was made by {made_with} ranks, and {ranks} ranks add up in another order; begin this "
            f"command with torchrun --nproc-per-node {made_with} in place of python"
        )
    check(config, models, data, ranks, "cuda" if torch.cuda.is_available() else "cpu")
    mesh = join_ranks(config, models)
    kernels = Kernels(data.default_cache_dir() / "autotuning")
    kernels.load_state_dict(saved.get("autotuning"))  # also for a replay from the initial weights
    callbacks = [kernels, Switch(), Experts(), RecordedSpikes(config.spikes, rollbacks)]
    trainer = Trainer(config, models, data, callbacks, mesh, quiet=True)
    trainer.graphs = None  # eager steps give the same bits and can fail in fewer ways
    return trainer


def begin(trainer: Trainer, origin: Path, start: int) -> None:
    """Begin after `start` steps of the run: from the checkpoint `origin`, or at step 0 with the run's initial weights,
    which may come from another checkpoint. Raises ConfigError if the data or these weights are not there."""
    if start:
        trainer.begin_from(origin)
        if changes := trainer.data.loader.changes:
            raise ConfigError(f"the data is not that of these steps: {'; '.join(changes)}; name the old data.sources")
        return
    if (begun := Origin.of(read_trainer(origin, read_manifest(origin)), "initialized_from")) is not None:
        parts = trainer.model, trainer.precision.step_state
        found = trainer.checkpointer.initialize(begun.path, *parts, resumed=False, allow_mismatch=True)
        if found is None or not begun.is_in(Path(found.path)):
            raise ConfigError(f"{begun.path} is no longer the checkpoint with whose weights the run began")
    else:
        trainer.initialize()
    trainer.begin(0)


def compare(trainer: Trainer, start: int, last: int, recorded: Mapping[int, Mapping[str, Any]]) -> int:
    """Repeat the steps from `start` + 1 to `last` and print a line for each; returns how many differ.

    recorded: the records of metrics.jsonl by step; null stands for a value that is not finite.
    """
    row, differing = "{!s:>8}  {!s:<20}  {!s:<20}  {!s:<20}  {!s:<20}  {}", 0
    say(trainer, row.format("step", "loss recorded", "loss replayed", "norm recorded", "norm replayed", "").rstrip())
    for step in trainer.steps(start, last):
        was, result = recorded[step.done], step.result
        pairs = ((was["loss"], result.loss), (was["grad_norm"], result.grad_norm))
        same = all(not math.isfinite(now) if then is None else then == now for then, now in pairs)
        differing += not same
        say(trainer, row.format(step.done, *pairs[0], *pairs[1], "equal" if same else "DIFFERS"))
    return differing


def name_wrong_ranks(trainer: Trainer, events: Sequence[Mapping[str, Any]]) -> None:
    """If the run ended after the last step because ranks had different values (callbacks/replicas.py), print how far
    each rank was from the replayed values. A collective.

    No rank may have exactly the replayed values, because a wrong weight has changed the gradients of all ranks since.
    """
    mesh = trainer.mesh
    if events and events[-1]["mesh"] != mesh.sizes:
        return say(trainer, "the ranks with different values cannot be compared, because this is another mesh")
    for difference in events[-1]["differences"] if events else []:
        name, distance = difference["names"][0], -1.0  # -1: this rank is not in the group
        if values := difference["values"].get(str(mesh.rank)):
            tensor, _ = tensors_of(trainer)[name]
            replayed = tensor.flatten()[difference["places"]].tolist()
            apart = [abs((math.nan if was is None else was) - now) for was, now in zip(values, replayed, strict=True)]
            distance = max(one if math.isfinite(one) else math.inf for one in apart)
        of_ranks = [distance] * mesh.world_size
        dist.all_gather_object(of_ranks, distance)
        farthest = [rank for rank, found in enumerate(of_ranks) if found == max(of_ranks) >= 0]
        if farthest:
            by_rank = ", ".join(f"on rank {rank} by {found:.3g}" for rank, found in enumerate(of_ranks) if found >= 0)
            verdict = f": rank {farthest[0]} was wrong" if len(farthest) == 1 else ""
            say(trainer, f"{name} differs from these steps' {by_rank}{verdict}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
