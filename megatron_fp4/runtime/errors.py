"""How a run ends: its exit code, one line for an error that a user can cause, and a process that ends in any case.

Under torchrun every failure of a worker becomes torchrun's own exit code 1; `state.json` (run_state.py) keeps the
difference. A run that finished or stopped has written everything before it comes here; its process group, which may
hang in its end for minutes, gets some seconds. A run that failed says why and does not wait for its group: other ranks
may never come.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
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

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import end_process, leave_distributed
from megatron_fp4.precision.verify import SelfTestError
from megatron_fp4.runtime.closed_pipe import EXIT_CODE as CLOSED_PIPE
from megatron_fp4.runtime.closed_pipe import ReaderLeftError

# For a process group to end.
GROUP_SECONDS = 10.0
# Seconds to wait for torchrun to end this process.
_END = 20.0


class ExitCode(IntEnum):
    """What pretrain.py's process returns. A second signal leaves with 128 + its number instead."""

    FINISHED = 0
    CRASHED = 1
    REFUSED = 2
    """The configuration is wrong, or something that only the user can decide."""
    DIVERGED = 3
    """Too many steps in a row were skipped or undone: training on needs another configuration."""
    WRONG_NUMBERS = 4
    """Hardware or kernels compute something else than they should: training on needs another machine."""
    HUNG = 5
    """A section of the run got nowhere for too long (progress.py): the same command resumes, on other machines."""
    STOPPED = 75
    """Stopped on request, saved: the same command resumes. EX_TEMPFAIL of sysexits.h: try again later."""

    @property
    def state(self) -> str:
        """Its name in `state.json`."""
        return self.name.lower()


class DivergedError(RuntimeError):
    """Training does not get on with this configuration; raised on all ranks alike."""


class StoppedError(RuntimeError):
    """The run was asked to stop before it began; raised on all ranks alike."""


class WrongNumbersError(RuntimeError):
    """Two computations that have to agree bit for bit do not."""


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a run that ended by `error`."""
    if isinstance(error, ConfigError):
        return ExitCode.REFUSED
    if isinstance(error, DivergedError):
        return ExitCode.DIVERGED
    if isinstance(error, SelfTestError | WrongNumbersError):
        return ExitCode.WRONG_NUMBERS
    if isinstance(error, StoppedError):
        return ExitCode.STOPPED
    return ExitCode.CRASHED


def is_users_to_mend(error: OSError) -> bool:
    """Whether the next start would meet the same: a path that is not what it must be, which the user has to mend.

    Any other error of a disk or network (EIO, ESTALE, ETIMEDOUT, EAGAIN, ENOSPC, ...) may be over by then, or not be
    there on other nodes: it is a crash, which a scheduler starts again, and no refusal, which it gives up.
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
    """What a command prints of an error that its user can mend: one line, for an error of the system with the path and
    what to do. output: what the command writes, for errors in which the system names no path (a full disk)."""
    remedy = next((text for text, codes in _REMEDIES.items() if getattr(error, "errno", None) in codes), None)
    if not isinstance(error, OSError) or remedy is None:
        return " ".join(str(error).split())
    path = error.filename2 or error.filename or output or "its output"
    return f"{os.fsdecode(path)}: {error.strerror}; {remedy}"


def run_command(
    name: str,
    body: Callable[[], int],
    output: str | os.PathLike[str] | None = None,
    refusals: tuple[type[Exception], ...] = (ValueError, OSError),
) -> int:
    """The exit code of a command: that of `body`, or 2 for one of `refusals`, errors that its user can mend, of which
    the first rank prints the `error_line`. Leaves the process group, if there is one."""
    try:
        return body()
    except refusals as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"{name}: {error_line(error, output)}", file=sys.stderr, flush=True)
        return ExitCode.REFUSED
    finally:
        leave_distributed()


def run_program(body: Callable[[], int]) -> NoReturn:
    """Run `body`, the whole of a program, and end the process with its exit code, 1 if it raises."""
    faulthandler.enable()  # where a crash in C was
    try:
        code = body()
    except KeyboardInterrupt:  # of a program that does not listen, such as --check: a person knows why it ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        end_process(128 + signal.SIGINT)
    except ReaderLeftError:  # of what --check or a dry run prints
        end_process(CLOSED_PIPE)
    except BaseException as error:
        _print_traceback(error)
        if notes := getattr(error, "__notes__", None):
            print("\n".join(notes), file=sys.stderr, flush=True)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # for torchrun's report of failed workers
            get_error_handler().record_exception(error)
        end_process(ExitCode.CRASHED)
    leaving = threading.Thread(target=leave_distributed, name="leaving", daemon=True)
    leaving.start()
    leaving.join(GROUP_SECONDS)
    if leaving.is_alive():
        print(
            f"pretrain.py: its process group has not ended after {GROUP_SECONDS:.0f} s; leaving without it. Everything "
            f"is written; exit code {int(code)}",
            file=sys.stderr,
            flush=True,
        )
    end_process(code_for_launcher(code))


def code_for_launcher(code: int) -> int:
    """What a run that ends with `code` tells torchrun: one that has restarts left (`--max-restarts`) would start a run
    that was asked to stop again, so there that is no failure."""
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return ExitCode.FINISHED if code == ExitCode.STOPPED and done < most else code


@contextlib.contextmanager
def printed_at_once() -> Iterator[None]:
    """A context whose unforeseen exceptions are on stderr before anything else is left: outer contexts, such as a save
    in the background, may take their time, or hang."""
    try:
        yield
    except BaseException as error:
        if exit_code_of(error) is ExitCode.CRASHED:
            _print_traceback(error)
        raise


def _print_traceback(error: BaseException) -> None:
    if not getattr(error, "_printed", False):
        traceback.print_exception(error)
        sys.stderr.flush()
        error._printed = True  # type: ignore[attr-defined] # once


def report_error_once(line: str, ended: Callable[[], bool]) -> bool:
    """Print on stderr what ranks found, once on each machine; returns whether this rank did. ended: whether torchrun
    has asked this process to end.

    The first rank of a machine prints. torchrun ends the others as soon as that has left; they wait for it and leave
    with exit code 0, so that torchrun's report names the one that printed. Whoever is not ended found it alone, and
    prints it.
    """
    local_rank, path = None, os.environ.get("TORCHELASTIC_ERROR_FILE")
    with contextlib.suppress(ConfigError):  # of a wrong place in the run each rank says so
        place = place_in_run()
        local_rank = place.rank if place.local_rank is None else place.local_rank
    if local_rank:
        if path is None:  # one of Slurm's, which do not end each other
            return False
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline:
            if ended():
                os._exit(0)
            time.sleep(0.02)
    print(line, file=sys.stderr, flush=True)
    if path is not None:  # torchrun's report of failed workers then ends with the line instead of a traceback
        details = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
    return True
