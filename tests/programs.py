"""Programs as users start them, in processes of a fork server that has imported torch: a start takes some tenths of a
second instead of five seconds.

Such a process is like `python program.py`, except that the modules of `PRELOAD` are already imported, and that on Linux
it is killed when its parent ends, so killed tests leave no runs behind.
"""

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
import pytest
import torch

from megatron_fp4.runtime.progress import state_of_process

ROOT = Path(__file__).resolve().parent.parent

# FSDP and deterministic algorithms import torch._dynamo and torch._inductor at their first use. The last module must
# stay the last.
PRELOAD = [
    "tests.programs", "tests.training.harness", "pretrain", "pytest", "numpy.random", "torch._dynamo",
    "torch._inductor.config", "torch.utils.tensorboard", "megatron_fp4.checkpoint.checkpointer",
    "megatron_fp4.logging.page", "megatron_fp4.planning.dry_run", "tests.all_imported",
]  # fmt: skip


# Arguments: the id of the parent process and a command. Becomes the command, which is killed when the parent ends.
_AS_CHILD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG, which exec keeps
if os.getppid() != int(sys.argv[1]):  # the parent ended before the line above
    os._exit(1)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
os.execv(sys.argv[2], sys.argv[2:])
"""


def as_child(command: Sequence[str]) -> list[str]:
    """A command for `subprocess.Popen` that runs `command`, which begins with the path of a program. On Linux it obeys
    Ctrl-C, and is killed when the thread that started it ends; its own children are not (workers of torchrun then end
    by themselves)."""
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
    """Let the kernel kill this process when its parent ends.

    The parent is the test's process, not the fork server; it has the only writing end of a pipe, and the kernel sends
    SIGKILL when that closes. A thread that waits for it would disturb forks and need the GIL.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not parent.is_alive():  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def fork_server() -> multiprocessing.context.ForkServerContext:
    """The fork server of this process. It and its processes end with this process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = _ForkServer()
    context.set_forkserver_preload(PRELOAD)
    return context


class Program:
    """A started program, with the methods of `subprocess.Popen` that tests use.

    command: the path of a script, relative to the checkout unless it is absolute, and its arguments. environment: None
    means that of this process. errors_apart: stderr is separate from the output. own_modules: the project's modules are
    imported anew, from the script's folder, which is a changed copy of the checkout. The program prints to files, which
    are read when it has ended.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        errors_apart: bool = False,
        own_modules: bool = False,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._printed = [Path(self._scratch.name, name) for name in ("output", "errors")]
        given = dict(os.environ if environment is None else environment) | {"OMP_NUM_THREADS": "1"}
        words = [str(ROOT / command[0]), *map(str, command[1:])]
        printed = [str(self._printed[0]), str(self._printed[1]) if errors_apart else ""]
        self._process = fork_server().Process(target=_run, args=(words, given, str(Path.cwd()), printed, own_modules))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        # If a test fails without waiting for it, multiprocessing would wait at the end.
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
        """Wait for the end; returns the exit code. After `timeout` seconds, kill the process, raise TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.send_signal(signal.SIGKILL)
            self._process.join()
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0, "\n".join(self._read()))
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; returns output and errors. Raises as `wait` does."""
        self.wait(timeout)
        output, errors = self._read()
        return output, errors

    def _read(self) -> list[str]:
        return [path.read_text(errors="replace") if path.exists() else "" for path in self._printed]


def run_program(
    command: Sequence[str | Path], environment: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with `capture_output` and `text`."""
    program = Program(command, environment, errors_apart=True)
    output, errors = program.communicate(timeout)
    return subprocess.CompletedProcess(list(command), program.wait(), output, errors)


def wait_until(condition: Callable[[], object], what: str = "", program: Any = None, seconds: float = 300) -> None:
    """Wait until the condition holds. AssertionError with `what` after `seconds`, or if `program` ends before."""
    deadline = time.monotonic() + seconds
    while True:
        ended = program is not None and program.poll() is not None  # asked first: its last act may be the condition
        if condition():
            return
        assert not ended, (what, program.communicate())
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def error_line(capsys: pytest.CaptureFixture[str], program: str) -> str:
    """The only line that a command printed to stderr; it must begin with the name of the program."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{program}: "), line
    return line


def cells(printed: str) -> list[list[str]]:
    """The cells of all rows of the Markdown tables in a program's output."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|"]


def wait_until_gone(pids: Sequence[int]) -> None:
    """Wait until all processes have ended. Zombies count as ended."""
    wait_until(lambda: all(state_of_process(pid) == "gone" for pid in pids), f"still there: some of {pids}")


def environments_of_ranks(world_size: int) -> list[dict[str, str]]:
    """The environment of this process with what torchrun adds, for each rank on one host."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    world |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return [{**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _free_port() -> int:
    """A free port outside of the range that the kernel assigns from, so that it stays free until ranks listen."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _run(command: list[str], environment: dict[str, str], folder: str, printed: list[str], own_modules: bool) -> None:
    """In the new process, run as `python command` does. printed: the files for output and errors; if the second name is
    empty, errors go to the output."""
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    # New random state, as in every new Python: forked processes would all have the fork server's.
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
    own = Path(command[0]).resolve().parent
    sys.path[:] = [str(own), *(path for path in sys.path if path)]
    if own_modules:
        names = {path.stem for path in own.iterdir()}
        for module in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[module]
    runpy.run_path(command[0], run_name="__main__")
