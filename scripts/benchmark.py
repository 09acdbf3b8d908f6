"""How fast this machine trains: linears and whole models, in BF16 and in emulated NVFP4, in one run.

    python scripts/benchmark.py --output benchmark.json
    python scripts/benchmark.py --small             seconds, on any machine: for trying the script out

Prints a table and writes everything, with the most expensive kernels of each model, as JSON. Parts:

    ceilings    copy bandwidth (read and written bytes) and the BF16 GEMM rate: what kernels are to be held against
    optimizer   one update of the first model's parameters
    linears     one linear of 8192 tokens, forward and backward, all three GEMMs, through `quantized_linear`
    models      forward and backward of one micro-batch through the model that pretrain.py builds, without optimizer

A linear's time is that of the GPU with its queue full, as in the middle of a model; `eager` is alone, with the time
Python takes to launch its kernels. A model's iteration is a step's with one micro-batch: weights gathered and
quantized, gradients reduced. Times are medians after warming up, with mamba-ssm's kernels tuned before. Ratios compare
times of this run; single figures differ between machines and days.

    --kernels torch              the reference path
    --recompute selective        activation checkpointing
    --models 1.2b,8b-quarter --precisions bf16,nvfp4     only these
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assembly import CONFIGS, backend_of, execution_of, initialized_model
from megatron_fp4.config.compose import ConfigError, compose_config
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed, leave_distributed
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import Recipe, recipe_from_config
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.closed_pipe import end_without_reader
from megatron_fp4.training.optimizer import build_optimizer
from models.pattern import describe_execution, parameter_count, training_flops_per_token
from scripts.random_run import pin_kernels

LINEARS: tuple[tuple[int, int, int], ...] = ((8192, 4096, 21504), (8192, 2048, 6144))  # tokens, in, out
SMALL_LINEARS: tuple[tuple[int, int, int], ...] = ((64, 64, 128),)


@dataclass(frozen=True)
class ModelCase:
    """One model to time: its overrides of the configuration, and a micro-batch."""

    name: str
    overrides: tuple[str, ...]
    micro_batch_size: int
    sequence_length: int


MODELS: tuple[ModelCase, ...] = (
    ModelCase("1.2b", ("model=transformer_1_2b",), 4, 8192),
    # A quarter of the 8B hybrid; of the blocks that its recipe keeps in BF16, a quarter too.
    ModelCase(
        "8b-quarter",
        ("model=nemotron_h_8b", "model.pattern=M-M-M-M*-M-M-", "model.nvfp4_bf16_blocks.last=2"),
        2,
        8192,
    ),
)
SMALL_MODELS: tuple[ModelCase, ...] = (ModelCase("tiny", ("model=tiny",), 2, 64),)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    options = parse(arguments)
    try:
        report = benchmark(options)
    except ConfigError as error:
        print(f"benchmark.py: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        leave_distributed()
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script out")
    parser.add_argument("--kernels", default="auto", help="train.kernels of the models")
    parser.add_argument("--recompute", default="none", help="train.activation_checkpointing of the models")
    parser.add_argument("--models", help="comma-separated; default: all")
    parser.add_argument("--precisions", default="bf16,nvfp4", help="comma-separated precision configs, the first is 1x")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    return parser.parse_args(arguments)


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as it goes into the JSON file."""
    device_type = options.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = build_mesh(configure(("model=tiny",), options, device_type).parallel, init_distributed(device_type, 600))
    cases = SMALL_MODELS if options.small else MODELS
    if options.models:
        known = {case.name: case for case in cases}
        if unknown := sorted(set(options.models.split(",")) - set(known)):
            raise ConfigError(f"--models={options.models}: {unknown[0]} is not one of {', '.join(known)}")
        cases = tuple(known[name] for name in options.models.split(","))
    report: dict[str, Any] = {"machine": machine(mesh.device), "ceilings": ceilings(mesh.device, options.small)}
    precisions = options.precisions.split(",")
    recipes = {
        name: recipe_from_config(configure((f"precision={name}",), options, device_type).precision)
        for name in precisions
    }
    report["optimizer"] = optimizer_row(cases[0], mesh, options)
    shapes = SMALL_LINEARS if options.small else LINEARS
    report["linears"] = [row for shape in shapes for row in linear_rows(shape, recipes, mesh.device, options)]
    report["models"] = []
    for case in cases:
        rows = []
        for precision in precisions:
            rows.append(model_row(case, precision, mesh, options))
            free(mesh.device)
        for row in rows:
            row["time_ratio"] = row["milliseconds"] / rows[0]["milliseconds"]
            row["memory_ratio"] = row["peak_gib"] / rows[0]["peak_gib"] if rows[0]["peak_gib"] else None
        report["models"] += rows
    return report


