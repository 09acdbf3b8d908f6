"""Measure how fast scripts/prepare_data.py makes tokens of text, in MB/s and tokens/s.

    python scripts/benchmark_prepare.py            # the Python sources of the installed packages
    python scripts/benchmark_prepare.py --files 'corpus/*.jsonl' --tokenizer tokenizer.json --workers 8

Without --files the text is every .py file below the folder of installed packages, up to --megabytes, as JSON Lines.
Without --tokenizer a byte-level BPE of --vocab-size ids is trained on it first, which is not measured. The command
runs as its user starts it, the start of its processes included; what it wrote is removed. On a machine that does other
things as well, the seconds of CPU tell more than the time.

Exit codes: 0 done; 2 the command or its input is wrong, in one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from data.prepare.ingest import Options, train_on
from data.prepare.inputs import find_files, open_files
from megatron_fp4.runtime.closed_pipe import end_without_reader
from scripts import prepare_data


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--files", nargs="+", metavar="PATTERN", help="JSON Lines to read")
    add("--megabytes", type=int, default=200, help="of Python sources, without --files (default 200)")
    add("--tokenizer", help="what to tokenize with (default: trained first)")
    add("--vocab-size", type=int, default=32768, help="of the one that is trained (default 32768)")
    add("--workers", type=int, help="processes that tokenize (default: all cores)")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark_prepare-") as folder:
            print(measure(Path(folder), options))
    except (ValueError, OSError) as error:
        print(f"benchmark_prepare.py: {error}", file=sys.stderr)
        return 2
    return 0


def measure(folder: Path, options: argparse.Namespace) -> str:
    """Prepare the text in the folder; a line of what it took."""
    files = find_files(options.files) if options.files else [collect(folder / "text.jsonl", options.megabytes)]
    tokenizer = options.tokenizer
    if tokenizer is None:
        tokenizer = str(folder / "tokenizer.json")
        train_on(open_files("json", files), options.vocab_size, Options()).save(tokenizer)
    output = folder / "out"
    command = ["--format", "json", "--files", *map(str, files), "--output", str(output), "--tokenizer", tokenizer]
    workers = options.workers or len(os.sched_getaffinity(0))
    before = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        code = prepare_data.main([*command, "--workers", str(workers)])
    seconds = time.perf_counter() - start
    spent = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) - before
    if code != 0:
        raise ValueError("prepare_data.py failed, as it said above")
    pairs = [json.loads(path.read_bytes()) for path in (Path(f"{output}.json"), Path(f"{output}_validation.json"))]
    size, tokens = (sum(pair[key] for pair in pairs) for key in ("text_bytes", "tokens"))
    return (
        f"{size / 1e6:.1f} MB of text, {tokens:,} tokens, {workers} workers: {seconds:.1f} s, "
        f"{size / 1e6 / seconds:.1f} MB/s, {tokens / seconds / 1e6:.2f}M tokens/s; {spent:.1f} s of CPU"
    )


def collect(path: Path, megabytes: int) -> Path:
    """Write the Python sources of the installed packages as JSON Lines, so many megabytes at most."""
    left = megabytes * 1_000_000
    with path.open("w", encoding="utf-8") as lines:
        for file in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                lines.write(json.dumps({"text": text}) + "\n")
                left -= len(text)
            if left <= 0:
                break
    return path


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
