"""STOP and SAVE files, and the clock."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from megatron_fp4.runtime import stop_conditions as module
from megatron_fp4.runtime.signals import StopRequest
from megatron_fp4.runtime.stop_conditions import StopConditions


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY", 0.0)


def test_files_are_seen_by_the_first_rank_and_removed_when_obeyed(tmp_path: Path) -> None:
    first = StopConditions(tmp_path, 0.0, StopRequest(), active=True)
    other = StopConditions(tmp_path, 0.0, StopRequest(), active=False)
    assert not (first.stop or first.save)
    (tmp_path / "SAVE").touch()
    assert first.save and not first.stop and not other.save
    first.obeyed()
    assert not (tmp_path / "SAVE").exists() and not first.save

    (tmp_path / "STOP").touch()
    assert first.stop and first.why_stop == "the file STOP" and not other.stop
    first.obeyed()
    assert not (tmp_path / "STOP").exists()
    assert first.stop and first.why_stop == "the file STOP"  # it has been obeyed, not taken back


def test_a_request_that_comes_during_a_save_is_not_lost(tmp_path: Path) -> None:
    conditions = StopConditions(tmp_path, 0.0, StopRequest(), active=True)
    assert not conditions.stop
    (tmp_path / "STOP").touch()  # after the step asked
    conditions.obeyed()
    assert conditions.stop


def test_a_stop_from_before_the_start_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "STOP").touch()
    with caplog.at_level(logging.WARNING):
        assert not StopConditions(tmp_path, 0.0, StopRequest(), active=True).stop
    assert "meant for the run before: removed" in caplog.text and not (tmp_path / "STOP").exists()


def test_minutes_count_from_the_start_of_the_process(tmp_path: Path) -> None:
    signals = StopRequest()
    conditions = StopConditions(tmp_path, 2.0, signals, active=True)
    signals.began -= 119
    assert not conditions.stop
    signals.began -= 2
    assert conditions.stop and conditions.why_stop == "run.max_minutes=2"
    assert not StopConditions(tmp_path, 2.0, signals, active=False).stop  # clocks differ: one decides
    assert not StopConditions(tmp_path, 0.0, signals, active=True).stop
    signals.received = signal.SIGHUP
    assert conditions.why_stop == "SIGHUP"
