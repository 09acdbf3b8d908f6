import math
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest

from megatron_fp4.logging.metrics import MetricsWriter, StepMetrics
from megatron_fp4.logging.picture import look
from megatron_fp4.logging.plot import plot_loss, smooth, thinned
from scripts import plot_run


def write_run(run_dir, steps=100, entropy=None, losses=None, batch=4096):
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        writer.run(0, total_steps=steps, decay_start=int(0.8 * steps), unigram_entropy=entropy)
        for step in range(1, steps + 1):
            loss = math.nan if step == 30 else 3 + 5 * math.exp(-step / 20)
            phase, plan = ("broad", "nvfp4") if step <= 70 else ("narrow", "bf16")
            writer.step(StepMetrics(step, step * batch, loss, 1e-3, 1.0, 1e4, 0.1, 0.1, step == 30, phase, plan))
            if step % 20 == 0:
                writer.validation(step, step * batch, losses or {"code": loss - 0.2, "prose": loss + 0.4})
        writer.event(int(0.8 * steps), "switch", target="bf16")


@pytest.fixture
def axes(monkeypatch):
    """The axes of the figures that plot_loss closes, each with the texts of its figure's legend."""
    seen = []

    def close(figure):
        figure.axes[0].labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        figure.axes[0].inside = figure.axes[0].get_legend()
        seen.append(figure.axes[0])

    monkeypatch.setattr(plt, "close", close)
    return seen


def test_everything_known_about_the_run_is_drawn(tmp_path, axes):
    write_run(tmp_path / "mine", entropy={"code": 5.5, "prose": 6.0})
    target = plot_loss(tmp_path / "mine")
    assert target == tmp_path / "mine" / "loss.png"
    assert target.read_bytes().startswith(b"\x89PNG")
    labels = axes[0].labels
    assert labels[0] == "training, smoothed"
    assert labels[1].startswith("validation, code (")
    assert labels[3:] == ["unigram entropy, code (5.50)", "unigram entropy, prose (6.00)"]
    assert axes[0].inside is None  # the legend covers no curve
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
    assert axes[0].labels[-1] == "unigram entropy (6.25)"


def test_another_run_is_drawn_after_the_same_tokens(tmp_path, axes):
    """The other run's steps are half as large, so its step 40 stands at step 20."""
    write_run(tmp_path / "run", steps=60)
    write_run(tmp_path / "other", steps=100, batch=2048)
    plot_loss(tmp_path / "run", f"BF16={tmp_path / 'other'}")
    line = {line.get_label(): line for line in axes[0].get_lines()}["BF16: training, smoothed"]
    assert line.get_xdata()[39] == 20 and line.get_xdata()[99] == 50
    assert axes[0].get_title(loc="left").endswith(", beside BF16")
    assert sum(label.startswith("BF16: validation") for label in axes[0].labels) == 2
    plot_loss(tmp_path / "other", tmp_path / "run")  # which goes on for longer: only up to the last tokens
    line = {line.get_label(): line for line in axes[1].get_lines()}["run: training, smoothed"]
    assert np.nanmax(line.get_xdata()) == 100


def test_curves_differ_without_their_colours():
    looks = [look(index) for index in range(42)]
    assert len({(one.color, str(one.dash), one.marker) for one in looks}) == 42
    assert len({(str(one.dash), one.marker) for one in looks[:6]}) == 6
    assert len({one.color for one in looks[:7]}) == 7


def test_a_thinned_curve_keeps_its_extremes():
    steps, values = np.arange(100_000), np.sin(np.arange(100_000) / 500)
    values[77_777], values[5] = 9.0, math.nan
    short_steps, short = thinned(steps, values)
    assert len(short) < 2500 and np.nanmax(short) == 9.0 and short_steps[np.nanargmax(short)] == 77_777
    assert short_steps[0] == 0 and short_steps[-1] == 99_999


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


def test_the_command_prints_the_picture_or_one_line_of_error(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run")
    write_run(tmp_path / "other")
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    monkeypatch.setattr(sys, "argv", ["plot_run.py", run, "--baseline", f"BF16={other}"])
    plot_run.main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "loss.png")
    for wrong in ([str(tmp_path)], [run, "--baseline", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["plot_run.py", *wrong])
        with pytest.raises(SystemExit) as end:
            plot_run.main()
        errors = capsys.readouterr().err
        assert end.value.code == 2 and "name the folder of a run" in errors and len(errors.splitlines()) == 1
