"""Micro-batches, and gradients between the last backward and the optimizer: summed over the tensor axis, measured,
clipped.

A gradient is a DTensor placed like its parameter, already summed over data-parallel ranks by FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import is_replicated
from megatron_fp4.precision.fp32_gradients import local_part


class MicroBatch(Protocol):
    """What a step needs of a micro-batch. index: within the global batch, the same whichever rank computes it."""

    @property
    def index(self) -> int: ...

    @property
    def tokens(self) -> torch.Tensor: ...  # int64 [micro_batch_size, sequence_length]

    @property
    def targets(self) -> torch.Tensor: ...  # int64, the same shape

    @property
    def documents(self) -> torch.Tensor | None: ...  # int32, the same shape: numbers of documents, if they are masked

    @property
    def num_documents(self) -> int | None: ...  # of all rows together, if they are masked

    @property
    def num_targets(self) -> int | None: ...  # how many targets count, where negative ones do not; None: all do


@dataclass(frozen=True)
class GlobalBatch:
    """What a micro-batch is a part of. num_targets: how many targets of the global batch count, int64 0-dim on the
    device; None: all do."""

    num_micro_batches: int
    num_targets: torch.Tensor | None = None

    def weight(self, micro_batch: MicroBatch) -> torch.Tensor:
        """The share of the targets that count, FP64 0-dim; only where not all do. 0 if there are none at all."""
        assert self.num_targets is not None and micro_batch.num_targets is not None
        return micro_batch.num_targets / self.num_targets.clamp(min=1).to(torch.float64)


ALONE = GlobalBatch(1)
"""For a micro-batch of which only its own mean is wanted."""


@torch.no_grad()
def sum_replicated_gradients(parameters: Sequence[nn.Parameter], mesh: ParallelMesh) -> None:
    """Add up, over the tensor-parallel group, the gradients of parameters that are replicated over it.

    With sequence parallelism each rank of the group has seen only its slice of the sequence, so a replicated
    parameter (a norm's scale) holds a part of its gradient on each. One all-reduce for all of them, in place.
    Without sequence parallelism every rank already holds the whole, and nothing is done.
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
def squared_norm_share(parameters: Sequence[nn.Parameter], mesh: ParallelMesh) -> torch.Tensor:
    """This rank's share of the squared L2 norm of all gradients: 0-dim FP64 on the mesh's device.

    The sum of the shares over all ranks counts every element once: of the ranks that hold the same shard, only
    the first contributes. The caller reduces, so that the sum can travel with other numbers.
    """
    mine = [local_part(p.grad) for p in parameters if p.grad is not None and holds_first_copy(p, mesh)]
    if not mine:
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    # Accumulated in FP64: squares of FP32 gradients neither overflow nor vanish in it.
    norms = torch._foreach_norm(mine, 2.0, dtype=torch.float64)  # type: ignore[attr-defined]
    return torch.stack(norms).square().sum()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], norm: float, clip_norm: float) -> None:
    """Scale all gradients so that their global norm, `norm` before, becomes at most `clip_norm` (0: no limit)."""
    if clip_norm > 0 and norm > clip_norm:
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, clip_norm / norm)  # type: ignore[attr-defined]


@torch.no_grad()
def clip_gradients_on_device(parameters: Sequence[nn.Parameter], norm: torch.Tensor, clip_norm: float) -> None:
    """`clip_gradients` with a norm (0-dim FP64) that the host does not know yet: the same bits.

    A norm within the limit makes the factor 1, which is multiplied too: a pass over the gradients, for which the host
    need not wait until they are there.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if clip_norm == 0 or not gradients:
        return
    limit = torch.full_like(norm, clip_norm)  # `clip_norm / norm` would multiply by the reciprocal: other bits
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    torch._foreach_mul_(gradients, factor.to(torch.float32))  # type: ignore[attr-defined]


def holds_first_copy(parameter: nn.Parameter, mesh: ParallelMesh) -> bool:
    """Whether this rank is the first of those that hold the same shard of `parameter`."""
    all_names = mesh.device_mesh.mesh_dim_names
    assert all_names is not None
    sharded: set[str] = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names
        assert names is not None and set(names) <= set(all_names), (
            f"a parameter lies on axes {names}, the mesh has {all_names}"
        )
        assert not any(isinstance(placement, Partial) for placement in parameter.placements)
        sharded = {n for n, p in zip(names, parameter.placements, strict=True) if not isinstance(p, Replicate)}
    return all(name in sharded or mesh.device_mesh.get_local_rank(name) == 0 for name in all_names)
