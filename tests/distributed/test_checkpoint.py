"""Checkpoints with real processes: resume bit for bit, killed and failing saves. (On other numbers of ranks:
test_resharding.py.)"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp4.checkpoint import checkpointer as checkpointer_module
from megatron_fp4.checkpoint import files as checkpoint_files
from megatron_fp4.checkpoint.checkpointer import Checkpointer, CheckpointError
from megatron_fp4.checkpoint.shards import _HashingFile
from megatron_fp4.checkpoint.staging import Staging
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.signals import StopRequest
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.step import StepRequests
from tests.distributed.one_rank import names
from tests.training.harness import launch, toy, toy_batches, toy_mesh, train_step, whole

pytestmark = pytest.mark.slow


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {**model.state_dict(), **optimizer_state(model, optimizer)}
    return {name: whole(value) for name, value in state.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _draws() -> list[float]:
    return [random.random(), float(np.random.normal()), torch.rand(()).item()]


def run(
    rank: int,
    root: str,
    until: int,
    interval: int = 2,
    sabotage: str | None = None,
    stop_rank: int | None = None,
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Train to step `until` with a checkpoint every `interval` steps, resuming from what there is."""
    mesh = toy_mesh()
    model, optimizer = toy(mesh, seed=3)
    step_state = StepState(seed=0)
    checkpointer = Checkpointer(Path(root), mesh, keep=2, identity={"run": 1}, asynchronous=asynchronous)
    resumed = checkpointer.resume("auto", model, optimizer, step_state, allow_mismatch=False)
    checkpointer.prepare(model, optimizer)
    start = 0 if resumed is None else resumed.step
    loaded = snapshot(model, optimizer)
    if sabotage is not None and rank == SABOTAGE[sabotage][0]:
        setattr(*SABOTAGE[sabotage][1:], _kill)
    losses: list[tuple[float, float]] = []
    draws: list[float] = []
    stopped = False
    with StopRequest() as stop:
        for step in range(start, until):
            if rank == stop_rank and step == until - 2:
                os.kill(os.getpid(), signal.SIGTERM)
            batches, requests = toy_batches(step, mesh), StepRequests(stop=stop.requested)
            result = train_step(model, optimizer, batches, mesh, step_state, step=step, requests=requests)
            losses.append((result.loss, result.grad_norm))
            draws += _draws()
            done, stopped = step + 1, result.requests.stop
            if done % interval == 0 or stopped or done == until:
                checkpointer.save(
                    done, model, optimizer, {"skipped": 0, "note": [step, 0.1]},
                    consumed_samples=8 * done, consumed_tokens=64 * done,
                )  # fmt: skip
            if stopped:
                break
    checkpointer.finish()
    return {
        "start": start,
        "trainer": None if resumed is None else resumed.trainer,
        "consumed": None if resumed is None else (resumed.manifest.consumed_samples, resumed.manifest.consumed_tokens),
        "loaded": loaded,
        "losses": losses,
        "draws": draws,
        "final": snapshot(model, optimizer),
        "stopped": stopped,
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks, six steps without interruption."""
    return launch(run, 2, str(tmp_path_factory.mktemp("straight")), 6)


@pytest.fixture(scope="module")
def after_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two ranks' checkpoint after two steps."""
    root = tmp_path_factory.mktemp("after_two")
    launch(run, 2, str(root), 2)
    return root


@pytest.fixture
def root(after_two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(after_two, tmp_path / "checkpoints"))


def assert_continues(resumed: list[dict[str, Any]], straight: list[dict[str, Any]], start: int) -> None:
    for one, other in zip(resumed, straight, strict=True):
        assert one["start"] == start
        assert one["losses"] == other["losses"][start:]
        assert one["draws"] == other["draws"][3 * start :]
        assert equal(one["final"], other["final"])


def test_resumed_is_straight_bit_for_bit(root: Path, straight: list[dict[str, Any]]) -> None:
    resumed = launch(run, 2, str(root), 6)
    assert_continues(resumed, straight, start=2)
    assert straight[0]["draws"] != straight[1]["draws"]
    assert resumed[0]["trainer"] == {"skipped": 0, "note": [1, 0.1]}
    assert resumed[0]["consumed"] == (16, 128)
    assert names(root) == ["latest", "step_00000004", "step_00000006"]
    assert (root / "latest").read_text() == "step_00000006\n"


def _kill(*given: Any, **_: Any) -> None:
    if given and isinstance(given[0], _HashingFile):
        given[0]._file.flush()  # some of it is on the disk
    os.kill(os.getpid(), signal.SIGKILL)


# Which rank is killed when it comes to what.
SABOTAGE: dict[str, tuple[int, Any, str]] = {
    "staging": (1, Staging, "copy"),
    "half a shard": (1, _HashingFile, "finish"),
    "manifest": (0, checkpoint_files, "write_manifest"),
    "rename": (0, checkpoint_files, "publish"),
    "half pointer": (0, checkpoint_files.os, "replace"),
    "prune": (0, checkpoint_files, "prune"),
}


@pytest.mark.parametrize("stage", SABOTAGE)
def test_killed_while_saving(root: Path, straight: list[dict[str, Any]], stage: str) -> None:
    """At once, and in the background while the steps after it train, in turns."""
    asynchronous = list(SABOTAGE).index(stage) % 2 == 0
    exit_codes: list[int] = []
    launch(run, 2, str(root), 8 if asynchronous else 4, 2, stage, None, asynchronous, exit_codes=exit_codes)
    assert -signal.SIGKILL in exit_codes and 0 not in exit_codes
    renamed = stage in ("half pointer", "prune")
    assert ("step_00000004" in names(root)) == renamed
    assert (root / "latest").read_text() == ("step_00000004\n" if stage == "prune" else "step_00000002\n")
    if stage == "half pointer":  # a run that is finished saves no more
        assert (root / "latest.tmp").exists() and launch(run, 2, str(root), 4)[0]["start"] == 4
        assert (root / "latest").read_text() == "step_00000004\n"
    assert_continues(launch(run, 2, str(root), 6, 2, None, None, asynchronous), straight, start=4 if renamed else 2)
    assert not [name for name in names(root) if "." in name]


def test_saved_in_the_background_is_saved_at_once(root: Path, straight: list[dict[str, Any]]) -> None:
    """What is written while training continues is of one instant, also where each save waits for the one before."""
    in_background = launch(run, 2, str(root), 5, 1, None, None, True)
    assert_continues(launch(run, 2, str(root), 6, 2, None, None, True), straight, start=5)
    assert in_background[0]["losses"] == straight[0]["losses"][2:5]
    assert names(root) == ["latest", "step_00000005", "step_00000006"]


def _disk_full(rank: int, root: str, victim: int) -> tuple[str, list[str], list[str], int]:
    mesh = toy_mesh()
    model, optimizer = toy(mesh)
    checkpointer = Checkpointer(Path(root), mesh, keep=0, identity={"run": 1})
    checkpointer.resume("auto", model, optimizer, StepState(0), allow_mismatch=False)

    def save_again() -> None:
        checkpointer.save(3, model, optimizer, {}, consumed_samples=0, consumed_tokens=0)

    checkpointer_module._PAUSES = (0.0,)
    if rank == victim:  # this rank's writes fail after 1,000 bytes of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        save_again()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    left = names(Path(root))
    dist.barrier()
    save_again()  # the process is still good for another try
    return str(caught.value), left, names(Path(root)), checkpoint_files.next_save_index(Path(root))


def test_a_failing_write_is_known_to_all_and_leaves_nothing(root: Path) -> None:
    for message, left, later, index in launch(_disk_full, 2, str(root), 1):
        assert "could not write" in message and "File too large" in message
        assert left == ["latest", "step_00000002"]
        assert later == ["latest", "step_00000002", "step_00000003"] and index == 3


def test_sigterm_to_one_rank_saves_and_resumes(root: Path, straight: list[dict[str, Any]]) -> None:
    """While a save is on its way."""
    stopped = launch(run, 2, str(root), 7, 1, None, 1, True)
    assert all(one["stopped"] and one["start"] == 2 and len(one["losses"]) == 4 for one in stopped)
    assert "step_00000006" in names(root)
    assert equal(stopped[0]["final"], straight[0]["final"])
    assert launch(run, 2, str(root), 6)[1]["start"] == 6
