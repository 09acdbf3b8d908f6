"""Find out which linears suffer most from quantization, and write a plan that keeps those in BF16.

    python scripts/analyze_precision.py runs/8b/checkpoints/step_00002000 --budget 0.15 --output plan.yaml
    python pretrain.py ... precision.bf16_blocks.first=0 precision.bf16_blocks.last=0 \\
        precision.bf16_blocks.file=plan.yaml

The checkpoint's model runs forward and backward over a few micro-batches of its own run's data, with *every* linear
quantized by the run's recipe, and each linear's products are compared with unquantized ones of the same inputs (see
megatron_fp4/measure/diagnostics.py). Nothing is updated or written but the plan. `key=value` changes the run's
configuration: `precision=nvfp4` for the checkpoint of a BF16 run, `parallel.tensor=1` to analyze it in one process.
Under torchrun every data-parallel rank contributes its micro-batches.

The ranking is by the error of the forward product, which finds the linears that cost a hybrid of 30M most
(docs/research.md, "What removes half of it?"). `--gemm wgrad` ranks by the weight gradient's, by which the paper sees
the last layers stand out (appendix E.2).
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from data import provider as data
from megatron_fp4.checkpoint.files import TRAINER, Manifest, checkpoint_in, read_checked, read_manifest
from megatron_fp4.checkpoint.sync import CheckpointError
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.files import check_place
from megatron_fp4.measure.diagnostics import LinearMeasurement, Probe
from megatron_fp4.parallel.mesh import build_mesh, init_distributed
from megatron_fp4.precision.plan import LinearShape
from megatron_fp4.precision.recipe import GEMMS, recipe_from_config
from megatron_fp4.runtime.errors import run_command
from megatron_fp4.training.build import check, plans_of, set_determinism
from megatron_fp4.training.step import ALONE, accumulate
from megatron_fp4.training.trainer import Trainer
from models import provider as models
from pretrain import CONFIGS


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    options = parse(arguments)
    refusals = (ValueError, OSError, CheckpointError)
    return run_command("analyze_precision.py", lambda: analyze(options), options.output, refusals)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run: its newest one")
    parser.add_argument("overrides", nargs="*", help="key=value: changes of the run's configuration")
    parser.add_argument("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    parser.add_argument("--budget", type=float, default=0.15, help="share of linears to keep in BF16 (default 0.15)")
    parser.add_argument("--gemm", choices=GEMMS, default="fprop", help="whose error ranks (default fprop)")
    parser.add_argument("--micro-batches", type=int, default=4, help="to measure, on every rank (default 4)")
    parser.add_argument("--output", type=Path, default=Path("plan.yaml"), help="the plan to write (default plan.yaml)")
    return parser.parse_intermixed_args(arguments)


def analyze(options: argparse.Namespace) -> int:
    """Measure, rank, select, print, write."""
    if options.micro_batches < 1:
        raise ConfigError(f"--micro-batches {options.micro_batches}: at least 1 must be measured")
    check_place(options.output)
    checkpoint = checkpoint_in(options.checkpoint)
    manifest = read_manifest(checkpoint)
    config = analysis_config(checkpoint, manifest, options.overrides, options.trust_config)
    shapes = [row.linear for row in plans_of(config, models)[0].rows]
    kept = number_in_bf16(len(shapes), options.budget)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    check(config, models, data, int(os.environ.get("WORLD_SIZE", 1)), device_type)
    device_type = device_type if config.run.device == "auto" else config.run.device
    device = init_distributed(device_type, config.parallel.timeout_seconds)
    set_determinism(config.run.deterministic)
    run = Trainer(config, models, data, [], build_mesh(config.parallel, device), quiet=True)
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
            "micro_batches": measured * run.mesh.dp_size,
        }
        options.output.write_text(plan_file(ranked, kept, errors, facts))
        print(f"{kept} of {len(ranked)} linears stay in BF16: {options.output}")
    return 0


def analysis_config(checkpoint: Path, manifest: Manifest, overrides: list[str], trusted: bool) -> Config:
    """The run's configuration with every linear quantized, and no switch. ConfigError if the recipe quantizes none."""
    saved = json.loads(read_checked(checkpoint, TRAINER, manifest.files))["config"]
    config = config_from_saved(saved, [*overrides, "precision.switch.when=never"], CONFIGS, trusted=trusted)
    if not recipe_from_config(config.precision).quantized:
        raise ConfigError(
            f"the run of {checkpoint} quantizes nothing (precision {config.precision.name}), so there is nothing to "
            "measure; name a recipe, as in precision=nvfp4"
        )
    precision = replace(config.precision, bf16_blocks=Bf16BlocksConfig(), exceptions=[])
    return replace(config, precision=precision)


