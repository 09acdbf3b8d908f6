"""One rank says what all ranks found, whichever comes first, and none leaves before the line is out.

torchrun ends all workers of a machine as soon as one has left with a failure, so a line that only the first rank says
is lost when another one leaves before it. What ranks have in common before they have met is the folder that torchrun
keeps for a start (that of `TORCHELASTIC_ERROR_FILE`; it removes it afterwards): the first to make a file there says
the line. Of several machines, the first in torchrun's own store does.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_fp4.config.launcher import place_in_run
from megatron_fp4.config.schema import ConfigError

# Seconds to wait for the one who says it, for the others of this machine to arrive, and for torchrun to end them.
_SAY, _ARRIVE, _END = 20.0, 10.0, 10.0
_STORE_TIMEOUT = datetime.timedelta(seconds=5)


def say_once(line: str, ended: Callable[[], bool]) -> bool:
    """Print `line` on stderr if no other rank has, or see to it that one does; returns whether it was this one.

    ended: whether torchrun has asked this process to end. Returns once the line is out and, on the rank that said it,
    once the other ranks of this machine have come to it too, within seconds. Where another rank said it and torchrun
    then asks this one to end, it leaves with exit code 0, so that torchrun's report names the one that said why.
    """
    folder = _folder_of_start()
    if folder is None:  # not torchrun's: one process, or one of Slurm's, which do not end each other
        if mine := _first_of_its_machine():
            _print(line)
        return mine
    name = f"said_{hashlib.sha256(line.encode()).hexdigest()[:16]}"
    _make(folder / f"{name}.{os.environ.get('LOCAL_RANK', 0)}")
    if _make(folder / name):
        mine = _first_machine(line, name)
        _make(folder / f"{name}.out")
        everyone = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        _wait(lambda: len(list(folder.glob(f"{name}.[0-9]*"))) >= everyone, _ARRIVE)
        return mine
    _wait((folder / f"{name}.out").exists, _SAY)
    if (folder / f"{name}.out").exists() and _wait(ended, _END):
        os._exit(0)
    return False


def report_to_torchrun(line: str) -> None:
    """Let torchrun's report of failed workers end with `line` instead of a traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))


def _folder_of_start() -> Path | None:
    """The folder that the workers of this machine share, in this start of them alone."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = None if path is None else Path(path).parent.parent
    return folder if folder is not None and folder.is_dir() else None


def _first_of_its_machine() -> bool:
    """Without torchrun: whether this rank is to say what others may find as well. One whose place is wrong is."""
    try:
        place = place_in_run()
    except ConfigError:
        return True
    return not (place.rank if place.local_rank is None else place.local_rank)


def _first_machine(line: str, name: str) -> bool:
    """Print the line unless another machine has; returns whether it was printed here."""
    env = os.environ
    if env.get("GROUP_WORLD_SIZE", "1") == "1" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _print(line)
        return True
    import torch.distributed as dist

    key = f"megatron_fp4/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"
    try:
        port = int(env["MASTER_PORT"])
        store = dist.TCPStore(env["MASTER_ADDR"], port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        if store.add(key, 1) > 1:
            store.wait([f"{key}/out"], _STORE_TIMEOUT)
            return False
        _print(line)
        store.set(f"{key}/out", "1")
    except (dist.DistError, RuntimeError, ValueError, KeyError):  # twice is better than never
        _print(line)
    return True


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _make(path: Path) -> bool:
    """Make a file; False if it is there already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
    except FileExistsError:
        return False
    except OSError:  # a full disk: each says it
        return True
    return True


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for it; returns whether it came true."""
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done
