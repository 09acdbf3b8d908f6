"""How a run ends: its exit code, one line for an error that the user has to correct, and the end of its process.

Under torchrun every failure of a worker becomes torchrun's exit code 1; `state.json` (run_state.py) keeps the real one.
A run that finished or stopped has written everything by now. Leaving its process group may hang for minutes, so it gets
some seconds. A run that failed prints why and does not wait for its process group, because other ranks may not end.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from torch import OutOfMemoryError
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.errors import hidden, printable
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import end_process, leave_distributed
from megatron_fp4.precision.verify import SelfTestError
from megatron_fp4.runtime.signals import NO_SIGNALS

# How long leaving the process group may take.
GROUP_SECONDS = 10.0
# How many seconds to wait for torchrun to end this process.
_END = 20.0


class ExitCode(IntEnum):
    """The exit codes of pretrain.py. After a second signal the code is 128 + the signal's number instead."""

    FINISHED = 0
    CRASHED = 1
    REFUSED = 2
    """The configuration is wrong, or the user has to decide something."""
    DIVERGED = 3
    """Too many steps in a row were skipped or undone: to continue, change the configuration."""
    WRONG_NUMBERS = 4
    """Hardware or kernels compute wrong numbers: to continue, use another machine."""
    HUNG = 5
    """A section of the run made no progress for too long (progress.py): run the command again, on other machines."""
    STOPPED = 75
    """Stopped on request, and saved: the same command resumes. EX_TEMPFAIL of sysexits.h, "try again later"."""

    @property
    def state(self) -> str:
        return self.name.lower()


class DivergedError(RuntimeError):
    """Training makes no progress with this configuration. Raised on all ranks alike."""


class StoppedError(RuntimeError):
    """The run was asked to stop before it began. Raised on all ranks alike."""


