"""One training step: `accumulate` the gradient over micro-batches, then `update` the weights, or skip the step.

A step talks to other ranks twice beyond what the model and FSDP do: the sum over the tensor axis (with sequence
parallelism only) and one all-reduce of a few FP64 numbers: loss, squared gradient norm, and what ranks request (to
stop, to save, ...). Since all ranks have the same, they clip, skip and stop alike. Reading these is its only host sync,
which must not let the device run dry: whether to update and by how much to clip is decided on the device, and the host
reads once it has launched the update. Only where spikes are judged, by the host, does the update wait for the numbers.
Where not all targets count, one number goes before: how many do.

The loss of a global batch is the mean over its targets. Where all targets count, every micro-batch has equally many and
their means are averaged. Where some do not (`data.boundary_loss=false`), the mean is

    (sum of the losses of all targets that count) / (their number),     both over the global batch,

so that every one of them weighs the same however the batch is cut into micro-batches and ranks: ranks add up how many
they have before the first backward pass, and a micro-batch's mean is weighted by its share of that number.

A gradient is a DTensor placed like its parameter; FSDP has summed it over data-parallel ranks.

With `mesh.reproducible` none of this depends on the number of data-parallel ranks: gradients are summed by a tree
(parallel/reproducible.py), losses travel one by one, and the norm is summed exactly (exact_norm.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from megatron_fp4.parallel.data_parallel import gradient_tree, without_fsdp_hooks
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import is_replicated
from megatron_fp4.parallel.reproducible import leaf_size
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.cuda_graphs import MicroBatchGraphs
from megatron_fp4.training.exact_norm import exact_norm_share
from megatron_fp4.training.optimizer import optimizer_parameters, set_lr, step_unless
from megatron_fp4.training.providers import MicroBatch


class GlobalBatch(NamedTuple):
    """What a micro-batch is a part of. num_targets: how many targets of the global batch count, int64 0-dim on the
    device; None: all do."""

    num_micro_batches: int
    num_targets: Tensor | None = None


ALONE = GlobalBatch(1)
"""For a micro-batch of which only its own mean is wanted."""


class StepRequests(NamedTuple):
    """What ranks tell each other with a step: of one rank when given to `update`, of any rank in its result.

    stop: to end after this step, with a checkpoint (runtime/signals.py). save: a checkpoint now. save_failed:
    this rank's last save in the background came to nothing.
    """

    stop: bool = False
    save: bool = False
    save_failed: bool = False


NO_REQUESTS = StepRequests()


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on all ranks.

    loss: mean NLL in nats over the targets of the global batch that count, before the update. grad_norm: global L2 norm
    before clipping. skipped: weights and optimizer are as they were, because loss or norm was not finite or, with
    `spike`, was refused. requests: of any rank.
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
    whole: GlobalBatch | None = None,
    reshard: bool = False,
    progress: Progress | None = None,
    graphs: MicroBatchGraphs | None = None,
) -> Tensor:
    """Add the gradient of `micro_batches` to `.grad`; returns their loss as FP64, 0-dim (`mesh.reproducible`: 1-dim,
    of each micro-batch of `whole`, 0 for those of other ranks).

    Both are sums over this rank's micro-batches of their parts of `whole`, so that the sums over ranks are means over
    the global batch; None: `global_batch_of(micro_batches, mesh)`, which all ranks then call together. FSDP adds the
    gradients up over ranks, once, after the last micro-batch, or (`mesh.reduce_each`) after each.

    model: as `inputs_of` feeds it; returns the micro-batch's mean loss (0-dim FP32). micro_batches: this rank's,
    equally many and equally large on all ranks. step_state: its step is the caller's to set. reshard: also free
    gathered parameters between micro-batches. progress: is told which micro-batch it is. graphs: those of `model`,
    replayed where they can be; None: all is computed eagerly.
    """
    assert micro_batches and (isinstance(model, FSDPModule) or mesh.dp_size == 1)
    whole, progress = whole or global_batch_of(micro_batches, mesh), progress or Progress()
    num_global, num_own, tree = whole.num_micro_batches, len(micro_batches), gradient_tree(model)
    num_leaf = num_own if tree is None else leaf_size(num_global)
    losses = torch.zeros(num_global if mesh.reproducible else 1, dtype=torch.float64, device=mesh.device)
    if tree is not None:
        tree.begin()
    with nullcontext() if graphs is None else graphs.step(micro_batches, num_global, step_state) as replays:
        for position, micro_batch in enumerate(micro_batches, start=1):
            progress.at(step_state.step + 1, f"forward and backward of micro-batch {position} of {num_own}")
            with _prepare_fsdp(model, mesh, position == 1, position == num_own, reshard):
                replayed = None if replays is None else replays.run(micro_batch, step_state, (position - 1) % num_leaf)
                loss = _computed(model, micro_batch, whole, mesh, step_state) if replayed is None else replayed
            losses[micro_batch.index % len(losses)].add_(loss)
            if tree is not None and position % num_leaf == 0 and position < num_own:
                tree.keep(copied=replayed is not None)
    if tree is not None:
        tree.finish()
    if whole.num_targets is None:
        losses /= num_global
    return losses if mesh.reproducible else losses[0]


def _computed(
    model: nn.Module, micro_batch: MicroBatch, whole: GlobalBatch, mesh: ParallelMesh, step_state: StepState
) -> Tensor:
    """Forward and backward pass of a micro-batch; returns its part of the loss of `whole`: where all targets count its
    mean loss, which the caller divides by the number of micro-batches."""
    tokens, targets, options = inputs_of(micro_batch, mesh, step_state)
    loss: Tensor = model(tokens, targets, **options)
    if whole.num_targets is None:
        (loss / whole.num_micro_batches).backward()
        return loss.detach()
    assert micro_batch.num_targets is not None
    weight = micro_batch.num_targets / whole.num_targets.clamp(min=1).to(torch.float64)
    (loss * weight.to(loss.dtype)).backward()
    return loss.detach() * weight


def global_batch_of(micro_batches: Sequence[MicroBatch], mesh: ParallelMesh) -> GlobalBatch:
    """The global batch that data-parallel ranks have `micro_batches` of, equally many each. Collective if not all
    targets count."""
    # The backward pass of a micro-batch must not depend on how many ranks share the work.
    num_micro_batches = len(micro_batches) * mesh.dp_size
    counts = [batch.num_targets for batch in micro_batches if batch.num_targets is not None]
    if not counts:
        return GlobalBatch(num_micro_batches)
    assert len(counts) == len(micro_batches), "micro-batches of one run are all of one kind"
    num_targets = torch.full((), sum(counts), dtype=torch.int64, device=mesh.device)
    dist.all_reduce(num_targets, group=mesh.dp_group)
    return GlobalBatch(num_micro_batches, num_targets)


def inputs_of(
    micro_batch: MicroBatch, mesh: ParallelMesh, step_state: StepState
) -> tuple[Tensor, Tensor, dict[str, Tensor | int | None]]:
    """What the model is called with for a micro-batch, on the device; `step_state` is set to it.

    model(tokens, targets), with `documents`, `num_documents` and `num_targets` by name where there are any, returns the
    mean loss over the targets that count, FP32 0-dim, 0 if none does.
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


