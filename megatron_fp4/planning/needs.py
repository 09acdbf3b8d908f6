"""What a run would need. `--check` opens what the run would open and ends in one line; `run.dry=true` prints tables:
memory, messages, FLOPs, time.

`--check` runs in this process alone and writes nothing but the cache of the built-in corpus. It looks at the checkpoint
without its tensors; what only the ranks together can find (another file on another node, a shared disk that is slow) a
start finds.

How long a step takes, by the largest of three bounds: what the GPU computes, what the links carry, what Python does.

    compute    what gpus.py expects of `parallel.gpu`, what is computed again (`train.activation_checkpointing`), and
               the part of the messages that nothing hides (`hidden`)
    messages   all those of the busiest axis
    host       Python for every linear of every micro-batch, and for what is computed again, unless CUDA graphs replay
               it: the GPU cannot be faster than it is given work

The constants are chosen from profiles on H200s, but those of a replay, which are assumed. docs/parallelism.md compares
planned steps with measured ones.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.checkpoint.find import Resumed, check_weights, preview
from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.removed_keys import refuse_removed
from megatron_fp4.config.schema import Config, ConfigError, ParallelConfig, RunConfig
from megatron_fp4.logging.console import (
    RunConsole,
    batch_table,
    counted,
    facts_table,
    long_time,
    make_table,
    plan_shares,
    plan_table,
    with_unit,
)
from megatron_fp4.planning.dry_run import DryRun, Message, dry_run
from megatron_fp4.planning.gpus import GPUS, Gpu, computes, seconds_of_a_token
from megatron_fp4.precision.plan import Plan, PrecisionController, PrecisionSwitch, recipes_in
from megatron_fp4.precision.rng import keyed_operands
from megatron_fp4.precision.support import why_not_native
from megatron_fp4.training.build import (
    check_samples,
    configuration_errors,
    device_type_of,
    graphs_refusal,
    plans_of,
    sharded_model,
    when_it_switches,
)
from megatron_fp4.training.optimizer import WSDSchedule
from megatron_fp4.training.providers import DataProvider, ModelProvider

_GIB = 2**30
# FSDP2 gathers the next unit's parameters while this one computes, and reduces during the backward pass.
_FSDP_AXES = ("dp", "replicate")
# Of a message, by what is asked for beside it: solved from two profiles on H200s. The 12B at tensor=4 hides 109 of 270
# ms (planned: 99 beside GEMMs, 17 beside quantizers, 123 beside nothing), a quarter of the 8B at tensor=2 hides 9.4 of
# 22.1 (planned: 5.6, 5.6, 3.1). FSDP's of the 12B on four: 216 of 230.
_HIDDEN = {"GEMM": 0.95, "others": 0.15, "nothing": 0.0}
# What ranks lose besides, of computing: they wait for the slowest, and tensor parallelism does not divide all kernels.
# 4 to 12% on two and four H200s.
_LOST_AMONG_RANKS = 0.07
# What selective activation checkpointing adds to computing: the 1.2B in BF16 on an H200 takes 509 ms for 500.
_SELECTIVE = 0.02
# Of a collective of a few bytes among neighbours: those of a step at tensor parallel size 4 on NVLink. A tree's depth
# multiplies it.
_LATENCY = 10e-6
# Of a micro-batch that is replayed from CUDA graphs, assumed: copying its inputs and two calls.
_HOST_MS_OF_A_REPLAY = 1.0
# Of each draw in it from a generator of its own, assumed: seeding it, and two tiny kernels (precision/rng.py).
_HOST_MS_OF_A_DRAW = 0.01
# Of Python, for each linear of a micro-batch; and what tensor parallelism adds, 0.53 s a micro-batch for the 12B's 124
# linears at size 4.
_HOST_MS = 3.0
_HOST_MS_OF_TENSOR_PARALLELISM = 1.3
# GB/s that a rank sends to ranks of other hosts (one adapter of 400 Gb/s).
_NETWORK_BANDWIDTH = 40.0


@dataclass(frozen=True)
class PlannedPhase:
    """A data phase: steps of batch_size samples of the run's sequence length, cut into sequences of its own."""

    name: str
    num_steps: int
    batch_size: int
    sequence_length: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. exposed: of messages that the computation waits for. links: of all messages on the busiest
    axis."""

    compute: float
    exposed: float
    links: float
    host: float

    @property
    def seconds(self) -> float:
        """The longest of the three."""
        return max(self.compute + self.exposed, self.links, self.host)

    @property
    def bound(self) -> str:
        """What bounds the step: `compute`, `messages` or `host`."""
        if self.host == self.seconds:
            return "host"
        return "compute" if self.compute + self.exposed == self.seconds and self.compute >= self.exposed else "messages"


def print_check(config: Config, models: ModelProvider, data: DataProvider) -> None:
    """Open data, tokenizer, checkpoint and run.dir, and print what the run would take.

    Raises ConfigError for whatever a start would refuse, as far as one process can see it; OSError.
    """
    place, steps = place_in_run(), config.train.steps
    if place.rank:  # under torchrun one rank looks, and says so
        return
    _check_run_dir(Path(config.run.dir))
    with configuration_errors():
        opened = data.open_alone(config)
        found = preview(config, run_identity(config, opened.fingerprint))
        start = 0 if found is None else found.step
        if found is not None:
            with configuration_errors(_of_checkpoint(config, start)):
                refuse_removed(found.trainer.get("config", {}))
                opened.loader.load_state_dict(found.trainer["loader"])
                check_samples(opened.phases, start, opened.loader.consumed_samples)
        opened.check_epochs(config.data.max_epochs)
    for line in (*opened.summary(), *_precision_lines(config, models)):
        print(line)
    weights = config.checkpoint.initialize_from
    begins = "none yet; begins at step 0" + ("" if weights is None else f" with the weights of {weights}")
    print(f"checkpoint: {begins if found is None else f'{found.folder}, step {start} of {steps}'}")
    for damage in found.damaged if found else ():
        print(f"checkpoint: NOT WHOLE, would be moved aside: {damage.name}: {damage.problem}")
    for change in opened.loader.changes:
        print(f"data: {change}")
    planned = as_planned(config, plans_of(config, models))
    execution = models.planned_execution(planned)
    dry, times = plan_run(planned, models, opened.phases, place.world_size, execution, found)
    _check_memory(config, dry.memory.peak)
    print(
        "memory and time: as planned for GPUs (run.dry=true has their parts), at "
        f"run.dry_mfu={config.run.dry_mfu:g} of the peak of parallel.gpu={planned.parallel.gpu}, without "
        "validation and saves"
    )
    seconds = sum(phase.num_steps * time.seconds for phase, time in times)
    rest = f", about {long_time(seconds)}{'' if device_type_of(config) == 'cuda' else ' on GPUs'}"
    rest += f" for the {steps - start:,} steps that are left" if start else ""
    rest = ", nothing left to do: the run is finished" if start == steps else rest
    tokens = opened.phases.samples_before(steps) * config.train.sequence_length
    print(f"ok: {counted(place.world_size, 'rank')}, {tokens:,} tokens, {dry.memory.peak / _GIB:.1f} GiB a rank{rest}")


def plan_run(
    config: Config, models: ModelProvider, phases: Any, ranks: int, execution: Any, found: Resumed | None = None
) -> tuple[DryRun, list[tuple[PlannedPhase, StepTime]]]:
    """What `config`, which is `as_planned`, needs on so many ranks with kernels that only allocate, and the time of a
    step of each phase that is left after the checkpoint `found`."""
    start = 0 if found is None else found.step

    def build(*parts: Any) -> tuple[torch.nn.Module, PrecisionController]:
        model, controller = sharded_model(config, models, *parts)
        if found is not None:
            with configuration_errors(_of_checkpoint(config, start)):
                controller.load_state_dict(found.trainer["switch"])
        with configuration_errors():
            check_weights(config, found, model)
        return model, controller

    dry, plans = dry_run(config, ranks, build, execution), plans_of(config, models)
    left = [
        PlannedPhase(span.name, steps, span.batch_size, span.sequence_length or config.train.sequence_length)
        for span in phases.spans
        if (steps := span.end_step - max(start, span.first_step)) > 0
    ]
    return dry, [(phase, step_time(config, models, ranks, dry, phase, plans)) for phase in left]


def print_dry_run(config: Config, models: ModelProvider, data: DataProvider) -> None:
    """Print what the run would need on WORLD_SIZE ranks, without running it.

    Raises ConfigError, after that, if it does not fit into the memory of `parallel.gpu`.
    """
    ranks, plans = place_in_run().world_size, plans_of(config, models)
    limited_to, config = config, as_planned(config, plans)
    execution = models.planned_execution(config)
    dry, times = plan_run(config, models, data.phases(config), ranks, execution)
    num_tokens = sum(phase.num_steps * phase.batch_size for phase, _ in times) * config.train.sequence_length
    console = RunConsole(config.train.steps)
    console.text(f"kernels: {models.describe_execution(execution, config)}")
    console.table(plan_table(plans[0], config.precision.name))
    console.table(batch_table(config.train, config.parallel, ranks, num_tokens))
    console.table(facts_table("Memory of a rank", _memory_facts(config, models, ranks, dry, plans)))
    if any(message.ranks > 1 for message in dry.messages):
        console.table(_messages_table(dry))
    console.table(_time_table(times, config, ranks))
    console.table(facts_table("Work and time", _time_facts(config, models, ranks, times)))
    _check_memory(limited_to, dry.memory.peak)


def _check_memory(config: Config, needed: int) -> None:
    """Raise ConfigError if a rank needs more than the GPU has that is named."""
    if config.parallel.gpu is not None and needed > (memory := gpu_of(config.parallel).memory) * _GIB:
        raise ConfigError(
            f"a rank needs {needed / _GIB:.1f} GiB and parallel.gpu={config.parallel.gpu} has "
            f"{memory:g}; set train.activation_checkpointing=selective, parallel.reshard=true or a smaller "
            "train.micro_batch_size, or raise parallel.tensor"
        )


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
        why = error.strerror or error
        raise ConfigError(f"run.dir={run_dir} cannot be written to ({why}); choose another run.dir") from error


def _of_checkpoint(config: Config, start: int) -> str:
    return f"checkpoint.resume={config.checkpoint.resume} starts from step {start}: "


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


def _memory_facts(
    config: Config, models: ModelProvider, ranks: int, dry: DryRun, plans: tuple[Plan, Plan | None]
) -> dict[str, object]:
    """Name -> size, in GiB."""
    memory, unreduced = dry.memory, "gradients before their reduction (FP32)"
    if memory.unreduced_gradients and config.parallel.shards(ranks) > 1:
        unreduced += "; none with parallel.reduce_gradients=each"
    sizes = {
        "parameters (FP32 shards)": memory.parameters,
        "optimizer state (FP32 moments)": memory.optimizer,
        "gradients (FP32 shards)": memory.parameters,
        unreduced: memory.unreduced_gradients,
        **({"sums of micro-batches (parallel.reproducible)": memory.kept_sums} if memory.kept_sums else {}),
        f"gathered parameters ({config.precision.compute_dtype})": memory.gathered,
        "quantized weights": memory.quantized_weights,
        "activations of a micro-batch": memory.activations,
        "workspaces of cuBLAS": memory.workspaces,
        "peak, temporaries included": memory.peak,
    }
    if 0 < _eager_micro_batches(config, ranks, plans, dry.micro_batches) < dry.micro_batches:
        sizes["CUDA graphs, besides the peak (none without room)"] = memory.activations
    shares = f"{memory.num_parameters:,} of {models.parameter_count(config.model).total:,}"
    return {"parameters of the rank": shares, **{name: f"{size / _GIB:.2f} GiB" for name, size in sizes.items()}}


def _messages_table(dry: DryRun) -> Table:
    """The collectives of a step of the largest batch, by volume; sizes of a kind are summed up."""
    kinds: dict[tuple[str, str, int], list[tuple[int, float, float]]] = {}
    for message, count in dry.messages.items():
        if message.ranks > 1:
            kind = (message.operation, message.group, message.ranks)
            kinds.setdefault(kind, []).append((count, count * message.num_bytes, count * message.sent_bytes))
    rows = []
    for (operation, group, ranks), sizes in sorted(kinds.items(), key=lambda item: -sum(row[2] for row in item[1])):
        count, num_bytes, sent = (sum(column) for column in zip(*sizes, strict=True))
        mean = f"{num_bytes / count / 2**20:.2f}"
        rows.append((operation, group, str(ranks), f"{count:,}", mean, f"{sent / _GIB:.3f}"))
    title = f"Collectives of a step, per rank ({counted(dry.micro_batches, 'micro-batch', 'micro-batches')})"
    return make_table(title, ["collective", "over", "ranks", "number>", "MiB each>", "GiB sent>"], rows)


def _time_table(times: Sequence[tuple[PlannedPhase, StepTime]], config: Config, ranks: int) -> Table:
    """A step of each phase that differs in batch or sequences: what bounds it."""
    rows: dict[tuple[int, int], Sequence[str]] = {}
    for phase, time in times:
        tokens = phase.batch_size * config.train.sequence_length
        batch = f"{tokens // phase.sequence_length:,} x {phase.sequence_length:,}"
        parts = (time.compute, time.exposed, time.links, time.host, time.seconds)
        milliseconds = [f"{1e3 * part:,.0f}" if part >= 0.1 else f"{1e3 * part:.3g}" for part in parts]
        row = (phase.name, batch, *milliseconds, time.bound, f"{tokens / time.seconds / ranks:,.0f}")
        rows.setdefault((phase.batch_size, phase.sequence_length), row)
    numbers = ["compute>", "waited for messages>", "all messages>", "host>", "step>", "bound by>", "tokens/s a rank>"]
    return make_table("Time of a step, in ms", ["phase", "batch", *numbers], [*rows.values()])


def _time_facts(
    config: Config, models: ModelProvider, ranks: int, times: Sequence[tuple[PlannedPhase, StepTime]]
) -> dict[str, object]:
    """FLOPs, the time of the run, and what is assumed."""
    run, parallel, length = config.run, config.parallel, config.train.sequence_length
    per_token, flops = models.training_flops_per_token(config.model, length), 0
    for phase, _ in times:
        of_phase = models.training_flops_per_token(config.model, phase.sequence_length)
        flops += of_phase * phase.num_steps * phase.batch_size * length
    axes = {"tp": parallel.tensor, "dp": parallel.shards(ranks), "replicate": parallel.replicate}
    bandwidths = [
        f"{axis} {axis_bandwidth(axis, size, parallel, ranks, run):g} GB/s" for axis, size in axes.items() if size > 1
    ]
    return {
        "model FLOPs per token (forward and backward)": f"{per_token:.4g} ({with_unit(per_token, 'FLOP')})",
        "model FLOPs of the run": f"{flops:.4g} ({with_unit(flops, 'FLOP')})",
        "assumed while computing": f"BF16 at {run.dry_mfu:.0%} of {gpu_of(parallel).bf16:g} TFLOP/s per rank",
        "linears by": config.precision.backend,
        "bandwidth assumed, of a rank": ", ".join(bandwidths) or "none: nothing is sent",
        "time of the run": long_time(sum(phase.num_steps * time.seconds for phase, time in times)),
    }


def hidden(message: Message) -> float:
    """The share of it that runs beside computing, as measured; FSDP2's run beside GEMMs (`DryRun.ends` apart)."""
    return _HIDDEN["GEMM" if message.group in _FSDP_AXES else message.beside]


