"""Where the wall time of a run goes, over its starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_fp4.logging import goodput
from megatron_fp4.logging.files import cut_after, iterate_records
from megatron_fp4.logging.goodput import TimeLedger, goodput_of


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def record(path: Path, ledger: TimeLedger, step: int, kind: str = "time") -> None:
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, "step": step, **(ledger.record() if kind == "time" else {})}) + "\n")


def train(ledger: TimeLedger, clock: Clock, first: int, last: int) -> None:
    """Steps of a second each, with half a second of data wait; the first takes ten."""
    for step in range(first, last + 1):
        ledger.at(step, "data")
        clock.now += 0.5
        ledger.at(step, "before the step")
        clock.now += 10 if step == first else 1


def test_every_moment_is_booked_and_what_is_done_again_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "time", clock := Clock())
    path = tmp_path / "records"
    ledger = TimeLedger(began=90.0)
    ledger.at(0, "build")
    clock.now += 5
    record(path, ledger, 0, "run")
    train(ledger, clock, 1, 4)
    ledger.at(4, "save")
    clock.now += 2
    record(path, ledger, 4)
    train(ledger, clock, 5, 8)  # killed after that, with a checkpoint of step 4
    record(path, ledger, 8)
    whole = clock.now - 90.0

    clock.now += 1000
    again = TimeLedger(began=clock.now)
    again.resume(path, 4)
    cut_after(path, 4)
    record(path, again, 4)
    assert again.seconds["lost work"] == pytest.approx(4 * 1.5 + 9)
    train(again, clock, 5, 6)
    record(path, again, 6, "run")
    record(path, again, 6)
    found = goodput_of(iterate_records(path))
    assert found is not None and found.starts == 2
    assert found.seconds == pytest.approx(
        {"steps": 4.0, "first step": 20.0, "start-up": 15.0, "data wait": 3.0, "saves": 2.0, "lost work": 15.0}
    )
    assert found.wall == pytest.approx(whole + 10.5 + 1.5)
    assert str(found).startswith("6.8% of 59s in 2 starts; first step 33.9%")
    # A second fall back to the same checkpoint still knows the loss of the first.
    third = TimeLedger(began=clock.now)
    third.resume(path, 4)
    assert third.seconds["lost work"] == pytest.approx(15 + 12)


def test_a_run_without_times_has_none(tmp_path: Path) -> None:
    assert goodput_of([{"kind": "run", "step": 0}]) is None
    TimeLedger().resume(tmp_path / "none", 3)
