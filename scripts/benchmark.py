"""How fast this machine trains, where the time of a step goes, and how much memory it takes.

    python scripts/benchmark.py linear     one linear, forward and backward, by recipe; on a GPU quantizers' bandwidth
    python scripts/benchmark.py models     forward and backward of one micro-batch of whole models, BF16 beside NVFP4
    torchrun --nproc-per-node 4 scripts/benchmark.py parallel [--against one.json] model=transformer_1_2b ...
                                           whole steps on a mesh, and how well it scales from another
    python scripts/benchmark.py profile model=hybrid_60m ...
                                           a step's kernels by kind, messages that nothing hides, gaps
    python scripts/benchmark.py memory --case "model=hybrid_60m" --case "model=tiny precision=bf16"
                                           peak memory of steps beside what a dry run says

`linear` and `models` take --small for seconds on any machine, to try them out. `parallel`, `profile` and `memory` have
the overrides of pretrain.py, run under torchrun for several ranks, and take steps as pretrain.py does, on random
tokens.

Times are medians after warming up. Ratios compare times of one run: single figures differ between machines, cards and
days. A linear's time is that of the GPU with its queue full, as in the middle of a model; `eager` is alone, with the
time that Python takes to launch its kernels.

In a profile, `hidden` is the part of a kind of kernel in which kernels of other kinds ran too (of messages: what costs
nothing), `idle` the time in which nothing ran, and `late` the part of it that ended with a kernel that the host had not
asked for before: the GPU waited for Python.

Exit code: 0; 1 if a case of `memory` failed; 2 with a line on stderr for what the user got wrong.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from data.storage import default_cache_dir
from megatron_fp4.config.compose import ConfigError, compose_config
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, end_process, init_distributed, leave_distributed
from megatron_fp4.planning.dry_run import dry_run
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import Recipe, recipe_from_config
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.switch import PrecisionController
from megatron_fp4.quantization.cuda import Side
from megatron_fp4.quantization.formats import FORMATS
from megatron_fp4.quantization.fp4 import FusedFP4
from megatron_fp4.quantization.rounding import rounding_key
from megatron_fp4.runtime.closed_pipe import end_without_reader
from megatron_fp4.training.build import (
    backend_of,
    device_type_of,
    graphs_for,
    initialized_model,
    set_determinism,
    sharded_model,
    world_size,
)
from megatron_fp4.training.callbacks.kernels import pin_kernels, rehearsal
from megatron_fp4.training.cuda_graphs import MicroBatchGraphs
from megatron_fp4.training.optimizer import build_optimizer
from megatron_fp4.training.step import StepResult, train_step
from models import provider as model_provider
from models.execution import Execution
from models.hybrid import HybridModel
from models.pattern import describe_execution, mixers_of, parameter_count, training_flops_per_token
from pretrain import CONFIGS, configure

GIB = 2**30
SHAPES, SMALL_SHAPES = ("8192x4096x21504", "8192x2048x6144"), ("64x64x128",)  # tokens, inputs, outputs
# Name -> overrides, sequences of a micro-batch, their length. The second is a quarter of the 8B hybrid; of the blocks
# that its recipe keeps in BF16, a quarter too.
MODELS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "1.2b": (("model=transformer_1_2b",), 4, 8192),
    "8b-quarter": (("model=nemotron_h_8b", "model.pattern=M-M-M-M*-M-M-", "model.nvfp4_bf16_blocks.last=2"), 2, 8192),
}
SMALL_MODELS: dict[str, tuple[tuple[str, ...], int, int]] = {"tiny": (("model=tiny",), 2, 64)}


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code, see the top of this file."""
    options = parse(arguments)
    try:
        return COMMANDS[options.command](options)
    except (ConfigError, OSError, json.JSONDecodeError) as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"benchmark.py {options.command}: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        leave_distributed()


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("command", choices=COMMANDS)
    name = top.parse_args(arguments[:1]).command
    parser = argparse.ArgumentParser(prog=f"benchmark.py {name}", description=COMMANDS[name].__doc__)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    if name in ("linear", "models"):
        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
        parser.add_argument("--small", action="store_true", help="tiny sizes, to try the command out")
        parser.add_argument("--precisions", default="bf16,nvfp4", help="presets, by commas; the first is 1x")
        parser.add_argument("--iterations", type=int, default=10)
    else:
        parser.add_argument("overrides", nargs="*", help="as for pretrain.py")
    if name == "linear":
        parser.add_argument("--shapes", help="tokens x inputs x outputs, by commas, such as 8192x4096x21504")
    if name == "models":
        parser.add_argument("--kernels", default="auto", help="train.kernels")
        parser.add_argument("--recompute", default="none", help="train.activation_checkpointing")
        parser.add_argument("--models", help="by commas; default: all")
    if name in ("parallel", "profile"):
        parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones")
    if name == "parallel":
        parser.add_argument("--steps", type=int, default=10, help="timed steps")
        parser.add_argument("--against", type=Path, help="the JSON of another mesh, to compare with")
    if name == "profile":
        parser.add_argument("--top", type=int, default=12, help="kernels to list by name")
    if name == "memory":
        parser.add_argument("--case", action="append", metavar="OVERRIDES", help="in quotes; may be repeated")
        parser.add_argument("--plan-only", action="store_true", help="the dry runs alone: needs no GPU")
        parser.add_argument("--part", choices=("plan", "measure"), help=argparse.SUPPRESS)  # what a child process does
    options = parser.parse_intermixed_args(arguments[1:])
    options.command = name
    if name == "memory" and options.case and options.overrides:
        parser.error(f"{options.overrides[0]}: put it into the quotes of a --case")
    return options


