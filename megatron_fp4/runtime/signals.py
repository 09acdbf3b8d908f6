"""Stopping on request: a signal to any rank, `run.max_minutes` or a file in run.dir ends the run on all ranks after
the same step.

SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT and SIGQUIT (of schedulers, launchers, terminals and people) only set a flag.
Each step's all-reduce carries it (`requests`), so no rank stops alone; the loop then saves and leaves. A signal
that comes `SECOND_AFTER` seconds after the first, or later, leaves at once: schedulers and torchrun deliver the same
request twice within moments, a person who insists takes longer.

`touch run.dir/STOP` stops after a step with a checkpoint, `touch run.dir/SAVE` saves one and trains on; each is removed
when it was obeyed. Only the first rank looks, at most once a second.

A worker of torchrun also asks the kernel for SIGHUP when torchrun dies: it would otherwise train on alone, holding the
machines. Such a SIGHUP never counts as a second signal.

pretrain.py listens before it imports anything else, so this file must not import torch: that takes seconds, in which
a signal would kill the process instead of being remembered.
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
SECOND_AFTER = 5.0
SAYS_SOMETHING = ("--help", "-h", "--version", "--check", "--cfg", "--multirun", "-m")
STOP_FILE, SAVE_FILE = "STOP", "SAVE"
LOOK_EVERY = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopRequest:
    """Listens for signals to this process, from `listen` (or entering it as a context) to `close`.

    received: the first signal that came, or None. said: whether the line about it is printed, where this rank prints.
    began: `time.monotonic()` of when it was made.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.received: signal.Signals | None = None
        self._first_at = 0.0
        self.said = self._over = False
        self._previous: dict[signal.Signals, Any] = {}
        self._parent = os.getppid()
        self._wakeup: tuple[int, int] | None = None

    def listen(self) -> StopRequest:
        """Take over the signals; only in the main thread.

        A SIGHUP that is ignored stays so (nohup), but not under torchrun: its workers get none from a terminal.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The main thread may be inside a collective that never ends and then runs no handler: a thread reads along.
        self._wakeup = writer, signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN and not under_torchrun:
                continue
            self._previous[number] = signal.signal(number, self._receive)
        if under_torchrun and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP), 0, 0, 0)
            if self.orphaned:  # it died before the line above
                self._receive(signal.SIGHUP, None)
        return self

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self._wakeup is not None:
            writer, before = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(writer)  # which ends the thread
            self._wakeup = None

    def decline(self) -> None:
        """This program has no steps to stop after, only something to say: from now on signals do what they did before,
        one that has already come included, and it ends without a reader."""
        end_without_reader()
        self.close()
        if self.received is not None:
            os.kill(os.getpid(), self.received)

    def over(self) -> None:
        """The run has ended, everything is written and said: a signal that comes while the process leaves is only
        remembered. torchrun sends TERM to whoever is still there when another worker has left."""
        self._over = True

    def __enter__(self) -> StopRequest:
        return self.listen()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop; others may not know yet."""
        return self.received is not None

    @property
    def orphaned(self) -> bool:
        """Whether the process that started this one is gone."""
        return os.getppid() != self._parent

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, or the watching one, whichever is first."""
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
                if self._over:
                    continue
                if not self.said:
                    self._say(f"{name}: stopping after this step; another signal leaves at once")
                    self.said = True
                elif again and not (number == signal.SIGHUP and self.orphaned):
                    self._say(f"{name}, the second signal: leaving at once, nothing is saved")
                    if os.isatty(1):  # a progress bar hides the cursor, which nothing else brings back
                        os.write(1, b"\x1b[?25h")
                    os._exit(128 + number)
        os.close(reader)

    def _say(self, text: str) -> None:
        if os.environ.get("RANK", "0").strip() == "0":  # a wrong value is refused elsewhere
            # On a terminal the cursor is after a progress bar and "^C", which give way to the line.
            begin = "\r\x1b[2K" if os.isatty(2) else ""
            os.write(2, f"{begin}pretrain.py: {text}\n".encode())


def stop_request(arguments: list[str]) -> StopRequest:
    """For a program with these command line arguments: listens, unless they only have it say something. Such a program
    ends by Ctrl-C as any command does."""
    if {*arguments} & {*SAYS_SOMETHING}:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return StopRequest()
    return StopRequest().listen()


class StopConditions:
    """What this rank was told to do: by signals, and on the first rank (`active`) by files and by the clock.

    max_minutes: of the process, 0 for no limit. A STOP file that is there already was meant for the run before: it is
    removed.
    """

    def __init__(self, run_dir: Path, max_minutes: float, signals: StopRequest, active: bool) -> None:
        self._run_dir, self._max_minutes, self._signals, self._active = run_dir, max_minutes, signals, active
        self._looked = -LOOK_EVERY
        self._files: set[str] = set()
        if active and (run_dir / STOP_FILE).exists():
            self._remove(STOP_FILE)
            log.warning("%s was there at the start, meant for the run before: removed", run_dir / STOP_FILE)

    @property
    def stop(self) -> bool:
        """Whether to stop after this step."""
        return self.why_stop is not None

    @property
    def save(self) -> bool:
        """Whether to save a checkpoint after this step."""
        self._look()
        return SAVE_FILE in self._files

    @property
    def why_stop(self) -> str | None:
        """What asked this rank to stop: a signal's name, a file, a setting; None if nothing did."""
        if self._signals.received is not None:
            return self._signals.received.name
        if self._active and 0 < self._max_minutes <= (time.monotonic() - self._signals.began) / 60:
            return f"run.max_minutes={self._max_minutes:g}"
        self._look()
        return f"the file {STOP_FILE}" if STOP_FILE in self._files else None

    def obeyed(self) -> None:
        """A checkpoint was saved after the step that carried what this rank was told: remove the files that said so."""
        for name in self._files:
            self._remove(name)
        self._files.discard(SAVE_FILE)  # the request to stop stays in force

    def _look(self) -> None:
        if self._active and time.monotonic() - self._looked >= LOOK_EVERY:
            self._files |= {name for name in (STOP_FILE, SAVE_FILE) if (self._run_dir / name).exists()}
            self._looked = time.monotonic()

    def _remove(self, name: str) -> None:
        try:
            (self._run_dir / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("could not remove %s: %s", self._run_dir / name, error)
