"""The same run several times, each in new processes, one of them killed and resumed: are they equal to the last bit?

    python scripts/compare_repeats.py                                three runs of hybrid_60m, one killed and resumed
    python scripts/compare_repeats.py --nproc 2 parallel.tensor=2    on two ranks
    python scripts/compare_repeats.py --caches own                   every start compiles its kernels anew
    python scripts/compare_repeats.py --print-autotuning --repeats 3 --kill-after 0

Overrides are pretrain.py's; where they do not say otherwise the runs are `DEFAULTS` below. Caches of compiled kernels
(Triton's, Inductor's) begin empty: with `--caches shared` the first start fills them and the others find them warm,
with `--caches own` every start has empty ones. The file of kernel choices that runs leave on a machine is not the
user's but also begins empty: the first start tunes, and every other that begins at step 0 takes over its choices, with
both values of `--caches`. The resumed start gets an empty one of its own, as on another machine: what it knows of
choices comes from its checkpoint alone.

Compares loss and gradient norm of every step, and weights and moments of the last checkpoint, bit for bit. With
--print-autotuning it also lists which kernels each start tuned, by Triton's own report, and where choices differ.
Exit code: 0 if all runs are equal, 1 if anything differs or a run failed, 2 if the command is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from data.cache import default_cache_dir
from megatron_fp4.checkpoint.shards import CheckedReader
from megatron_fp4.logging.metrics import METRICS_FILE, read_metrics
from megatron_fp4.runtime.closed_pipe import end_without_reader

PRETRAIN = Path(__file__).resolve().parent.parent / "pretrain.py"
DEFAULTS = {
    "model": "hybrid_60m",
    "train.steps": "10",
    "checkpoint.interval": "4",
    "checkpoint.keep": "0",
    "validation.interval": "5",
    "validation.num_samples": "8",
    "logging.interval": "1",
    "logging.tensorboard": "false",
}
_TUNED = re.compile(
    r"Triton autotuning for function (?P<kernel>\w+),\nwith key as (?P<key>.*),\n"
    r"finished after (?P<seconds>[\d.]+)s,\nbest config selected: (?P<choice>.*);"
)

Choices = dict[tuple[str, str], set[str]]


class FailedError(RuntimeError):
    """A run ended otherwise than it should; the message holds the end of its output."""


@dataclass(frozen=True)
class Start:
    """One start of a run: how long it took, and the output of each of its ranks."""

    seconds: float
    outputs: list[str]


@dataclass(frozen=True)
class Repeat:
    """A finished run: (loss, grad_norm) of each step, SHA-256 of each tensor of its last checkpoint, and its starts."""

    name: str
    steps: dict[int, tuple[float | None, float | None]]
    tensors: dict[str, str]
    starts: list[Start]


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code, see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for pretrain.py, without run.dir")
    parser.add_argument("--nproc", type=int, default=1, help="ranks, one a GPU (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="runs without an interruption (default: 3)")
    parser.add_argument("--kill-after", type=int, default=6, metavar="STEP", help="when to kill; 0: never (default: 6)")
    parser.add_argument("--caches", choices=("shared", "own"), default="shared", help="of compiled kernels")
    parser.add_argument("--print-autotuning", action="store_true", help="list what Triton tunes (a start: one process)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one start (default: 600)")
    parser.add_argument("--output", type=Path, help="folder for the runs, which stay (default: a temporary one)")
    options = parser.parse_intermixed_args(arguments)
    if any(override.startswith("run.dir=") for override in options.overrides):
        parser.error("run.dir is chosen for each run; say --output for the folder of all")
    if options.repeats + (options.kill_after > 0) < 2:
        parser.error("there is nothing to compare; raise --repeats or give --kill-after")

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        program = Program(with_defaults(options.overrides), options.nproc, folder.absolute(), options.timeout)
        program.own_caches, program.print_autotuning = options.caches == "own", options.print_autotuning
        try:
            repeats = [program.straight(f"run {number + 1}") for number in range(options.repeats)]
            if options.kill_after > 0:
                repeats.append(program.killed("killed and resumed", options.kill_after))
        except FailedError as error:
            print(f"compare_repeats.py: {error}", file=sys.stderr)
            return 1
    if options.print_autotuning:
        print(tuning_report(repeats))
    return report(repeats)


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """`DEFAULTS` but for the keys that `overrides` name, and `overrides`; the built-in corpus is the user's."""
    named = {override.lstrip("+").split("=")[0] for override in overrides}
    defaults = dict(DEFAULTS)
    if not named & {"data", "data.kind", "data.sources"}:
        # Each start has another XDG_CACHE_HOME, where it would be built anew.
        defaults["data.cache_dir"] = str(default_cache_dir())
    return [*(f"{key}={value}" for key, value in defaults.items() if key not in named), *overrides]


