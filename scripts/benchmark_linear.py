"""Time, bandwidth and memory of the emulated backend's linear layer on one GPU, against BF16 in the same run.

    python scripts/benchmark_linear.py [--tokens 8192] [--shapes 4096x21504 2048x6144] [--recipes nvfp4 ...] [--memory]

Three tables: forward and backward of one linear by recipe, as a ratio of the BF16 recipe (weight gradients in FP32 in
both), with the weight quantized in every call, and with its codes kept; what each kernel moves, as a fraction of a
device-to-device copy measured beside it (CUDA graphs, without launch times); and with --memory the peak of a stack of
MLPs by recipe.

Ratios within one run count. The recipes take turns, so that a change of clocks meets all of them alike.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.recipe import BF16, Gemm, Operand, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.cuda import Side
from megatron_fp4.quantization.formats import FORMATS
from megatron_fp4.quantization.fp4 import FusedFP4
from megatron_fp4.quantization.rounding import rounding_key
from megatron_fp4.runtime.closed_pipe import end_without_reader

_X, _W, _DY = Operand("nvfp4", (1, 16)), Operand("nvfp4", (16, 16)), Operand("nvfp4", (1, 16), "stochastic")
_MX, _MX_DY = Operand("mxfp4", (1, 32)), Operand("mxfp4", (1, 32), "stochastic")
_F8, _F8_W = Operand("fp8", (1, 128)), Operand("fp8", (128, 128))
RECIPES = {
    "bf16": BF16,
    "nvfp4": Recipe("nvfp4", Gemm(_X, _W), Gemm(_DY, _W), Gemm(_DY, _X, 16)),
    "mxfp4": Recipe("mxfp4", Gemm(_MX, _MX), Gemm(_MX_DY, _MX), Gemm(_MX_DY, _MX, 32)),
    "fp8": Recipe("fp8", Gemm(_F8, _F8_W), Gemm(_F8, _F8_W), Gemm(_F8, _F8)),
    "all_the_way": Recipe("all_the_way", Gemm(_X, _X), Gemm(_DY, _X), Gemm(_DY, _DY)),
}


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Mean device time of `repeats` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def medians(runs: dict[str, Callable[[], object]], rounds: int, span: float) -> dict[str, list[float]]:
    """Median, least and largest mean time of `rounds` spans (ms), the runs taking turns.

    Each span follows half a span of the same work, so that it is timed at the clocks which that work leads to.
    """
    repeats = {}
    for name, run in runs.items():
        milliseconds(run, 3)
        repeats[name] = max(2, int(span / milliseconds(run, 5)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            milliseconds(run, repeats[name] // 2)
            times[name].append(milliseconds(run, repeats[name]))
    return {name: [statistics.median(found), min(found), max(found)] for name, found in times.items()}


def replayed(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph: its kernels without the time that Python takes to launch them."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def linear_step(recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor, keep_weight: bool) -> Callable[[], object]:
    """Forward and backward of one linear; keep_weight: the weight's codes are those of the call before."""
    clock = StepState(seed=0)
    context = LinearContext("linear", recipe, clock)
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()

    def step() -> None:
        x.grad = w.grad = None
        clock.micro_batch += 1
        clock.weights_version += not keep_weight
        quantized_linear(x, w, context).backward(dy)

    return step


def time_linears(shapes: list[tuple[int, int]], tokens: int, names: list[str]) -> list[str]:
    """The first table."""
    lines = []
    for inputs, outputs in shapes:
        x, dy, w = random(tokens, inputs), random(tokens, outputs), random(outputs, inputs) * inputs**-0.5
        runs = {"bf16": linear_step(BF16, x, w, dy, False), "bf16 again": linear_step(BF16, x, w, dy, False)}
        for name in names:
            runs[name] = linear_step(RECIPES[name], x, w, dy, False)
            runs[f"{name}, codes of W kept"] = linear_step(RECIPES[name], x, w, dy, True)
        found = medians(runs, rounds=7, span=150)
        for name, (median, low, high) in found.items():
            ratio = median / found["bf16"][0]
            what = f"{tokens} x {inputs}->{outputs}"
            lines.append(f"{what:22s} {name:24s} {median:8.3f} ms ({low:.3f}-{high:.3f})  {ratio:6.3f}")
        del x, dy, w, runs
    return lines


