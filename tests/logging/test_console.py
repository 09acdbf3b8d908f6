import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_fp4.config.schema import ParallelConfig, TrainConfig
from megatron_fp4.logging.console import (
    ModelPart,
    PhaseRow,
    RunConsole,
    SourceRow,
    batch_table,
    facts_table,
    model_table,
    phases_table,
    plan_table,
)
from megatron_fp4.logging.metrics import StepMetrics
from megatron_fp4.logging.words import counted, long_time, short_number, short_seconds, short_time, with_unit
from megatron_fp4.precision.plan import LinearShape, Plan, PlannedLinear
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def metrics(step: int, loss: float = 3.25, skipped: bool = False, wait: float = 0.0) -> StepMetrics:
    return StepMetrics(step, step * 4096, loss, 1e-3, 1.5, 41234.0, 0.0213, 0.1, skipped, "broad", "nvfp4", wait)


def shown(table) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def run(stream, steps, **options):
    with RunConsole(total_steps=25, interval=10, stream=stream, **options) as console:
        for step in steps:
            console.step(metrics(step))
    return stream.getvalue()


def test_plain_lines_every_interval_and_at_the_end():
    lines = run(io.StringIO(), range(1, 26)).splitlines()
    assert [line.split()[1:3] for line in lines] == [["step", "10/25"], ["step", "20/25"], ["step", "25/25"]]
    assert all(re.match(r"[0-2]\d:[0-5]\d:[0-5]\d  step ", line) for line in lines)  # the time of day
    for part in ("broad", "loss 3.2500", "lr 1.00e-03", "grad 1.50", "41.2k tok/s", "0.0213 TFLOP/s", "ETA"):
        assert part in lines[0]
    assert "\x1b" not in "".join(lines)
    assert lines[-1].endswith("ETA 0s")


def test_a_line_says_how_long_its_steps_waited_for_data():
    stream = io.StringIO()
    with RunConsole(total_steps=300, interval=100, stream=stream) as console:
        for step in range(1, 301):
            wait = {150: 2.5, 250: 0.25, 251: 0.125}.get(step, 0.003 if step <= 200 else 0.0)
            console.step(metrics(step, wait=wait))
    first, second, third = stream.getvalue().splitlines()
    assert "data wait 3 ms, p99 3 ms  ETA" in first
    assert "data wait 3 ms, p99 3 ms  ETA" in second  # one in a hundred is beyond p99
    assert "data wait 0 ms, p99 125 ms  ETA" in third


def test_plain_lines_are_not_wrapped_or_read_as_markup():
    stream = io.StringIO()
    with RunConsole(total_steps=5, stream=stream) as console:
        console.event(3, "checkpoint [bold] " + "x" * 300)
    assert stream.getvalue() == "after step 3: checkpoint [bold] " + "x" * 300 + "\n"


def test_a_skipped_step_is_shown_at_once():
    stream = io.StringIO()
    with RunConsole(total_steps=25, interval=10, stream=stream) as console:
        console.step(metrics(3, loss=math.nan, skipped=True))
    assert "step 3/25" in stream.getvalue()
    assert "loss nan" in stream.getvalue()
    assert "SKIPPED" in stream.getvalue()


def test_validation_is_shown_once():
    stream = io.StringIO()
    with RunConsole(total_steps=25, interval=1, stream=stream) as console:
        console.step(metrics(1))
        console.validation(1, {"code": 2.0, "prose": 4.0})
        console.step(metrics(2))
    first, validation, second = stream.getvalue().splitlines()
    assert validation == "validation after step 1: code 2.0000  prose 4.0000"
    assert "val" not in first and "val" not in second


def test_a_line_says_how_much_memory_and_of_what_the_peak():
    """Memory is measured now and then; a line in between has what was the most so far."""
    stream = io.StringIO()
    with RunConsole(total_steps=25, interval=1, stream=stream, memory_size=139.8) as console:
        console.step(metrics(1))
        console.step(replace(metrics(2), peak_memory_gib=61.25, mfu=0.4156))
        console.step(metrics(3))
    first, second, third = stream.getvalue().splitlines()
    assert "GiB" not in first and "MFU" not in first
    assert "TFLOP/s  MFU 41.6%  mem 61.2 GiB (44%)  data wait" in second
    assert "mem 61.2 GiB (44%)" in third and "MFU" not in third
    console = RunConsole(total_steps=25, interval=1, stream=(stream := io.StringIO()))
    console.step(replace(metrics(1), peak_memory_gib=0.75))
    assert "mem 0.75 GiB  data wait" in stream.getvalue()


def test_bits_per_byte_stand_beside_their_loss():
    stream = io.StringIO()
    with RunConsole(total_steps=25, interval=1, stream=stream) as console:
        console.validation(1, {"code": 2.0, "prose": 4.0}, {"prose": 1.25})
    assert stream.getvalue() == "validation after step 1: code 2.0000  prose 4.0000 (1.2500 bits/byte)\n"


