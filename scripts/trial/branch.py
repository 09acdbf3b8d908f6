"""Some steps of one recipe from a checkpoint, as a branch by pretrain.py trains them, without writing anything."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

from analysis.trials import Trial
from data import provider as data
from data.storage import default_cache_dir
from megatron_fp4.config.schema import Config, ConfigError, SpikesConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime.errors import DivergedError
from megatron_fp4.training.callbacks.kernels import Kernels
from megatron_fp4.training.callbacks.skipped_steps import SkippedSteps
from megatron_fp4.training.callbacks.spikes import Spikes
from megatron_fp4.training.callbacks.switch import Switch
from megatron_fp4.training.callbacks.validation import held_out_losses
from megatron_fp4.training.callbacks.verify import Verify
from megatron_fp4.training.spikes import Spike
from megatron_fp4.training.trainer import Trainer
from models import provider as models


class _Spikes(Spikes):
    """notes: a line for each spike."""

    def __init__(self, config: SpikesConfig, notes: list[str]) -> None:
        super().__init__(config)
        self._notes = notes

    def answer(self, spike: Spike) -> None:
        """As a run does, whose last checkpoint is the one that it began with."""
        super().answer(spike)
        again = self.guard.config.action == "rollback" and spike.in_row < self.guard.config.max_in_row
        after = ", after which it began again with the checkpoint's weights" if again else ""
        self._notes.append(f"step {spike.step:,} was a spike ({spike}){after}")


def branch(config: Config, checkpoint: Path, mesh: ParallelMesh, start: int, steps: int, validate: bool) -> Trial:
    """Train `steps` steps of `config` from `checkpoint`, which has `start` of them done.

    validate: measure the held-out loss after them. Nothing of the run that was built is kept. Collective. Raises
    ValueError and CheckpointError for a checkpoint that does not fit, SelfTestError for kernels that compute something
    else.
    """
    notes: list[str] = []
    callbacks = [
        Kernels(default_cache_dir() / "autotuning", write=False),
        Verify(),
        Switch(),
        SkippedSteps(config.train.max_skipped_steps, config.train.steps),
        _Spikes(config.spikes, notes),
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
