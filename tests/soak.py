"""Soak test: runs that are killed, cut off and damaged at every place, and must come out as if nothing had been.

    python -m tests.soak --kills 500 --seed 1 --mode both --processes 2

A round is one run of a very small model, started by the same command until it is finished. Each start is killed: one
rank or all, at one of `PLACES` or at any moment; now and then the newest checkpoint is damaged before
the next start. Some rounds are on an ext4 image that loses power or on a disk that fills up (as root; otherwise a line
says that they were left out), and some starts are torchrun's. Every round is then compared with a run that was left
alone: each step's loss, gradient norm and all else but times, once; validation losses; bits of weights, moments and
generators of the last checkpoints; no file or folder too many. Prints a table, and each difference; exit code 1 if
there is any, with the folder of that round kept.

`--mode sync`, `async`: how checkpoints are saved; `both`: in turns. All are compared with the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.indexed import IndexedDatasetWriter

ROOT = Path(__file__).resolve().parent.parent

STEPS, INTERVAL, KEEP = 24, 2, 2
RUN = [
    "model.pattern=M*-",
    "model.vocab_size=512",
    "model.hidden_dim=32",
    "model.ffn_dim=32",
    "model.num_query_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "model.mamba_num_heads=2",
    "model.mamba_head_dim=16",
    "model.mamba_num_groups=1",
    "model.mamba_state_dim=16",
    "model.mamba_chunk_size=16",
    "model.nvfp4_bf16_blocks.last=0",
    "precision.switch.when=never",
    "train.global_batch_size=2",
    "train.micro_batch_size=1",
    "train.sequence_length=16",
    f"train.steps={STEPS}",
    "validation.interval=7",
    "validation.num_samples=2",
    f"checkpoint.interval={INTERVAL}",
    f"checkpoint.keep={KEEP}",
    "data=indexed",
    "data.num_workers=0",
    "run.device=cpu",
    "parallel.timeout_seconds=120",
]
# A start that is left alone takes seconds; one that takes this long hangs.
HANGS = 240.0


# One rank of a run, in a process that a fork server made, and where it may be killed

# What every rank needs, imported once by the fork server. torch._dynamo because FSDP imports it when first used.
PRELOAD = [
    "tests.soak",
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
    "save: staging": Place("megatron_fp4.checkpoint.saves:Staging", "copy", background=True),
    "save: staged": Place("megatron_fp4.checkpoint.saves:Staging", "copy", after=True, background=True),
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
    "start": Place("megatron_fp4.training.trainer:Trainer", "resume", repeats=0),
    "start: clean": Place(_FILES, "clean_stale", ranks="first", repeats=0),
    "start: choose": Place("megatron_fp4.checkpoint.checkpointer:Checkpointer", "resume", repeats=0),
    "start: load": Place("megatron_fp4.checkpoint.shards", "read_shards", repeats=0, resumes=True),
    "start: loaded": Place(
        "megatron_fp4.checkpoint.checkpointer:Checkpointer", "resume", after=True, repeats=0, resumes=True
    ),
    "step": Place("megatron_fp4.training.trainer", "accumulate", repeats=6),
    "step done": Place("megatron_fp4.training.trainer", "update", after=True, repeats=6),
    "validation": Place("megatron_fp4.training.callbacks.validation", "held_out_losses", repeats=2),
    "end: summary": Place("megatron_fp4.training.callbacks.reporting", "summarize", repeats=0, ranks="first"),
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


# Disks: one that loses power, one that is full, and checkpoints that rot

IMAGE_MB, FULL_DISK_MB = 48, 8


class NotPermittedError(Exception):
    """The machine does not let this user mount what is needed."""


def _command(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise NotPermittedError(f"{words[0]}: {' '.join(done.stderr.split())}")


class PowerDisk:
    """An ext4 file system in a file, mounted at `folder`/disk. A copy of the file is what a power cut would leave."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
            raise NotPermittedError("power cuts need root and mkfs.ext4")
        self.image, self.mount = folder / "image", folder / "disk"
        self.mount.mkdir(parents=True)
        with self.image.open("wb") as file:
            file.truncate(IMAGE_MB * 2**20)
        _command("mkfs.ext4", "-q", "-F", self.image)
        self._up()

    def _up(self) -> None:
        _command("mount", "-o", "loop", self.image, self.mount)
        device = subprocess.run(["findmnt", "-no", "SOURCE", self.mount], capture_output=True, text=True).stdout.strip()
        self._statistics = Path("/sys/block", Path(device).name, "stat")

    def _writes(self) -> list[str]:
        fields = self._statistics.read_text().split()
        return [fields[4], fields[6], fields[8]]  # requests done, sectors, and those on their way

    def copy(self) -> Path:
        """What is on the disk at one instant, which has to be one without writers: they are to be stopped meanwhile."""
        target = self.image.with_name("copy")
        for _ in range(200):
            before = self._writes()
            shutil.copyfile(self.image, target)
            if before == self._writes() and before[2] == "0":
                return target
            time.sleep(0.01)
        raise RuntimeError("the disk is never at rest")

    def lose_power(self, copy: Path) -> None:
        """Go on with `copy`; nobody may use the disk."""
        _command("umount", self.mount)
        copy.replace(self.image)
        self._up()

    def remove(self) -> None:
        """Unmount."""
        with contextlib.suppress(NotPermittedError):
            _command("umount", self.mount)


