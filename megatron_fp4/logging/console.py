"""What a run prints: tables before and after, progress in between.

On a terminal a live bar carries the numbers; where stdout is a file or a pipe, as in a batch job, the same numbers are
plain lines, one every `logging.interval` steps.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from megatron_fp4.config.schema import Config, ParallelConfig, TrainConfig
from megatron_fp4.logging.metrics import StepMetrics
from megatron_fp4.logging.words import counted, short_number, short_seconds, short_time, with_unit
from megatron_fp4.precision.plan import Plan

_FILE_WIDTH = 120


@dataclass(frozen=True)
class ModelPart:
    """A kind of block, or embedding, head or norm: how many there are and their parameters all together."""

    name: str
    count: int
    parameters: int
    detail: str = ""


@dataclass(frozen=True)
class PhaseRow:
    """A data phase: steps first..last (from 1, both included), how its batch is made up, its tokens, its sources."""

    name: str
    first_step: int
    last_step: int
    batch: str
    tokens: int
    sources: Sequence[SourceRow]


@dataclass(frozen=True)
class SourceRow:
    """A source in a phase: its share of the phase's tokens, epochs over it in this phase, and until the phase's end."""

    name: str
    share: float
    epochs: float
    epochs_done: float


@dataclass
class RunConsole:
    """Shows a run on one rank; on the others (`active=False`) every method does nothing.

    total_steps: of the whole run. start_step: steps done before this start. interval: steps between plain lines.
    stream: where to; a terminal gets the live bar. memory_size: what the device has, in GiB, where a share of it is to
    be shown. Use it as a context manager around the loop.
    """

    total_steps: int
    start_step: int = 0
    interval: int = 10
    active: bool = True
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    memory_size: float | None = None

    def __post_init__(self) -> None:
        # A file has no width, and rich would fold tables to 80 columns.
        width = None if self.stream.isatty() else _FILE_WIDTH
        self._console = _Output(file=self.stream, width=width, highlight=False, soft_wrap=not self.stream.isatty())
        self._progress: Progress | None = None
        self._task = TaskID(0)
        # Of the steps since the last line, or on a terminal of the last hundred.
        self._waits: deque[float] = deque(maxlen=100 if self.stream.isatty() else None)
        self._first_step = self.start_step
        self._first_step_at: float | None = None
        self._memory: float | None = None

    def __enter__(self) -> RunConsole:
        if self.active and self.stream.isatty():
            self._progress = Progress(
                BarColumn(max(12, self._console.width - 120)),
                TextColumn("{task.completed}/{task.total}  {task.fields[numbers]}"),
                console=self._console,
            )
            self._task = self._progress.add_task(
                "", total=self.total_steps, completed=self.start_step, numbers="starting"
            )
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def table(self, table: Table) -> None:
        """Print a table, above the bar if there is one."""
        if self.active:
            self._print(table)

    def text(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.active:
            self._print(text, markup=False)

    def step(self, metrics: StepMetrics) -> None:
        """Show a training step: on the bar each one, as a line with the time of day every `interval` steps, the last
        and skipped ones."""
        if not self.active:
            return
        if self._first_step_at is None:
            # The first step compiles and allocates; an ETA that counts it is wrong for a long time.
            self._first_step_at = time.monotonic()
            self._first_step = metrics.step
        self._waits.append(metrics.data_wait)
        numbers = "  ".join(self._numbers(metrics))
        if self._progress is not None:
            room = min(120, self._console.width - 12) - 2 * len(str(self.total_steps)) - 4
            if len(numbers) > room:
                numbers = numbers[:room].rpartition("  ")[0]
            self._progress.update(self._task, completed=metrics.step, numbers=numbers)
        elif metrics.step % self.interval == 0 or metrics.step == self.total_steps or metrics.skipped:
            progress = f"step {metrics.step}/{self.total_steps}  {metrics.phase}"
            self.text(f"{time.strftime('%H:%M:%S')}  {progress}  {numbers}")
            self._waits.clear()

    def validation(
        self, step: int, losses: Mapping[str, float], bits_per_byte: Mapping[str, float] | None = None
    ) -> None:
        """Show validation losses by source, in nats per token, and for each byte of text where that is known."""
        bits = {source: f" ({value:.4f} bits/byte)" for source, value in (bits_per_byte or {}).items()}
        each = "  ".join(f"{source} {loss:.4f}{bits.get(source, '')}" for source, loss in losses.items())
        self.text(f"validation after step {step}: {each}")

    def event(self, step: int, text: str) -> None:
        """Show that something happened after `step` steps: a switch, a checkpoint, a signal."""
        self.text(f"after step {step}: {text}")

    def _print(self, what: Table | str, **options: bool) -> None:
        try:
            self._console.print(what, **options)  # type: ignore[arg-type]
        except OSError:  # a full disk behind `>` must not end training; metrics.jsonl has it all
            del self._console._buffer[:]

    def _numbers(self, metrics: StepMetrics) -> list[str]:
        """The numbers of a line; a terminal that is too narrow goes without the last ones."""
        numbers = [f"loss {metrics.loss:.4f}"]
        if metrics.skipped:
            numbers.insert(0, f"SKIPPED ({'a spike' if metrics.spike else 'not finite'})")
        numbers += [
            f"lr {metrics.lr:.2e}",
            f"grad {metrics.grad_norm:.2f}",
            f"{short_number(metrics.tokens_per_second)} tok/s",
            f"ETA {self._eta(metrics)}",
            f"{metrics.model_tflops:.3g} TFLOP/s",
        ]
        if metrics.mfu is not None:
            numbers.append(f"MFU {metrics.mfu:.1%}")
        self._memory = metrics.peak_memory_gib or self._memory
        if self._memory is not None:
            share = f" ({self._memory / self.memory_size:.0%})" if self.memory_size else ""
            numbers.append(f"mem {self._memory:.3g} GiB{share}")
        return [*numbers, wait_for_data(self._waits)]

    def _eta(self, metrics: StepMetrics) -> str:
        assert self._first_step_at is not None
        done = metrics.step - self._first_step
        if done < 1:
            return "-"
        return short_time((time.monotonic() - self._first_step_at) / done * (self.total_steps - metrics.step))


def wait_for_data(waits: Iterable[float]) -> str:
    """Seconds that steps waited for data: median and 99th percentile."""
    ordered = sorted(waits)
    p50, p99 = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.99))
    return f"data wait {short_seconds(p50)}, p99 {short_seconds(p99)}"


class _Output(Console):
    """Goes silent when its reader has gone (`| head`), where rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def introduce(
    console: RunConsole,
    config: Config,
    plan: Plan,
    *,
    parts: Sequence[ModelPart],
    flops_per_token: int,
    phases: Sequence[PhaseRow],
    num_tokens: int,
    facts: Mapping[str, object],
    world_size: int,
) -> None:
    """Print what is about to run: model, plan, numerics, batch, phases.

    parts, flops_per_token: of the model; FLOPs are those of its forward pass. facts: what else is to be said of
    numerics and kernels. num_tokens: of the run.
    """
    console.table(model_table(config.model.name, config.model.pattern, parts, 3 * flops_per_token))
    console.table(plan_table(plan, config.precision.name))
    quantized = {
        "linears quantized": f"{plan.num_quantized} of {len(plan.rows)} ({plan.share_of_linears:.1%})",
        "model FLOPs quantized": f"{plan.quantized_flops_per_token / flops_per_token:.1%}",
    }
    console.table(facts_table("Numerics", {**recipe_facts(plan), **quantized, **facts}))
    if warning := plan.warning(config.precision.name):
        console.text(warning)
    console.table(batch_table(config.train, config.parallel, world_size, num_tokens))
    console.table(phases_table(phases))


