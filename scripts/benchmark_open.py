"""What it costs to open data of any number of documents, and to read samples from it, cold and warm.

    python scripts/benchmark_open.py --folder /local/disk --documents 1_000_000_000     # needs 20 bytes a document
    python scripts/benchmark_open.py --folder /local/disk --files 10_000                # thousands of prefixes

Makes a dataset in the folder, opens it in a process of its own, with and without the operating system's cache, and
removes it. The index is real; the tokens are a file with holes, but for the first --gib GiB, which samples are read
from. `read` is what came from the disk (read_bytes of /proc/self/io).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from data.index_file import HEADER, MAGIC, VERSION
from data.indexed_dataset import IndexedDataset, index_path, tokens_path

_BLOCK = 1 << 22  # documents, or tokens, made at once
_DTYPE_CODE, _ITEM_SIZE = 8, 2  # uint16


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--documents", type=int, default=1_000_000, help="in each file (default: %(default)s)")
    parser.add_argument("--files", type=int, default=1, help="pairs of files, one source (default: %(default)s)")
    parser.add_argument("--gib", type=float, default=1.0, help="of tokens on the disk (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="tokens in a sample (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=2000, help="read for a measurement (default: %(default)s)")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)  # the process that is measured
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.length, options.samples, options.gib)))
        return 0
    if options.documents < 1 or options.files < 1:
        print("benchmark_open.py: --documents and --files start at 1", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        prefixes = [f"{folder}/part_{i:05d}" for i in range(options.files)]
        for seed, prefix in enumerate(prefixes):
            make_dataset(Path(prefix), options.documents, seed, options.gib / options.files)
        for state in ("cold", "warm"):
            if state == "cold":
                for prefix in prefixes:
                    forget(index_path(prefix))
                    forget(tokens_path(prefix))
            command = [sys.executable, __file__, "--length", str(options.length), "--samples", str(options.samples)]
            command += ["--gib", str(options.gib), "--measure", f"{folder}/part_*"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            for name, value in json.loads(done.stdout).items():
                print(f"{state}  {name:44s} {value}")
    return 0


def make_dataset(prefix: Path, documents: int, seed: int, gib: float) -> None:
    """A pair of files of so many documents, 1 to 1999 tokens each, in blocks; tokens in the first `gib` GiB only."""
    starts = HEADER.size + documents * np.array([0, 4, 12])
    rng, position = np.random.default_rng(seed), 0
    with open(index_path(prefix), "wb") as lengths, open(index_path(prefix), "r+b") as pointers:
        lengths.write(HEADER.pack(MAGIC, VERSION, _DTYPE_CODE, documents, documents + 1))
        lengths.flush()
        pointers.seek(starts[1])
        with open(index_path(prefix), "r+b") as index:
            index.seek(starts[2])
            for first in range(0, documents, _BLOCK):
                block = rng.integers(1, 2000, min(_BLOCK, documents - first), dtype=np.int32)
                ends = position + np.cumsum(block, dtype=np.int64)
                lengths.write(block.tobytes())
                pointers.write(((ends - block) * _ITEM_SIZE).tobytes())
                index.write(np.arange(first, first + len(block), dtype=np.int64).tobytes())
                position = int(ends[-1])
            index.write(np.int64(documents).tobytes())
    with open(tokens_path(prefix), "wb") as file:
        left = min(position, int(gib * 2**30) // _ITEM_SIZE)
        while left:
            block = rng.integers(0, 60000, min(left, _BLOCK), dtype=np.uint16)
            file.write(block.tobytes())
            left -= len(block)
        file.truncate(position * _ITEM_SIZE)


def forget(path: Path) -> None:
    """Have the operating system drop what it keeps of a file in memory."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
