"""What a run prints: tables before and after training, progress in between; and functions that format numbers.

On a terminal a live bar shows the progress. If stdout is a file or a pipe, as in a batch job, the same numbers are
plain lines, one every `logging.interval` steps.
"""

from __future__ import annotations

import io
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TextIO, TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, track
from rich.table import Table

from megatron_fp4.config.errors import printable
from megatron_fp4.config.schema import ParallelConfig, TrainConfig
from megatron_fp4.logging.metrics import StepMetrics
from megatron_fp4.precision.plan import Plan

T = TypeVar("T")


class RunConsole:
    """Prints a run's progress on one rank; on the others (`active=False`) every method does nothing.

    total_steps: of the whole run. interval: steps between plain lines. stream: by default stdout; a terminal gets the
    live bar. memory_size: of the device, in GiB, to show which share is used; None: show no share. transcript: gets
    everything that is printed, without the bar but with the plain lines. start_step: steps done before this start. Use
    it as a context manager around the training loop.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        interval: int = 10,
        active: bool = True,
        stream: TextIO | None = None,
        memory_size: float | None = None,
        transcript: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.start_step = 0
        self._transcript = transcript
        self._total, self._interval, self._active, self._memory_size = total_steps, interval, active, memory_size
        stream = stream or sys.stdout
        self._live = active and stream.isatty()
        width = None if stream.isatty() else 120  # a file has no width, and rich would fold tables to 80 columns
        # Texts contain the user's values: a list in [brackets] must not be read as markup, or `:100:` as an emoji.
        soft = not stream.isatty()
        self._console = _Output(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=soft)
        self._progress: Progress | None = None
        # The waits of the steps since the last line; on a terminal, of the last hundred steps.
        self._waits: deque[float] = deque(maxlen=100 if self._live else None)
        self._first: tuple[int, float] | None = None
        self._memory: float | None = None

    def __enter__(self) -> RunConsole:
        if self._live:
            numbers = TextColumn("{task.completed}/{task.total}  {task.fields[numbers]}")
            self._progress = Progress(BarColumn(max(12, self._console.width - 120)), numbers, console=self._console)
            self._progress.add_task("", total=self._total, completed=self.start_step, numbers="starting")
            self._progress.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def table(self, table: Table) -> None:
        self._print(table)

    def text(self, text: str) -> None:
        self._print(printable(text))

    def event(self, step: int, text: str) -> None:
        self.text(f"after step {step}: {text}")

    def step(self, metrics: StepMetrics) -> None:
        """Show a training step. Plain lines show every `interval`-th step, the last and skipped ones."""
        if not self._active:
            return
        self._waits.append(metrics.data_wait)
        numbers = "  ".join(self._numbers(metrics))
        if self._progress is not None:
            room = min(120, self._console.width - 12) - 2 * len(str(self._total)) - 4
            if len(numbers) > room:
                numbers = numbers[:room].rpartition("  ")[0]
            self._progress.update(self._progress.task_ids[0], completed=metrics.step, numbers=numbers)
        if metrics.step % self._interval == 0 or metrics.step == self._total or metrics.skipped:
            line = f"step {metrics.step}/{self._total}  {metrics.phase}  {numbers}"
            self._transcript(line)
            if self._progress is None:
                self._show(f"{time.strftime('%H:%M:%S')}  {line}")
                self._waits.clear()

    def _numbers(self, metrics: StepMetrics) -> list[str]:
        # The first step compiles and allocates, so an ETA that includes it would be wrong for a long time.
        first, began = self._first = self._first or (metrics.step, time.monotonic())
        done, left = metrics.step - first, self._total - metrics.step
        eta = short_time((time.monotonic() - began) / done * left) if done else "-"
        self._memory = metrics.peak_memory_gib or self._memory
        share = f" ({self._memory / self._memory_size:.0%})" if self._memory and self._memory_size else ""
        median, most = map(short_seconds, np.percentile(self._waits, [50, 99], method="inverted_cdf"))
        return [
            *([f"SKIPPED ({'a spike' if metrics.spike else 'not finite'})"] if metrics.skipped else []),
            f"loss {metrics.loss:.4f}",
            f"lr {metrics.lr:.2e}",
            f"grad {metrics.grad_norm:.2f}",
            f"{short_number(metrics.tokens_per_second)} tok/s",
            f"ETA {eta}",
            f"{metrics.model_tflops:.3g} TFLOP/s",
            *([f"MFU {metrics.mfu:.1%}"] if metrics.mfu is not None else []),
            *([f"mem {self._memory:.3g} GiB{share}"] if self._memory else []),
            f"data wait {median}, p99 {most}",
        ]

    def _print(self, what: Table | str) -> None:
        if not self._active:
            return
        if isinstance(what, str):
            self._transcript(what)
        else:
            lines = Console(file=io.StringIO(), width=120)
            lines.print(what)
            self._transcript(lines.file.getvalue())
        self._show(what)

    def _show(self, what: Table | str) -> None:
        try:
            self._console.print(what)
        except OSError:  # output to a full disk must not end training; metrics.jsonl has everything
            del self._console._buffer[:]


class _Output(Console):
    """Prints nothing more when its reader has closed the pipe (`| head`); rich's Console would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def tracked(items: Iterable[T], what: str) -> Iterable[T]:
    """`items`, with a bar on stderr that shows, on a terminal, how many of them are done."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


# Tables.


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Table:
    """A table of texts. A column whose name ends with > is aligned to the right."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = (), left: int = 1) -> str:
    """A table in Markdown, with columns that are aligned on a terminal too, and notes below it. left: how many columns
    are aligned to the left; the others are aligned to the right."""
    rows, below = [[printable(cell) for cell in row] for row in rows], list(map(printable, notes))
    widths = [max(3, *map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        placed = (cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for i, cell in enumerate(cells))
        return f"| {' | '.join(placed)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(heads), line(rule), *map(line, rows), *([""] if below else []), *below])


def facts_table(title: str, facts: Mapping[str, object]) -> Table:
    """A table of names and values, such as the summary of a run. Values that are None are left out."""
    rows = []
    for name, value in facts.items():
        if value is not None:
            form = ".4f" if isinstance(value, float) else "," if type(value) is int else ""
            rows.append((name, format(value, form)))
    return make_table(title, ["what", "value"], rows)


def plan_shares(plan: Plan) -> str:
    """The number of linears of each recipe, by `Plan.short_names`, and their share of the weights of all linears."""
    total, shares = sum(row.linear.parameters for row in plan.rows), []
    for recipe, name in plan.short_names.items():
        its = [row.linear.parameters for row in plan.rows if row.recipe == recipe]
        shares.append(f"{len(its)} of {len(plan.rows)} linears in {name} ({sum(its) / total:.1%} of their weights)")
    return ", ".join(shares)


def plan_table(plan: Plan, name: str, emulated: Mapping[str, str]) -> Table:
    """The recipe of each linear and its reason, in order of execution. name: of the plan. emulated: as
    `support.emulated_linears` returns it.

    Linears of the same kind, shape, recipe and reason share a row: `blocks.{2..51}.mixer.in_proj` is this linear of all
    blocks from 2 to 51 that have it.
    """
    names = plan.short_names
    # Blocks of one kind alternate with others, so a range counts only the blocks that have the linear.
    have: dict[tuple[str, str], list[int]] = {}
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for row in plan.rows:
        linear, shape = row.linear, f"{row.linear.out_features} x {row.linear.in_features}"
        shape = shape if linear.experts == 1 else f"{linear.experts} x {shape}"
        kind = re.sub(r"\d+", "#", linear.name, count=1)
        why = re.sub(r"^block \d+ is", "is", row.reason)  # the row already has the block's number
        if reason := emulated.get(linear.name):
            why += f"; emulated: {reason}"
        numbered = re.search(r"\d+", linear.name)  # of a block, or of a set of multi-token prediction; not the head
        number = int(numbered[0]) if numbered else 0
        have.setdefault((kind, shape), []).append(number)
        groups.setdefault((kind, shape, names[row.recipe], why), []).append(number)
    rows = []
    for (kind, shape, recipe, why), blocks in groups.items():
        shown = kind.replace("#", _ranges(blocks, have[kind, shape]))
        rows.append((shown, str(len(blocks)), shape, recipe, why))
    columns = ["linear", "count>", "out x in>", "recipe", "why"]
    caption = f"{plan_shares(plan)}; {plan.share_in_4_bits:.1%} in 4 bits, {plan.bits_per_weight:.2f} bits a weight"
    return make_table(f"Precision plan {name}", columns, rows, caption)


def _ranges(numbers: Sequence[int], sequence: Sequence[int]) -> str:
    """`numbers` as "3" or "{0,2..6}". 2..6 means all numbers from 2 to 6 in `sequence`, which is sorted."""
    texts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: sequence.index(pair[1]) - pair[0]):
        first, *rest = [number for _, number in run]
        texts.append(f"{first}..{rest[-1]}" if rest else str(first))
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"


def batch_table(train: TrainConfig, parallel: ParallelConfig, world_size: int, num_tokens: int) -> Table:
    """The ranks, micro-batches and tokens of a step and of the run. num_tokens: of the run."""
    ranks = parallel.data_parallel_size(world_size)
    sizes = {axis: counted(size, axis.rank) for axis, size in parallel.axis_sizes(world_size).items() if size > 1}
    of_batch = [text for axis, text in sizes.items() if "batch" in axis.divides]
    accumulation = train.global_batch_size // (train.micro_batch_size * ranks)
    sequences, tokens = counted(train.global_batch_size, "sequence"), train.global_batch_size * train.sequence_length
    rows = [
        ("ranks", f"{world_size:,}", " x ".join(sizes.values()) or "one process has the whole model"),
        ("data-parallel ranks", f"{ranks:,}", " x ".join(of_batch)),
        (
            "micro-batches per step and rank",
            f"{accumulation:,}",
            f"{sequences} / ({train.micro_batch_size} x {counted(ranks, 'rank')})",
        ),
        ("tokens per step", f"{tokens:,}", f"{sequences} x {train.sequence_length:,}"),
        ("tokens of the run", f"{num_tokens:,}", counted(train.steps, "step")),
    ]
    return make_table("Batch", ["quantity", "value>", "how"], rows)


# Formats of numbers, times and counts.


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """1 step, 2,500 steps, 3 batches (with `plural`)."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def short_number(value: float) -> str:
    """Three digits and a letter: 12345 -> 12.3k. Numbers that are not finite have no letter."""
    return "".join(_scaled(value))


def with_unit(value: float, unit: str) -> str:
    """Three digits and a unit with its prefix: 23.8 MFLOP, 850 FLOP."""
    return " ".join(_scaled(value)) + unit


def _scaled(value: float) -> tuple[str, str]:
    for limit, letter in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999,999 rounds to 1000 thousands, which is a million.
        if limit * 0.9995 <= abs(value) < math.inf:
            return f"{value / limit:.3g}", letter
    return f"{value:.3g}", ""


def short_tokens(tokens: int) -> str:
    """A number of tokens, in whole millions from one million on: 197M, 1,250M, 51.2k."""
    return f"{tokens / 1e6:,.0f}M" if tokens >= 999_500 else short_number(tokens)


def short_seconds(seconds: float) -> str:
    """A short time with three digits, but not below a tenth of a millisecond: 1.24 s, 310 ms, 0.4 ms, 0 ms."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.3g} ms" if milliseconds >= 10 else f"{round(milliseconds, 1):g} ms"


def short_time(seconds: float) -> str:
    """A time as 45s, 3m20s, 5h07m or 12d03h."""
    whole = round(seconds)
    for size, name, smaller, its_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{name}{whole % size // smaller:02d}{its_name}"
    return f"{whole}s"


def long_time(seconds: float) -> str:
    """An estimated time with two digits, in a suitable unit: 310 ms, 42 s, 3.4 minutes, 36 days."""
    for limit, name in ((365.25 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= limit:
            return f"{seconds / limit:.{1 if seconds < 10 * limit else 0}f} {name}"
    return short_seconds(seconds)
