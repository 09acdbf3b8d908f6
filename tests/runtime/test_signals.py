"""Requests to stop and to save: signals and files."""

import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp4.runtime import signals
from megatron_fp4.runtime.signals import StopConditions, StopRequest
from tests.programs import ROOT, wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_sets_a_flag_and_handlers_are_restored(number: signal.Signals, monkeypatch) -> None:
    monkeypatch.setattr(signals, "SECOND_AFTER", math.inf)  # a second signal after that would end this process
    before, wakeup = signal.signal(number, signal.SIG_DFL), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    try:
        with StopRequest() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested and stop.received == number
            os.kill(os.getpid(), signal.SIGTERM)  # within SECOND_AFTER it is the same request, delivered twice
            assert stop.received == number
            wait_until(lambda: stop.said)  # a thread prints the line, and must not do so in the next test
        assert signal.getsignal(number) is signal.SIG_DFL
        assert signal.set_wakeup_fd(wakeup) == wakeup
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("torchrun", [False, True])
def test_nohup_is_respected_but_not_by_workers_of_torchrun(torchrun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP comes to a worker from torchrun or because torchrun died, never from a terminal."""
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setattr(signals.sys, "platform", "no prctl in this process")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested == torchrun
    finally:
        signal.signal(signal.SIGHUP, before)


# A program whose main thread stays in C code, as in a collective that never ends.
_STUCK = """
import ctypes, sys
from megatron_fp4.runtime import signals

signals.SECOND_AFTER = float(sys.argv[1])
assert "torch" not in sys.modules, "a signal while torch is imported would not be remembered"
stop = signals.StopRequest().listen()
print("listening", flush=True)
libc = ctypes.CDLL(None)
while True:
    libc.sleep(1000)
"""
# Starts a process as torchrun does, prints its id, and waits.
_LAUNCHER = f"""
import os, subprocess, sys
os.environ["TORCHELASTIC_RUN_ID"] = "none"
worker = subprocess.Popen([sys.executable, "-c", {_STUCK!r}, "0"], start_new_session=True)
print(worker.pid, flush=True)
sys.stdin.read()
"""


def program(*arguments: str) -> subprocess.Popen[str]:
    command, pipes = [sys.executable, "-c", *arguments], {"stdout": -1, "stderr": -1, "stdin": -1}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, **pipes)


def test_a_second_signal_ends_the_process_at_once_unless_it_comes_soon() -> None:
    for second_after in (0.0, 3600.0):
        process = program(_STUCK, str(second_after))
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "SIGTERM: stopping after this step; another signal leaves at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        if second_after:  # Slurm and torchrun may send one request as two signals
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
            process.kill()
        _, errors = process.communicate(timeout=300)
        assert process.returncode == (-signal.SIGKILL if second_after else 128 + signal.SIGINT)
        assert ("SIGINT, the second signal: leaving at once" in errors) == (not second_after)


def test_a_program_that_declines_is_ended_by_signals() -> None:
    code = f"{_STUCK.partition('libc')[0]}import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nstop.decline()\n"
    process = program(code, "5")
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_worker_is_told_when_its_launcher_dies() -> None:
    """The SIGHUP that tells it does not count as a second signal."""
    launcher = program(_LAUNCHER)
    assert launcher.stdout is not None and launcher.stderr is not None
    worker = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "listening\n"
    launcher.kill()
    launcher.wait()
    assert "SIGHUP: stopping after this step" in launcher.stderr.readline()
    os.kill(worker, signal.SIGHUP)  # another SIGHUP does not count either
    os.kill(worker, signal.SIGINT)
    assert "SIGINT, the second signal" in launcher.stderr.readline()
    assert launcher.stderr.read() == ""  # end-of-file: the worker has ended


def test_only_the_first_rank_sees_files_and_removes_them_when_obeyed(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(signals, "LOOK_EVERY", 0.0)
    (tmp_path / "STOP").touch()  # meant for an earlier run
    with caplog.at_level(logging.WARNING):
        first = StopConditions(tmp_path, 0.0, StopRequest(), active=True)
    other = StopConditions(tmp_path, 0.0, StopRequest(), active=False)
    assert "it was for an earlier run" in caplog.text and not (first.stop or first.save)
    (tmp_path / "SAVE").touch()
    assert first.save and not first.stop and not other.save
    (tmp_path / "STOP").touch()  # it appears after the step's requests were collected
    first.saved()
    assert not (tmp_path / "SAVE").exists() and not first.save
    assert first.stop and first.why_stop == "the file STOP" and not other.stop
    first.saved()
    assert not (tmp_path / "STOP").exists()
    assert first.stop and first.why_stop == "the file STOP"  # the request stays
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        (tmp_path / "STOP").touch()  # while a job waited for its restart
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert StopConditions(tmp_path, 0.0, StopRequest(), active=True).why_stop == "the file STOP"


def test_a_folder_that_is_replaced_during_a_run_is_said_once(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(signals, "LOOK_EVERY", 0.0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    conditions = StopConditions(run_dir, 0.0, StopRequest(), active=True)
    assert not conditions.stop and not caplog.text
    run_dir.rename(tmp_path / "moved")
    run_dir.mkdir()
    assert not conditions.stop and not conditions.stop
    assert caplog.text.count(f"run.dir={run_dir} was moved, removed or replaced while the run trains") == 1