def written(found: Any, output: Path | None, lines: Iterable[str]) -> int:
    """Print the lines of the first rank, write what was found as JSON, return 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
        if output:
            output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


# Steps on random tokens, as pretrain.py takes them.


@dataclass(frozen=True)
class RandomMicroBatch:
    """As the loader's: tokens and targets [micro_batch_size, sequence_length], and where documents are masked the
    document of each token and their number; num_targets: how many count, if not all."""

    index: int
    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    num_documents: int | None
    num_targets: int | None


def random_micro_batches(config: Config, mesh: ParallelMesh, step: int) -> list[RandomMicroBatch]:
    """This rank's share of a step of random tokens, in pinned memory as the loader's on a GPU; where documents are
    masked, each row is one."""
    train, masked = config.train, config.data.documents == "masked"
    num_documents = train.micro_batch_size if masked else None
    num_targets = None if config.data.boundary_loss else train.micro_batch_size * train.sequence_length
    batches = []
    for index in range(mesh.dp_rank, train.global_batch_size // train.micro_batch_size, mesh.dp_size):
        generator = torch.Generator().manual_seed(1000 * step + index)
        shape = (train.micro_batch_size, train.sequence_length + 1)
        text = torch.randint(config.model.vocab_size, shape, generator=generator)
        parts = [text[:, :-1].contiguous(), text[:, 1:].contiguous()]
        parts += [torch.zeros(parts[0].shape, dtype=torch.int32)] if masked else []
        tokens, targets, *documents = (t.pin_memory() if mesh.device.type == "cuda" else t for t in parts)
        batches.append(
            RandomMicroBatch(index, tokens, targets, next(iter(documents), None), num_documents, num_targets)
        )
    return batches


@dataclass
class RandomRun:
    """Model, optimizer and mesh of a configuration, ready to take steps. graphs: of its micro-batches, if any."""

    config: Config
    mesh: ParallelMesh
    step_state: StepState
    model: HybridModel
    controller: PrecisionController
    optimizer: torch.optim.Optimizer
    graphs: MicroBatchGraphs | None

    @classmethod
    def open(cls, overrides: list[str], only_on_gpu: str = "", with_graphs: bool = True) -> RandomRun:
        """Build what pretrain.py would of `overrides`, with pinned kernels and CUDA graphs where it has them.

        only_on_gpu: what needs a GPU, for the ConfigError where there is none. Collective.
        """
        config = configure(overrides)
        device_type = device_type_of(config)
        if only_on_gpu and device_type != "cuda":
            raise ConfigError(f"{only_on_gpu} needs a GPU, and this machine has none (or run.device=cpu)")
        device = init_distributed(device_type, config.parallel.timeout_seconds)
        set_determinism(config.run.deterministic)
        mesh, step_state = build_mesh(config.parallel, device), StepState(seed=config.run.seed)
        model, controller = initialized_model(config, model_provider, mesh, step_state)
        optimizer = build_optimizer(model, config.optimizer)
        graphs = graphs_for(config, model_provider, mesh, model, controller, print) if with_graphs else None
        pin_model(model, config, device)
        return cls(config, mesh, step_state, model, controller, optimizer, graphs)

    def step(self, number: int, batches: Sequence[RandomMicroBatch]) -> StepResult:
        """Step `number`, from 0."""
        config = self.config
        return train_step(
            self.model, self.optimizer, batches, self.mesh, self.step_state,
            step=number, lr=config.optimizer.lr, clip_norm=config.optimizer.clip_norm, reshard=config.parallel.reshard,
            graphs=self.graphs,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.config.train.global_batch_size * self.config.train.sequence_length


def pin_model(model: HybridModel, config: Config, device: torch.device) -> None:
    """Choose the model's tuned kernels as a run does."""
    if mixers := model.autotuned_mixers():
        rehearse = rehearsal(mixers, config, [config.train.sequence_length], device)
        pin_kernels(rehearse, None, default_cache_dir() / "autotuning")


