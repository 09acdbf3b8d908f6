"""The mesh's axes."""

from __future__ import annotations

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
