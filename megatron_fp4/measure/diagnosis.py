"""Compute a failed step again to find where numbers stopped being finite, or what made it a spike.

All functions are collectives. Call them before weights change, with the StepState of the failed step, so that
stochastic rounding repeats itself. They drop the gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


@dataclass
class NonFiniteReport:
    """Where one rank found numbers that are not finite while it computed one micro-batch.

    weights: parameters that were not finite before. output: the first module, in execution order, whose output was not
    finite. output_gradient: the first module, in backward order, whose output's gradient was not finite; the fault is
    then in the module that takes this output. gradients: parameters whose gradient was not finite.
    """

    weights: list[str] = field(default_factory=list)
    output: str | None = None
    output_gradient: str | None = None
    gradients: list[str] = field(default_factory=list)

    @property
    def has_origin(self) -> bool:
        """Whether it names a place in this rank's own computation, and not only gradients, which may be reduced."""
        return bool(self.weights or self.output or self.output_gradient)

    def __str__(self) -> str:
        parts = {
            f"weights of {_shorten(self.weights)}": self.weights,
            f"first in the forward pass: the output of {self.output}": self.output,
            f"first in the backward pass: the gradient of the output of {self.output_gradient}": self.output_gradient,
            f"gradients of {_shorten(self.gradients)}": self.gradients,
        }
        return "; ".join(text for text, found in parts.items() if found)


def find_nonfinite(
    model: nn.Module, batch: MicroBatch, mesh: ParallelMesh, step_state: StepState, global_batch: GlobalBatch = ALONE
) -> NonFiniteReport:
    """Run forward and backward of one micro-batch of each rank again, and report where numbers stop being finite.

    global_batch: the step's global batch; the micro-batch has the same part in its loss as in the step.
    """
    report = NonFiniteReport(weights=[name for name, p in model.named_parameters() if not _is_finite(p)])

    def after_forward(name: str, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in tensors_in(output):
            if report.output is None and not _is_finite(tensor):
                report.output = name
            if tensor.requires_grad:
                tensor.register_hook(partial(after_backward, name))

    def after_backward(name: str, gradient: Tensor) -> None:
        if report.output_gradient is None and not _is_finite(gradient):
            report.output_gradient = name

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(partial(after_forward, name or "the model (its loss)"))
            hooks.callback(hook.remove)
        accumulate(model, [batch], mesh, step_state, global_batch=global_batch)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _is_finite(parameter.grad):
            report.gradients.append(name)
        parameter.grad = None
    return report


def diagnose_nonfinite(
    model: nn.Module, micro_batches: Sequence[MicroBatch], mesh: ParallelMesh, step_state: StepState
) -> str:
    """Run the micro-batches of a failed step again; returns a line that says where numbers stop being finite.

    micro_batches: the same number on each rank.
    """
    global_batch = global_batch_of(micro_batches, mesh)
    mine = [(batch.index, find_nonfinite(model, batch, mesh, step_state, global_batch)) for batch in micro_batches]
    of_ranks: list[list[tuple[int, NonFiniteReport]]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(of_ranks, mine)
    found = [
        (f"rank {rank}, micro-batch {index}: {report}", report.has_origin)
        for rank, entries in enumerate(of_ranks)
        for index, report in entries
        if str(report)
    ]
    if not found:
        return (
            "Computed again, every micro-batch is finite: suspect the reduction of gradients, or a device that "
            "does not repeat its results."
        )
    # One faulty rank spoils the reduced gradients of all: a rank that found only gradients is named only if no rank
    # found more.
    lines = [line for line, has_origin in found if has_origin] or [line for line, _ in found]
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


def tensors_in(values: object) -> list[Tensor]:
    """The tensors among a module's inputs or outputs: a tensor, or nested tuples and lists of tensors."""
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, (tuple, list)) else []


def _is_finite(tensor: Tensor) -> bool:
    local = local_part(tensor)
    return not local.is_floating_point() or bool(local.isfinite().all())


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
