"""The mesh's axes."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

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


_HANGS = """
import sys, time
import torch.distributed as dist
from megatron_fp4.parallel import mesh

def hang():
    time.sleep(60)

mesh.EXIT_SECONDS = 0.5
mesh.init_distributed("cpu", 10)
if sys.argv[1] == "in the group's end":
    dist.destroy_process_group = hang
mesh.leave_distributed()
if sys.argv[1] == "in the interpreter's end":
    import atexit
    atexit.register(hang)
    mesh.exit_within(0.5)
print("left", flush=True)
"""


def test_an_end_that_hangs_is_ended_and_says_where():
    for where, code, said in (
        ("nowhere", 0, True),
        ("in the group's end", 1, False),
        ("in the interpreter's end", 1, True),
    ):
        done = subprocess.run([sys.executable, "-c", _HANGS, where], capture_output=True, text=True, timeout=50)
        assert done.returncode == code, (where, done.stderr)
        assert ("left" in done.stdout) == said
        assert ("in hang" in done.stderr) == (code == 1)
