"""Workers neither save checkpoints, nor die of the rank's signals, nor outlive the rank, nor die unnamed."""

from __future__ import annotations

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
from tests.data.streams import PicklesOnce, SteeredStream
from tests.programs import ROOT, wait_until, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


def a_loader(stream: SteeredStream, num_workers: int = 1, micro_batches: int = 2) -> MicroBatchLoader:
    """Of 50 steps."""
    source = SampleSource("code", stream, seq_length=4, seed=0, vocab_size=5000)
    schedule = PhaseSchedule([Phase("main", blend={"code": 1})], num_steps=50, global_batch_size=micro_batches)
    return MicroBatchLoader(schedule, {"code": source}, 1, 0, 1, num_workers)


def a_rank() -> None:
    """With handlers that save checkpoints, and two workers: prints their ids, each signal that it gets, and after the
    last that it has worked on."""
    received: list[int] = []

    def save(number: int, frame: object) -> None:
        received.append(number)
        print("saving", flush=True)

    for number in SIGNALS:
        signal.signal(number, save)
    steps = (loader := a_loader(SteeredStream(), num_workers=2)).steps(0, 50)
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
        [sys.executable, "-m", "tests.data.test_workers"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert rank.stdout is not None
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    for number in SIGNALS:  # to all, as a scheduler or a terminal does
        os.killpg(rank.pid, number)
        assert rank.stdout.readline() == "saving\n"  # the rank alone
    assert rank.stdout.readline() == "worked on\n"
    assert len(workers) == 2 and all(state_of_process(worker) is None for worker in workers)
    for worker in workers:  # then they cannot see by themselves that the rank is gone
        os.kill(worker, signal.SIGSTOP)
    rank.kill()
    wait_until_gone(workers)
    assert rank.communicate(timeout=300)[0] == ""


def test_a_dead_worker_is_named(tmp_path: Path) -> None:
    """Also where another process, forked while the workers started, holds its pipe."""
    stream = SteeredStream(log=tmp_path / "log", seconds=60)
    loader = a_loader(stream, num_workers=2)
    steps = loader.steps(0, 50)
    held, pids = [], []

    def kill_the_first() -> None:
        wait_until(lambda: stream.readings() == 4, "both workers read their first samples")
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
def test_what_a_worker_meets_is_raised_in_its_rank(error: Exception, raised: str) -> None:
    """With where it was in the worker."""
    with pytest.raises(Exception) as at:
        list(a_loader(SteeredStream(fails_at=40, error=error)).steps(0, 50))
    assert f"{type(at.value).__name__}: {at.value}".startswith(raised)
    where, worker = at.value.__notes__
    assert "raise self.error" in where and worker.startswith("Raised in worker 0 (process")


def test_workers_are_whole_steps_ahead_and_no_further(tmp_path: Path) -> None:
    """Of which each worker reads its share."""
    stream = SteeredStream(log=tmp_path / "log")
    steps = a_loader(stream, num_workers=2, micro_batches=8).steps(0, 50)
    for taken in (1, 2, 3):
        next(steps)
        ahead = 8 * (taken + 2)
        wait_until(lambda: stream.readings() == ahead, f"not {ahead} but {stream.readings()} samples were read")  # noqa: B023
        time.sleep(0.1)
        assert stream.readings() == ahead
    steps.close()


@pytest.mark.parametrize("error", [None, ValueError("a hole")])
def test_samples_of_a_slow_disk_are_read_side_by_side(tmp_path: Path, error: Exception | None) -> None:
    """And are those that are read one by one, up to the same error."""

    def taken(num_workers: int) -> list[object]:
        stream = SteeredStream([3] * 500, tmp_path / f"{num_workers}", 0.05 * num_workers, 628, error)
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


def test_workers_do_without_torch() -> None:
    """Which takes seconds and hundreds of MB."""
    program = "import data.workers, data.indexed, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_nothing_is_left() -> None:
    """No process, file, thread or open descriptor, when the steps were not read to their end."""
    left = []
    for _ in range(2):
        loader = a_loader(SteeredStream(), num_workers=2)
        steps = loader.steps(0, 50)
        next(steps)
        pids = loader.worker_pids
        steps.close()
        assert all(state_of_process(pid) == "gone" for pid in pids)
        gc.collect()
        left.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert left[0] == left[1]


def test_a_worker_that_cannot_be_killed_does_not_hold_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a dead disk: the rank says so and ends."""
    monkeypatch.setattr("data.workers._EXIT_SECONDS", 0.2)
    loader = a_loader(SteeredStream(seconds=60))
    loader.timeout_seconds = 1
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        with pytest.raises(LoaderError, match=r"no data for step 1 .*nothing for 1 s"):
            next(loader.steps(0, 1))
    for pid in loader.worker_pids:
        # It may have ended by itself, if it had not begun to read, and the loader's thread may reap it first.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    a_rank()
