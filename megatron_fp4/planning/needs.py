"""What a run would need. `--check` opens what the run would open, and prints whether a start would work; `run.dry=true`
prints tables: memory, messages, FLOPs, time.

`--check` runs in one process and writes nothing but the cache of the built-in corpus. It reads the checkpoint without
its tensors. Faults between ranks (a file that differs, a slow shared disk) show at the start.

The time of a step is the longest of three bounds:

    compute    the time that gpus.py expects on `parallel.gpu`, recomputation (`train.activation_checkpointing`), and
               the messages that computation does not hide (`hidden_share`)
    messages   all messages of the busiest mesh axis
    host       Python's time for every linear of every micro-batch and for recomputation, unless CUDA graphs replay
               them: the GPU cannot be faster than the host launches its work

The constants come from profiles on H200s; those of a replay are assumed. docs/parallelism.md compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from megatron_fp4.checkpoint.config_diff import refuse_finished, run_identity
from megatron_fp4.checkpoint.files import well_formed
from megatron_fp4.checkpoint.find import Resumed, check_state, preview
from megatron_fp4.config.axes import AXES, ROWS
from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.schema import Config, ConfigError, ParallelConfig, RunConfig
from megatron_fp4.logging import console as tables
from megatron_fp4.planning.dry_run import BATCH_AXES, DryRun, Message, dry_run
from megatron_fp4.planning.gpus import GPUS, Gpu, multiplies_codes, seconds_of_a_token
from megatron_fp4.precision.plan import Plan, PrecisionController, PrecisionSwitch
from megatron_fp4.precision.rng import keyed_operands
from megatron_fp4.precision.support import emulated_linears, why_not_native
from megatron_fp4.runtime.run_state import cannot_be_written, try_folder, written_folders
from megatron_fp4.training import build as setup
from megatron_fp4.training.optimizer import WSDSchedule
from megatron_fp4.training.providers import DataProvider, ModelProvider

_GIB = 2**30
# The share of a message that is hidden, by `Message.beside`. Solved from two profiles on H200s: the 12B at tensor=4
# hides 109 of 270 ms (planned: 99 beside GEMMs, 17 beside quantizers, 123 beside nothing), a quarter of the 8B at
# tensor=2 hides 9.4 of 22.1 ms (planned: 5.6, 5.6, 3.1). FSDP of the 12B on four GPUs hides 216 of 230 ms.
_HIDDEN = {"GEMM": 0.95, "others": 0.15, "nothing": 0.0}
# Of the rows that experts exchange, beside half of the shared expert (assumed: so long it computes on a B200, for
# Nemotron 3 Nano among eight ranks).
_HIDDEN_EXCHANGE = 0.3
# The share of compute that several ranks add: they wait for the slowest, and tensor parallelism does not divide all
# kernels. 4 to 12% on two and four H200s.
_LOST_AMONG_RANKS = 0.07
# The share of compute that selective activation checkpointing adds: the 1.2B in BF16 on an H200 takes 509 ms, not 500.
_SELECTIVE = 0.02
# Seconds of a collective of a few bytes between two ranks, on NVLink; times the depth of a tree of ranks.
_LATENCY = 10e-6
# A micro-batch that CUDA graphs replay (assumed): the copies of its inputs and two calls.
_HOST_MS_OF_A_REPLAY = 1.0
# Each operand in it that draws from a generator (assumed): seeding, and two tiny kernels (precision/rng.py).
_HOST_MS_OF_A_DRAW = 0.01
# Python's time for each linear of a micro-batch, and what tensor parallelism adds to it: from the 12B at size 4.
_HOST_MS = 3.0
_HOST_MS_OF_TENSOR_PARALLELISM = 1.3
# GB/s that a rank sends to ranks of other hosts (one adapter of 400 Gb/s).
_NETWORK_BANDWIDTH = 40.0


@dataclass(frozen=True)
class PlannedPhase:
    """A data phase. batch_size: samples of `train.sequence_length` tokens, cut into sequences of `sequence_length`."""

    name: str
    num_steps: int
    batch_size: int
    sequence_length: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. exposed: messages that computation waits for. links: all messages of the busiest mesh axis."""

    compute: float
    exposed: float
    links: float
    host: float

    @property
    def seconds(self) -> float:
        return max(self.compute + self.exposed, self.links, self.host)

    @property
    def bound(self) -> str:
        """Which one is the longest: `compute`, `messages` or `host`."""
        if self.host == self.seconds:
            return "host"
        return "compute" if self.compute + self.exposed == self.seconds and self.compute >= self.exposed else "messages"


