import os
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron_fp4.parallel.mesh import init_distributed


def pytest_runtest_logreport(report):
    """Print a failure at once, because time on a GPU may end before pytest's summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext[-1500:]}", file=sys.__stdout__, flush=True)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group with only this process, on the GPU."""
    init_distributed("cuda", 60)
    yield
    dist.destroy_process_group()