def copy_bandwidth() -> float:
    """TB/s, read and written bytes counted."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / medians({"copy": lambda: target.copy_(source)}, 5, 20)["copy"][0] / 1e9


def time_kernels(shapes: list[tuple[int, int]], tokens: int) -> list[str]:
    """The second table."""
    copy = copy_bandwidth()
    lines = [f"device copy, read and written: {copy:.2f} TB/s"]
    key, other = rounding_key("benchmark", 0), rounding_key("benchmark", 1)
    for inputs, outputs in shapes:
        for form in ("nvfp4", "mxfp4"):
            row, square = FORMATS[form].blocks
            block = row[1]
            packed = 0.5 + 1 / block  # bytes an element of codes and scales
            dy = (Side(form, row, key=key), Side(form, row, block, key=other))
            for name, rows, columns, sides in (
                ("x", tokens, inputs, (Side(form, row), Side(form, row, block))),
                ("W", outputs, inputs, (Side(form, square), None)),
                ("dy", tokens, outputs, dy),
            ):
                tensor = random(rows, columns)
                measured = FusedFP4(tensor, *sides)
                runs: dict[str, tuple[Callable[[], object], float]] = {"along columns": (measured.along_columns, 4)}
                if form == "nvfp4":
                    runs["measured"] = (functools.partial(FusedFP4, tensor, *sides), 2)
                if name == "x":
                    runs["along rows, packed"] = (measured.packed_rows, 2 + packed)
                    runs["unpacked"] = (measured.packed_rows().values, 2 + packed)
                if name == "dy":
                    runs["along rows"] = (measured.along_rows, 4)
                for what, (run, size) in runs.items():
                    median = medians({what: replayed(run)}, 5, 10)[what][0]
                    rate = tensor.numel() * size / median / 1e9
                    figures = f"{median * 1e3:8.1f} us  {rate:5.2f} TB/s  {rate / copy:5.1%}"
                    lines.append(f"{form} {name:2s} {f'{rows}x{columns}':11s} {what:18s} {figures}")
    return lines


def measure_memory(tokens: int, hidden: int, ffn: int, depth: int, names: list[str]) -> list[str]:
    """The third table: `depth` MLPs (squared ReLU), FP32 master weights and gradients, forward and backward."""
    lines = []
    first = 0.0
    for name in ["bf16", *names]:
        clock = StepState(seed=0)
        shapes = [(ffn, hidden), (hidden, ffn)] * depth
        weights = [(random(*shape).float() * shape[1] ** -0.5).requires_grad_() for shape in shapes]
        context = [LinearContext(f"linear.{i}", RECIPES[name], clock) for i in range(len(weights))]
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            y = x = random(tokens, hidden).requires_grad_()
            for i in range(0, len(weights), 2):
                h = torch.relu(quantized_linear(y, weights[i], context[i])).square()
                y = y + quantized_linear(h, weights[i + 1], context[i + 1])
            del h
            y.square().mean().backward()
            x.grad = None
            clock.weights_version += 1
        peak = torch.cuda.max_memory_allocated() / 2**30
        first = first or peak
        lines.append(
            f"{depth} MLPs {hidden}->{ffn}, {tokens} tokens: {name:12s} peak {peak:6.2f} GiB  {peak / first:6.3f}"
        )
        del weights, context, x, y
        torch.cuda.empty_cache()
    return lines


def random(*shape: int) -> Tensor:
    """Standard normal BF16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", nargs="*", default=["4096x21504", "2048x6144"], help="input x output features")
    parser.add_argument("--recipes", nargs="*", default=["nvfp4", "mxfp4"], choices=sorted(RECIPES))
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_linear needs a CUDA device")
    torch.manual_seed(0)
    shapes = [(int(inputs), int(outputs)) for inputs, outputs in (shape.split("x") for shape in args.shapes)]
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    lines = time_kernels(shapes, args.tokens) + time_linears(shapes, args.tokens, args.recipes)
    if args.memory:
        lines += measure_memory(4 * args.tokens, 2048, 6144, 4, args.recipes)
        lines += measure_memory(2 * args.tokens, 4096, 21504, 2, args.recipes)
    print("\n".join(lines))


if __name__ == "__main__":
    end_without_reader()
    main()
