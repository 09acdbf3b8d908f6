"""What `--check` does: opens what a run would open, in this process alone, and says what the run would take.

Nothing is written but the cache of the built-in corpus. The checkpoint is looked at without its tensors; what only the
ranks together can find (another file on another node, a shared disk that is slow) a start finds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from assembly import (
    backend_of,
    configuration_errors,
    device_type_of,
    execution_of,
    initialized_model,
    plans_of,
    recipes_of,
    sharded_model,
    world_size,
)
from data.loader import MicroBatch, MicroBatchLoader
from data.opening import open_run_data
from data.schedule import PhaseSchedule, check_epochs
from data.validation import fewer_windows
from introduction import when_it_switches
from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.checkpoint.find import Chosen, preview
from megatron_fp4.config.removed_keys import refuse_removed
from megatron_fp4.config.schema import Config, ConfigError, ParallelConfig
from megatron_fp4.logging.console import plan_shares
from megatron_fp4.logging.words import counted, rounded_time
from megatron_fp4.parallel.mesh import build_mesh, leave_distributed
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.switch import PrecisionController, PrecisionSwitch
from megatron_fp4.training.optimizer import build_optimizer
from megatron_fp4.training.schedule import WSDSchedule
from megatron_fp4.training.step import train_step
from models.pattern import training_flops_per_token

_GIB = 2**30
# Model FLOPs that a CPU is asked to compute twice for an estimate: seconds, not minutes.
_MOST_FLOPS_TIMED = 2e11


def print_check(config: Config) -> int:
    """Open data, tokenizer, checkpoint and run.dir, print what the run would take; returns the exit code.

    Raises ConfigError for whatever a start would refuse, as far as one process can see it; OSError.
    """
    if os.environ.get("RANK", "0") != "0":  # under torchrun one rank looks, and says so
        return 0
    ranks = world_size()
    check_run_dir(Path(config.run.dir))
    with configuration_errors():
        bundle, loader, validation = open_run_data(
            config, SimpleNamespace(dp_rank=0, dp_size=1, device=torch.device("cpu"))
        )
        tokenizer = bundle.tokenizer and bundle.tokenizer.fingerprint()
        found = preview(config, run_identity(config, {"tokenizer": tokenizer}))
        start = take_up(config, found, loader)
        check_epochs(loader.schedule, loader.sources, config.data.max_epochs)
    print(bundle.summary())
    for line in (*fewer_windows(validation, config.validation.num_samples), *precision_lines(config)):
        print(line)
    print(f"checkpoint: {begins(config, found)}")
    for damage in found.damaged if found else ():
        print(f"checkpoint: NOT WHOLE, would be moved aside: {damage.name}: {damage.problem}")
    for change in loader.changes:
        print(f"data: {change}")
    memory, minutes, assumed = needs(config, ranks, loader.schedule, found, start)
    print(assumed)
    steps = config.train.steps
    tokens = loader.schedule.samples_before(steps) * config.train.sequence_length
    rest = "" if start == 0 else f" for the {steps - start:,} steps that are left"
    rest = ", nothing left to do: the run is finished" if start == steps else f", {minutes}{rest}"
    print(f"ok: {counted(ranks, 'rank')}, {tokens:,} tokens, {memory / _GIB:.1f} GiB a rank{rest}")
    return 0


def precision_lines(config: Config) -> Iterator[str]:
    """How much is in which recipe, before the precision switch and behind it."""
    before, after = plans_of(config)
    yield f"precision: {plan_shares(before)}"
    switch, steps = config.precision.switch, config.train.steps
    at = WSDSchedule.of(config).switch_step(switch.when)
    if after is not None and (at is None or at < steps):
        yield f"precision switches {when_it_switches(PrecisionSwitch(switch, at), steps)}: {plan_shares(after)}"


def check_run_dir(run_dir: Path) -> None:
    """Raise ConfigError unless a run could write there; leaves nothing behind."""
    here = run_dir.absolute()
    while not here.exists() and here != here.parent:
        here = here.parent
    if not here.is_dir():
        raise ConfigError(f"run.dir={run_dir}: {here} is a file, not a folder; choose another run.dir")
    try:
        with tempfile.TemporaryDirectory(prefix=".check_", dir=here):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be written to ({error.strerror or error}); choose another run.dir"
        ) from error


def take_up(config: Config, found: Chosen | None, loader: MicroBatchLoader) -> int:
    """Let the loader stand where the checkpoint does; returns steps done. Raises ValueError if it cannot."""
    if found is None:
        return 0
    start = found.manifest.step
    with configuration_errors(f"checkpoint.resume={config.checkpoint.resume} starts from step {start}: "):
        refuse_removed(found.trainer.get("config", {}))
        loader.load_state_dict(found.trainer["loader"])
        check_samples(loader.schedule, start, loader.consumed_samples)
    return start


def check_samples(schedule: PhaseSchedule, start: int, consumed: int) -> None:
    """Raise ConfigError if `start` steps of a checkpoint took another number of samples than the run's."""
    if schedule.samples_before(start) != consumed:
        raise ConfigError(
            f"its {start} steps took {consumed} samples, which in this run would have been "
            f"{schedule.samples_before(start)}; restore train.global_batch_size and the batches of the phases up to "
            "there"
        )


