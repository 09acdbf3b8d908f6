"""Runs whose disk does not answer: a call on a file of the run never returns, in one section of the run.

    python -m tests.soak --hangs      every section, call and number of ranks; prints a table

As a program, `tests/hangs.py SECTION CALL RUN_DIR OVERRIDES...` is pretrain.py with such a call.
"""

from __future__ import annotations

import builtins
import io
import itertools
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.indexed import write_dataset
from tests.programs import ROOT, Program, environments_of_ranks, run_program

CALLS = ("fsync", "statfs", "readdir", "close", "rename", "read")
# Sections, and how the line that ends a rank names them.
PLACES = {
    "start": "before the first step",
    "load": "before the first step, load",
    "save": r"step \d+, save",
    "background save": r"step \d+, save",
    "export": r"step \d+, export",
    "process of an export": r"step \d+, export",
}
TINY = [
    *["model.pattern=M*-", "model.vocab_size=512", "model.hidden_dim=32", "model.ffn_dim=32", "model.head_dim=16"],
    *["model.num_query_heads=2", "model.num_kv_heads=1", "model.mamba_num_heads=2", "model.mamba_head_dim=16"],
    *["model.mamba_num_groups=1", "model.mamba_state_dim=16", "model.mamba_chunk_size=16"],
    *["model.nvfp4_bf16_blocks.last=0", "precision.switch.when=never", "train.global_batch_size=2"],
    *["train.micro_batch_size=1", "train.sequence_length=16", "checkpoint.interval=2", "run.device=cpu"],
    *["data=indexed", "data.num_workers=0"],
]
RUN = [*TINY, "train.steps=2", "validation.interval=0", "logging.report=false", "logging.tensorboard=false"]
RUN += ["data.phases=[{name: main, blend: {a: 1}}]", "parallel.timeout_seconds=6"]


class Hang(NamedTuple):
    """The first `call` on a file of the run in `section` never returns, on rank `victim`. call: `stop` stops the
    process."""

    section: str
    call: str
    ranks: int = 1
    victim: int = 0

    def __str__(self) -> str:
        return f"{self.section}-{self.call}-{self.victim}of{self.ranks}"

    def run(self, folder: Path, seconds: float = 240.0) -> Result:
        """Do a run with this hang in `folder`, after one that a load needs."""
        run_dir = folder / "run"
        folder.mkdir(exist_ok=True)
        write_dataset(folder / "data", np.random.default_rng(1).integers(512, size=(20, 100)), np.uint16)
        given = [*RUN, f"data.sources={{a: {folder}/data}}", f"run.dir={run_dir}"]
        if self.section == "load":
            done = run_program([ROOT / "pretrain.py", *given], timeout=seconds)
            assert done.returncode == 0, done.stderr
            given = [*given, "train.steps=4"]
        if self.section == "save":
            given = [*given, "checkpoint.asynchronous=false"]
        if self.section == "background save":
            given = [*given, "checkpoint.asynchronous=true", "train.steps=400"]
        if "export" in self.section:
            given = [*given, "checkpoint.export_interval=2"]
        environments = environments_of_ranks(self.ranks) if self.ranks > 1 else [{**os.environ, "RANK": "0"}]
        if self.ranks == 1:
            environments[0].pop("RANK")
        programs = []
        for rank, environment in enumerate(environments):
            what = (self.section, self.call) if rank == self.victim else ("", "")
            programs.append(Program([ROOT / "tests" / "hangs.py", *what, *given], environment))
        began = time.monotonic()
        code = programs[self.victim].wait(seconds)
        for other in programs:  # as torchrun does
            other.send_signal(signal.SIGKILL)
        output = "".join(programs[self.victim].communicate())
        state = json.loads(text) if (text := _read(run_dir / "state.json")) else {}
        return Result(self, code, time.monotonic() - began, output, state, _marker(run_dir).exists())


class Result(NamedTuple):
    """How the rank ended. seconds: until then. state: of the run. reached: whether the section has such a call."""

    hang: Hang
    code: int
    seconds: float
    output: str
    state: dict[str, Any]
    reached: bool

    def line(self) -> str:
        """What the rank said last, or ""."""
        return next((line for line in self.output.splitlines() if ": rank " in line and " hangs " in line), "")

    def problems(self) -> list[str]:
        """What is wrong about the end."""
        section = PLACES[self.hang.section]
        wrong = [] if self.reached else ["the call was not reached"]
        wrong += [] if self.code == 5 else [f"the exit code is {self.code}"]
        if not re.search(
            rf"rank {self.hang.victim} on \S+ hangs (in )?{section}.*: no progress for \d+ s; ", self.line()
        ):
            wrong.append(f"the line is {self.line()!r}")
        known = "process " if self.hang.section == "process of an export" else "instead (hangs.py:"
        wrong += [] if known in self.line() else ["the line does not say where"]
        if self.hang.section != "start" and self.state.get("reason", "") not in self.line():
            wrong.append(f"state.json: {self.state}")
        return wrong