def _prepare_fsdp(
    model: nn.Module, mesh: ParallelMesh, is_first: bool, is_last: bool, reshard: bool
) -> AbstractContextManager[None]:
    """Tell FSDP what the next backward pass is to reduce and free; returns a context for both passes."""
    if isinstance(model, FSDPModule):
        if is_first or is_last:
            model.set_requires_gradient_sync(is_last or mesh.reduce_each)
            model.set_requires_all_reduce(is_last)  # between replicas the sum over micro-batches is enough
            model.set_is_last_backward(is_last)
            # The optimizer updates shards, so the last backward must leave only them.
            model.set_reshard_after_backward(is_last or reshard)
        elif not reshard and not mesh.reduce_each:
            return without_fsdp_hooks(model)
    return nullcontext()


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
) -> StepResult:
    """Update the weights by the gradients of `accumulate`, or skip the step; drop the gradients. loss: its result.

    clip_norm: limit of the global gradient's norm, 0 for none. requests: this rank's. accept: decides from finite loss
    and norm (`StepResult`), alike on all ranks, whether to update; None: always. progress: is told where this rank is.
    """
    parameters, progress = optimizer_parameters(optimizer), progress or Progress()
    progress.at(step_state.step + 1, "sums over all ranks")
    sum_replicated_gradients(parameters, mesh)

    # All ranks of a tensor-parallel group have the same loss; it counts once.
    counted_loss = loss if mesh.tp_rank == 0 else torch.zeros_like(loss)
    # Pinned: a copy from pageable memory would wait for what the device still does.
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
    if accept is None:
        clip_gradients(parameters, norm, clip_norm)
        set_lr(optimizer, lr)
        step_unless(optimizer, (~(totals[0].isfinite() & norm.isfinite())).to(torch.float32))
    if arrived is not None:
        arrived.synchronize()
    mean_loss, squared_norm, *counts = on_host.tolist()

    progress.at(step_state.step + 1, "update")
    grad_norm = math.sqrt(squared_norm)
    finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    spike = finite and accept is not None and not accept(mean_loss, grad_norm)
    skipped = spike or not finite
    if accept is not None and not skipped:
        clip_gradients(parameters, norm, clip_norm)
        set_lr(optimizer, lr)
        optimizer.step()
    if not skipped:
        step_state.weights_version += 1
    optimizer.zero_grad(set_to_none=True)
    return StepResult(mean_loss, grad_norm, skipped, StepRequests(*(count > 0 for count in counts)), spike)


