"""What a preparation says while it runs."""

from __future__ import annotations

import io
from collections import Counter

import pytest

from data.prepare import prepare as progress_module
from data.prepare.prepare import PrepareProgress, State
from data.prepare.tokenize import SplitCount


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def state(documents: int) -> State:
    counts = {"train": SplitCount(documents, 250 * documents, 1000 * documents), "validation": SplitCount()}
    return State(counts=counts, malformed=Counter({"empty": 3}))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_a_minute_where_there_is_no_terminal(clock: list[float]) -> None:
    stream = io.StringIO()
    with PrepareProgress(stream) as progress:
        progress.line("skipped a.jsonl:1: [empty]")
        for second in range(130):
            clock[0] = 100.0 + second
            progress(second, 200, state(1000 + 8000 * second))
    first, second, third = stream.getvalue().splitlines()
    assert first == "skipped a.jsonl:1: [empty]"
    assert second == ("30%, 481,003 records, 120,250,000 tokens, 8.0 MB/s, 2.00M tokens/s, 3 malformed")
    assert third.startswith("60%, 961,003 records")


def test_a_bar_on_a_terminal(clock: list[float]) -> None:
    stream = Terminal()
    with PrepareProgress(stream) as progress:
        progress(10, 200, state(5))
        clock[0] += 1
        progress(50, 200, state(8005))
        assert progress._bar is not None
        (task,) = progress._bar.tasks
        assert (task.completed, task.total) == (50, 200)
        assert task.description == "8,008 records, 8.0 MB/s, 2.00M tokens/s, 3 malformed"
    with PrepareProgress(stream) as progress:
        progress(0, 0, state(5))  # a dataset of the hub: nobody knows how long
        assert progress._bar is not None and progress._bar.tasks[0].total is None
