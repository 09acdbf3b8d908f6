"""What pretrain.py answers to `--help` and `--version`, before it imports torch, which takes seconds: nor does this."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_fp4 import __version__
from megatron_fp4.runtime.closed_pipe import end_without_reader


def answer(arguments: list[str], config_dir: Path) -> int | None:
    """Print what the command line's `arguments` ask for, help of the configuration in `config_dir` or the version.
    Returns the exit code, None if they ask for neither."""
    wants_help = not {"--help", "-h"}.isdisjoint(arguments)
    if not wants_help and "--version" not in arguments:
        return None
    end_without_reader()
    if not wants_help:
        print(f"megatron_fp4 {__version__}")
        return 0
    from megatron_fp4.config.help import help_text  # and with it Hydra, for which no version has to wait
    from megatron_fp4.config.schema import ConfigError

    try:
        print(help_text(config_dir))
    except ConfigError as error:
        print(f"pretrain.py: {error}", file=sys.stderr)
        return 2
    return 0
