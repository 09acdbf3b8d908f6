"""Measure how fast this machine trains, and how much memory training takes.

    python scripts/benchmark.py linear     one linear, forward and backward, by recipe
    torchrun --nproc-per-node 4 scripts/benchmark.py parallel [--alone] [--against one.json] model=... ...
                                           complete steps on a mesh, and how well they scale from single GPUs or from
                                           another mesh

`parallel` takes the overrides of pretrain.py and makes the same steps as pretrain.py, on random tokens. It prints the
peak memory, which `pretrain.py run.dry=true` estimates (with train.cuda_graphs=false). For the time of each kernel in a
step use `pretrain.py logging.profile_steps=[11,13]`.

Times are medians after a warm-up. Compare only the ratios of one run, because single times differ between machines,
cards and days. The time of a linear is measured with a full GPU queue, as inside a model.

Exit code: 0; 2 after an error of the user, with a line on stderr.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from data.loader import MicroBatch
from data.storage import default_cache_dir
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.files import check_place
from megatron_fp4.parallel.mesh import ParallelMesh, end_process
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.recipe import Recipe, recipe_from_config
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.errors import run_command
from megatron_fp4.training.build import graphs_for, initialized_model, join_ranks
from megatron_fp4.training.callbacks.kernels import pin_kernels, rehearsal
from megatron_fp4.training.optimizer import build_optimizer
from megatron_fp4.training.step import accumulate, update
from models import provider as model_provider
from pretrain import CONFIGS, configure

GIB = 2**30


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code, see the top of this file."""
    options = parse(arguments)

    def run() -> int:
        if options.output:
            check_place(options.output)
        return COMMANDS[options.command](options)

    return run_command(f"benchmark.py {options.command}", run, options.output)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(dest="command", required=True)
    commands = {name: parsers.add_parser(name, description=function.__doc__) for name, function in COMMANDS.items()}
    for name, command in commands.items():
        command.add_argument("--output", type=Path, help="JSON file to write")
        if name != "linear":
            command.add_argument("overrides", nargs="*", help="as for pretrain.py")
    add = commands["linear"].add_argument
    add("--precisions", default="bf16,nvfp4", help="precision configs, separated by commas; the first is 1x")
    shapes = "8192x4096x21504,8192x2048x6144" if torch.cuda.is_available() else "256x512x1536"
    add("--shapes", default=shapes, help=f"tokens x inputs x outputs, separated by commas (default here {shapes})")
    add("--iterations", type=int, default=10, help="rounds of measurements (default 10)")
    add = commands["parallel"].add_argument
    add("--warmup", type=int, default=5, help="steps before the timed ones")
    add("--steps", type=int, default=10, help="timed steps")
    add("--against", type=Path, help="JSON file of another mesh to compare with")
    add("--alone", action="store_true", help="first every rank by itself, all at the same time, to compare with")
    return parser.parse_args(arguments)


def written(found: Any, output: Path | None, lines: Iterable[str]) -> int:
    """On rank 0 print the lines and write `found` as JSON. Returns 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
        if output:
            output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def machine(device: torch.device) -> str:
    """The device and the torch version."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}"


# linear