def model_table(name: str, pattern: str, parts: Sequence[ModelPart], flops_per_token: float) -> Table:
    """The model by kinds of parts. flops_per_token: model FLOPs of forward and backward together."""
    total = sum(part.parameters for part in parts)
    table = _table(f"Model {name}: {total:,} parameters, {with_unit(flops_per_token, 'FLOP')} per token", pattern)
    _columns(table, "part", "count>", "parameters>", "share>", "detail")
    for part in parts:
        share = f"{part.parameters / total:.1%}" if total else "-"
        table.add_row(part.name, str(part.count), f"{part.parameters:,}", share, part.detail)
    return table


def plan_shares(plan: Plan) -> str:
    """How many linears have which recipe, and their share of the weights of all linears. Recipes go by
    `Plan.recipe_names`."""
    total, shares = plan.linear_flops_per_token, []  # FLOPs are proportional to weights
    for recipe, name in plan.recipe_names.items():
        its = [row.linear.flops_per_token for row in plan.rows if row.recipe == recipe]
        shares.append(f"{len(its)} of {len(plan.rows)} linears in {name} ({sum(its) / total:.1%} of their weights)")
    return ", ".join(shares)


def plan_table(plan: Plan, name: str, compact_above: int = 24) -> Table:
    """Which linear gets what, and why, in order of execution. Recipes go by `Plan.recipe_names`.

    A model of more than `compact_above` linears has those of the same kind, shape, recipe and reason in one row, with
    their blocks: `blocks.{2..51}.mixer.in_proj` is this linear of every block from 2 to 51 that has it.
    """
    names = plan.recipe_names
    table = _table(f"Precision plan {name}", f"{plan_shares(plan)}; {plan.share_in_4_bits:.1%} of all in 4 bits")
    compact = len(plan.rows) > compact_above
    _columns(table, "linear", *(["count>"] if compact else []), "out x in>", "recipe", "why")
    # Blocks of one kind alternate with others, so "neighbours" means in the sequence of blocks that have the linear.
    have: dict[tuple[str, str], list[int]] = {}
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for row in plan.rows:
        linear, shape = row.linear, f"{row.linear.out_features} x {row.linear.in_features}"
        kind = re.sub(r"\d+", "#", linear.name, count=1) if compact else linear.name
        # The reason names the block, which the row's numbers already say.
        why = re.sub(r"^block \d+ is", "is", row.reason) if compact else row.reason
        have.setdefault((kind, shape), []).append(linear.block)
        groups.setdefault((kind, shape, names[row.recipe], why), []).append(linear.block)
    for (kind, shape, recipe_name, why), blocks in groups.items():
        shown = kind.replace("#", _ranges(blocks, have[kind, shape])) if compact else kind
        table.add_row(shown, *([str(len(blocks))] if compact else []), shape, recipe_name, why)
    return table