def print_check(config: Config, models: ModelProvider, data: DataProvider) -> None:
    """Open data, tokenizer and checkpoint, check run.dir, and print what the run would need.

    Raises ConfigError for everything that a start would refuse and one process can see; OSError.
    """
    place, steps = place_in_run(), config.train.steps
    if place.rank:  # under torchrun the first rank alone checks and prints
        return
    _check_folders(config)
    with setup.configuration_errors():
        opened = data.open_alone(config)
        found = preview(config, run_identity(config, opened.fingerprint))
        start = 0 if found is None else found.step
        if found is not None:
            with setup.configuration_errors(_of_checkpoint(config, start)), well_formed("its trainer.json"):
                setup.load_data(opened, found.trainer, start)
            refuse_finished(found.trainer.get("config", {}), config, start)
        opened.check_epochs(config.data.max_epochs)
    for line in (*opened.summary(), *_precision_lines(config, models)):
        print(line)
    weights = config.checkpoint.initialize_from
    begins = "none yet; begins at step 0" + ("" if weights is None else f" with the weights of {weights}")
    print(f"checkpoint: {begins if found is None else f'{found.folder}, step {start} of {steps}'}")
    for damage in found.damaged if found else ():
        print(f"checkpoint: DAMAGED, would be moved aside: {damage.name}: {damage.problem}")
    for change in opened.loader.changes:
        print(f"data: {change}")
    planned = as_planned(config, setup.plans_of(config, models))
    dry, times = plan_run(planned, models, opened.phases, place.world_size, found)
    _check_memory(config, dry.memory.peak, lambda other: _peak(other, models, data, place.world_size))
    print(
        "memory and time: as planned for GPUs (run.dry=true has their parts), at "
        f"run.dry_mfu={config.run.dry_mfu:g} of the peak of parallel.gpu={planned.parallel.gpu}, without "
        "validation and saves"
    )
    seconds = sum(phase.num_steps * time.seconds for phase, time in times)
    rest = f", about {tables.long_time(seconds)}{'' if setup.device_type_of(config) == 'cuda' else ' on GPUs'}"
    rest += f" for the {steps - start:,} steps that are left" if start else ""
    rest = ", nothing left to do: the run is finished" if start == steps else rest
    tokens = opened.phases.samples_before(steps) * config.train.sequence_length
    needs = f"{dry.memory.peak / _GIB:.1f} GiB a rank{_smallest_gpu(config, dry.memory.peak)}"
    print(f"ok: {tables.counted(place.world_size, 'rank')}, {tokens:,} tokens, {needs}{rest}")


def plan_run(
    config: Config, models: ModelProvider, phases: Any, ranks: int, found: Resumed | None = None
) -> tuple[DryRun, list[tuple[PlannedPhase, StepTime]]]:
    """What it needs on `ranks` ranks, and the time of a step in each phase left after the checkpoint `found`.

    config: as `as_planned` returns it.
    """
    start = 0 if found is None else found.step

    def build(mesh: Any, step_state: Any, backend: Any) -> tuple[torch.nn.Module, PrecisionController]:
        execution = models.planned_execution(config)
        model, controller = setup.sharded_model(config, models, mesh, step_state, execution, backend)
        if found is not None:
            with setup.configuration_errors(_of_checkpoint(config, start)):
                controller.load_state_dict(found.trainer["switch"])
        return model, controller

    with setup.configuration_errors():
        dry = dry_run(config, ranks, build, partial(check_state, config, found))
    plans = setup.plans_of(config, models)
    left = [
        PlannedPhase(span.name, steps, span.batch_size, span.sequence_length or config.train.sequence_length)
        for span in phases.spans
        if (steps := span.end_step - max(start, span.first_step)) > 0
    ]
    return dry, [(phase, step_time(config, models, ranks, dry, phase, plans)) for phase in left]


def print_dry_run(config: Config, models: ModelProvider, data: DataProvider) -> None:
    """Print what the run would need on WORLD_SIZE ranks, without running it.

    Raises ConfigError, after printing, if it does not fit into the memory of `parallel.gpu`.
    """
    ranks, plans = place_in_run().world_size, setup.plans_of(config, models)
    limited_to, config = config, as_planned(config, plans)
    dry, times = plan_run(config, models, data.phases(config), ranks)
    num_tokens = sum(phase.num_steps * phase.batch_size for phase, _ in times) * config.train.sequence_length
    console = tables.RunConsole(config.train.steps)
    console.text(f"kernels: {models.describe_execution(models.planned_execution(config), config)}")
    emulated = emulated_linears(plans[0], config.precision.backend)
    console.table(tables.plan_table(plans[0], config.precision.name, emulated))
    console.table(tables.batch_table(config.train, config.parallel, ranks, num_tokens))
    console.table(tables.facts_table("Memory of a rank", _memory_facts(config, models, ranks, dry)))
    if any(message.ranks > 1 for message in dry.messages):
        console.table(_messages_table(dry))
    console.table(_time_table(times, config, ranks))
    console.table(tables.facts_table("Work and time", _time_facts(config, models, ranks, times)))
    _check_memory(limited_to, dry.memory.peak, lambda other: _peak(other, models, data, ranks))