def linear(options: argparse.Namespace) -> int:
    """One linear, forward and backward (all three GEMMs), by recipe; with quantization of the weight at each call, and
    with the cached quantized weight."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = options.precisions.split(",")
    recipes = [recipe_from_config(compose_config([f"precision={name}"], CONFIGS).precision) for name in names]
    rows = []
    for shape in (tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")):
        calls = []
        for name, recipe in zip(names, recipes, strict=True):
            for kept in (False, True) if recipe.quantized else (True,):
                rows.append({"shape": shape, "recipe": name, "weights_kept": kept})
                calls.append(linear_call(shape, recipe, kept, device))
        for call in calls:
            median_milliseconds(call, device, 5)  # compiles
        # In turns, so that a change of the clock rate affects all of them.
        rounds = [[median_milliseconds(call, device, 8) for call in calls] for _ in range(options.iterations)]
        times = [statistics.median(of_call) for of_call in zip(*rounds, strict=True)]
        for row, milliseconds in zip(rows[-len(calls) :], times, strict=True):
            tflops = 6 * math.prod(shape) / milliseconds / 1e9
            row |= {"milliseconds": milliseconds, "ratio": milliseconds / times[0], "tflops": tflops}
    lines = [f"{machine(device)}; tokens x inputs x outputs, recipe, weights, ms, ratio to the first, TFLOP/s"]
    for row in rows:
        weights = "kept" if row["weights_kept"] else "new"
        lines.append(
            f"{'x'.join(map(str, row['shape'])):<26}{row['recipe']:<14}{weights:<9}{row['milliseconds']:>9.3f}"
            f"{row['ratio']:>8.2f}{row['tflops']:>9.3g}"
        )
    return written({"machine": machine(device), "linears": rows}, options.output, lines)


def linear_call(shape: tuple[int, ...], recipe: Recipe, kept: bool, device: torch.device) -> Callable[[], None]:
    """A function that runs a linear with the shape (tokens, inputs, outputs) forward and backward. kept: whether it
    caches the quantized weight."""
    tokens, in_features, out_features = shape
    x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    weight = nn.Parameter(torch.randn(out_features, in_features, device=device, dtype=torch.bfloat16) * 0.02)
    context = LinearContext(name="linear", recipe=recipe, step_state=StepState(seed=0))

    def call() -> None:
        x.grad = weight.grad = None
        context.step_state.weights_version += not kept
        quantized_linear(x, weight, context).backward(dy)

    return call


def median_milliseconds(function: Callable[[], Any], device: torch.device, iterations: int) -> float:
    """Median time of `function`, which may launch a few hundred kernels. The GPU gets other work first."""
    times: list[float] = []
    if device.type == "cpu":
        for _ in range(iterations):
            began = time.perf_counter()
            function()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)
    work = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(25):
        torch.mm(work, work)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(events))


# parallel


def random_micro_batches(config: Config, mesh: ParallelMesh) -> list[Any]:
    """This rank's micro-batches of a step, with random tokens; for a GPU in pinned memory, as from the loader. If
    documents are masked, each row is one document."""
    shape, masked = (config.train.micro_batch_size, config.train.sequence_length + 1), config.data.documents == "masked"
    batches = []
    for index in range(mesh.batch.rank, config.train.global_batch_size // shape[0], mesh.batch.size):
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(config.model.vocab_size, shape, generator=generator)
        documents = torch.zeros(shape, dtype=torch.int32) if masked else None
        batch = MicroBatch.of(index, text, documents, config.data.boundary_loss)
        batches.append(batch.pin_memory() if mesh.device.type == "cuda" else batch)
    return batches


def parallel(options: argparse.Namespace) -> int:
    """Complete steps (forward, backward, reduction, norm, clipping, update) on this mesh, and how well it scales from
    the mesh of `--against`. For weak scaling increase train.global_batch_size with the number of ranks; to compare
    tensor parallelism keep it. GPUs of one machine differ, and a GPU is faster while the others are idle: `--alone`
    compares with the slowest of them, all of which compute a data-parallel rank's batch at the same time."""
    baseline = json.loads(options.against.read_text()) if options.against else None
    config = configure(options.overrides)
    mesh = join_ranks(config, model_provider)
    alone = seconds_alone(options, config, mesh) if options.alone else []
    found = measure(config, mesh, options, lambda: None)
    median, speed, device = found["median_seconds"], found["tokens_per_second"], mesh.device
    memory = f"{found['peak_gib']:.1f} GiB, " if device.type == "cuda" else ""
    line = (
        f"{mesh.world_size} x {machine(device)}, tensor {mesh.tensor.size} x data {mesh.batch.size}: "
        f"{median * 1e3:.1f} ms a step, {speed:,.0f} tokens/s, {memory}first step {found['first_step_seconds']:.1f} s"
    )
    if baseline is not None:
        ratio, ideal = speed / baseline["tokens_per_second"], mesh.world_size / baseline["ranks"]
        line += f"; {ratio:.2f}x of {baseline['ranks']} ranks, {ratio / ideal:.1%} of ideal"
    if alone:
        slowest, tensor = max(alone), mesh.world_size // mesh.batch.size
        line += f"; alone {min(alone) * 1e3:.1f} to {slowest * 1e3:.1f} ms, {slowest / median / tensor:.1%} of ideal"
    return written(found | {"alone_seconds": alone}, options.output, [line])


