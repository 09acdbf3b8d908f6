"""What a run would need, as tables: memory, messages, FLOPs, time.

How long a step takes, by the largest of three bounds: what the GPU computes, what the links carry, what Python does.

    compute    model FLOPs over `run.dry_mfu` of the peak, plus the messages that nothing hides
    messages   those that run beside the computation, on the busiest axis
    host       Python for every linear of every micro-batch, unless CUDA graphs replay it: the GPU cannot be faster
               than it is given work

Which messages are hidden is known by who sends them (`hidden`). The constants are chosen from profiles on H200s, but
that of a replay, which is assumed; the keys `run.dry_*` replace those that depend on the machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from megatron_fp4.config.schema import Config, ParallelConfig, RunConfig
from megatron_fp4.logging.console import (
    RunConsole,
    batch_table,
    counted,
    facts_table,
    long_time,
    make_table,
    plan_table,
    with_unit,
)
from megatron_fp4.planning.dry_run import Build, DryRun, Message, dry_run
from megatron_fp4.precision.plan import Plan, recipes_in
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.training.cuda_graphs import choose_graphs
from megatron_fp4.training.providers import ModelProvider

_GIB = 2**30
# FSDP2 gathers the next unit's parameters while this one computes, and reduces behind the backward pass.
_FSDP_AXES = ("dp", "replicate")
# Of a collective of a few bytes among neighbours: those of a step at tensor parallel size 4 on NVLink. A tree's depth
# multiplies it.
_LATENCY = 10e-6
# Of a micro-batch that is replayed from CUDA graphs, assumed: copying its inputs and two calls.
_HOST_MS_OF_A_REPLAY = 1.0
# Of Python, for each linear of a micro-batch; and what tensor parallelism adds, 0.53 s a micro-batch for the 12B's 124
# linears at size 4.
_HOST_MS = 3.0
_HOST_MS_OF_TENSOR_PARALLELISM = 1.3
# GB/s that a rank sends to ranks of its host (NVLink) and of others (one adapter of 400 Gb/s).
_HOST_BANDWIDTH, _NETWORK_BANDWIDTH = 300.0, 40.0


@dataclass(frozen=True)
class PlannedPhase:
    """A data phase: steps of batch_size samples of the run's sequence length, cut into sequences of its own."""

    name: str
    num_steps: int
    batch_size: int
    sequence_length: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. exposed: messages that the computation waits for. hidden: those beside it."""

    compute: float
    exposed: float
    hidden: float
    host: float

    @property
    def seconds(self) -> float:
        """The longest of the three."""
        return max(self.compute + self.exposed, self.hidden, self.host)

    @property
    def bound(self) -> str:
        """What bounds the step: `compute`, `messages` or `host`."""
        if self.host == self.seconds:
            return "host"
        return "compute" if self.compute + self.exposed == self.seconds and self.compute >= self.exposed else "messages"


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
    console.table(plan_table(plans[0], config.precision.name))
    num_tokens = sum(phase.num_steps * phase.batch_size for phase in phases) * config.train.sequence_length
    console.table(batch_table(config.train, config.parallel, world_size, num_tokens))
    console.table(facts_table("Memory of a rank", memory_facts(config, models, world_size, dry)))
    if any(message.ranks > 1 for message in dry.messages):
        console.table(messages_table(dry))
    times = [(phase, step_time(config, models, world_size, dry, phase, recipes_in(plans))) for phase in phases]
    console.table(time_table(times, config, world_size))
    console.table(facts_table("Work and time", time_facts(config, models, world_size, times)))


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
    # Ordered by volume; sizes of a kind are summed up, largest kinds first.
    kinds: dict[tuple[str, str, int], list[tuple[int, float, float]]] = {}
    for message, count in dry.messages.items():
        if message.ranks > 1:
            kind = (message.operation, message.group, message.ranks)
            kinds.setdefault(kind, []).append((count, count * message.num_bytes, count * message.sent_bytes))
    rows = []
    for (operation, group, ranks), sizes in sorted(kinds.items(), key=lambda item: -sum(row[2] for row in item[1])):
        count, num_bytes, sent = (sum(column) for column in zip(*sizes, strict=True))
        numbers = f"{count:,}", f"{num_bytes / count / 2**20:.2f}", f"{sent / _GIB:.3f}"
        rows.append((operation, group, str(ranks), *numbers))
    return make_table(title, ["collective", "over", "ranks", "number>", "MiB each>", "GiB sent>"], rows)


def time_table(times: Sequence[tuple[PlannedPhase, StepTime]], config: Config, world_size: int) -> Table:
    """A step of each phase that differs in batch or sequences: what bounds it."""
    rows, shown = [], set()
    for phase, time in times:
        kind = phase.batch_size, phase.sequence_length
        if kind not in shown:
            shown.add(kind)
            tokens = phase.batch_size * config.train.sequence_length
            parts = (time.compute, time.exposed, time.hidden, time.host, time.seconds)
            rate = f"{tokens / time.seconds / world_size:,.0f}"
            batch = f"{tokens // phase.sequence_length:,} x {phase.sequence_length:,}"
            rows.append((phase.name, batch, *(_milliseconds(seconds) for seconds in parts), time.bound, rate))
    numbers = ["compute>", "messages: waited for>", "hidden>", "host>", "step>", "bound by>", "tokens/s a rank>"]
    return make_table("Time of a step, in ms", ["phase", "batch", *numbers], rows)


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


def hidden(message: Message) -> bool:
    """Whether computation runs beside it: FSDP2 sends it (`DryRun.ends` apart), or something else is asked for between
    sending it with `async_op=True` and waiting for it."""
    return message.is_async or message.group in _FSDP_AXES


def step_time(
    config: Config,
    models: ModelProvider,
    world_size: int,
    dry: DryRun,
    phase: PlannedPhase,
    recipes: Iterable[Recipe] = (),
) -> StepTime:
    """The bounds of a step of `phase` on `world_size` ranks. recipes: of the linears."""
    train, run, parallel = config.train, config.run, config.parallel
    micro_batches = phase.batch_size // (train.micro_batch_size * parallel.data_parallel_size(world_size))
    flops = (
        models.training_flops_per_token(config.model, phase.sequence_length) * phase.batch_size * train.sequence_length
    )
    exposed, beside = 0.0, Counter[str]()
    for message, count in dry.messages_of(micro_batches).items():
        seconds = message_seconds(message, parallel, world_size, run)
        waited_for = min(dry.ends.get(message, 0), count) if hidden(message) else count
        exposed += waited_for * seconds
        beside[message.group] += (count - waited_for) * seconds  # type: ignore[assignment]
    of_linear = _HOST_MS + (_HOST_MS_OF_TENSOR_PARALLELISM if parallel.tensor > 1 else 0.0)
    host_ms = len(models.linear_shapes(config.model)) * of_linear
    backend = config.precision.backend
    if choose_graphs(config, world_size, "cuda", "emulated" if backend == "auto" else backend, recipes).used:
        host_ms = _HOST_MS_OF_A_REPLAY
    return StepTime(
        compute=flops / (world_size * run.dry_peak_tflops * 1e12 * run.dry_mfu),
        exposed=exposed,
        hidden=max(beside.values(), default=0.0),
        host=micro_batches * host_ms / 1e3,
    )


def message_seconds(message: Message, parallel: ParallelConfig, world_size: int, run: RunConfig) -> float:
    """Of one collective: its bytes round a ring, and a tree's latency."""
    if message.ranks == 1:
        return 0.0
    bandwidth = axis_bandwidth(message.group, message.ranks, parallel, world_size, run)
    return _LATENCY * math.ceil(math.log2(message.ranks)) + message.sent_bytes / (bandwidth * 1e9)


def axis_bandwidth(group: str, ranks: int, parallel: ParallelConfig, world_size: int, run: RunConfig) -> float:
    """GB/s that each rank of a group sends: over the links within a host or, where the group spans several, over its
    ranks' network adapters together, since a ring enters and leaves each host once on every adapter."""
    strides: Mapping[str, int] = {
        "tp": 1,
        "dp": parallel.tensor,
        "replicate": parallel.tensor * parallel.shards(world_size),
    }
    neighbours = min(ranks, max(1, run.dry_ranks_per_host // strides.get(group, 1)))
    if neighbours == ranks:
        return _HOST_BANDWIDTH
    return min(_HOST_BANDWIDTH, neighbours * _NETWORK_BANDWIDTH)