@torch.no_grad()
def sum_replicated_gradients(parameters: Sequence[nn.Parameter], mesh: ParallelMesh) -> None:
    """Add up, over the tensor-parallel group, the gradients of parameters that are replicated over it.

    With sequence parallelism each rank of the group has seen only its slice of the sequence, so a replicated
    parameter (a norm's scale) holds a part of its gradient on each. One all-reduce for all of them, in place.
    """
    if not mesh.sequence_parallel or mesh.tp_size == 1:
        return
    parts = [local_part(p.grad) for p in parameters if p.grad is not None and is_replicated(p)]
    if not parts:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=mesh.tp_group)
    for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(total.view_as(part))


@torch.no_grad()
def squared_norm_share(parameters: Sequence[nn.Parameter], mesh: ParallelMesh) -> Tensor:
    """This rank's share of the squared L2 norm of all gradients: 0-dim FP64 on the mesh's device.

    The sum over all ranks counts every element once: of the ranks that hold the same shard, only the first contributes.
    The caller reduces, so that the sum can travel with other numbers. Collective with `mesh.reproducible`.
    """
    mine = [local_part(p.grad) for p in parameters if p.grad is not None and holds_first_copy(p, mesh)]
    if mesh.reproducible:
        return exact_norm_share(mine, mesh.device)
    if not mine:
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    # Accumulated in FP64: squares of FP32 gradients neither overflow nor vanish in it.
    norms = torch._foreach_norm(mine, 2.0, dtype=torch.float64)  # type: ignore[attr-defined]
    return torch.stack(norms).square().sum()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, clip_norm: float) -> None:
    """Scale all gradients so that their global norm, `norm` before (0-dim FP64), becomes at most `clip_norm` (0: no
    limit).

    A norm within the limit makes the factor 1, which is multiplied too, so that the host need not know the norm.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if clip_norm == 0 or not gradients:
        return
    limit = torch.full_like(norm, clip_norm)  # `clip_norm / norm` would multiply by the reciprocal: other bits
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    torch._foreach_mul_(gradients, factor.to(torch.float32))  # type: ignore[attr-defined]


def holds_first_copy(parameter: nn.Parameter, mesh: ParallelMesh) -> bool:
    """Whether this rank is the first of those that hold the same shard of `parameter`."""
    sharded: set[str] = set()
    if isinstance(parameter, DTensor):
        assert not any(isinstance(placement, Partial) for placement in parameter.placements)
        names = parameter.device_mesh.mesh_dim_names or ()
        sharded = {n for n, p in zip(names, parameter.placements, strict=True) if not isinstance(p, Replicate)}
    return all(
        name in sharded or mesh.device_mesh.get_local_rank(name) == 0 for name in mesh.device_mesh.mesh_dim_names or ()
    )
