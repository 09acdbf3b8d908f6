"""Whether a command of a page could be started: its script is there and takes these arguments, and what configures a
run composes and passes the checks that come before one. Nothing is started, and only the configuration is read."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import assembly
from megatron_fp4 import command as installed
from megatron_fp4.config import compose
from megatron_fp4.config.schema import Config, ConfigError
from tests.docs.blocks import ROOT
from tests.docs.shell import Command

# Programs that are not this project's: what they take is theirs to know.
FOREIGN = """
    apt-get basename cat cp curl cut dpkg diff docker echo enroot find git head kill kubectl lm-eval ls mkdir nvidia-smi
    pkill rm scancel sinfo squeue srun tail tar tensorboard touch unzip wandb
"""
# Their positional `overrides` change the configuration of a run that is read from its folder.
OF_A_RUN = ("analyze_precision", "replay")


class Parsed(Exception):
    """Raised in the place of what a command does, with what it was told."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options


class WrongCommandError(AssertionError):
    """A command of a page that would be refused."""


def check(command: Command, configs: Path, ranks: int = 0) -> None:
    """Raise WrongCommandError for what is wrong with `command`.

    configs: the folder of configuration files. ranks: how many there are, where the command does not say.
    """
    program, *arguments = _without_gaps(command.arguments)
    ranks = ranks or command.world_size
    try:
        if program == "make":
            _check_make(arguments, configs, ranks)
        elif program == "torchrun":
            _check_torchrun(arguments, configs, ranks)
        elif program == "sbatch":
            script = next(argument for argument in arguments if argument.endswith((".sbatch", ".sh")))
            _there(script)
            _configured(arguments[arguments.index(script) + 1 :], configs, ranks or 8)
        elif program in ("python", ".venv/bin/python", "python3"):
            _check_python(arguments, configs, ranks)
        elif program == "pretrain.py":
            _configured(arguments, configs, ranks)
        elif program in _entry_points():
            _check_installed(arguments, configs, ranks)
        elif program in ("pip", ".venv/bin/pip"):
            _check_pip(arguments)
        elif program == "pytest":
            for path in (argument for argument in arguments if "/" in argument):
                _there(path.partition("::")[0])
        elif program == ".venv/bin/pre-commit":
            _there(".pre-commit-config.yaml")
        elif program not in FOREIGN.split():
            raise WrongCommandError(f"{program} is no program of this project, and not among those that are known")
    except (ConfigError, SyntaxError, ValueError) as error:
        raise WrongCommandError(f"{command}: {error}") from error


def _without_gaps(arguments: Sequence[str]) -> list[str]:
    """`arguments` without `...`, and without an option whose value it stands for."""
    kept: list[str] = []
    for argument in arguments:
        if argument == "..." and kept and kept[-1].startswith("--"):
            kept.pop()
        elif argument != "...":
            kept.append(argument)
    return kept


def configuration(overrides: Sequence[str], configs: Path, ranks: int) -> Config:
    """What `overrides` compose to, checked as a start on `ranks` ranks checks it; raises ConfigError."""
    given = [override for override in overrides if override not in ("--check", "...")]
    # Whether a checkpoint is there is not for a page to say.
    given = [re.sub(r"^(checkpoint\.resume=).*/.*", r"\1auto", override) for override in given]
    config = compose.compose_config(given, configs)
    # A page's commands are for machines that are not here.
    device = "cpu" if config.run.device == "cpu" else "cuda"
    assembly.check(config, ranks or max(1, config.parallel.tensor * config.parallel.replicate), device)
    return config


