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
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from data.index_file import HEADER, MAGIC, VERSION
from data.indexed import open_source
from data.indexed_dataset import index_path, tokens_path
from data.source_lists import prefixes
from megatron_fp4.runtime.closed_pipe import end_without_reader

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
    parser.add_argument("--samples", type=int, default=2000, help="to read for a measurement (default: %(default)s)")
    parser.add_argument("--measure", metavar="PATTERN", help=argparse.SUPPRESS)  # the process that is measured
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.length, options.samples, options.gib / options.files)))
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
            command += ["--gib", str(options.gib), "--files", str(options.files), "--measure", f"{folder}/part_*"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            for name, value in json.loads(done.stdout).items():
                print(f"{state}  {name:40s} {value}", flush=True)
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


def measure(pattern: str, length: int, samples: int, gib: float) -> dict[str, str]:
    """What there is to say, by name. gib: how many GiB of each file are on the disk."""
    memory, came, began = _peak_memory(), _read_bytes(), time.perf_counter()
    source = open_source(prefixes("--measure", pattern))
    rows = {
        "open": f"{1e3 * (time.perf_counter() - began):,.1f} ms for {source.num_documents:,} documents in "
        f"{len(source.parts):,} files, read {(_read_bytes() - came) / 1e6:,.1f} MB",
    }
    began, came = time.perf_counter(), _read_bytes()
    source.identity()
    took = 1e3 * (time.perf_counter() - began)
    rows["identity"] = f"{took:,.1f} ms, read {(_read_bytes() - came) / 1e6:,.1f} MB"
    rows["memory of opening, at most"] = f"{_peak_memory() - memory:,.0f} MB above {memory:,.0f} MB before"
    rng, starts, position = np.random.default_rng(0), [], 0
    places = [0, *np.cumsum([part.num_tokens for part in source.parts]).tolist()]
    on_disk = max(1, min(source.parts[0].num_tokens, int(gib * 2**30) // _ITEM_SIZE) - length)
    for part in rng.integers(0, len(source.parts), samples).tolist():
        position = min(places[part] + int(rng.integers(0, on_disk)), source.num_tokens - length)
        starts.append(position)
    for name in ("", ", again"):
        began, came = time.perf_counter(), _read_bytes()
        for start in starts:
            source.tokens(start, length)
        took = (time.perf_counter() - began) / samples
        rows[f"sample of {length} tokens{name}"] = (
            f"{1e6 * took:,.1f} us ({length / took / 1e6:,.0f}M tokens/s), "
            f"{(_read_bytes() - came) / samples / 1024:,.1f} KiB read of {length * _ITEM_SIZE / 1024:,.1f}"
        )
    began = time.perf_counter()
    for document in rng.integers(0, source.num_documents, samples).tolist():
        source.document_offsets(document, document + 1)
    rows["offsets of one document"] = f"{1e6 * (time.perf_counter() - began) / samples:,.1f} us"
    block = min(1 << 20, source.num_documents)
    began = time.perf_counter()
    for first in range(0, min(8 * block, source.num_documents - block + 1), block):
        source.document_offsets(first, first + block)
    took = (time.perf_counter() - began) / min(8, source.num_documents // block)
    rows[f"offsets of {block:,} documents"] = f"{1e3 * took:,.1f} ms ({1e9 * took / block:,.0f} ns a document)"
    return rows


def _peak_memory() -> float:
    """The most memory that this process had, in MB (VmHWM)."""
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1e3


def _read_bytes() -> int:
    """Bytes that this process had read from disks."""
    return int(re.findall(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[0])


def forget(path: Path) -> None:
    """Have the operating system drop what it keeps of a file in memory."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
