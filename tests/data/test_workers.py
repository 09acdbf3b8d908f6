"""Loader workers ignore the rank's signals, end with the rank, and their death is reported."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import accumulate
from pathlib import Path

import pytest

from data.loader import MicroBatchLoader
from data.order import SampleSource
from data.schedule import Phase, PhaseSchedule
from data.workers import LoaderError
from megatron_fp4.runtime.progress import state_of_process
from tests.data.streams import PicklesOnce, SlowStream
from tests.programs import ROOT, as_child, wait_until, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


def a_loader(stream: SlowStream, num_workers: int = 1, micro_batches: int = 2) -> MicroBatchLoader:
    """A loader of 50 steps."""
    source = SampleSource("code", stream, seq_length=4, seed=0, vocab_size=5000)
    schedule = PhaseSchedule([Phase("main", blend={"code": 1})], num_steps=50, global_batch_size=micro_batches)
    return MicroBatchLoader(schedule, {"code": source}, 1, 0, 1, num_workers)


def a_rank() -> None:
    """The program of a rank with two workers and signal handlers. Prints the workers' ids, `saving` at each signal, and
    `worked on` when it has loaded more batches after the last signal."""
    received: list[int] = []

    def save(number: int, frame: object) -> None:
        received.append(number)
        print("saving", flush=True)

    for number in SIGNALS:
        signal.signal(number, save)
    steps = (loader := a_loader(SlowStream(), num_workers=2)).steps(0, 50)
    next(steps)
    print(*loader.worker_pids, flush=True)
    while len(received) < len(SIGNALS):
        time.sleep(0.01)
    for _ in range(40):
        next(steps)
    print("worked on", flush=True)
    time.sleep(600)


def test_workers_ignore_signals_and_die_with_a_killed_rank() -> None:
    rank = subprocess.Popen(
        as_child([sys.executable, "-m", "tests.data.test_workers"]),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert rank.stdout is not None
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    for number in SIGNALS:  # to the process group, as a scheduler or a terminal does
        os.killpg(rank.pid, number)
        assert rank.stdout.readline() == "saving\n"  # from the rank alone
    assert rank.stdout.readline() == "worked on\n"
    assert len(workers) == 2 and all(state_of_process(worker) is None for worker in workers)
    for worker in workers:  # a stopped worker cannot notice by itself that the rank is gone
        os.kill(worker, signal.SIGSTOP)
    rank.kill()
    wait_until_gone(workers)
    assert rank.communicate(timeout=300)[0] == ""


def test_a_dead_worker_is_reported(tmp_path: Path) -> None:
    """Its death is noticed even if another process, forked while the workers started, has its pipe open."""
    stream = SlowStream(log=tmp_path / "log", seconds=60)
    loader = a_loader(stream, num_workers=2)
    steps = loader.steps(0, 50)
    held, pids = [], []

    def kill_the_first() -> None:
        wait_until(lambda: stream.num_reads() == 4, "both workers read their first samples")
        pids.extend(loader.worker_pids)
        for link in Path(f"/proc/{pids[0]}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the log, which a reading thread has just closed
                if os.readlink(link).startswith("pipe:"):
                    held.append(os.open(link, os.O_RDWR | os.O_NONBLOCK))
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    with pytest.raises(LoaderError, match=r"no data for step 1 .*worker 0 \(process \d+\) is dead: killed by signal 9"):
        next(steps)
    killer.join()
    for descriptor in held:
        os.close(descriptor)
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("the disk is full of holes"), "ValueError: the disk"),
        (PicklesOnce(), "RuntimeError: PicklesOnce: sent"),
    ],
)
def test_an_exception_in_a_worker_is_raised_in_its_rank(error: Exception, raised: str) -> None:
    """The worker's traceback is added as a note."""
    with pytest.raises(Exception) as at:
        list(a_loader(SlowStream(fails_at=40, error=error)).steps(0, 50))
    assert f"{type(at.value).__name__}: {at.value}".startswith(raised)
    where, worker = at.value.__notes__
    assert "raise self.error" in where and worker.startswith("Raised in worker 0 (process")


def test_workers_read_two_whole_steps_ahead(tmp_path: Path) -> None:
    stream = SlowStream(log=tmp_path / "log")
    steps = a_loader(stream, num_workers=2, micro_batches=8).steps(0, 50)
    for taken in (1, 2, 3):
        next(steps)
        ahead = 8 * (taken + 2)
        wait_until(lambda: stream.num_reads() == ahead, f"{ahead} samples were not read")  # noqa: B023
        time.sleep(0.1)
        assert stream.num_reads() == ahead
    steps.close()


@pytest.mark.parametrize("error", [None, ValueError("a hole")])
def test_samples_of_a_slow_disk_are_read_concurrently(tmp_path: Path, error: Exception | None) -> None:
    """The samples are those that one thread reads, up to the same error."""

    def taken(num_workers: int) -> list[object]:
        stream = SlowStream([3] * 500, tmp_path / f"{num_workers}", 0.05 * num_workers, 628, error)
        found: list[object] = []
        try:
            for step in a_loader(stream, num_workers, micro_batches=8).steps(0, 15):
                found.append([batch.tokens.tolist() for batch in step])
        except ValueError as met:
            found.append(str(met))
        return found

    whole = taken(0)
    assert taken(1) == whole and (len(whole) == 15) == (error is None) and len(whole) > 2
    noted = (tmp_path / "1").read_bytes()
    assert max(accumulate(1 if note == ord("+") else -1 for note in noted)) > 8


def test_closing_a_loader_leaves_nothing() -> None:
    """No process, thread or open file remains, though the steps were not read to their end."""
    left = []
    for _ in range(2):
        loader = a_loader(SlowStream(), num_workers=2)
        steps = loader.steps(0, 50)
        next(steps)
        pids = loader.worker_pids
        steps.close()
        assert all(state_of_process(pid) == "gone" for pid in pids)
        gc.collect()
        left.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert left[0] == left[1]


def test_a_rank_ends_though_its_worker_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for a broken disk cannot be killed. The rank then raises TimeoutError."""
    monkeypatch.setattr("data.workers._EXIT_SECONDS", 0.2)
    loader = a_loader(SlowStream(seconds=60))
    loader.timeout_seconds = 1
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        with pytest.raises(TimeoutError, match=r"no data for step 1 .*nothing for 1 s"):
            next(loader.steps(0, 1))
    for pid in loader.worker_pids:
        # It may have ended by itself, if it had not begun to read, and the loader's thread may reap it first.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    a_rank()