# linear


def linear(options: argparse.Namespace) -> int:
    """One linear, forward and backward, all three GEMMs, by recipe; on a GPU what each quantizer moves."""
    device, precisions = torch.device(options.device), options.precisions.split(",")
    recipes = {
        name: recipe_from_config(compose_config([f"precision={name}"], CONFIGS).precision) for name in precisions
    }
    names = options.shapes.split(",") if options.shapes else SMALL_SHAPES if options.small else SHAPES
    shapes = [tuple(map(int, shape.split("x"))) for shape in names]
    rows = [row for shape in shapes for row in linear_rows(shape, recipes, device, options.iterations)]
    moved = [row for shape in shapes for row in quantizer_rows(shape)] if device.type == "cuda" else []
    ceiling = ceilings(device, options.small)
    report = {"machine": machine(device), "ceilings": ceiling, "linears": rows, "quantizers": moved}
    copy, gemm = ceiling["copy_tb_per_s"], ceiling["gemm_tflops"]
    lines = [
        f"{machine(device)}: copy {copy:.2f} TB/s, BF16 GEMM {gemm:.0f} TFLOP/s",
        f"{'tokens x inputs x outputs':<26}{'recipe':<14}{'weights':<9}{'ms':>9}{'ratio':>8}{'TFLOP/s':>9}{'eager':>9}",
    ]
    for row in rows:
        weights = "kept" if row["weights_kept"] else "new"
        lines.append(
            f"{'x'.join(map(str, row['shape'])):<26}{row['recipe']:<14}{weights:<9}{row['milliseconds']:>9.3f}"
            f"{row['ratio']:>8.2f}{row['tflops']:>9.0f}{row['eager_milliseconds']:>9.3f}"
        )
    for row in moved:
        rate = row["tb_per_s"]
        lines.append(f"{row['name']:<49}{row['microseconds']:>9.1f} us{rate:>6.2f} TB/s{rate / copy:>8.1%} of copy")
    return written(report, options.output, lines)


