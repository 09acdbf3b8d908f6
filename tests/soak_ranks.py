"""One rank of a run of tests/soak.py, in a process that a fork server made; and where it may be killed."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# What every rank needs, imported once by the fork server. torch._dynamo because FSDP imports it when first used.
PRELOAD = [
    "tests.soak_ranks",
    "pretrain",
    "numpy.random",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "megatron_fp4.logging.pictures",
    "torch.distributed.fsdp",
]


@dataclass(frozen=True)
class Place:
    """Somewhere in a run where a rank can be killed.

    owner: a module, or `module:Class`. name: the function there. after: behind it, not before. ranks: that come there.
    repeats: how often it may have been there before. background: only there when saves go on in the background.
    """

    owner: str
    name: str
    after: bool = False
    ranks: str = "any"
    repeats: int = 3
    background: bool = False
    resumes: bool = False


_SAVES, _FILES = "megatron_fp4.checkpoint.saves", "megatron_fp4.checkpoint.files"
_RECORDS = "megatron_fp4.logging.files"
PLACES: dict[str, Place] = {
    # A save, in its order.
    "save: begins": Place(f"{_SAVES}:Saves", "begin"),
    "save: staging": Place("megatron_fp4.checkpoint.staging:Staging", "copy", background=True),
    "save: staged": Place("megatron_fp4.checkpoint.staging:Staging", "copy", after=True, background=True),
    "save: folder": Place(_SAVES, "_make_folder", ranks="first"),
    "save: folder made": Place(_SAVES, "_make_folder", after=True, ranks="first"),
    "save: shard": Place(f"{_SAVES}:Saves", "_write_own"),
    "save: shard written": Place(f"{_SAVES}:Saves", "_write_own", after=True),
    "save: metadata": Place(_SAVES, "pack", ranks="first"),
    "save: small files": Place(_FILES, "write_file", ranks="first", repeats=12),
    "save: manifest": Place(_FILES, "write_manifest", ranks="first"),
    "save: manifest written": Place(_FILES, "write_manifest", after=True, ranks="first"),
    "save: records synced": Place(f"{_RECORDS}:RecordFile", "sync", after=True, ranks="first"),
    "save: rename": Place(_FILES, "publish", ranks="first"),
    "save: pointer": Place(_FILES, "write_pointer", ranks="first"),
    "save: pointer written": Place(_FILES, "write_pointer", after=True, ranks="first"),
    "save: prune": Place(_FILES, "prune", ranks="first"),
    "save: pruned": Place(_FILES, "prune", after=True, ranks="first"),
    "save: ends": Place(f"{_SAVES}:Saves", "end", after=True, repeats=6),
    # Whatever changes a disk.
    "any sync to the disk": Place("os", "fsync", ranks="first", repeats=40),
    "any rename": Place("os", "rename", ranks="first", repeats=6),
    "after any rename": Place("os", "rename", after=True, ranks="first", repeats=6),
    "any replacement": Place("os", "replace", ranks="first", repeats=6),
    "any folder made": Place("os", "mkdir", after=True, ranks="first", repeats=6),
    "any folder removed": Place("os", "rmdir", ranks="first", repeats=3),
    "any file removed": Place("os", "unlink", ranks="first", repeats=8),
    # Records.
    "record: before": Place(f"{_RECORDS}:RecordFile", "write", ranks="first", repeats=12),
    "record: after": Place(f"{_RECORDS}:RecordFile", "write", after=True, ranks="first", repeats=12),
    "records: cut": Place("megatron_fp4.logging.metrics", "cut_after", ranks="first", repeats=0, resumes=True),
    "records: were cut": Place(
        "megatron_fp4.logging.metrics", "cut_after", after=True, ranks="first", repeats=0, resumes=True
    ),
    # The rest of a run.
    "start": Place("pretrain", "build", repeats=0),
    "start: clean": Place(_FILES, "clean_stale", ranks="first", repeats=0),
    "start: choose": Place("megatron_fp4.checkpoint.checkpointer:Checkpointer", "resume", repeats=0),
    "start: load": Place("megatron_fp4.checkpoint.shards", "read_shards", repeats=0, resumes=True),
    "start: loaded": Place(
        "megatron_fp4.checkpoint.checkpointer:Checkpointer", "resume", after=True, repeats=0, resumes=True
    ),
    "step": Place("pretrain", "train_step", repeats=6),
    "step done": Place("pretrain", "train_step", after=True, repeats=6),
    "validation": Place("pretrain", "validation_losses", repeats=2),
    "end: summary": Place("pretrain", "summarize", repeats=0, ranks="first"),
    "end: picture": Place("megatron_fp4.logging.pictures", "plot_loss", repeats=0, ranks="first"),
    "end": Place("megatron_fp4.runtime.errors", "leave_distributed", repeats=0),
}


@dataclass(frozen=True)
class Kill:
    """At `place`, coming there the `nth` time (from 1), rank `victim` kills itself, or every rank (`all_of_them`)."""

    place: str
    nth: int
    victim: int
    all_of_them: bool


def rank_main(
    rank: int, world_size: int, port: int, overrides: list[str], folder: str, kill: Kill | None, slow: float
) -> None:
    """pretrain.py as one of `world_size` ranks; output goes to `folder`/output, and the process ends as a run does.

    slow: seconds that a disk takes before it takes a rank's part of a checkpoint.
    """
    Path(folder, f"pid_{rank}").write_text(str(os.getpid()))
    output = os.open(Path(folder, "output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    if world_size > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    # A save that a full disk refuses is tried once more, soon enough for a test.
    saves: Any = importlib.import_module(_SAVES)
    saves._PAUSES, saves._LAST_PAUSES = (0.05,), (0.05,)
    if slow:  # a model this small is written before the next step has begun
        write_own = saves.Saves._write_own
        saves.Saves._write_own = lambda *arguments: (time.sleep(slow), write_own(*arguments))[1]
    import pretrain
    from megatron_fp4.runtime.errors import run_program
    from megatron_fp4.runtime.signals import StopRequest

    if kill is not None and kill.victim == rank:
        arm(kill, [Path(folder, f"pid_{other}") for other in range(world_size)])
    run_program(lambda: pretrain.main(overrides, StopRequest().listen()))


def arm(kill: Kill, pids: list[Path]) -> None:
    """Put the kill in its place. Raises AttributeError for a place that is no longer there."""
    place = PLACES[kill.place]
    module, _, inside = place.owner.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, inside) if inside else owner
    original: Callable[..., Any] = getattr(owner, place.name)
    times = 0

    def instead(*arguments: Any, **keywords: Any) -> Any:
        nonlocal times
        times += 1
        result = original(*arguments, **keywords) if place.after else None
        if times == kill.nth:
            others = [int(path.read_text()) for path in pids if path.exists()] if kill.all_of_them else []
            for pid in [*(pid for pid in others if pid != os.getpid()), os.getpid()]:
                os.kill(pid, signal.SIGKILL)
        return result if place.after else original(*arguments, **keywords)

    setattr(owner, place.name, instead)
