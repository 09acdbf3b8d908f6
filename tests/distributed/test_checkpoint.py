"""Checkpoints of two processes: resumes have the same bits, saves are killed or fail. (test_resharding.py: other
meshes.)"""

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


def run(
    rank: int,
    root: str,
    until: int,
    interval: int = 2,
    kill_at: str | None = None,
    stop_rank: int | None = None,
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Resume from the newest checkpoint under `root`, if any, and train to step `until`; save every `interval` steps.

    kill_at: a key of `KILL_AT`. stop_rank: this rank gets SIGTERM before the last step but one.
    """
    mesh = toy_mesh()
    model, optimizer = toy(mesh, seed=3)
    step_state = StepState(seed=0)
    checkpointer = Checkpointer(Path(root), mesh, keep=2, identity={"run": 1}, asynchronous=asynchronous)
    resumed = checkpointer.resume("auto", model, optimizer, step_state, allow_mismatch=False)
    checkpointer.prepare(model, optimizer)
    start = 0 if resumed is None else resumed.step
    loaded = snapshot(model, optimizer)
    if kill_at is not None and rank == KILL_AT[kill_at][0]:
        setattr(*KILL_AT[kill_at][1:], _kill)
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
            draws += [random.random(), float(np.random.normal()), torch.rand(()).item()]
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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Six steps of two ranks without interruption."""
    return launch(run, 2, str(tmp_path_factory.mktemp("uninterrupted")), 6)


@pytest.fixture(scope="module")
def after_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of two ranks after two steps."""
    root = tmp_path_factory.mktemp("after_two")
    launch(run, 2, str(root), 2)
    return root


@pytest.fixture
def root(after_two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(after_two, tmp_path / "checkpoints"))


def assert_continues(resumed: list[dict[str, Any]], uninterrupted: list[dict[str, Any]], start: int) -> None:
    for one, other in zip(resumed, uninterrupted, strict=True):
        assert one["start"] == start
        assert one["losses"] == other["losses"][start:]
        assert one["draws"] == other["draws"][3 * start :]
        assert equal(one["final"], other["final"])


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(root: Path, uninterrupted: list[dict[str, Any]]) -> None:
    resumed = launch(run, 2, str(root), 6)
    assert_continues(resumed, uninterrupted, start=2)
    assert uninterrupted[0]["draws"] != uninterrupted[1]["draws"]
    assert resumed[0]["trainer"] == {"skipped": 0, "note": [1, 0.1]}
    assert resumed[0]["consumed"] == (16, 128)
    assert names(root) == ["latest", "step_00000004", "step_00000006"]
    assert (root / "latest").read_text() == "step_00000006\n"


def _kill(*arguments: Any, **_: Any) -> None:
    if arguments and isinstance(arguments[0], _HashingFile):
        arguments[0]._file.flush()  # so that a part of the file is on the disk
    os.kill(os.getpid(), signal.SIGKILL)


# Which rank is killed when it calls which function.
KILL_AT: dict[str, tuple[int, Any, str]] = {
    "staging": (1, Staging, "copy"),
    "half a shard": (1, _HashingFile, "finish"),
    "manifest": (0, checkpoint_files, "write_manifest"),
    "rename": (0, checkpoint_files, "publish"),
    "half pointer": (0, checkpoint_files.os, "replace"),
    "prune": (0, checkpoint_files, "prune"),
}


@pytest.mark.parametrize("stage", KILL_AT)
def test_a_run_killed_while_saving_resumes(root: Path, uninterrupted: list[dict[str, Any]], stage: str) -> None:
    """Every other stage with saves in the background."""
    asynchronous = list(KILL_AT).index(stage) % 2 == 0
    exit_codes: list[int] = []
    launch(run, 2, str(root), 8 if asynchronous else 4, 2, stage, None, asynchronous, exit_codes=exit_codes)
    assert -signal.SIGKILL in exit_codes and 0 not in exit_codes
    renamed = stage in ("half pointer", "prune")
    assert ("step_00000004" in names(root)) == renamed
    assert (root / "latest").read_text() == ("step_00000004\n" if stage == "prune" else "step_00000002\n")
    if stage == "half pointer":  # the run to step 4 has nothing to train or save, but writes the pointer
        assert (root / "latest.tmp").exists() and launch(run, 2, str(root), 4)[0]["start"] == 4
        assert (root / "latest").read_text() == "step_00000004\n"
    resumed = launch(run, 2, str(root), 6, 2, None, None, asynchronous)
    assert_continues(resumed, uninterrupted, start=4 if renamed else 2)
    assert not [name for name in names(root) if "." in name]


def _save_with_a_failing_write(rank: int, root: str, failing_rank: int) -> tuple[str, list[str], list[str], int]:
    """The error; the names under `root` after it, and after another save; the next save index."""
    mesh = toy_mesh()
    model, optimizer = toy(mesh)
    checkpointer = Checkpointer(Path(root), mesh, keep=0, identity={"run": 1})
    checkpointer.resume("auto", model, optimizer, StepState(0), allow_mismatch=False)

    def save_again() -> None:
        checkpointer.save(3, model, optimizer, {}, consumed_samples=0, consumed_tokens=0)

    checkpointer_module._PAUSES = (0.0,)
    if rank == failing_rank:  # its writes fail after 1,000 bytes of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        save_again()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    after_error = names(Path(root))
    dist.barrier()
    save_again()  # the process can save again
    return str(caught.value), after_error, names(Path(root)), checkpoint_files.next_save_index(Path(root))


def test_a_failing_write_fails_on_all_ranks_and_leaves_no_files(root: Path) -> None:
    for message, after_error, after_save, index in launch(_save_with_a_failing_write, 2, str(root), 1):
        assert "could not write" in message and "File too large" in message
        assert after_error == ["latest", "step_00000002"]
        assert after_save == ["latest", "step_00000002", "step_00000003"] and index == 3


def test_sigterm_to_one_rank_saves_and_resumes(root: Path, uninterrupted: list[dict[str, Any]]) -> None:
    """SIGTERM comes during a save in the background."""
    stopped = launch(run, 2, str(root), 7, 1, None, 1, True)
    assert all(one["stopped"] and one["start"] == 2 and len(one["losses"]) == 4 for one in stopped)
    assert "step_00000006" in names(root)
    assert equal(stopped[0]["final"], uninterrupted[0]["final"])
    assert launch(run, 2, str(root), 6)[1]["start"] == 6
