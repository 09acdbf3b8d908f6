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

`--health` asks another question and writes nothing: is the run of the checkpoint healthy in 4 bits? With the run's own
plan, on its own next micro-batches, it compares every product with what the recipe specifies, the errors with those of
sound runs, and the loss in 4 bits with that of the same weights in BF16 (analysis/health.py). Exit code: 0 healthy or
not established; 4 worse than usual.
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
import torch.distributed as dist
import yaml
from torch import Tensor

from data import provider as data
from megatron_fp4.checkpoint.files import checkpoint_in, read_manifest, read_trainer
from megatron_fp4.checkpoint.sync import CheckpointError
from megatron_fp4.config.compose import compose_config, config_from_saved, group_options
from megatron_fp4.config.precision_schema import Bf16BlocksConfig, ComposedException, RecipeConfig
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.console import counted, markdown
from megatron_fp4.logging.files import check_place
from megatron_fp4.measure.diagnostics import Probe
from megatron_fp4.precision.plan import LinearShape
from megatron_fp4.precision.recipe import BF16, GEMMS, recipe_from_config
from megatron_fp4.runtime.errors import ExitCode, run_command
from megatron_fp4.training.build import backend_of, check, join_ranks, plans_of
from megatron_fp4.training.step import ALONE, accumulate
from megatron_fp4.training.trainer import Trainer
from models import provider as models
from pretrain import CONFIGS


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 2 after an error of the user, with a line on stderr."""
    options = parse(arguments)
    refusals = (ValueError, OSError, CheckpointError)
    command = health if options.health else analyze
    return run_command("analyze_precision.py", lambda: command(options), options.output, refusals)


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
    parser.add_argument("--health", action="store_true", help="is the run healthy in 4 bits? Takes no option of a plan")
    options = parser.parse_intermixed_args(arguments)
    of_plans = ("budget", "gemm", "sections", "output")
    if options.health and (given := [key for key in of_plans if getattr(options, key) != parser.get_default(key)]):
        parser.error(f"--{given[0]} has no effect with --health, which makes no plan")
    return options


def analyze(options: argparse.Namespace) -> int:
    """Measure, rank, select, print, write."""
    check_place(options.output)
    checkpoint = checkpoint_in(options.checkpoint)
    config, step = saved_config(checkpoint, options), read_manifest(checkpoint).step
    config = with_every_linear(config, options.sections)
    shapes = [row.linear for row in plans_of(config, models)[0].rows]
    kept = number_in_bf16(len(shapes), options.budget)
    run = loaded(config, checkpoint)
    probe = Probe(once=False)
    measured = len(losses(run, step, options.micro_batches, probe))
    errors = {name: one.errors for name, one in probe.collect(list(run.precision.linears)).items()}
    ranked = rank_linears(shapes, errors, options.gemm)
    if run.mesh.rank == 0:
        print(table(ranked, kept, errors))
        facts = {
            "checkpoint": str(checkpoint),
            "step": step,
            "recipe": config.precision.name,
            "ranked_by": options.gemm,
            "budget": options.budget,
            "micro_batches": measured * run.mesh.batch.size,
        }
        options.output.write_text(plan_file(ranked, kept, errors, facts))
        print(f"{kept} of {len(ranked)} linears stay in BF16: {options.output}")
    return 0


def health(options: argparse.Namespace) -> int:
    """Measure the run in its own plan, print the verdict; returns the exit code."""
    from analysis.health import SpecifiedProbe, judge, report

    checkpoint = checkpoint_in(options.checkpoint)
    config, manifest = saved_config(checkpoint, options), read_manifest(checkpoint)
    if (switched := read_trainer(checkpoint, manifest)["switch"]["switched_at"]) is not None:
        raise ConfigError(
            f"{checkpoint} is from after the precision switch of its run (before step {switched + 1}); give a "
            "checkpoint from before it"
        )
    sizes = {f"parallel.{axis}": getattr(config.parallel, axis) for axis in ("tensor", "expert")}
    if divided := [key for key, size in sizes.items() if size > 1]:
        given = " ".join(f"{key}={sizes[key]}" for key in divided)
        raise ConfigError(f"{given}: --health compares whole linears; add {' '.join(f'{key}=1' for key in divided)}")
    run, probe = loaded(config, checkpoint), SpecifiedProbe()
    in_4_bits = losses(run, manifest.step, options.micro_batches, probe)
    with run.precision.other_recipes(lambda recipe: BF16):
        in_bf16 = losses(run, manifest.step, options.micro_batches, Probe())
    found = probe.collect(list(run.precision.linears))
    pairs: list[list[tuple[float, float]]] = [[]] * run.mesh.world_size
    dist.all_gather_object(pairs, list(zip(in_4_bits, in_bf16, strict=True)))
    judged = judge(found, run.precision.linears, [pair for of_rank in pairs for pair in of_rank])
    if run.mesh.rank == 0:
        plan = run.precision.plan
        of_linears = f"{plan.num_quantized} of {counted(len(plan.rows), 'linear')} quantized"
        print(f"{checkpoint}: {config.precision.name}, {of_linears}, backend {backend_of(config, models).name}")
        print(f"{report(judged, found)}\n{recipe_changes(config)}")
    return ExitCode.WRONG_NUMBERS if judged.worse else ExitCode.FINISHED


def recipe_changes(config: Config) -> str:
    """How the run's recipe differs from the precision config of its name, in one line for each GEMM."""
    if (name := config.precision.name) not in group_options(CONFIGS)["precision"]:
        return f"recipe: {name}, which is no precision config here"
    preset = recipe_from_config(compose_config([f"precision={name}"], CONFIGS).precision).describe()
    own = recipe_from_config(config.precision).describe()
    changed = [f"{here} (there {there})" for here, there in zip(own, preset, strict=True) if here != there]
    return "\n".join([f"recipe: {'other than' if changed else 'as'} configs/precision/{name}.yaml", *changed])