class Program:
    """pretrain.py with `overrides` on `num_ranks` ranks of this host, in folders under `folder`."""

    own_caches = False
    print_autotuning = False

    def __init__(self, overrides: list[str], num_ranks: int, folder: Path, timeout: float) -> None:
        self.overrides, self.num_ranks, self.folder, self.timeout = overrides, num_ranks, folder, timeout
        self.num_starts = 0

    def straight(self, name: str) -> Repeat:
        """A run from beginning to end."""
        run_dir = self.folder / name.replace(" ", "_")
        return self._read(name, run_dir, [self._start(run_dir)])

    def killed(self, name: str, kill_after: int) -> Repeat:
        """A run that gets SIGKILL when step `kill_after` is done, and is then started again, as on another machine."""
        run_dir = self.folder / name.replace(" ", "_")
        killed = self._start(run_dir, kill_after)
        if not (run_dir / "checkpoints" / "latest").exists():
            raise FailedError(
                f"the run in {run_dir} was killed before its first checkpoint; raise --kill-after, or lower "
                "checkpoint.interval"
            )
        return self._read(name, run_dir, [killed, self._start(run_dir, machine="another_machine")])

    def _start(self, run_dir: Path, kill_after: int | None = None, machine: str = "machine") -> Start:
        """machine: the folder of the file of kernel choices that it finds and leaves."""
        self.num_starts += 1
        logs = [self.folder / f"start_{self.num_starts}_rank_{rank}.log" for rank in range(self.num_ranks)]
        began = time.monotonic()
        # Without torchrun: what is to be killed are exactly the ranks, and each has its output to itself.
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for log, environment in zip(logs, self._environments(machine), strict=True):
                command = [sys.executable, str(PRETRAIN), *self.overrides, f"run.dir={run_dir}"]
                with log.open("w") as output:
                    processes.append(
                        subprocess.Popen(
                            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                        )
                    )
            while any(process.poll() is None for process in processes):
                saved = (run_dir / "checkpoints" / "latest").exists()
                if kill_after is not None and saved and steps_done(run_dir) >= kill_after:
                    break
                if any(process.poll() for process in processes) or time.monotonic() - began > self.timeout:
                    break
                time.sleep(0.02)
            finished = all(process.poll() == 0 for process in processes)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # with what it started, such as loader workers
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outputs = [log.read_text(errors="replace") for log in logs]
        if finished == (kill_after is not None) or (kill_after is not None and steps_done(run_dir) < kill_after):
            what = "was finished before it could be killed" if finished else "failed or took too long"
            tails = "\n".join(f"--- rank {rank}\n{output[-4000:]}" for rank, output in enumerate(outputs))
            raise FailedError(f"start {self.num_starts} in {run_dir} {what}\n{tails}")
        return Start(time.monotonic() - began, outputs)

    def _environments(self, machine: str) -> list[dict[str, str]]:
        caches = self.folder / (f"caches_{self.num_starts}" if self.own_caches else "caches")
        common = {
            **os.environ,
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "XDG_CACHE_HOME": str(self.folder / machine),
            "PYTHONUNBUFFERED": "1",
        }
        if self.print_autotuning:
            common["TRITON_PRINT_AUTOTUNING"] = "1"
        if self.num_ranks == 1:
            return [common]
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        world |= {"WORLD_SIZE": str(self.num_ranks), "LOCAL_WORLD_SIZE": str(self.num_ranks)}
        return [{**common, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.num_ranks)]

    def _read(self, name: str, run_dir: Path, starts: list[Start]) -> Repeat:
        records = [record for record in read_metrics(run_dir / METRICS_FILE) if record["kind"] == "step"]
        newest = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
        steps = {record["step"]: (record["loss"], record["grad_norm"]) for record in records}
        print(f"{name}: {len(steps)} steps, {' + '.join(f'{start.seconds:.0f} s' for start in starts)}", flush=True)
        return Repeat(name, steps, tensor_digests(newest), starts)


