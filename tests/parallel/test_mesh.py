"""The mesh's axes."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fp4.checkpoint.sync import RankSync
from megatron_fp4.parallel import mesh as mesh_module
from megatron_fp4.parallel.mesh import ParallelMesh, init_distributed
from tests.training.harness import launch


def test_an_axis_is_sliced_once(mesh: ParallelMesh) -> None:
    """Slicing a DeviceMesh takes long, and layers ask for their axis in every call."""
    fresh = ParallelMesh(mesh.device_mesh, mesh.device)
    with mock.patch.object(DeviceMesh, "__getitem__", autospec=True, side_effect=DeviceMesh.__getitem__) as sliced:
        for _ in range(3):
            assert fresh.tp_size == 1 and fresh.tp_rank == 0 and fresh.dp_size == 1
            assert fresh.tp is fresh.tp
    assert sliced.call_count <= 2


def _connections() -> int:
    """Sockets of this process that are connected."""
    tables = [Path("/proc/self/net", name).read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    connected = {f"socket:[{fields[9]}]" for fields in lines if fields[3] == "01"}
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is gone
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return len(connected.intersection(found))


def _grown(rank: int, world_size: int, most: int, port: int, root: str) -> int:
    """Connections of two groups of all ranks, behind what a run does through them."""
    dist.barrier()  # all have joined the harness's group
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    before = _connections()
    with mock.patch.object(mesh_module, "_FULL_MESH_RANKS", most):
        init_distributed("cpu", timeout_seconds=60)
    together = RankSync(Path(root), datetime.timedelta(seconds=60))
    total, everyone = torch.tensor(float(rank)), [None] * world_size
    dist.all_reduce(total)
    dist.all_gather_object(everyone, rank)
    assert together.collect("number", lambda: rank) == (everyone if rank == 0 else [])
    assert everyone == [*range(world_size)] and total == sum(range(world_size))
    found = _connections() - before
    dist.all_reduce(total)  # nobody leaves, and closes connections, while others count
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/net").is_dir(), reason="counts what Linux lists in /proc")
def test_connections_of_many_ranks_are_made_on_demand(tmp_path) -> None:
    size, outcomes = 6, []
    for most in (size, size - 1):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has it
        outcomes.append(launch(_grown, size, size, most, store.port, str(tmp_path)))
    full, on_demand = outcomes
    assert all(connections >= 2 * (size - 1) for connections in full)
    assert all(connections < 2 * (size - 1) for connections in on_demand[1:])  # the first gathers from all


_END = """
import atexit, sys, time
import torch.distributed as dist
from megatron_fp4.parallel import mesh

def hang():
    time.sleep(60)

mesh.EXIT_SECONDS = 0.5
mesh.init_distributed("cpu", 10)
if sys.argv[1] == "in the group's end":
    dist.destroy_process_group = hang
if sys.argv[1] == "in the interpreter's end":
    atexit.register(hang)
mesh.leave_distributed()
print("left")
mesh.end_process(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["nowhere", "in the group's end", "in the interpreter's end"])
def test_no_end_hangs(where):
    done = subprocess.run([sys.executable, "-c", _END, where], capture_output=True, text=True, timeout=50)
    if where == "in the group's end":
        assert (done.returncode, done.stdout) == (1, "") and "in hang" in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (3, "left\n", "")
