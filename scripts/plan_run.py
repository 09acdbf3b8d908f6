"""What a run would need, without running it: memory, messages, FLOPs, time. For any number of ranks, in one process.

    python scripts/plan_run.py --world-size 736 experiment=nemotron_h_12b data=my_corpus parallel.tensor=8
    WORLD_SIZE=736 python pretrain.py experiment=nemotron_h_12b data=my_corpus parallel.tensor=8 run.dry=true

Both do the same. The configuration is checked as for the run itself; then the job is built on a fake process group and
takes two steps on fake tensors (megatron_fp4/planning/dry_run.py), with what the CUDA kernels would allocate. Data is
not opened. Time is the model's FLOPs over `run.dry_mfu` of `run.dry_peak_tflops` per rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # assembly.py is no package

from megatron_fp4.config.schema import Config
from megatron_fp4.planning.dry_run import Build, DryRun, dry_run
from megatron_fp4.planning.stand_ins import MULTIPROCESSORS
from megatron_fp4.report import console as show
from megatron_fp4.report.console import RunConsole
from models.attention import split_heads
from models.execution import Execution
from models.execution_choice import choose_execution, describe_execution
from models.flops import forward_flops_per_token, parameter_count
from models.scan import ScanInputs

_GIB = 2**30


def main(arguments: list[str]) -> int:
    """Run the command; the exit code is that of pretrain.py."""
    from pretrain import main as pretrain

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    parser.add_argument("overrides", nargs="*", help="the run's configuration, as for pretrain.py")
    options = parser.parse_intermixed_args(arguments)
    os.environ["WORLD_SIZE"] = str(options.world_size)
    return pretrain([*options.overrides, "run.dry=true"])


def plan_run(config: Config, world_size: int, build: Build) -> None:
    """Print what the run of `config` on `world_size` ranks needs. build: see `dry_run`."""
    dry = dry_run(config, world_size, build)
    console = RunConsole(config.train.steps)
    console.text(f"kernels: {describe_execution(planned_execution(config), config.model.pattern)}")
    console.table(show.batch_table(config.train, config.parallel, world_size))
    console.table(show.facts_table("Memory of a rank", memory_facts(config, dry)))
    console.table(messages_table(dry))
    console.table(show.facts_table("Work and time", time_facts(config, world_size)))


def memory_facts(config: Config, dry: DryRun) -> dict[str, object]:
    """Name -> size, in GiB."""
    memory = dry.memory
    sizes = {
        "parameters (FP32 shards)": memory.parameters,
        "optimizer state (FP32 moments)": memory.optimizer,
        "gradients (FP32 shards)": memory.gradients,
        "gradients before their reduction (FP32)": memory.unreduced_gradients,
        f"gathered parameters ({config.precision.compute_dtype})": memory.gathered,
        "quantized weights": memory.quantized_weights,
        "activations of a micro-batch": memory.activations,
        "workspaces of cuBLAS": memory.workspaces,
        "peak, temporaries included": memory.peak,
    }
    total = parameter_count(config.model).total
    shares = f"{memory.num_parameters:,} of {total:,}"
    return {"parameters of the rank": shares, **{name: f"{size / _GIB:.2f} GiB" for name, size in sizes.items()}}


def messages_table(dry: DryRun) -> Table:
    """The collectives of a step."""
    table = Table(title="Collectives of a step, per rank", title_justify="left", title_style="bold")
    for name in ("collective", "over", "ranks"):
        table.add_column(name)
    for name in ("number", "MiB each", "GiB sent"):
        table.add_column(name, justify="right")
    # Ordered by volume; sizes of a kind are summed up, largest kinds first.
    kinds: dict[tuple[str, str, int], list[tuple[int, float, float]]] = {}
    for message, count in dry.messages.items():
        if message.ranks > 1:
            kind = (message.operation, message.group, message.ranks)
            kinds.setdefault(kind, []).append((count, count * message.num_bytes, count * message.sent_bytes))
    for (operation, group, ranks), rows in sorted(kinds.items(), key=lambda item: -sum(row[2] for row in item[1])):
        count, num_bytes, sent = (sum(column) for column in zip(*rows, strict=True))
        table.add_row(
            operation, group, str(ranks), f"{count:,}", f"{num_bytes / count / 2**20:.2f}", f"{sent / _GIB:.3f}"
        )
    return table


def time_facts(config: Config, world_size: int) -> dict[str, object]:
    """FLOPs per token, and the time of a step and of the run at the given utilization."""
    train, run = config.train, config.run
    flops = 3 * forward_flops_per_token(config.model, train.sequence_length).total
    tokens = train.global_batch_size * train.sequence_length
    seconds = flops * tokens / (world_size * run.dry_peak_tflops * 1e12 * run.dry_mfu)
    return {
        "model FLOPs per token (forward and backward)": f"{flops:.4g}",
        "model FLOPs of the run": f"{flops * tokens * train.steps:.4g}",
        "utilization assumed": f"{run.dry_mfu:.0%} of {run.dry_peak_tflops:g} TFLOP/s per rank",
        "time of a step": f"{seconds:.3g} s",
        "time of the run": f"{seconds * train.steps / 86400:.3g} days",
        "tokens per second and rank": f"{tokens / seconds / world_size:,.0f}",
    }


def planned_execution(config: Config) -> Execution:
    """The kernels of the run on a GPU that has every package, unless `train.kernels=torch`: what they would allocate.

    Stand-ins keep the same as the kernels for the backward pass and have the same temporaries: none but where said
    below. Nearly all of these kernels keep their inputs and compute the rest again.
    Raises ConfigError for unknown choices.
    """
    train = config.train if config.train.kernels != "fused" else replace(config.train, kernels="auto")
    plain = choose_execution(train, config.model, config.parallel.tensor, "cpu", config.precision.compute_dtype)
    kernels: dict[str, Callable[..., Tensor]] = {"attention": attention_shapes(config.run.deterministic)}
    if train.kernels == "torch" or config.precision.compute_dtype != "bfloat16":
        return replace(plain, kernels=kernels)
    return replace(plain, kernels={**kernels, "scan": scan_shapes, "conv": conv_shapes}, compile=as_one_kernel)


def attention_shapes(deterministic: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Stands in for attention. deterministic: `run.deterministic`, which costs the backward pass memory."""
    return lambda q, k, v: _Attention.apply(q, k, v, deterministic)  # type: ignore[return-value]


