"""Workers that torchrun starts again (`--max-restarts`), whose store has what those before left."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from megatron_fp4.parallel.mesh import init_distributed
from tests.training.harness import launch

pytestmark = pytest.mark.slow


def _start_twice(rank: int, port: int) -> list[float]:
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    sums = []
    for restarts in (0, 1, 2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        init_distributed("cpu", timeout_seconds=60)
        value = torch.tensor(float(rank + 1))
        dist.all_reduce(value)
        sums.append(value.item())
        if restarts < 2:
            dist.destroy_process_group()
    return sums


def test_a_restart_does_not_wait_for_the_processes_before() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has it
    assert launch(_start_twice, 2, store.port) == [[3.0, 3.0, 3.0]] * 2
