"""What a run prints: lines, a bar, tables; and that a run continues if printing fails."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from megatron_fp4.logging.console import (
    RunConsole,
    facts_table,
    long_time,
    plan_table,
    short_number,
    short_seconds,
    short_time,
    with_unit,
)
from megatron_fp4.precision.plan import LinearShape, Plan, PlannedLinear
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe
from tests.logging.test_metrics import metrics


class Stream(io.StringIO):
    """An output. terminal: what `isatty` returns. error: what a write raises."""

    terminal, error = False, None

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def shown(table: Table) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(table)
    return stream.getvalue()


def test_a_line_is_printed_every_interval_at_the_end_and_for_skipped_steps() -> None:
    """Only the first rank prints."""
    stream = Stream()
    for active in (True, False):
        with RunConsole(total_steps=25, interval=10, stream=stream, memory_size=2.0, active=active) as console:
            for step in range(1, 26):
                console.step(replace(metrics(step, skipped=step == 3), peak_memory_gib=0.5 if step == 10 else None))
    console.table(facts_table("Done", {"steps": 5}))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1:3] for line in lines] == [["step", f"{step}/25"] for step in (3, 10, 20, 25)]
    assert all(re.match(r"[0-2]\d:[0-5]\d:[0-5]\d  step ", line) for line in lines)  # the time of day
    for part in ("broad", "loss 3.0000", "lr 1.00e-03", "grad 1.50", "40k tok/s", "0.02 TFLOP/s", "data wait 10 ms"):
        assert part in lines[1]
    assert "SKIPPED (a spike)" in lines[0] and "GiB" not in lines[0]
    assert all("mem 0.5 GiB (25%)" in line for line in lines[1:]) and "ETA 0s" in lines[-1]


@pytest.mark.parametrize("width", [40, 160])
def test_a_terminal_gets_a_bar_and_the_numbers_that_fit(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    stream = Stream()
    stream.terminal = True
    with RunConsole(total_steps=25, stream=stream) as console:
        for step in range(1, 26):
            console.step(metrics(step))
        console.event(25, "above the bar")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    last = [line for line in re.split(r"[\r\n]", plain) if "25/25" in line][-1]
    assert len(last) <= width and last.count("━") >= 10 and "loss" in last
    assert ("TFLOP/s" in last) == (width == 160) and "after step 25: above the bar" in plain


def test_lines_are_not_wrapped_and_nothing_is_read_as_markup() -> None:
    """By default, rich reads [bold] as a style and :100: as an emoji."""
    stream = Stream()
    console = RunConsole(total_steps=5, stream=stream)
    console.event(3, "checkpoint [bold] " + "x" * 300)
    console.table(facts_table("names: [bold]", {"names": "[a, blocks.1.mixer.in_proj] of :100:"}))
    first, *table = stream.getvalue().splitlines()
    assert first == "after step 3: checkpoint [bold] " + "x" * 300
    assert "names: [bold]" in table[0] and any("[a, blocks.1.mixer.in_proj] of :100:" in line for line in table)


@pytest.mark.parametrize(("error", "after"), [(OSError(28, "full"), "after\n"), (BrokenPipeError(32, "gone"), "")])
def test_a_failing_output_does_not_end_the_run(error: OSError, after: str) -> None:
    """After a full disk, printing continues; after a closed pipe, nothing more is printed (rich would exit)."""
    stream = Stream()
    console = RunConsole(10, interval=1, stream=stream)
    console.text("before")
    stream.error = error  # type: ignore[assignment]
    console.step(metrics(1, loss=math.nan))
    console.table(facts_table("Facts", {"a": 1}))
    stream.error = None
    console.text("after")
    assert stream.getvalue() == "before\n" + after


def test_the_plan_lists_ranges_of_linears() -> None:
    x4 = Operand("nvfp4", (1, 16))
    nvfp4 = Recipe("nvfp4", *[Gemm(x4, x4)] * 3)
    recipes = [BF16 if n in (3, 4, 9) else nvfp4 for n in range(13)]
    shapes = [LinearShape(f"blocks.{n}.mixer.w", n, 16, 16) for n in range(10)]
    shapes += [LinearShape(f"mtp.{n}.blocks.1.mixer.w", 11 + 2 * n, 16, 16) for n in range(2)]
    shapes += [LinearShape("head", 14, 16, 16)]
    plan = Plan(tuple(PlannedLinear(shape, recipe, "why") for shape, recipe in zip(shapes, recipes, strict=True)))
    text = shown(plan_table(plan, "nvfp4", {}))
    assert "blocks.{0..2,5..8}.mixer.w" in text and "blocks.{3..4,9}.mixer.w" in text
    assert "mtp.{0..1}.blocks.1.mixer.w" in text and " head " in text and "10 of 13 linears in nvfp4 (76.9%" in text


def test_numbers_are_printed_in_short() -> None:
    numbers = [short_number(value) for value in (0, 12.34, 12345, 999_999, math.inf)]
    assert numbers == ["0", "12.3", "12.3k", "1M", "inf"]
    assert [with_unit(value, "FLOP") for value in (850, 999_999, 4.661e22)] == ["850 FLOP", "1 MFLOP", "46.6 ZFLOP"]
    assert [short_time(value) for value in (0.2, 200, 18420, 1e6)] == ["0s", "3m20s", "5h07m", "11d13h"]
    assert [short_seconds(value) for value in (4e-5, 0.0004, 0.31, 1.236)] == ["0 ms", "0.4 ms", "310 ms", "1.24 s"]
    assert [long_time(value) for value in (42, 204, 3.15e6)] == ["42 s", "3.4 minutes", "36 days"]
