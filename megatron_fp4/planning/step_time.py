"""How long a step takes, by the largest of three bounds: what the GPU computes, what the links carry, what Python does.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_fp4.config.schema import Config, ParallelConfig, RunConfig
from megatron_fp4.planning.dry_run import DryRun
from megatron_fp4.planning.ledger import Message
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.training.cuda_graphs import choose_graphs
from megatron_fp4.training.providers import ModelProvider

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
