"""Draw runs into their folders: loss.png; if a run measured what quantization does to it
(precision.diagnostics.interval), diagnostics.png; and if it kept a ledger of its wall time, goodput.png.

    python scripts/plot_run.py runs/default
    python scripts/plot_run.py runs/nvfp4 --baseline BF16=runs/bf16        another run beside it in loss.png
"""

from __future__ import annotations

import argparse
import sys

from megatron_fp4.logging.charts import plot_goodput
from megatron_fp4.logging.heatmap import plot_heatmap
from megatron_fp4.logging.plot import plot_loss
from megatron_fp4.runtime.closed_pipe import end_without_reader


def main() -> None:
    """Plot every run named on the command line; exit code 2, with a line on stderr, if one cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", nargs="+", help="folder of a run, with its metrics.jsonl")
    parser.add_argument("--baseline", metavar="[NAME=]FOLDER", help="a run to draw beside it (default: none)")
    options = parser.parse_args()
    for run_dir in options.run_dir:
        try:
            print(plot_loss(run_dir, options.baseline))
            for picture in (plot_heatmap(run_dir), plot_goodput(run_dir)):
                if picture is not None:
                    print(picture)
        except (FileNotFoundError, ValueError) as error:
            print(error, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    end_without_reader()
    main()
