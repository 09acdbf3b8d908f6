"""pretrain.py with masked documents: on one rank and two, resumed with and without them, looked into by everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pretrain
from data.indexed_dataset import IndexedDatasetWriter
from tests.test_pretrain import SMALL, losses, records, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_groups_left")]

MASKED = ["data.documents=masked", "data.boundary_loss=false"]


def write_text(path: Path, documents: int) -> None:
    """Documents of 1 to 60 tokens: some samples have a dozen of them, others two."""
    generator = np.random.default_rng(documents)
    with IndexedDatasetWriter(path, np.uint16) as writer:
        for document in range(documents):
            writer.add_document(generator.zipf(1.3, generator.integers(1, 9 if document % 20 < 10 else 60)) % 512)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "web", 900)
    write_text(folder / "held_out", 90)
    return [
        *SMALL,
        "train.steps=4",
        "validation.interval=2",
        "checkpoint.interval=2",
        "logging.tensorboard=false",
        "schedule.decay_fraction=0.25",
        "data=indexed",
        "data.num_workers=0",
        f"data.sources={{web: {folder}/web}}",
        f"data.validation={{web: {folder}/held_out}}",
        "data.phases=[{name: main, fraction: 1.0, blend: {web: 1.0}}]",
    ]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory, few: list[str]) -> Path:
    """The folder of a masked run of 4 steps. Not to be changed."""
    folder = tmp_path_factory.mktemp("masked") / "run"
    assert pretrain.main([*few, *MASKED, f"run.dir={folder}"]) == 0
    return folder


def test_two_ranks_find_the_losses_of_one_and_nothing_that_watches_objects(
    masked: Path, few: list[str], tmp_path: Path
) -> None:
    """Ranks have other numbers of targets that count. In FP4 the later steps differ by rounding, the first hardly."""
    watched = ["run.replay_interval=2", "precision.diagnostics.interval=2", "precision.recheck_interval=2"]
    output = run(2, [*few, *MASKED, *watched, f"run.dir={tmp_path}", "data.num_workers=1"])
    assert "attention within documents: its own choice, with a mask" in " ".join(output.split())
    one, two = losses(masked), losses(tmp_path)
    assert two[1] == pytest.approx(one[1], rel=1e-5)
    assert [two[step][0] for step in two] == pytest.approx([one[step][0] for step in one], rel=1e-3)
    held_out = [[record["losses"]["web"] for record in records(folder, "validation")] for folder in (masked, tmp_path)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-3)
    assert len(records(tmp_path, "diagnostics")) == 2
    assert not [r for r in records(tmp_path, "event") if r["event"] in ("replay", "recheck")]


def test_the_three_ways_are_three_losses(masked: Path, few: list[str], tmp_path: Path) -> None:
    ways = {"joined": [], "all": ["data.documents=masked"]}
    for name, overrides in ways.items():
        assert pretrain.main([*few, *overrides, "train.steps=1", f"run.dir={tmp_path / name}"]) == 0
    first = [losses(folder)[1][0] for folder in (tmp_path / "joined", tmp_path / "all", masked)]
    assert min(abs(first[a] - first[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 1e-4


def test_a_resume_repeats_the_run_and_a_change_is_said(
    masked: Path, few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = f"checkpoint.resume={masked}/checkpoints/step_00000002"
    assert pretrain.main([*few, *MASKED, checkpoint, f"run.dir={tmp_path / 'same'}"]) == 0
    assert losses(tmp_path / "same") == {step: losses(masked)[step] for step in (3, 4)}
    capsys.readouterr()
    assert pretrain.main([*few, checkpoint, f"run.dir={tmp_path / 'other'}"]) == 0
    printed = capsys.readouterr().out
    assert "changed since the checkpoint: data.documents masked -> joined" in printed
    assert "changed since the checkpoint: data.boundary_loss false -> true" in printed
    assert losses(tmp_path / "other")[3] != losses(masked)[3]


def test_a_spike_is_computed_again_with_them(few: list[str], tmp_path: Path) -> None:
    """Every step is a spike by this threshold; the last of them is diagnosed, and comes out as it was."""
    spikes = ["spikes.action=skip", "spikes.threshold=1e-9", "spikes.min_history=2", "spikes.max_in_row=2"]
    noise = [f"precision.switch.{o}" for o in ("when=gradient_noise", "interval=2", "threshold=1e-6")]
    overrides = [*few, *MASKED, "train.steps=12", "optimizer.lr=1e-9", *spikes, *noise, f"run.dir={tmp_path}"]
    output = run(2, overrides, code=1)  # torchrun's own
    assert records(tmp_path, "gradient_noise")
    assert "Computed again: loss" in output and "as before" in output and "NOT as before" not in output
