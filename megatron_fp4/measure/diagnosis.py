"""Compute a failed step again to find where numbers stopped being finite, or what made it a spike.

All functions are collectives. Call them before weights change, with the StepState of the failed step, so that
stochastic rounding repeats itself. They drop the gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp4.measure.replay import Trace
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import holds_first_copy
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.providers import MicroBatch
from megatron_fp4.training.step import (
    ALONE,
    GlobalBatch,
    StepResult,
    accumulate,
    global_batch_of,
    sum_replicated_gradients,
)

_LISTED = 3


class _NotFinite(Trace):
    """The names of the results that are not finite, in the order of execution."""

    def add(self, name: str, *tensors: Tensor) -> None:
        for tensor in map(local_part, tensors):
            if tensor.is_floating_point() and not tensor.isfinite().all():
                self.names.append(name)


def find_nonfinite(
    model: nn.Module, batch: MicroBatch, mesh: ParallelMesh, step_state: StepState, global_batch: GlobalBatch = ALONE
) -> str:
    """Run forward and backward of one micro-batch of each rank again; returns which weights were not finite before, and
    the first result that is not finite; "" if there are none.

    global_batch: the step's global batch; the micro-batch has the same part in its loss as in the step.
    """
    trace, weights = _NotFinite(), _NotFinite()
    for name, parameter in model.named_parameters():
        weights.add(name, parameter)
    with trace.of(model):
        accumulate(model, [batch], mesh, step_state, global_batch=global_batch)
    model.zero_grad()
    more = f" and {len(weights.names) - _LISTED} more" if len(weights.names) > _LISTED else ""
    of_weights = [f"weights of {', '.join(weights.names[:_LISTED])}{more}"] if weights.names else []
    return "; ".join([*of_weights, *(f"first {name}" for name in trace.names[:1])])


def diagnose_nonfinite(
    model: nn.Module, micro_batches: Sequence[MicroBatch], mesh: ParallelMesh, step_state: StepState
) -> str:
    """Run the micro-batches of a failed step again; returns a line that says where numbers stop being finite.

    micro_batches: the same number on each rank.
    """
    global_batch = global_batch_of(micro_batches, mesh)
    mine = [(batch.index, find_nonfinite(model, batch, mesh, step_state, global_batch)) for batch in micro_batches]
    of_ranks: list[list[tuple[int, str]]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(of_ranks, mine)
    lines = [
        f"rank {rank}, micro-batch {index}: {found}"
        for rank, entries in enumerate(of_ranks)
        for index, found in entries
        if found
    ]
    if not lines:
        return (
            "Computed again, every micro-batch is finite: suspect the reduction of gradients, or a device that "
            "does not repeat its results."
        )
    more = f", and {len(lines) - 4} more micro-batches" if len(lines) > 4 else ""
    return f"Not finite: {'. '.join(lines[:4])}{more}."


def diagnose_spike(
    model: nn.Module, micro_batches: Sequence[MicroBatch], mesh: ParallelMesh, step_state: StepState, result: StepResult
) -> str:
    """Run the micro-batches of a refused step again; returns a line that says whether loss and gradient norm are those
    of `result`, which micro-batches have the largest losses, and which parameters have most of the gradient."""
    losses: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, inputs, loss: losses.append(loss.detach()))
    try:
        accumulate(model, micro_batches, mesh, step_state)
    finally:
        hook.remove()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sum_replicated_gradients(list(named.values()), mesh)
    squares = torch.zeros(len(named), dtype=torch.float64, device=mesh.device)
    for square, parameter in zip(squares, named.values(), strict=True):
        if parameter.grad is not None and holds_first_copy(parameter, mesh):
            square.copy_(torch.linalg.vector_norm(local_part(parameter.grad), dtype=torch.float64).square())
        parameter.grad = None
    dist.all_reduce(squares)

    mine = [
        # The last number is the micro-batch's weight: how many of its targets count.
        (loss.item(), batch.index, mesh.rank, batch.targets.numel() if batch.num_targets is None else batch.num_targets)
        for loss, batch in zip(losses, micro_batches, strict=True)
    ]
    of_ranks: list[list[tuple[float, int, int, int]]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(of_ranks, mine if mesh.model.rank == 0 else [])
    found = sorted((entry for entries in of_ranks for entry in entries), reverse=True)
    num_targets, total = max(sum(entry[3] for entry in found), 1), squares.sum().item()
    loss, norm = math.fsum(entry[0] * entry[3] for entry in found) / num_targets, math.sqrt(total)
    # These sums have another order, so the last bits may differ. A faulty machine differs by more.
    repeats = math.isclose(loss, result.loss, rel_tol=1e-5) and math.isclose(norm, result.grad_norm, rel_tol=1e-4)
    verdict = "as before" if repeats else "NOT as before: suspect a device that does not repeat its results"
    worst = ", ".join(f"{value:.4g} in micro-batch {index} on rank {rank}" for value, index, rank, _ in found[:_LISTED])
    middle = statistics.median(entry[0] for entry in found)
    shares = sorted(zip(squares.tolist(), named, strict=True), key=lambda share: -share[0])[:_LISTED]
    most = ", ".join(f"{name} {square / max(total, math.ulp(0.0)):.0%}" for square, name in shares)
    return (
        f"Computed again: loss {loss:.4g}, gradient norm {norm:.4g}, {verdict}. Largest losses: {worst} (median of "
        f"{len(found)} micro-batches {middle:.4g}). Most of the squared gradient norm: {most}."
    )
