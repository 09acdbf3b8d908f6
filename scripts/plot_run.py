"""Draw a run: `python scripts/plot_run.py runs/default` writes runs/default/loss.png and, if the run measured what
quantization does to it (precision.diagnostics.interval), runs/default/diagnostics.png."""

from __future__ import annotations

import argparse
import sys

from megatron_fp4.report.heatmap import plot_heatmap
from megatron_fp4.report.plot import plot_loss


def main() -> None:
    """Plot every run named on the command line; exit code 2, with a line on stderr, if one cannot be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", nargs="+", help="folder of a run, with its metrics.jsonl")
    for run_dir in parser.parse_args().run_dir:
        try:
            print(plot_loss(run_dir))
            if (heatmap := plot_heatmap(run_dir)) is not None:
                print(heatmap)
        except (FileNotFoundError, ValueError) as error:
            print(error, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
