"""A checkpoint loaded again in the middle of its run, and what happens when it is gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import Checkpointer, CheckpointGoneError
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import optimizer_state
from tests.training.harness import alone, toy, toy_batches, train_step, whole


def state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return {n: whole(value).clone() for n, value in {**model.state_dict(), **optimizer_state(model, optimizer)}.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("damage", "asynchronous"), [("none", True), ("a bit", True), ("the folder", False)])
def test_reload(damage: str, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = files.publish

    def slowly(*folders: Path) -> None:
        time.sleep(0.5)  # the steps below take less: who does not wait for the save finds no checkpoint
        publish(*folders)

    monkeypatch.setattr(files, "publish", slowly)
    with alone() as mesh:
        model, optimizer = toy(mesh)
        step_state = StepState(0)
        checkpointer = Checkpointer(tmp_path, mesh, keep=1, identity={}, asynchronous=asynchronous)
        assert checkpointer.resume("auto", model, optimizer, step_state, allow_mismatch=False) is None
        checkpointer.prepare(model, optimizer)
        assert checkpointer.last_step() is None

        def train(step: int) -> None:
            train_step(model, optimizer, toy_batches(step, mesh), mesh, step_state, step=step, lr=1e-2, clip_norm=1.0)

        train(0)
        folder = checkpointer.save(1, model, optimizer, {"note": 1}, consumed_samples=8, consumed_tokens=64)
        saved, draws = state(model, optimizer), torch.get_rng_state()
        train(1)
        torch.rand(3)
        moved, version = state(model, optimizer), step_state.weights_version
        assert checkpointer.last_step() == 1 and not same(moved, saved)
        if damage == "none":
            reloaded = checkpointer.load(None, model, optimizer, step_state, allow_mismatch=False)
            assert (reloaded.step, reloaded.trainer, reloaded.folder) == (1, {"note": 1}, folder)
            assert same(state(model, optimizer), saved) and torch.equal(torch.get_rng_state(), draws)
            assert step_state.weights_version > version  # quantized weights that linears kept are of other weights
            return
        if damage == "a bit":
            shard = next(folder.glob("*.distcp"))
            content = bytearray(shard.read_bytes())
            content[len(content) // 2] ^= 1
            shard.write_bytes(content)
        else:
            folder.rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointGoneError, match="step_00000001"):
            checkpointer.load(None, model, optimizer, step_state, allow_mismatch=False)
        assert same(state(model, optimizer), moved) and step_state.weights_version == version
