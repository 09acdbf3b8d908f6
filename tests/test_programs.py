"""Programs that tests started are gone when the tests are, however they ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.programs import ROOT, Program

SLEEPS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""
STARTS = """
import subprocess, sys, time
from tests.programs import Program, as_child
if __name__ == "__main__":
    started = {}
    time.sleep(600)
"""
WAYS = {
    "from the fork server": "Program(sys.argv[1:])",
    "as a new interpreter": "subprocess.Popen(as_child([sys.executable, *sys.argv[1:]]))",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_program_is_killed_with_who_started_it(way: str, tmp_path: Path) -> None:
    sleeps, starts, says = tmp_path / "sleeps.py", tmp_path / "starts.py", tmp_path / "says"
    sleeps.write_text(SLEEPS)
    starts.write_text(STARTS.format(way))
    starter = Program([starts, sleeps, says], {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_for(lambda: says.exists() and says.read_text() != "", "it did not start")
        pid = int(says.read_text())
        assert starter.poll() is None and is_alive(pid)
    finally:
        starter.send_signal(signal.SIGKILL)
    try:
        wait_for(lambda: not is_alive(pid), "it goes on alone")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Also no zombie, which a container without an init process keeps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