class WrongNumbersError(RuntimeError):
    """Two computations that must have the same bits differ."""


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a run that ended with `error`."""
    if isinstance(error, ConfigError):
        return ExitCode.REFUSED
    if isinstance(error, DivergedError):
        return ExitCode.DIVERGED
    if isinstance(error, SelfTestError | WrongNumbersError):
        return ExitCode.WRONG_NUMBERS
    if isinstance(error, StoppedError):
        return ExitCode.STOPPED
    return ExitCode.CRASHED


def is_user_error(error: OSError) -> bool:
    """Whether the user has to correct a path, because the next start would fail in the same way.

    Any other error of a disk or network (EIO, ESTALE, ETIMEDOUT, EAGAIN, ENOSPC, ...) may be gone at the next start or
    on other nodes. It is a crash, after which a scheduler starts the run again; after a refusal it does not.
    """
    kinds = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
    return isinstance(error, kinds) or error.errno in (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


_REMEDIES = {
    "make room, or name another place": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "change its permissions, or name another place": (errno.EACCES, errno.EPERM, errno.EROFS),
    "a file is where a folder must be; name another place, or move it": (errno.ENOTDIR, errno.EEXIST),
    "name a file, not a folder": (errno.EISDIR,),
    "correct the path": (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP),
}


def error_line(error: BaseException, output: str | os.PathLike[str] | None = None) -> str:
    """The line that a command prints for an error that its user can correct; for an OSError with the path and a remedy.

    output: what the command writes, for errors without a path (a full disk).
    """
    remedy = next((text for text, codes in _REMEDIES.items() if getattr(error, "errno", None) in codes), None)
    if not isinstance(error, OSError) or remedy is None:
        return printable(" ".join(str(error).split()))
    path = error.filename2 or error.filename or output or "its output"
    return printable(f"{os.fsdecode(path)}: {error.strerror}; {remedy}")


def run_command(
    name: str,
    body: Callable[[], int],
    output: str | os.PathLike[str] | None = None,
    refusals: tuple[type[Exception], ...] = (ValueError, OSError),
    less_memory: str = "",
) -> int:
    """Run a command; returns the exit code of `body`, or after one of `refusals`, errors that the user can correct, 2
    (4: kernels compute wrong results). The first rank prints their `error_line`. Leaves the process group, if any.

    less_memory: what needs less memory. If it is given, too little memory is such an error too."""
    try:
        return body()
    except Exception as error:
        line = error_line(error, output)
        if not isinstance(error, refusals):
            # Too little memory on a CPU has no exception type of its own.
            if not less_memory or not (isinstance(error, OutOfMemoryError) or "can't allocate memory" in str(error)):
                raise
            line = f"not enough memory; {less_memory}"
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"{name}: {line}", file=sys.stderr, flush=True)
        return max(ExitCode.REFUSED, exit_code_of(error))
    finally:
        leave_distributed()


def run_program(body: Callable[[], int]) -> NoReturn:
    """Run `body`, which is the whole program, and end the process with its exit code, or 1 if it raises."""
    faulthandler.enable()  # prints where a crash in C happened
    try:
        code = body()
    except KeyboardInterrupt:  # in a program that does not listen to signals, such as --check
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        end_process(128 + signal.SIGINT)
    except SystemExit as error:  # from --check or a dry run whose reader has left
        end_process(int(error.code or 0))
    except BaseException as error:
        _print_traceback(error)
        if notes := getattr(error, "__notes__", None):
            print(hidden("\n".join(notes)), file=sys.stderr, flush=True)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # for torchrun's report of failed workers
            shown = hidden(str(error))
            get_error_handler().record_exception(error if shown == str(error) else RuntimeError(shown))
        end_process(ExitCode.CRASHED)
    leaving = threading.Thread(target=leave_distributed, name="leaving", daemon=True)
    leaving.start()
    leaving.join(GROUP_SECONDS)
    if leaving.is_alive():
        print(
            f"pretrain.py: the process group did not end within {GROUP_SECONDS:.0f} s; ending without it. Everything "
            f"is written; exit code {int(code)}",
            file=sys.stderr,
            flush=True,
        )
    code = code_for_launcher(code)
    if told := of_torchrun(code):
        print(told, file=sys.stderr, flush=True)
    end_process(code)


def code_for_launcher(code: int) -> int:
    """The exit code that torchrun gets. A torchrun with restarts left (`--max-restarts`) would start a stopped run
    again, so there a stop counts as success."""
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return ExitCode.FINISHED if code == ExitCode.STOPPED and done < most else code


def of_torchrun(code: int) -> str | None:
    """What the first rank of a machine says before torchrun reports a stop as a failure, with a traceback."""
    ours = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE") == NO_SIGNALS
    if code != ExitCode.STOPPED or ours or "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["LOCAL_RANK"] != "0":
        return None
    return (
        "pretrain.py: stopped and saved. torchrun reports exit code 75 as a failure and ends with 1; "
        "`python -m megatron_fp4.launch` in its place ends with 75"
    )


class PrintableRecords(logging.Formatter):
    """The message of a log record, as `printable`."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextlib.contextmanager
def printed_at_once() -> Iterator[None]:
    """A context that prints the traceback of an unexpected exception at once, before outer contexts close: these, such
    as a save in the background, may take long or hang."""
    try:
        yield
    except BaseException as error:
        if exit_code_of(error) is ExitCode.CRASHED:
            _print_traceback(error)
        raise


def _print_traceback(error: BaseException) -> None:
    if not getattr(error, "_printed", False):
        sys.stderr.write(hidden("".join(traceback.format_exception(error))))
        sys.stderr.flush()
        error._printed = True  # type: ignore[attr-defined]


def report_error_once(line: str, ended: Callable[[], bool]) -> bool:
    """Print an error on stderr, once on each machine; returns whether this rank printed it.

    ended: returns whether torchrun has asked this process to end.

    The first rank of a machine prints. When it has exited, torchrun ends the others. These wait for that and exit with
    code 0, so that torchrun's report names the rank that printed. A rank that torchrun does not end prints itself.
    """
    local_rank, path = None, os.environ.get("TORCHELASTIC_ERROR_FILE")
    with contextlib.suppress(ConfigError):  # if the place itself is the error, each rank prints
        place = place_in_run()
        local_rank = place.rank if place.local_rank is None else place.local_rank
    if local_rank:
        if path is None:  # started by Slurm, where ranks do not end each other
            return False
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline:
            if ended():
                os._exit(0)
            time.sleep(0.02)
    line = printable(line)
    print(line, file=sys.stderr, flush=True)
    if path is not None:  # so that torchrun's report of failed workers shows the line instead of a traceback
        details = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
    return True
