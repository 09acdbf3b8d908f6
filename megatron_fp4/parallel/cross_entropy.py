"""The output head and the mean cross-entropy after it, as one autograd function that never holds all logits.

    logits = x W^T          loss_t = log sum_v exp(logit_tv) - logit_t,target          mean over tokens, in nats

With a vocabulary of 131072 the logits are by far the largest tensor of a micro-batch, and in FP32 twice as large. So
the forward pass works on chunks of tokens. For each chunk it computes logits in the compute dtype and the softmax in
FP32, rounds d loss / d logits = softmax - onehot once to the compute dtype, and computes from it the dx of the chunk
and its part of dW. dx and dW are kept in FP32 until the backward pass, so that the gradient of the loss (1 / tokens,
1 / micro-batches) multiplies FP32 numbers and dx is rounded once. (On a CPU the product of BF16 matrices is already
rounded, and an FP32 product takes four times as long. So dx is rounded twice there, which changes nothing if tokens
times micro-batches is a power of two.)

A quantized head is a linear by itself (layers.py). It returns all logits, and the loss is computed from these in place.

Negative targets do not count: their tokens have no loss and no gradient, and the mean is over the others. The caller
passes the number of the others, which avoids a host sync.

The vocabulary is sharded over tensor-parallel ranks. They exchange three numbers per token (maximum, sum of
exponentials, target logit), but no logits.

What differs between devices is in `LossKernels`: on CUDA, products of BF16 matrices are returned in FP32, and with
`fused` the softmax runs in place on the logits (cross_entropy_triton.py).

Shapes: t tokens, d hidden, v vocabulary of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import accept_fp32_gradient, gradient_of, gradient_spec, local_part

# Bytes of logits in a chunk. Larger chunks do not make GEMMs faster; smaller chunks add to dW more often.
_CHUNK_BYTES = 2**30
_CHUNK_MULTIPLE = 128


def head_cross_entropy(
    x_td: Tensor,
    weight: Tensor | None,
    targets_t: Tensor,
    first: int,
    mesh: ParallelMesh,
    *,
    fused: bool = False,
    chunk_tokens: int | None = None,
    kernels: LossKernels | None = None,
    num_targets: int | None = None,
) -> Tensor:
    """Mean loss (FP32, 0-dim) of `targets_t` (int64 [tokens], global vocabulary ids) under the logits x W^T.

    x_td: [tokens, hidden], all tokens on every tensor-parallel rank. weight: parameter [vocab, hidden] (a DTensor with
    its rows sharded, or a plain tensor), of which this rank holds the rows from id `first` on; its gradient is FP32.
    None: x_td are the logits [tokens, vocab] of these rows, which are overwritten.
    fused: compute the softmax with Triton (CUDA only). chunk_tokens: tokens per chunk; None: as many as fit in 1 GiB of
    logits. kernels: None: those for the device of `x_td`, with `fused`. num_targets: the number of targets that are not
    negative; the mean is over these, and 0 if there are none. None: all targets count.
    The result can be differentiated only once.
    """
    if kernels is None:
        assert x_td.is_cuda or not fused, "Triton's kernels need CUDA"
        kernels = CudaLossKernels(fused) if x_td.is_cuda else LossKernels()
    if weight is None:
        return _LogitsCrossEntropy.apply(x_td, targets_t, first, mesh, kernels, num_targets)  # type: ignore[return-value]
    accept_fp32_gradient(weight)
    # Asked here, because inside an autograd function gradients are always off.
    needs_gradients = torch.is_grad_enabled() and (x_td.requires_grad or weight.requires_grad)
    if chunk_tokens is None:
        bytes_per_token = local_part(weight).shape[0] * x_td.element_size()
        chunk_tokens = max(1, _CHUNK_BYTES // bytes_per_token // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
    return _HeadCrossEntropy.apply(  # type: ignore[return-value]
        x_td, weight, targets_t, first, mesh, kernels, chunk_tokens, needs_gradients, num_targets
    )


class LossKernels:
    """Softmax and matrix products in PyTorch, on any device."""

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which dx is kept until the backward pass, for inputs of `dtype`."""
        return dtype

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """The matrix product of a and b, in `gradient_dtype`."""
        return a @ b

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        """total + a b in FP32, in place unless `total` is None."""
        a, b = a.to(torch.float32), b.to(torch.float32)
        return a @ b if total is None else total.addmm_(a, b)

    def losses(self, logits_tv: Tensor, index_t: Tensor, mesh: ParallelMesh) -> Tensor:
        """The loss of every token, FP32 [tokens]. Overwrites `logits_tv` with its gradient softmax - onehot.

        index_t: the target's column, outside [0, vocab / tp) on ranks that do not hold it.
        """
        scores = logits_tv.to(torch.float32)
        held = (index_t >= 0) & (index_t < logits_tv.shape[1])
        column = index_t.clamp(0, logits_tv.shape[1] - 1)[:, None]
        target = torch.where(held, scores.gather(1, column)[:, 0], 0.0)
        local_maximum = scores.amax(1)
        exponentials = torch.sub(scores, local_maximum[:, None], out=scores if scores is not logits_tv else None).exp_()
        maximum, total, target = reduce_stats(local_maximum, exponentials.sum(1), target, mesh)
        exponentials.mul_(((local_maximum - maximum).exp() / total)[:, None])
        exponentials.scatter_add_(1, column, -held.to(torch.float32)[:, None])
        logits_tv.copy_(exponentials)
        return total.log_().add_(maximum).sub_(target)