def step_time(
    config: Config,
    models: ModelProvider,
    ranks: int,
    dry: DryRun,
    phase: PlannedPhase,
    plans: tuple[Plan, Plan | None],
) -> StepTime:
    """The bounds of a step of `phase` on so many ranks. config: `as_planned`. plans: before and after the switch; time
    is that before it."""
    train, run, parallel, backend = config.train, config.run, config.parallel, config.precision.backend
    micro_batches = phase.batch_size // (train.micro_batch_size * parallel.data_parallel_size(ranks))
    exposed, links = 0.0, dict[str, float]()
    for message, count in dry.messages_of(micro_batches).items():
        if message.ranks == 1:
            continue
        # Its bytes round a ring, and a tree's latency.
        bandwidth = axis_bandwidth(message.group, message.ranks, parallel, ranks, run)
        seconds = _LATENCY * math.ceil(math.log2(message.ranks)) + message.sent_bytes / (bandwidth * 1e9)
        ends = min(dry.ends.get(message, 0), count)
        exposed += (ends + (count - ends) * (1 - hidden(message))) * seconds
        links[message.group] = links.get(message.group, 0.0) + count * seconds
    of_linear = _HOST_MS + (_HOST_MS_OF_TENSOR_PARALLELISM if parallel.tensor > 1 else 0.0)
    of_replay = _HOST_MS_OF_A_REPLAY
    if backend == "transformer_engine":
        of_replay += _HOST_MS_OF_A_DRAW * len(keyed_operands({row.linear.name: row.recipe for row in plans[0].rows}))
    flops = models.training_flops_per_token(config.model, phase.sequence_length)
    of_token = seconds_of_a_token(gpu_of(parallel), plans[0], flops, run.dry_mfu, backend != "emulated")
    # The forward pass is a third of the FLOPs, and assumed to be a third of Python's time; its head is not computed
    # again.
    in_blocks = 1 / 3 - 2 * models.parameter_count(config.model).head / flops
    again = {"none": 0.0, "selective": _SELECTIVE, "block": in_blocks}[train.activation_checkpointing]
    eager = _eager_micro_batches(config, ranks, plans, micro_batches)
    eager_ms = (1 + again) * len(models.linear_shapes(config.model)) * of_linear
    host_ms = eager * eager_ms + (micro_batches - eager) * of_replay
    lost = _LOST_AMONG_RANKS if ranks > 1 else 0.0
    return StepTime(
        compute=(1 + again) * (1 + lost) * phase.batch_size * train.sequence_length * of_token / ranks,
        exposed=exposed,
        links=max(links.values(), default=0.0),
        host=host_ms / 1e3,
    )