class FullDisk:
    """A small tmpfs, mounted at `folder`/disk, that can be filled."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            raise NotPermittedError("a disk of its own to fill needs root")
        self.mount = folder / "disk"
        self.mount.mkdir(parents=True)
        _command("mount", "-t", "tmpfs", "-o", f"size={FULL_DISK_MB}m", "tmpfs", self.mount)
        self._filler = self.mount / "filler"

    def fill(self, free: int) -> None:
        """Leave about `free` bytes."""
        size = shutil.disk_usage(self.mount).free - free
        if size > 0:
            with contextlib.suppress(OSError), self._filler.open("ab") as file:
                os.posix_fallocate(file.fileno(), file.tell(), size)

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmount."""
        with contextlib.suppress(NotPermittedError):
            _command("umount", self.mount)


def checkpoints(run_dir: Path) -> list[Path]:
    """Those that bear a checkpoint's name, the one that was saved last at the end."""
    found = [path for path in run_dir.glob("checkpoints/step_*") if re.fullmatch(r"step_\d{8}", path.name)]

    def index(folder: Path) -> int:
        try:
            return int(json.loads((folder / "manifest.json").read_text())["save_index"])
        except (OSError, ValueError, KeyError):
            return -1

    return sorted(found, key=index)


@dataclass(frozen=True)
class Damage:
    """What was done to a checkpoint. inode: of its folder, which may be renamed."""

    what: str
    folder: Path
    inode: int

    def is_there(self) -> bool:
        """Whether the damaged folder still has its name."""
        return self.folder.exists() and self.folder.stat().st_ino == self.inode


def damage_newest(run_dir: Path, draw: random.Random) -> Damage | None:
    """Damage the newest checkpoint in one of three ways, if there is one before it."""
    found = checkpoints(run_dir)
    if len(found) < 2:
        return None
    inode = found[-1].stat().st_ino
    file = draw.choice(sorted(path for path in found[-1].iterdir() if path.stat().st_size > 0))
    what = draw.choice(["a flipped bit", "a cut-off end", "a missing file"])
    if what == "a missing file":
        file.unlink()
    elif what == "a cut-off end":
        os.truncate(file, draw.randrange(file.stat().st_size))
    else:
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    return Damage(what, found[-1], inode)


# Whether a run came out as another one did