def measure(run: Trainer, start: int, count: int) -> tuple[dict[str, LinearMeasurement], int]:
    """Errors of all linears over `count` micro-batches of this rank, those that follow step `start` where there are,
    and how many they were: all of the run's if it has fewer."""
    steps = run.config.train.steps
    least = min(run.data.loader.num_micro_batches(span.first_step) for span in run.data.phases.spans)
    num_steps = min(steps, -(-count // least))
    start = min(start, steps - num_steps)  # a finished run has no data left, and goes over its last again
    left = count
    probe = Probe(once=False)
    with probe.attached(run.precision.linears):
        for step, micro_batches in enumerate(run.data.loader.steps(start, start + num_steps), start=start):
            run.precision.step_state.step = step
            for micro_batch in micro_batches[:left]:
                accumulate(run.model, [micro_batch], run.mesh, run.precision.step_state, whole=ALONE)
                for parameter in run.model.parameters():
                    parameter.grad = None
                left -= 1
    return probe.collect(list(run.precision.linears)), count - left


# ------------------------------------------------------------------------------------------------- ranking and choosing


Errors = Mapping[str, Mapping[str, float]]  # linear -> GEMM -> relative error of its result


def rank_linears(linears: Iterable[LinearShape], errors: Errors, gemm: str) -> list[LinearShape]:
    """The linears by the error of `gemm`, worst first (not a number is worst of all); equal ones in the order given.

    Raises ValueError for a linear without measurements, or a GEMM that no linear was measured at.
    """
    shapes = list(linears)
    if missing := [shape.name for shape in shapes if shape.name not in errors]:
        raise ValueError(f"nothing was measured at {missing[0]} ({len(missing)} linears in all); is it ever used?")
    if not any(gemm in errors[shape.name] for shape in shapes):
        raise ValueError(f"--gemm {gemm}: the recipe quantizes no operand of {gemm}; choose another GEMM or recipe")
    scores = {name: math.inf if math.isnan(of.get(gemm, 0.0)) else of.get(gemm, 0.0) for name, of in errors.items()}
    return sorted(shapes, key=lambda shape: scores[shape.name], reverse=True)


def number_in_bf16(count: int, budget: float) -> int:
    """How many of `count` linears a `budget`, their share, keeps in BF16. Raises ValueError for another budget, or if
    it keeps none."""
    if not 0 < budget < 1:
        raise ValueError(f"--budget {budget} is not a share of them; give a number above 0 and below 1, such as 0.15")
    # A product such as 0.15 * 20 may come out a hair under the whole number that it stands for.
    kept = math.floor(budget * count * (1 + 1e-12))
    if not kept:
        smallest = math.ceil(1e4 / count) / 1e4
        raise ValueError(f"--budget {budget} of {count} linears keeps none in BF16; the smallest is {smallest}")
    return kept


def plan_file(ranked: Sequence[LinearShape], kept: int, errors: Errors, facts: Mapping[str, Any]) -> str:
    """The text of a plan file for `precision.bf16_blocks.file` that keeps the first `kept`.

    Its list `bf16` is what a run reads, by block; `selection` (`facts` and the shares kept) and `measured` (all
    linears, worst first) are for people.
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
    """Linears, worst first, with their errors; the first `kept` stay in BF16."""
    width, total = max(len(shape.name) for shape in ranked), sum(shape.parameters for shape in ranked)
    lines = [f"{'linear':<{width}}   fprop   dgrad   wgrad   {'FLOPs':>6}"]
    for i, shape in enumerate(ranked):
        of = errors[shape.name]
        shown = "  ".join(f"{of[gemm]:.4f}" if gemm in of else "     -" for gemm in GEMMS)
        mark = "BF16" if i < kept else ""
        lines.append(f"{shape.name:<{width}}  {shown}   {shape.parameters / total:>6.1%}  {mark}".rstrip())
    lines.append("fprop, dgrad, wgrad: relative error of the result; FLOPs: share of those of all linears")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
