"""Mean cross-entropy over a vocabulary that is sharded over tensor-parallel ranks.

    loss_t = log sum_v exp(logit_tv) - logit_t,target        in FP32, mean over tokens, in nats

The forward pass exchanges three numbers per token (maximum, sum of exponentials, target logit); the logits stay where
they are. The backward pass is softmax - onehot, local again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.parallel.mesh import ParallelMesh


def cross_entropy(logits_tv: Tensor, targets_t: Tensor, first: int, mesh: ParallelMesh) -> Tensor:
    """Mean loss (FP32, 0-dim) of `targets_t` (int64 [tokens], global vocabulary ids).

    logits_tv: [tokens, vocab / tp], the slice of the vocabulary that starts at id `first`.
    """
    return _CrossEntropy.apply(logits_tv, targets_t, first, mesh)  # type: ignore[return-value]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, mesh: ParallelMesh) -> Tensor:
        group = mesh.tp_group if mesh.tp_size > 1 else None
        scores = logits.to(torch.float32)
        maximum = scores.amax(-1)
        if group is not None:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        index = targets - first
        held = (index >= 0) & (index < logits.shape[-1])
        index = index.clamp(0, logits.shape[-1] - 1)
        target = scores.gather(-1, index[:, None])[:, 0] - maximum
        exponentials = scores.sub_(maximum[:, None]) if scores is not logits else scores - maximum[:, None]
        exponentials = exponentials.exp_()
        sums = torch.stack((exponentials.sum(-1), torch.where(held, target, torch.zeros_like(target))))
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, target = sums
        probabilities = exponentials.div_(total[:, None])
        # The gradient is known now; keeping it in the logits' dtype instead of the probabilities saves memory.
        probabilities.scatter_add_(-1, index[:, None], -held.to(torch.float32)[:, None])
        ctx.save_for_backward(probabilities.div_(logits.shape[0]).to(logits.dtype))
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None, None