def recipe_facts(plan: Plan) -> dict[str, str]:
    """What the GEMMs of each quantized recipe of the plan multiply; the recipe is named where there are several."""
    written = plan.as_dict()
    quantized = [written["linears"][row.linear.name]["recipe"] for row in plan.rows if row.recipe.quantized]
    names = list(dict.fromkeys(quantized)) or list(written["recipes"])
    facts = {}
    for recipe in names:
        for line in written["recipes"][recipe]:
            gemm, _, value = line.partition(": ")
            facts[gemm if len(names) == 1 else f"{recipe}, {gemm}"] = value
    return facts


def batch_table(train: TrainConfig, parallel: ParallelConfig, world_size: int, num_tokens: int) -> Table:
    """How ranks, micro-batches and gradient accumulation make up a step, and the run of num_tokens."""
    ranks = parallel.data_parallel_size(world_size)
    accumulation = train.global_batch_size // (train.micro_batch_size * ranks)
    tokens = train.global_batch_size * train.sequence_length
    table = _table("Batch")
    _columns(table, "quantity", "value>", "how")
    words = {"replicate": "replica", "shards": "shard"}
    copies = [(key, size) for key, size in reversed(parallel.sizes.items()) if key != "tensor"]
    spread = [(words.get(key, key), size) for key, size in [*copies, ("shards", parallel.shards(world_size))]]
    axes = [counted(size, name) for name, size in spread if size > 1]
    mesh = [*axes, *([f"{parallel.tensor} tensor-parallel"] if parallel.tensor > 1 else [])]
    table.add_row("ranks", f"{world_size:,}", " x ".join(mesh) or "one process has the whole model")
    table.add_row("data-parallel ranks", f"{ranks:,}", " x ".join(axes))
    sequences = counted(train.global_batch_size, "sequence")
    how = f"{sequences} / ({train.micro_batch_size} x {counted(ranks, 'rank')})"
    table.add_row("micro-batches per step and rank", f"{accumulation:,}", how)
    table.add_row("tokens per step", f"{tokens:,}", f"{sequences} x {train.sequence_length:,}")
    table.add_row("tokens of the run", f"{num_tokens:,}", counted(train.steps, "step"))
    return table


def phases_table(rows: Sequence[PhaseRow], most: int = 16) -> Table:
    """The data phases, and what they take from each source; of more than `most` those gone through most."""
    table = _table("Data phases", "epochs: in the phase, and from the beginning to its end")
    _columns(table, "phase", "steps>", "batch", "source", "share>", "tokens>", "epochs>", "so far>")
    for row in rows:
        steps = f"{row.first_step:,}-{row.last_step:,}" if row.last_step >= row.first_step else "none"
        shown = [*row.sources]
        if len(shown) > most:
            shown = sorted(shown, key=lambda source: -source.epochs_done)[: most - 1]
        head = [row.name, steps, row.batch]
        for source in shown:
            epochs = f"{source.epochs:.3g}", f"{source.epochs_done:.3g}"
            table.add_row(*head, source.name, f"{source.share:.2%}", f"{round(row.tokens * source.share):,}", *epochs)
            head = ["", "", ""]
        if rest := len(row.sources) - len(shown):
            share = sum(source.share for source in row.sources) - sum(source.share for source in shown)
            table.add_row(*head, f"{rest:,} more", f"{share:.2%}", f"{round(row.tokens * share):,}", "", "")
        elif not shown:
            table.add_row(*head, "", "", "0", "", "")
    return table


def facts_table(title: str, facts: Mapping[str, object]) -> Table:
    """Names and values, such as the final summary of a run; what is None is left out."""
    table = _table(title)
    _columns(table, "what", "value")
    for name, value in facts.items():
        if value is not None:
            form = ".4f" if isinstance(value, float) else "," if type(value) is int else ""
            table.add_row(name, format(value, form))
    return table


def _ranges(numbers: Sequence[int], sequence: Sequence[int]) -> str:
    """`numbers` as "3" or "{0,2..6}", where 2..6 is everything from 2 to 6 in `sequence`, which holds them in order."""
    places = {number: place for place, number in enumerate(sequence)}
    runs: list[list[int]] = []
    for number in numbers:
        if runs and places[number] == places[runs[-1][-1]] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"


def _table(title: str, caption: str | None = None) -> Table:
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")


def _columns(table: Table, *names: str) -> None:
    """Columns by name; a trailing > aligns numbers to the right."""
    for name in names:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
