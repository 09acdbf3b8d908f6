from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime import signals
from megatron_fp4.runtime.signals import SIGNALS, StopRequest
from megatron_fp4.runtime.stop_conditions import StopConditions
from megatron_fp4.training.step import StepRequests
from tests.training.harness import launch, toy, toy_batches, toy_mesh, train_step

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_a_flag_and_handlers_are_restored(number: signal.Signals) -> None:
    before, wakeup = signal.signal(number, signal.SIG_DFL), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    try:
        with StopRequest() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested and stop.received == number
            os.kill(os.getpid(), signal.SIGTERM)  # within moments: the same request, delivered twice
            assert stop.received == number
            _wait_until_said(stop)
        assert signal.getsignal(number) is signal.SIG_DFL
        assert signal.set_wakeup_fd(wakeup) == wakeup
    finally:
        signal.signal(number, before)


def _wait_until_said(stop: StopRequest) -> None:
    """A thread says it, which else may do so in the next test."""
    while not stop._said:
        time.sleep(0.01)


def test_what_only_says_something_does_not_listen() -> None:
    before, other = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        stop = signals.stop_request(["train.steps=3", "--check"])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is other
        stop.close()
        stop = signals.stop_request(["train.steps=3"])
        assert signal.getsignal(signal.SIGINT) == stop._receive
        stop.close()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("torchrun", [False, True])
def test_nohup_is_respected_but_not_by_workers_of_torchrun(torchrun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their SIGHUP comes from the launcher or from its death, never from a terminal."""
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


# Its main thread is in C code all the time, as in a collective that never ends.
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


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_leaves_at_once(second: signal.Signals) -> None:
    process = _stuck(second_after=0.0)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "SIGTERM: stopping after this step; another signal leaves at once" in process.stderr.readline()
    process.send_signal(second)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + second
    assert f"{second.name}, the second signal: leaving at once" in errors


def test_the_same_request_twice_within_moments_is_one() -> None:
    """Slurm and torchrun deliver one so."""
    process = _stuck(second_after=3600.0)
    assert process.stderr is not None
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
    process.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.kill()
    process.communicate()


def _stuck(second_after: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, str(second_after)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == "listening\n"
    return process


def test_a_program_without_steps_lets_signals_be() -> None:
    code = f"{_STUCK.partition('libc')[0]}import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nstop.decline()\n"
    done = subprocess.run(
        [sys.executable, "-c", code, "5"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGTERM


# Starts a process as torchrun does, tells its id, and dies when told to.
_LAUNCHER = f"""
import os, subprocess, sys
os.environ["TORCHELASTIC_RUN_ID"] = "none"
worker = subprocess.Popen([sys.executable, "-c", {_STUCK!r}, "0"], start_new_session=True)
print(worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_worker_is_told_when_its_launcher_dies() -> None:
    """And the SIGHUP that tells it is not the second signal, even right after another one."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    worker = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "listening\n"
    launcher.kill()
    launcher.wait()
    assert "SIGHUP: stopping after this step" in launcher.stderr.readline()
    os.kill(worker, signal.SIGHUP)  # another one after the launcher's end: still not a person's
    os.kill(worker, signal.SIGINT)
    assert "SIGINT, the second signal" in launcher.stderr.readline()
    assert launcher.stderr.read() == ""  # its other end is closed: the worker is gone


def _stop_one(rank: int, run_dir: str) -> tuple[int, bool, bool]:
    mesh = toy_mesh()
    model, optimizer = toy(mesh)
    with StopRequest() as stop:
        orders = StopConditions(Path(run_dir), 0.0, stop, active=rank == 0)
        quiet = orders.agreed(mesh)
        for step in range(10):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            result = train_step(
                model, optimizer, toy_batches(step, mesh), mesh, StepState(0),
                step=step, lr=1e-2, clip_norm=1.0, requests=StepRequests(stop=orders.stop),
            )  # fmt: skip
            if result.requests.stop:
                return step, quiet, orders.agreed(mesh)
    raise AssertionError("nobody stopped")


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    assert launch(_stop_one, 2, str(tmp_path)) == [(3, False, True)] * 2
