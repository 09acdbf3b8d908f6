"""What recipes cost, with error bars: groups of runs, each run against the base run of the same seed.

    python scripts/compare_recipes.py bf16=runs/bf16_seed1,runs/bf16_seed2 \\
        nvfp4=runs/nvfp4_seed1,runs/nvfp4_seed2 mxfp4=runs/mxfp4_seed1 --output gap.png

The first group is the base. Prints a Markdown table by tokens trained on: the base's held-out loss and its standard
deviation over seeds, and the mean gap of each other group with its standard error (and how many pairs); draws the gaps.
A run that is not finished counts as far as it got.
"""

from __future__ import annotations

import argparse
import sys

from megatron_fp4.report.paired import draw, read_held_out, table


def main() -> None:
    """Compare the groups named on the command line; exit code 2, with a line on stderr, if they cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="NAME=RUN,RUN,...", help="a recipe and the folders of its runs")
    parser.add_argument("--output", help="where to draw the picture (default: nowhere)")
    options = parser.parse_args()
    try:
        groups = {}
        for group in options.groups:
            name, equals, folders = group.partition("=")
            if not (name and equals and folders) or name in groups:
                raise ValueError(f"{group}: write each group once, as NAME=RUN,RUN,...")
            groups[name] = [read_held_out(folder) for folder in folders.split(",")]
        if len(groups) < 2:
            raise ValueError("name two groups at least, the base first")
        print(table(groups))
        if options.output:
            print(draw(groups, options.output))
    except (OSError, ValueError) as error:
        print(f"compare_recipes.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
