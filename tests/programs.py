"""Programs as their users start them, in processes that come from a fork server with torch imported already: a start
costs some tenths of a second instead of five.

Such a process is like `python program.py`, but that modules of `PRELOAD` were imported before, and that on Linux it is
killed when who started it is gone: tests that are killed leave no run behind that keeps the cores.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fp4.runtime.progress import state_of_process

ROOT = Path(__file__).resolve().parent.parent

# torch._dynamo and torch._inductor because FSDP and deterministic algorithms import them when first used. The last
# is to come last.
PRELOAD = [
    "tests.programs",
    "tests.training.harness",
    "pretrain",
    "pytest",
    "numpy.random",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.utils.tensorboard",
    "megatron_fp4.checkpoint.checkpointer",
    "megatron_fp4.logging.page",
    "megatron_fp4.planning.dry_run",
    "tests.all_imported",
]


# `python -c` with the id of the process that starts it and a program: becomes this program, and ends with that process.
_AS_CHILD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG, which stays through the exec
if os.getppid() != int(sys.argv[1]):  # it was gone before the line above
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def as_child(command: Sequence[str]) -> list[str]:
    """`command`, which begins with the path of a program, for `subprocess.Popen`: killed on Linux when the thread that
    starts it is gone. What it starts in turn is its own business (workers of torchrun leave)."""
    ends_with = [sys.executable, "-I", "-S", "-c", _AS_CHILD, str(os.getpid())] if sys.platform == "linux" else []
    return [*ends_with, *command]


class _Process(multiprocessing.context.ForkServerProcess):
    def run(self) -> None:
        if sys.platform == "linux":
            _end_with_parent()
        super().run()


class _ForkServer(multiprocessing.context.ForkServerContext):
    Process = _Process


def _end_with_parent() -> None:
    """The parent, who is not the fork server, keeps the one writing end of a pipe. The kernel shall tell of its closing
    by SIGKILL: a thread that waits for it would be in the way of forks, and of programs that keep the GIL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not parent.is_alive():  # it was gone before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def fork_server() -> multiprocessing.context.ForkServerContext:
    """There is one in each process; it ends with it, and so does what comes from it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = _ForkServer()
    context.set_forkserver_preload(PRELOAD)
    return context


class Program:
    """A started program, with those of `subprocess.Popen`'s methods that tests use.

    command: the path of a script, below the checkout unless it is absolute, and its arguments. environment: None
    for this process's own. errors_apart: stderr is not part of the output. Nothing reads while it runs: what it prints
    goes to files.
    """

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None, errors_apart: bool = False
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._printed = [Path(self._scratch.name, name) for name in ("output", "errors")]
        given = dict(os.environ if environment is None else environment) | {"OMP_NUM_THREADS": "1"}
        words = [str(ROOT / command[0]), *map(str, command[1:])]
        printed = [str(self._printed[0]), str(self._printed[1]) if errors_apart else ""]
        self._process = fork_server().Process(target=_run, args=(words, given, str(Path.cwd()), printed))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        # Of a test that failed before it was waited for: multiprocessing would wait for it at the end.
        atexit.register(self.send_signal, signal.SIGKILL)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises TimeoutExpired, and kills the process then."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.send_signal(signal.SIGKILL)
            self._process.join()
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0, "\n".join(self._read()))
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed, once it has ended. Raises as `wait` does."""
        self.wait(timeout)
        output, errors = self._read()
        return output, errors

    def _read(self) -> list[str]:
        return [path.read_text(errors="replace") if path.exists() else "" for path in self._printed]


def run_program(
    command: Sequence[str | Path], environment: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with `capture_output` and `text`."""
    program = Program(command, environment, errors_apart=True)
    output, errors = program.communicate(timeout)
    return subprocess.CompletedProcess(list(command), program.wait(), output, errors)


def wait_until(condition: Callable[[], object], what: str = "", program: Any = None, seconds: float = 300) -> None:
    """AssertionError with `what` after so long, or where the program, if one is given, ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert program is None or program.poll() is None, (what, program.communicate())
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def cells(printed: str) -> list[list[str]]:
    """Of the tables in Markdown in what a program printed."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|"]


def wait_until_gone(pids: Sequence[int]) -> None:
    """Zombies are."""
    wait_until(lambda: all(state_of_process(pid) == "gone" for pid in pids), f"still there: some of {pids}")


def environments_of_ranks(world_size: int) -> list[dict[str, str]]:
    """This process's environment with what torchrun adds for each rank on one host."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    world |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return [{**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _free_port() -> int:
    """One that no process gets by asking for any: until the ranks listen, connections of other tests are made."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _run(command: list[str], environment: dict[str, str], folder: str, printed: list[str]) -> None:
    """In the new process: become `python command`. printed: files for output and errors, without a name for the second
    one if they go together."""
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    # As in every new Python, and not those of the fork server: two programs that forget to seed do not draw the same.
    torch.default_generator.seed()
    np.random.seed()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, path in enumerate(printed, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if path else os.dup(1)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", closefd=False, buffering=1 if "PYTHONUNBUFFERED" in environment else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    torch.set_num_threads(1)
    sys.argv = command
    sys.path[:] = [str(Path(command[0]).resolve().parent), *(path for path in sys.path if path)]
    runpy.run_path(command[0], run_name="__main__")
