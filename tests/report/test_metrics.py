import json
import math
import os
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_fp4.report.metrics import METRICS_FILE, MetricsWriter, StepMetrics, cut_after, read_metrics


def metrics(step: int, loss: float = 3.0, skipped: bool = False) -> StepMetrics:
    return StepMetrics(
        step=step,
        tokens=step * 4096,
        loss=loss,
        lr=1e-3,
        grad_norm=1.5,
        tokens_per_second=40e3,
        model_tflops=0.02,
        step_time=0.1,
        skipped=skipped,
        phase="broad",
        plan="nvfp4",
    )


def write(run_dir, start, end, **options):
    with MetricsWriter(run_dir, resume_step=start, **{"tensorboard": False, **options}) as writer:
        writer.run(start, total_steps=10)
        for step in range(start + 1, end + 1):
            writer.step(metrics(step, loss=10.0 - step))
    return writer


def test_every_line_is_an_object_of_its_kind(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.run(0, total_steps=10, decay_start=8)
        writer.step(metrics(1))
        writer.validation(1, 4096, {"code": 2.0, "prose": 4.0})
        writer.event(1, "switch", target="bf16")
        # Flushed a line at a time: everything is readable before the file is closed.
        records = read_metrics(tmp_path / METRICS_FILE)
    assert [record["kind"] for record in records] == ["run", "step", "validation", "event"]
    assert records[0] == {"kind": "run", "step": 0, "total_steps": 10, "decay_start": 8}
    assert set(records[1]) == {"kind", *vars(metrics(1))}
    assert records[2] == {
        "kind": "validation",
        "step": 1,
        "tokens": 4096,
        "loss": 3.0,
        "losses": {"code": 2.0, "prose": 4.0},
    }
    assert records[3] == {"kind": "event", "step": 1, "event": "switch", "target": "bf16"}


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.step(metrics(1, loss=math.nan, skipped=True))
        writer.validation(1, 4096, {"code": math.inf})
        writer.event(1, "skip", norms=[math.nan, 1.0], nested={"loss": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    step, validation, event = (json.loads(line, parse_constant=refuse) for line in lines)
    assert step["loss"] is None
    assert step["skipped"] is True
    assert validation["losses"] == {"code": None}
    assert (event["norms"], event["nested"]) == ([None, 1.0], {"loss": None})


def test_resume_has_each_step_once(tmp_path):
    write(tmp_path, 0, 6)
    write(tmp_path, 4, 8)
    records = read_metrics(tmp_path / METRICS_FILE)
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 9))
    assert [record["step"] for record in records if record["kind"] == "run"] == [0, 4]


def test_resume_removes_the_line_that_a_kill_left_unfinished(tmp_path):
    write(tmp_path, 0, 6)
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-25])
    assert read_metrics(path)[-1]["step"] == 5
    write(tmp_path, 5, 7)
    assert [record["step"] for record in read_metrics(path) if record["kind"] == "step"] == list(range(1, 8))


def test_cut_after_is_atomic_and_counts(tmp_path, monkeypatch):
    write(tmp_path, 0, 6)
    path = tmp_path / METRICS_FILE
    before = path.read_bytes()

    def killed(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            cut_after(path, 2)
    assert path.read_bytes() == before
    assert cut_after(path, 2) == 4
    assert cut_after(path, 2) == 0
    assert cut_after(tmp_path / "missing.jsonl", 2) == 0


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st\n{"kind": "step", "step": 3}\n')
    with pytest.raises(ValueError, match=r"line 2 is not JSON .* remove that line"):
        read_metrics(path)


def test_a_fresh_start_moves_an_earlier_runs_records_aside(tmp_path):
    for end in (2, 3, 4):
        write(tmp_path, 0, end, tensorboard=True)
    assert [len(read_metrics(tmp_path / name)) for name in ("metrics.jsonl.1", "metrics.jsonl.2", METRICS_FILE)] == [
        3,
        4,
        5,
    ]
    assert (tmp_path / "tensorboard.1").is_dir()


def test_other_ranks_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", wandb_mode="offline", active=False) as writer:
        writer.run(0)
        writer.step(metrics(1))
        writer.validation(1, 1, {"code": 1.0})
        writer.event(1, "switch")
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_the_numbers_and_hides_what_resume_cut(tmp_path):
    write(tmp_path, 0, 6, tensorboard=True)
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        writer.step(metrics(5, loss=1.0))
        writer.validation(5, 5 * 4096, {"code": 2.5})
        writer.event(5, "switch", target="bf16")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
        (4, 6.0),
        (5, 1.0),
    ]
    assert [event.value for event in events.Scalars("validation/code")] == [2.5]


@pytest.mark.slow
def test_wandb_offline_keeps_its_run_across_resumes(tmp_path):
    first = write(tmp_path, 0, 2, wandb_mode="offline")
    assert first.wandb_run_id
    second = write(tmp_path, 2, 4, wandb_mode="offline", wandb_run_id=first.wandb_run_id)
    assert second.wandb_run_id == first.wandb_run_id
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first.wandb_run_id}*"))) == 2


@pytest.mark.slow
def test_wandb_online_obeys_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert write(tmp_path, 0, 1, wandb_mode="online").wandb_run_id
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_wandb_is_not_imported_when_disabled(tmp_path):
    code = (
        "import sys; from megatron_fp4.report.metrics import MetricsWriter; "
        f"MetricsWriter({str(tmp_path)!r}, tensorboard=False).close(); "
        "sys.exit('wandb' in sys.modules or 'tensorboard' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("wandb", {"wandb_mode": "offline", "tensorboard": False}, "logging.wandb=offline .* pip install wandb"),
        ("torch.utils.tensorboard", {}, "logging.tensorboard=true .* pip install tensorboard"),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch, module, options, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message):
        MetricsWriter(tmp_path, **options)
