"""Stop a run: a signal to any rank, `run.max_minutes` or a file in run.dir ends all ranks after the same step.

SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT and SIGQUIT (from schedulers, launchers, terminals and people) only set a
flag. Each step's all-reduce carries the flag (`requests`), so no rank stops alone; the training loop then saves and
ends. A signal that comes `SECOND_AFTER` seconds after the first, or later, ends the process at once. Schedulers and
torchrun may send the same request twice, but within a shorter time.

`touch run.dir/STOP` stops the run after a step, with a checkpoint; `touch run.dir/SAVE` saves a checkpoint and training
continues. The file is removed when that is done. Only the first rank looks for it, at most once a second.

A worker of torchrun asks the kernel for SIGHUP when torchrun dies; otherwise it would train on alone and hold the
machine. This SIGHUP never counts as a second signal.

pretrain.py listens before it imports anything else. So this file must not import torch: that takes seconds, in which a
signal would kill the process instead of setting the flag.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_fp4.runtime.closed_pipe import end_without_reader

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
NO_SIGNALS = "SIGVTALRM"
"""What torchrun handles under launch.py; none at all is no choice that it offers."""
SECOND_AFTER = 5.0
PRINTING_OPTIONS = ("--help", "-h", "--version", "--check", "--cfg", "--info", "--multirun", "-m")
STOP_FILE, SAVE_FILE = "STOP", "SAVE"
LOOK_EVERY = 1.0
# How often a scheduler or torchrun has started the run again.
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopRequest:
    """Listens for signals to this process, from `listen` (or entering it as a context) to `close`.

    received: the first signal, or None. said: whether its line is printed. began: `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.received: signal.Signals | None = None
        self._first_at = 0.0
        self.said = self._ignoring = False
        self._previous: dict[signal.Signals, Any] = {}
        self._parent = os.getppid()
        self._wakeup: tuple[int, int] | None = None

    def listen(self) -> StopRequest:
        """Install the signal handlers; only in the main thread.

        If SIGHUP is ignored (nohup), it stays ignored, except under torchrun, where it means that torchrun died.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # A main thread inside a collective that never ends runs no handler. So another thread reads the signals too.
        self._wakeup = writer, signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN and not under_torchrun:
                continue
            self._previous[number] = signal.signal(number, self._receive)
        if under_torchrun and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP), 0, 0, 0)
            if self.orphaned:  # torchrun died before the line above
                self._receive(signal.SIGHUP, None)
        return self

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self._wakeup is not None:
            writer, before = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(writer)  # which ends the thread
            self._wakeup = None

    def decline(self) -> None:
        """For a program that only prints, and has no step to stop after: signals do again what they did before, also
        one that has already come, and the program ends when no process reads its output."""
        end_without_reader()
        self.close()
        if self.received is not None:
            os.kill(os.getpid(), self.received)

    def ignore(self) -> None:
        """From now on, signals are only recorded: the run has ended and has written everything. torchrun sends TERM to
        the remaining workers as soon as one has ended."""
        self._ignoring = True

    def __enter__(self) -> StopRequest:
        return self.listen()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop. Other ranks may not know it yet."""
        return self.received is not None

    @property
    def orphaned(self) -> bool:
        return os.getppid() != self._parent

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; called in the main thread or the watching one, whichever comes first."""
        if self.received is None:
            self._first_at = time.monotonic()
            self.received = signal.Signals(number)

    def _watch(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number not in SIGNALS:  # SIGCHLD of loader workers, for instance
                    continue
                self._receive(number, None)
                name, again = signal.Signals(number).name, time.monotonic() - self._first_at >= SECOND_AFTER
                if self._ignoring:
                    continue
                if not self.said:
                    self._say(f"{name}: stopping after this step; another signal leaves at once")
                    self.said = True
                elif again and not (number == signal.SIGHUP and self.orphaned):
                    self._say(f"{name}, the second signal: leaving at once, nothing is saved")
                    if os.isatty(1):  # show the cursor again, which a progress bar has hidden
                        os.write(1, b"\x1b[?25h")
                    os._exit(128 + number)
        os.close(reader)

    def _say(self, text: str) -> None:
        if os.environ.get("RANK", "0").strip() == "0":  # place_in_run refuses a wrong value
            # On a terminal, the line replaces the progress bar and "^C".
            begin = "\r\x1b[2K" if os.isatty(2) else ""
            os.write(2, f"{begin}pretrain.py: {text}\n".encode())


def stop_request(arguments: list[str]) -> StopRequest:
    """A StopRequest that listens, unless `arguments` only ask to print something. Ctrl-C ends such a program."""
    if {*arguments} & {*PRINTING_OPTIONS}:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return StopRequest()
    return StopRequest().listen()


class StopConditions:
    """What this rank is asked to do: by signals and, on the first rank (`active`), by files and `run.max_minutes`.

    max_minutes: since the process began; 0: no limit. A STOP file that exists at the start was meant for an earlier
    run, and is removed, unless a scheduler or torchrun started this one again by itself: it was made in between.
    """

    def __init__(self, run_dir: Path, max_minutes: float, signals: StopRequest, active: bool) -> None:
        self._run_dir, self._max_minutes, self._signals, self._active = run_dir, max_minutes, signals, active
        self._looked = -LOOK_EVERY
        self._files: set[str] = set()
        self._folder = _identity(run_dir)
        is_again = any(int(os.environ.get(name) or 0) for name in _RESTARTS)
        if active and not is_again and (run_dir / STOP_FILE).exists():
            self._remove(STOP_FILE)
            log.warning("removed %s: it was there before this start, so it was for an earlier run", run_dir / STOP_FILE)

    @property
    def stop(self) -> bool:
        return self.why_stop is not None

    @property
    def save(self) -> bool:
        """Whether to save a checkpoint after this step."""
        self._look()
        return SAVE_FILE in self._files

    @property
    def why_stop(self) -> str | None:
        """What asked this rank to stop: a signal's name, a file or a setting; None: nothing."""
        if self._signals.received is not None:
            return self._signals.received.name
        if self._active and 0 < self._max_minutes <= (time.monotonic() - self._signals.began) / 60:
            return f"run.max_minutes={self._max_minutes:g}"
        self._look()
        return f"the file {STOP_FILE}" if STOP_FILE in self._files else None

    def saved(self) -> None:
        """What was requested is done, and a checkpoint saved: remove the files of requests."""
        for name in self._files:
            self._remove(name)
        self._files.discard(SAVE_FILE)  # a request to stop stays

    def _look(self) -> None:
        if self._active and time.monotonic() - self._looked >= LOOK_EVERY:
            self._files |= {name for name in (STOP_FILE, SAVE_FILE) if (self._run_dir / name).exists()}
            self._looked = time.monotonic()
            if (folder := _identity(self._run_dir)) != self._folder:
                self._folder = folder
                log.error(
                    "run.dir=%s was moved, removed or replaced while the run trains: what it writes from now on is not "
                    "where the rest is, and no lock guards it; stop the run, and put both together",
                    self._run_dir,
                )

    def _remove(self, name: str) -> None:
        try:
            (self._run_dir / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("could not remove %s: %s", self._run_dir / name, error)


def _identity(path: Path) -> tuple[int, int] | None:
    """Differs if another folder is at `path`; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
