"""Starts the commands of blocks, in a folder that looks like a checkout, and compares what they print."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import assembly
import pretrain
from tests.docs.blocks import ROOT, Block
from tests.docs.shell import Command, commands_of

# What `with: small short` stands for: a model, and a run, of less than a second.
SIZES = {
    "small": [
        "model.pattern=M-*-", "model.hidden_dim=64", "model.ffn_dim=128", "model.num_query_heads=4",
        "model.head_dim=16", "model.mamba_num_heads=4", "model.mamba_head_dim=32", "model.mamba_state_dim=16",
        "model.nvfp4_bf16_blocks.last=1",
    ],
    "short": [
        "train.steps=4", "train.global_batch_size=2", "train.micro_batch_size=1", "train.sequence_length=64",
        "validation.num_samples=2", "validation.interval=2", "checkpoint.interval=2", "logging.interval=1",
        "logging.tensorboard=false", "data.num_workers=0",
    ],
}  # fmt: skip


class Session:
    """The blocks of one page, one after the other in `folder`.

    in_process: pretrain.py and scripts run in this process, as one rank, which saves the seconds of every start;
        otherwise each in its own, of the copy, under torchrun where the page says so.
    """

    def __init__(self, folder: Path, in_process: bool) -> None:
        self.folder, self.in_process = folder, in_process
        folder.mkdir(exist_ok=True)
        names = ["configs", "scripts", "pretrain.py"]
        if not in_process:
            listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            names = sorted({name.partition("/")[0] for name in listed.splitlines()} - {".git", ".venv", "runs"})
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)

    def run(self, block: Block, after: Block | None) -> str:
        """Do what `block` says, and compare with what it, or the block `after` it, says that this prints. Returns what
        it printed. Raises AssertionError for another exit code or other lines."""
        if block.kind == "file":
            path = self.folder / block.arguments[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.content)
            return ""
        if block.language == "python":
            printed = self._python(block)
        else:
            commands = commands_of(block.commands, block.name)
            printed = "".join(self._command(command, block) for command in commands)
        expected, exact = block.shows, "exact" in block.arguments
        if after is not None and after.kind == "output":
            expected, exact = f"{expected}\n{after.content}", "exact" in after.arguments
        if missing := lines_missing(expected, printed, exact):
            raise AssertionError(f"{block.name} does not print\n  {missing}\nbut\n{printed}")
        return printed

    def _command(self, command: Command, block: Block) -> str:
        arguments = [*shrunk(command, block)]
        if self.in_process and (script := _script(arguments)) is not None:
            code, printed = self._in_here(arguments[script], arguments[script + 1 :], command.world_size)
        else:
            ranks = {"WORLD_SIZE": str(command.world_size)} if command.world_size else {}
            environment = {**os.environ, **ranks, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
            bin_ = Path(sys.executable).parent
            environment["PATH"] = f"{bin_}:{environment['PATH']}"
            done = subprocess.run(
                arguments, cwd=self.folder, env=environment, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            code, printed = done.returncode, done.stdout
        wanted = int(block.options.get("exit", 0))
        assert code == wanted, f"{block.name}: {' '.join(arguments)} ended with {code}, not {wanted}:\n{printed}"
        return printed

    def _in_here(self, script: str, arguments: list[str], world_size: int) -> tuple[int, str]:
        with self._captured() as output, pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembly, "CONFIGS", self.folder / "configs")
            if world_size:
                patch.setenv("WORLD_SIZE", str(world_size))
            code: object = 0
            if script == "pretrain.py":
                code = pretrain.main(arguments)
            else:
                before = signal.getsignal(signal.SIGINT)
                patch.setattr(sys, "argv", [script, *arguments])
                try:
                    runpy.run_path(str(self.folder / script), run_name="__main__")
                except SystemExit as end:
                    code = end.code or 0
                finally:
                    signal.signal(signal.SIGINT, before)
        return int(str(code)), output[0]

    def _python(self, block: Block) -> str:
        with self._captured() as output:
            exec(compile(block.content, block.name, "exec"), {"__name__": "__page__"})
        return output[0]

    @contextmanager
    def _captured(self) -> Iterator[list[str]]:
        """In the session's folder; what is printed, by this process and by those that it starts."""
        output: list[str] = []
        here, kept = os.getcwd(), (os.dup(1), os.dup(2))
        with tempfile.TemporaryFile("w+", buffering=1) as file:
            os.chdir(self.folder)
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            try:
                with redirect_stdout(file), redirect_stderr(file):
                    yield output
            finally:
                file.flush()
                for number, stream in zip(kept, (1, 2), strict=True):
                    os.dup2(number, stream)
                    os.close(number)
                os.chdir(here)
                file.seek(0)
                output.append(file.read())


def filled(command: Command, block: Block) -> Command:
    """A command that leaves something out, with what the block's marker puts there."""
    if "..." not in command.arguments or "with" not in block.options:
        return command
    return Command((*command.arguments, *_words(block.options["with"])), command.world_size)


def shrunk(command: Command, block: Block) -> list[str]:
    """Its arguments, with what the block's marker adds to the configuration of a run."""
    arguments = [*command.arguments]
    more = _words(block.options.get("with", ""))
    if arguments[0] == "make" and (given := [a for a in arguments if a.startswith("ARGS=")]):
        arguments[arguments.index(given[0])] = " ".join([given[0], *more])
    elif arguments[0] == "make":
        arguments.append(f"ARGS={' '.join(more)}")
    elif "pretrain.py" in arguments or any(a.endswith(("plan_run.py", "profile_step.py")) for a in arguments):
        arguments += more
    elif any(a.endswith("prepare_data.py") for a in arguments):
        arguments += ["--workers", "1"]
    if "pretrain.py" not in arguments and any(a.startswith(("scripts/", "tests/")) for a in arguments):
        arguments += _words(block.options.get("args", ""))
    return arguments


def lines_missing(expected: str, printed: str, exact: bool = False) -> str:
    """The first line of `expected` that does not come in `printed` behind those before it; "" if all do.

    `...` stands for anything, on a line of its own and in one. Unless `exact`, any number is as good as another, and
    so is any width of columns.
    """
    rest = [_plain(line, exact) for line in printed.splitlines()]
    for line in expected.splitlines():
        if not line.strip() or line.strip() == "...":
            continue
        parts = map(re.escape, _plain(line, exact).split("..."))
        pattern = re.compile(".*".join(parts))
        place = next((i for i, one in enumerate(rest) if pattern.fullmatch(one)), None)
        if place is None:
            return line
        rest = rest[place + 1 :]
    return ""


def _plain(line: str, exact: bool) -> str:
    if exact:
        return line.rstrip()
    line = re.sub(r"\b(?:second|minute|hour|day)s?\b", "time", line.replace("ranks", "rank"))
    line = re.sub(r"[─━-]{2,}", "--", re.sub(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "#", line))
    return " ".join(line.split())


def _words(text: str) -> list[str]:
    words = commands_of(f"pretrain.py {text}", text)[0].arguments[1:]
    return [one for word in words for one in SIZES.get(word, [word])]


def _script(arguments: list[str]) -> int | None:
    if arguments[0] not in ("python", "torchrun"):
        return None
    return next((i for i, argument in enumerate(arguments) if argument.endswith(".py")), None)
