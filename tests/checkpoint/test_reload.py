"""A checkpoint loaded again in the middle of its run, and what happens when it is gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import pretrain
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import Checkpointer, CheckpointGoneError
from megatron_fp4.config.schema import SpikesConfig
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.spikes import Spike
from megatron_fp4.training.step import train_step
from tests.training.harness import alone, toy, toy_batches, whole


def state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return {n: whole(value).clone() for n, value in {**model.state_dict(), **optimizer_state(model, optimizer)}.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("damage", ["none", "a bit", "the folder"])
def test_reload(damage: str, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = files.publish

    def slowly(*folders: Path) -> None:
        time.sleep(0.5)  # the steps below take less: who does not wait for the save finds no checkpoint
        publish(*folders)

    monkeypatch.setattr(files, "publish", slowly)
    with alone() as mesh:
        model, optimizer = toy(mesh)
        clock = StepState(0)
        checkpointer = Checkpointer(tmp_path, mesh, keep=1, identity={}, asynchronous=asynchronous)
        assert checkpointer.resume("auto", model, optimizer, clock, allow_mismatch=False) is None
        checkpointer.prepare(model, optimizer)
        assert checkpointer.last_step() is None

        def train(step: int) -> None:
            train_step(model, optimizer, toy_batches(step, mesh), mesh, clock, step=step, lr=1e-2, clip_norm=1.0)

        train(0)
        folder = checkpointer.save(1, model, optimizer, {"note": 1}, consumed_samples=8, consumed_tokens=64)
        saved, draws = state(model, optimizer), torch.get_rng_state()
        train(1)
        torch.rand(3)
        moved, version = state(model, optimizer), clock.weights_version
        assert checkpointer.last_step() == 1 and not same(moved, saved)
        if damage == "none":
            reloaded = checkpointer.reload(model, optimizer, clock)
            assert (reloaded.step, reloaded.trainer, reloaded.path) == (1, {"note": 1}, folder)
            assert same(state(model, optimizer), saved) and torch.equal(torch.get_rng_state(), draws)
            assert clock.weights_version > version  # quantized weights that linears kept are of other weights
            return
        if damage == "a bit":
            shard = next(folder.glob("*.distcp"))
            content = bytearray(shard.read_bytes())
            content[len(content) // 2] ^= 1
            shard.write_bytes(content)
        else:
            folder.rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointGoneError, match="step_00000001"):
            checkpointer.reload(model, optimizer, clock)
        assert same(state(model, optimizer), moved) and clock.weights_version == version


def test_a_spike_whose_checkpoint_is_gone_is_skipped_and_says_why() -> None:
    run = MagicMock()
    run.config.spikes = SpikesConfig(action="rollback")
    run.config.train.global_batch_size = 8
    run.phases.source_ranges.return_value = []
    run.roll_back.side_effect = CheckpointGoneError("it is no longer there")
    pretrain.answer_spike(run, Spike(9, 9.0, 2.0, 3.0, 1.0, 1.0, 2.0, 1, 1), lambda: "never asked")
    (_, answer), details = run.log.spike.call_args
    assert answer == "skipped, because going back failed: it is no longer there"
    assert (details["action"], details["checkpoint"], details["steps"]) == ("skip", None, [9, 9])
