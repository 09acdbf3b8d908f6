"""How a run ends, as its exit code and as the state in `run.dir/state.json`.

Under torchrun every failure of a worker becomes torchrun's own exit code 1; `state.json` (run_state.py) keeps the
difference. 75 is EX_TEMPFAIL of sysexits.h: try again later.
"""

from __future__ import annotations

import errno
from enum import IntEnum

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.precision.verify import SelfTestError


class ExitCode(IntEnum):
    """What pretrain.py's process returns. A second signal leaves with 128 + its number instead."""

    FINISHED = 0
    CRASHED = 1
    REFUSED = 2
    """The configuration is wrong, or something that only the user can decide."""
    DIVERGED = 3
    """Too many steps in a row were skipped or undone: going on needs another configuration."""
    WRONG_NUMBERS = 4
    """Hardware or kernels compute something else than they should: going on needs another machine."""
    STOPPED = 75
    """Stopped on request, saved: the same command goes on."""

    @property
    def state(self) -> str:
        """Its name in `state.json`."""
        return self.name.lower()


class DivergedError(RuntimeError):
    """Training does not get on with this configuration; raised on all ranks alike."""


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
    return ExitCode.CRASHED


_USERS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_USERS_NUMBERS = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


def is_users_to_mend(error: OSError) -> bool:
    """Whether the next start would meet the same: a path that is not what it must be, which the user has to mend.

    Any other error of a disk or network (EIO, ESTALE, ETIMEDOUT, EAGAIN, ENOSPC, ...) may be over by then, or not be
    there on other nodes: it is a crash, which a scheduler starts again, and no refusal, which it gives up.
    """
    return isinstance(error, _USERS) or error.errno in _USERS_NUMBERS