def linear_rows(
    shape: tuple[int, ...], recipes: dict[str, Recipe], device: torch.device, iterations: int
) -> list[dict[str, Any]]:
    """For every recipe with weights quantized anew each time, and kept. The first row is 1x."""
    tokens, in_features, out_features = shape
    x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    weight = nn.Parameter(torch.randn(out_features, in_features, device=device, dtype=torch.bfloat16) * 0.02)
    rows: list[dict[str, Any]] = []
    calls: list[Callable[[], None]] = []
    for name, recipe in recipes.items():
        context = LinearContext(name="linear", recipe=recipe, step_state=StepState(seed=0))
        for kept in (False, True) if recipe.quantized else (True,):

            def iteration(context: LinearContext = context, kept: bool = kept) -> None:
                x.grad = weight.grad = None
                context.step_state.weights_version += not kept
                quantized_linear(x, weight, context).backward(dy)

            calls.append(iteration)
            rows.append({"shape": shape, "recipe": name, "weights_kept": kept})
            rows[-1]["eager_milliseconds"] = median_milliseconds(iteration, device, iterations, 5)
    # In turns, so that a change of clocks meets all of them.
    rounds = [[median_milliseconds(call, device, 8, 1, busy=True) for call in calls] for _ in range(iterations)]
    for row, times in zip(rows, zip(*rounds, strict=True), strict=True):
        row["milliseconds"] = statistics.median(times)
        row["ratio"] = row["milliseconds"] / rows[0]["milliseconds"]
        row["tflops"] = 6 * tokens * in_features * out_features / row["milliseconds"] / 1e9
    return rows


def quantizer_rows(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """What each 4-bit quantizer of a linear moves, as a CUDA graph: without the time that Python takes to launch it."""
    tokens, inputs, outputs = shape
    key, other = rounding_key("benchmark", 0), rounding_key("benchmark", 1)
    found = []
    for form in ("nvfp4", "mxfp4"):
        row, square = FORMATS[form].blocks
        packed = 0.5 + 1 / row[1]  # bytes an element of codes and scales
        for name, size, sides in (
            ("x", (tokens, inputs), (Side(form, row), Side(form, row, row[1]))),
            ("W", (outputs, inputs), (Side(form, square), None)),
            ("dy", (tokens, outputs), (Side(form, row, key=key), Side(form, row, row[1], key=other))),
        ):
            tensor = torch.randn(size, device="cuda", dtype=torch.bfloat16)
            measured = FusedFP4(tensor, *sides)
            runs: dict[str, tuple[Callable[[], object], float]] = {"along columns": (measured.along_columns, 4)}
            if form == "nvfp4":
                runs["measured"] = (functools.partial(FusedFP4, tensor, *sides), 2)
            if name == "x":
                runs["along rows, packed"] = (measured.packed_rows, 2 + packed)
                runs["unpacked"] = (measured.packed_rows().values, 2 + packed)
            if name == "dy":
                runs["along rows"] = (measured.along_rows, 4)
            for what, (run, bytes_per_element) in runs.items():
                run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                time_ms = median_milliseconds(graph.replay, tensor.device, 50, 10, busy=True)
                rate = tensor.numel() * bytes_per_element / time_ms / 1e9
                title = f"{form} {name} {'x'.join(map(str, size))} {what}"
                found.append({"name": title, "microseconds": time_ms * 1e3, "tb_per_s": rate})
    return found


def machine(device: torch.device) -> str:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}"


def ceilings(device: torch.device, small: bool) -> dict[str, float]:
    """Copy bandwidth in TB/s (read and written bytes) and the rate of a BF16 GEMM in TFLOP/s."""
    source = torch.randn(2**20 if small else 2**30, device=device)
    target = torch.empty_like(source)
    copy = median_milliseconds(lambda: target.copy_(source), device, 10, 3)
    size = 256 if small else 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    gemm = median_milliseconds(lambda: a @ b, device, 10, 3)
    return {"copy_tb_per_s": 2 * source.numel() * 4 / copy / 1e9, "gemm_tflops": 2 * size**3 / gemm / 1e9}


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


