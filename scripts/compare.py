"""Compare runs and recipes. Every gap has a 95% interval, or the table says that there is none.

    python scripts/compare.py runs BF16=runs/bf16 "NVFP4 with switch=runs/nvfp4" --output gap.png
        compares runs with the first one: last losses, gaps, throughput
    python scripts/compare.py recipes 'bf16=runs/bf16_seed*' 'nvfp4=runs/nvfp4_seed*' mxfp4=runs/mxfp4_seed1
        compares groups of runs over several seeds or branches, each run with the base run of the same start and seeds

The first run or group is the base. For the cost of recipes in tokens and time, from a checkpoint, see scripts/price.py.
Exit code: 0; 2 for wrong arguments, or runs that cannot be compared.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import sys
from pathlib import Path

RECIPES = """Compare groups of runs over several seeds or branches.

Runs from scratch are paired by run.seed and data.seed; branches by the content of the checkpoint that they began from
and by data.seed. The run whose checkpoint a branch began from is its trunk. A branch without a partner is paired with
its trunk or the partners of its trunk, if the trunk is in one of the groups. A run from scratch without a partner is
paired with a branch of the base that has the same length and whose trunk has the same seeds. An unfinished run counts
up to its last validation, but not at the end. Losses are the unweighted mean over the held-out sources."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("runs", help="compare runs with the first one")
    runs.add_argument("run", nargs="+", metavar="[NAME=]FOLDER")
    recipes = commands.add_parser("recipes", help="compare groups of runs", description=RECIPES, formatter_class=style)
    recipes.add_argument("groups", nargs="+", metavar="NAME=RUN,RUN,...", help="a recipe and its folders or patterns")
    for each in (runs, recipes):
        each.add_argument("--output", type=Path, help="picture of the gaps to draw (of recipes: the gaps at the end)")
    recipes.add_argument("--against", metavar="NAME", help="second base (default: the second of three or more groups)")
    recipes.add_argument(
        "--curve", nargs="+", metavar="RUN",
        help="finished base runs of at least four lengths: show gaps at the end also as tokens for the base's loss",
    )  # fmt: skip
    recipes.add_argument("--gpu", help="with --curve: also the cost, tokens times planned time, on a GPU such as b200")
    options = parser.parse_args(arguments)
    if options.command == "recipes" and options.gpu and not options.curve:
        parser.error("--gpu is for the cost of tokens and needs --curve")
    return options


def compare_runs(options: argparse.Namespace) -> int:
    """The command `runs`; returns the exit code."""
    from analysis.runs import compare_runs, draw_runs
    from megatron_fp4.logging.run_folder import open_runs

    if len(options.run) < 2:
        raise ValueError(f"there is nothing to compare {options.run[0]} with; name two runs or more")
    runs = open_runs(options.run)
    print(compare_runs(runs))
    if options.output:
        print(draw_runs(runs, options.output))
    return 0


def compare_recipes(options: argparse.Namespace) -> int:
    """The command `recipes`; returns the exit code."""
    from analysis.price import planned_times
    from analysis.recipes import (
        configs_of,
        curve_of,
        draw_at_the_end,
        of_another_curve,
        read_groups,
        read_held_out,
        recipes_tables,
    )
    from pretrain import CONFIGS

    groups = read_groups(options.groups)
    against = options.against or (list(groups)[1] if len(groups) > 2 else None)
    curve = None
    if options.curve is not None:
        runs = [read_held_out(Path(run)) for run in options.curve]
        name, base = next(iter(groups.items()))
        curve = curve_of(runs, 1e6, base)
        if line := of_another_curve(runs, base[0].settings, f"{name}'s"):
            print(line)
    times = None if options.gpu is None else planned_times(options.gpu, configs_of(groups, CONFIGS))
    print(recipes_tables(groups, against, curve, times))
    if options.output:
        print(draw_at_the_end(groups, options.output, against))
    return 0


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    from megatron_fp4.logging.pictures import check_target
    from megatron_fp4.runtime.errors import run_command

    def compare() -> int:
        if options.output is not None:
            check_target(options.output)
        return {"runs": compare_runs, "recipes": compare_recipes}[options.command](options)

    return run_command("compare.py", compare, options.output, (OSError, ValueError, ImportError))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
