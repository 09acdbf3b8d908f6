"""What a run shows while it runs: tables before and after, progress in between.

On a terminal a live bar carries the numbers; where stdout is a file or a pipe, as in a batch job, the same numbers are
plain lines, one every `logging.interval` steps. Everything here takes plain data and knows no model.
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from megatron_fp4.config.schema import ParallelConfig, TrainConfig
from megatron_fp4.precision.plan import Plan
from megatron_fp4.report.metrics import StepMetrics

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
    """A data phase: steps first..last (counted from 1, both included), how its batch is made up, its tokens, and what
    comes from each source."""

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
    stream: where to; a terminal gets the live bar. Use it as a context manager around the loop.
    """

    total_steps: int
    start_step: int = 0
    interval: int = 10
    active: bool = True
    stream: TextIO = field(default_factory=lambda: sys.stdout)

    def __post_init__(self) -> None:
        # A file has no width, and rich would fold tables to 80 columns.
        width = None if self.stream.isatty() else _FILE_WIDTH
        self._console = _Output(file=self.stream, width=width, highlight=False, soft_wrap=not self.stream.isatty())
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._validation = ""
        # Of the steps since the last line, or on a terminal of the last hundred.
        self._waits: deque[float] = deque(maxlen=100 if self.stream.isatty() else None)
        self._first_step = self.start_step
        self._first_step_at: float | None = None

    def __enter__(self) -> RunConsole:
        if self.active and self.stream.isatty():
            self._progress = Progress(
                TextColumn("[bold]{task.fields[phase]}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
                expand=True,
            )
            self._task = self._progress.add_task(
                "train", total=self.total_steps, completed=self.start_step, phase="", numbers="starting"
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
        """Show a training step: on the bar each one, as a line every `interval` steps, the last and skipped ones."""
        if not self.active:
            return
        if self._first_step_at is None:
            # The first step compiles and allocates; an ETA that counts it is wrong for a long time.
            self._first_step_at = time.monotonic()
            self._first_step = metrics.step
        self._waits.append(metrics.data_wait)
        numbers = self._numbers(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, phase=metrics.phase, numbers=numbers)
        elif metrics.step % self.interval == 0 or metrics.step == self.total_steps or metrics.skipped:
            self.text(f"step {metrics.step}/{self.total_steps}  {metrics.phase}  {numbers}")
            self._waits.clear()

    def validation(
        self, step: int, losses: Mapping[str, float], bits_per_byte: Mapping[str, float] | None = None
    ) -> None:
        """Show validation losses by source, in nats per token, and for each byte of text where that is known."""
        bits = {source: f" ({value:.4f} bits/byte)" for source, value in (bits_per_byte or {}).items()}
        self._validation = f"  val {sum(losses.values()) / len(losses):.4f}" if losses else ""
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

    def _numbers(self, metrics: StepMetrics) -> str:
        skipped = f"  SKIPPED ({'a spike' if metrics.spike else 'not finite'})" if metrics.skipped else ""
        return (
            f"loss {metrics.loss:.4f}{self._validation}  lr {metrics.lr:.2e}  grad {metrics.grad_norm:.2f}  "
            f"{short_number(metrics.tokens_per_second)} tok/s  {metrics.model_tflops:.3g} TFLOP/s  "
            f"{wait_for_data(self._waits)}  ETA {self._eta(metrics)}{skipped}"
        )

    def _eta(self, metrics: StepMetrics) -> str:
        assert self._first_step_at is not None
        done = metrics.step - self._first_step
        if done < 1:
            return "-"
        return short_time((time.monotonic() - self._first_step_at) / done * (self.total_steps - metrics.step))


def wait_for_data(waits: Iterable[float]) -> str:
    """Seconds that steps waited for data, as their median and the longest but one in a hundred."""
    ordered = sorted(waits)
    p50, p99 = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.99))
    return f"data wait {short_seconds(p50)}, p99 {short_seconds(p99)}"


def short_seconds(seconds: float) -> str:
    """A short time to three digits, e.g. 1.24 s or 310 ms; 0 ms below a tenth of one."""
    if seconds < 1e-4:
        return "0 ms"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


class _Output(Console):
    """Goes silent when its reader has gone (`| head`), where rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def model_table(name: str, pattern: str, parts: Sequence[ModelPart], flops_per_token: float) -> Table:
    """The model by kinds of parts. flops_per_token: model FLOPs of forward and backward together."""
    total = sum(part.parameters for part in parts)
    table = _table(f"Model {name}: {total:,} parameters, {short_number(flops_per_token)}FLOP per token", pattern)
    _columns(table, "part", "count>", "parameters>", "share>", "detail")
    for part in parts:
        share = f"{part.parameters / total:.1%}" if total else "-"
        table.add_row(part.name, str(part.count), f"{part.parameters:,}", share, part.detail)
    return table


def plan_table(plan: Plan, name: str, compact_above: int = 24) -> Table:
    """Which linear gets what, and why, in order of execution. Recipes go by `Plan.recipe_names`.

    A model of more than `compact_above` linears has those of the same kind, shape, recipe and reason in one row, with
    their blocks: `blocks.{2..51}.mixer.in_proj` is this linear of every block from 2 to 51 that has it.
    """
    names, total = plan.recipe_names, plan.linear_flops_per_token  # FLOPs are proportional to weights
    shares = []
    for recipe, recipe_name in names.items():
        its = [row.linear.flops_per_token for row in plan.rows if row.recipe == recipe]
        share = f"{sum(its) / total:.1%} of their weights"
        shares.append(f"{len(its)} of {len(plan.rows)} linears in {recipe_name} ({share})")
    table = _table(f"Precision plan {name}", ", ".join(shares))
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


def batch_table(train: TrainConfig, parallel: ParallelConfig, world_size: int, num_tokens: int) -> Table:
    """How ranks, micro-batches and gradient accumulation make up a step, and the run of num_tokens."""
    ranks = parallel.data_parallel_size(world_size)
    accumulation = train.global_batch_size // (train.micro_batch_size * ranks)
    tokens = train.global_batch_size * train.sequence_length
    table = _table("Batch")
    _columns(table, "quantity", "value>", "how")
    copies = [(key, size) for key, size in reversed(parallel.sizes.items()) if key != "tensor"]
    words = {"replicate": "replicas"}
    axes = [*((words.get(key, key), size) for key, size in copies), ("shards", parallel.shards(world_size))]
    mesh = " x ".join(f"{size} {name}" for name, size in [*axes, ("tensor-parallel", parallel.tensor)])
    table.add_row("ranks", str(world_size), mesh)
    table.add_row("data-parallel ranks", str(ranks), " x ".join(name for name, _ in axes))
    table.add_row(
        "micro-batches per step and rank",
        str(accumulation),
        f"{train.global_batch_size} sequences / ({train.micro_batch_size} x {ranks} ranks)",
    )
    table.add_row("tokens per step", f"{tokens:,}", f"{train.global_batch_size} x {train.sequence_length}")
    table.add_row("tokens of the run", f"{num_tokens:,}", f"{train.steps:,} steps")
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
    """Names and values, such as the final summary of a run."""
    table = _table(title)
    _columns(table, "what", "value")
    for name, value in facts.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
    return table


def short_number(value: float) -> str:
    """Three digits and a letter: 12345 -> 12.3k; what is not finite stays itself."""
    if not math.isfinite(value):
        return str(value)
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999,999 rounds to 1000 thousands, which is a million.
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def short_time(seconds: float) -> str:
    """45s, 3m20s, 5h07m or 12d03h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


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