def seconds_alone(options: argparse.Namespace, config: Config, mesh: ParallelMesh) -> list[float]:
    """The median seconds of a step of every rank by itself, with the batch of a data-parallel rank. Each rank does it
    in a child process, and the timed steps begin at the same time."""
    context = multiprocessing.get_context("spawn")
    connection, of_child = context.Pipe()
    batch = config.train.global_batch_size // mesh.batch.size
    single = [f"parallel.{key}=1" for key in config.parallel.sizes]
    alone = [*options.overrides, *single, "parallel.sequence=null", f"train.global_batch_size={batch}"]
    settings = argparse.Namespace(overrides=alone, warmup=options.warmup, steps=options.steps)
    child = context.Process(target=_alone, args=(settings, of_child), daemon=True)
    child.start()
    of_child.close()  # so that `recv` fails if the child does
    connection.recv()
    dist.barrier()
    connection.send("begin")
    seconds: list[float] = [0.0] * mesh.world_size
    dist.all_gather_object(seconds, connection.recv())
    child.join()  # its memory is free
    return seconds


def _alone(options: argparse.Namespace, connection: Any) -> None:
    """In the child: measure, and send the median seconds. The timed steps wait for a message."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    config = configure(options.overrides)
    mesh = join_ranks(config, model_provider)
    found = measure(config, mesh, options, lambda: (connection.send("ready"), connection.recv()))
    connection.send(found["median_seconds"])
    end_process(0)


def measure(
    config: Config, mesh: ParallelMesh, options: argparse.Namespace, before_timing: Callable[[], object]
) -> dict[str, Any]:
    """Make the steps of `options` on `mesh`; returns what they took. before_timing: called before the timed ones."""
    step_state = StepState(seed=config.run.seed)
    device, on_gpu = mesh.device, mesh.device.type == "cuda"
    model, controller = initialized_model(config, model_provider, mesh, step_state)
    optimizer, plan = build_optimizer(model, config.optimizer), controller.plan
    graphs = graphs_for(config, model_provider, mesh, model, controller.linears, print)
    if mixers := model.autotuned_mixers():
        rehearse = rehearsal(mixers, config, [config.train.sequence_length], device)
        pin_kernels(rehearse, None, default_cache_dir() / "autotuning")
    batches = random_micro_batches(config, mesh)
    seconds, losses = list[float](), list[float]()

    def step() -> None:
        """One step; every step has the same tokens. As in a run it ends when the host has its numbers: the device may
        still update the weights and gather them for the next step."""
        began = time.perf_counter()
        step_state.step = len(seconds)
        loss = accumulate(model, batches, mesh, step_state, graphs=graphs)
        settings = config.optimizer
        parts, clip_norm = (optimizer, loss, mesh, step_state), settings.clip_norm
        result = update(*parts, lr=settings.lr, clip_norm=clip_norm, model=model)
        losses.append(result.loss)
        seconds.append(time.perf_counter() - began)

    for number in range(options.warmup + 1 + options.steps):
        if number == 1 and on_gpu:  # after step 0; a graph's memory is counted when it is captured, not in replays
            torch.cuda.reset_peak_memory_stats(device)
        if number == options.warmup:  # the step after a pause is not timed
            dist.barrier()
            before_timing()
        step()
    median = statistics.median(seconds[options.warmup + 1 :])
    speed = config.train.global_batch_size * config.train.sequence_length / median
    return {
        "overrides": options.overrides,
        "machine": machine(device),
        "ranks": mesh.world_size,
        "tensor": mesh.tensor.size,
        "data": mesh.batch.size,
        "quantized_linears": f"{plan.num_quantized} of {len(plan.rows)}",
        "micro_batches_per_rank": len(batches),
        "first_step_seconds": seconds[0],
        "median_seconds": median,
        "tokens_per_second": speed,
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB if on_gpu else 0.0,
        "losses": losses,
    }


COMMANDS = {"linear": linear, "parallel": parallel}


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
