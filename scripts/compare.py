"""Compare runs and recipes; every gap has a 95% interval, or the table says that there is none.

    python scripts/compare.py runs BF16=runs/bf16 "NVFP4 with switch=runs/nvfp4" --output gap.png
        runs beside the first: last losses, gaps, throughput
    python scripts/compare.py recipes 'bf16=runs/bf16_seed*' 'nvfp4=runs/nvfp4_seed*' mxfp4=runs/mxfp4_seed1
        groups of runs over several seeds or branches, each run against the base run of the same start and seeds
    python scripts/compare.py try runs/mine/checkpoints/step_00000600 --steps 60 bf16 nvfp4 \\
        "no RHT=precision=nvfp4 precision.wgrad.rht=0" --output tried_1.json
        some steps of each recipe from one checkpoint: what to look at before a long run (also with torchrun)
    python scripts/compare.py starts tried_1.json tried_2.json tried_3.json
        the same over several checkpoints

The first run, group or recipe is the base. Exit code: 0; 2 for wrong arguments, or what cannot be compared; 4 if `try`
finds kernels that compute something else than they should.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_fp4.runtime.closed_pipe import end_without_reader

TRY = """Train some steps of each recipe from one checkpoint.

Every recipe begins with the checkpoint's weights, moments and step, and reads the tokens that its run would read next,
at its run's learning rates; it trains as `pretrain.py checkpoint.resume=CHECKPOINT` would, to the last bit. Nothing is
written into the run's folder. A recipe is the name of a precision config or NAME=OVERRIDES (overrides separated as in a
shell; without `precision=` they change the run's own recipe). KEY=VALUE with a key of the configuration is for all of
them. The precision does not switch, unless a recipe says `precision.switch.when`. With --output results are kept after
each recipe, and the same command resumes with those that are missing."""
RECIPES = """Groups of runs over several seeds or branches.

Runs from scratch are paired by run.seed and data.seed, branches by the bits of the checkpoint that they began from and
data.seed. A branch without such a partner has its trunk, the run whose checkpoint it began from, or the partners of its
trunk, if that is in any of the groups. A run that is not finished counts as far as it got, and not at the end. Losses
are the mean of the held-out sources, each weighed alike."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("runs", help="runs beside the first")
    runs.add_argument("run", nargs="+", metavar="[NAME=]FOLDER")
    recipes = commands.add_parser("recipes", help="groups of runs", description=RECIPES, formatter_class=style)
    recipes.add_argument("groups", nargs="+", metavar="NAME=RUN,RUN,...", help="a recipe and its folders or patterns")
    starts = commands.add_parser("starts", help="files that `try --output` has written")
    starts.add_argument("files", nargs="+", type=Path, metavar="FILE")
    starts.add_argument("--base", metavar="NAME", help="the recipe to compare with (default: the first)")
    trial = commands.add_parser("try", help="recipes from a checkpoint", description=TRY, formatter_class=style)
    trial.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run: its newest one")
    trial.add_argument("recipes", nargs="+", metavar="RECIPE", help="a precision config, NAME=OVERRIDES, or KEY=VALUE")
    trial.add_argument("--steps", type=int, default=60, help="of each recipe (default 60)")
    trial.add_argument("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    trial.add_argument("--validate", action="store_true", help="also the held-out loss after the last step")
    trial.add_argument("--output", type=Path, help="JSON file to keep results in (default: none)")
    for each in (runs, recipes):
        each.add_argument("--output", type=Path, help="where to draw the gaps, of recipes those at the end")
        each.add_argument(
            "--sources", type=lambda names: names.split(","), default=[], metavar="NAME,NAME,...",
            help="the held-out sources that count, each alike (default: all)",
        )  # fmt: skip
    for each in (starts, trial):
        each.add_argument("--picture", type=Path, help="where to draw the gaps (default: nowhere)")
        each.add_argument("--skip", type=int, help="first steps that do not count (default: a sixth, at most 10)")
    for each in (recipes, starts, trial):
        each.add_argument("--against", metavar="NAME", help="another base for a second column (default: the second)")
    if arguments[:1] == ["try"]:  # recipes may stand between options
        return trial.parse_intermixed_args(arguments[1:], argparse.Namespace(command="try"))
    return parser.parse_args(arguments)


def compare_runs(options: argparse.Namespace) -> None:
    """The command `runs`."""
    from analysis.runs import compare_runs, draw_runs
    from megatron_fp4.logging.run_folder import open_runs

    if len(options.run) < 2:
        raise ValueError(f"{options.run[0]} has nothing to be compared with; name two runs or more")
    runs = open_runs(options.run)
    print(compare_runs(runs, options.sources))
    if options.output:
        print(draw_runs(runs, options.output))


def compare_recipes(options: argparse.Namespace) -> None:
    """The command `recipes`."""
    from analysis.recipes import draw_at_the_end, read_groups, recipes_tables

    groups = read_groups(options.groups, options.sources)
    against = options.against or (list(groups)[1] if len(groups) > 2 else None)
    print(recipes_tables(groups, against))
    if options.output:
        print(draw_at_the_end(groups, options.output, against))


def compare_starts(options: argparse.Namespace) -> None:
    """The command `starts`."""
    from analysis.trials import draw_starts, first_steps, read_starts, starts_table

    starts = read_starts(options.files)
    names, steps = list(starts[0].trials), int(starts[0].made_from["number of steps"])
    base, against = options.base or names[0], options.against or (names[1] if len(names) > 2 else None)
    skip = first_steps(steps) if options.skip is None else options.skip
    if not 0 <= skip < steps:
        raise ValueError(f"--skip {skip}: at least one of {steps} steps must count")
    found = starts, base, None if against == base else against, skip
    print(starts_table(*found))
    if options.picture:
        print(draw_starts(*found, options.picture))


def try_recipes(options: argparse.Namespace) -> int:
    """The command `try`, on every rank; returns the exit code."""
    from analysis.trying import try_recipes
    from megatron_fp4.checkpoint.files import DamagedCheckpointError
    from megatron_fp4.checkpoint.sync import CheckpointError
    from megatron_fp4.config.checks import place_in_run
    from megatron_fp4.parallel.mesh import leave_distributed
    from megatron_fp4.precision.verify import SelfTestError
    from megatron_fp4.runtime.errors import ExitCode, error_line
    from pretrain import CONFIGS

    try:
        try_recipes(options, CONFIGS)
        return ExitCode.FINISHED
    except (ValueError, OSError, DamagedCheckpointError, CheckpointError, SelfTestError) as error:
        if not place_in_run().rank:
            print(f"compare.py: {error_line(error, options.output)}", file=sys.stderr, flush=True)
        return ExitCode.WRONG_NUMBERS if isinstance(error, SelfTestError) else ExitCode.REFUSED
    finally:
        leave_distributed()


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    picture = options.picture if options.command in ("try", "starts") else options.output
    try:
        from megatron_fp4.logging.pictures import check_target

        if picture is not None:
            check_target(picture)
        if options.command == "try":
            return try_recipes(options)
        {"runs": compare_runs, "recipes": compare_recipes, "starts": compare_starts}[options.command](options)
    except (OSError, ValueError, ImportError) as error:
        from megatron_fp4.runtime.errors import error_line

        print(f"compare.py: {error_line(error, picture)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
