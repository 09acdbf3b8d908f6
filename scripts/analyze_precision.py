"""Find the linears with the largest quantization errors, and write a plan file that keeps them in BF16.

    python scripts/analyze_precision.py runs/8b/checkpoints/step_00002000 --budget 0.15 --output plan.yaml
    python pretrain.py ... precision.bf16_blocks.first=0 precision.bf16_blocks.last=0 \\
        precision.bf16_blocks.file=plan.yaml

The checkpoint's model runs forward and backward on a few micro-batches of its own run's data, with *every* linear
quantized by the run's recipe. The result of each GEMM is compared with the unquantized GEMM of the same inputs (see
megatron_fp4/measure/diagnostics.py). Weights are not updated, and only the plan is written. `key=value` changes the
run's configuration: `precision=nvfp4` for the checkpoint of a BF16 run, `parallel.tensor=1` to analyze it in one
process. Under torchrun every data-parallel rank measures its own micro-batches.

`--sections` ranks the sections of packed projections, such as the z rows of in_proj, each as a linear of its own.

By default linears are ranked by the error of fprop, which finds those that cost a hybrid of 30M most (docs/research.md,
"What removes half of it?"). `--gemm wgrad` ranks by the error of the weight gradient, which is largest in the last
layers according to the paper (appendix E.2).
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from data import provider as data
from megatron_fp4.checkpoint.files import Manifest, checkpoint_in, read_manifest, read_trainer
from megatron_fp4.checkpoint.sync import CheckpointError
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.precision_schema import Bf16BlocksConfig, ComposedException, RecipeConfig
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.files import check_place
from megatron_fp4.measure.diagnostics import LinearMeasurement, Probe
from megatron_fp4.precision.plan import LinearShape
from megatron_fp4.precision.recipe import GEMMS, recipe_from_config
from megatron_fp4.runtime.errors import run_command
from megatron_fp4.training.build import check, join_ranks, plans_of
from megatron_fp4.training.step import ALONE, accumulate
from megatron_fp4.training.trainer import Trainer
from models import provider as models
from pretrain import CONFIGS


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 after an error of the user, with a line on stderr."""
    options = parse(arguments)
    refusals = (ValueError, OSError, CheckpointError)
    return run_command("analyze_precision.py", lambda: analyze(options), options.output, refusals)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run (its newest checkpoint)")
    parser.add_argument("overrides", nargs="*", help="key=value: changes of the run's configuration")
    parser.add_argument("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    parser.add_argument("--budget", type=float, default=0.15, help="share of linears to keep in BF16 (default 0.15)")
    parser.add_argument("--gemm", choices=GEMMS, default="fprop", help="rank by the error of this GEMM (default fprop)")
    parser.add_argument("--sections", action="store_true", help="rank sections of packed projections by themselves")
    parser.add_argument("--micro-batches", type=int, default=4, help="to measure on every rank (default 4)")
    parser.add_argument("--output", type=Path, default=Path("plan.yaml"), help="the plan to write (default plan.yaml)")
    return parser.parse_intermixed_args(arguments)


def analyze(options: argparse.Namespace) -> int:
    """Measure, rank, select, print, write."""
    if options.micro_batches < 1:
        raise ConfigError(f"--micro-batches {options.micro_batches}: give 1 or more")
    check_place(options.output)
    checkpoint = checkpoint_in(options.checkpoint)
    manifest = read_manifest(checkpoint)
    config = analysis_config(checkpoint, manifest, options.overrides, options.trust_config, options.sections)
    shapes = [row.linear for row in plans_of(config, models)[0].rows]
    kept = number_in_bf16(len(shapes), options.budget)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    check(config, models, data, int(os.environ.get("WORLD_SIZE", 1)), device_type)
    run = Trainer(config, models, data, [], join_ranks(config, models), quiet=True)
    run.checkpointer.initialize(
        str(checkpoint), run.model, run.precision.step_state, resumed=False, allow_mismatch=True
    )
    found, measured = measure(run, manifest.step, options.micro_batches)
    errors = {name: one.errors for name, one in found.items()}
    ranked = rank_linears(shapes, errors, options.gemm)
    if run.mesh.rank == 0:
        print(table(ranked, kept, errors))
        facts = {
            "checkpoint": str(checkpoint),
            "step": manifest.step,
            "recipe": config.precision.name,
            "ranked_by": options.gemm,
            "budget": options.budget,
            "micro_batches": measured * run.mesh.batch.size,
        }
        options.output.write_text(plan_file(ranked, kept, errors, facts))
        print(f"{kept} of {len(ranked)} linears stay in BF16: {options.output}")
    return 0


def analysis_config(
    checkpoint: Path, manifest: Manifest, overrides: list[str], trusted: bool, sections: bool
) -> Config:
    """The run's configuration with every linear quantized, and without a precision switch. sections: whether sections
    are linears of their own. Raises ConfigError if the recipe quantizes nothing."""
    saved = read_trainer(checkpoint, manifest)["config"]
    config = config_from_saved(saved, [*overrides, "precision.switch.when=never"], CONFIGS, trusted=trusted)
    if not recipe_from_config(config.precision).quantized:
        raise ConfigError(
            f"the run of {checkpoint} quantizes nothing (precision={config.precision.name}), so there is nothing to "
            "measure; name a recipe, such as precision=nvfp4"
        )
    recipe = RecipeConfig(**{field.name: getattr(config.precision, field.name) for field in fields(RecipeConfig)})
    names = dict.fromkeys(name for shape in models.linear_shapes(config.model) for name, _ in shape.sections)
    # With the run's own recipe: an exception is what makes its sections a linear.
    parts = (ComposedException(sections=[name], precision=recipe.name, recipe=recipe) for name in names if sections)
    precision = replace(config.precision, bf16_blocks=Bf16BlocksConfig(), exceptions=[*parts])
    return replace(config, precision=precision)


def measure(run: Trainer, start: int, count: int) -> tuple[dict[str, LinearMeasurement], int]:
    """The errors of all linears over `count` micro-batches of this rank, and how many were measured (fewer if the run
    has fewer). It uses the micro-batches after step `start`, or the last ones of a finished run."""
    steps = run.config.train.steps
    least = min(run.data.loader.num_micro_batches(span.first_step) for span in run.data.phases.spans)
    num_steps = min(steps, -(-count // least))
    start = min(start, steps - num_steps)  # a finished run has no data left, so use its last steps
    left = count
    probe = Probe(once=False)
    with probe.attached(run.precision.linears):
        for step, micro_batches in enumerate(run.data.loader.steps(start, start + num_steps), start=start):
            run.precision.step_state.step = step
            for micro_batch in micro_batches[:left]:
                accumulate(run.model, [micro_batch], run.mesh, run.precision.step_state, global_batch=ALONE)
                for parameter in run.model.parameters():
                    parameter.grad = None
                left -= 1
    return probe.collect(list(run.precision.linears)), count - left


# ------------------------------------------------------------------------------------------------- ranking and choosing


Errors = Mapping[str, Mapping[str, float]]  # linear -> GEMM -> relative error of its result


def rank_linears(linears: Iterable[LinearShape], errors: Errors, gemm: str) -> list[LinearShape]:
    """The linears by the error of `gemm`, the worst first (NaN is the worst); with equal errors in the given order.

    Raises ValueError for a linear without measurements, or a GEMM without measurements.
    """
    shapes = list(linears)
    if missing := [shape.name for shape in shapes if shape.name not in errors]:
        raise ValueError(f"nothing was measured for {missing[0]} ({len(missing)} linears in all); is it ever used?")
    if not any(gemm in errors[shape.name] for shape in shapes):
        raise ValueError(f"--gemm {gemm}: the recipe quantizes no operand of {gemm}; choose another GEMM or recipe")
    scores = {name: math.inf if math.isnan(of.get(gemm, 0.0)) else of.get(gemm, 0.0) for name, of in errors.items()}
    return sorted(shapes, key=lambda shape: scores[shape.name], reverse=True)


def number_in_bf16(count: int, budget: float) -> int:
    """How many of `count` linears stay in BF16 with `budget`, their largest share. Raises ValueError for a budget that
    is no share, or that keeps none."""
    if not 0 < budget < 1:
        raise ValueError(f"--budget {budget} is not a share; give a number above 0 and below 1, such as 0.15")
    # A product such as 0.15 * 20 may be slightly smaller than the integer that it should be.
    kept = math.floor(budget * count * (1 + 1e-12))
    if not kept:
        smallest = math.ceil(1e4 / count) / 1e4
        raise ValueError(f"--budget {budget} of {count} linears keeps none in BF16; the smallest is {smallest}")
    return kept


def plan_file(ranked: Sequence[LinearShape], kept: int, errors: Errors, facts: Mapping[str, Any]) -> str:
    """The text of a plan file for `precision.bf16_blocks.file` that keeps the first `kept` linears in BF16.

    A run reads only the list `bf16`. `selection` (`facts` and the shares) and `measured` (all linears, the worst first)
    are for readers.
    """
    chosen = sorted(ranked[:kept], key=lambda shape: (shape.block, shape.name))
    shares = {
        "linears_kept": f"{kept} of {len(ranked)}",
        "share_of_linears": round(kept / len(ranked), 4),
        "share_of_flops": round(sum(shape.parameters for shape in chosen) / sum(s.parameters for s in ranked), 4),
    }
    measured = {
        shape.name: {"kept": i < kept, **{gemm: float(f"{error:.4g}") for gemm, error in errors[shape.name].items()}}
        for i, shape in enumerate(ranked)
    }
    content = {"bf16": [shape.name for shape in chosen], "selection": {**facts, **shares}, "measured": measured}
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=False, width=120)


def table(ranked: Sequence[LinearShape], kept: int, errors: Errors) -> str:
    """A table of the linears with their errors, the worst first; the first `kept` stay in BF16."""
    width, total = max(len(shape.name) for shape in ranked), sum(shape.parameters for shape in ranked)
    lines = [f"{'linear':<{width}}   fprop   dgrad   wgrad   {'FLOPs':>6}"]
    for i, shape in enumerate(ranked):
        of = errors[shape.name]
        shown = "  ".join(f"{of[gemm]:.4f}" if gemm in of else "     -" for gemm in GEMMS)
        mark = "BF16" if i < kept else ""
        lines.append(f"{shape.name:<{width}}  {shown}   {shape.parameters / total:>6.1%}  {mark}".rstrip())
    lines.append("fprop, dgrad, wgrad: relative error of the result; FLOPs: share of the FLOPs of all linears")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
