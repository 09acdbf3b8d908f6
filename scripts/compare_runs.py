"""Runs beside each other, the first being what the others are held against.

    python scripts/compare_runs.py BF16=runs/bf16 "NVFP4 with switch=runs/nvfp4" --output gap.png

A folder alone goes by its own name. Prints a Markdown table of last losses (of the last 2% of the steps, and of the
last validation), their gaps in percent and throughput; draws losses and gaps over steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from analysis.held_out import add_sources
from megatron_fp4.logging.comparison import comparison_rows, comparison_table, plot_comparison, read_runs
from megatron_fp4.logging.picture import check_target
from megatron_fp4.runtime.closed_pipe import end_without_reader


def main() -> None:
    """Compare the runs named on the command line; exit code 2, with a line on stderr, if they cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", nargs="+", metavar="[NAME=]FOLDER", help="runs; the first is what the others are held against"
    )
    parser.add_argument("--output", type=Path, help="where to draw the picture (default: nowhere)")
    add_sources(parser)
    options = parser.parse_args()
    try:
        if options.output:
            check_target(options.output)
        if len(options.run) < 2:
            raise ValueError(f"{options.run[0]} has nothing to be held against; name two runs or more")
        runs = read_runs(options.run, options.sources)
        print(comparison_table(comparison_rows(runs)))
        if options.output:
            print(plot_comparison(runs, options.output))
    except (OSError, ValueError) as error:
        print(f"compare_runs.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    end_without_reader()
    main()