def begins(config: Config, found: Chosen | None) -> str:
    """Where the run begins, in words."""
    if found is not None:
        return f"{found.folder}, step {found.manifest.step} of {config.train.steps}"
    if config.checkpoint.initialize_from is not None:
        return f"none yet; begins at step 0 with the weights of {config.checkpoint.initialize_from}"
    return "none yet; begins at step 0"


def needs(
    config: Config, ranks: int, schedule: PhaseSchedule, found: Chosen | None, start: int
) -> tuple[int, str, str]:
    """By a dry run: bytes of a rank's memory at its peak, how long the steps behind `start` take, what both assume."""
    from megatron_fp4.planning.dry_run import dry_run  # which loads much that no run needs
    from megatron_fp4.planning.stand_ins import planned_execution
    from megatron_fp4.planning.step_time import PlannedPhase, step_time

    def build(*parts: Any) -> tuple[torch.nn.Module, PrecisionController]:
        model, controller = sharded_model(config, *parts)
        if found is not None:
            with configuration_errors(f"checkpoint.resume={config.checkpoint.resume} starts from step {start}: "):
                controller.load_state_dict(found.trainer["switch"])
        return model, controller

    dry = dry_run(config, ranks, build, planned_execution(config))
    length = config.train.sequence_length
    phases = [
        PlannedPhase(span.name, steps, span.batch_size, span.sequence_length or length)
        for span in schedule.spans
        if (steps := span.end_step - max(start, span.first_step)) > 0
    ]
    memory = "memory: as planned for a GPU (run.dry=true has its parts)"
    if (on_gpus := device_type_of(config) == "cuda") or flops_of(config) > _MOST_FLOPS_TIMED:
        recipes, run = recipes_of(config), config.run
        seconds = sum(phase.num_steps * step_time(config, ranks, dry, phase, recipes).seconds for phase in phases)
        here = "" if on_gpus else "as on GPUs, because a step is too long to try on this CPU, "
        told = f"time: {here}at run.dry_mfu={run.dry_mfu:g} of run.dry_peak_tflops={run.dry_peak_tflops:g}"
        return dry.memory.peak, f"about {rounded_time(seconds)}", f"{memory}; {told}, without validation and saves"
    each, samples = seconds_of_a_sequence(config), sum(phase.num_steps * phase.batch_size for phase in phases)
    told = f"time: {each:.2g} s a sequence on each rank, as one process just took here, without validation and saves"
    return dry.memory.peak, f"about {rounded_time(samples * each / ranks)}", f"{memory}; {told}"


def seconds_of_a_sequence(config: Config) -> float:
    """Forward and backward of one sequence, on one rank that is all there is, by the run's first recipe."""
    train = config.train
    per_rank = train.global_batch_size // (train.micro_batch_size * config.parallel.data_parallel_size(world_size()))
    rows = train.micro_batch_size if flops_of(config) * train.micro_batch_size <= _MOST_FLOPS_TIMED else 1
    count = min(2, per_rank) if flops_of(config) * rows * 2 <= _MOST_FLOPS_TIMED else 1
    alone = replace(config, parallel=ParallelConfig())
    tokens = torch.zeros(rows, train.sequence_length, dtype=torch.int64)
    batch = [MicroBatch.of(index, torch.cat([tokens, tokens[:, :1]], dim=1)) for index in range(count)]
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and world_size() > 1:
        torch.set_num_threads(1)  # as torchrun gives its workers
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, clock = build_mesh(alone.parallel, torch.device("cpu")), StepState(seed=config.run.seed)
        model, _ = initialized_model(alone, mesh, clock, execution_of(alone), backend_of(alone))
        optimizer = build_optimizer(model, config.optimizer).optimizer
        for step in range(2):  # the first makes moments and whatever else is made once
            began = time.perf_counter()
            train_step(model, optimizer, batch, mesh, clock, step=step, lr=1e-6, clip_norm=config.optimizer.clip_norm)
        return (time.perf_counter() - began) / (count * rows)
    finally:
        leave_distributed()
        torch.set_num_threads(threads)


def flops_of(config: Config) -> int:
    """Model FLOPs of a sequence, forward and backward."""
    length = config.train.sequence_length
    return training_flops_per_token(config.model, length) * length
