"""Runs with checkpoints on the nodes' own disks, by processes that pretend to be nodes, and what they leave there."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.checkpoint.checkpointer import Checkpointer, CheckpointError
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.step import train_step
from tests.training.harness import launch, toy, toy_batches, toy_mesh, whole

SHARED = 4


@dataclass(frozen=True)
class Job:
    """A start: up to step `until`, with a shared checkpoint every 4 steps and a local one after every other step.

    nodes: of each rank, the node it is on; by default each has its own.
    """

    base: Path
    until: int
    nodes: tuple[int, ...] | None = None
    per_node: int = 1
    asynchronous: bool = True
    local: bool = True
    replicate: int = 1


def run(rank: int, job: Job, sabotage: Callable[[], None] | None = None) -> dict[str, Any]:
    """What one rank of a start finds and makes.

    sabotage: on any rank called before the last save, when those before it are done; None on all or on none.
    """
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(job.per_node), str(rank % job.per_node)
    node = rank // job.per_node if job.nodes is None else job.nodes[rank]
    mesh = toy_mesh(replicate=job.replicate)
    model, optimizer = toy(mesh, seed=3)
    clock = StepState(seed=0)
    checkpointer = Checkpointer(
        job.base / "checkpoints", mesh, keep=0, identity={"run": 1}, asynchronous=job.asynchronous,
        local_dir=job.base / f"node_{node}" if job.local else None, num_steps=100,
    )  # fmt: skip
    resumed = checkpointer.resume("auto", model, optimizer, clock, allow_mismatch=False)
    checkpointer.prepare(model, optimizer)
    start, back = 0 if resumed is None else resumed.step, checkpointer.last_step()
    losses, draws, reports = [], [], []
    for step in range(start, job.until):
        batches = toy_batches(step, mesh)
        result = train_step(model, optimizer, batches, mesh, clock, step=step, lr=1e-2, clip_norm=1.0)
        losses.append((result.loss, result.grad_norm))
        draws += [random.random(), torch.rand(()).item()]
        done = step + 1
        if sabotage is not None and done == job.until:
            checkpointer.finish()
            sabotage()
        if done % SHARED == 0 or job.local:
            checkpointer.save(
                done, model, optimizer, {"note": [done, 0.1]},
                consumed_samples=8 * done, consumed_tokens=64 * done, local=done % SHARED != 0,
            )  # fmt: skip
    checkpointer.finish()
    reports += checkpointer.reports()
    state = {**model.state_dict(), **optimizer_state(model, optimizer)}
    return {
        "start": start,
        "back": back,
        "local": resumed is not None and resumed.local,
        "trainer": None if resumed is None else resumed.trainer,
        "losses": losses,
        "draws": draws,
        "reports": [(report.step, report.local, report.error) for report in reports],
        "final": {name: whole(value) for name, value in state.items()},
    }


def run_all(rank: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """One start after the other; of those that are refused, the words."""
    results = []
    for job in jobs:
        try:
            results.append(run(rank, job))
        except (ValueError, CheckpointError) as error:
            results.append({"refused": str(error)})
    return results


def launch_all(world_size: int, jobs: list[Job]) -> list[list[dict[str, Any]]]:
    """Of each job, the results of all ranks."""
    return [list(of_job) for of_job in zip(*launch(run_all, world_size, jobs), strict=True)]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_continues(resumed: list[dict[str, Any]], straight: list[dict[str, Any]], start: int, local: bool) -> None:
    assert [(one["start"], one["local"]) for one in resumed] == [(start, local)] * len(resumed)
    for one, other in zip(resumed, straight, strict=True):
        assert one["losses"] == other["losses"][start:]
        assert one["draws"] == other["draws"][2 * start :]
        assert equal(one["final"], other["final"])


def parts(node: Path) -> set[tuple[int, int]]:
    """(rank, step) of the folders on a node, whatever the start."""
    names = [(path.parent.name, path.name) for path in node.glob("megatron_fp4_*/*/*/step_*")]
    return {(int(rank.removeprefix("rank_")), int(step.removeprefix("step_"))) for rank, step in names}