# models


def models(options: argparse.Namespace) -> int:
    """Forward and backward of one micro-batch of whole models, without optimizer: weights gathered and quantized,
    gradients reduced, as in a step of one micro-batch."""
    known = SMALL_MODELS if options.small else MODELS
    names = options.models.split(",") if options.models else list(known)
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"--models={options.models}: {unknown[0]} is not one of {', '.join(known)}")
    mesh = None
    report: dict[str, Any] = {"models": []}
    lines = [
        f"{'model':<12}{'micro-batch':<13}{'precision':<14}{'ms':>9}{'tokens/s':>10}{'TFLOP/s':>9}{'GiB':>7}{'time':>7}"
    ]
    for name in names:
        first = None
        for precision in options.precisions.split(","):
            config = model_config(*known[name], precision, options)
            if mesh is None:
                mesh = build_mesh(config.parallel, init_distributed(options.device, 600))
                report["machine"] = machine(mesh.device)
            row = {"model": name, "precision": precision, **model_row(config, mesh, options.iterations)}
            gc.collect()
            if mesh.device.type == "cuda":
                torch.cuda.empty_cache()
            first = first or row["milliseconds"]
            row["ratio"] = row["milliseconds"] / first
            report["models"].append(row)
            lines.append(
                f"{name:<12}{row['micro_batch']:<13}{precision:<14}{row['milliseconds']:>9.1f}"
                f"{row['tokens_per_second']:>10.0f}{row['model_tflops']:>9.0f}{row['peak_gib']:>7.1f}{row['ratio']:>7.2f}"
            )
    return written(report, options.output, [report["machine"], *lines])


def model_config(
    overrides: tuple[str, ...], rows: int, length: int, precision: str, options: argparse.Namespace
) -> Config:
    """One model in one precision, with the command line's choices."""
    sizes = (f"train.micro_batch_size={rows}", f"train.global_batch_size={rows}", f"train.sequence_length={length}")
    chosen = (f"train.kernels={options.kernels}", f"train.activation_checkpointing={options.recompute}")
    fixed = (f"precision={precision}", "precision.switch.when=never", f"run.device={options.device}")
    return compose_config([*overrides, *sizes, *chosen, *fixed], CONFIGS)


