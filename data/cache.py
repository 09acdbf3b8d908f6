"""Build a folder once, although several processes want it at the same time.

All processes that see one disk queue at a lock file; the first builds under a temporary name and renames, the
others find the folder. A crash leaves no folder under the final name. Processes on other disks have other
lock files and build their own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/megatron_fp4`, or `~/.cache/megatron_fp4`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron_fp4"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, first calling build(temporary folder) and renaming it if it does not exist.

    Blocks while another process builds. An exception of `build` removes what it wrote and is raised; the next
    process in the queue then tries for itself. The kernel releases the lock of a process that dies.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The lock file stays: removing it would let a late comer lock a new file while an early one holds the
    # old.
    with open(folder.with_name(folder.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        temporary = folder.with_name(folder.name + ".tmp")
        if temporary.exists():  # left by a build that was killed; nobody else can be in it under the lock
            shutil.rmtree(temporary)
        temporary.mkdir()
        try:
            build(temporary)
            os.rename(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary)
            raise
    return folder
