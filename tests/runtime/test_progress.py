"""Diagnosing which rank holds up a run, and ending ranks that hang."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime import progress as progress_module
from megatron_fp4.runtime.progress import (
    FOLDER,
    BlockedThreads,
    Progress,
    Report,
    diagnose,
    read_report,
    report_path,
    state_of_process,
)
from tests.programs import environments_of_ranks, run_program, wait_until

START = "now"
HERE = {"host": socket.gethostname(), "pid": os.getpid()}


def report(rank: int, step: int = 5, order: int = 3, **other: object) -> Report:
    """The report of a rank on its own host that has been in one phase for a minute."""
    since, now = time.time() - 60, time.time()
    plain = Report(START, rank, f"host{rank}", 100 + rank, step, f"phase {order}", order, since, now, "")
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


def test_a_hang_is_reported_once_with_its_stack(
    mesh: ParallelMesh, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks that see it, the first one reports it."""
    for limit in ("_BLOCKED", "_BLOCKED_BESIDE", "_WITHOUT_LIFE"):  # at these the process would end
        monkeypatch.setattr(progress_module, limit, math.inf)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank_00005.json").write_text("of an earlier start")
    progress, other = Progress(), Progress()
    with progress.watched(tmp_path, timeout_seconds=0.4), other.watched(tmp_path, timeout_seconds=0.4):
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


# A process of one rank whose main thread, or another thread, hangs in a write or without a system call on a file.
_HANGS = """
import os, sys, threading, time
from pathlib import Path
from megatron_fp4.parallel.mesh import init_distributed
from megatron_fp4.runtime import progress as module
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.run_state import RunState

folder, what, where = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def hang():
    pipe = folder / "pipe"
    descriptor = os.open(pipe, os.O_RDWR)
    while what == "write":
        os.write(descriptor, bytes(65536))
    time.sleep(1000)

init_distributed("cpu", 60)
progress = Progress()
with RunState(folder, True, progress), progress.watched(folder, 1.0):
    progress.at(7, "save")
    if where == "MainThread":
        module._WITHOUT_LIFE = 1.0
        hang()
    module._BLOCKED_BESIDE = 1.0
    threading.Thread(target=hang, name="checkpoint", daemon=True).start()
    while True:
        progress.alive()
        time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("what", "thread", "call"),
    [("write", "checkpoint", "`write {}/pipe`"), ("compute", "MainThread", "no sign of life")],
)
def test_a_rank_that_hangs_ends_itself(tmp_path: Path, what: str, thread: str, call: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "program.py").write_text(_HANGS)
    done = run_program([tmp_path / "program.py", str(tmp_path), what, thread], environments_of_ranks(1)[0])
    assert done.returncode == 5, done.stderr
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["state"], state["step"]) == ("hung", 7)
    for part in ("rank 0 on ", "step 7, save", call.format(tmp_path), f"thread {thread}, hang in program.py:"):
        assert part in state["reason"] and part in done.stderr


def test_a_thread_that_makes_progress_is_not_blocked(tmp_path: Path) -> None:
    """It is not reported, although each look finds it in the same call on the same file."""
    os.mkfifo(tmp_path / "pipe")
    descriptor, blocked = os.open(tmp_path / "pipe", os.O_RDWR), BlockedThreads()
    done, seen = list[bytes](), list[float]()
    reader = threading.Thread(target=lambda: [done.append(os.read(descriptor, 1)) for _ in range(6)])
    reader.start()
    for number in range(6):
        wait_until(lambda: len(done) == number)  # noqa: B023
        time.sleep(0.05)
        seen += [seconds for thread, _, seconds in blocked.look() if thread == reader.native_id]
        os.write(descriptor, b"x")
    reader.join()
    assert seen and max(seen) == 0