def model_row(config: Config, mesh: ParallelMesh, iterations: int) -> dict[str, Any]:
    """Time, memory and kernels of one model in one precision."""
    rows, length, step_state = config.train.micro_batch_size, config.train.sequence_length, StepState(seed=0)
    model, controller = initialized_model(config, model_provider, mesh, step_state)
    pin_model(model, config, mesh.device)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, config.model.vocab_size, (rows, length + 1), generator=generator).to(mesh.device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    losses: list[Tensor] = []

    def iteration() -> None:
        step_state.weights_version += 1
        loss = model(tokens, targets)
        loss.backward()
        losses.append(loss.detach())
        model.zero_grad(set_to_none=True)

    milliseconds = median_milliseconds(iteration, mesh.device, iterations, 3)
    peak = torch.cuda.max_memory_allocated(mesh.device) if mesh.device.type == "cuda" else 0
    return {
        "parameters": parameter_count(config.model).total,
        "quantized_linears": f"{controller.plan.num_quantized} of {len(controller.plan.rows)}",
        "micro_batch": f"{rows} x {length}",
        "kernels": describe_execution(model.execution, config.model.pattern),
        "recompute": model.execution.recompute,
        "milliseconds": milliseconds,
        "tokens_per_second": rows * length / milliseconds * 1e3,
        "model_tflops": training_flops_per_token(config.model, length) * rows * length / milliseconds / 1e9,
        "peak_gib": peak / GIB,
        "loss": losses[-1].item(),
    }


# parallel


def parallel(options: argparse.Namespace) -> int:
    """Whole steps (forward, backward, reduction, norm, clipping, update) on this mesh, and how well it scales from that
    of `--against`. For weak scaling let train.global_batch_size grow with the ranks; for tensor parallelism keep it."""
    baseline = json.loads(options.against.read_text()) if options.against else None
    run = RandomRun.open(options.overrides)
    mesh, device, plan = run.mesh, run.mesh.device, run.controller.plan
    cuda, batches = device.type == "cuda", random_micro_batches(run.config, mesh, 0)
    seconds, losses = [], []
    for step in range(options.warmup + options.steps):
        if step == 1 and cuda:  # a graph's memory shows when it is captured, not in replays
            torch.cuda.reset_peak_memory_stats(device)
        dist.barrier()
        began = time.perf_counter()
        losses.append(run.step(step, batches).loss)
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[options.warmup :])
    found = {
        "overrides": options.overrides,
        "machine": machine(device),
        "ranks": mesh.world_size,
        "tensor": mesh.tp_size,
        "data": mesh.dp_size,
        "quantized_linears": f"{plan.num_quantized} of {len(plan.rows)}",
        "micro_batches_per_rank": len(batches),
        "first_step_seconds": seconds[0],
        "seconds": seconds[options.warmup :],
        "median_seconds": median,
        "tokens_per_second": run.tokens / median,
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB if cuda else 0.0,
        "losses": losses,
    }
    line = (
        f"{mesh.world_size} x {machine(device)}, tensor {mesh.tp_size} x data {mesh.dp_size}: {median * 1e3:.1f} ms a "
        f"step, {run.tokens / median:,.0f} tokens/s, {found['peak_gib']:.1f} GiB, first step {seconds[0]:.1f} s"
    )
    if baseline is not None:
        ratio, ideal = run.tokens / median / baseline["tokens_per_second"], mesh.world_size / baseline["ranks"]
        line += f"; {ratio:.2f}x of {baseline['ranks']} ranks, {ratio / ideal:.1%} of ideal"
    return written(found, options.output, [line])


# profile

# The first that is found in a kernel's name.
KINDS = {
    "messages": r"nccl|symm_mem|all_gather|reduce_scatter",
    "quantizers": r"quantize_|measure_kernel|unpack_kernel|scale_cast",
    "attention": r"flash|cudnn|fmha|sdpa|flex|attention",
    "scan": r"_chunk_|_state_passing|_bmm_chunk|chunk_cumsum",
    "convolution": r"causal_conv1d",
    "GEMMs": r"gemm|nvjet|cutlass|xmma|splitK|cublas",
    "optimizer": r"adam|multi_tensor|lpnorm|LpNorm",
    "loss": r"cross_entropy|_loss|softmax",
    "compiled": r"^triton_",
    "copies": r"memcpy|memset|copy|fill|cat|split_with_sizes",
}


@dataclass(frozen=True)
class Ran:
    """A kernel that ran on the GPU, `start` to `end` in nanoseconds; asked: when the host asked for it, if known."""

    name: str
    start: int
    end: int
    asked: int | None = None

    @property
    def kind(self) -> str:
        """A key of KINDS, or `other`."""
        found = (kind for kind, names in KINDS.items() if re.search(names, self.name, re.IGNORECASE))
        return next(found, "other")