def parsed(script: str, arguments: list[str]) -> argparse.Namespace | None:
    """What the command line `arguments` of `script` means to it; None if it takes none. Raises WrongCommandError."""
    _there(script)
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    real, said = argparse.ArgumentParser.parse_args, StringIO()

    def stopped(method: Any) -> Any:
        def parse(self: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
            raise Parsed(method(self, *given, **named))

        return parse

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setattr(sys, "argv", [script, *arguments])
        try:
            if hasattr(module, "parse"):
                return module.parse(arguments)
            patch.setattr(argparse.ArgumentParser, "parse_args", stopped(real))
            patch.setattr(argparse.ArgumentParser, "parse_intermixed_args", stopped(_intermixed))
            return module.main(arguments) if module.main.__code__.co_argcount else module.main()
        except Parsed as found:
            return found.options
        except SystemExit as end:
            if end.code in (0, None):
                return None
            raise WrongCommandError(f"{script} {' '.join(arguments)}: {said.getvalue().strip()}") from None


_intermixed = argparse.ArgumentParser.parse_intermixed_args


def _check_python(arguments: list[str], configs: Path, ranks: int) -> None:
    script, *rest = arguments
    if script == "-c":
        compile(rest[0], "-c", "exec")
    elif script == "-m":
        if importlib.util.find_spec(rest[0]) is None:
            raise WrongCommandError(f"there is no module {rest[0]}")
    elif script == "pretrain.py":
        if not {"--help", "--version"} & {*rest}:
            _configured(rest, configs, ranks)
    else:
        options = parsed(script, rest)
        of_a_run = script.removesuffix(".py").endswith(OF_A_RUN)
        for overrides in _overrides_in(options):
            _configured(overrides, configs, getattr(options, "world_size", 0) or ranks, of_a_run=of_a_run)


def _overrides_in(options: argparse.Namespace | None) -> Iterator[list[str]]:
    for key, value in vars(options or argparse.Namespace()).items():
        if key in ("overrides", "set") and value:
            yield value
        if key == "case":
            yield from (case.split() for case in value or [])


def _configured(overrides: list[str], configs: Path, ranks: int, of_a_run: bool = False) -> None:
    if of_a_run:  # the rest of the configuration is the run's
        overrides = [override for override in overrides if not override.startswith("parallel.")]
    configuration(overrides, configs, ranks)


def _check_torchrun(arguments: list[str], configs: Path, ranks: int) -> None:
    script = next((i for i, argument in enumerate(arguments) if argument.endswith(".py")), None)
    if "-m" in arguments and arguments[arguments.index("-m") + 1] == "megatron_fp4":
        get_args_parser().parse_args([*arguments[: arguments.index("-m")], "pretrain.py"])
        return _check_installed(arguments[arguments.index("-m") + 2 :], configs, ranks)
    if script is None:
        raise WrongCommandError(f"torchrun {' '.join(arguments)}: it names no script")
    options = get_args_parser().parse_args(arguments[: script + 1])
    if arguments[script].startswith("pretrain_"):
        return  # Megatron-LM's
    nodes, processes = int(options.nnodes.split(":")[-1]), options.nproc_per_node
    ranks = ranks or (nodes * int(processes) if str(processes).isdigit() else 0)
    given = any(argument.startswith("--nproc") for argument in arguments[:script])
    _check_python(arguments[script:], configs, ranks if given else 0)


def _check_installed(arguments: list[str], configs: Path, ranks: int) -> None:
    path, rest = installed.program(arguments)
    _check_python([str(path.relative_to(ROOT)), *rest], configs, ranks)


def _check_make(arguments: list[str], configs: Path, ranks: int) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "ARGS" and "train" in arguments:
            _configured(re.findall(r"(?:[^\s']|'[^']*')+", value), configs, ranks)
        elif "=" not in argument and argument not in targets:
            raise WrongCommandError(f"make {argument}: the Makefile has {', '.join(targets)}")


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:megatron[_-]fp4|\.)\[([\w,-]+)\]", " ".join(arguments)):
        if unknown := {*extras.split(",")} - project["optional-dependencies"].keys():
            raise WrongCommandError(f"pyproject.toml has no extra {', '.join(sorted(unknown))}")


def _entry_points() -> set[str]:
    return {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("scripts", {})}


def _there(path: str) -> None:
    if not (ROOT / path).exists():
        raise WrongCommandError(f"there is no {path}")
