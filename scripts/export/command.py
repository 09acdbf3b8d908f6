"""What the commands that export and import have in common: options, the settings of what was imported, progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From what to what, and the tokenizer."""
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run: its newest one")
    parser.add_argument("output", type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--tokenizer", help="where the run's tokenizer is now, if not where its configuration says")
    parser.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """The command line, checked as far as `add_arguments` goes."""
    options = parser.parse_args(arguments)
    if options.tokenizer and options.no_tokenizer:
        parser.error("--tokenizer and --no-tokenizer exclude each other")
    return options


class Progress:
    """A line on a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if self._shown:
            end = "\n" if done >= total else "\r"
            print(f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB", end=end, file=sys.stderr, flush=True)


def import_and_describe(checkpoint: Path, make: Callable[[], Mapping[str, Any]]) -> None:
    """Let `make` write `checkpoint`, and write and print the `model` settings that it returns: CHECKPOINT.yaml, to be a
    file of configs/model. Raises ValueError if that is there already, and what `make` raises; OSError."""
    described = checkpoint.with_name(f"{checkpoint.name}.yaml")
    if described.exists():
        raise ValueError(f"{described} exists already; name another checkpoint, or remove it")
    settings = dict(make())
    text = yaml.safe_dump(settings, sort_keys=False)
    described.write_text(text)
    print(f"{checkpoint}: {settings['name']}; its settings are in {described}:")
    print(text, end="")