def saved_config(checkpoint: Path, options: argparse.Namespace) -> Config:
    """The run's configuration without a precision switch. Raises ConfigError if the recipe quantizes nothing."""
    if options.micro_batches < 1:
        raise ConfigError(f"--micro-batches {options.micro_batches}: give 1 or more")
    saved = read_trainer(checkpoint, read_manifest(checkpoint))["config"]
    overrides = [*options.overrides, "precision.switch.when=never"]
    config = config_from_saved(saved, overrides, CONFIGS, trusted=options.trust_config)
    if not recipe_from_config(config.precision).quantized:
        raise ConfigError(
            f"the run of {checkpoint} quantizes nothing (precision={config.precision.name}), so there is nothing to "
            "measure; name a recipe, such as precision=nvfp4"
        )
    return config


def with_every_linear(config: Config, sections: bool) -> Config:
    """`config` with every linear in the recipe. sections: whether sections are linears of their own."""
    recipe = RecipeConfig(**{field.name: getattr(config.precision, field.name) for field in fields(RecipeConfig)})
    names = dict.fromkeys(name for shape in models.linear_shapes(config.model) for name, _ in shape.sections)
    # With the run's own recipe: an exception is what makes its sections a linear.
    parts = (ComposedException(sections=[name], precision=recipe.name, recipe=recipe) for name in names if sections)
    precision = replace(config.precision, bf16_blocks=Bf16BlocksConfig(), exceptions=[*parts])
    return replace(config, precision=precision)


def loaded(config: Config, checkpoint: Path) -> Trainer:
    """The model with the checkpoint's weights. A collective."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    check(config, models, data, int(os.environ.get("WORLD_SIZE", 1)), device_type)
    run = Trainer(config, models, data, [], join_ranks(config, models), quiet=True)
    run.checkpointer.initialize(
        str(checkpoint), run.model, run.precision.step_state, resumed=False, allow_mismatch=True
    )
    return run


def losses(run: Trainer, start: int, count: int, probe: Probe) -> list[float]:
    """The losses of `count` micro-batches of this rank, or as many as the run has, with the probe attached. It uses the
    micro-batches after step `start`, or the last ones of a finished run."""
    steps = run.config.train.steps
    least = min(run.data.loader.num_micro_batches(span.first_step) for span in run.data.phases.spans)
    num_steps = min(steps, -(-count // least))
    start = min(start, steps - num_steps)  # a finished run has no data left, so use its last steps
    found: list[Tensor] = []
    with probe.attached(run.precision.linears):
        for step, micro_batches in enumerate(run.data.loader.steps(start, start + num_steps), start=start):
            run.precision.step_state.step = step
            for micro_batch in micro_batches[: count - len(found)]:
                state = run.precision.step_state
                found.append(accumulate(run.model, [micro_batch], run.mesh, state, global_batch=ALONE).sum())
                run.model.zero_grad()
    return torch.stack(found).tolist()


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
    total, rows = sum(shape.parameters for shape in ranked), []
    for i, shape in enumerate(ranked):
        of = [f"{errors[shape.name][gemm]:.4f}" if gemm in errors[shape.name] else "-" for gemm in GEMMS]
        rows.append([shape.name, *of, f"{shape.parameters / total:.1%}", "BF16" if i < kept else ""])
    note = "fprop, dgrad, wgrad: relative error of the result; FLOPs: share of the FLOPs of all linears"
    return markdown(["linear", *GEMMS, "FLOPs", "stays in"], rows, [note])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
