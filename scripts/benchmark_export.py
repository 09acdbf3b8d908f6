"""Peak memory and time of an export and an import, on a checkpoint of any model made for it.

    python scripts/benchmark_export.py --folder DISK model=nemotron_h_12b

makes a checkpoint of that model under DISK whose weights are zeros and take no room (files with holes), exports it in a
process of its own, and prints the peak memory of that process beside the model's size; --import does the way back too,
and --format megatron exports what Megatron-LM loads.
What it wrote is removed again. DISK needs room for the export: two bytes a parameter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from exchange.hf.architectures import architecture_of
from exchange.hf.export import shape_of
from exchange.weights_only import NewTensor, write_weights_only
from megatron_fp4.config.compose import compose_config
from megatron_fp4.runtime.closed_pipe import end_without_reader
from models.pattern import parameter_count
from pretrain import CONFIGS

FORMATS = ("hf", "megatron")


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value: the configuration of the model")
    parser.add_argument("--folder", type=Path, required=True, help="where to write, for as long as it takes")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="Hugging Face's (default) or Megatron-core's")
    parser.add_argument("--import", dest="back", action="store_true", help="import what was exported")
    options = parser.parse_intermixed_args(arguments)
    folder = options.folder / "benchmark_export"
    folder.mkdir(parents=True)
    try:
        # In a process of its own: what this one has had in memory counts as its children's peak.
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(options.overrides, folder))
        maker.start()
        maker.join()
        if maker.exitcode:
            return 2
        out = folder / options.format
        measure("export", f"export_{options.format}.py", folder / "checkpoint", out, "--no-tokenizer")
        if options.back:
            shutil.rmtree(folder / "checkpoint")
            measure("import", f"import_{options.format}.py", out, folder / "back")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def make(overrides: list[str], folder: Path) -> None:
    """The checkpoint, `checkpoint` under `folder`."""
    config = compose_config(overrides, CONFIGS)
    total = parameter_count(config.model).total
    sections = architecture_of(config.model).sections(config.model)
    write_weights_only(folder / "checkpoint", config, holes(sections, folder), imported={})
    dig(folder / "checkpoint")
    print(f"{config.model.name}: {total:,} parameters, masters {4 * total / 2**30:.1f} GiB", flush=True)


def holes(sections: dict, folder: Path) -> Iterator[NewTensor]:
    """The parameters, of zeros; each file that is complete loses its blocks before the next one is made."""
    for name, parts in sections.items():
        shape = tuple(shape_of(parts))
        yield NewTensor(name, shape, lambda shape=shape: torch.zeros(shape))  # type: ignore[misc]
        for path in list(folder.glob("*.tmp")):
            dig(path)


def dig(folder: Path) -> None:
    """Give back the room that zeros take in the files of a folder."""
    for path in folder.glob("*.distcp"):
        subprocess.run(["fallocate", "--dig-holes", path], check=True)


def measure(what: str, script: str, *arguments: str | Path) -> None:
    """Run a command of this folder and print what it took."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)  # of this process, not of all children so far
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    peak = usage.ru_maxrss / 2**20
    print(f"{what}: {time.monotonic() - began:.0f} s, peak memory {peak:.2f} GiB; {output.splitlines()[0]}", flush=True)


if __name__ == "__main__":
    end_without_reader()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    sys.exit(main(sys.argv[1:]))
