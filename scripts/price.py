"""Find out whether 4 bits pay for your model: the cost of recipes in tokens and time, from checkpoints of a BF16 run
or from losses that others published.

    python scripts/price.py --checkpoint runs/bf16/checkpoints/step_00000600 nvfp4 nvfp4_best mxfp8 --gpu b200
        trains sixty steps of BF16 and of each recipe from there; prints the gaps, the tokens that each recipe needs to
        reach BF16's loss, the time per token (planned for --gpu; without it as measured here, unless emulated), and
        which recipe costs least
    python scripts/price.py --checkpoint A/step_00000600 --checkpoint B/step_00000600 nvfp4 --gpu b200 --output b.json
        the same from two checkpoints; saves the branches, so that the same command trains only those that are missing
    python scripts/price.py --checkpoint ... --gpu b200 nvfp4 "no RHT=precision=nvfp4 precision.wgrad.rht=0"
        a recipe is the name of a precision config or NAME=OVERRIDES; KEY=VALUE is for all of them
    python scripts/price.py --public docs/records/public_8b.csv nvfp4 mxfp8 --gpu b200 --model nemotron_h_8b
        trains nothing: prices the losses of a table (analysis/public.py says its form); recipes have planned times

A branch trains bit for bit like `pretrain.py checkpoint.resume=CHECKPOINT`, on the next tokens of the run. The
precision switches only if a recipe says so. Nothing is written to the run's folder. The command can run under torchrun.
Exit code: 0; 2 for wrong arguments or runs that cannot be compared; 4 for kernels that compute wrong results.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from data import provider as data
from megatron_fp4.checkpoint.files import checkpoint_in
from megatron_fp4.checkpoint.sync import CheckpointError
from megatron_fp4.config.checks import place_in_run
from megatron_fp4.config.compose import as_saved, compose_config
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.console import short_number
from megatron_fp4.logging.files import check_place
from megatron_fp4.precision.verify import SelfTestError
from megatron_fp4.runtime.errors import run_command
from megatron_fp4.training.build import backend_of, join_ranks
from models import provider as models
from pretrain import CONFIGS


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("recipes", nargs="*", metavar="RECIPE", help="a precision config, NAME=OVERRIDES, or KEY=VALUE")
    add("--checkpoint", type=Path, action="append", help="of a BF16 run, best after a fifth of it; may be repeated")
    add("--public", type=Path, metavar="TABLE", help="CSV of losses by length and recipe instead of a checkpoint")
    add("--steps", type=int, default=60, help="of each branch (default 60); the first sixth, at most 10, are ignored")
    add("--output", type=Path, help="JSON file to save the branches in (default: none)")
    add("--curve", nargs="+", metavar="RUN", help="finished BF16 runs of four lengths (default: a shipped curve)")
    add("--gpu", help="plan the time per token for this GPU, such as b200 (default: measured here, unless emulated)")
    add("--model", help="plan the time for this model config with the same sequences (default: the checkpoint's)")
    add("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    options = parser.parse_intermixed_args(arguments)
    if bool(options.checkpoint) == bool(options.public):
        parser.error("give --checkpoint or --public")
    if options.model and not options.gpu:
        parser.error("--model plans a time and needs --gpu")
    if options.public and bool(options.gpu and options.model) != bool(options.recipes):
        parser.error("--public: for planned times give --gpu, --model and recipes")
    if options.public and (options.curve or options.output):
        parser.error("--public trains nothing and has its own curves: leave --curve and --output out")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give 14 or more, so that there is an interval")
    return options


def price(options: argparse.Namespace) -> int:
    """Check everything, train the missing branches, print the table. A collective. Returns the exit code."""
    from analysis.branches import BASE, BranchFile, cautions, recipes_from, recipes_of_branches, train_all
    from analysis.price import nearest, price_table
    from analysis.recipes import configs_of, curve_of, of_another_curve, read_held_out
    from analysis.runs import settings_of

    if options.output is not None:
        check_place(options.output)
    checkpoints = [checkpoint_in(folder) for folder in options.checkpoint]
    if len({checkpoint.resolve() for checkpoint in checkpoints}) < len(checkpoints):
        raise ValueError("--checkpoint: one is given twice, which is one start; give each once")
    runs = [checkpoint.resolve().parent for checkpoint in checkpoints]
    if run := next((run for run in runs if run.name == "checkpoints" and runs.count(run) > 1), None):
        raise ValueError(f"--checkpoint: two are of one run, {run.parent}, and are one start; give other runs' too")
    recipes = [recipes_from(options.recipes, of, options.steps, CONFIGS, options.trust_config) for of in checkpoints]
    _check_starts(checkpoints, [of[BASE] for of in recipes])
    config = recipes[0][BASE]
    parameters = _parameters(config)
    tokens = data.phases(config).samples_before(config.train.steps) * config.train.sequence_length / parameters
    of_curve = [read_held_out(Path(run)) for run in options.curve or ()]
    if of_curve:
        curve = curve_of(of_curve, _parameters(configs_of({"curve": of_curve}, CONFIGS)["curve"]))
    else:
        curve = nearest(parameters)
    planned = None if options.gpu is None else _planned(options, recipes[0])

    saved = BranchFile(options.output, writes=not place_in_run().rank)
    mesh = join_ranks(config, models)
    emulated = [name for name, of in recipes[0].items() if name != BASE and backend_of(of, models).name == "emulated"]
    has = f"this model has {short_number(parameters)} parameters"
    doubts = [line for folder in checkpoints for line in cautions(folder, CONFIGS, config.train.steps)]
    if options.model:
        doubts.append(f"{has}, and the times are those of {options.model}")
    if not mesh.rank:
        for line in doubts:
            print(line)
        if not of_curve:
            print(f"no --curve: prices use the curve of {curve.name}; {has}")
        if planned is None and emulated:
            print(f"no --gpu: what is emulated has no time, so no cost: {', '.join(emulated)}")
        print(of_another_curve(of_curve, settings_of(as_saved(config)), "the checkpoint's"), end="", flush=True)
    pairs = zip(recipes, checkpoints, strict=True)
    starts = [train_all(configs, checkpoint, mesh, options.steps, saved) for configs, checkpoint in pairs]
    if mesh.rank:
        return 0
    found = recipes_of_branches(starts)
    if planned is not None:
        found = [replace(recipe, time=planned[recipe.name]) for recipe in found]
        length = f"sequences of {config.train.sequence_length:,} tokens"
        times = f"planned for {options.model or 'this model'} on {options.gpu} with {length}, not measured"
    else:
        found = [replace(recipe, time=None) if recipe.name in emulated else recipe for recipe in found]
        times = "measured here unless emulated"
    print(f"\n{price_table(found, curve, tokens, times, doubts)}")
    return 0


def price_public(options: argparse.Namespace) -> int:
    """Print the prices of the table `--public`; returns the exit code."""
    from analysis.public import public_table

    times = _planned(options, {}) if options.gpu else {}
    print(public_table(options.public, times, f", planned for {options.model} on {options.gpu}"))
    return 0


def _planned(options: argparse.Namespace, recipes: Mapping[str, Config]) -> dict[str, float]:
    """By recipe, the planned time per token on `--gpu` over BF16's, for `--model` or the checkpoint's model."""
    from analysis.branches import named_recipes
    from analysis.price import planned_times

    if options.model:
        shared, named = named_recipes(options.recipes, CONFIGS)
        length = [f"train.sequence_length={of.train.sequence_length}" for of in recipes.values()][:1]
        common = [f"model={options.model}", *length, "precision.switch.when=never", *shared]
        recipes = {name: compose_config([*common, *of], CONFIGS) for name, of in named.items()}
    return planned_times(options.gpu, recipes)


def _parameters(config: Config) -> int:
    count = models.parameter_count(config.model)
    return count.linears + count.other


def _check_starts(checkpoints: Sequence[Path], configs: Sequence[Config]) -> None:
    from analysis.runs import differences, settings_of

    settings = [settings_of(as_saved(config)) for config in configs]
    for checkpoint, of in zip(checkpoints, settings, strict=True):
        if unlike := [key for key in differences(of, settings[0]) if not key.startswith("data.seed")]:
            raise ValueError(f"{checkpoint} is of another kind of run than the first: {', '.join(unlike)}")


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    refusals = (ValueError, OSError, ImportError, CheckpointError, SelfTestError)
    command = price_public if options.public else price
    return run_command("price.py", lambda: command(options), options.output, refusals)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
