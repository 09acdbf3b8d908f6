"""Process groups end in time, and start again after a restart."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fp4.parallel.mesh import init_distributed
from tests.programs import run_program
from tests.training.harness import launch

_END = """
import time
import torch.distributed as dist
from megatron_fp4.parallel import mesh

def hang():
    time.sleep(60)

mesh.EXIT_SECONDS = 0.5
mesh.init_distributed("cpu", 10)
dist.destroy_process_group = hang
mesh.leave_distributed()
"""


@pytest.mark.slow
def test_a_process_whose_group_hangs_at_the_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text(_END)
    done = run_program([tmp_path / "end.py"])
    assert (done.returncode, done.stdout) == (1, "") and "in hang" in done.stderr


def _start_three_times(rank: int, port: int) -> list[float]:
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


@pytest.mark.slow
def test_a_restart_does_not_wait_for_the_previous_processes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # like that of torchrun's agent
    assert launch(_start_three_times, 2, store.port) == [[3.0, 3.0, 3.0]] * 2
