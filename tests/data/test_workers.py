"""Workers neither save checkpoints, nor die of the rank's signals, nor outlive the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.indexed_dataset import IndexedDatasetWriter
from data.workers import WorkerSetup

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

# A rank with checkpoint handlers and two workers. It prints its workers' ids, then obeys its argument.
RANK = """
import multiprocessing, os, signal, sys, time, traceback
from data.indexed_dataset import IndexedDataset
from data.loader import MicroBatchLoader
from data.phase_lengths import Phase
from data.phases import PhaseSchedule
from data.samples import SampleSource

prefix, end = sys.argv[1:]
received = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda number, frame: (received.append(number), print("saving", flush=True)))
source = SampleSource("code", IndexedDataset(prefix), seq_length=4, seed=0, vocab_size=1000)
schedule = PhaseSchedule([Phase("main", 1.0, {"code": 1.0})], num_steps=200, global_batch_size=2)
loader = MicroBatchLoader(schedule, {"code": source}, 1, 0, 1, num_workers=2, timeout_seconds=3)
steps = loader.steps(0, 200)
next(steps)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
if end == "go on":
    sys.stdin.readline()
    try:
        print("steps", 1 + sum(1 for _ in steps), flush=True)
    except RuntimeError:
        traceback.print_exc()
        os._exit(1)  # as pretrain.py: the interpreter's end would wait for a stopped worker
if end == "raise":
    raise RuntimeError("the run fails")
if end == "signals":
    while len(received) < 3:
        time.sleep(0.01)
    print("steps", 1 + sum(1 for _ in steps), flush=True)
else:
    time.sleep(60)
"""


def start_rank(tmp_path: Path, end: str) -> tuple[subprocess.Popen[str], list[int]]:
    with IndexedDatasetWriter(tmp_path / "code", np.uint16) as writer:
        writer.add_document(np.arange(500))
    root = Path(__file__).parents[2]
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path / "code"), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        start_new_session=True,
    )
    assert rank.stdout is not None
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
    return rank, workers


def is_running(pid: int) -> bool:
    try:
        # The third field after the name is the state; a zombie that nobody reaps is dead for our purpose.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"workers {pids} outlived their rank"
        time.sleep(0.02)


def test_signals_to_the_whole_group_reach_the_rank_only(tmp_path: Path) -> None:
    rank, workers = start_rank(tmp_path, "signals")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.killpg(rank.pid, number)
        time.sleep(0.2)
    output, errors = rank.communicate(timeout=30)
    assert rank.returncode == 0, errors
    assert output.count("saving") == 3  # the workers have no such handler
    assert "steps 200" in output  # and went on working
    wait_until_gone(workers, 5)


def test_workers_die_with_a_killed_rank(tmp_path: Path) -> None:
    rank, workers = start_rank(tmp_path, "sleep")
    rank.kill()
    wait_until_gone(workers, 2)
    rank.communicate(timeout=10)


def test_a_failing_rank_exits_promptly(tmp_path: Path) -> None:
    rank, workers = start_rank(tmp_path, "raise")
    _, errors = rank.communicate(timeout=20)
    assert rank.returncode == 1
    assert "the run fails" in errors
    wait_until_gone(workers, 5)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGSTOP, "is stopped, `kill -CONT {pid}` lets it go on"), (signal.SIGKILL, "killed by signal: Killed")],
)
def test_a_worker_that_delivers_nothing_is_named(tmp_path: Path, number: signal.Signals, words: str) -> None:
    """Instead of waiting for it for ever."""
    rank, workers = start_rank(tmp_path, "go on")
    os.kill(workers[1], number)
    _, errors = rank.communicate("go\n", timeout=60)
    assert rank.returncode == 1
    assert words.format(pid=workers[1]) in errors and str(workers[1]) in errors, errors
    wait_until_gone(workers, 10)


def test_workers_in_words() -> None:
    setup = WorkerSetup(3)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    setup._pids[:] = [os.getpid(), child.pid, 0]
    assert f"worker 1 (process {child.pid}) is dead: killed" in setup.in_words()
    assert "worker 2 (process 0) never started" in setup.in_words() and "worker 0" not in setup.in_words()
    child.wait()
    setup._pids[:] = [os.getpid()] * 3
    assert "all of them run" in setup.in_words()
