"""The lock that allows one run at a time in a folder, and state.json, which restarts read."""

import errno
import fcntl
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime import run_state
from megatron_fp4.runtime.errors import DivergedError, ExitCode, StoppedError, exit_code_of
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.run_state import LOCK_FILE, RunState, note_refusal, sole_run, try_folder, write_state
from megatron_fp4.runtime.run_state import read_state as state
from tests.programs import Program, wait_until
from tests.training.harness import launch

# Holds the lock of the folder argv[1]. Forks a child that outlives it and writes the child's id to the file argv[2].
_HOLDER = """
import os, sys, time
from pathlib import Path
from megatron_fp4.parallel.mesh import init_distributed
from megatron_fp4.runtime.run_state import sole_run

init_distributed("cpu", 10)
with sole_run(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    Path(sys.argv[2]).write_text(str(child))
    time.sleep(600)
"""


def _refused(rank: int, run_dir: str) -> str:
    run_state.LOCK_SECONDS = 0.5
    try:
        with sole_run(Path(run_dir)):
            return "ran"
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
def test_a_second_run_is_refused_and_told_which_process_runs(mesh: ParallelMesh, tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    note_refusal(run_dir, "no folder")
    assert not run_dir.exists()
    (tmp_path / "holder.py").write_text(_HOLDER)
    holder, child = Program([tmp_path / "holder.py", run_dir, tmp_path / "child"]), tmp_path / "child"
    wait_until(lambda: child.exists() and child.read_text(), "no lock", holder)
    first, second = launch(_refused, 2, str(run_dir))
    assert f"process {holder.pid} on " in first and "is still writing there" in first and first == second
    named = f"stopped while waiting for process {holder.pid}"
    with pytest.raises(StoppedError, match=named) as stopped, sole_run(run_dir, lambda: True):
        pytest.fail("beside another run")
    assert exit_code_of(stopped.value) is ExitCode.STOPPED
    note_refusal(run_dir, "train.stepz")  # does nothing while another run holds the lock
    assert not (run_dir / "state.json").exists()
    # The lock ends with the process, though its forked child is alive.
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with sole_run(run_dir):
        assert f"process {os.getpid()} " in (run_dir / LOCK_FILE).read_text()
    note_refusal(run_dir, "train.stepz")
    assert (state(run_dir)["state"], state(run_dir)["reason"]) == ("refused", "train.stepz")
    os.kill(int(child.read_text()), signal.SIGKILL)


def test_folders_and_disks_that_fail(mesh: ParallelMesh, tmp_path: Path, monkeypatch, caplog: Any) -> None:
    """An impossible folder is a refusal. A failing disk is a crash: schedulers start the run again, perhaps on other
    nodes. Without locks the run continues with a warning."""
    (tmp_path / "file").write_text("")
    refusal = r"run\.dir=.*file.* cannot be written to"
    with pytest.raises(ConfigError, match=refusal), sole_run(tmp_path / "file" / "run"):
        pytest.fail("in no folder")

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(run_state, "_open_lock", failing)
        with pytest.raises(RuntimeError, match="no answer") as caught, sole_run(tmp_path):
            pytest.fail("without a lock")
    assert exit_code_of(caught.value) is ExitCode.CRASHED
    monkeypatch.setattr(fcntl, "lockf", failing)
    with caplog.at_level(logging.WARNING), sole_run(tmp_path):
        pass
    write_state(tmp_path / "gone", "running", 0, "", 0)
    assert "has no locks" in caplog.text and "could not write" in caplog.text


@pytest.mark.parametrize("name", ["", "checkpoints", "exports"])
def test_a_folder_that_leads_nowhere_ends_the_start(mesh: ParallelMesh, tmp_path: Path, name: str) -> None:
    """A run would train to its end to lose everything. `--check` finds it too, and makes no folder."""
    run_dir, link = tmp_path / "run", (tmp_path / "run" / name).absolute()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "unmounted")
    refusal = (
        f"run.dir={run_dir} cannot be written to: {link} is a link to {tmp_path}/unmounted, which is missing; mount"
    )
    with pytest.raises(ConfigError, match=refusal), sole_run(run_dir, folders=["checkpoints", "exports"]):
        pytest.fail("in no folder")
    with pytest.raises(ConfigError, match=refusal):
        try_folder(run_dir, name)
    (tmp_path / "unmounted").mkdir()
    before = sorted(tmp_path.rglob("*"))
    try_folder(run_dir, "checkpoints")
    assert sorted(tmp_path.rglob("*")) == before
    with sole_run(run_dir, folders=["checkpoints", "exports"]):
        assert [*run_dir.glob("*/*")] == [] and (run_dir / "checkpoints").is_dir() and (run_dir / "exports").is_dir()


def test_the_state_of_a_start_until_its_end(mesh: ParallelMesh, tmp_path: Path) -> None:
    progress = Progress()
    with RunState(tmp_path, True, progress) as kept:
        assert state(tmp_path)["state"] == "running" and state(tmp_path)["pid"] == os.getpid()
        (tmp_path / "checkpoints" / "step_00000005").mkdir(parents=True)
        kept.saved(5, 3)
        assert (state(tmp_path)["state"], state(tmp_path)["step"], state(tmp_path)["checkpoint"]) == ("running", 5, 5)
        assert kept.ended(ExitCode.STOPPED, 7, "the file STOP") == 75
    assert state(tmp_path)["state"] == "stopped" and state(tmp_path)["step"] == 7
    progress.at(12, "update")
    with pytest.raises(DivergedError), RunState(tmp_path, True, progress):
        raise DivergedError("ten in a row")
    written = state(tmp_path)
    assert (written["state"], written["step"], written["reason"]) == ("diverged", 12, "DivergedError: ten in a row")
    with RunState(tmp_path, False, progress):
        assert state(tmp_path) == written
