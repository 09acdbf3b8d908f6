"""Merge several .bin/.idx pairs into one, in the order given.

    python scripts/merge_data.py --inputs /data/web_0 /data/web_1 '/data/more/*.idx' --output /data/web

The result has the bytes that preparing all of their texts by one command has. It needs no memory to speak of and as
much disk again. data.sources takes a list of pairs too, so a merge is for those who want one file. Nothing is
overwritten, and nothing appears before all is done; pairs of different tokenizers (their .json tells) are refused.

Exit codes: 0 done; 2 an input is missing, damaged or of another kind, or the output exists, in one line on stderr.
"""

from __future__ import annotations

import argparse
import glob
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from data.prepare.merge import merge
from megatron_fp4.runtime.closed_pipe import end_without_reader


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--inputs", nargs="+", required=True, metavar="PREFIX", help="paths without ending, or quoted patterns of .idx")
    add("--output", required=True, type=Path, metavar="PREFIX", help="path of the new .bin and .idx, without ending")
    options = parser.parse_args(arguments)
    try:
        prefixes = find_prefixes(options.inputs)
        count = merge(prefixes, options.output, lambda line: print(line, file=sys.stderr, flush=True))
    except (ValueError, OSError) as error:
        print(f"merge_data.py: {error}", file=sys.stderr)
        return 2
    size = f", {count.text_bytes:,} bytes of text" if count.text_bytes else ""
    print(f"{options.output}: {count.documents:,} documents, {count.tokens:,} tokens{size}, of {len(prefixes)} pairs")
    return 0


def find_prefixes(patterns: Sequence[str]) -> list[str]:
    """The prefixes of all paths and patterns in their order, a pattern's sorted.

    Raises FileNotFoundError for a pattern that nothing matches, ValueError for a pair that comes twice.
    """
    found: list[str] = []
    for pattern in patterns:
        if Path(f"{pattern}.idx").is_file():
            found.append(pattern)
            continue
        names = sorted(glob.glob(pattern if pattern.endswith(".idx") else f"{pattern}.idx", recursive=True))
        if not names:
            raise FileNotFoundError(
                f"no pair matches {pattern!r}; give the path of an .idx, with or without its ending"
            )
        found += [name.removesuffix(".idx") for name in names]
    for path, times in Counter(Path(prefix).resolve() for prefix in found).items():
        if times > 1:
            raise ValueError(f"{path} comes twice; its documents would be in the output twice")
    return found


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
