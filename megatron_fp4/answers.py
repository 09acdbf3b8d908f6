"""What pretrain.py answers before it imports torch, which takes seconds: `--help`, `--version`, `--cfg job`, `--info`,
that its packages are missing; `--multirun`, whose runs are processes of their own; and a first line for a run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

from megatron_fp4 import __version__
from megatron_fp4.runtime.closed_pipe import end_without_reader

# What every run imports -> its package.
_NEEDED = {name: name for name in ("torch", "numpy", "hydra", "omegaconf", "pydantic", "yaml", "rich")}
_NEEDED |= {"hydra": "hydra-core", "yaml": "pyyaml"}


def missing_packages(but: str | None = None) -> str | None:
    """A line about the packages that this Python does not have, None if it has all. but: one that is not needed."""
    missing = [name for module, name in _NEEDED.items() if name != but and importlib.util.find_spec(module) is None]
    if not missing:
        return None
    return (
        f"{sys.executable} has no {', '.join(missing)}; run `make setup` once and `source .venv/bin/activate` in every "
        "shell, or pip install what is missing"
    )


def answer(arguments: list[str], config_dir: Path) -> int | None:
    """Do what the command line's `arguments` ask for besides a run; returns the exit code, None for a run."""
    if "--version" in arguments:
        end_without_reader()
        print(f"megatron_fp4 {__version__}")
        return 0
    wants_help = not {"--help", "-h"}.isdisjoint(arguments)
    if line := missing_packages(but="torch" if wants_help else None):
        print(f"pretrain.py: {line}", file=sys.stderr)
        return 2
    sweeps = not {"--multirun", "-m"}.isdisjoint(arguments)
    if not (wants_help or sweeps or {"--cfg", "--info"} & {*arguments}):
        if os.environ.get("RANK", "0") == "0" and {"--check", "run.dry=true"}.isdisjoint(arguments):
            with contextlib.suppress(OSError):  # a pipe without a reader
                os.write(1, f"megatron_fp4 {__version__}: importing PyTorch takes some seconds\n".encode())
        return None
    # With it Hydra, for which no version waits.
    from megatron_fp4.config.compose import compose_config, show_info, to_yaml
    from megatron_fp4.config.help import help_text
    from megatron_fp4.config.schema import ConfigError

    end_without_reader()
    try:
        if wants_help:
            print(help_text(config_dir))
        elif sweeps:
            from megatron_fp4.multirun import multirun

            if "RANK" in os.environ:
                raise ConfigError("--multirun starts the ranks of each run itself; start it with python, not torchrun")
            rest = [argument for argument in arguments if argument not in ("--multirun", "-m")]
            return multirun(rest, config_dir.parent / "pretrain.py", config_dir)
        elif "--info" in arguments:
            place = arguments.index("--info")
            what = arguments[place + 1] if place + 1 < len(arguments) else "all"
            show_info(what, arguments[:place] + arguments[place + 2 :], config_dir)
        else:
            rest = [argument for argument in arguments if argument != "--resolve"]
            place = rest.index("--cfg")
            if rest[place + 1 : place + 2] != ["job"]:
                raise ConfigError("--cfg prints the configuration of a run; write --cfg job")
            config = compose_config(rest[:place] + rest[place + 2 :], config_dir)
            print(to_yaml(config, resolve="--resolve" in arguments), end="")
    except ConfigError as error:
        print(f"pretrain.py: {error}", file=sys.stderr)
        return 2
    return 0
