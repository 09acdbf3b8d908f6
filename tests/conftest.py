from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron_fp4.config import ParallelConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    """The mesh of this process alone, on the CPU; one a module, because other modules run whole programs in here."""
    yield build_mesh(ParallelConfig(), init_distributed("cpu", 60))
    dist.destroy_process_group()
