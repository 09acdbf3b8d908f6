"""One training step: accumulate, reduce, look, then update or skip.

The step talks to other ranks twice beyond what the model and FSDP do: the sum over the tensor axis (with sequence
parallelism only) and one all-reduce of three FP64 numbers: loss, squared gradient norm, stop requests. Reading
these three is its only host sync. Since all ranks read the same three, they clip, skip and stop alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.training.gradients import clip_gradients, squared_norm_share, sum_replicated_gradients
from megatron_fp4.training.optimizer import optimizer_parameters, set_lr


class MicroBatch(Protocol):
    """What a step needs of a micro-batch. index: within the global batch, the same whichever rank computes it."""

    @property
    def index(self) -> int: ...

    @property
    def tokens(self) -> torch.Tensor: ...  # int64 [micro_batch_size, sequence_length]

    @property
    def targets(self) -> torch.Tensor: ...  # int64, the same shape


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on all ranks.

    loss: mean NLL in nats over the global batch, before the update. grad_norm: global L2 norm before clipping.
    skipped: loss or norm was not finite, so weights and optimizer are as they were.
    stop: some rank was asked to stop (see signals.StopRequest).
    """

    loss: float
    grad_norm: float
    skipped: bool
    stop: bool


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    mesh: ParallelMesh,
    clock: RunClock,
    *,
    step: int,
    lr: float,
    clip_norm: float,
    reshard: bool = False,
    stop_requested: bool = False,
) -> StepResult:
    """Update `model` once, with the mean gradient over the micro-batches of all data-parallel ranks.

    model(tokens, targets) returns the micro-batch's mean loss (0-dim FP32). micro_batches: this rank's, equally
    many and equally large on all ranks. step: from 0. clip_norm: 0 for none. reshard: also free gathered
    parameters between micro-batches. stop_requested: whether this rank was asked to stop.
    FSDP must add gradients up over ranks (`apply_data_parallel` sees to that).
    """
    parameters = optimizer_parameters(optimizer)
    assert micro_batches and (isinstance(model, FSDPModule) or mesh.dp_size == 1)

    # Of the global batch: the backward pass of a micro-batch must not depend on how many ranks share the work.
    num_micro_batches = len(micro_batches) * mesh.dp_size
    clock.step = step
    loss_sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for position, micro_batch in enumerate(micro_batches, start=1):
        _prepare_backward(model, is_last=position == len(micro_batches), reshard=reshard)
        clock.micro_batch = micro_batch.index
        loss = model(
            micro_batch.tokens.to(mesh.device, non_blocking=True),
            micro_batch.targets.to(mesh.device, non_blocking=True),
        )
        (loss / num_micro_batches).backward()
        loss_sum += loss.detach()

    sum_replicated_gradients(parameters, mesh)
    # All ranks of a tensor-parallel group have the same loss; its first speaks for them.
    speaks = mesh.tp_rank == 0
    totals = torch.stack(
        [
            loss_sum / num_micro_batches if speaks else torch.zeros_like(loss_sum),
            squared_norm_share(parameters, mesh),
            torch.full_like(loss_sum, float(stop_requested)),
        ]
    )
    dist.all_reduce(totals)
    mean_loss, squared_norm, stops = totals.tolist()

    grad_norm = math.sqrt(squared_norm)
    skipped = not (math.isfinite(mean_loss) and math.isfinite(grad_norm))
    if not skipped:
        clip_gradients(parameters, grad_norm, clip_norm)
        set_lr(optimizer, lr)
        optimizer.step()
        clock.weights_version += 1
    optimizer.zero_grad(set_to_none=True)
    return StepResult(mean_loss, grad_norm, skipped, stop=stops > 0)


def _prepare_backward(model: nn.Module, is_last: bool, reshard: bool) -> None:
    """Let FSDP add up unreduced gradients until the last micro-batch, and reduce them once after it."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        # The optimizer updates shards, so the last backward must leave only them.
        model.set_reshard_after_backward(is_last or reshard)
