"""A run that starves says so: its steps take as long as they wait, and its tokens a second are what it gets."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import pretrain
from data.order import SampleSource
from tests.test_pretrain import SMALL, records

pytestmark = pytest.mark.slow


def test_a_starved_run_reports_what_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = SampleSource.sample

    def slow(self: SampleSource, *arguments: Any) -> object:
        time.sleep(0.05)
        return sample(self, *arguments)

    monkeypatch.setattr(SampleSource, "sample", slow)
    settings = ["precision=bf16", "data.num_workers=0", "train.steps=4", "checkpoint.interval=0"]
    assert pretrain.main([*SMALL, *settings, "logging.interval=4", f"run.dir={tmp_path}"]) == 0
    steps = records(tmp_path, "step")
    assert len(steps) == 4
    for step in steps:
        assert step["data_wait"] >= 8 * 0.05
        assert step["step_time"] >= step["data_wait"]
        assert step["tokens_per_second"] == pytest.approx(8 * 64 / step["step_time"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "  step 4/4  " in line]
    assert "  data wait " in line and "p99 " in line
