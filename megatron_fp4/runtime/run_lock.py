"""One run at a time in a folder.

Two jobs in one run.dir, a requeued one beside its predecessor or a command started twice, would each resume, train and
save, and clear away what the other is writing. So the first rank holds a lock on `run.dir/.lock` from before it
reads a checkpoint until it has written its last file.

It is a POSIX record lock (`fcntl.lockf`): the kernel drops it when the process ends, however it ends; forked loader
workers do not inherit it; and network file systems pass it on to other hosts. Where a file system has no locks, a
warning says so and the run goes on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import EXIT_SECONDS
from megatron_fp4.runtime.exit_codes import is_users_to_mend

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
# A predecessor that is just leaving may take EXIT_SECONDS to be gone.
PATIENCE = EXIT_SECONDS + 30.0


@contextmanager
def sole_run(run_dir: Path) -> Iterator[None]:
    """Hold the lock of `run_dir` inside; every rank enters, the first one locks.

    Waits up to `PATIENCE` seconds for a run that is there, saying so. Raises ConfigError on all ranks if it stays, or
    if the folder is none that can be written to, and RuntimeError if its disk fails.
    """
    refused: list[str | None] = [None, None]  # as the user's to mend, and otherwise
    descriptor = None
    try:
        if dist.get_rank() == 0:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                if is_users_to_mend(error):
                    refused[0] = f"run.dir={run_dir} cannot be written to ({error}); choose another"
                else:
                    refused[1] = f"run.dir={run_dir} cannot be written to now: {error}"
            else:
                refused[0] = _acquire(descriptor, run_dir)
        dist.broadcast_object_list(refused)
        if refused[0] is not None:
            raise ConfigError(refused[0])
        if refused[1] is not None:
            raise RuntimeError(refused[1])
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # and with it the lock


def _acquire(descriptor: int, run_dir: Path) -> str | None:
    """Lock the open file and write down who holds it; returns None, or why it cannot be had."""
    deadline = time.monotonic() + PATIENCE
    waiting = False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # both mean that another process holds it
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another run"
            if time.monotonic() >= deadline:
                return (
                    f"run.dir={run_dir}: {holder} is still writing there; stop it or wait for its end, or choose "
                    "another run.dir"
                )
            if not waiting:
                log.warning("run.dir=%s: waiting up to %.0f s for %s to leave", run_dir, PATIENCE, holder)
            waiting = True
            time.sleep(0.2)
        except OSError as error:
            log.warning("run.dir=%s: its file system has no locks (%s); start no second run there", run_dir, error)
            return None
        else:
            with suppress(OSError):  # a full disk: the lock holds without a name
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return None
