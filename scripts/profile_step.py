"""Where the time of one training step goes on a GPU: kernels by kind, messages that nothing hides, gaps.

    python scripts/profile_step.py model=hybrid_60m train.micro_batch_size=32 ...
    torchrun --nproc-per-node 4 scripts/profile_step.py model=nemotron_h_12b parallel.reshard=true ...

Overrides are those of pretrain.py; the process count is torchrun's. Takes whole steps as pretrain.py does, on random
tokens, and profiles one behind some to warm up. Of the first rank it prints

    busy      the time in which some kernel ran, whatever else did
    hidden    of a kind of kernel: the part in which kernels of other kinds ran too (of messages: what costs nothing)
    idle      the time in which nothing ran
    late      the part of it that ended with a kernel that the host had not asked for before: the GPU waited for Python

Times of kinds that run side by side add up to more than the step.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_fp4.config.compose import ConfigError
from megatron_fp4.parallel.mesh import end_process, leave_distributed
from megatron_fp4.runtime.closed_pipe import end_without_reader
from scripts.random_run import RandomRun, random_micro_batches

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
Interval = tuple[int, int]


@dataclass(frozen=True)
class Kernel:
    """What ran on the GPU, from `start` to `end` in nanoseconds; asked: when the host asked for it, if known."""

    name: str
    start: int
    end: int
    asked: int | None = None

    @property
    def kind(self) -> str:
        """A key of KINDS, or `other`."""
        found = (kind for kind, names in KINDS.items() if re.search(names, self.name, re.IGNORECASE))
        return next(found, "other")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in ascending intervals that do not overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Of the time in `intervals`, whether they overlap or not."""
    return sum(end - start for start, end in union(intervals))


def late(kernels: Sequence[Kernel]) -> int:
    """The time in which the GPU had nothing to do because the host had not asked for the next kernel."""
    total, end = 0, min((kernel.start for kernel in kernels), default=0)
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.asked is not None and kernel.start > end:
            total += max(0, min(kernel.start, kernel.asked) - end)
        end = max(end, kernel.end)
    return total


def table(kernels: Sequence[Kernel], step_seconds: float) -> list[str]:
    """The report on a step's kernels, as lines."""
    spans = {kind: [(k.start, k.end) for k in kernels if k.kind == kind] for kind in {k.kind for k in kernels}}
    everything = length(span for kind in spans.values() for span in kind)
    rows = []
    for kind, mine in spans.items():
        others = length(span for other, theirs in spans.items() if other != kind for span in theirs)
        alone = everything - others
        rows.append((length(mine), kind, len(mine), length(mine) - alone))
    lines = [f"{'':14}{'ms':>9}{'of step':>9}{'kernels':>9}{'hidden ms':>11}"]
    for busy, kind, count, hidden in sorted(rows, reverse=True):
        lines.append(f"{kind:14}{busy / 1e6:9.1f}{busy / 1e9 / step_seconds:9.1%}{count:9}{hidden / 1e6:11.1f}")
    idle = step_seconds - everything / 1e9
    lines.append(f"{'idle':14}{idle * 1e3:9.1f}{idle / step_seconds:9.1%}")
    waited = late(kernels) / 1e9
    lines.append(f"{'late':14}{waited * 1e3:9.1f}{waited / step_seconds:9.1%}")
    return lines


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for pretrain.py")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the profiled one (default: %(default)s)")
    parser.add_argument("--top", type=int, default=12, help="kernels to list by name (default: %(default)s)")
    options = parser.parse_intermixed_args(arguments)
    try:
        lines = measure(options.overrides, options.warmup, options.top)
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)
    except ConfigError as error:
        print(f"profile_step.py: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        leave_distributed()
    return 0


def measure(overrides: list[str], warmup: int, top: int) -> list[str]:
    """The report as lines. Raises ConfigError where there is no GPU."""
    run = RandomRun.open(overrides, only_on_gpu="a profile of kernels")
    mesh, device = run.mesh, run.mesh.device
    batches = random_micro_batches(run.config, mesh, 0)
    seconds = []
    window = profile(activities=[ProfilerActivity.CUDA])
    for step in range(warmup + 2):  # one for the profiler's own start
        last = step == warmup + 1
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)
        if last:
            window.start()
        began = time.perf_counter()
        run.step(step, batches)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        if step == 0:
            first = f"first step {seconds[0]:.1f} s, "
    window.stop()
    events = window.profiler.kineto_results.events()  # type: ignore[union-attr]
    cuda = torch.autograd.DeviceType.CUDA
    asked = {event.correlation_id(): event.start_ns() for event in events if event.device_type() != cuda}
    kernels = [
        Kernel(
            event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), asked.get(event.correlation_id())
        )
        for event in events
        if event.device_type() == cuda and event.duration_ns() > 0
    ]
    title = (
        f"{mesh.world_size} ranks, tensor {mesh.tp_size}: {first}then "
        + ", ".join(f"{s * 1e3:.1f}" for s in seconds[1:])
        + f" ms (the last one profiled), {run.tokens / min(seconds[1:]):,.0f} tokens/s, "
        f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"
    )
    by_name: dict[str, list[int]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    names = [f"{sum(times) / 1e6:9.1f} ms {len(times):6} x  {name[:100]}" for name, times in longest]
    return [*run.said, title, *table(kernels, seconds[-1]), *names]


if __name__ == "__main__":
    end_without_reader()
    end_process(main(sys.argv[1:]))
