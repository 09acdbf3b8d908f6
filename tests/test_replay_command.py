"""scripts/replay.py on real runs: replayed steps equal the recorded ones, and differences are found. A replay on two
ranks over a rollback is in test_spikes_run.py."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import pretrain
from megatron_fp4.training import trainer
from scripts import replay
from tests.distributed.one_rank import flip_a_bit
from tests.programs import error_line
from tests.spiked_run import FAST, small_corpus, stamps
from tests.test_pretrain import SMALL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints after steps 2 and 4 and the switch before step 4."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = ["train.steps=4", "checkpoint.interval=2", "precision.switch.when=3", f"run.dir={folder}/run"]
    assert pretrain.main([*SMALL, *FAST, *small_corpus(folder), *settings]) == 0
    return folder / "run"


def test_replayed_steps_equal_the_recorded_ones_and_nothing_is_written(run_dir: Path, capsys) -> None:
    before = stamps(run_dir)
    checkpoint = str(run_dir / "checkpoints" / "step_00000002")
    for arguments, steps in (
        ([checkpoint, "--steps", "2"], [3, 4]),
        ([str(run_dir), "--step", "4"], [3, 4]),
        ([str(run_dir), "--step", "2"], [1, 2]),  # from the initial weights
    ):
        # As if the run had CUDA graphs, which a replay must not use.
        with mock.patch.object(trainer.build, "graphs_for", return_value=object()) as opened:
            assert replay.main([*arguments, "--trust-config"]) == 0 and opened.called
        lines = capsys.readouterr().out.splitlines()
        table = [line.split() for line in lines if line.endswith("equal")]
        assert [int(row[0]) for row in table] == steps
        assert all(row[1] == row[2] and row[3] == row[4] for row in table)
        assert f"{len(steps)} of {len(steps)} steps are equal to the last bit" in lines[-1]
    assert stamps(run_dir) == before


def test_a_difference_in_the_last_bit_is_found(run_dir: Path, tmp_path: Path, capsys) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["kind"] == "step" and record["step"] == 4:
            record["grad_norm"] = float(np.nextafter(record["grad_norm"], 9.0))
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    shutil.copytree(run_dir / "checkpoints" / checkpoint.name, checkpoint)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert replay.main([str(checkpoint), "--trust-config", "--steps", "2"]) == 4
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.endswith("DIFFERS")] == ["4"]
    assert "1 of 2 steps are equal" in printed


def test_wrong_input_gives_one_line_and_exit_code_2(run_dir: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    damaged = tmp_path / "damaged" / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, damaged)
    shutil.copy(run_dir / "metrics.jsonl", tmp_path / "damaged")
    flip_a_bit(next(damaged.glob("*.distcp")))
    for arguments, expected in (
        ([str(tmp_path)], "neither a checkpoint nor a run"),
        ([str(run_dir)], "give a step of it (--step 123)"),
        ([str(checkpoint), "--steps", "3"], "has no record of step 5, only of the steps 1 to 4"),
        ([str(checkpoint), "--step", "2"], "step 2 is not after step 2"),
        ([str(checkpoint), "run.deterministic=false"], "run.deterministic=false, so its bits"),
        ([str(checkpoint), "run.seed=7"], "run.seed"),
        ([str(damaged)], "step_00000002"),
    ):
        assert replay.main([*arguments, "--trust-config"]) == 2, arguments
        assert expected in error_line(capsys, "replay.py")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    assert replay.main([str(checkpoint), "--trust-config"]) == 2
    assert "made by 1 ranks, and 2 ranks add up" in capsys.readouterr().err
