"""What is refused before anything is built, and what `--check` and `run.dry=true` print.

`--check` opens what a run would open, in this process alone. Nothing is written but the cache of the built-in corpus.
The checkpoint is looked at without its tensors; what only the ranks together can find (another file on another node, a
shared disk that is slow) a start finds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.checkpoint.find import Resumed, check_resume, preview
from megatron_fp4.config.checks import validate
from megatron_fp4.config.removed_keys import refuse_removed
from megatron_fp4.config.schema import Config, ConfigError, ParallelConfig
from megatron_fp4.logging.console import counted, plan_shares, rounded_time
from megatron_fp4.parallel.mesh import build_mesh, leave_distributed
from megatron_fp4.precision.plan import PrecisionController, PrecisionSwitch, recipes_in
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.support import refuse_nothing_quantized, validate_precision
from megatron_fp4.training.build import (
    configuration_errors,
    device_type_of,
    initialized_model,
    own_plans,
    plans_of,
    precisions,
    sharded_model,
    world_size,
)
from megatron_fp4.training.callbacks.reporting import when_it_switches
from megatron_fp4.training.optimizer import WSDSchedule, build_optimizer
from megatron_fp4.training.providers import DataProvider, ModelProvider, TensorMicroBatch
from megatron_fp4.training.step import accumulate, update
from megatron_fp4.training.trainer import check_samples

if TYPE_CHECKING:
    from megatron_fp4.planning.tables import PlannedPhase

_GIB = 2**30
# Model FLOPs that a CPU is asked to compute twice for an estimate: seconds, not minutes.
_MOST_FLOPS_TIMED = 2e11


def check(config: Config, models: ModelProvider, data: DataProvider, ranks: int, device_type: str) -> None:
    """Raise ConfigError for the first thing in `config` that cannot run on `ranks` ranks.

    device_type: what the machine offers, `cuda` or `cpu`.
    """
    models.check(config)
    validate(config, ranks, device_type, models.shared_by_tensor_ranks(config.model))
    with configuration_errors():
        data.check_kind(config.data)
        WSDSchedule.of(config).switch_step(config.precision.switch.when)
    with configuration_errors("data.phases: "):
        data.check(config)
    for key, precision in precisions(config).items():
        models.check_exceptions(precision.exceptions, key)
        validate_precision(precision, device_type, key)
    with configuration_errors():
        plans = own_plans(config, models)
        for (key, precision), plan in zip(precisions(config).items(), plans, strict=True):
            refuse_nothing_quantized(plan, precision, key)
    plans_of(config, models)
    check_resume(config)


def print_check(config: Config, models: ModelProvider, data: DataProvider) -> None:
    """Open data, tokenizer, checkpoint and run.dir, and print what the run would take.

    Raises ConfigError for whatever a start would refuse, as far as one process can see it; OSError.
    """
    if os.environ.get("RANK", "0") != "0":  # under torchrun one rank looks, and says so
        return
    ranks = world_size()
    _check_run_dir(Path(config.run.dir))
    with configuration_errors():
        opened = data.open_alone(config)
        found = preview(config, run_identity(config, opened.fingerprint))
        start = _take_up(config, found, opened)
        opened.check_epochs(config.data.max_epochs)
    for line in (*opened.summary(config.validation.num_samples), *_precision_lines(config, models)):
        print(line)
    print(f"checkpoint: {_begins(config, found)}")
    for damage in found.damaged if found else ():
        print(f"checkpoint: NOT WHOLE, would be moved aside: {damage.name}: {damage.problem}")
    for change in opened.loader.changes:
        print(f"data: {change}")
    memory, minutes, assumed = _needs(config, models, ranks, opened.phases, found, start)
    print(assumed)
    steps = config.train.steps
    tokens = opened.phases.samples_before(steps) * config.train.sequence_length
    rest = "" if start == 0 else f" for the {steps - start:,} steps that are left"
    rest = ", nothing left to do: the run is finished" if start == steps else f", {minutes}{rest}"
    print(f"ok: {counted(ranks, 'rank')}, {tokens:,} tokens, {memory / _GIB:.1f} GiB a rank{rest}")


def print_dry_run(config: Config, models: ModelProvider, data: DataProvider) -> None:
    """Print what the run would need on WORLD_SIZE ranks, without running it."""
    from megatron_fp4.planning.tables import print_plan  # imports much that no run needs

    def build(*parts: Any) -> tuple[torch.nn.Module, PrecisionController]:
        return sharded_model(config, models, *parts)

    phases = _planned_phases(config, data.phases(config), 0)
    print_plan(config, models, world_size(), build, phases, plans_of(config, models))


def _planned_phases(config: Config, phases: Any, start: int) -> list[PlannedPhase]:
    """What is left of the phases after `start` steps."""
    from megatron_fp4.planning.tables import PlannedPhase

    length = config.train.sequence_length
    return [
        PlannedPhase(span.name, steps, span.batch_size, span.sequence_length or length)
        for span in phases.spans
        if (steps := span.end_step - max(start, span.first_step)) > 0
    ]


def _precision_lines(config: Config, models: ModelProvider) -> Iterator[str]:
    """How much is in which recipe, before the precision switch and after it."""
    before, after = plans_of(config, models)
    yield f"precision: {plan_shares(before)}"
    if warning := before.warning(config.precision.name):
        yield warning
    switch, steps = config.precision.switch, config.train.steps
    at = WSDSchedule.of(config).switch_step(switch.when)
    if after is not None and (at is None or at < steps):
        yield f"precision switches {when_it_switches(PrecisionSwitch(switch, at), steps)}: {plan_shares(after)}"


def _check_run_dir(run_dir: Path) -> None:
    """Raise ConfigError unless a run could write there; leaves nothing."""
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


def _take_up(config: Config, found: Resumed | None, opened: Any) -> int:
    """Let the loader stand where the checkpoint does; returns steps done. Raises ConfigError if it cannot."""
    if found is None:
        return 0
    start = found.step
    with configuration_errors(f"checkpoint.resume={config.checkpoint.resume} starts from step {start}: "):
        refuse_removed(found.trainer.get("config", {}))
        opened.loader.load_state_dict(found.trainer["loader"])
        check_samples(opened.phases, start, opened.loader.consumed_samples)
    return start


def _begins(config: Config, found: Resumed | None) -> str:
    """Where the run begins, in words."""
    if found is not None:
        return f"{found.folder}, step {found.step} of {config.train.steps}"
    if config.checkpoint.initialize_from is not None:
        return f"none yet; begins at step 0 with the weights of {config.checkpoint.initialize_from}"
    return "none yet; begins at step 0"


def _needs(
    config: Config, models: ModelProvider, ranks: int, phases: Any, found: Resumed | None, start: int
) -> tuple[int, str, str]:
    """By a dry run: bytes of a rank's memory at its peak, how long the steps after `start` take, what both assume."""
    from megatron_fp4.planning.dry_run import dry_run  # imports much that no run needs
    from megatron_fp4.planning.tables import step_time

    def build(*parts: Any) -> tuple[torch.nn.Module, PrecisionController]:
        model, controller = sharded_model(config, models, *parts)
        if found is not None:
            with configuration_errors(f"checkpoint.resume={config.checkpoint.resume} starts from step {start}: "):
                controller.load_state_dict(found.trainer["switch"])
        return model, controller

    dry, run = dry_run(config, ranks, build, models.planned_execution(config)), config.run
    planned, flops = _planned_phases(config, phases, start), _flops_of(config, models)
    memory = "memory: as planned for a GPU (run.dry=true has its parts)"
    if (on_gpus := device_type_of(config) == "cuda") or flops > _MOST_FLOPS_TIMED:
        recipes = recipes_in(plans_of(config, models))
        seconds = sum(p.num_steps * step_time(config, models, ranks, dry, p, recipes).seconds for p in planned)
        here = "" if on_gpus else "as on GPUs, because a step is too long to try on this CPU, "
        told = f"time: {here}at run.dry_mfu={run.dry_mfu:g} of run.dry_peak_tflops={run.dry_peak_tflops:g}"
    else:
        each = _seconds_of_a_sequence(config, models)
        seconds = sum(phase.num_steps * phase.batch_size for phase in planned) * each / ranks
        told = f"time: {each:.2g} s a sequence on each rank, as one process just took here"
    return dry.memory.peak, f"about {rounded_time(seconds)}", f"{memory}; {told}, without validation and saves"


