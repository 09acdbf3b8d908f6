"""Some steps of one recipe from a checkpoint, as a branch by pretrain.py trains them, without writing anything."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator
from pathlib import Path
from typing import cast

from analysis.trials import Trial
from assembly import Run, build, configuration_errors
from data.loader import MicroBatch
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.measure.gradient_noise import gradient_noise
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime.exit_codes import DivergedError
from megatron_fp4.training.spikes import Spike
from megatron_fp4.training.step import StepResult, train_step
from preflight import check_samples
from pretrain import pin_autotuned, test_backend, validation_losses


def branch(config: Config, checkpoint: Path, mesh: ParallelMesh, start: int, steps: int, validate: bool) -> Trial:
    """Train `steps` steps of `config` from `checkpoint`, which has `start` of them done.

    validate: measure the held-out loss behind them. Nothing of the run that was built is kept. Collective. Raises
    ValueError and CheckpointError for a checkpoint that does not fit, SelfTestError for kernels that compute something
    else.
    """
    run = build(config, mesh)
    if validate and not run.validation:
        raise ConfigError("--validate: the run has no held-out data; give data.validation=..., or leave --validate out")
    begin(run, checkpoint, start)
    trial = Trial([], [])
    skipped, notes, ended = 0, [*(f"the data has changed: {change}" for change in run.loader.changes)], None
    loading = cast("Generator[list[MicroBatch]]", run.loader.steps(start, start + steps))
    with contextlib.closing(loading) as batches:
        for step, batch in enumerate(batches, start=start):
            began, done = time.perf_counter(), step + 1
            result, switched = one_step(run, step, batch)
            if switched:
                notes.append(f"switched to {config.precision.switch.target} before step {done:,}")
            trial.losses.append(result.loss if math.isfinite(result.loss) else None)
            trial.seconds.append(time.perf_counter() - began)
            skipped += result.skipped
            try:
                run.guard.observe(result, done, lambda: "")
                if spike := run.spikes.observe(result, done, lambda: start):
                    notes.append(answer(run, spike, checkpoint))
            except DivergedError as error:
                ended = f"ended after step {done:,}: {str(error).strip()}"
                break
    held_out: dict[str, float] = {}
    if validate and ended is None:
        if run.graphs is not None:
            run.graphs.make_room()
        held_out = validation_losses(run)
        if not all(map(math.isfinite, held_out.values())):
            held_out, notes = {}, [*notes, "its held-out loss is not finite"]
    return Trial(trial.losses, trial.seconds, held_out, skipped, notes, ended)


def begin(run: Run, checkpoint: Path, start: int) -> None:
    """Take up weights, moments, generators and the place in the data, and choose and test kernels, as a start does."""
    parts = run.model, run.optimizer.optimizer, run.controller.clock
    allow = run.config.checkpoint.allow_mismatch
    with configuration_errors():
        resumed = run.checkpointer.load(checkpoint, *parts, allow_mismatch=allow)
        run.load_state_dict(resumed.trainer)
        check_samples(run.phases, start, run.loader.consumed_samples)
    run.check_epochs()
    pin_autotuned(run, start, record=False)
    test_backend(run)


def one_step(run: Run, step: int, batch: list[MicroBatch]) -> tuple[StepResult, bool]:
    """Train `step` (from 0) as pretrain.py does, without its records; also whether the precision switched before it.

    What spikes do after the step is left to the caller. Collective.
    """
    controller, reshard = run.controller, run.config.parallel.reshard
    if run.graphs is not None and controller.switch.measures(step):
        run.graphs.make_room()
    switched = controller.before_step(
        step, lambda: gradient_noise(run.model, batch, run.mesh, controller, step=step, reshard=reshard).ratio
    )
    run.spikes.enter(f"{run.phase(step)}, {run.plan_name}")
    parts = run.model, run.optimizer.optimizer, batch, run.mesh, controller.clock
    return train_step(*parts, step=step, **run.step_settings(step)), switched


def answer(run: Run, spike: Spike, checkpoint: Path) -> str:
    """Do about a spike what the configuration says, and say it. Raises SpikeError if there were too many in a row."""
    said = f"step {spike.step:,} was a spike ({spike})"
    if run.config.spikes.action == "rollback" and spike.in_row < run.config.spikes.max_in_row:
        run.roll_back(spike.step, checkpoint)
        said += ", behind which it began again with the checkpoint's weights"
    run.spikes.give_up(spike, lambda: "")
    return said
