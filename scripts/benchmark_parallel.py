"""Tokens per second of whole training steps on one mesh, and how well it scales from another.

    torchrun --nproc-per-node 1 scripts/benchmark_parallel.py --output one.json model=transformer_1_2b ...
    torchrun --nproc-per-node 4 scripts/benchmark_parallel.py --against one.json model=transformer_1_2b ...

Overrides are those of pretrain.py; the process count is torchrun's. Builds model, FSDP and optimizer as pretrain.py
does and takes whole steps (forward, backward, reduction, norm, clipping, update) on random tokens. Prints the median
step, tokens per second, peak memory of the first rank, the first step (compiling, tuning), and with `--against` the
efficiency: tokens per second per rank over those of that file. For weak scaling let `train.global_batch_size` grow with
the ranks; for tensor parallelism keep it. Both runs should come from one machine and one hour: clocks differ between
cards and days, and ranks wait for the slowest card.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp4.config.compose import ConfigError
from megatron_fp4.parallel.mesh import end_process, leave_distributed
from megatron_fp4.runtime.closed_pipe import end_without_reader
from scripts.random_run import RandomRun, random_micro_batches


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for pretrain.py")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--against", type=Path, help="the JSON of another mesh, to compare with")
    options = parser.parse_intermixed_args(arguments)
    try:
        baseline = json.loads(options.against.read_text()) if options.against else None
        found = measure(options.overrides, options.warmup, options.steps)
    except (ConfigError, OSError, json.JSONDecodeError) as error:
        print(f"benchmark_parallel.py: {error}", file=sys.stderr, flush=True)
        return 2
    else:
        if dist.get_rank() == 0:
            print(line(found, baseline))
            if options.output:
                options.output.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        leave_distributed()
    return 0


def measure(overrides: list[str], warmup: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step of this rank and what follows from it."""
    run = RandomRun.open(overrides)
    mesh, device, plan = run.mesh, run.mesh.device, run.controller.plan
    batches = random_micro_batches(run.config, mesh, 0)
    seconds, losses = [], []
    for step in range(warmup + steps):
        if step == 1 and device.type == "cuda":  # a graph's memory shows when it is captured, not in replays
            torch.cuda.reset_peak_memory_stats(device)
        dist.barrier()
        began = time.perf_counter()
        result = run.step(step, batches)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        losses.append(result.loss)
    median = statistics.median(seconds[warmup:])
    return {
        "overrides": overrides,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": mesh.world_size,
        "tensor": mesh.tp_size,
        "data": mesh.dp_size,
        "quantized_linears": f"{plan.num_quantized} of {len(plan.rows)}",
        "micro_batches_per_rank": len(batches),
        "first_step_seconds": seconds[0],
        "seconds": seconds[warmup:],
        "median_seconds": median,
        "tokens_per_second": run.tokens / median,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        "losses": losses,
    }


def line(found: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    """The result as a line of text."""
    text = (
        f"{found['ranks']} x {found['device']}, tensor {found['tensor']} x data {found['data']}: "
        f"{found['median_seconds'] * 1e3:.1f} ms a step, {found['tokens_per_second']:,.0f} tokens/s"
    )
    if found["peak_gib"] is not None:
        text += f", {found['peak_gib']:.1f} GiB"
    text += f", first step {found['first_step_seconds']:.1f} s"
    if baseline is not None:
        ratio = found["tokens_per_second"] / baseline["tokens_per_second"]
        ideal = found["ranks"] / baseline["ranks"]
        base = f"{baseline['ranks']} rank{'s' if baseline['ranks'] > 1 else ''}"
        text += f"; {ratio:.2f}x of {base}, {ratio / ideal:.1%} of ideal"
    return text


if __name__ == "__main__":
    end_without_reader()
    end_process(main(sys.argv[1:]))
