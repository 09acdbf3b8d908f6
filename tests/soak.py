"""Soak test: runs that are killed, damaged or lose power at random places must end as an undisturbed run.

    python -m tests.soak --kills 500 --seed 1 --processes 2
    python -m tests.soak --hangs    instead: every call on a disk that never returns, in every section (tests/hangs.py)

A round is one run of a very small model with experts, which two processes divide, started by the same command until it
is finished; every second round saves in the background. Each start is killed: one rank or all ranks, at one of `PLACES`
or at a random moment. Now and then the newest checkpoint is damaged before the next start. Every sixth round is on an
ext4 image that loses power; this needs root, and the table says if it was left out.

Every round is then compared with an undisturbed run: the records of each step, once and without times; validation
losses; bits of weights, moments and generators in the last checkpoints; and the files and folders that are left. Prints
a table and all differences. If there are any, the exit code is 1, and the folders of their rounds are kept.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data.indexed import write_dataset
from megatron_fp4.checkpoint import files
from tests import hangs
from tests.programs import environments_of_ranks, fork_server

STARTS = 12  # at most so many disturbed starts in a round
RUN = [
    *[*hangs.TINY, "train.steps=16", "checkpoint.keep=2", "validation.interval=7", "validation.num_samples=2"],
    *["model.pattern=M*E", "model.moe_num_experts=4", "model.moe_top_k=2", "model.moe_ffn_dim=32"],
    *["model.moe_shared_ffn_dim=32", "parallel.timeout_seconds=120"],
    "data.phases=[{name: one, fraction: 0.5, blend: {a: 1}}, {name: two, fraction: 0.5, blend: {a: 1, b: 2}}]",
]
# An undisturbed start takes seconds; one that takes this many seconds hangs.
HANGS = 240.0
# Power cuts need root.
MAY_MOUNT = os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None


# Where a rank may be killed


class Place(NamedTuple):
    """A function at whose call a rank can be killed. owner: a module, or `module:Class`. repeats: how many calls may
    come before. first: only rank 0 calls it."""

    owner: str
    name: str
    repeats: int = 3
    first: bool = True


_SAVES, _FILES = "megatron_fp4.checkpoint.checkpointer", "megatron_fp4.checkpoint.files"
_CHECKPOINTER, _RECORDS = f"{_SAVES}:Checkpointer", "megatron_fp4.logging.files:RecordFile"
_TRAINER, _CALLBACKS = "megatron_fp4.training.trainer", "megatron_fp4.training.callbacks"
PLACES: dict[str, Place] = {
    # The parts of a save, in order.
    "save: begin": Place(_CHECKPOINTER, "save", first=False),
    "save: stage": Place("megatron_fp4.checkpoint.staging:Staging", "copy", first=False),
    "save: folder": Place(_SAVES, "_make_folder"),
    "save: shard": Place(_CHECKPOINTER, "_write_own", first=False),
    "save: small files": Place(_FILES, "write_file", 12),
    "save: manifest": Place(_FILES, "write_manifest"),
    "save: sync records": Place(_RECORDS, "sync"),
    "save: publish": Place(_FILES, "publish"),
    "save: pointer": Place(_FILES, "write_pointer"),
    "save: prune": Place(_FILES, "prune"),
    "save: end": Place(_CHECKPOINTER, "_end", 6, first=False),
    # Calls that change the disk.
    "any sync to the disk": Place("os", "fsync", 40),
    "any rename": Place("os", "rename", 6),
    "any replacement": Place("os", "replace", 6),
    "any folder made": Place("os", "mkdir", 6),
    "any folder removed": Place("os", "rmdir"),
    "any file removed": Place("os", "unlink", 8),
    # Other parts of a run.
    "start: clean": Place(_FILES, "clean_stale", 0),
    "start: resume": Place(_CHECKPOINTER, "resume", 0, first=False),
    "start: load": Place("megatron_fp4.checkpoint.shards", "read_shards", 0, first=False),
    "start: cut records": Place("megatron_fp4.logging.files", "cut_after", 0),
    "record": Place(_RECORDS, "write", 12),
    "step": Place(_TRAINER, "accumulate", 6, first=False),
    "update": Place(_TRAINER, "update", 6, first=False),
    "validation": Place(f"{_CALLBACKS}.validation:Validation", "record", 2, first=False),
    "end: summary": Place(f"{_CALLBACKS}.reporting:Summary", "conclude", 0),
    "end: picture": Place("megatron_fp4.logging.pictures", "plot_loss", 0),
    "end": Place("megatron_fp4.runtime.errors", "leave_distributed", 0, first=False),
}


class Kill(NamedTuple):
    """At its `nth` call (from 1) of `place`, rank `victim` kills itself, or all ranks (`all_of_them`)."""

    place: str
    nth: int = 1
    victim: int = 0
    all_of_them: bool = False


def rank_main(environment: dict[str, str], overrides: list[str], folder: str, kill: Kill | None, slow: float) -> None:
    """Run pretrain.py as one rank. Output goes to `folder`/output.

    slow: seconds to wait before a rank writes its part of a checkpoint. Otherwise a model this small is written before
    the next step begins.
    """
    os.environ.update(environment)
    rank = int(environment["RANK"])
    Path(folder, f"pid_{rank}").write_text(str(os.getpid()))
    output = os.open(Path(folder, "output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    saves: Any = importlib.import_module(_SAVES)
    write_own = saves.Checkpointer._write_own
    saves.Checkpointer._write_own = lambda *arguments: (time.sleep(slow), write_own(*arguments))[1]
    import pretrain
    from megatron_fp4.runtime.errors import run_program
    from megatron_fp4.runtime.signals import StopRequest

    if kill is not None and kill.victim == rank:
        arm(kill, [Path(folder, f"pid_{other}") for other in range(int(environment["WORLD_SIZE"]))])
    run_program(lambda: pretrain.main(overrides, StopRequest().listen()))


def arm(kill: Kill, pids: list[Path]) -> None:
    """Replace the function of the place by one that kills. Raises AttributeError if there is no such function."""
    place = PLACES[kill.place]
    module, _, inside = place.owner.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, inside) if inside else owner
    original: Callable[..., Any] = getattr(owner, place.name)
    times = 0

    def instead(*arguments: Any, **keywords: Any) -> Any:
        nonlocal times
        times += 1
        if times == kill.nth:
            others = [int(path.read_text()) for path in pids if path.exists()] if kill.all_of_them else []
            for pid in [*(pid for pid in others if pid != os.getpid()), os.getpid()]:
                os.kill(pid, signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(owner, place.name, instead)


# A disk that loses power, and damaged checkpoints


class Disk:
    """An ext4 file system in an image, mounted at `folder`/disk. A copy of the image is what a power cut leaves."""

    def __init__(self, folder: Path) -> None:
        self.image, self.mount = folder / "image", folder / "disk"
        self.mount.mkdir()
        with self.image.open("wb") as file:
            file.truncate(48 << 20)
        _command("mkfs.ext4", "-q", "-F", self.image)
        self._up()

    def _up(self) -> None:
        _command("mount", "-o", "loop", self.image, self.mount)
        self._statistics = Path("/sys/block", Path(_command("findmnt", "-no", "SOURCE", self.mount)).name, "stat")

    def copy(self) -> Path:
        """Copy the image at one instant. All writers must be stopped; waits until no request is in flight."""
        target = self.image.with_name("copy")
        for _ in range(200):
            before = self._statistics.read_text().split()
            shutil.copyfile(self.image, target)
            after = self._statistics.read_text().split()
            # Finished write requests and their sectors, and requests in flight.
            if before[4:7:2] == after[4:7:2] and before[8] == "0":
                return target
            time.sleep(0.01)
        raise RuntimeError("the disk always has requests in flight")

    def lose_power(self, copy: Path) -> None:
        """Replace the disk's content by `copy`. No process may use the disk."""
        _command("umount", self.mount)
        copy.replace(self.image)
        self._up()