# What the last state of the bar shows, from narrow to wide.
@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [
        (40, ["loss 3.2500", "ETA 0s"], ["tok/s", "intermediat"]),
        (80, ["intermediat… ", "loss 3.2500", "41.2k tok/s", "ETA 0s"], ["grad", "data wait"]),
        (120, ["loss 3.2500", "lr 1.00e-03", "41.2k tok/s", "0.0213 TFLOP/s", "mem 0.75 GiB", "ETA 0s"], ["wait"]),
        (160, ["lr 1.00e-03", "grad 1.50", "data wait 0 ms, p99 0 ms", "ETA 0s"], []),
    ],
)
def test_a_terminal_gets_a_bar_and_the_numbers_that_fit(monkeypatch, width, shown, hidden):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with RunConsole(total_steps=25, stream=stream) as console:
        for step in range(1, 26):
            console.step(replace(metrics(step), phase="intermediate_phase", peak_memory_gib=0.75))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    last = [line for line in re.split(r"[\r\n]", plain) if "25/25" in line][-1]
    assert len(last) <= width
    assert last.count("━") >= 12
    for text in shown:
        assert text in last
    for text in hidden:
        assert text not in last


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_other_ranks_show_nothing(stream):
    target = stream()
    with RunConsole(total_steps=5, active=False, stream=target) as console:
        console.step(metrics(1))
        console.validation(1, {"code": 1.0})
        console.event(1, "switch")
        console.table(facts_table("Done", {"steps": 5}))
    assert target.getvalue() == ""


def test_model_table_adds_up():
    parts = [ModelPart("embedding", 1, 250), ModelPart("Mamba-2", 3, 750, "8 heads x 64")]
    text = shown(model_table("tiny", "M-*-M-", parts, flops_per_token=2.5e7))
    for part in ("tiny: 1,000 parameters, 25 MFLOP per token", "M-*-M-", "75.0%", "8 heads x 64"):
        assert part in text


X4 = Operand("nvfp4", (1, 16))
NVFP4 = Recipe("nvfp4", *[Gemm(X4, X4)] * 3)


def plan_of(pattern: str, first: int, last: int) -> Plan:
    names = {"M": ("in_proj", "out_proj"), "-": ("up_proj", "down_proj"), "*": ("qkv_proj", "out_proj")}
    rows = []
    for block, letter in enumerate(pattern):
        end = f"first {first}" if block < first else f"last {last}" if block >= len(pattern) - last else ""
        for name in names[letter]:
            recipe, why = (BF16, f"block {block} is one of the {end}") if end else (NVFP4, "the run's recipe")
            shape = LinearShape(f"blocks.{block}.mixer.{name}", block, 32 if letter == "*" else 16, 64)
            rows.append(PlannedLinear(shape, recipe, why))
    return Plan(tuple(rows))


def test_plan_of_a_small_model_has_a_row_per_linear():
    plan = plan_of("M-*-M-", 0, 2)
    text = shown(plan_table(plan, "nvfp4"))
    for row in plan.rows:
        assert row.linear.name in text
    assert "block 5 is one of the last 2" in text
    assert "64 x 16" in text
    assert "8 of 12 linears in nvfp4" in text
    assert "4 of 12 linears in bf16" in text


def test_plan_of_a_large_model_is_compact():
    pattern = "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"
    text = shown(plan_table(plan_of(pattern, 2, 8), "nvfp4"))
    assert len(text.splitlines()) < 25
    assert "blocks.{2..51}.mixer.in_proj" in text
    assert "blocks.{7..52}.mixer.qkv_proj" in text
    assert "blocks.0.mixer.in_proj" in text
    assert "is one of the last 8" in text
    assert "20 of 124 linears in bf16" in text
    assert sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("  blocks.")) == 124


def with_recipes(recipes: list[Recipe]) -> Plan:
    shapes = [LinearShape(f"blocks.{n}.mixer.w", n, 16, 16) for n in range(len(recipes))]
    return Plan(tuple(PlannedLinear(shape, recipe, "-") for shape, recipe in zip(shapes, recipes, strict=True)))


def test_plan_rows_with_gaps_are_told_apart():
    plan = with_recipes([BF16 if n in (3, 4, 9) else NVFP4 for n in range(12)])
    text = shown(plan_table(plan, "nvfp4", compact_above=4))
    assert "blocks.{0..2,5..8,10..11}.mixer.w" in text
    assert "blocks.{3..4,9}.mixer.w" in text


def test_recipes_of_one_name_are_told_apart():
    plan = with_recipes([NVFP4, replace(NVFP4, wgrad=Gemm(X4, X4, rht=16)), NVFP4, BF16])
    text = shown(plan_table(plan, "nvfp4"))
    shares = "2 of 4 linears in nvfp4 (50.0% of their weights), 1 of 4 linears in nvfp4 (2) (25.0% of their weights)"
    assert shares in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if "blocks." in line]
    assert [row[4:-1] for row in rows] == [["nvfp4"], ["nvfp4", "(2)"], ["nvfp4"], ["bf16"]]


