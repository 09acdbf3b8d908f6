"""Where the wall time of a run goes: written while it happens, read back over all starts."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.logging import time_ledger
from megatron_fp4.logging.goodput import account, goodput_of
from megatron_fp4.logging.time_ledger import TimeLedger, last_step
from megatron_fp4.runtime.exit_codes import ExitCode
from megatron_fp4.runtime.progress import Progress


class Clock:
    """`time`, which stands still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time_ledger.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time_ledger.time, "time", lambda: 1_700_000_000.0 + self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)  # lines come with what happens alone
    return Clock(monkeypatch)


def ledger(run_dir: Path, progress: Progress, began: float) -> TimeLedger:
    return TimeLedger(run_dir, progress, began=began, device=torch.device("cpu"), ranks=2, active=True)


def spend(clock: Clock, progress: Progress, step: int, phase: str, seconds: float) -> None:
    progress.at(step, phase)
    clock.now += seconds


def train(clock: Clock, progress: Progress, first: int, last: int) -> None:
    """Steps of 1 s that wait 0.25 s for their data; the first takes 5 s."""
    for step in range(first, last + 1):
        spend(clock, progress, step, "data", 0.25)
        spend(clock, progress, step, "before the step", 0.1)
        spend(clock, progress, step, "update", 4.65 if step == first else 0.65)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "goodput.jsonl").read_text().splitlines()]


def test_every_moment_is_booked_once(tmp_path: Path, clock: Clock) -> None:
    progress = Progress()
    with ledger(tmp_path, progress, began=clock.now - 7) as book:
        spend(clock, progress, 0, "build", 2)
        spend(clock, progress, 0, "load", 1)
        train(clock, progress, 1, 4)
        spend(clock, progress, 4, "validation", 3)
        spend(clock, progress, 4, "save", 0.5)
        train(clock, progress, 5, 6)
        clock.now -= 4  # train's first step is slow only once
        spend(clock, progress, 6, "end", 1)
        assert book.worked
        book.ended(ExitCode.FINISHED)
    found = goodput_of(tmp_path)
    assert found is not None and len(found.starts) == 1
    assert found.wall == pytest.approx(clock.now - 993)
    assert found.seconds == pytest.approx(
        {"steps": 3.75, "first step": 4.75, "start-up": 10, "data wait": 1.5, "validation": 3, "saves": 0.5, "end": 1}
    )
    assert found.share == pytest.approx(3.75 / found.wall) and found.lost_steps == 0
    start = found.starts[0]
    assert (start.first_step, start.last_step, start.state, start.ranks, start.device) == (0, 6, "finished", 2, "cpu")


def test_a_phase_that_nobody_has_listed_belongs_where_it_comes(tmp_path: Path, clock: Clock) -> None:
    progress = Progress()
    with ledger(tmp_path, progress, began=clock.now):
        spend(clock, progress, 0, "warm the machine", 3)
        train(clock, progress, 1, 2)
        spend(clock, progress, 2, "look around", 4)
    found = goodput_of(tmp_path)
    assert found is not None
    assert found.seconds == pytest.approx({"steps": 0.75 + 4, "first step": 4.75, "start-up": 3, "data wait": 0.5})


def test_waiting_for_another_ranks_data_is_no_step(tmp_path: Path, clock: Clock) -> None:
    """This rank had its data at once and then waited for the others in a collective."""
    progress = Progress()
    with ledger(tmp_path, progress, began=clock.now):
        train(clock, progress, 1, 1)
        spend(clock, progress, 2, "data", 0.25)
        spend(clock, progress, 2, "update", 3.0)
        progress.waited(2.25)
        clock.now += 1.0
    found = goodput_of(tmp_path)
    assert found is not None
    assert found.seconds["data wait"] == pytest.approx(0.25 + 2.25)
    assert found.seconds["steps"] == pytest.approx(3.0 - 2.0 + 1.0)


def test_steps_after_the_last_checkpoint_of_a_killed_start_are_lost(tmp_path: Path, clock: Clock) -> None:
    """Saved after step 4, killed in step 9, whose last line of time is of step 8; metrics.jsonl had come to step 8."""
    progress = Progress()
    killed = ledger(tmp_path, progress, began=clock.now).__enter__()
    train(clock, progress, 1, 4)
    spend(clock, progress, 4, "save", 0.5)
    train(clock, progress, 5, 6)
    killed._time_line()
    train(clock, progress, 7, 8)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in range(1, 9))
    )
    seen = 1_700_000_000.0 + clock.now
    os.utime(tmp_path / "metrics.jsonl", (seen, seen))
    killed._file.close()

    clock.now += 100
    progress = Progress()
    with ledger(tmp_path, progress, began=clock.now) as book:
        spend(clock, progress, 0, "load", 2)
        train(clock, progress, 5, 6)
        book.ended(ExitCode.STOPPED)
    found = goodput_of(tmp_path)
    assert found is not None
    first, second = found.starts
    assert (first.state, second.state) == ("killed", "stopped")
    assert first.last_step == 8 and first.lost_steps == 4 and found.lost_steps == 4
    # Steps 5 to 8 of the first start, with their data: train's slow first steps came twice in them.
    assert first.seconds["lost work"] == pytest.approx(2 * (1 + 5))
    assert first.seconds["steps"] == pytest.approx(3 * 0.75)
    assert second.seconds["steps"] == pytest.approx(0.75)
    assert found.stopped == pytest.approx(100)
    assert found.wall == pytest.approx(clock.now - 1000 - 100)


