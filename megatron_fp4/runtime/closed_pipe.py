"""End a program silently when the reader of its output has closed the pipe, as in `scripts/compare.py ... | head -1`;
and with one line when its output goes to a full disk.

SIGPIPE, which Python ignores, would not do: it also comes from pipes and sockets between processes, whose errors must
be reported, and it skips the cleanup that an exception does. A run continues training.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
from typing import Any

EXIT_CODE = 128 + signal.SIGPIPE


class ReaderLeftError(SystemExit):
    """No process reads standard output any longer."""


def end_without_reader() -> None:
    """Make writes to standard output raise ReaderLeftError once no process reads it.

    The process then ends with exit code 141. If only buffered output was left to write, it keeps its own exit code.
    """
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return  # a test or a calling program captures the output
    stream.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )
    atexit.register(_write_rest)


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is still in buffers
            if isinstance(error, BrokenPipeError):
                raise ReaderLeftError(EXIT_CODE) from None
            raise OSError(error.errno, error.strerror, "standard output") from None


def _write_rest() -> None:
    try:
        sys.stdout.flush()
    except ReaderLeftError:  # the program has ended and has its exit code
        pass
    except OSError as error:
        print(f"standard output: {error.strerror}; make room", file=sys.stderr, flush=True)
        os._exit(1)