def configure(overrides: tuple[str, ...], options: argparse.Namespace, device_type: str) -> Config:
    """The configuration of `overrides` with the command line's choices."""
    chosen = (f"train.kernels={options.kernels}", f"train.activation_checkpointing={options.recompute}")
    config = compose_config([*overrides, *chosen, f"run.device={device_type}", "precision.switch.when=never"], CONFIGS)
    execution_of(config)
    return config


def machine(device: torch.device) -> dict[str, str]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def ceilings(device: torch.device, small: bool) -> dict[str, float]:
    """Copy bandwidth in TB/s (read and written bytes) and the rate of a BF16 GEMM in TFLOP/s."""
    source = torch.randn(2**20 if small else 2**30, device=device)
    target = torch.empty_like(source)
    copy = median_milliseconds(lambda: target.copy_(source), device, 10, 3)
    size = 256 if small else 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    gemm = median_milliseconds(lambda: a @ b, device, 10, 3)
    return {
        "copy_tb_per_s": 2 * source.numel() * 4 / copy / 1e9,
        "gemm_tflops": 2 * size**3 / gemm / 1e9,
    }


def linear_rows(
    shape: tuple[int, int, int], recipes: dict[str, Recipe], device: torch.device, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Forward and backward of one linear, for every recipe with weights quantized anew each time, and kept."""
    tokens, in_features, out_features = shape
    x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    weight = nn.Parameter(torch.randn(out_features, in_features, device=device, dtype=torch.bfloat16) * 0.02)
    rows: list[dict[str, Any]] = []
    calls: list[Callable[[], None]] = []
    for name, recipe in recipes.items():
        context = LinearContext(name="linear", recipe=recipe, clock=StepState(seed=0))
        for kept in (False, True) if recipe.quantized else (True,):

            def iteration(context: LinearContext = context, kept: bool = kept) -> None:
                x.grad = weight.grad = None
                context.clock.weights_version += not kept
                quantized_linear(x, weight, context).backward(dy)

            calls.append(iteration)
            rows.append({"shape": shape, "recipe": name, "weights_kept": kept})
            rows[-1]["eager_milliseconds"] = median_milliseconds(iteration, device, options.iterations, 5)
    # In turns, so that a change of clocks meets all of them.
    rounds = [[median_milliseconds(call, device, 8, 1, busy=True) for call in calls] for _ in range(options.iterations)]
    for row, times in zip(rows, zip(*rounds, strict=True), strict=True):
        row["milliseconds"] = statistics.median(times)
        row["ratio"] = row["milliseconds"] / rows[0]["milliseconds"]
        row["tflops"] = 6 * tokens * in_features * out_features / row["milliseconds"] / 1e9
    return rows


def optimizer_row(case: ModelCase, mesh: ParallelMesh, options: argparse.Namespace) -> dict[str, Any]:
    """One update of all parameters."""
    config = configure(case.overrides, options, mesh.device.type)
    model, _ = initialized_model(config, mesh, StepState(seed=0), execution_of(config), backend_of(config))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    built = build_optimizer(model, config.optimizer)
    milliseconds = median_milliseconds(built.optimizer.step, mesh.device, options.iterations, 2)
    row = {"name": built.name, "milliseconds": milliseconds}
    del model, parameter, built
    free(mesh.device)
    return row


def free(device: torch.device) -> None:
    """Give back what nobody refers to, but for cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def model_row(case: ModelCase, precision: str, mesh: ParallelMesh, options: argparse.Namespace) -> dict[str, Any]:
    """Time, memory and kernels of one model in one precision."""
    rows, length = case.micro_batch_size, case.sequence_length
    shape = (f"train.micro_batch_size={rows}", f"train.global_batch_size={rows}", f"train.sequence_length={length}")
    config = configure((*case.overrides, *shape, f"precision={precision}"), options, mesh.device.type)
    clock = StepState(seed=0)
    model, controller = initialized_model(config, mesh, clock, execution_of(config), backend_of(config))
    pin_kernels(model, config, mesh.device)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, config.model.vocab_size, (rows, length + 1), generator=generator).to(mesh.device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    losses: list[Tensor] = []

    def iteration() -> None:
        clock.weights_version += 1
        loss = model(tokens, targets)
        loss.backward()
        losses.append(loss.detach())
        model.zero_grad(set_to_none=True)

    milliseconds = median_milliseconds(iteration, mesh.device, options.iterations, options.warmup)
    peak = torch.cuda.max_memory_allocated(mesh.device) / 2**30 if mesh.device.type == "cuda" else 0.0
    num_tokens = tokens.numel()
    flops = training_flops_per_token(config.model, case.sequence_length) * num_tokens
    return {
        "model": case.name,
        "precision": precision,
        "parameters": parameter_count(config.model).total,
        "quantized_linears": f"{controller.plan.num_quantized} of {len(controller.plan.rows)}",
        "micro_batch": [case.micro_batch_size, case.sequence_length],
        "kernels": describe_execution(model.execution, config.model.pattern),
        "recompute": model.execution.recompute,
        "milliseconds": milliseconds,
        "tokens_per_second": num_tokens / milliseconds * 1e3,
        "model_tflops": flops / milliseconds / 1e9,
        "peak_gib": peak,
        "loss": losses[-1].item(),
        "top_kernels": top_kernels(iteration, mesh.device),
    }


def median_milliseconds(
    function: Callable[[], Any], device: torch.device, iterations: int, warmup: int, busy: bool = False
) -> float:
    """Median time of `function`, after `warmup` calls; on CUDA, peak memory counts from then on.

    busy: give the GPU other work first, so that it never waits for Python (a few hundred kernels at most).
    """
    for _ in range(warmup):
        function()
    times = []
    if device.type == "cuda":
        if busy:
            work = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
            for _ in range(25):
                torch.mm(work, work)
        else:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(iterations):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize(device)
        return statistics.median(start.elapsed_time(end) for start, end in times)
    seconds = []
    for _ in range(iterations):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def top_kernels(function: Callable[[], Any], device: torch.device, count: int = 30) -> list[dict[str, Any]]:
    """The kernels (on a CPU: operators) that one call of `function` spends most time in."""
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        if cuda:
            torch.cuda.synchronize(device)
    events = profile.key_averages()

    def microseconds(event: Any) -> float:
        return event.self_device_time_total if cuda else event.self_cpu_time_total

    ranked = sorted(events, key=microseconds, reverse=True)[:count]
    return [{"name": e.key[:120], "calls": e.count, "milliseconds": microseconds(e) / 1e3} for e in ranked]


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    ceiling = report["ceilings"]
    lines = [
        f"{report['machine']['device']}, torch {report['machine']['torch']}: copy {ceiling['copy_tb_per_s']:.2f} TB/s, "
        f"BF16 GEMM {ceiling['gemm_tflops']:.0f} TFLOP/s",
        "",
        f"{'linear, forward and backward':<34}{'recipe':<10}{'weights':<9}{'ms':>9}{'ratio':>8}{'TFLOP/s':>9}"
        f"{'eager':>9}",
    ]
    update = report["optimizer"]
    lines.insert(
        1,
        f"{update['name']}, one update of {report['models'][0]['parameters']:,} parameters: "
        f"{update['milliseconds']:.2f} ms",
    )
    for row in report["linears"]:
        tokens, inner, outer = row["shape"]
        weights = "kept" if row["weights_kept"] else "new"
        lines.append(
            f"{f'{tokens} tokens, {inner} -> {outer}':<34}{row['recipe']:<10}{weights:<9}"
            f"{row['milliseconds']:>9.3f}{row['ratio']:>8.2f}{row['tflops']:>9.0f}{row['eager_milliseconds']:>9.3f}"
        )
    lines += [
        "",
        f"{'model':<12}{'micro-batch':<13}{'precision':<10}{'ms':>9}{'tokens/s':>10}{'TFLOP/s':>9}{'GiB':>7}{'time':>7}{'memory':>8}",
    ]
    for row in report["models"]:
        batch = "{} x {}".format(*row["micro_batch"])
        memory = "-" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}"
        lines.append(
            f"{row['model']:<12}{batch:<13}{row['precision']:<10}{row['milliseconds']:>9.1f}"
            f"{row['tokens_per_second']:>10.0f}{row['model_tflops']:>9.0f}{row['peak_gib']:>7.1f}"
            f"{row['time_ratio']:>7.2f}{memory:>8}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
