"""One run at a time in a folder, and state.json, which a restart reads."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime import run_state
from megatron_fp4.runtime.errors import ExitCode, exit_code_of
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.run_state import LOCK_FILE, RunState, note_refusal, sole_run, write_state
from megatron_fp4.training.callbacks.bad_steps import NonFiniteError
from tests.training.harness import launch

# Holds the lock of the folder argv[1] for argv[2] seconds, with a forked child that outlives it.
_HOLDER = """
import os, sys, time
from pathlib import Path
from megatron_fp4.parallel.mesh import init_distributed
from megatron_fp4.runtime.run_state import sole_run

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
def test_a_second_run_is_refused_and_told_who_is_there(mesh: ParallelMesh, tmp_path):
    run_dir = tmp_path / "new" / "run"
    note_refusal(run_dir, "no folder")
    assert not run_dir.exists()
    with holder(run_dir, 60) as process:
        first, second = launch(_refused, 2, str(run_dir))
        assert f"process {process.pid} on " in first and "is still writing there" in first and first == second
        note_refusal(run_dir, "train.stepz")  # says nothing about a run that lives
        assert not (run_dir / "state.json").exists()
        # However it ends, and whatever it forked: the lock ends with the process.
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with sole_run(run_dir):
            assert f"process {os.getpid()} " in (run_dir / LOCK_FILE).read_text()
        note_refusal(run_dir, "train.stepz")
        assert (state(run_dir)["state"], state(run_dir)["reason"]) == ("refused", "train.stepz")


def test_a_file_system_without_locks_is_a_warning(mesh: ParallelMesh, tmp_path, monkeypatch, caplog):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with caplog.at_level(logging.WARNING), sole_run(tmp_path):
        pass
    assert "has no locks" in caplog.text


def test_a_disk_that_fails_is_a_crash_and_a_folder_that_cannot_be_a_refusal(mesh: ParallelMesh, tmp_path, monkeypatch):
    """A refused run is given up by schedulers, a crashed one started again, maybe on other nodes."""
    (tmp_path / "file").write_text("")
    refusal = r"run\.dir=.*file.* cannot be written to"
    with pytest.raises(ConfigError, match=refusal), sole_run(tmp_path / "file" / "run"):
        pytest.fail("in no folder")
    opened = os.open

    def failing(path, *args: Any) -> int:
        if Path(path).name == LOCK_FILE:
            raise OSError(errno.EIO, "no answer", str(path))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(RuntimeError, match="no answer") as caught, sole_run(tmp_path):
        pytest.fail("without a lock")
    assert exit_code_of(caught.value) is ExitCode.CRASHED


def _refused(rank: int, run_dir: str) -> str:
    run_state.PATIENCE = 0.5
    try:
        with sole_run(Path(run_dir)):
            return "ran"
    except ConfigError as error:
        return str(error)


def state(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "state.json").read_text())


def test_a_start_is_running_until_it_ends(mesh: ParallelMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that refuses to take it is a warning."""
    progress = Progress()
    with RunState(tmp_path, True, progress) as kept:
        assert state(tmp_path)["state"] == "running" and state(tmp_path)["pid"] == os.getpid()
        assert kept.ended(ExitCode.STOPPED, 7, "the file STOP") == 75
    assert state(tmp_path)["state"] == "stopped" and state(tmp_path)["step"] == 7
    progress.at(12, "update")
    with pytest.raises(NonFiniteError), RunState(tmp_path, True, progress):
        raise NonFiniteError("ten in a row")
    written = state(tmp_path)
    assert (written["state"], written["step"], written["reason"]) == ("diverged", 12, "NonFiniteError: ten in a row")
    with RunState(tmp_path, False, progress):
        assert state(tmp_path) == written
    write_state(tmp_path / "gone", "running", 0, "", 0)
    assert "could not write" in caplog.text
