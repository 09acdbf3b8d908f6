"""Checkpoints of format 1, by torch.distributed.checkpoint's own writer, still load."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.checkpoint.shards import capture_random_state, state_of
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import optimizer_state
from tests.training.harness import launch, toy, toy_batches, toy_mesh, train_step, whole

pytestmark = pytest.mark.slow
STEP = 3


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {**model.state_dict(), **optimizer_state(model, optimizer)}
    return {name: whole(value) for name, value in state.items()}


def _draws() -> tuple[float, ...]:
    return random.random(), float(np.random.normal()), torch.rand(()).item()


def _save_as_format_1(rank: int, root: str) -> dict[str, Any]:
    """As the first version of this project saved: returns weights and moments, and what is drawn next."""
    mesh = toy_mesh()
    model, optimizer = toy(mesh, seed=3)
    for step in range(STEP):
        train_step(
            model, optimizer, toy_batches(step, mesh), mesh, StepState(seed=0), step=step, lr=1e-2, clip_norm=1.0
        )  # fmt: skip
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    folder = Path(root) / files.folder_name(STEP)
    folder.mkdir(parents=True, exist_ok=True)
    save(state_of(model, optimizer), storage_writer=FileSystemWriter(folder))
    files.write_file(folder / f"rng_{rank:05d}.pt", capture_random_state(mesh.device))
    dist.barrier()
    if rank == 0:
        files.write_file(folder / "trainer.json", '{"note": [1, 0.1]}')
        records = {path.name: files.write_file(path, path.read_bytes()) for path in folder.iterdir()}
        files.write_manifest(folder, files.Manifest(1, STEP, 24, 192, 2, {"run": 1}, records, "2.7.0", format=1))
        files.write_pointer(folder)
    return {"tensors": _tensors(model, optimizer), "draws": _draws()}


def _load(rank: int, root: str) -> dict[str, Any]:
    mesh = toy_mesh()
    model, optimizer = toy(mesh, seed=7)
    checkpointer = Checkpointer(Path(root), mesh, keep=0, identity={"run": 1})
    resumed = checkpointer.resume("auto", model, optimizer, StepState(0), allow_mismatch=False)
    assert resumed is not None
    assert (resumed.step, resumed.manifest.consumed_samples, resumed.manifest.consumed_tokens) == (STEP, 24, 192)
    assert resumed.trainer == {"note": [1, 0.1]} and not resumed.damaged
    draws = _draws()
    # The next save is of today's format, and does not touch the old one.
    checkpointer.save(STEP + 1 + dist.get_world_size(), model, optimizer, {}, consumed_samples=0, consumed_tokens=0)
    return {
        "tensors": _tensors(model, optimizer),
        "draws": draws,
        "same_world": resumed.manifest.world_size == dist.get_world_size(),
    }


@pytest.mark.parametrize("world_size", [2, 1])
def test_it_loads_on_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    saved = launch(_save_as_format_1, 2, str(tmp_path))
    folder = tmp_path / files.folder_name(STEP)
    assert files.read_manifest(folder).format == 1
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json", "trainer.json", ".metadata", "__0_0.distcp", "__1_0.distcp", "rng_00000.pt", "rng_00001.pt",
    }  # fmt: skip
    loaded = launch(_load, world_size, str(tmp_path))
    for before, after in zip(saved, loaded, strict=False):
        assert before["tensors"].keys() == after["tensors"].keys()
        assert all(torch.equal(before["tensors"][name], after["tensors"][name]) for name in before["tensors"])
        assert after["same_world"] == (world_size == 2)
        assert (before["draws"] == after["draws"]) == after["same_world"]
    assert files.read_manifest(folder).format == 1
    assert [manifest.save_index for _, manifest in files.scan(tmp_path)[0]] == [2, 1]
