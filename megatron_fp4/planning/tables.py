"""What a run would need, as tables: memory, messages, FLOPs, time."""

from __future__ import annotations

from rich.table import Table

from megatron_fp4.config.schema import Config
from megatron_fp4.planning.dry_run import Build, DryRun, dry_run
from megatron_fp4.planning.stand_ins import planned_execution
from megatron_fp4.report import console as show
from megatron_fp4.report.console import RunConsole
from models.execution_choice import describe_execution
from models.flops import forward_flops_per_token, parameter_count

_GIB = 2**30


def print_plan(config: Config, world_size: int, build: Build, num_tokens: int) -> None:
    """Print what the run of `config`, of num_tokens in all, needs on `world_size` ranks. build: see `dry_run`."""
    execution = planned_execution(config)
    dry = dry_run(config, world_size, build, execution)
    console = RunConsole(config.train.steps)
    console.text(f"kernels: {describe_execution(execution, config.model.pattern)}")
    console.table(show.batch_table(config.train, config.parallel, world_size, num_tokens))
    console.table(show.facts_table("Memory of a rank", memory_facts(config, dry)))
    console.table(messages_table(dry))
    console.table(show.facts_table("Work and time", time_facts(config, world_size, num_tokens)))


def memory_facts(config: Config, dry: DryRun) -> dict[str, object]:
    """Name -> size, in GiB."""
    memory = dry.memory
    sizes = {
        "parameters (FP32 shards)": memory.parameters,
        "optimizer state (FP32 moments)": memory.optimizer,
        "gradients (FP32 shards)": memory.gradients,
        "gradients before their reduction (FP32)": memory.unreduced_gradients,
        f"gathered parameters ({config.precision.compute_dtype})": memory.gathered,
        "quantized weights": memory.quantized_weights,
        "activations of a micro-batch": memory.activations,
        "workspaces of cuBLAS": memory.workspaces,
        "peak, temporaries included": memory.peak,
    }
    total = parameter_count(config.model).total
    shares = f"{memory.num_parameters:,} of {total:,}"
    return {"parameters of the rank": shares, **{name: f"{size / _GIB:.2f} GiB" for name, size in sizes.items()}}


def messages_table(dry: DryRun) -> Table:
    """The collectives of a step."""
    table = Table(title="Collectives of a step, per rank", title_justify="left", title_style="bold")
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


def time_facts(config: Config, world_size: int, num_tokens: int) -> dict[str, object]:
    """FLOPs per token, and the time of a step and of the run of num_tokens at the given utilization."""
    train, run = config.train, config.run
    flops = 3 * forward_flops_per_token(config.model, train.sequence_length).total
    tokens = train.global_batch_size * train.sequence_length
    seconds = flops * tokens / (world_size * run.dry_peak_tflops * 1e12 * run.dry_mfu)
    return {
        "model FLOPs per token (forward and backward)": f"{flops:.4g}",
        "model FLOPs of the run": f"{flops * num_tokens:.4g}",
        "utilization assumed": f"{run.dry_mfu:.0%} of {run.dry_peak_tflops:g} TFLOP/s per rank",
        "time of a step": f"{seconds:.3g} s",
        "time of the run": f"{seconds * num_tokens / tokens / 86400:.3g} days",
        "tokens per second and rank": f"{tokens / seconds / world_size:,.0f}",
    }
