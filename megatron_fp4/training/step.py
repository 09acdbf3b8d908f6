"""One training step: `accumulate` the gradient over micro-batches, then `update` the weights, or skip the step.

Besides the collectives of the model and its parameters, a step has two: a sum over the tensor axis (only with sequence
parallelism), and one all-reduce of a few FP64 numbers: loss, squared gradient norm, and requests of ranks (to stop, to
save, ...). All ranks get the same numbers, so they clip, skip and stop alike. Reading these numbers is the step's only
host sync. It must not stall the device: the device decides whether to update and by how much to clip, and the host
reads the numbers after it has launched the update. Only if the host judges spikes, or the optimizer cannot skip an
update on the device, does the update wait for the numbers.
If not all targets count, an earlier all-reduce sums how many do.

The loss of a global batch is the mean over its targets. If all targets count, all micro-batches have the same number of
them, and their means are averaged. If some do not count (`data.boundary_loss=false`), the loss is

    (sum of the losses of all targets that count) / (their number),     both over the global batch,

so every target has the same weight, whatever the micro-batches and ranks. Ranks sum the number before the first
backward pass, and the mean of a micro-batch is weighted by its share of that number.

A gradient is a DTensor placed like its parameter, and summed over data-parallel ranks.

With `mesh.reproducible`, no result depends on the number of data-parallel ranks: a tree sums the gradients
(parallel/reproducible.py), the losses of micro-batches are sent one by one, and the norm's sum is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp4.parallel.data_parallel import gathered_model_of, gathered_parameters
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import copy_axes, holds_first_copy
from megatron_fp4.parallel.reproducible import exact_norm_share, leaf_size
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.cuda_graphs import MicroBatchGraphs
from megatron_fp4.training.optimizer import is_fused, optimizer_parameters, set_lr, step_unless
from megatron_fp4.training.providers import MicroBatch


class GlobalBatch(NamedTuple):
    """The global batch that a micro-batch belongs to. num_targets: how many targets count, int64 0-dim; None: all."""

    num_micro_batches: int
    num_targets: Tensor | None = None


ALONE = GlobalBatch(1)
"""For a micro-batch on its own."""


class StepRequests(NamedTuple):
    """Requests that ranks send each other with a step. `update` takes those of this rank and returns those of any rank.

    stop: end after this step, with a checkpoint (runtime/signals.py). save: save a checkpoint now. save_failed: the
    last save in the background failed.
    """

    stop: bool = False
    save: bool = False
    save_failed: bool = False


NO_REQUESTS = StepRequests()


@dataclass(frozen=True)
class StepResult:
    """The result of a step; the same on all ranks.

    loss: mean NLL in nats over the targets of the global batch that count, before the update. grad_norm: global L2 norm
    before clipping. skipped: no update: loss or norm not finite or (spike) not accepted. requests: of any rank.
    """

    loss: float
    grad_norm: float
    skipped: bool
    requests: StepRequests = NO_REQUESTS
    spike: bool = False


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    mesh: ParallelMesh,
    step_state: StepState,
    *,
    global_batch: GlobalBatch | None = None,
    progress: Progress | None = None,
    graphs: MicroBatchGraphs | None = None,
) -> Tensor:
    """Add the gradient of `micro_batches` to `.grad`; returns their loss as FP64, 0-dim (`mesh.reproducible`: 1-dim,
    one for each micro-batch of `global_batch`, 0 for those of other ranks).

    Gradient and loss are this rank's parts of those of the global batch: their sums over ranks are means over it.
    global_batch: None: `global_batch_of(micro_batches, mesh)`, a collective. The gradients are summed over ranks
    after the last micro-batch or, with `mesh.reduce_each`, after each one.

    model: called with `inputs_of` of a micro-batch; returns its mean loss (0-dim FP32). micro_batches: this rank's, of
    the same number and size on all ranks. step_state: the caller sets its step. progress: learns which
    micro-batch runs. graphs: of `model`, replayed if possible; None: all micro-batches run eagerly.
    """
    assert micro_batches
    global_batch, progress = global_batch or global_batch_of(micro_batches, mesh), progress or Progress()
    num_global, num_own, tree = global_batch.num_micro_batches, len(micro_batches), gathered_model_of(model).tree
    num_leaf = num_own if tree is None else leaf_size(num_global)
    losses = torch.zeros(num_global if mesh.reproducible else 1, dtype=torch.float64, device=mesh.device)
    if tree is not None:
        tree.begin()
    replaying = nullcontext() if graphs is None else graphs.step(micro_batches, num_global, step_state)
    with replaying as replays, gathered_parameters(model, step_state.weights_version) as gathered:
        for position, micro_batch in enumerate(micro_batches, start=1):
            progress.at(step_state.step + 1, f"forward and backward of micro-batch {position} of {num_own}")
            loss = None if replays is None else replays.run(micro_batch, step_state, (position - 1) % num_leaf)
            if eager := loss is None:
                gathered.prepare(position == 1, position == num_own)
                loss = _computed(model, micro_batch, global_batch, mesh, step_state)
            losses[micro_batch.index % len(losses)].add_(loss)
            if tree is not None and position % num_leaf == 0 and position < num_own:
                tree.keep(copied=not eager)
        gathered.reduce()
    if global_batch.num_targets is None:
        losses /= num_global
    return losses if mesh.reproducible else losses[0]


def _computed(
    model: nn.Module, micro_batch: MicroBatch, global_batch: GlobalBatch, mesh: ParallelMesh, step_state: StepState
) -> Tensor:
    """Run forward and backward of a micro-batch; returns its part of the loss of `global_batch`. If all targets count,
    this is its mean loss, and the caller divides by the number of micro-batches."""
    tokens, targets, options = inputs_of(micro_batch, mesh, step_state)
    loss: Tensor = model(tokens, targets, **options)
    if global_batch.num_targets is None:
        (loss / global_batch.num_micro_batches).backward()
        return loss.detach()
    assert micro_batch.num_targets is not None
    weight = micro_batch.num_targets / global_batch.num_targets.clamp(min=1).to(torch.float64)
    (loss * weight.to(loss.dtype)).backward()
    return loss.detach() * weight


def global_batch_of(micro_batches: Sequence[MicroBatch], mesh: ParallelMesh) -> GlobalBatch:
    """The global batch of which this rank has `micro_batches`, and other data-parallel ranks the same number. A
    collective if not all targets count."""
    # The backward pass of a micro-batch must not depend on the number of ranks.
    num_micro_batches = len(micro_batches) * mesh.batch.size
    counts = [batch.num_targets for batch in micro_batches if batch.num_targets is not None]
    if not counts:
        return GlobalBatch(num_micro_batches)
    assert len(counts) == len(micro_batches), "micro-batches of one run are all of one kind"
    num_targets = torch.full((), sum(counts), dtype=torch.int64, device=mesh.device)
    dist.all_reduce(num_targets, group=mesh.batch.group)
    return GlobalBatch(num_micro_batches, num_targets)


def inputs_of(
    micro_batch: MicroBatch, mesh: ParallelMesh, step_state: StepState
) -> tuple[Tensor, Tensor, dict[str, Tensor | int | None]]:
    """The model's arguments for a micro-batch, on the device. Sets `step_state` to the micro-batch.

    model(tokens, targets, **options) returns the mean loss over the targets that count, FP32 0-dim; 0 if none counts.
    options: `documents`, `num_documents` and `num_targets`, if the micro-batch has them.
    """
    step_state.micro_batch = micro_batch.index
    if step_state.keys is not None:
        step_state.keys.fill(step_state.seed, step_state.step, step_state.micro_batch)
    options: dict[str, Tensor | int | None] = {}
    if micro_batch.documents is not None:
        options["documents"] = micro_batch.documents.to(mesh.device, non_blocking=True)
        options["num_documents"] = micro_batch.num_documents
    if micro_batch.num_targets is not None:
        options["num_targets"] = micro_batch.num_targets
    tokens, targets = (t.to(mesh.device, non_blocking=True) for t in (micro_batch.tokens, micro_batch.targets))
    return tokens, targets, options


def update(
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    mesh: ParallelMesh,
    step_state: StepState,
    *,
    lr: float,
    clip_norm: float,
    requests: StepRequests = NO_REQUESTS,
    accept: Callable[[float, float], bool] | None = None,
    progress: Progress | None = None,
    model: nn.Module | None = None,
) -> StepResult:
    """Update the weights with the gradients of `accumulate`, or skip the step; drop the gradients.

    loss: returned by `accumulate`. clip_norm: limit of the global gradient's norm, 0 for none. requests: this rank's.
    accept: decides from a finite loss and norm (`StepResult`) whether to update, the same on all ranks; None: always.
    progress: learns what this rank does. model: its parameters are gathered for the next step, if it gathers once a
    step and the update does not wait for the host.
    """
    parameters, progress = optimizer_parameters(optimizer), progress or Progress()
    progress.at(step_state.step + 1, "sums over all ranks")
    sum_replicated_gradients(parameters, mesh)

    # Ranks that compute the same micro-batches have the same loss; it counts once.
    counted_loss = loss if mesh.model.rank == 0 else torch.zeros_like(loss)
    # Pinned, because a copy from pageable memory would wait for the device.
    requested = torch.tensor([*map(float, requests)], dtype=torch.float64, pin_memory=loss.is_cuda)
    share = squared_norm_share(parameters, mesh)
    totals = torch.cat((counted_loss.view(-1), share.view(1), requested.to(mesh.device, non_blocking=True)))
    dist.all_reduce(totals)
    if mesh.reproducible:
        losses, others = totals.tensor_split([loss.numel()])
        totals = torch.cat((losses.sum(0, keepdim=True), others))
    on_host, arrived = totals.to("cpu", non_blocking=True), torch.cuda.Event() if totals.is_cuda else None
    if arrived is not None:
        arrived.record()
    norm = totals[1].sqrt()
    on_device = accept is None and is_fused(optimizer)
    if on_device:
        clip_gradients(parameters, norm, clip_norm)
        set_lr(optimizer, lr)
        step_unless(optimizer, (~(totals[0].isfinite() & norm.isfinite())).to(torch.float32))
    gathered = gathered_model_of(model) if on_device and model is not None else None
    if gathered is not None:
        gathered.gather_ahead()
    if arrived is not None:
        arrived.synchronize()
    mean_loss, squared_norm, *counts = on_host.tolist()

    progress.at(step_state.step + 1, "update")
    grad_norm = math.sqrt(squared_norm)
    finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    spike = finite and accept is not None and not accept(mean_loss, grad_norm)
    skipped = spike or not finite
    if not (on_device or skipped):
        clip_gradients(parameters, norm, clip_norm)
        set_lr(optimizer, lr)
        optimizer.step()
    if not skipped:
        step_state.weights_version += 1
    if gathered is not None:
        gathered.ahead = step_state.weights_version
    optimizer.zero_grad(set_to_none=True)
    return StepResult(mean_loss, grad_norm, skipped, StepRequests(*(count > 0 for count in counts)), spike)


@torch.no_grad()
def sum_replicated_gradients(parameters: Sequence[nn.Parameter], mesh: ParallelMesh) -> None:
    """Sum the gradients of parameters that ranks hold in copies, over those that compute different tokens, in place.

    With sequence parallelism each rank of a tensor-parallel group computes only its slice of the sequence, so it has
    only a part of the gradient of a replicated parameter (a norm's scale). There is one all-reduce for all of them.
    """
    for axis in mesh.partial_axes:
        parts = [local_part(p.grad) for p in parameters if p.grad is not None and axis in copy_axes(p, mesh)]
        if not parts:
            continue
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=mesh.device_mesh.get_group(axis))
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))


@torch.no_grad()
def squared_norm_share(parameters: Sequence[nn.Parameter], mesh: ParallelMesh) -> Tensor:
    """This rank's share of the squared L2 norm of all gradients: 0-dim FP64 on the mesh's device.

    The sum of all shares counts every element once: of the ranks that hold the same shard, only the first one counts
    it. The caller reduces the shares together with other numbers. A collective with `mesh.reproducible`.
    """
    mine = [local_part(p.grad) for p in parameters if p.grad is not None and holds_first_copy(p, mesh)]
    if mesh.reproducible:
        return exact_norm_share(mine, mesh.device)
    if not mine:
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    # In FP64, squares of FP32 gradients neither overflow nor underflow.
    norms = torch._foreach_norm(mine, 2.0, dtype=torch.float64)  # type: ignore[attr-defined]
    return torch.stack(norms).square().sum()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, clip_norm: float) -> None:
    """Scale all gradients so that their global norm is at most `clip_norm` (0: no limit). norm: before, 0-dim FP64.

    If the norm is within the limit, the gradients are multiplied by 1, so that the host does not need the norm.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if clip_norm == 0 or not gradients:
        return
    limit = torch.full_like(norm, clip_norm)  # `clip_norm / norm` would multiply by the reciprocal: other bits
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    torch._foreach_mul_(gradients, factor.to(torch.float32))  # type: ignore[attr-defined]
