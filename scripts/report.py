"""Write the HTML page of one or several runs, which needs no network; and pictures of their losses.

    python scripts/report.py runs/nvfp4                            writes runs/nvfp4/report.html
    python scripts/report.py runs/nvfp4 --baseline BF16=runs/bf16  with the gap to another run
    python scripts/report.py BF16=runs/bf16 NVFP4=runs/nvfp4 --output gap.html
    python scripts/report.py runs/nvfp4 --pictures                 also writes loss.png

Runs may be unfinished or from older versions; values that they did not record are shown as unknown.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import sys

import yaml

from megatron_fp4.config.compose import compose_config, to_yaml
from megatron_fp4.logging.page import write_report
from megatron_fp4.logging.pictures import plot_loss
from megatron_fp4.logging.run_folder import named_run
from megatron_fp4.runtime.errors import run_command
from pretrain import CONFIGS


def main(arguments: list[str]) -> int:
    """Write the page; returns the exit code: 0, or 2 after an error, with a line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", metavar="[NAME=]FOLDER", help="folders of runs")
    parser.add_argument("--baseline", metavar="[NAME=]FOLDER", help="the run to which gaps are computed")
    parser.add_argument("--output", help="file to write (default: report.html in the folder of a single run)")
    parser.add_argument("--pictures", action="store_true", help="also draw the losses into the runs' folders")
    options = parser.parse_args(arguments)
    return run_command("report.py", lambda: write(options), options.output)


def write(options: argparse.Namespace) -> int:
    """Write the page, and the pictures with --pictures."""
    defaults = yaml.safe_load(to_yaml(compose_config([], CONFIGS)))
    print(write_report(options.run, defaults=defaults, baseline=options.baseline, target=options.output))
    for run in options.run if options.pictures else ():
        print(plot_loss(named_run(run)[1], options.baseline))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