# What differs between two runs of the same bits.
TIMES = ("tokens_per_second", "model_tflops", "mfu", "step_time", "data_wait", "peak_memory_gib")


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl; what a kill left unfinished at its end is left out."""
    path = run_dir / "metrics.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]


def steps_done(run_dir: Path) -> int:
    """The last step of which there is a record."""
    return max((record["step"] for record in records(run_dir) if record["kind"] == "step"), default=0)


def differences(expected: Path, run_dir: Path, damaged: int, power: bool = False) -> list[str]:
    """What is not as in the run that was left alone. damaged: how many checkpoints were, on the way.
    power: it was cut, which may leave pages of zeros at the end of a file that is being written."""
    found = []
    for kind in ("step", "validation"):
        left, right = (
            [{k: v for k, v in one.items() if k not in TIMES} for one in records(folder) if one["kind"] == kind]
            for folder in (expected, run_dir)
        )
        steps = [record["step"] for record in right]
        if steps != [record["step"] for record in left]:
            found.append(f"records of kind {kind} are of steps {steps}")
        else:
            bad = [one["step"] for one, other in zip(left, right, strict=True) if one != other]
            found += [f"other numbers in records of kind {kind} of steps {bad}"] if bad else []
    names = [sorted(path.name for path in checkpoints(folder)) for folder in (expected, run_dir)]
    # One more is there if the last save was killed before it removed the oldest: the next save would. Workers whose
    # torchrun was killed save where they are, and that one counts among those that are kept.
    older = [name for name in names[1] if name < names[0][0]]
    stops = {f"step_{one['step']:08d}" for one in records(run_dir) if one.get("event") == "stop"}
    stopped = [name for name in names[1] if name in stops - set(names[0])]
    pruned = names[0][: len(stopped)]
    kept = [name for name in names[1] if name not in (*older, *stopped)]
    if kept not in (names[0], names[0][len(pruned) :]) or len(older) > 1:
        found.append(f"checkpoints are {names[1]}, not {names[0]}")
    for name in set(names[0]) & set(names[1]):
        found += compare_checkpoints(expected / "checkpoints" / name, run_dir / "checkpoints" / name)
    pointer = (run_dir / "checkpoints" / "latest").read_text()
    if pointer != (expected / "checkpoints" / "latest").read_text():
        found.append(f"`latest` names {pointer.strip()}")
    allowed = r"(metrics\.jsonl|tensorboard)\.\d+"  # of starts before there was a checkpoint
    if damaged:
        allowed += (
            r"|checkpoints/.*damaged.*|summary\.json\.\d+"  # of a run that was finished until its end was damaged
        )
    if power:
        allowed += r"|metrics\.jsonl\.damaged.*"
    here, there = ({str(p.relative_to(root)) for p in entries(root)} for root in (run_dir, expected))
    here -= {f"checkpoints/{name}" for name in (*older, *stopped)}
    there -= {f"checkpoints/{name}" for name in pruned if name not in kept}
    strays = sorted(name for name in here - there if not re.fullmatch(allowed, name))
    found += [f"left over: {', '.join(strays)}"] if strays else []
    missing = sorted(name for name in there - here)
    found += [f"missing: {', '.join(missing)}"] if missing else []
    return found


def entries(run_dir: Path) -> list[Path]:
    """Files and folders directly in a run's folder and its checkpoints/."""
    return [*run_dir.iterdir(), *(run_dir / "checkpoints").iterdir()]


