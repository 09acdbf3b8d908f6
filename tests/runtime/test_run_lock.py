"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime import run_lock
from megatron_fp4.runtime.exit_codes import ExitCode, exit_code_of
from megatron_fp4.runtime.run_lock import LOCK_FILE, sole_run
from tests.training.harness import launch

# Holds the lock of the folder argv[1] for argv[2] seconds, with a forked child that outlives it.
_HOLDER = """
import os, sys, time
from pathlib import Path
from megatron_fp4.parallel.mesh import init_distributed
from megatron_fp4.runtime.run_lock import sole_run

init_distributed("cpu", 10)
with sole_run(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    print(child, flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def holder(run_dir: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, and a child of it that lives on."""
    command = [sys.executable, "-c", _HOLDER, str(run_dir), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_second_run_is_refused_and_told_who_is_there(mesh: ParallelMesh, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE", 0.5)
    with holder(tmp_path / "new" / "run", 60) as process:
        refusal = rf"run\.dir=.*run: process {process.pid} on .* is still writing there"
        with pytest.raises(ConfigError, match=refusal), sole_run(tmp_path / "new" / "run"):
            pytest.fail("two runs at once")
        # However it ends, and whatever it forked: the lock ends with the process.
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with sole_run(tmp_path / "new" / "run"):
            assert f"process {os.getpid()} " in (tmp_path / "new" / "run" / LOCK_FILE).read_text()


@pytest.mark.slow
def test_a_run_that_is_leaving_is_waited_for(mesh: ParallelMesh, tmp_path, caplog):
    with holder(tmp_path, 1.0), caplog.at_level(logging.WARNING):
        began = time.monotonic()
        with sole_run(tmp_path):
            assert time.monotonic() - began < 30
    assert len([record for record in caplog.records if "waiting up to" in record.message]) <= 1


def test_one_run_after_the_other(mesh: ParallelMesh, tmp_path):
    for _ in range(2):
        with sole_run(tmp_path):
            pass
    with pytest.raises(RuntimeError, match="inside"), sole_run(tmp_path):
        raise RuntimeError("inside")
    with sole_run(tmp_path):
        pass


def test_a_file_system_without_locks_is_a_warning(mesh: ParallelMesh, tmp_path, monkeypatch, caplog):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with caplog.at_level(logging.WARNING), sole_run(tmp_path):
        pass
    assert "has no locks" in caplog.text


def test_a_folder_that_cannot_be_is_one_line(mesh: ParallelMesh, tmp_path):
    (tmp_path / "file").write_text("")
    refusal = r"run\.dir=.*file.* cannot be written to"
    with pytest.raises(ConfigError, match=refusal), sole_run(tmp_path / "file" / "run"):
        pytest.fail("in no folder")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_a_disk_that_fails_is_a_crash_and_no_refusal(mesh: ParallelMesh, tmp_path, monkeypatch, number: int):
    """A refused run is given up by schedulers, a crashed one started again, maybe on other nodes."""
    opened = os.open

    def failing(path, *args: Any) -> int:
        if Path(path).name == LOCK_FILE:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(RuntimeError, match=os.strerror(number)) as caught, sole_run(tmp_path):
        pytest.fail("without a lock")
    assert exit_code_of(caught.value) is ExitCode.CRASHED


def _refused(rank: int, run_dir: str) -> str:
    run_lock.PATIENCE = 0.5
    try:
        with sole_run(Path(run_dir)):
            return "ran"
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
def test_all_ranks_are_refused_alike(tmp_path):
    with holder(tmp_path, 60):
        first, second = launch(_refused, 2, str(tmp_path))
    assert "is still writing there" in first and first == second
    assert launch(_refused, 2, str(tmp_path)) == ["ran", "ran"]