def test_batch_table():
    train = TrainConfig(steps=100, global_batch_size=768, micro_batch_size=2, sequence_length=8192)
    text = shown(batch_table(train, ParallelConfig(tensor=4, replicate=2), world_size=256, num_tokens=629_145_600))
    assert "2 replicas x 32 shards x 4 tensor-parallel" in text
    assert "768 sequences / (2 x 64 ranks)" in text
    assert "6,291,456" in text
    assert "629,145,600" in text
    accumulation = next(line for line in text.splitlines() if "micro-batches per step" in line)
    assert " 6 " in accumulation


def test_batch_table_of_one_process_has_no_axes_of_size_one():
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, sequence_length=64)
    text = shown(batch_table(train, ParallelConfig(), world_size=1, num_tokens=64))
    for part in ("one process has the whole model", "1 sequence / (1 x 1 rank)", "1 sequence x 64", "1 step\n"):
        assert part in re.sub(" +\n", "\n", text)
    assert "replica" not in text and "shard" not in text
    text = shown(batch_table(train, ParallelConfig(tensor=2), world_size=2, num_tokens=64))
    assert "2 tensor-parallel" in text and "all see the same batch" in text and "1 shard" not in text


def test_phases_table_shows_tokens_and_epochs_by_source():
    rows = [
        PhaseRow(
            "broad", 1, 420, "8 x 512", 1_720_320, [SourceRow("code", 0.7, 1.5, 1.5), SourceRow("prose", 0.3, 0.5, 0.5)]
        ),
        PhaseRow("brief", 421, 420, "8 x 512", 0, []),
        PhaseRow("late", 421, 500, "1,024 x 512", 1000, [SourceRow("code", 1.0, 0.2, 1.7)]),
    ]
    lines = [line.split() for line in shown(phases_table(rows)).splitlines()]
    assert ["broad", "1-420", "8", "x", "512", "code", "70.00%", "1,204,224", "1.5", "1.5"] in lines
    assert ["prose", "30.00%", "516,096", "0.5", "0.5"] in lines
    assert ["brief", "none", "8", "x", "512", "0"] in lines
    assert ["late", "421-500", "1,024", "x", "512", "code", "100.00%", "1,000", "0.2", "1.7"] in lines


def test_phases_of_many_sources_show_those_gone_through_most():
    sources = [SourceRow(f"s{i}", 0.01, i / 100, i / 100) for i in range(100)]
    text = shown(phases_table([PhaseRow("all", 1, 10, "8 x 512", 10_000, sources)]))
    assert "s99" in text and "s85" in text and "s84" not in text
    assert "85 more" in text and "85.00%" in text


def test_facts_table():
    text = shown(facts_table("Done", {"tokens": 1234567, "loss": "3.21", "resumed": True, "switched": None}))
    assert "1,234,567" in text and "switched" not in text and "None" not in text
    assert "True" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12.34, "12.3"), (999, "999"), (12345, "12.3k"), (999_999, "1M"), (2.5e12, "2.5T"), (math.inf, "inf")],
)
def test_short_number(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (200, "3m20s"), (3599.6, "1h00m"), (18420, "5h07m"), (1e6, "11d13h")],
)
def test_short_time(seconds, text):
    assert short_time(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (4e-5, "0 ms"), (0.0004, "0.4 ms"), (0.31, "310 ms"), (0.9996, "1 s"), (1.236, "1.24 s")],
)
def test_short_seconds(seconds, text):
    assert short_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.6, "600 ms"),
        (42, "42 s"),
        (204, "3.4 minutes"),
        (18360, "5.1 hours"),
        (3.15e6, "36.5 days"),
        (1e9, "31.7 years"),
    ],
)
def test_long_time(seconds, text):
    assert long_time(seconds) == text


def test_units_and_counts():
    assert with_unit(2.38e7, "FLOP") == "23.8 MFLOP" and with_unit(850, "FLOP") == "850 FLOP"
    assert with_unit(3e18, "FLOP") == "3 EFLOP"
    assert [counted(number, "batch", "batches") for number in (0, 1, 2500)] == ["0 batches", "1 batch", "2,500 batches"]
    assert counted(1, "step") == "1 step" and counted(2, "step") == "2 steps"


class FailingStream(io.StringIO):
    """stdout on a full disk, until there is room."""

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def test_a_disk_that_takes_no_output_is_waited_for():
    stream = FailingStream()
    console = RunConsole(10, interval=1, stream=stream)
    console.text("before")
    stream.error = OSError(28, "No space left on device")
    for step in range(1, 4):
        console.step(metrics(step))
    stream.error = None
    console.text("after")
    assert stream.getvalue().split("\n") == ["before", "after", ""]


def test_a_reader_that_has_gone_ends_nothing():
    """rich would end the process, with exit code 1."""
    stream = FailingStream()
    console = RunConsole(10, interval=1, stream=stream)
    stream.error = BrokenPipeError(32, "Broken pipe")
    console.text("nobody reads this")
    console.table(facts_table("Facts", {"a": 1}))
    stream.error = None
    console.text("nor this")
    assert stream.getvalue() == ""