def compare_checkpoints(expected: Path, other: Path) -> list[str]:
    """Weights, moments and generators, as the hashes of the files that hold them; and that the files are what their
    manifest says."""
    found = []
    manifests = [json.loads((folder / "manifest.json").read_text())["files"] for folder in (expected, other)]
    if manifests[0].keys() != manifests[1].keys():
        return [f"{other.name} has the files {sorted(manifests[1])}"]
    for name, record in manifests[1].items():
        if hashlib.sha256((other / name).read_bytes()).hexdigest() != record["sha256"]:
            found.append(f"{other.name}/{name} is not what its manifest says")
        if name.endswith((".distcp", ".pt")) and record != manifests[0][name]:
            found.append(f"{other.name}/{name} has other bits")
    states = [json.loads((folder / "trainer.json").read_text()) for folder in (expected, other)]
    for state in states:
        state["config"] = {key: state["config"][key] for key in state["config"] if key not in ("run", "checkpoint")}
    if states[0] != states[1]:
        keys = sorted(key for key in states[0].keys() | states[1].keys() if states[0].get(key) != states[1].get(key))
        found.append(f"{other.name}: the trainer's state differs in {keys}")
    return found


# The rounds


@dataclass
class Settings:
    """Of one soak. folder: for everything, removed where all is equal. torchrun: about how many starts are its."""

    kills: int
    seed: int
    mode: str
    processes: int
    folder: Path
    torchrun: int = 0
    per_round: int = 12
    disks: bool = True