def _marker(run_dir: Path) -> Path:
    return run_dir.with_name("hanging")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def arm(call: str, run_dir: Path, here: Callable[[], bool]) -> None:
    """From now on, the first `call` on a file under `run_dir` does not return if `here()`."""
    root, marker = os.path.realpath(run_dir), _marker(run_dir)

    def is_of_run(path: Any) -> bool:
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(os.fsdecode(path))
        return name.startswith(root)

    def hangs(original: Callable[..., Any], path: Any = None) -> Callable[..., Any]:
        def instead(*arguments: Any, **keywords: Any) -> Any:
            if here() and is_of_run(arguments[0] if path is None else path):
                os.open(marker, os.O_CREAT)
                if call == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(100_000)
            return original(*arguments, **keywords)

        return instead

    of_module = {"readdir": ("listdir", "scandir"), "statfs": ("statvfs",), "rename": ("rename", "replace")}
    for name in of_module.get(call, (call,)):
        if hasattr(os, name):
            setattr(os, name, hangs(getattr(os, name)))
    if call == "stop":
        os.mkdir = hangs(os.mkdir)
    if call not in ("close", "read"):
        return
    opened, file_io = io.open, io.FileIO

    def watched_open(path: Any, *arguments: Any, **keywords: Any) -> Any:
        return watch(opened(path, *arguments, **keywords), path)

    def watch(file: Any, path: Any) -> Any:
        for name in ("close",) if call == "close" else ("read", "readinto", "readall", "readlines", "readline"):
            if hasattr(file, name):
                setattr(file, name, hangs(getattr(file, name), path))
        return file

    class FileIO(file_io):
        def __init__(self, path: Any, *arguments: Any, **keywords: Any) -> None:
            super().__init__(path, *arguments, **keywords)
            watch(self, path)

    builtins.open = io.open = watched_open  # type: ignore[assignment]
    io.FileIO = FileIO  # type: ignore[misc, assignment]


def in_section(section: str) -> Callable[[], bool]:
    """A function that returns whether the calling thread works in `section` of a run."""
    from megatron_fp4.runtime.progress import Progress

    places = [(0, "")]
    at = Progress.at

    def noted(progress: Progress, step: int, phase: str) -> None:
        places.append((step, phase))
        at(progress, step, phase)

    Progress.at = noted  # type: ignore[method-assign]

    def here() -> bool:
        step, phase = places[-1]
        name = threading.current_thread().name
        if section == "background save":
            return name.startswith("checkpoint")
        if not name.startswith(("MainThread", "checkpoint", "ThreadPool")):
            return False
        return step == 0 and phase != "load" if section == "start" else phase == section

    return here


def export_script(call: str, run_dir: Path) -> Path:
    """A script that is scripts/convert.py whose first `call` does not return."""
    path = run_dir.with_name("convert.py")
    path.write_text(
        f"import runpy, sys\nsys.path[:0] = [{str(ROOT / 'scripts')!r}, {str(ROOT)!r}]\n"
        "from pathlib import Path\nfrom tests import hangs\n"
        f"hangs.arm({call!r}, Path({str(run_dir)!r}), lambda: True)\n"
        f"runpy.run_path({str(ROOT / 'scripts' / 'convert.py')!r}, run_name='__main__')\n"
    )
    return path


def print_matrix(folder: Path) -> int:
    """Run every hang in `folder`, and print a table; returns the exit code, 1 if a run does not end as it should."""
    print("| section | call | ranks | exit code, after | what is wrong, or what the rank says |\n|---|---|---|---|---|")
    wrong = 0
    for section, call, ranks in itertools.product(PLACES, (*CALLS, "stop"), (1, 2)):
        if call == "stop" and section != "process of an export":
            continue
        # Rank 0 alone has the other calls; all ranks write and read shards.
        of_shards = section in ("load", "background save") and call in ("fsync", "close", "read")
        victim = ranks - 1 if of_shards else 0
        result = Hang(section, call, ranks, victim).run(folder / f"{section}_{call}_{ranks}".replace(" ", "_"))
        problems = result.problems() if result.reached else []
        wrong += bool(problems)
        says = "; ".join(problems) or (result.line() if result.reached else "no such call")
        print(f"| {section} | {call} | {ranks} | {result.code}, {result.seconds:.0f} s | {says} |", flush=True)
    return 1 if wrong else 0


def main() -> None:
    section, call, *overrides = sys.argv[1:]
    run_dir = Path(next(part for part in overrides if part.startswith("run.dir=")).removeprefix("run.dir="))
    from megatron_fp4.runtime import progress

    progress._STILL_BESIDE = progress._STILL  # type: ignore[misc]
    if section == "process of an export":
        from exchange import exports

        exports.SCRIPT = export_script(call, run_dir)
    elif section:
        arm(call, run_dir, in_section(section))
    sys.argv = [str(ROOT / "pretrain.py"), *overrides]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
