"""Run the commands of README and docs as their reader would, and compare what they print: `make docs`.

    python tests/docs/run_pages.py                       all pages, minutes on two cores
    python tests/docs/run_pages.py docs/cookbook.md      one

Each page's blocks that are marked `run` are started one after the other, in processes of their own, in a copy of the
checkout that is thrown away, with the overrides that their markers add to make them short. Exit code 1 if a command
ended with another code than it should, or did not print what the page says. The tests do the same with the blocks that
are marked `run ci`, in one process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.docs.blocks import PAGES, blocks  # noqa: E402
from tests.docs.running import Session  # noqa: E402


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages (default: all)")
    options = parser.parse_args(arguments)
    pages = [page.resolve() for page in options.pages] or PAGES
    return 1 if sum(failures(page) for page in pages) else 0


def failures(page: Path) -> int:
    """Run a page's blocks; returns how many failed."""
    found, failed = blocks(page), 0
    if not any(block.kind == "run" for block in found):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder, "checkout"), in_process=False)
        for block, after in zip(found, [*found, None][1:], strict=True):
            if block.kind not in ("run", "setup", "file"):
                continue
            began, said = time.monotonic(), ""
            try:
                session.run(block, after)
            except AssertionError as error:
                said, failed = f"\n{error}", failed + 1
            print(f"{'FAILED' if said else 'ok':6}  {block.name}  {time.monotonic() - began:.0f} s{said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