@dataclass
class Result:
    """What happened. missed: starts whose place was not reached. wrong: each difference, a line."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    damages: Counter[str] = field(default_factory=Counter)
    fills: int = 0
    cuts: int = 0
    missed: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Soak:
    """The rounds, one after the other."""

    def __init__(self, settings: Settings) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        self.settings, self.result, self.draw = settings, Result(), random.Random(settings.seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._expected: Path | None = None
        self._seconds = 3.0

    def go(self) -> Result:
        """All rounds, until there were enough kills."""
        settings, result = self.settings, self.result
        self._expected = self.alone()
        while sum(result.kills.values()) < settings.kills:
            index = sum(result.rounds.values())
            self.round(index)
            done = sum(result.kills.values())
            print(f"round {index}: {done} kills, {len(result.wrong)} differences", file=sys.stderr, flush=True)
            if len(result.wrong) >= 10:
                result.notes.append("ended early: enough has gone wrong")
                break
        return result

    def alone(self) -> Path:
        """The run that is left alone; its folder."""
        numbers = np.random.default_rng(self.settings.seed)
        for name in ("a", "b", "held_out"):
            with IndexedDatasetWriter(self.settings.folder / name, np.uint16) as writer:
                for _ in range(20):
                    writer.add_document(numbers.integers(512, size=100))
        first = self._context.Process(target=int)  # the fork server's imports are nobody's time
        first.start()
        first.join()
        scratch, began = self.settings.folder / "alone", time.monotonic()
        _, code = self.start(scratch, scratch / "run", asynchronous=False, kill=None)
        self._seconds = time.monotonic() - began
        if code != 0:
            raise SystemExit(f"the run that is left alone failed:\n{(scratch / 'output').read_text()[-3000:]}")
        return scratch / "run"

    def round(self, index: int) -> None:
        """One run from its first start to its end, and the comparison."""
        settings, result, draw = self.settings, self.result, self.draw
        scratch = settings.folder / f"round_{index:03d}"
        scratch.mkdir()
        asynchronous = settings.mode == "async" or (settings.mode == "both" and index % 2 == 1)
        disk: PowerDisk | FullDisk | None = None
        kind = {3: "power", 6: "full"}.get(index % 8, "kills") if settings.disks else "kills"
        if kind != "kills":
            try:
                disk = PowerDisk(scratch) if kind == "power" else FullDisk(scratch)
            except NotPermittedError as error:
                result.notes.append(f"round {index} had no disk of its own: {error}")
                kind = "kills"
        result.rounds[kind] += 1
        run_dir = (scratch if disk is None else disk.mount) / "run"
        before = len(result.wrong)
        # Of a short soak, each way of saving gets its half.
        left = min(settings.per_round, -(-settings.kills // 2), settings.kills - sum(result.kills.values()))
        damaged, hurt = 0, None
        while left > 0 and len(result.wrong) == before:
            left -= 1
            if isinstance(disk, PowerDisk) and draw.random() < 0.4:
                self.power_cut(scratch, disk, run_dir, asynchronous, f"round {index}")
                continue
            killed, code = self.disturbed(scratch, run_dir, asynchronous, disk)
            if isinstance(disk, FullDisk):
                disk.empty()
            elif not killed and code != 0:
                result.wrong.append(f"round {index}: a start that nobody killed ended with {code}; {scratch}/output")
            if not killed and code == 0:
                break
            # Not another one before the damage was found: two intact ones would be needed.
            if draw.random() < 0.15 and (hurt is None or not hurt.is_there()):
                hurt = damage_newest(run_dir, draw)
                if hurt is not None:
                    result.damages[hurt.what] += 1
                    damaged += 1
        while len(result.wrong) == before:
            _, code = self.start(scratch, run_dir, asynchronous, None)
            if code != 0:
                result.wrong.append(f"round {index}: its last start ended with {code}; see {scratch}/output")
            break
        if len(result.wrong) == before:
            assert self._expected is not None
            found = differences(self._expected, run_dir, damaged, power=isinstance(disk, PowerDisk))
            result.wrong += [f"round {index}: {line}" for line in found]
        if len(result.wrong) == before:
            if disk is not None:
                disk.remove()
            shutil.rmtree(scratch)
        elif disk is not None:
            shutil.copytree(run_dir, scratch / "run", dirs_exist_ok=True)
            disk.remove()

    def disturbed(
        self, scratch: Path, run_dir: Path, asynchronous: bool, disk: PowerDisk | FullDisk | None
    ) -> tuple[bool, int]:
        """One start, killed somewhere; whether it was, and its exit code."""
        settings, draw = self.settings, self.draw
        if isinstance(disk, FullDisk):
            free = draw.choice([0, 4096, draw.randrange(400_000)])
            self.result.fills += 1
            return self.start(scratch, run_dir, asynchronous, None, moment=draw.random(), fill=(disk, free))
        if draw.random() < settings.torchrun / settings.kills:
            return self.torchrun(scratch, run_dir, asynchronous)
        if draw.random() < 0.25:
            return self.start(scratch, run_dir, asynchronous, None, moment=draw.random() * 0.6)
        resumes = bool(checkpoints(run_dir))
        places = {
            name: place
            for name, place in PLACES.items()
            if asynchronous >= place.background and resumes >= place.resumes
        }
        counts = {name: sum(self.result.kills[name, mode] for mode in ("sync", "async")) for name in places}
        # The places that had the fewest kills first, with some chance for all.
        name = min(places, key=lambda name: counts[name] + draw.random() * 3)
        place = places[name]
        victim = 0 if place.ranks == "first" else draw.randrange(settings.processes)
        kill = Kill(name, 1 + draw.randrange(place.repeats + 1), victim, draw.random() < 0.4)
        return self.start(scratch, run_dir, asynchronous, kill)

    def start(
        self,
        scratch: Path,
        run_dir: Path,
        asynchronous: bool,
        kill: Kill | None,
        moment: float | None = None,
        fill: tuple[FullDisk, int] | None = None,
    ) -> tuple[bool, int]:
        """Start the run and see it end; whether it was killed, and the exit code of the first rank that failed.

        kill: where a rank kills itself. moment: or when, as a share of the time that a whole run takes; with fill, the
        disk is filled then, and sometimes a kill follows.
        """
        draw, world_size = self.draw, self.settings.processes
        scratch.mkdir(exist_ok=True)
        processes = self.launch(scratch, run_dir, asynchronous, kill)
        killed, deadline, place = False, time.monotonic() + HANGS, kill.place if kill else ""
        if moment is not None and not wait([p.sentinel for p in processes], timeout=moment * self._seconds):
            if fill is not None:
                fill[0].fill(fill[1])
                if draw.random() < 0.5:
                    wait([p.sentinel for p in processes], timeout=draw.random() * self._seconds)
                    moment = None if any(not p.is_alive() for p in processes) else moment
                else:
                    moment = None
            if moment is not None:
                place, killed = "any moment" if fill is None else "any moment, disk full", True
                victims = processes if draw.random() < 0.5 else [draw.choice(processes)]
                for process in victims:
                    process.kill()
        code = 0
        while waiting := [process for process in processes if process.is_alive()]:
            if not wait([process.sentinel for process in waiting], timeout=max(0.0, deadline - time.monotonic())):
                stuck = ", ".join(str(rank) for rank in range(world_size) if processes[rank].is_alive())
                if any(process.exitcode is not None for process in processes):
                    deadline = 0.0
                else:
                    self.result.wrong.append(f"a start hangs: ranks {stuck}; {scratch}/output")
                for process in waiting:
                    process.kill()
                wait([process.sentinel for process in waiting], timeout=60)
            if any(process.exitcode not in (None, 0) for process in processes):
                # As torchrun does with the others, sooner or later.
                deadline = min(deadline, time.monotonic() + draw.choice([0.0, 0.1, 1.0]))
        for process in processes:
            process.join()
            if process.exitcode not in (None, 0, -signal.SIGKILL) and code == 0:
                code = process.exitcode
            killed |= kill is not None and process.exitcode == -signal.SIGKILL
        if killed:
            self.result.kills[place, "async" if asynchronous else "sync"] += 1
        elif kill is not None:
            self.result.missed += 1
        return killed, code

    def launch(self, scratch: Path, run_dir: Path, asynchronous: bool, kill: Kill | None) -> list[Any]:
        """The processes of one start."""
        world_size = self.settings.processes
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for old in scratch.glob("pid_*"):
            old.unlink()
        overrides = self.overrides(run_dir, asynchronous)
        slow = self.draw.choice([0.0, 0.1, 0.3]) if asynchronous else 0.0
        processes = [
            self._context.Process(target=rank_main, args=(rank, world_size, port, overrides, str(scratch), kill, slow))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        return processes

    def overrides(self, run_dir: Path, asynchronous: bool) -> list[str]:
        """Of the command line."""
        data = self.settings.folder
        own = [
            f"run.dir={run_dir}",
            f"data.sources={{a: {data}/a, b: {data}/b}}",
            f"data.validation={{a: {data}/held_out}}",
            "data.phases=[{name: one, fraction: 0.5, blend: {a: 1}}, {name: two, fraction: 0.5, blend: {a: 1, b: 2}}]",
        ]
        return [*RUN, *own, f"checkpoint.asynchronous={str(asynchronous).lower()}"]

    def power_cut(self, scratch: Path, disk: PowerDisk, run_dir: Path, asynchronous: bool, name: str) -> None:
        """A start, at some moment of which the disk is what a power cut leaves."""
        processes = self.launch(scratch, run_dir, asynchronous, None)
        wait([process.sentinel for process in processes], timeout=self.draw.random() * 0.6 * self._seconds)
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            os.kill(process.pid, signal.SIGSTOP)
        announced = [int(step) for step in re.findall(r"saved \S*step_(\d+)", (scratch / "output").read_text())]
        copy = disk.copy()
        for process in processes:
            process.kill()
            process.join()
        disk.lose_power(copy)
        self.result.cuts += 1
        found = checkpoints(run_dir)
        newest = json.loads((found[-1] / "manifest.json").read_text())["step"] if found else 0
        steps = [record["step"] for record in records(run_dir) if record["kind"] == "step"]
        if missing := sorted(set(range(1, newest + 1)) - set(steps)):
            self.result.wrong.append(
                f"{name}: a power cut left a checkpoint of step {newest} without records {missing}"
            )
        if announced and newest < announced[-1]:
            self.result.wrong.append(f"{name}: step {announced[-1]} was said to be saved, a power cut left {newest}")

    def torchrun(self, scratch: Path, run_dir: Path, asynchronous: bool) -> tuple[bool, int]:
        """A start by torchrun, with the launcher, one of its workers or all killed."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.settings.processes)]
        with (scratch / "output").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *launcher, str(ROOT / "pretrain.py"), *self.overrides(run_dir, asynchronous)],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        before = steps_done(run_dir)
        deadline, goal = time.monotonic() + HANGS, self.draw.randrange(1, 5)
        while process.poll() is None and steps_done(run_dir) < before + goal and time.monotonic() < deadline:
            time.sleep(0.02)
        workers = children(process.pid)
        if process.poll() is not None or not workers:
            return False, process.wait()
        victims = self.draw.choice([[process.pid], [workers[0]], [workers[-1]], [process.pid, *workers]])
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        place = "torchrun: the launcher" if victims == [process.pid] else "torchrun: workers"
        self.result.kills[place, "async" if asynchronous else "sync"] += 1
        code = process.wait(timeout=HANGS)
        while (orphans := [pid for pid in workers if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in orphans:
            self.result.wrong.append(f"worker {pid} goes on after torchrun is gone; {scratch}/output")
            os.kill(pid, signal.SIGKILL)
        return True, code


def children(pid: int) -> list[int]:
    """Of a process."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def alive(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def table(result: Result) -> str:
    """Of what was done."""
    lines = [f"{'killed at':<32}{'sync':>6}{'async':>7}"]
    places = [*PLACES, *sorted({place for place, _ in result.kills} - PLACES.keys())]
    for place in places:
        counts = [result.kills[place, mode] for mode in ("sync", "async")]
        lines.append(f"{place:<32}{counts[0]:>6}{counts[1]:>7}")
    totals = [sum(n for (_, of), n in result.kills.items() if of == mode) for mode in ("sync", "async")]
    lines += [f"{'all kills':<32}{totals[0]:>6}{totals[1]:>7}", ""]
    rounds = ", ".join(f"{count} {kind}" for kind, count in result.rounds.items())
    lines.append(
        f"rounds: {sum(result.rounds.values())} ({rounds}); starts that did not come to the place: {result.missed}"
    )
    damages = ", ".join(f"{count} {what}" for what, count in result.damages.items())
    lines.append(f"damaged checkpoints: {sum(result.damages.values())} ({damages or 'none'})")
    lines.append(f"power cuts: {result.cuts}; disks filled: {result.fills}")
    lines += [*result.notes, *(f"WRONG: {line}" for line in result.wrong)]
    lines.append("all equal" if not result.wrong else f"{len(result.wrong)} differences")
    return "\n".join(lines)


def main() -> int:
    """Run the soak of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=("sync", "async", "both"), default="both")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--torchrun", type=int, default=10, help="about how many kills are of torchrun's starts")
    parser.add_argument("--folder", type=Path, help="where to (default: a folder in memory, /dev/shm, if there is one)")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    parent = options.folder or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix="soak_", dir=parent))
    began = time.monotonic()
    torchrun = min(options.torchrun, options.kills // 10) if options.processes > 1 else 0
    soak = Soak(Settings(options.kills, options.seed, options.mode, options.processes, folder, torchrun))
    result = soak.result
    try:
        soak.go()
    except KeyboardInterrupt:
        result.notes.append("interrupted; what was done until then is above")
    finally:
        for disk in filter(os.path.ismount, folder.glob("round_*/disk")):
            subprocess.run(["umount", "--lazy", disk], capture_output=True)
        if not result.wrong:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(result))
    print(f"{time.monotonic() - began:.0f} s" + (f"; what is wrong is in {folder}" if result.wrong else ""))
    return 1 if result.wrong else 0


if __name__ == "__main__":
    from tests import soak  # processes are made of what can be imported

    sys.exit(soak.main())
