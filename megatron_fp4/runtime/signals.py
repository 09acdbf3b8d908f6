"""Stopping on request: a signal to any rank ends the run on all ranks after the same step.

SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT and SIGQUIT (of schedulers, launchers, terminals and people) only set a flag.
Each step's all-reduce carries it (`requests`), so no rank stops alone; the loop then saves and leaves. A signal
that comes `SECOND_AFTER` seconds after the first, or later, leaves at once: schedulers and torchrun deliver the same
request twice within moments, a person who insists takes longer.

A worker of torchrun also asks the kernel for SIGHUP when torchrun dies: it would otherwise train on alone, holding the
machines. Such a SIGHUP never counts as a second signal.

pretrain.py listens before it imports anything else, so this file must not import torch: that takes seconds, in which
a signal would kill the process instead of being remembered.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import NoReturn

from megatron_fp4.runtime.closed_pipe import end_without_reader

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
SECOND_AFTER = 5.0
SAYS_SOMETHING = ("--help", "-h", "--version", "--check", "--cfg", "--multirun", "-m")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopRequest:
    """Listens for signals to this process, from `listen` (or entering it as a context) to `close`.

    received: the first signal that came, or None. began: `time.monotonic()` of when it was made.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.received: signal.Signals | None = None
        self._first_at = 0.0
        self._said = self._hushed = self._over = False
        self._previous: dict[signal.Signals, object] = {}
        self._parent = os.getppid()
        self._wakeup: tuple[int, int, int] | None = None

    def listen(self) -> StopRequest:
        """Take over the signals; only in the main thread.

        A SIGHUP that is ignored stays so (nohup), but not under torchrun: its workers get none from a terminal.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The main thread may be inside a collective that never ends and then runs no handler: a thread reads along.
        self._wakeup = reader, writer, signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN and not _under_torchrun():
                continue
            self._previous[number] = signal.signal(number, self._receive)
        if _under_torchrun() and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP), 0, 0, 0)
            if os.getppid() != self._parent:  # it died before the line above
                self._receive(signal.SIGHUP, None)
        return self

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
        if self._wakeup is not None:
            _, writer, before = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(writer)  # which ends the thread
            self._wakeup = None

    def hush(self) -> None:
        """Say nothing of signals any more: the run ends by itself, and has said why."""
        self._hushed = True

    def decline(self) -> None:
        """This program has no steps to stop after, only something to say: from now on signals do what they did before,
        one that has already come included, and it ends without a reader."""
        end_without_reader()
        self.close()
        if self.received is not None:
            os.kill(os.getpid(), self.received)

    def over(self) -> None:
        """The run has ended and everything is written: a signal that comes while the process leaves changes nothing.

        torchrun sends TERM to whoever is still there when another worker has left, which is no second signal.
        """
        self._over = True

    def __enter__(self) -> StopRequest:
        return self.listen()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
                if self._over or number not in SIGNALS:  # SIGCHLD of loader workers, for instance
                    continue
                if self.received is not None and self._said:
                    self._again(number)
                else:
                    self._receive(number, None)
                    self._say(f"{_name(number)}: stopping after this step; another signal leaves at once")
                    self._said = True
        os.close(reader)

    def _again(self, number: int) -> None:
        of_launcher = number == signal.SIGHUP and self.orphaned
        if not of_launcher and time.monotonic() - self._first_at >= SECOND_AFTER:
            self._leave(number)

    def _leave(self, number: int) -> NoReturn:
        self._say(f"{_name(number)}, the second signal: leaving at once, nothing is saved")
        if os.isatty(1):  # a progress bar hides the cursor, which nothing else brings back
            os.write(1, b"\x1b[?25h")
        os._exit(128 + number)

    def _say(self, text: str) -> None:
        if not self._hushed and os.environ.get("RANK", "0").strip() == "0":  # a wrong value is refused elsewhere
            # On a terminal the cursor is behind a progress bar and "^C", which give way to the line.
            begin = "\r\x1b[2K" if os.isatty(2) else ""
            os.write(2, f"{begin}pretrain.py: {text}\n".encode())


def stop_request(arguments: list[str]) -> StopRequest:
    """For a program with these command line arguments: listens, unless they only have it say something. Such a program
    ends by Ctrl-C as any command does."""
    if {*arguments} & {*SAYS_SOMETHING}:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return StopRequest()
    return StopRequest().listen()


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _name(number: int) -> str:
    return signal.Signals(number).name