class CudaLossKernels(LossKernels):
    """For NVIDIA GPUs: products of BF16 matrices are FP32. fused: compute the softmax with Triton."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        if total is None:
            return self.product(a, b)
        if a.dtype == torch.float32:
            return total.addmm_(a, b)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)

    def losses(self, logits_tv: Tensor, index_t: Tensor, mesh: ParallelMesh) -> Tensor:
        if not self.fused:
            return super().losses(logits_tv, index_t, mesh)
        from megatron_fp4.parallel import cross_entropy_triton as triton_kernels

        maximum, total, target = triton_kernels.row_statistics(logits_tv, index_t)
        maximum, total, target = reduce_stats(maximum, total, target, mesh)
        triton_kernels.to_gradient_(logits_tv, index_t, maximum, total)
        return total.log_().add_(maximum).sub_(target)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        mesh: ParallelMesh,
        kernels: LossKernels,
        chunk_tokens: int,
        needs_gradients: bool,
        num_targets: int | None,
    ) -> Tensor:
        ctx.spec = gradient_spec(weight)
        ignored = None if num_targets is None else (targets < 0)[:, None]
        w_vd, num_tokens = local_part(weight).to(x.dtype), x.shape[0]
        losses = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
        dx = torch.empty(x.shape, dtype=kernels.gradient_dtype(x.dtype), device=x.device) if needs_gradients else None
        dw: Tensor | None = None
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = x[chunk] @ w_vd.t()
            losses[chunk] = kernels.losses(logits, targets[chunk] - first, mesh)
            if dx is not None:  # `losses` has overwritten the logits with their gradient
                dx[chunk] = kernels.product(logits, w_vd)
                # For tokens that do not count, rows of x are zeroed, because rows of logits are much wider.
                rows = x[chunk] if ignored is None else x[chunk].masked_fill(ignored[chunk], 0)
                dw = kernels.add_product(dw, logits.t(), rows)
            del logits  # free them before those of the next chunk are allocated
        ctx.gradients, ctx.dtype, ctx.num_targets = (dx, dw), x.dtype, num_tokens
        if num_targets is None or ignored is None:
            return losses.mean()
        if dx is not None:
            dx.masked_fill_(ignored, 0)
        ctx.num_targets = max(num_targets, 1)
        return losses.masked_fill_(ignored[:, 0], 0).sum() / ctx.num_targets

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the loss can be differentiated only once"
        dx, dw = ctx.gradients
        ctx.gradients = None
        scale = grad_outputs[0].to(torch.float32) / ctx.num_targets
        dx, dw = dx.to(torch.float32).mul_(scale).to(ctx.dtype), gradient_of(dw.mul_(scale), ctx.spec)
        return dx, dw, None, None, None, None, None, None, None


class _LogitsCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        mesh: ParallelMesh,
        kernels: LossKernels,
        num_targets: int | None,
    ) -> Tensor:
        losses = kernels.losses(logits, targets - first, mesh)  # overwrites the logits with their gradient
        ctx.gradient, ctx.num_targets = logits, losses.numel() if num_targets is None else max(num_targets, 1)
        if num_targets is not None:
            ctx.gradient.masked_fill_((targets < 0)[:, None], 0)
            losses.masked_fill_(targets < 0, 0)
        return losses.sum() / ctx.num_targets

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradient is not None, "the loss can be differentiated only once"
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(grad_outputs[0].to(torch.float32) / ctx.num_targets), None, None, None, None, None


def reduce_stats(maximum: Tensor, total: Tensor, target: Tensor, mesh: ParallelMesh) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum) and target logit over the whole vocabulary, from those of this rank's part
    (where a target logit is 0 if another rank holds the target)."""
    if mesh.tensor.size == 1:
        return maximum, total, target
    overall = maximum.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=mesh.tensor.group)
    sums = torch.stack((total * (maximum - overall).exp(), target))
    dist.all_reduce(sums, group=mesh.tensor.group)
    return overall, sums[0], sums[1]
