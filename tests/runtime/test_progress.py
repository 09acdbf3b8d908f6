"""Diagnosing which rank holds up a run, and ending ranks that hang."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime import progress as progress_module
from megatron_fp4.runtime.progress import (
    FOLDER,
    Progress,
    Report,
    diagnose,
    read_report,
    report_path,
    section_of,
    state_of_process,
)
from tests.programs import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
START = "now"
HERE = {"host": socket.gethostname(), "pid": os.getpid()}


def report(rank: int, step: int = 5, order: int = 3, **other: object) -> Report:
    """The report of a rank on its own host that has been in one phase for a minute."""
    plain = Report(START, rank, f"host{rank}", 100 + rank, step, f"phase {order}", order, 60.0, time.time(), "")
    return plain._replace(**other)


def write(folder: Path, *reports: Report) -> None:
    for one in reports:
        report_path(folder, one.rank).write_text(json.dumps(one._asdict()).ljust(900))


def write_again(folder: Path, *except_ranks: int) -> None:
    """Write all reports again, except those of the ranks `except_ranks`."""
    for path in folder.glob("rank_*.json"):
        rank = int(path.stem.removeprefix("rank_"))
        found = read_report(folder, rank, START)
        if found is not None and rank not in except_ranks:
            write(folder, found._replace(time=time.time()))


def test_a_rank_that_is_behind_is_named(tmp_path: Path) -> None:
    write(tmp_path, report(0), report(1), report(2, order=1, phase="data"), report(3))
    found = diagnose(tmp_path, report(0), 4, wait=lambda: write_again(tmp_path))
    assert "rank 2 (process 102 on host2): behind the others; its last report, 0 s ago: step 5, data, for 60 s" in found
    assert "waiting: ranks 0-1, 3 in step 5, phase 3" in found and "rank 1 (" not in found
    write(tmp_path, report(2))
    assert diagnose(tmp_path, report(0), 4, wait=lambda: write_again(tmp_path)) == ""
    many = [report(rank, order=1 if rank % 2 else 3) for rank in range(100)]
    write(tmp_path, *many)
    assert len(diagnose(tmp_path, many[0], 100, wait=lambda: None).splitlines()) < 12


def test_a_rank_that_no_longer_writes_is_named(tmp_path: Path) -> None:
    write(tmp_path, *(report(rank) for rank in range(3)))
    found = diagnose(tmp_path, report(0), 4, wait=lambda: write_again(tmp_path, 2))
    assert "rank 2 (process 102 on host2): its process no longer writes" in found
    assert "rank 3: it has written nothing yet" in found and "waiting: ranks 0-1 in step 5" in found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("number", "word"), [(signal.SIGSTOP, "stopped"), (signal.SIGKILL, "gone")])
def test_a_stopped_or_killed_process_on_this_host_is_named(tmp_path: Path, number: signal.Signals, word: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            child.send_signal(number)
            wait_until(lambda: state_of_process(child.pid) is not None)
            write(tmp_path, report(0, **HERE), report(1, host=HERE["host"], pid=child.pid))
            found = diagnose(tmp_path, report(0), 2, wait=lambda: pytest.fail("waited, though the fault is visible"))
        finally:
            child.kill()
    assert f"rank 1 (process {child.pid} on {HERE['host']}): its process is {word}" in found
    assert (f"`kill -CONT {child.pid}`" in found) == (word == "stopped")


def test_the_rank_that_failed_first_is_named_not_those_that_waited_for_it(tmp_path: Path) -> None:
    failed = report(1, error="LoaderError: no data for step 5")
    follows = report(2, error="RuntimeError: [gloo/transport] Connection closed by peer")
    write(tmp_path, report(0), failed, follows)
    found = diagnose(tmp_path, report(0), 3, wait=lambda: pytest.fail("waited, though the fault is visible"))
    assert "rank 1 (process 101 on host1): failed: LoaderError: no data for step 5" in found
    assert "rank 2 (" not in found


def test_a_hang_is_reported_once_with_its_stack(mesh: ParallelMesh, tmp_path: Path, capfd) -> None:
    """Of two ranks that see it, the first one reports it."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank_00005.json").write_text("of an earlier start")
    progress, other = Progress(0.4), Progress(0.4)
    with progress.watched(tmp_path), other.watched(tmp_path):
        assert not (tmp_path / FOLDER / "rank_00005.json").exists()
        progress.at(7, "a phase that hangs")
        other.at(7, "a phase that hangs")
        line, printed = "rank 0 has been in step 7, a phase that hangs, for", list[str]()
        wait_until(lambda: printed.append(capfd.readouterr().err) or line in "".join(printed))
        time.sleep(0.6)  # time for a second report
        printed.append(capfd.readouterr().err)
    assert "".join(printed).count(line) == 1 and "stacks of all threads" in "".join(printed)
    stack = (tmp_path / FOLDER / "rank_00000.stack").read_text()
    assert "step 7, a phase that hangs" in stack and "test_a_hang_is_reported_once_with_its_stack" in stack


