"""Forward and backward over micro-batches: what a training step, a measurement and a search for NaN all do.

The loss of a global batch is the mean over its targets. Where all targets count, every micro-batch has equally many and
their means are averaged. Where some do not (`data.boundary_loss=false`), the mean is

    (sum of the losses of all targets that count) / (their number),     both over the global batch,

so that every one of them weighs the same however the batch is cut into micro-batches and ranks: ranks add up how many
they have before the first backward pass, and a micro-batch's mean is weighted by its share of that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_fp4.parallel.data_parallel import without_fsdp_hooks
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.cuda_graphs import MicroBatchGraphs
from megatron_fp4.training.micro_batch import ALONE, GlobalBatch, MicroBatch

__all__ = ["ALONE", "GlobalBatch", "MicroBatch", "accumulate", "global_batch_of", "loss_of"]


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


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    mesh: ParallelMesh,
    clock: StepState,
    *,
    whole: GlobalBatch | None = None,
    reshard: bool = False,
    progress: Progress | None = None,
    graphs: MicroBatchGraphs | None = None,
) -> Tensor:
    """Add the gradient of `micro_batches` to `.grad`; returns their loss as FP64, 0-dim.

    Both are sums over this rank's micro-batches of their parts of `whole`, so that the sums over ranks are means over
    the global batch (see the top of this file); None: `global_batch_of(micro_batches, mesh)`, which all ranks then call
    together. FSDP adds the gradients up over ranks, once, after the last micro-batch, or (`mesh.reduce_each`) after
    each; what is replicated over tensor-parallel ranks is the caller's (`gradients.sum_replicated_gradients`).

    model: as `loss_of` calls it. clock: its step is the caller's to set. reshard: also free gathered parameters between
    micro-batches. progress: is told which micro-batch it is. graphs: those of `model`, replayed where they can be;
    None: all is computed eagerly.
    """
    if whole is None:
        whole = global_batch_of(micro_batches, mesh)
    with nullcontext(False) if graphs is None else graphs.step(micro_batches, whole, clock) as replays:
        if not replays:
            graphs = None
        return _accumulate(model, micro_batches, mesh, clock, whole, reshard, progress, graphs)


def _accumulate(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    mesh: ParallelMesh,
    clock: StepState,
    whole: GlobalBatch,
    reshard: bool,
    progress: Progress | None,
    graphs: MicroBatchGraphs | None,
) -> Tensor:
    loss_sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for position, micro_batch in enumerate(micro_batches, start=1):
        if progress is not None:
            progress.at(clock.step + 1, f"forward and backward of micro-batch {position} of {len(micro_batches)}")
        is_last = position == len(micro_batches)
        passes: AbstractContextManager[None] = nullcontext()
        if isinstance(model, FSDPModule):
            if position == 1 or is_last:
                model.set_requires_gradient_sync(is_last or mesh.reduce_each)
                model.set_requires_all_reduce(is_last)  # between replicas the sum over micro-batches is enough
                model.set_is_last_backward(is_last)
                # The optimizer updates shards, so the last backward must leave only them.
                model.set_reshard_after_backward(is_last or reshard)
            elif not reshard and not mesh.reduce_each:
                passes = without_fsdp_hooks(model)
        if graphs is not None and (replayed := graphs.run(micro_batch, clock)) is not None:
            loss_sum += replayed
            continue
        with passes:
            loss = loss_of(model, micro_batch, mesh, clock)
            if whole.num_targets is None:
                (loss / whole.num_micro_batches).backward()
                loss_sum += loss.detach()
            else:
                weight = whole.weight(micro_batch)
                (loss * weight.to(loss.dtype)).backward()
                loss_sum += loss.detach() * weight
    return loss_sum / whole.num_micro_batches if whole.num_targets is None else loss_sum


def loss_of(model: nn.Module, micro_batch: MicroBatch, mesh: ParallelMesh, clock: StepState) -> Tensor:
    """The forward pass of a micro-batch: its mean loss over the targets that count, FP32 0-dim, 0 if none does.

    model(tokens, targets), with `documents`, `num_documents` and `num_targets` by name where there are any, as
    models/hybrid.py has them.
    """
    clock.micro_batch = micro_batch.index
    if clock.keys is not None:
        clock.keys.fill(clock.seed, clock.step, clock.micro_batch)
    options: dict[str, Tensor | int | None] = {}
    if micro_batch.documents is not None:
        options["documents"] = micro_batch.documents.to(mesh.device, non_blocking=True)
        options["num_documents"] = micro_batch.num_documents
    if micro_batch.num_targets is not None:
        options["num_targets"] = micro_batch.num_targets
    tokens, targets = (t.to(mesh.device, non_blocking=True) for t in (micro_batch.tokens, micro_batch.targets))
    loss: Tensor = model(tokens, targets, **options)
    return loss