def _peak(config: Config, models: ModelProvider, data: DataProvider, ranks: int) -> int:
    setup.check(config, models, data, ranks, "cuda")
    planned = as_planned(config, setup.plans_of(config, models))
    return plan_run(planned, models, data.phases(config), ranks)[0].memory.peak


def _check_folders(config: Config) -> None:
    run_dir = Path(config.run.dir)
    for name in ("", *written_folders(config)):
        try:
            try_folder(run_dir, name)
        except OSError as error:
            raise cannot_be_written(run_dir, error) from error


def _smallest_gpu(config: Config, needed: int) -> str:
    if config.parallel.gpu is not None:
        return ""
    *_, largest = by_memory = sorted(GPUS, key=lambda name: GPUS[name].memory)
    if (smallest := next((name for name in by_memory if GPUS[name].memory * _GIB >= needed), None)) is None:
        return f" (WARNING: more than the {GPUS[largest].memory:g} of {largest})"
    return f" (fits {smallest}: {GPUS[smallest].memory:g})"


def _check_memory(config: Config, needed: int, peak_of: Callable[[Config], int]) -> None:
    """Raise ConfigError if a rank needs more bytes than `parallel.gpu` has; none named: no limit. peak_of: the bytes
    that another configuration needs; the remedy is one that it says fits."""
    if config.parallel.gpu is None or needed <= (memory := gpu_of(config.parallel).memory) * _GIB:
        return
    changes, best = dict[str, Any](), needed
    for key, value in _savings(config):
        try:
            needed_then = peak_of(_with(config, {**changes, key: value}))
        except ValueError:  # not possible in this run
            continue
        if needed_then < 0.99 * best:  # a smaller saving is no remedy
            changes[key], best = value, needed_then
        if best <= memory * _GIB:
            break
    remedy = " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
    if best <= memory * _GIB:
        remedy = f"set {remedy} ({best / _GIB:.1f} GiB)"
    else:
        with_all = f" even with {remedy} it needs {best / _GIB:.1f}:" if remedy else ""
        remedy = f"{with_all} use more ranks, a GPU with more memory, or a smaller model".lstrip()
    raise ConfigError(
        f"a rank needs {needed / _GIB:.1f} GiB, parallel.gpu={config.parallel.gpu} has {memory:g}; {remedy}"
    )


