"""What a run would need, as tables: memory, messages, FLOPs, time."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from megatron_fp4.config.schema import Config
from megatron_fp4.logging import console as show
from megatron_fp4.logging.console import RunConsole
from megatron_fp4.logging.words import counted, long_time, with_unit
from megatron_fp4.planning.dry_run import Build, DryRun, dry_run
from megatron_fp4.planning.step_time import PlannedPhase, StepTime, axis_bandwidth, step_time
from megatron_fp4.precision.plan import Plan, recipes_in
from megatron_fp4.training.providers import ModelProvider

_GIB = 2**30


def print_plan(
    config: Config,
    models: ModelProvider,
    world_size: int,
    build: Build,
    phases: Sequence[PlannedPhase],
    plans: tuple[Plan, Plan | None],
) -> None:
    """Print what the run of `config` needs on `world_size` ranks, which consists of `phases` and computes by `plans`,
    before and after its precision switch.

    build: see `dry_run`.
    """
    execution = models.planned_execution(config)
    dry = dry_run(config, world_size, build, execution)
    console = RunConsole(config.train.steps)
    console.text(f"kernels: {models.describe_execution(execution, config.model.pattern)}")
    console.table(show.plan_table(plans[0], config.precision.name))
    num_tokens = sum(phase.num_steps * phase.batch_size for phase in phases) * config.train.sequence_length
    console.table(show.batch_table(config.train, config.parallel, world_size, num_tokens))
    console.table(show.facts_table("Memory of a rank", memory_facts(config, models, world_size, dry)))
    if any(message.ranks > 1 for message in dry.messages):
        console.table(messages_table(dry))
    times = [(phase, step_time(config, models, world_size, dry, phase, recipes_in(plans))) for phase in phases]
    console.table(time_table(times, config, world_size))
    console.table(show.facts_table("Work and time", time_facts(config, models, world_size, times)))


def memory_facts(config: Config, models: ModelProvider, world_size: int, dry: DryRun) -> dict[str, object]:
    """Name -> size, in GiB."""
    memory, unreduced = dry.memory, "gradients before their reduction (FP32)"
    if memory.unreduced_gradients and config.parallel.shards(world_size) > 1:
        unreduced += "; none with parallel.reduce_gradients=each"
    sizes = {
        "parameters (FP32 shards)": memory.parameters,
        "optimizer state (FP32 moments)": memory.optimizer,
        "gradients (FP32 shards)": memory.gradients,
        unreduced: memory.unreduced_gradients,
        f"gathered parameters ({config.precision.compute_dtype})": memory.gathered,
        "quantized weights": memory.quantized_weights,
        "activations of a micro-batch": memory.activations,
        "workspaces of cuBLAS": memory.workspaces,
        "peak, temporaries included": memory.peak,
    }
    total = models.parameter_count(config.model).total
    shares = f"{memory.num_parameters:,} of {total:,}"
    return {"parameters of the rank": shares, **{name: f"{size / _GIB:.2f} GiB" for name, size in sizes.items()}}


def messages_table(dry: DryRun) -> Table:
    """The collectives of a step of the largest batch."""
    title = f"Collectives of a step, per rank ({counted(dry.micro_batches, 'micro-batch', 'micro-batches')})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("collective", "over", "ranks"):
        table.add_column(name)
    for name in ("number", "MiB each", "GiB sent"):
        table.add_column(name, justify="right")
    # Ordered by volume; sizes of a kind are summed up, largest kinds first.
    kinds: dict[tuple[str, str, int], list[tuple[int, float, float]]] = {}
    for message, count in dry.messages.items():
        if message.ranks > 1:
            kind = (message.operation, message.group, message.ranks)
            kinds.setdefault(kind, []).append((count, count * message.num_bytes, count * message.sent_bytes))
    for (operation, group, ranks), rows in sorted(kinds.items(), key=lambda item: -sum(row[2] for row in item[1])):
        count, num_bytes, sent = (sum(column) for column in zip(*rows, strict=True))
        table.add_row(
            operation, group, str(ranks), f"{count:,}", f"{num_bytes / count / 2**20:.2f}", f"{sent / _GIB:.3f}"
        )
    return table


def time_table(times: Sequence[tuple[PlannedPhase, StepTime]], config: Config, world_size: int) -> Table:
    """A step of each phase that differs in batch or sequences: what bounds it."""
    table = Table(title="Time of a step, in ms", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("phase", "batch"):
        table.add_column(name)
    for name in ("compute", "messages: waited for", "hidden", "host", "step", "bound by", "tokens/s a rank"):
        table.add_column(name, justify="right")
    shown = set()
    for phase, time in times:
        kind = phase.batch_size, phase.sequence_length
        if kind not in shown:
            shown.add(kind)
            tokens = phase.batch_size * config.train.sequence_length
            parts = (time.compute, time.exposed, time.hidden, time.host, time.seconds)
            rate = f"{tokens / time.seconds / world_size:,.0f}"
            batch = f"{tokens // phase.sequence_length:,} x {phase.sequence_length:,}"
            table.add_row(phase.name, batch, *(_milliseconds(seconds) for seconds in parts), time.bound, rate)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def time_facts(
    config: Config, models: ModelProvider, world_size: int, times: Sequence[tuple[PlannedPhase, StepTime]]
) -> dict[str, object]:
    """FLOPs, the time of the run, and what is assumed."""
    run, parallel, length = config.run, config.parallel, config.train.sequence_length
    flops = sum(
        models.training_flops_per_token(config.model, phase.sequence_length)
        * phase.num_steps
        * phase.batch_size
        * length
        for phase, _ in times
    )
    axes = {"tp": parallel.tensor, "dp": parallel.shards(world_size), "replicate": parallel.replicate}
    bandwidths = [
        f"{axis} {axis_bandwidth(axis, ranks, parallel, world_size, run):g} GB/s"
        for axis, ranks in axes.items()
        if ranks > 1
    ]
    per_token = models.training_flops_per_token(config.model, length)
    return {
        "model FLOPs per token (forward and backward)": f"{per_token:.4g} ({with_unit(per_token, 'FLOP')})",
        "model FLOPs of the run": f"{flops:.4g} ({with_unit(flops, 'FLOP')})",
        "utilization assumed, while computing": f"{run.dry_mfu:.0%} of {run.dry_peak_tflops:g} TFLOP/s per rank",
        "bandwidth assumed, of a rank": ", ".join(bandwidths) or "none: nothing is sent",
        "time of the run": long_time(sum(phase.num_steps * time.seconds for phase, time in times)),
    }
