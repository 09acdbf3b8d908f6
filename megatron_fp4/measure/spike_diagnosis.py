"""What made a step a spike: the step, computed again and looked at by micro-batch and by parameter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.accumulate import MicroBatch, accumulate
from megatron_fp4.training.gradients import holds_first_copy, sum_replicated_gradients
from megatron_fp4.training.step import StepResult

_LISTED = 3


def diagnose_spike(
    model: nn.Module, micro_batches: Sequence[MicroBatch], mesh: ParallelMesh, clock: StepState, result: StepResult
) -> str:
    """Run the refused step's micro-batches again and say, the same on all ranks: whether loss and gradient norm come
    out as they were in `result`, which micro-batches have the largest losses, which parameters most of the gradient.

    All ranks must call it together, before weights change; the clock's step must still be the step's. Gradients are
    dropped.
    """
    losses: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda module, inputs, loss: losses.append(loss.detach()))
    try:
        accumulate(model, micro_batches, mesh, clock)
    finally:
        handle.remove()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sum_replicated_gradients(list(named.values()), mesh)
    squares = torch.zeros(len(named), dtype=torch.float64, device=mesh.device)
    for i, parameter in enumerate(named.values()):
        if parameter.grad is not None and holds_first_copy(parameter, mesh):
            squares[i] = torch.linalg.vector_norm(local_part(parameter.grad), dtype=torch.float64).square()
        parameter.grad = None
    dist.all_reduce(squares)

    mine = [
        # A micro-batch weighs as much as it has targets that count.
        (loss.item(), batch.index, mesh.rank, batch.targets.numel() if batch.num_targets is None else batch.num_targets)
        for loss, batch in zip(losses, micro_batches, strict=True)
    ]
    of_ranks: list[list[tuple[float, int, int, int]]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(of_ranks, mine if mesh.tp_rank == 0 else [])
    found = sorted((entry for entries in of_ranks for entry in entries), reverse=True)
    num_targets = max(sum(entry[3] for entry in found), 1)
    loss, norm = math.fsum(entry[0] * entry[3] for entry in found) / num_targets, math.sqrt(squares.sum().item())
    # Sums in another order: the last bits may differ, a machine that errs does not stay within them.
    again = math.isclose(loss, result.loss, rel_tol=1e-5) and math.isclose(norm, result.grad_norm, rel_tol=1e-4)
    verdict = "as before" if again else "NOT as before: suspect a device that does not repeat its results"
    worst = ", ".join(f"{value:.4g} in micro-batch {index} on rank {rank}" for value, index, rank, _ in found[:_LISTED])
    middle = statistics.median(entry[0] for entry in found)
    order = squares.argsort(descending=True)[:_LISTED].tolist()
    names, total = list(named), max(squares.sum().item(), math.ulp(0.0))
    shares = ", ".join(f"{names[i]} {squares[i].item() / total:.0%}" for i in order)
    return (
        f"Computed again: loss {loss:.4g}, gradient norm {norm:.4g}, {verdict}. Largest losses: {worst} (median of "
        f"{len(found)} micro-batches {middle:.4g}). Most of the squared gradient norm: {shares}."
    )
