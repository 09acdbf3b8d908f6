from pathlib import Path

import pytest

from megatron_fp4.parallel.mesh import ParallelMesh
from tests.distributed.one_rank import Job


@pytest.fixture
def root(tmp_path: Path, mesh: ParallelMesh) -> Path:
    """A folder with checkpoints of steps 1, 2 and 3."""
    job = Job(tmp_path / "checkpoints", mesh)
    for step in (1, 2, 3):
        job.save(step)
    return job.root
