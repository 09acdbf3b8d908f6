"""`run.file_mode`: who may read what a run writes.

A process cannot give every file that torch, TensorBoard or wandb creates a mode, but it has a umask, which its threads
and the processes that it starts share: so that is what the option sets, once, before anything is written.
"""

from __future__ import annotations

import os
import re

from megatron_fp4.config.schema import ConfigError


def umask_of(file_mode: str) -> int:
    """The umask under which files get the mode and folders can also be entered by those who may read: 0o027 for "0640".

    Raises ConfigError for text that is no such mode, and for one that takes reading or writing from the owner.
    """
    remedy = 'give four octal digits such as "0640" (in a YAML file with the quotes) or "0600", or null for the umask'
    if not re.fullmatch(r"0[0-7]{3}", file_mode):
        raise ConfigError(f"run.file_mode={file_mode} is no file mode; {remedy}")
    owner, *others = (int(digit) for digit in file_mode[1:])
    if owner & 6 != 6:
        raise ConfigError(
            f"run.file_mode={file_mode} would keep the run from its own files; begin with 06, or {remedy}"
        )
    if any(digit not in (0, 4, 6) for digit in (owner, *others)):
        raise ConfigError(
            f"run.file_mode={file_mode} is of programs, or lets somebody write what he may not read; use the digits "
            "0, 4 and 6"
        )
    folders = [digit | (1 if digit else 0) for digit in (owner, *others)]
    return 0o777 & ~(folders[0] << 6 | folders[1] << 3 | folders[2])


def apply_file_mode(file_mode: str | None) -> None:
    """Set the umask of this process, and of those that it starts from now on; None leaves it."""
    if file_mode is not None:
        os.umask(umask_of(file_mode))