def test_a_start_that_falls_back_behind_another_loses_its_steps_too() -> None:
    """The second start's checkpoint was damaged: the third goes on from the first one's."""

    def start(began: float, step: int, *lines: tuple[int, float]) -> list[dict[str, Any]]:
        opened = {"kind": "start", "step": 0, "time": began, "began": began}
        loop = {"kind": "loop", "step": step, "time": began}
        times = [{"kind": "time", "step": done, "time": began + s, "seconds": {"steps": s}} for done, s in lines]
        return [opened, loop, *times]

    found = account([*start(0, 0, (10, 10), (12, 12)), *start(100, 10, (20, 10), (30, 20)), *start(200, 5, (8, 3))])
    assert found is not None
    assert [one.lost_steps for one in found.starts] == [7, 20, 0]
    assert found.seconds == pytest.approx({"steps": 5 + 3, "lost work": 5 + 2 + 20})
    assert sum(found.seconds.values()) == pytest.approx(12 + 20 + 3)


def test_a_start_that_found_nothing_to_do_is_no_start(tmp_path: Path, clock: Clock) -> None:
    for state in (ExitCode.FINISHED, ExitCode.REFUSED):
        with ledger(tmp_path, Progress(), began=clock.now - 3) as book:
            book.ended(state)
        assert not book.worked
    assert goodput_of(tmp_path) is None


def test_an_exception_is_written_down(tmp_path: Path, clock: Clock) -> None:
    progress = Progress()
    with pytest.raises(RuntimeError), ledger(tmp_path, progress, began=clock.now):
        train(clock, progress, 1, 2)
        raise RuntimeError("no memory")
    last = records(tmp_path)[-1]
    assert (last["kind"], last["state"], last["reason"]) == ("end", "crashed", "RuntimeError: no memory")
    assert progress.observer is None


def test_half_a_line_is_no_harm(tmp_path: Path, clock: Clock) -> None:
    with ledger(tmp_path, progress := Progress(), began=clock.now):
        train(clock, progress, 1, 2)
    before = goodput_of(tmp_path)
    with (tmp_path / "goodput.jsonl").open("a") as file:
        file.write('{"kind": "time", "st')
    assert str(goodput_of(tmp_path)) == str(before)
    with ledger(tmp_path, progress := Progress(), began=clock.now):
        train(clock, progress, 3, 3)
    found = goodput_of(tmp_path)
    assert found is not None and [start.first_step for start in found.starts] == [0, 2]


def test_other_ranks_write_nothing_and_a_full_disk_raises_nothing(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress()
    with TimeLedger(tmp_path, progress, began=0, device=torch.device("cpu"), ranks=2, active=False) as book:
        progress.at(1, "data")
        assert book.ended(ExitCode.STOPPED) is ExitCode.STOPPED
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with ledger(tmp_path, progress, began=clock.now):
        train(clock, progress, 1, 2)


def test_time_is_written_while_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread: a start that is killed in a long phase has lost no more than the last seconds."""
    monkeypatch.setattr(time_ledger, "_SHORTEST", 0.01)
    progress = Progress()
    with ledger(tmp_path, progress, began=time.monotonic()):
        progress.at(0, "load")
        for _ in range(1000):
            time.sleep(0.01)
            if len(records(tmp_path)) > 4:
                break
        seconds = [record["seconds"]["start-up"] for record in records(tmp_path) if record["kind"] == "time"]
    assert len(seconds) >= 3 and all(low < high for low, high in itertools.pairwise(seconds))


def test_the_last_step_is_read_from_the_end(tmp_path: Path) -> None:
    assert last_step(tmp_path) == (0, None)
    path = tmp_path / "metrics.jsonl"
    big = json.dumps({"kind": "diagnostics", "step": 8, "linears": "x" * 300_000})
    path.write_text("".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in range(1, 9)) + big + "\n")
    assert last_step(tmp_path)[0] == 8
    path.write_text(big + '\n{"kind": "step", "st')
    assert last_step(tmp_path)[0] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": "noon"}, {"time": None}, {"began": []}, {"seen": {}}, {"seen_step": "3"}, {"ranks": None},
        {"seconds": [1.0]}, {"seconds": {"steps": "1"}}, {"seconds": {"steps": float("nan")}}, {"time": 10**400},
        {"state": 5}, {"reason": {}}, {"step": 10**400},
    ],
    ids=lambda wrong: str(wrong)[:30],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["start", "loop", "time", "end"])
def test_lines_of_wrong_types_are_left_out(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, kind: str, wrong: dict[str, Any]
) -> None:
    progress = Progress()
    with ledger(tmp_path, progress, clock.now):
        train(clock, progress, 1, 3)
        progress.at(3, "end")
    good = goodput_of(tmp_path)
    lines = (tmp_path / "goodput.jsonl").read_text().splitlines()
    lines.insert(2, json.dumps({"kind": kind, "step": 1, "time": 1.0, **wrong}))
    (tmp_path / "goodput.jsonl").write_text("\n".join(lines) + "\n")
    assert goodput_of(tmp_path) == good
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/goodput.jsonl: line 3 left out: values of wrong types"
    ]