def _eager_micro_batches(config: Config, ranks: int, plans: tuple[Plan, Plan | None], micro_batches: int) -> int:
    """Of a step's `micro_batches` on a rank those that CUDA graphs do not replay."""
    if graphs_refusal(config, ranks, "cuda", config.precision.backend, recipes_in(plans)) is not None:
        return micro_batches
    return 0 if config.parallel.data_parallel_size(ranks) == 1 else min(2, micro_batches)


def as_planned(config: Config, plans: tuple[Plan, Plan | None]) -> Config:
    """With the GPU and the backend named that are planned for. Without a name the GPU is an H100, or a B200 for a
    backend whose codes an H100 does not multiply; the backend Transformer Engine's where the GPU has tensor cores for
    4 bits and it can compute the linears. Raises ConfigError for a backend on a GPU that does not multiply its codes.
    """
    name, backend = config.parallel.gpu or "h100", config.precision.backend
    if backend == "auto":
        quantized = any(plan.num_quantized for plan in plans if plan is not None)
        native = GPUS[name].fp4 and quantized and why_not_native("transformer_engine", config, plans) is None
        backend = "transformer_engine" if native else "emulated"
    elif backend != "emulated" and not all(computes(GPUS[name], plan) for plan in plans if plan is not None):
        if config.parallel.gpu is not None:
            raise ConfigError(
                f"parallel.gpu={name} has no tensor cores for 4 bits, which precision.backend={backend} multiplies "
                "with; give parallel.gpu=b200, or precision.backend=emulated"
            )
        name = "b200"
    parallel, precision = replace(config.parallel, gpu=name), replace(config.precision, backend=backend)
    return replace(config, parallel=parallel, precision=precision)


def gpu_of(parallel: ParallelConfig) -> Gpu:
    """The GPU that is planned for."""
    return GPUS[parallel.gpu or "h100"]


def axis_bandwidth(group: str, size: int, parallel: ParallelConfig, ranks: int, run: RunConfig) -> float:
    """GB/s that each rank of a group of `size` ranks sends: over the links within a host or, where the group spans
    several, over its ranks' network adapters together, since a ring enters and leaves each host once on every adapter.
    """
    strides = {"tp": 1, "dp": parallel.tensor, "replicate": parallel.tensor * parallel.shards(ranks)}
    neighbours = min(size, max(1, run.dry_ranks_per_host // strides.get(group, 1)))
    if neighbours == size:
        return gpu_of(parallel).links
    return min(gpu_of(parallel).links, neighbours * _NETWORK_BANDWIDTH)
