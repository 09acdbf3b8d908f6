"""pretrain.py with masked documents: on one rank and two, resumed without them, looked into by everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pretrain
from data.indexed import IndexedDatasetWriter
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
        "precision.switch.when=gradient_noise",
        "precision.switch.interval=2",
        "precision.switch.threshold=1e-6",
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
    assert "attention within documents: PyTorch's SDPA with a mask" in " ".join(output.split())
    one, two = losses(masked), losses(tmp_path)
    assert two[1] == pytest.approx(one[1], rel=1e-5)
    assert [two[step][0] for step in two] == pytest.approx([one[step][0] for step in one], rel=1e-3)
    held_out = [[record["losses"]["web"] for record in records(folder, "validation")] for folder in (masked, tmp_path)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-3)
    assert len(records(tmp_path, "diagnostics")) == 2
    one, two = (records(folder, "gradient_noise")[0]["gradient_norm"] for folder in (masked, tmp_path))
    assert two == pytest.approx(one, rel=1e-4)
    assert not [r for r in records(tmp_path, "event") if r["event"] in ("replay", "recheck")]


def test_a_change_on_a_resume_is_said(
    masked: Path, few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = f"checkpoint.resume={masked}/checkpoints/step_00000002"
    capsys.readouterr()
    assert pretrain.main([*few, checkpoint, f"run.dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "changed since the checkpoint: data.documents masked -> joined" in printed
    assert "changed since the checkpoint: data.boundary_loss false -> true" in printed
    assert abs(losses(tmp_path)[3][0] - losses(masked)[3][0]) > 1e-4
