"""A program whose reader leaves, as in `scripts/compare.py ... | head -1`, ends without a word, as Unix tools do; one
whose output goes to a full disk ends with a line that says so.

Not by SIGPIPE, which Python ignores: that would also come of the pipes and sockets between processes, where whoever
writes has something to say, and would leave what exceptions clean up. A run of pretrain.py trains on
(logging/console.py).
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
    """No process reads standard output any more."""


def end_without_reader() -> None:
    """Let this process raise ReaderLeftError where it writes to a standard output that no process reads any more.

    It ends with exit code 141 then, or with its own if only the last of its output was still to be written.
    """
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return  # a test, or a program that contains this one, keeps what is printed
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
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # which takes what is still in buffers
            if isinstance(error, BrokenPipeError):
                raise ReaderLeftError(EXIT_CODE) from None
            raise OSError(error.errno, error.strerror, "standard output") from None


def _write_rest() -> None:
    try:
        sys.stdout.flush()
    except ReaderLeftError:  # the program is done, and has its exit code
        pass
    except OSError as error:
        print(f"standard output: {error.strerror}; make room", file=sys.stderr, flush=True)
        os._exit(1)
