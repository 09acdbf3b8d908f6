"""A run from its start to its page: killed, resumed, finished, beside another one."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import pretrain
from megatron_fp4.config.schema import Config, RunConfig
from megatron_fp4.logging.files import REPORT_FILE
from megatron_fp4.logging.run_folder import open_run, read_records
from megatron_fp4.logging.run_log import goodput_of
from megatron_fp4.runtime.revision import revision
from megatron_fp4.training.callbacks.reporting import report as write_page
from scripts import report
from tests.programs import ROOT, Program
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]

STEPS = 1000  # of the start that is killed: more than it gets to


def steps_of(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(line.startswith('{"kind": "step"') and line.endswith("}") for line in lines)


def test_a_killed_run_resumes_and_its_page_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small run whose length may change without changing what was: one phase, a learning rate that stays."""
    run_dir = tmp_path / "nvfp4"
    overrides = [*SMALL, *FAST, *small_corpus(tmp_path), "precision=bf16", f"run.dir={run_dir}"]
    overrides += ["schedule.decay_fraction=0", "schedule.warmup_fraction=0", "checkpoint.interval=4"]
    process = Program([ROOT / "pretrain.py", *overrides, f"train.steps={STEPS}"])
    try:
        while steps_of(run_dir) < 6:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    killed_at = steps_of(run_dir)
    checkpoints = sorted((run_dir / "checkpoints").glob("step_*[0-9]"))
    resumed_at = int(checkpoints[-1].name.removeprefix("step_"))
    lost = killed_at - resumed_at
    assert lost >= 0 and not (run_dir / REPORT_FILE).exists()

    # It resumes for four steps more, beside a baseline: itself, copied.
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_bytes((run_dir / "metrics.jsonl").read_bytes())
    last = resumed_at + 4
    baseline = f'logging.baseline="BF16={other}"'
    resumed = [*overrides, f"train.steps={last}", "logging.report=true", baseline]
    assert pretrain.main(resumed) == 0
    saved = json.loads((run_dir / "checkpoints" / f"step_{last:08d}" / "trainer.json").read_text())
    assert saved["commit"] == open_run(run_dir).facts["commit"] == revision()
    found = goodput_of(read_records(run_dir))
    assert found is not None and found.starts == 2 and 0 < found.share < 1
    assert found.seconds["start-up"] > 0 and found.seconds["saves"] > 0
    assert found.seconds.get("lost work", 0.0) > 0 or lost < 10  # a killed start has its times every ten steps
    assert json.loads((run_dir / "summary.json").read_text())["goodput"] == str(found)

    page = (run_dir / REPORT_FILE).read_text()
    assert "loss above BF16 in percent" in page and "2 starts" in page
    assert open_run(run_dir).facts["parameters"] > 0 and open_run(run_dir).facts["quantized_flops"] == 0

    # Found finished, it is left as it is.
    before = (run_dir / REPORT_FILE).stat().st_mtime_ns
    assert pretrain.main(resumed) == 0
    assert (run_dir / REPORT_FILE).stat().st_mtime_ns == before

    # On demand, by the command; and a mistake is a line.
    capsys.readouterr()
    assert report.main([f"A={run_dir}", f"B={other}", "--output", str(tmp_path / "two.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "two.html")
    assert report.main([str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1 and "name the folder of a run" in errors


def test_a_page_that_fails_is_one_warning_of_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("megatron_fp4.logging.page.write_report", fails)
    trainer = MagicMock(config=Config(run=RunConfig(dir=str(tmp_path))))
    trainer.log.active = False
    write_page(trainer, pretrain.CONFIGS)  # as on the other ranks, which write nothing
    assert not caplog.records
    trainer.log.active = True
    write_page(trainer, pretrain.CONFIGS)
    (record,) = caplog.records
    assert "RuntimeError: no fonts" in record.message and "the run is not affected" in record.message
