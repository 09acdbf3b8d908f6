"""Held-out loss per source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_fp4.faults.progress import Progress
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.training.accumulate import MicroBatch, loss_of


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sources: Mapping[str, Iterable[MicroBatch]],
    mesh: ParallelMesh,
    clock: RunClock,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Mean NLL per token, in nats, of each source; the same numbers on all ranks.

    model(tokens, targets) returns the mean loss over the micro-batch's targets. sources: the same names in the
    same order on all ranks, this data-parallel rank's micro-batches of each. Ranks may have different numbers of
    them, also none, and micro-batches different numbers of rows. Sums are FP64. Training is not disturbed: mode and
    clock are as before afterwards, and parameters are sharded. progress: is told that this rank gets on.

    Raises ValueError if a source has no tokens on any rank.
    """
    batches = {name: list(micro_batches) for name, micro_batches in sources.items()}
    counts, filler = _common_shape(batches, mesh)
    sums = torch.zeros(len(batches), 2, dtype=torch.float64, device=mesh.device)  # NLL, tokens

    was_training, step, micro_batch = model.training, clock.step, clock.micro_batch
    model.eval()
    try:
        for row, mine, count in zip(sums, batches.values(), counts, strict=True):
            for batch in mine:
                if progress is not None:
                    progress.alive()
                num_tokens = batch.targets.numel()
                row[0] += loss_of(model, batch.index, batch.tokens, batch.targets, mesh, clock).double() * num_tokens
                row[1] += num_tokens
            # FSDP gathers parameters in every forward, which all ranks must take part in.
            for _ in range(count - len(mine)):
                loss_of(model, 0, filler, filler, mesh, clock)
    finally:
        model.train(was_training)
        clock.step, clock.micro_batch = step, micro_batch
    _reshard(model)

    dist.all_reduce(sums, group=mesh.dp_group)
    losses: dict[str, float] = {}
    for name, (nll, num_tokens) in zip(batches, sums.tolist(), strict=True):
        if num_tokens == 0:
            raise ValueError(f"validation source {name!r} has no tokens; give it data or leave it out")
        losses[name] = nll / num_tokens
    return losses


def _common_shape(batches: Mapping[str, Sequence[MicroBatch]], mesh: ParallelMesh) -> tuple[list[int], torch.Tensor]:
    """How many forwards of each source every rank runs, and tokens for those that count nothing, zeros in the shape
    of the largest micro-batch."""
    shapes = [batch.tokens.shape for mine in batches.values() for batch in mine]
    rows, length = (max((shape[dim] for shape in shapes), default=0) for dim in (0, 1))
    agreed = torch.tensor([rows, length, *map(len, batches.values())], device=mesh.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=mesh.dp_group)
    rows, length, *counts = agreed.tolist()
    return counts, torch.zeros(rows, length, dtype=torch.int64)


def _reshard(model: nn.Module) -> None:
    """Without a backward nobody frees what the last forward gathered, and checkpoints want shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
