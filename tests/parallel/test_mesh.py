"""The mesh's axes."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh

from megatron_fp4.parallel.mesh import ParallelMesh


def test_an_axis_is_sliced_once(mesh: ParallelMesh) -> None:
    """Slicing a DeviceMesh takes long, and layers ask for their axis in every call."""
    fresh = ParallelMesh(mesh.device_mesh, mesh.device)
    with mock.patch.object(DeviceMesh, "__getitem__", autospec=True, side_effect=DeviceMesh.__getitem__) as sliced:
        for _ in range(3):
            assert fresh.tp_size == 1 and fresh.tp_rank == 0 and fresh.dp_size == 1
            assert fresh.tp is fresh.tp
    assert sliced.call_count <= 2


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
