import math
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from megatron_fp4.report.metrics import MetricsWriter, StepMetrics
from megatron_fp4.report.plot import plot_loss, smooth

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_run.py"


def write_run(run_dir, steps=100, entropy=None, losses=None):
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        writer.run(0, total_steps=steps, decay_start=int(0.8 * steps), unigram_entropy=entropy)
        for step in range(1, steps + 1):
            loss = math.nan if step == 30 else 3 + 5 * math.exp(-step / 20)
            phase, plan = ("broad", "nvfp4") if step <= 70 else ("narrow", "bf16")
            writer.step(StepMetrics(step, step * 4096, loss, 1e-3, 1.0, 1e4, 0.1, 0.1, step == 30, phase, plan))
            if step % 20 == 0:
                writer.validation(step, step * 4096, losses or {"code": loss - 0.2, "prose": loss + 0.4})
        writer.event(int(0.8 * steps), "switch", target="bf16")


@pytest.fixture
def axes(monkeypatch):
    """The axes of the figure that plot_loss closes."""
    seen = []
    monkeypatch.setattr(plt, "close", lambda figure: seen.append(figure.axes[0]))
    return seen


def test_everything_known_about_the_run_is_drawn(tmp_path, axes):
    write_run(tmp_path / "mine", entropy={"code": 5.5, "prose": 6.0})
    target = plot_loss(tmp_path / "mine")
    assert target == tmp_path / "mine" / "loss.png"
    assert target.read_bytes().startswith(b"\x89PNG")
    labels = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert labels[0] == "training (smoothed)"
    assert labels[1].startswith("validation: code (")
    assert labels[3:] == ["unigram entropy: code (5.50)", "unigram entropy: prose (6.00)"]
    notes = [text.get_text() for text in axes[0].texts]
    assert notes == ["broad", "narrow", "decay starts, switch to bf16"]
    assert axes[0].get_title(loc="left") == "mine: nvfp4, then bf16; 410k tokens"
    assert axes[0].get_ylabel() == "loss (nats per token)"


def test_a_run_that_just_started_can_be_drawn(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.step(StepMetrics(1, 1, math.nan, 1e-3, 1.0, 1.0, 1.0, 1.0, True, "main", "bf16"))
    assert plot_loss(tmp_path).exists()
    with MetricsWriter(tmp_path, resume_step=1, tensorboard=False) as writer:
        writer.validation(1, 1, {"code": math.nan})
        writer.step(StepMetrics(2, 2, 3.0, 1e-3, 1.0, 1.0, 1.0, 1.0, False, "main", "bf16"))
    assert plot_loss(tmp_path).exists()


def test_a_pooled_unigram_entropy_is_one_line(tmp_path, axes):
    write_run(tmp_path, entropy=6.25)
    plot_loss(tmp_path)
    assert axes[0].get_legend().get_texts()[-1].get_text() == "unigram entropy (6.25)"


def test_smoothing_follows_a_line_and_averages_noise():
    line = np.linspace(10, 2, 1000)
    assert np.allclose(smooth(line)[:-10], line[:-10])
    noise = np.random.default_rng(0).normal(size=5000)
    assert np.std(smooth(noise)[50:-50]) < 0.15


def test_smoothing_leaves_nan_out():
    values = np.ones(1000)
    values[[10, 500]] = math.nan
    assert np.allclose(smooth(values), 1.0)
    assert np.isnan(smooth(np.full(5, math.nan))).all()


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist; name the folder of a run"):
        plot_loss(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run", "step": 0}\n')
    with pytest.raises(ValueError, match="no training steps yet"):
        plot_loss(tmp_path)


@pytest.mark.slow
def test_the_command_prints_the_picture_or_one_line_of_error(tmp_path):
    write_run(tmp_path / "run")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "run"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "run" / "loss.png")
    failed = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert len(failed.stderr.splitlines()) == 1
    assert "name the folder of a run" in failed.stderr
