"""Become a command that ends with the process that started it, and that yields the processor to everything else.

    python -m exchange.as_child PID COMMAND ARGUMENT ...

PID: of the process that started it. A run may be killed without a chance to end what it has started: then the kernel
does it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NICE = 19


def main(arguments: list[str]) -> NoReturn:
    """Replaces this process."""
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # stays through the exec
    if os.getppid() != int(parent):  # it was gone before the line above
        os._exit(1)
    os.nice(_NICE)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