def _seconds_of_a_sequence(config: Config, models: ModelProvider) -> float:
    """Forward and backward of one sequence, on one rank that is all there is, by the run's first recipe."""
    train, flops = config.train, _flops_of(config, models)
    per_rank = train.global_batch_size // (train.micro_batch_size * config.parallel.data_parallel_size(world_size()))
    rows = train.micro_batch_size if flops * train.micro_batch_size <= _MOST_FLOPS_TIMED else 1
    count = min(2, per_rank) if flops * rows * 2 <= _MOST_FLOPS_TIMED else 1
    alone = replace(config, parallel=ParallelConfig())
    tokens = torch.zeros(rows, train.sequence_length, dtype=torch.int64)
    batch = [TensorMicroBatch(index, tokens, tokens) for index in range(count)]
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and world_size() > 1:
        torch.set_num_threads(1)  # as torchrun gives its workers
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, step_state = build_mesh(alone.parallel, torch.device("cpu")), StepState(seed=config.run.seed)
        model, _ = initialized_model(alone, models, mesh, step_state)
        optimizer = build_optimizer(model, config.optimizer)
        for step in range(2):  # the first makes moments and whatever else is made once
            began = time.perf_counter()
            step_state.step = step
            loss = accumulate(model, batch, mesh, step_state)
            update(optimizer, loss, mesh, step_state, lr=1e-6, clip_norm=config.optimizer.clip_norm)
        return (time.perf_counter() - began) / (count * rows)
    finally:
        leave_distributed()
        torch.set_num_threads(threads)


def _flops_of(config: Config, models: ModelProvider) -> int:
    """Model FLOPs of a sequence, forward and backward."""
    length = config.train.sequence_length
    return models.training_flops_per_token(config.model, length) * length