def as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stands in for torch.compile."""
    # Splitting heads moves numbers about and turns them: the backward pass needs none of them.
    return lambda *arguments: _OneKernel.apply(function, function is not split_heads, *arguments)


def conv_shapes(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor) -> Tensor:
    """Stands in for causal-conv1d."""
    return _OneKernel.apply(lambda x, *_: x, True, x_bsc.contiguous(), weight_ck, bias_c)  # type: ignore[return-value]


def scan_shapes(inputs: ScanInputs, chunk_size: int) -> Tensor:
    """Stands in for mamba-ssm's scan."""
    return _Scan.apply(chunk_size, *inputs)  # type: ignore[return-value]


class _OneKernel(torch.autograd.Function):
    """A function as one kernel each way, without temporaries; it keeps its inputs, or with `keeps` off nothing."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], keeps: bool, *arguments: Any) -> Any:
        # On the meta device, which the ledger does not count.
        meta = [a.detach().to("meta") if isinstance(a, Tensor) else a for a in arguments]
        made = function(*meta)
        device = next(a.device for a in arguments if isinstance(a, Tensor))
        ctx.save_for_backward(*(a for a in arguments if keeps and isinstance(a, Tensor)))
        ctx.inputs, ctx.device = meta, device
        outputs = [_empty(t, device) for t in (made if isinstance(made, tuple) else [made])]
        return tuple(outputs) if isinstance(made, tuple) else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        assert all(tensor is not None for tensor in ctx.saved_tensors)  # where they are computed again, now
        wanted = zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(_empty(t, ctx.device) if needed else None for t, needed in wanted)


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


class _Scan(torch.autograd.Function):
    """mamba-ssm's scan. It keeps its inputs, its output and the running sums of dt A (FP32), and makes the states at
    chunk boundaries and C B^T of every chunk (FP32) in both passes."""

    @staticmethod
    def forward(ctx: Any, chunk_size: int, *inputs: Tensor) -> Tensor:
        x, dt, _, b, *_ = inputs
        chunks = x.shape[0] * -(-x.shape[1] // chunk_size)
        ctx.states, ctx.products = chunks * x.shape[2] * x.shape[3] * b.shape[3], chunks * b.shape[2] * chunk_size**2
        sums, steps = (torch.empty_like(dt, dtype=torch.float32) for _ in range(2))
        states = x.new_empty(ctx.states, dtype=torch.float32)
        states = x.new_empty(ctx.states)  # passed on from chunk to chunk, in the dtype of x
        products = x.new_empty(ctx.products, dtype=torch.float32)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        del steps, states, products
        ctx.save_for_backward(y, sums, *inputs)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        y, sums, *inputs = ctx.saved_tensors
        again = [torch.empty_like(sums) for _ in range(2)]
        products = sums.new_empty(ctx.products)
        # The states, the same passed on, and their gradient; then the latter two in the dtype of x as well.
        passed, gradient = sums.new_empty(ctx.states), sums.new_empty(ctx.states)
        rounded = [y.new_empty(ctx.states) for _ in range(2)]
        del passed, gradient
        gradients = [
            _empty(t, t.device) if needed else None for t, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True)
        ]
        del again, products, rounded
        return None, *gradients


class _Attention(torch.autograd.Function):
    """FlashAttention: keeps q, k, v, its output and the logarithm of every row's sum (FP32).

    Its backward pass adds up dq in FP32, deterministically in as many parts as keep all multiprocessors busy, and makes
    dk and dv for every query head. (cuDNN's workspace is taken to be the same as without determinism.)
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> Tensor:
        y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sums = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.parts = -(-MULTIPROCESSORS // (q.shape[0] * q.shape[2])) if deterministic else 1
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, sums = ctx.saved_tensors
        batch, length, heads, dim = q.shape
        padded = -(-length // 128) * 128
        gradients = [_empty(t, t.device) for t in (q, k, v)]
        rows = sums.new_empty(batch, heads, padded)
        dq = sums.new_empty(ctx.parts, batch, padded, heads, -(-dim // 32) * 32)
        expanded = [_empty(q, q.device) for _ in range(2 if k.shape[2] < heads else 0)]
        del rows, dq, expanded
        return *gradients, None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
