"""Saves on the nodes' own disks, with processes that pretend to be nodes: kills in the middle, full disks."""

from __future__ import annotations

import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.checkpoint import local as local_saves
from megatron_fp4.checkpoint import local_files, transfer
from tests.distributed.local_jobs import Job, assert_continues, launch_all, parts, run
from tests.training.harness import launch

pytestmark = pytest.mark.slow


# Kills


def _kill(*unused: Any, **unused_too: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, calls: int = 1) -> Callable[[], None]:
    """Kill this process when it comes to `owner.name` for that many times."""

    def sabotage() -> None:
        original, count = getattr(owner, name), iter(range(1, 100))
        setattr(owner, name, lambda *args, **kw: _kill() if next(count) == calls else original(*args, **kw))

    return sabotage


SABOTAGE = {
    "write": _before(local_saves, "write_shards"),
    "record": _before(local_files, "encode"),
    "receive": _before(transfer.Incoming, "finish"),
    "rename": _before(local_files, "publish"),
    "second rename": _before(local_files, "publish", calls=2),
    "prune": _before(local_files, "prune"),
}


# Who is killed, and from which steps the next start may go on: whether the others still heard that all had written is
# a matter of time.
KILLS = {
    ("write", (1,), True): {6},
    ("record", (0,), False): {6},
    ("receive", (1,), True): {6},
    ("rename", (0, 1), True): {6},
    ("rename", (1,), False): {6, 7},
    ("second rename", (0, 1), True): {6, 7},
    ("prune", (0, 1), True): {7},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two ranks on two nodes: what they leave when they end after six steps (a shared checkpoint of step 4, a local one
    of 6), and the straight run of eight steps."""
    folder = tmp_path_factory.mktemp("made")
    straight, _ = launch_all(2, [Job(folder / "straight", 8, local=False), Job(folder / "six", 6)])
    return folder / "six", straight


def _run_and_die(rank: int, job: Job, stage: str, victims: tuple[int, ...]) -> dict[str, Any]:
    return run(rank, job, SABOTAGE[stage] if rank in victims else lambda: None)


@pytest.fixture(scope="module")
def killed(made: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[list[int], list[dict[str, Any]]]]:
    """Of each kill in the local save of step 7: the exit codes, and the start that follows."""
    folder, jobs, codes = tmp_path_factory.mktemp("killed"), [], []
    for number, (stage, victims, asynchronous) in enumerate(KILLS):
        jobs.append(Job(Path(shutil.copytree(made[0], folder / str(number))), 7, asynchronous=asynchronous))
        codes.append([])
        launch(_run_and_die, 2, jobs[-1], stage, victims, exit_codes=codes[-1])
    after = launch_all(2, [Job(job.base, 8) for job in jobs])
    return dict(zip(KILLS, zip(codes, after, strict=True), strict=True))


@pytest.mark.parametrize("kill", KILLS)
def test_killed_while_saving(kill: Any, killed: Any, made: Any) -> None:
    (_, straight), (exit_codes, results) = made, killed[kill]
    assert -signal.SIGKILL in exit_codes and 0 not in exit_codes
    assert results[0]["start"] in KILLS[kill]
    assert_continues(results, straight, results[0]["start"], local=True)


# Saves that fail


@contextmanager
def _failing(stage: str) -> Iterator[None]:
    owner, name = {"write": (local_saves, "write_shards"), "receive": (transfer.Incoming, "_store")}[stage]
    original = getattr(owner, name)

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device", "part")

    def full_later(*arguments: Any) -> Any:
        yield next(original(*arguments))
        full()

    setattr(owner, name, full if stage == "write" else full_later)
    yield
    setattr(owner, name, original)


def _fail_and_go_on(rank: int, jobs: dict[str, Job]) -> dict[str, Any]:
    """Rank 1's local saves fail for five steps, then they do not."""
    results = {}
    for stage, job in jobs.items():
        with _failing(stage) if rank == 1 else nullcontext():
            first = run(rank, job)
        torch.distributed.barrier()
        results[stage] = first["reports"], run(rank, replace(job, until=job.until + 2))
    return results


def test_a_failing_local_save_ends_nothing(tmp_path: Path) -> None:
    jobs = {stage: Job(tmp_path / stage, 5) for stage in ("write", "receive")}
    for results in launch(_fail_and_go_on, 2, jobs):
        for stage, (reports, later) in results.items():
            assert [(step, local, error is None) for step, local, error in reports] == [
                (1, True, False), (2, True, False), (3, True, False), (4, False, True), (5, True, False),
            ], stage  # fmt: skip
            assert "rank 1: [Errno 28] No space left on device" in reports[0][2]
            assert (later["start"], later["local"]) == (4, False)
            assert later["reports"] == [(5, True, None), (6, True, None), (7, True, None)]
    assert parts(tmp_path / "write" / "node_0") == {(0, 6), (1, 6), (0, 7), (1, 7)}


def _full(rank: int, job: Job) -> Any:
    """The disk is full on node 1."""
    if rank == 1:
        local_saves.shutil.disk_usage = lambda _: namedtuple("usage", "free")(10)  # type: ignore[attr-defined]
    return run(rank, job)


def test_space_is_looked_at_before(tmp_path: Path) -> None:
    for result in launch(_full, 2, Job(tmp_path, 1, asynchronous=False)):
        ((_, _, error),) = result["reports"]
        assert "rank 1: [Errno 28] a local checkpoint needs 0.00 GB on each node, and 0.00 GB are free" in error
    assert not parts(tmp_path / "node_0") and not list(tmp_path.glob("node_*/**/*.distcp"))