def _with(config: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _savings(config: Config) -> Iterator[tuple[str, Any]]:
    """Changes that may save memory and are not in force, what costs least time first."""
    parallel, train = config.parallel, config.train
    if parallel.expert == 1:
        yield "parallel.expert", config.run.dry_ranks_per_host // parallel.tensor
    if parallel.reduce_gradients != "each":
        yield "parallel.reduce_gradients", "each"
    if train.activation_checkpointing == "none":
        yield "train.activation_checkpointing", "selective"
    if not parallel.reshard:
        yield "parallel.reshard", True
    if train.activation_checkpointing != "block":
        yield "train.activation_checkpointing", "block"
    if train.micro_batch_size > 1:
        yield "train.micro_batch_size", 1
    for factor in (2, 4, 8):
        yield "parallel.tensor", factor * parallel.tensor


def _of_checkpoint(config: Config, start: int) -> str:
    return f"checkpoint.resume={config.checkpoint.resume} starts from step {start}: "


def _precision_lines(config: Config, models: ModelProvider) -> Iterator[str]:
    before, after = setup.plans_of(config, models)
    yield f"precision: {tables.plan_shares(before)}"
    if warning := before.warning(config.precision.name):
        yield warning
    switch, steps = config.precision.switch, config.train.steps
    at = WSDSchedule.of(config).switch_step(switch.when)
    if after is not None and (at is None or at < steps):
        when = setup.when_it_switches(PrecisionSwitch(switch, at), steps)
        yield f"precision switches {when}: {tables.plan_shares(after)}"


def _memory_facts(config: Config, models: ModelProvider, ranks: int, dry: DryRun) -> dict[str, object]:
    memory, unreduced = dry.memory, "gradients before their reduction (FP32)"
    if memory.unreduced_gradients and config.parallel.shards(ranks) > 1 and config.parallel.expert == 1:
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
    shares = f"{memory.num_parameters:,} of {models.parameter_count(config.model).total:,}"
    return {"parameters of the rank": shares, **{name: f"{size / _GIB:.2f} GiB" for name, size in sizes.items()}}


def _messages_table(dry: DryRun) -> Table:
    """The collectives of a step of the largest batch, one row for each kind, the kind that sends most first."""
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
    title = f"Collectives of a step, per rank ({tables.counted(dry.micro_batches, 'micro-batch', 'micro-batches')})"
    return tables.make_table(title, ["collective", "over", "ranks", "number>", "MiB each>", "GiB sent>"], rows)


def _time_table(times: Sequence[tuple[PlannedPhase, StepTime]], config: Config, ranks: int) -> Table:
    """The time of a step in each phase. Phases of the same batch size and sequence length share a row."""
    rows: dict[tuple[int, int], Sequence[str]] = {}
    for phase, time in times:
        tokens = phase.batch_size * config.train.sequence_length
        batch = f"{tokens // phase.sequence_length:,} x {phase.sequence_length:,}"
        parts = (time.compute, time.exposed, time.links, time.host, time.seconds)
        milliseconds = [f"{1e3 * part:,.0f}" if part >= 0.1 else f"{1e3 * part:.3g}" for part in parts]
        row = (phase.name, batch, *milliseconds, time.bound, f"{tokens / time.seconds / ranks:,.0f}")
        rows.setdefault((phase.batch_size, phase.sequence_length), row)
    numbers = ["compute>", "waited for messages>", "busiest axis>", "host>", "step>", "bound by>", "tokens/s a rank>"]
    return tables.make_table("Time of a step, in ms", ["phase", "batch", *numbers], [*rows.values()])


def _time_facts(
    config: Config, models: ModelProvider, ranks: int, times: Sequence[tuple[PlannedPhase, StepTime]]
) -> dict[str, object]:
    run, parallel, length = config.run, config.parallel, config.train.sequence_length
    per_token, flops = models.training_flops_per_token(config.model, length), 0
    for phase, _ in times:
        of_phase = models.training_flops_per_token(config.model, phase.sequence_length)
        flops += of_phase * phase.num_steps * phase.batch_size * length
    bandwidths = [
        f"{axis.name} {axis_bandwidth(axis.name, size, parallel, ranks, run):g} GB/s"
        for axis, size in reversed(parallel.axis_sizes(ranks).items())
        if size > 1
    ]
    seconds = sum(phase.num_steps * time.seconds for phase, time in times)
    tokens = sum(phase.num_steps * phase.batch_size * length for phase, _ in times)
    joules = seconds * ranks * gpu_of(parallel).watts
    return {
        "model FLOPs per token (forward and backward)": f"{per_token:.4g} ({tables.with_unit(per_token, 'FLOP')})",
        "model FLOPs of the run": f"{flops:.4g} ({tables.with_unit(flops, 'FLOP')})",
        "assumed while computing": f"BF16 at {run.dry_mfu:.0%} of {gpu_of(parallel).bf16:g} TFLOP/s per rank",
        "linears by": config.precision.backend,
        "bandwidth assumed, of a rank": ", ".join(bandwidths) or "none: nothing is sent",
        "time of the run": tables.long_time(seconds),
        "energy, if the GPUs take their most": f"{joules / max(1, tokens):.3g} J per token, {joules / 3.6e6:.3g} kWh",
    }


def hidden_share(message: Message) -> float:
    """The measured share beside computation. FSDP2's messages run beside GEMMs, but for `DryRun.ends`."""
    if message.operation == "all-to-all" and message.group not in BATCH_AXES and message.beside == "GEMM":
        return _HIDDEN_EXCHANGE
    return _HIDDEN["GEMM" if message.group in BATCH_AXES else message.beside]


def step_time(
    config: Config, models: ModelProvider, ranks: int, dry: DryRun, phase: PlannedPhase, plans: tuple[Plan, Plan | None]
) -> StepTime:
    """The bounds of a step of `phase` on `ranks` ranks, before the precision switch.

    config: as `as_planned` returns it. plans: before and after the switch.
    """
    train, run, parallel, backend = config.train, config.run, config.parallel, config.precision.backend
    micro_batches = phase.batch_size // (train.micro_batch_size * parallel.data_parallel_size(ranks))
    exposed, links = 0.0, dict[str, float]()
    for message, count in dry.messages_of(micro_batches).items():
        if message.ranks == 1:
            continue
        # A ring's bandwidth and a tree's latency.
        bandwidth = axis_bandwidth(message.group, message.ranks, parallel, ranks, run)
        seconds = _LATENCY * math.ceil(math.log2(message.ranks)) + message.sent_bytes / (bandwidth * 1e9)
        ends = min(dry.ends.get(message, 0), count)
        exposed += (ends + (count - ends) * (1 - hidden_share(message))) * seconds
        links[message.group] = links.get(message.group, 0.0) + count * seconds
    of_linear = _HOST_MS + (_HOST_MS_OF_TENSOR_PARALLELISM if parallel.tensor > 1 else 0.0)
    of_replay = _HOST_MS_OF_A_REPLAY
    if backend == "transformer_engine":
        of_replay += _HOST_MS_OF_A_DRAW * len(keyed_operands({row.linear.name: row.recipe for row in plans[0].rows}))
    flops = models.training_flops_per_token(config.model, phase.sequence_length)
    emulated = emulated_linears(plans[0], backend)
    of_token = seconds_of_a_token(gpu_of(parallel), plans[0], flops, run.dry_mfu, emulated)
    # The forward pass is a third of the FLOPs and of Python's time (assumed). `block` repeats it, except the head.
    forward_of_blocks = 1 / 3 - 2 * models.parameter_count(config.model).head / flops
    recomputed = {"none": 0.0, "selective": _SELECTIVE, "block": forward_of_blocks}[train.activation_checkpointing]
    replayed = setup.graphs_refusal(config, ranks, "cuda", backend, plans) is None
    of_eager = (1 + recomputed) * len(plans[0].rows) * of_linear
    host_ms = micro_batches * (of_replay if replayed else of_eager)
    lost = _LOST_AMONG_RANKS if ranks > 1 else 0.0
    return StepTime(
        compute=(1 + recomputed) * (1 + lost) * phase.batch_size * train.sequence_length * of_token / ranks,
        exposed=exposed,
        links=max(links.values(), default=0.0),
        host=host_ms / 1e3,
    )


def as_planned(config: Config, plans: tuple[Plan, Plan | None]) -> Config:
    """`config` with the GPU and the backend that the plan is for.

    A GPU that is not named is an H100, or a B200 for a backend whose codes an H100 does not multiply. The backend
    `auto` becomes Transformer Engine's where the GPU has tensor cores for 4 bits and Transformer Engine can compute the
    linears, else the emulation. Raises ConfigError for a backend whose codes the named GPU does not multiply.
    """
    name, backend = config.parallel.gpu or "h100", config.precision.backend
    if backend == "auto":
        quantized = any(plan.num_quantized for plan in plans if plan is not None)
        native = GPUS[name].fp4 and quantized and why_not_native("transformer_engine", config, plans) is None
        backend = "transformer_engine" if native else "emulated"
    elif backend != "emulated" and not all(multiplies_codes(GPUS[name], plan) for plan in plans if plan is not None):
        if config.parallel.gpu is not None:
            raise ConfigError(
                f"parallel.gpu={name} has no tensor cores for 4 bits, which precision.backend={backend} multiplies "
                "with; give parallel.gpu=b200, or precision.backend=emulated"
            )
        name = "b200"
    parallel, precision = replace(config.parallel, gpu=name), replace(config.precision, backend=backend)
    return replace(config, parallel=parallel, precision=precision)


def gpu_of(parallel: ParallelConfig) -> Gpu:
    """The GPU that the plan is for."""
    return GPUS[parallel.gpu or "h100"]


def axis_bandwidth(group: str, size: int, parallel: ParallelConfig, ranks: int, run: RunConfig) -> float:
    """GB/s that each rank of a group of `size` ranks sends.

    Within a host it is the bandwidth of the links. A group that spans hosts uses the network adapters of its ranks on a
    host together, because a ring enters and leaves each host once on every adapter.
    """
    sizes = {axis.name: size for axis, size in parallel.axis_sizes(ranks).items()}
    innermost = [axis.name for axis in AXES if "rows" in axis.divides][-1] if group == ROWS else group
    inside = [*sizes][[*sizes].index(innermost) + 1 :] if innermost in sizes else []  # the axes whose ranks are closer
    neighbours = min(size, max(1, run.dry_ranks_per_host // math.prod(sizes[name] for name in inside)))
    if neighbours == size:
        return gpu_of(parallel).links
    return min(gpu_of(parallel).links, neighbours * _NETWORK_BANDWIDTH)
