import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.indexed import write_dataset
from megatron_fp4.config.schema import Config, RunConfig
from megatron_fp4.logging.files import REPORT_FILE
from megatron_fp4.training.callbacks import reporting
from megatron_fp4.training.callbacks.profiling import Profile
from megatron_fp4.training.callbacks.reporting import LiveReport, peak_of
from megatron_fp4.training.trainer import Step
from tests.logging.test_page import write_run
from tests.programs import wait_until
from tests.spiked_run import FAST, printed_by
from tests.test_pretrain import SMALL


@pytest.mark.slow
def test_the_page_is_rewritten_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process at a time, not before it is due, and none is left when the run ends."""
    started: list[Any] = []
    start = reporting.start_script
    monkeypatch.setattr(reporting, "start_script", lambda *arguments: started.append(start(*arguments)) or started[-1])
    run, step = write_run(tmp_path / "run"), SimpleNamespace()
    trainer: Any = SimpleNamespace(config=Config(run=RunConfig(dir=str(run))), log=SimpleNamespace(active=True))
    early, live = LiveReport(minutes=60), LiveReport(minutes=1e-9)
    for callback in (early, live):
        callback.trainer = trainer
        for _ in range(3):
            callback.after_step(step)  # type: ignore[arg-type]
    assert len(started) == 1
    wait_until(lambda: started[0].poll() is not None)
    assert started[0].returncode == 0 and "steps" in (run / REPORT_FILE).read_text()
    live.after_step(step)  # type: ignore[arg-type]
    assert len(started) == 2
    live.close()
    assert started[1].returncode == -9


def test_steps_without_a_counted_target_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "tokens", np.arange(6000).reshape(6000, 1) % 512, np.uint16)  # documents of one token
    phases = "data.phases=[{name: main, fraction: 1.0, blend: {only: 1}}]"
    source = ["data=indexed", f"data.sources={{only: {tmp_path}/tokens}}", phases]
    masked = ["data.documents=masked", "data.boundary_loss=false", "train.steps=3", f"run.dir={tmp_path}/run"]
    printed = printed_by([*SMALL, *FAST, *source, *masked], capsys, 0)
    assert printed.count("no target of this step counts") == 1


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peak_flops_by_the_name_of_the_gpu(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def profiled(folder, steps, window, rank=0):
    config = SimpleNamespace(run=SimpleNamespace(dir=str(folder)), logging=SimpleNamespace(profile_steps=window))
    trainer = SimpleNamespace(config=config, mesh=SimpleNamespace(rank=rank, device=torch.device("cpu")))
    profile = Profile()
    profile.trainer = trainer
    profile.start(0)
    for step in steps:
        with profile.around_step(Step(step, [], 0.0)):
            torch.ones(step + 2, 3) @ torch.ones(3, 4)
    profile.close()
    return sorted(path.name for path in folder.iterdir())


def test_a_window_is_profiled_on_the_first_rank_and_ends_with_the_run(tmp_path):
    assert profiled(tmp_path, range(3), [1, 2], rank=1) == profiled(tmp_path, range(5, 8), [1, 2]) == []
    assert profiled(tmp_path, range(6), [2, 4]) == ["profile_steps_2-4.json.gz", "profile_steps_2-4.txt"]
    assert "aten::mm" in (tmp_path / "profile_steps_2-4.txt").read_text()
    events = json.loads(gzip.decompress((tmp_path / "profile_steps_2-4.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 3
    (resumed := tmp_path / "resumed").mkdir()
    assert profiled(resumed, range(5, 9), [3, 11]) == ["profile_steps_6-9.json.gz", "profile_steps_6-9.txt"]