class Ending:
    """Stands for the end of the process: what waits until `is_set` continues. printed: the lines of the ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.is_set, self.codes, self._capfd = threading.Event(), list[int](), capfd
        monkeypatch.setattr(os, "_exit", self._exit)
        monkeypatch.setenv("RANK", "3")

    def _exit(self, code: int) -> None:
        self.codes.append(code)
        self.is_set.set()
        sys.exit()  # ends the thread that watches

    def line(self) -> str:
        assert self.codes == [5]
        return self._capfd.readouterr().err


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ending:
    return Ending(monkeypatch, capfd)


def wait_in_a_child(ending: Ending) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        threading.Thread(target=lambda: (ending.is_set.wait(), child.kill())).start()
        child.wait()


def wait_in_a_loop(ending: Ending) -> None:
    while not ending.is_set.is_set():
        time.sleep(0.01)


def wait_for_a_pool(ending: Ending) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ending.is_set.wait).result()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("wait", "where"),
    [
        (lambda ending: ending.is_set.wait(), "wait (threading.py:"),
        (wait_in_a_child, "_try_wait (subprocess.py:"),
        (wait_in_a_loop, "wait_in_a_loop (test_progress.py:"),
        (wait_for_a_pool, "thread ThreadPoolExecutor-"),
    ],
)
def test_a_section_that_makes_no_progress_ends_the_process(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, wait: Callable[[Ending], object], where: str
) -> None:
    """Whatever it waits for, also with a loop that is busy."""
    monkeypatch.setattr(progress_module, "_WITHOUT_PROGRESS", 2.0)
    progress, hung = Progress(0.5), list[tuple[int, str]]()
    progress.on_hang = lambda step, reason: hung.append((step, reason))
    with progress.limited():
        progress.at(7, "save")
        wait(ending)
    line = ending.line()
    assert f"rank 3 on {socket.gethostname()} hangs in step 7, save: no progress for " in line and where in line
    assert hung == [(7, hung[0][1])] and hung[0][1] in line


def test_data_that_does_not_come_in_time_ends_a_run(ending: Ending) -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise TimeoutError("nothing for 480 s: worker 0 waits for a disk")

    progress = Progress()
    with pytest.raises(TimeoutError):  # not in a run
        list(progress.loading(batches(), 7))
    progress.on_hang = lambda step, reason: None
    with pytest.raises(SystemExit):
        list(progress.loading(batches(), 7))
    assert "rank 3 on " in (line := ending.line()) and "in step 8, data" in line and "worker 0 waits" in line


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_work_that_moves_has_no_end(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for a pool that works; a wait inside torch, which means for other ranks; sections; and a
    clock on the wall that is set forward by two hours."""
    progress = Progress(0.5)
    later = time.time() + 7200
    with progress.limited(), ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(time, "time", lambda: later)
        pool.submit(lambda: [time.sleep(0.05) for _ in range(20)]).result()
        wait = compile("lock.acquire()\nlock.acquire(timeout=1)", f"{Path(torch.__file__).parent}/a.py", "exec")
        exec(wait, {"lock": threading.Lock()})
        for step in range(20):
            progress.at(step, "update")
            threading.Event().wait(0.05)
    assert not ending.codes


def test_a_save_beside_training_has_a_limit_that_is_shorter_while_training_waits(ending: Ending, monkeypatch) -> None:
    monkeypatch.setattr(progress_module, "_STILL_BESIDE", 4.0)
    progress, begun, seconds = Progress(0.4), threading.Event(), list[float]()

    def save() -> None:
        with progress.beside(section_of(threading.current_thread(), 8, "save")):
            begun.set()
            ending.is_set.wait()

    for trains in (True, False):
        ending.is_set.clear(), begun.clear(), ending.codes.clear()
        with progress.limited():
            thread = threading.Thread(target=save, name="checkpoint")
            thread.start()
            assert begun.wait(60)
            began = time.monotonic()
            while not ending.is_set.is_set():
                if trains:
                    progress.alive()
                time.sleep(0.01)
            seconds.append(time.monotonic() - began)
            thread.join()
        line = ending.line()
        assert "hangs in step 8, save" in line and "thread checkpoint in wait (threading.py:" in line
    assert seconds[0] >= 1.6 > seconds[1]