def _command(*words: str | Path) -> str:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=True).stdout.strip()


def checkpoints(run_dir: Path) -> list[Path]:
    """The readable checkpoints, the newest one last."""
    return [folder for folder, _ in files.scan(run_dir / "checkpoints")[0]][::-1]


def damage(folder: Path, draw: random.Random) -> str:
    """Damage a checkpoint in one of three ways; returns which."""
    file = draw.choice(sorted(path for path in folder.iterdir() if path.stat().st_size > 0))
    what = draw.choice(["a flipped bit", "a cut-off end", "a missing file"])
    if what == "a missing file":
        file.unlink()
    elif what == "a cut-off end":
        os.truncate(file, draw.randrange(file.stat().st_size))
    else:
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    return what


# Comparing a run with the undisturbed one

# Fields that differ between two runs with the same bits.
TIMES = ("tokens_per_second", "model_tflops", "mfu", "step_time", "data_wait", "peak_memory_gib", "joules_per_token")


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in metrics.jsonl, without times and without an unfinished last line."""
    path = run_dir / "metrics.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    found = [json.loads(line) for line in whole.splitlines()]
    return [{k: v for k, v in record.items() if k not in TIMES} for record in found if record["kind"] == kind]


def differences(expected: Path, run_dir: Path, damaged: bool = False, power: bool = False) -> list[str]:
    """The differences to the undisturbed run. damaged: a checkpoint was damaged. power: power was cut, which may leave
    zeros at the end of a file that is being written."""
    found = []
    for kind in ("step", "validation"):
        left, right = records(expected, kind), records(run_dir, kind)
        steps = [record["step"] for record in right]
        if steps != [record["step"] for record in left]:
            found.append(f"records of kind {kind} are of steps {steps}")
        elif bad := [one["step"] for one, other in zip(left, right, strict=True) if one != other]:
            found.append(f"other numbers in records of kind {kind} of steps {bad}")
    names, others = (
        [path.name for path in files.list_checkpoints(folder / "checkpoints")] for folder in (expected, run_dir)
    )
    # A save that is killed before it removes the oldest one leaves that to the next save, which may be killed too. A
    # power cut can bring back what was removed just before.
    older = [name for name in others if name < names[0]][: None if power else 2]
    if others != [*older, *names]:
        found.append(f"checkpoints are {others}, not {names}")
    for name in set(names) & set(others):
        found += compare_checkpoints(expected / "checkpoints" / name, run_dir / "checkpoints" / name)
    pointer, other = ((folder / "checkpoints" / "latest").read_text().strip() for folder in (expected, run_dir))
    if pointer != other:
        found.append(f"`latest` names {other}")
    allowed = r"(metrics\.jsonl|tensorboard)\.\d+"  # of starts before the first checkpoint
    if damaged:  # summary.json: of a finished run whose last checkpoint was damaged
        allowed += r"|checkpoints/.*damaged.*|summary\.json\.\d+"
    if power:
        allowed += r"|metrics\.jsonl\.damaged.*"
    there, here = (
        {str(path.relative_to(root)) for path in [*root.iterdir(), *(root / "checkpoints").iterdir()]}
        for root in (expected, run_dir)
    )
    here -= {f"checkpoints/{name}" for name in older}
    found += [f"left over: {name}" for name in sorted(here - there) if not re.fullmatch(allowed, name)]
    return found + [f"missing: {name}" for name in sorted(there - here)]


def compare_checkpoints(expected: Path, other: Path) -> list[str]:
    """The differences of two checkpoints: in hashes of the files with weights, moments and generators, in the trainer's
    state, and between files and their manifest."""
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
        del state["config"]["run"], state["config"]["checkpoint"]
        state["commit"] = None  # the code may be edited while the soak runs
    if keys := [key for key in states[0] if states[0][key] != states[1].get(key)]:
        found.append(f"{other.name}: the trainer's state differs in {keys}")
    return found


# The rounds


class Soak:
    """Runs the rounds. counts: of events. wrong: a line for each difference."""

    def __init__(self, kills: int, seed: int, processes: int, folder: Path) -> None:
        self.wanted, self.processes, self.folder = kills, processes, folder
        self.draw = random.Random(seed)
        self.kills: Counter[tuple[str, bool]] = Counter()  # (place, in the background)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.alone = folder / "alone"
        self.seconds = 3.0  # of an undisturbed start
        numbers = np.random.default_rng(seed)
        for name in ("a", "b", "held_out"):
            write_dataset(folder / name, numbers.integers(512, size=(20, 100)), np.uint16)

    def go(self) -> None:
        """Do the undisturbed run, then rounds until there were enough kills."""
        first = fork_server().Process(target=int)  # so that no start's time includes the fork server's imports
        first.start()
        first.join()
        began = time.monotonic()
        _, code = self.ended(self.launched(self.alone, self.alone / "run", False))
        self.seconds = time.monotonic() - began
        if code != 0:
            raise SystemExit(f"the undisturbed run failed:\n{(self.alone / 'output').read_text()[-3000:]}")
        index = 0
        while self.kills.total() < self.wanted and len(self.wrong) < 10:
            scratch, before = self.folder / f"round_{index:03d}", len(self.wrong)
            scratch.mkdir()
            disk = Disk(scratch) if index % 6 == 3 and MAY_MOUNT else None
            run_dir = (scratch if disk is None else disk.mount) / "run"
            self.round(scratch, run_dir, index % 2 == 1, disk)
            if disk is not None:
                if len(self.wrong) > before:
                    shutil.copytree(run_dir, scratch / "run", dirs_exist_ok=True)
                _command("umount", disk.mount)
            if len(self.wrong) == before:
                shutil.rmtree(scratch)
            print(f"round {index}: {self.kills.total()} kills, {len(self.wrong)} differences", file=sys.stderr)
            index += 1

    def round(self, scratch: Path, run_dir: Path, background: bool, disk: Disk | None) -> None:
        """Do one run from its first start to its end, and compare it. background: whether it saves asynchronously."""
        draw, before, damaged = self.draw, len(self.wrong), False
        # In a short soak, each way of saving gets half of the kills.
        for _ in range(min(STARTS, -(-self.wanted // 2), self.wanted - self.kills.total())):
            if disk is not None and draw.random() < 0.4:
                self.power_cut(scratch, disk, run_dir, background)
                continue
            killed, code = self.disturbed(scratch, run_dir, background)
            if not killed and code != 0:
                self.wrong.append(f"an undisturbed start ended with {code}; {scratch}/output")
            if len(self.wrong) > before:
                return
            if not killed:
                break
            # Only once: a second one could be damaged before the first is found, and none would be intact.
            if not damaged and draw.random() < 0.3 and (newest := checkpoints(run_dir)[1:][-1:]):
                self.counts[f"checkpoints with {damage(newest[0], draw)}"] += 1
                damaged = True
        _, code = self.ended(self.launched(scratch, run_dir, background))
        if code != 0:
            self.wrong.append(f"a last start ended with {code}; see {scratch}/output")
        elif len(self.wrong) == before:
            found_wrong = differences(self.alone / "run", run_dir, damaged, disk is not None)
            self.wrong += [f"{scratch.name}: {line}" for line in found_wrong]

    def disturbed(self, scratch: Path, run_dir: Path, background: bool) -> tuple[bool, int]:
        """Do one start, to be killed somewhere; returns whether it was killed, and its exit code."""
        draw = self.draw
        if draw.random() < 0.25:
            processes = self.launched(scratch, run_dir, background)
            wait([process.sentinel for process in processes], timeout=draw.random() * 0.6 * self.seconds)
            for process in processes if draw.random() < 0.5 else [draw.choice(processes)]:
                process.kill()
            name = "any moment"
        else:
            name, place = draw.choice([*PLACES.items()])
            victim = 0 if place.first else draw.randrange(self.processes)
            nth = 1 + draw.randrange(place.repeats + 1)
            processes = self.launched(scratch, run_dir, background, Kill(name, nth, victim, draw.random() < 0.4))
        killed, code = self.ended(processes)
        if killed:
            self.kills[name, background] += 1
        else:
            self.counts["starts that did not reach their place"] += 1
        return killed, code

    def launched(self, scratch: Path, run_dir: Path, background: bool, kill: Kill | None = None) -> list[Any]:
        """Start the processes of all ranks."""
        scratch.mkdir(exist_ok=True)
        for old in scratch.glob("pid_*"):
            old.unlink()
        overrides = [
            *RUN,
            f"run.dir={run_dir}",
            f"data.sources={{a: {self.folder}/a, b: {self.folder}/b}}",
            f"data.validation={{a: {self.folder}/held_out}}",
            f"checkpoint.asynchronous={str(background).lower()}",
            f"parallel.expert={2 - self.processes % 2}",
        ]
        slow = self.draw.choice([0.0, 0.1, 0.3]) if background else 0.0
        processes = [
            fork_server().Process(target=rank_main, args=(environment, overrides, str(scratch), kill, slow))
            for environment in environments_of_ranks(self.processes)
        ]
        for process in processes:
            process.start()
        return processes

    def ended(self, processes: list[Any]) -> tuple[bool, int]:
        """Wait for the end of a start; returns whether a rank was killed, and the exit code of one that failed."""
        deadline, codes = time.monotonic() + HANGS, list[int]()
        while waiting := [process for process in processes if process.is_alive()]:
            if not wait([process.sentinel for process in waiting], timeout=max(0.0, deadline - time.monotonic())):
                if len(waiting) == len(processes):
                    self.wrong.append("a start hangs; its output is in the round's folder")
                for process in waiting:
                    process.kill()
                    process.join()
            codes = codes or [process.exitcode for process in processes if process.exitcode not in (None, 0)]
            if codes:  # torchrun ends the others too, sooner or later
                deadline = min(deadline, time.monotonic() + self.draw.choice([0.0, 0.1, 1.0]))
        codes = [process.exitcode for process in processes]
        return -signal.SIGKILL in codes, next((code for code in codes if code not in (0, -signal.SIGKILL)), 0)

    def power_cut(self, scratch: Path, disk: Disk, run_dir: Path, background: bool) -> None:
        """Do one start during which the disk loses power."""
        processes = self.launched(scratch, run_dir, background)
        wait([process.sentinel for process in processes], timeout=self.draw.random() * 0.6 * self.seconds)
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGSTOP)
        output = (scratch / "output").read_text() if (scratch / "output").exists() else ""
        # A checkpoint that the soak damaged was moved aside by this start, so the power cut did not lose it.
        aside = {int(path.name[5:13]) for path in (run_dir / "checkpoints").glob("step_*.damaged*")}
        announced = [step for step in map(int, re.findall(r"saved \S*step_(\d+)", output)) if step not in aside]
        copy = disk.copy()
        for process in processes:
            process.kill()
            process.join()
        disk.lose_power(copy)
        self.counts["power cuts"] += 1
        newest = max((int(path.name[5:]) for path in checkpoints(run_dir)[-1:]), default=0)
        if missing := sorted(set(range(1, newest + 1)) - {record["step"] for record in records(run_dir, "step")}):
            self.wrong.append(f"a power cut left a checkpoint of step {newest} without records {missing}; {scratch}")
        if announced and newest < announced[-1]:
            self.wrong.append(f"step {announced[-1]} was reported as saved, but a power cut left {newest}; {scratch}")

    def table(self) -> str:
        """A table of kills and other events, and all differences."""
        rows = [(name, self.kills[name, False], self.kills[name, True]) for name in (*PLACES, "any moment")]
        rows.append(("all kills", sum(row[1] for row in rows), sum(row[2] for row in rows)))
        lines = [f"{'killed at':<32}{'sync':>6}{'async':>7}", *(f"{name:<32}{a:>6}{b:>7}" for name, a, b in rows), ""]
        lines += [f"{count:>5} {what}" for what, count in sorted(self.counts.items())]
        lines += [] if MAY_MOUNT else ["no power cuts: they need root and mkfs.ext4"]
        lines += [f"WRONG: {line}" for line in self.wrong]
        return "\n".join([*lines, f"{len(self.wrong)} differences" if self.wrong else "all equal"])


def main() -> int:
    """Run the soak of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hangs", action="store_true")
    options = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="soak_", dir=memory))
    if options.hangs:
        return hangs.print_matrix(folder)
    began = time.monotonic()
    soak = Soak(options.kills, options.seed, options.processes, folder)
    try:
        soak.go()
    except KeyboardInterrupt:
        print("interrupted; what was done until then:")
    finally:
        for disk in filter(os.path.ismount, folder.glob("round_*/disk")):
            subprocess.run(["umount", "--lazy", disk], capture_output=True)
        if not soak.wrong:
            shutil.rmtree(folder, ignore_errors=True)
    print(soak.table())
    print(f"{time.monotonic() - began:.0f} s" + (f"; what is wrong is in {folder}" if soak.wrong else ""))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    from tests import soak  # other processes must be able to import it

    sys.exit(soak.main())
