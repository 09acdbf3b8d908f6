"""Workers neither save checkpoints, nor die of the rank's signals, nor outlive the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import pytest

from data.indexed_dataset import IndexedDatasetWriter
from data.loader import LoaderError, MicroBatchLoader
from data.phases import Phase, PhaseSchedule
from data.samples import SampleSource
from data.workers import DeliveryWatch, WorkerSetup

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

# A rank with checkpoint handlers and two workers. It prints its workers' ids, then obeys its argument.
RANK = """
import multiprocessing, os, signal, sys, time, traceback
from data.indexed_dataset import IndexedDataset
from data.loader import MicroBatchLoader
from data.phases import Phase, PhaseSchedule
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
    [
        (signal.SIGSTOP, "is stopped, `kill -CONT {pid}` lets it go on"),
        (signal.SIGKILL, "(process {pid}) is dead: killed by signal 9, SIGKILL"),
    ],
)
def test_a_worker_that_delivers_nothing_is_named(tmp_path: Path, number: signal.Signals, words: str) -> None:
    """Instead of waiting for it for ever."""
    rank, workers = start_rank(tmp_path, "go on")
    os.kill(workers[1], number)
    _, errors = rank.communicate("go\n", timeout=60)
    assert rank.returncode == 1
    assert words.format(pid=workers[1]) in errors and str(workers[1]) in errors, errors
    wait_until_gone(workers, 10)


class Counted:
    """The stream 0, 1, 2, ..."""

    num_tokens, num_documents = 500, 1

    def tokens(self, start: int, length: int) -> np.ndarray:
        return np.arange(start, start + length)

    def identity(self) -> str:
        return "counted"


def a_loader() -> MicroBatchLoader:
    source = SampleSource("code", Counted(), seq_length=4, seed=0, vocab_size=1000)
    schedule = PhaseSchedule([Phase("main", 1.0, {"code": 1.0})], num_steps=2, global_batch_size=2)
    return MicroBatchLoader(schedule, {"code": source}, 1, 0, 1)


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "reset"), EOFError(), FileNotFoundError("socket"), UnpicklingError("truncated")]
)
def test_any_error_of_a_dead_workers_connection_names_it(error: Exception) -> None:
    """A worker killed while its rank fetches a batch shows by where in the conversation the rank was. Here its death
    shows only after the error, as it may."""
    setup = WorkerSetup(1)
    child = subprocess.Popen(["sleep", "60"])
    setup._pids[:] = [child.pid]
    kill = threading.Timer(0.0 if isinstance(error, UnpicklingError) else 0.2, child.kill)
    with (
        pytest.raises(
            LoaderError, match=rf"step 5.*worker 0 \(process {child.pid}\) is dead: killed by signal 9"
        ) as at,
        a_loader()._named_workers(setup, DeliveryWatch(setup, 0.0), 4),
    ):
        kill.start()
        if isinstance(error, UnpicklingError):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        raise error
    assert at.value.__cause__ is error
    child.wait()


def test_an_error_of_living_workers_stays_as_it_is() -> None:
    setup = WorkerSetup(1)
    child = subprocess.Popen(["sleep", "60"])
    setup._pids[:] = [child.pid]
    with pytest.raises(ValueError, match="token ids"), a_loader()._named_workers(setup, DeliveryWatch(setup, 0.0), 4):
        raise ValueError("token ids beyond the vocabulary")
    child.kill()
    child.wait()


def test_workers_in_words() -> None:
    setup = WorkerSetup(4)
    killed, failed = (subprocess.Popen(["sh", "-c", end]) for end in ("kill -9 $$", "exit 3"))
    for child in (killed, failed):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    living = subprocess.Popen(["sleep", "60"])
    setup._pids[:] = [living.pid, killed.pid, failed.pid, 0]
    words = setup.in_words()
    assert f"worker 1 (process {killed.pid}) is dead: killed by signal 9, SIGKILL" in words
    assert f"worker 2 (process {failed.pid}) ended with exit code 3" in words
    assert "worker 3 (process 0) never started" in words and "worker 0" not in words
    setup._pids[:] = [living.pid] * 4
    assert "all of them run" in setup.in_words()
    for child in (killed, failed, living):
        child.kill()
        child.wait()
