"""Check datasets in Megatron's format from end to end: every entry of the index, every token id, the facts beside them.

    python scripts/check_data.py /data/web
    python scripts/check_data.py '/data/web_*' list.yaml s3://bucket/code --vocab-size 32768

Opening a dataset for training checks its sizes, its ends and evenly spaced blocks; this reads all of it, in blocks, at
the speed of the disk. One line for each dataset. What names them is what `data.sources` takes.

Exit codes: 0 all is well; 2 something is wrong with one or more of them, whose line on stderr has the first place.
"""

from __future__ import annotations

import argparse
import sys
import time

from data.indexed import check_whole
from data.sources import prefixes
from megatron_fp4.runtime.closed_pipe import end_without_reader


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for each dataset with a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="a prefix, 'pattern', URL or .yaml list")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="refuse ids of N and above")
    options = parser.parse_args(arguments)
    code = 0
    try:
        found = prefixes("PREFIX", options.prefixes)
    except (ValueError, OSError) as error:
        print(f"check_data.py: {error}", file=sys.stderr, flush=True)
        return 2
    for prefix in dict.fromkeys(found):
        try:
            checked = check_whole(prefix, options.vocab_size, _Progress(prefix))
        except (ValueError, OSError) as error:
            print(f"check_data.py: {error}", file=sys.stderr, flush=True)
            code = 2
        else:
            print(f"{prefix}: {checked}", flush=True)
    return code


class _Progress:
    """A line on a terminal's stderr now and then; where nobody looks, nothing."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._last = time.monotonic()

    def __call__(self, share: float) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._last > 1.0:
            self._last = time.monotonic()
            print(f"\r{self._prefix}: {share:.0%}", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
