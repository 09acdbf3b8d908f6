"""Where a run's wall time goes, over all its starts: `run.dir/goodput.jsonl`, written while it happens.

The first rank books every moment from the begin of its process under what it is doing then, as `Progress.at` says it.
Lines are only ever appended, one JSON object each, told apart by `kind`:

    start   a process began (`began`, in seconds since 1970) and holds the run's lock: where it runs, and how far
            metrics.jsonl had come (`seen_step`, last written at `seen`), which tells what a killed start had still done
    loop    it goes on from `step` steps done: what earlier starts did behind that is lost
    time    `seconds` since `began` by what they went to, as of `step` steps done
    end     the same, and the `state` that it ended in

A line of time comes with the end of the first step, with each save (work can only be lost from there on), and every
10 seconds to 5 minutes from a thread, which also brings them to the disk: the loop waits for none of it. A killed
process so loses a line at most; what the disk refuses is said, kept, and written later (record_file.py).
goodput.py reads the ledger.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_fp4 import __version__
from megatron_fp4.logging.metrics import METRICS_FILE
from megatron_fp4.logging.record_file import RecordFile, record_of
from megatron_fp4.runtime.exit_codes import ExitCode, exit_code_of
from megatron_fp4.runtime.progress import Progress

LEDGER_FILE = "goodput.jsonl"
STARTUP, FIRST, STEPS, DATA, VALIDATION, SAVES, LOST = (
    "start-up", "first step", "steps", "data wait", "validation", "saves", "lost work",
)  # fmt: skip
ROLLBACK, EXPORTS, ENDING, OTHER = "going back", "exports", "end", "other"
# By the phases of `Progress`; every other one belongs to the start-up before the first step, and to a step behind.
KINDS = {
    "start": STARTUP,
    "build": STARTUP,
    "load": STARTUP,
    "tune and test kernels": STARTUP,
    "data": DATA,
    "validation": VALIDATION,
    "text samples": VALIDATION,
    "save": SAVES,
    "go back to a checkpoint": ROLLBACK,
    "export": EXPORTS,
    "end": ENDING,
}
_SHORTEST, _LONGEST = 10.0, 300.0
# Of the time so far: how much of it may be without a line.
_SHARE = 0.02


class TimeLedger:
    """Books the time of this process from entering to leaving a `with`; on other ranks (`active=False`) nothing.

    progress: says what the run is doing. began: `time.monotonic()` of when the process did. device, ranks: what the run
    has. Nothing of it raises OSError. `worked`: whether this start did more than to find the run finished.
    """

    def __init__(
        self, run_dir: Path, progress: Progress, *, began: float, device: torch.device, ranks: int, active: bool
    ) -> None:
        self._run_dir, self._progress, self._began, self._active = run_dir, progress, began, active
        self._device, self._ranks = device, ranks
        self.worked = False
        self._seconds: dict[str, float] = {}
        self._kind, self._since, self._step = STARTUP, began, 0
        self._first: int | None = None  # the number of the first step of this start
        self._first_over = False
        self._data_waited = 0.0
        self._written = began
        self._ended = False
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="time ledger", daemon=True)

    def __enter__(self) -> TimeLedger:
        if self._active:
            path = self._run_dir / LEDGER_FILE
            self._file = RecordFile(path, lambda: _finish_last_line(path))
            now = time.time()
            seen_step, seen = last_step(self._run_dir)
            self._line(
                "start", began=round(now - (time.monotonic() - self._began), 3), host=socket.gethostname(),
                pid=os.getpid(), ranks=self._ranks, device=_name(self._device), version=__version__,
                torch=torch.__version__, seen=seen, seen_step=seen_step,
            )  # fmt: skip
            self._progress.observer = self
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._active:
            if not self._ended:
                code = ExitCode.FINISHED if error is None else exit_code_of(error)
                self._end(code.state, "" if error is None else f"{type(error).__name__}: {error}"[:400])
            self._progress.observer = None
            self._file.close()

    def ended(self, code: ExitCode) -> ExitCode:
        """This start ends with `code`, which is returned; time behind this belongs to nobody."""
        if self._active:
            self._end(code.state, "")
        return code

    def at(self, step: int, phase: str) -> None:
        """The run begins `phase` of `step` (`Progress.at`)."""
        kind = KINDS.get(phase)
        begins = first_over = False
        with self._lock:
            self._book()
            if kind == DATA:
                self._data_waited = 0.0
                if self._first is None:
                    self._first, begins = step, True
            self._step = max(self._step, step - 1 if kind in (None, DATA) else step)
            if self._first is not None and step > self._first and not self._first_over:
                self._first_over = first_over = True
            self._kind = kind or (STEPS if self._first_over else FIRST if self._first is not None else STARTUP)
        self.worked |= kind not in (None, STARTUP, DATA)
        if begins:
            self._line("loop", step=step - 1)
        if first_over or kind in (SAVES, ENDING):
            self._time_line()
            self._wake.set()

    def waited(self, seconds: float) -> None:
        """The rank that waited longest for the data of the step in progress waited so long: what this rank, which the
        others kept waiting, booked less is moved from its step."""
        with self._lock:
            more = seconds - self._data_waited
            self._data_waited = max(seconds, self._data_waited)
            if more > 0 and self._kind in (FIRST, STEPS):
                self._book()
                moved = min(more, self._seconds.get(self._kind, 0.0))
                self._seconds[self._kind] -= moved
                self._seconds[DATA] = self._seconds.get(DATA, 0.0) + moved

    def _book(self) -> None:
        now = time.monotonic()
        spent = now - self._since
        self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + spent
        if self._kind == DATA:
            self._data_waited += spent
        self._since = now

    def _time_line(self) -> None:
        with self._lock:
            self._book()
            seconds = {kind: round(value, 3) for kind, value in self._seconds.items()}
            self._written = self._since
        self._line("time", seconds=seconds)

    def _end(self, state: str, reason: str) -> None:
        self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(30)  # no line behind the last one; more if the disk hangs is for nobody to wait for
        with self._lock:
            self._book()
            seconds = {kind: round(value, 3) for kind, value in self._seconds.items()}
        self._line("end", seconds=seconds, state=state, reason=reason)

    def _line(self, kind: str, step: int | None = None, **values: Any) -> None:
        record = {"kind": kind, "step": self._step if step is None else step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(record))

    def _keep_writing(self) -> None:
        while not self._ended:
            now = time.monotonic()
            patience = min(max(_SHORTEST, _SHARE * (now - self._began)), _LONGEST)
            woken = self._wake.wait(max(0.0, self._written + patience - now))
            self._wake.clear()
            if self._ended:
                return
            if not woken:
                self._time_line()
            self._file.sync()


def last_step(run_dir: Path) -> tuple[int, float | None]:
    """The last training step in metrics.jsonl of `run_dir`, 0 if there is none, and when the file was last written, in
    seconds since 1970. Reads from its end."""
    path = run_dir / METRICS_FILE
    try:
        with path.open("rb") as file:
            written, size, block = os.fstat(file.fileno()).st_mtime, os.fstat(file.fileno()).st_size, 2**16
            while True:
                file.seek(max(0, size - block))
                lines = file.read(block).split(b"\n")
                for line in reversed(lines if block >= size else lines[1:]):
                    record = record_of(line) if b'"step"' in line else None
                    if isinstance(record, dict) and record["kind"] == "step":
                        return record["step"], round(written, 3)
                if block >= size:
                    return 0, round(written, 3)
                block *= 8
    except OSError:
        return 0, None


def _finish_last_line(path: Path) -> None:
    """A power cut may leave half a line, with which the next one would be lost too."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
