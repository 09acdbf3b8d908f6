"""`run.dir/state.json`: how the newest start of a run stands, for schedulers and people.

torchrun turns every exit code of its workers into 1, and a killed process has none, so what a restart should do is
written down: {"state", "step", "reason", "pid", "host", "time"}. state is `running` or one of exit_codes.ExitCode;
`running` of a process that is gone means that it was killed. step is the last one begun, as in metrics.jsonl. The
first rank writes it, replacing the file, and only while it holds the run's lock: who was refused because of another
run says nothing about that one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from megatron_fp4.runtime.exit_codes import ExitCode, exit_code_of
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.run_lock import LOCK_FILE

log = logging.getLogger(__name__)

STATE_FILE = "state.json"


class RunState:
    """The state of a start, from `running` when entered to what `ended` says or the exception means.

    active: whether this rank writes. progress: has the step that an exception came in.
    """

    def __init__(self, run_dir: Path, active: bool, progress: Progress) -> None:
        self._run_dir = run_dir
        self._active = active
        self._progress = progress

    def __enter__(self) -> RunState:
        self._write("running", self._progress.place.step, "")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._write(exit_code_of(error).state, self._progress.place.step, f"{type(error).__name__}: {error}")

    def ended(self, code: ExitCode, step: int, reason: str = "") -> ExitCode:
        """Write down that this start ended with `code` after `step` steps, wait until all ranks have written
        everything, and return it.

        A collective: torchrun ends all workers as soon as one leaves with an exit code other than 0.
        """
        self._write(code.state, step, reason)
        dist.all_reduce(torch.zeros(1))  # on the CPU, by gloo: waits for nothing on a GPU
        return code

    def _write(self, state: str, step: int, reason: str) -> None:
        if self._active:
            write_state(self._run_dir, state, step, reason)


def write_state(run_dir: Path, state: str, step: int | None, reason: str) -> None:
    """Replace `state.json` of `run_dir`; a disk that refuses it is a warning."""
    record = {"state": state, "step": step, "reason": reason, "pid": os.getpid(), "host": socket.gethostname()}
    record["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    temporary = run_dir / f"{STATE_FILE}.tmp"
    try:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(run_dir / STATE_FILE)
    except OSError as error:
        log.warning("could not write %s: %s", run_dir / STATE_FILE, error)


def note_refusal(run_dir: Path, reason: str) -> None:
    """Write down that a start was refused before it held the lock of `run_dir`, unless another run holds it now or
    there is no such folder."""
    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_state(run_dir, ExitCode.REFUSED.state, None, reason)
    except OSError:
        return
    finally:
        os.close(descriptor)
