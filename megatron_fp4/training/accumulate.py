"""Forward and backward over micro-batches: what a training step, a measurement and a search for NaN all do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_fp4.faults.progress import Progress
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.clock import RunClock


class MicroBatch(Protocol):
    """What a step needs of a micro-batch. index: within the global batch, the same whichever rank computes it."""

    @property
    def index(self) -> int: ...

    @property
    def tokens(self) -> Tensor: ...  # int64 [micro_batch_size, sequence_length]

    @property
    def targets(self) -> Tensor: ...  # int64, the same shape


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    mesh: ParallelMesh,
    clock: RunClock,
    *,
    num_micro_batches: int | None = None,
    reshard: bool = False,
    progress: Progress | None = None,
) -> Tensor:
    """Add the gradient of `micro_batches` to `.grad`; returns their loss as FP64, 0-dim.

    Both are sums over this rank's micro-batches, divided by `num_micro_batches`: None counts those of all data-parallel
    ranks, equally many each, so that the sums over ranks are means over the global batch. FSDP adds the gradients up
    over ranks, once, after the last micro-batch; what is replicated over tensor-parallel ranks is the caller's to add
    up (`gradients.sum_replicated_gradients`).

    model(tokens, targets) returns a micro-batch's mean loss (0-dim FP32). clock: its step is the caller's to set.
    reshard: also free gathered parameters between micro-batches. progress: is told which micro-batch it is.
    """
    if num_micro_batches is None:
        # Of the global batch: the backward pass of a micro-batch must not depend on how many ranks share the work.
        num_micro_batches = len(micro_batches) * mesh.dp_size
    loss_sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for position, micro_batch in enumerate(micro_batches, start=1):
        if progress is not None:
            progress.at(clock.step + 1, f"forward and backward of micro-batch {position} of {len(micro_batches)}")
        if isinstance(model, FSDPModule):
            is_last = position == len(micro_batches)
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            # The optimizer updates shards, so the last backward must leave only them.
            model.set_reshard_after_backward(is_last or reshard)
        loss = loss_of(model, micro_batch.index, micro_batch.tokens, micro_batch.targets, mesh, clock)
        (loss / num_micro_batches).backward()
        loss_sum += loss.detach()
    return loss_sum / num_micro_batches


def loss_of(
    model: nn.Module, index: int, tokens: Tensor, targets: Tensor, mesh: ParallelMesh, clock: RunClock
) -> Tensor:
    """The forward pass of micro-batch `index`: its mean loss, FP32 0-dim. tokens, targets: int64 [rows, sequence]."""
    clock.micro_batch = index
    loss: Tensor = model(tokens.to(mesh.device, non_blocking=True), targets.to(mesh.device, non_blocking=True))
    return loss