def profile(options: argparse.Namespace) -> int:
    """Where the time of one step goes on a GPU: kernels by kind, messages that nothing hides, gaps (first rank)."""
    run = RandomRun.open(options.overrides, only_on_gpu="a profile of kernels")
    mesh, device = run.mesh, run.mesh.device
    batches, seconds = random_micro_batches(run.config, mesh, 0), []
    window = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
    for step in range(options.warmup + 2):  # one for the profiler's own start
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)
        if step == options.warmup + 1:
            window.start()
        began = time.perf_counter()
        run.step(step, batches)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    window.stop()
    events = window.profiler.kineto_results.events()  # type: ignore[union-attr]
    cuda = torch.autograd.DeviceType.CUDA
    asked = {event.correlation_id(): event.start_ns() for event in events if event.device_type() != cuda}
    kernels = [
        Ran(event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), asked.get(event.correlation_id()))
        for event in events
        if event.device_type() == cuda and event.duration_ns() > 0
    ]
    by_name: dict[str, list[int]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[: options.top]
    title = (
        f"{mesh.world_size} ranks, tensor {mesh.tp_size}: first step {seconds[0]:.1f} s, then "
        + ", ".join(f"{s * 1e3:.1f}" for s in seconds[1:])
        + f" ms (the last one profiled), {run.tokens / min(seconds[1:]):,.0f} tokens/s, "
        f"{torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB"
    )
    names = [f"{sum(times) / 1e6:9.1f} ms {len(times):6} x  {name[:100]}" for name, times in longest]
    lines = [title, *profile_table(kernels, seconds[-1]), *names]
    return written(lines, options.output, lines)


def profile_table(kernels: Sequence[Ran], step_seconds: float) -> list[str]:
    """The kernels of a step by kind, as lines. Times of kinds that run side by side add up to more than the step."""
    spans = {kind: [(k.start, k.end) for k in kernels if k.kind == kind] for kind in {k.kind for k in kernels}}
    everything = length(span for kind in spans.values() for span in kind)
    rows = []
    for kind, mine in spans.items():
        others = length(span for other, theirs in spans.items() if other != kind for span in theirs)
        rows.append((length(mine), kind, len(mine), length(mine) + others - everything))
    lines = [f"{'':14}{'ms':>9}{'of step':>9}{'kernels':>9}{'hidden ms':>11}"]
    for busy, kind, count, hidden in sorted(rows, reverse=True):
        lines.append(f"{kind:14}{busy / 1e6:9.1f}{busy / 1e9 / step_seconds:9.1%}{count:9}{hidden / 1e6:11.1f}")
    for name, idle in (("idle", step_seconds - everything / 1e9), ("late", late(kernels) / 1e9)):
        lines.append(f"{name:14}{idle * 1e3:9.1f}{idle / step_seconds:9.1%}")
    return lines


def length(intervals: Iterable[tuple[int, int]]) -> int:
    """Of the time in `intervals`, whether they overlap or not."""
    total, until = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def late(kernels: Sequence[Ran]) -> int:
    """The time in which the GPU had nothing to do because the host had not asked for the next kernel."""
    total, end = 0, min((kernel.start for kernel in kernels), default=0)
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.asked is not None and kernel.start > end:
            total += max(0, min(kernel.start, kernel.asked) - end)
        end = max(end, kernel.end)
    return total


# memory


def memory(options: argparse.Namespace) -> int:
    """Peak memory of the second of two steps of the first rank, beside the dry run of the same configuration for as
    many ranks. A case is planned in a process that sees no GPU and measured in a process of its own on every rank."""
    if options.part:
        find = planned_memory if options.part == "plan" else measured_memory
        options.output.write_text(json.dumps(find(options.overrides)))
        return 0
    if not options.plan_only and not torch.cuda.is_available():
        raise ConfigError("needs an NVIDIA GPU to measure; or use --plan-only")
    cases = [shlex.split(case) for case in options.case or [shlex.join(options.overrides)]]
    first, rows = int(os.environ.get("RANK", 0)) == 0, []
    for index, case in enumerate(cases):
        row: dict[str, Any] = {"overrides": case, "ranks": world_size()}
        if first:
            row["planned"] = child("plan", case, {"CUDA_VISIBLE_DEVICES": ""})
        if not options.plan_only:
            row["measured"] = child("measure", case, _own_rendezvous(index))
        rows.append(row)
    if first:
        written(rows, options.output, memory_table(rows))
    codes = [row[part]["exit_code"] for row in rows for part in ("planned", "measured") if part in row]
    return 2 if 2 in codes else int(any(codes))


def child(what: str, case: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What the `--part` finds in a process of its own, with its `exit_code`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command = [sys.executable, __file__, "memory", "--part", what, "--output", str(output), *case]
        paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, check=False)
        found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    return {"exit_code": done.returncode, **found}


def _own_rendezvous(index: int) -> dict[str, str]:
    """Under torchrun: where the ranks of case `index` meet. torchrun's own store keeps what earlier cases wrote."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"benchmark_memory/{index}"
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(key, str(free.getsockname()[1]))
    return {"MASTER_PORT": store.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": str(False)}


def planned_memory(overrides: list[str]) -> dict[str, Any]:
    """The dry run's memory of the first of WORLD_SIZE ranks, in bytes, and the kernels that it assumes."""
    config = configure([*overrides, "run.dry=true"])
    execution = model_provider.planned_execution(config)
    dry = dry_run(config, world_size(), lambda *parts: sharded_model(config, model_provider, *parts), execution)
    return {"memory": asdict(dry.memory), "kernels": fused_parts(execution, config)}


def measured_memory(overrides: list[str]) -> dict[str, Any]:
    """Take two steps on this rank; bytes at the peak of the second, and what the allocator reserved."""
    run = RandomRun.open(overrides, only_on_gpu="the memory that is counted here", with_graphs=False)
    device = run.mesh.device
    for step in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        run.step(step, random_micro_batches(run.config, run.mesh, step))
        torch.cuda.synchronize(device)
    return {
        "peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "machine": machine(device),
        "backend": backend_of(run.config, model_provider).name,
        "kernels": fused_parts(run.model.execution, run.config),
    }


def fused_parts(execution: Execution, config: Config) -> dict[str, Any]:
    """The parts of `execution` that the model has."""
    fused = [kernel.part for mixer in mixers_of(config.model.pattern) for kernel in mixer.fused]
    parts = {part: part in execution.kernels for part in fused}
    return {**parts, "compiled": execution.compiled, "recompute": execution.recompute}


def memory_table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as lines; adds `ratio` and `notes` to each."""
    lines = [f"{'planned':>9}{'measured':>10}{'ratio':>8}{'reserved':>10}  ranks  case (GiB)"]
    for row in rows:
        planned, measured = row.get("planned", {}), row.get("measured", {})
        sizes = [planned.get("memory", {}).get("peak"), measured.get("peak"), measured.get("reserved")]
        row["ratio"] = sizes[0] / sizes[1] if sizes[0] and sizes[1] else None
        row["notes"] = [
            f"{who} ended with exit code {result['exit_code']}"
            for who, result in (("the dry run", planned), ("the measurement", measured))
            if result.get("exit_code")
        ]
        if row["ratio"] is not None:
            differ = [k for k, value in planned["kernels"].items() if measured["kernels"][k] != value]
            row["notes"] += [f"planned with {k}={planned['kernels'][k]}, ran {measured['kernels'][k]}" for k in differ]
            if measured["backend"] != "emulated":
                row["notes"].append(f"planned for the emulated backend, ran {measured['backend']}")
        plan, peak, reserved = ("-" if size is None else f"{size / GIB:.2f}" for size in sizes)
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(f"{plan:>9}{peak:>10}{ratio:>8}{reserved:>10}{row['ranks']:>7}  {shlex.join(row['overrides'])}")
        lines += [f"{'':>46}{note}" for note in row["notes"]]
    return lines


COMMANDS = {"linear": linear, "models": models, "parallel": parallel, "profile": profile, "memory": memory}


if __name__ == "__main__":
    end_without_reader()
    end_process(main(sys.argv[1:]))