def steps_done(run_dir: Path) -> int:
    """The last step in the run's metrics; 0 if there is none."""
    path = run_dir / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    return max((record["step"] for record in records if record["kind"] == "step"), default=0)


def tensor_digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of dtype, shape and bytes of every tensor of model and optimizer in a checkpoint."""
    reader = CheckedReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in stored.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):  # that this is one process, which it is
        load(tensors, storage_reader=reader, no_dist=True)
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content.tobytes()).hexdigest()


def differences(first: Repeat, other: Repeat) -> list[str]:
    """What differs between two runs, a line each; empty if they are equal to the last bit."""
    lines = []
    if first.steps.keys() != other.steps.keys():
        lines.append(f"{len(other.steps)} steps instead of {len(first.steps)}")
    common = sorted(first.steps.keys() & other.steps.keys())
    for place, name in enumerate(("loss", "grad_norm")):
        differ = [step for step in common if first.steps[step][place] != other.steps[step][place]]
        if differ:
            values = f"{other.steps[differ[0]][place]} instead of {first.steps[differ[0]][place]}"
            lines.append(f"{name} differs in {len(differ)} of {len(common)} steps, first in step {differ[0]}: {values}")
    for part in ("model", "optimizer"):
        names = {name for name in first.tensors.keys() | other.tensors.keys() if name.startswith(f"{part}.")}
        differ_in = sorted(name for name in names if first.tensors.get(name) != other.tensors.get(name))
        if differ_in:
            lines.append(f"{len(differ_in)} of {len(names)} tensors of the {part} differ, such as {differ_in[0]}")
    return lines


def report(repeats: Sequence[Repeat]) -> int:
    """Print a table of all runs against the first; returns 1 if any differs from it, else 0."""
    first, last = repeats[0], max(repeats[0].steps)
    width = max(len(repeat.name) for repeat in repeats)
    print(f"\n{'':{width}}  {'first grad_norm':22}{'last grad_norm':22}{'weights':10}against {first.name}")
    code = 0
    for repeat in repeats:
        found = differences(first, repeat)
        code |= bool(found)
        weights = hashlib.sha256(json.dumps(sorted(repeat.tensors.items())).encode()).hexdigest()[:8]
        norms = [str(repeat.steps[step][1]) if step in repeat.steps else "-" for step in (min(first.steps), last)]
        verdict = "-" if repeat is first else "DIFFERENT" if found else "equal in every bit"
        print(f"{repeat.name:{width}}  {norms[0]:22}{norms[1]:22}{weights:10}{verdict}")
        for line in found:
            print(f"{'':{width}}      {line}")
    print("DIFFERENT" if code else f"all {len(repeats)} runs are equal: {last} steps, {len(first.tensors)} tensors")
    return code


def tuned_kernels(output: str) -> tuple[Choices, float]:
    """What Triton tuned according to a process's output, (kernel, key) -> choices, and the seconds that it took."""
    choices: Choices = {}
    seconds = 0.0
    for match in _TUNED.finditer(output):
        choices.setdefault((match["kernel"], match["key"]), set()).add(match["choice"])
        seconds += float(match["seconds"])
    return choices, seconds


def tuning_report(repeats: Sequence[Repeat]) -> str:
    """How many kernels each process tuned, and where two processes chose differently."""
    lines = ["", "kernels tuned:"]
    chosen: dict[tuple[str, str], dict[str, str]] = {}
    for repeat in repeats:
        for number, start in enumerate(repeat.starts, 1):
            for rank, output in enumerate(start.outputs):
                who = f"{repeat.name}, start {number}, rank {rank}"
                choices, seconds = tuned_kernels(output)
                lines.append(f"  {who}: {len(choices)} in {seconds:.1f} s")
                for tuned, configs in choices.items():
                    chosen.setdefault(tuned, {})[who] = " | ".join(sorted(configs))
    differing = {tuned: by for tuned, by in chosen.items() if len(set(by.values())) > 1}
    lines.append(f"different choices for {len(differing)} of {len(chosen)} kernels and keys")
    for (kernel, key), by in differing.items():
        lines.append(f"  {kernel} {key}")
        lines += [f"    {config:70} {who}" for who, config in by.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    end_without_reader()
    # As an exception, which ends the ranks: they have sessions of their own and outlive a signal to this one's.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
