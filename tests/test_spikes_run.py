"""Spikes in whole runs: skips and rollbacks, the same on all ranks and in a resumed run."""

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fp4.training import build, trainer
from scripts import replay
from tests.spiked_run import small_corpus, spiked_run, spiking
from tests.test_pretrain import assert_same_checkpoint, records
from tests.training.harness import launch

pytestmark = pytest.mark.slow
LAST = Path("checkpoints", "step_00000012")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def start(folder: Path, corpus: list[str], *overrides: str, spikes: list[int], **settings: Any) -> list[Any]:
    """Run on two ranks; returns what `spiked_run` returns on each."""
    arguments, kill_before = [*corpus, f"run.dir={folder}", *overrides], settings.pop("kill_before", None)
    return launch(spiked_run, 2, arguments, spikes, 20.0, kill_before, **settings)


def steps(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm", "lr", "plan", "skipped")
    return [tuple(record[name] for name in names) for record in records(folder, "step")]


def _replayed(rank: int, run_dir: Path, spikes: list[int]) -> tuple[int, str]:
    """Replay the steps 6 to 12; returns the exit code and what scripts/replay.py printed."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.dict("os.environ", WORLD_SIZE="2"),
        mock.patch.object(build, "init_distributed", lambda *_: torch.device("cpu")),
        mock.patch.object(trainer, "accumulate", spiking(rank, spikes, 20.0)),
    ):
        arguments = [f"{run_dir}/checkpoints/step_00000005", "--steps", "7", "--trust-config"]
        return replay.replay(replay.parse(arguments)), printed.getvalue()


def test_a_rollback_survives_a_kill_and_can_be_replayed(corpus: list[str], tmp_path: Path) -> None:
    """Checkpoints follow steps 5 and 10, the switch precedes step 6. Steps 4 (no checkpoint yet) and 9 are spikes."""
    straight, killed, settings = tmp_path / "straight", tmp_path / "killed", ("spikes.action=rollback",)
    for of_rank in start(straight, corpus, *settings, spikes=[4, 9]):
        assert of_rank["10"] == of_rank["6"] != of_rank["9"]  # weights, moments and generators
    early, event = records(straight, "spike")
    assert (early["step"], early["action"], early["checkpoint"], early["steps"]) == (4, "skip", None, [4, 4])
    assert (event["step"], event["action"], event["checkpoint"], event["steps"]) == (9, "rollback", 5, [6, 9])
    assert event["samples"] == [20, 35]
    assert sum(source["last"] - source["first"] + 1 for source in event["sources"]) == 4 * 4
    assert event["loss"] > event["loss_limit"] > event["loss_median"] and (event["in_row"], event["total"]) == (1, 2)
    # The rollback undoes the switch, which happens again.
    assert [record["step"] for record in records(straight, "switch")] == [6, 10]
    assert [record[0] for record in steps(straight)] == list(range(1, 13))
    assert [record[0] for record in steps(straight) if record[-1]] == [4, 9]

    codes: list[int] = []
    start(killed, corpus, *settings, spikes=[4, 9], kill_before=10, exit_codes=codes)
    assert any(codes) and steps(killed)[-1][0] == 9 and not (killed / "checkpoints" / "step_00000010").exists()
    start(killed, corpus, *settings, spikes=[4, 9])
    assert steps(killed) == steps(straight)
    assert_same_checkpoint(straight / LAST, killed / LAST, tmp_path)

    (code, printed), _ = launch(_replayed, 2, straight, [9])
    assert code == 0 and "7 of 7 steps are equal to the last bit" in printed and "DIFFERS" not in printed


def test_all_ranks_skip_the_same_spikes_and_too_many_end_the_run_with_a_diagnosis(corpus: list[str], tmp_path) -> None:
    settings = ("spikes.action=skip", "spikes.max_in_row=2")
    first, second = start(tmp_path, corpus, *settings, spikes=[9, 11, 12])
    assert first == second
    assert [record[0] for record in steps(tmp_path) if record[-1]] == [9, 11, 12]
    events = records(tmp_path, "spike")
    assert [(e["action"], e["checkpoint"], e["steps"], e["in_row"]) for e in events] == [
        ("skip", None, [9, 9], 1),
        ("skip", None, [11, 11], 1),
        ("end", None, [12, 12], 2),
    ]
    assert not records(tmp_path, "skip")  # the event of steps that are not finite
    message = first["error"]
    assert message.startswith("2 spikes in a row (spikes.max_in_row=2), the last in step 12: loss ")
    assert "Computed again: loss" in message and "as before. Largest losses" in message and "NOT" not in message
    assert "on rank 1" in message.split("Largest losses: ")[1].split(",")[0]
