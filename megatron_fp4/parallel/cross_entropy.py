"""The output head and the mean cross-entropy after it, as one function that never holds all logits.

    logits = x W^T          loss_t = log sum_v exp(logit_tv) - logit_t,target          mean over tokens, in nats

At 131072 words the logits of a micro-batch are its largest tensor by far, in FP32 twice that. So tokens go through in
chunks: logits in the compute dtype, softmax in FP32, d loss / d logits = softmax - onehot rounded once to the compute
dtype, and from it at once the chunk's dx and its share of dW. dx and dW wait for the backward pass in FP32, so that
the gradient of the loss (1 over tokens, 1 over micro-batches) multiplies FP32 numbers, and dx is rounded once. (A
CPU's product of BF16 matrices is rounded already, and one in FP32 takes four times as long: there dx is rounded again,
which changes nothing as long as tokens times micro-batches is a power of two.)

Targets below zero do not count: their tokens have no loss and no gradient, and the mean is over the others. How many
these are is an argument, so that no GPU has to be waited for.

The vocabulary is sharded over tensor-parallel ranks, which exchange three numbers per token (maximum, sum of
exponentials, target logit); the logits stay where they are.

What a device does its own way is in `LossKernels`: on CUDA, products of BF16 matrices come in FP32, and the softmax
runs in place on the logits if `fused` (cross_entropy_triton.py).

Shapes: t tokens, d hidden, v words of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import accept_fp32_gradient, gradient_of, gradient_spec, local_part

# Bytes of logits that exist at a time. Larger chunks make no faster GEMMs, smaller ones add to dW more often.
_CHUNK_BYTES = 2**30
_CHUNK_MULTIPLE = 128


def head_cross_entropy(
    x_td: Tensor,
    weight: Tensor,
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
    fused: Triton for the softmax (CUDA only). chunk_tokens: tokens per chunk; None: as many as fit in 1 GiB of logits.
    kernels: who computes; None: `fused` decides, on the device of `x_td`. num_targets: how many targets are not
    negative, where some may be; the mean is over these, and 0 if there are none. None: all count.
    The result can be differentiated once.
    """
    accept_fp32_gradient(weight)
    # Inside the function gradients are always off.
    needed = torch.is_grad_enabled() and (x_td.requires_grad or weight.requires_grad)
    if chunk_tokens is None:
        bytes_per_token = local_part(weight).shape[0] * x_td.element_size()
        chunk_tokens = max(1, _CHUNK_BYTES // bytes_per_token // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
    if kernels is None:
        assert x_td.is_cuda or not fused, "Triton's kernels need CUDA"
        kernels = CudaLossKernels(fused) if x_td.is_cuda else LossKernels()
    return _HeadCrossEntropy.apply(  # type: ignore[return-value]
        x_td, weight, targets_t, first, mesh, kernels, chunk_tokens, needed, num_targets
    )


class LossKernels:
    """Softmax and products by PyTorch on any device."""

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of dx until the backward pass, with inputs of `dtype`."""
        return dtype

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a b, in `gradient_dtype`."""
        return a @ b

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        """total + a b in FP32, in place unless `total` is None."""
        a, b = a.to(torch.float32), b.to(torch.float32)
        return a @ b if total is None else total.addmm_(a, b)

    def losses(self, logits_tv: Tensor, index_t: Tensor, mesh: ParallelMesh) -> Tensor:
        """The loss of every token, FP32 [tokens]; `logits_tv` becomes the gradient softmax - onehot, in its own dtype.

        index_t: the target's column, outside [0, vocab / tp) on ranks that do not hold it.
        """
        scores = logits_tv.to(torch.float32)
        held = (index_t >= 0) & (index_t < logits_tv.shape[1])
        column = index_t.clamp(0, logits_tv.shape[1] - 1)[:, None]
        target = torch.where(held, scores.gather(1, column)[:, 0], 0.0)
        local_maximum = scores.amax(1)
        exponentials = torch.sub(scores, local_maximum[:, None], out=scores if scores is not logits_tv else None).exp_()
        maximum, total, target = over_ranks(local_maximum, exponentials.sum(1), target, mesh)
        exponentials.mul_(((local_maximum - maximum).exp() / total)[:, None])
        exponentials.scatter_add_(1, column, -held.to(torch.float32)[:, None])
        logits_tv.copy_(exponentials)
        return total.log_().add_(maximum).sub_(target)


class CudaLossKernels(LossKernels):
    """On an NVIDIA GPU: products of BF16 matrices are never rounded to BF16. fused: Triton for the softmax."""

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
        maximum, total, target = over_ranks(maximum, total, target, mesh)
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
        needed: bool,
        num_targets: int | None,
    ) -> Tensor:
        ctx.spec = gradient_spec(weight)
        uncounted = None if num_targets is None else (targets < 0)[:, None]
        w_vd, num_tokens = local_part(weight).to(x.dtype), x.shape[0]
        losses = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
        dx = torch.empty(x.shape, dtype=kernels.gradient_dtype(x.dtype), device=x.device) if needed else None
        dw: Tensor | None = None
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = x[chunk] @ w_vd.t()
            losses[chunk] = kernels.losses(logits, targets[chunk] - first, mesh)
            if dx is not None:  # logits is their gradient now
                dx[chunk] = kernels.product(logits, w_vd)
                # Rows of x are left out rather than rows of logits, which are so much wider.
                rows = x[chunk] if uncounted is None else x[chunk].masked_fill(uncounted[chunk], 0)
                dw = kernels.add_product(dw, logits.t(), rows)
            del logits  # before the next chunk's are made
        ctx.gradients, ctx.dtype, ctx.num_targets = (dx, dw), x.dtype, num_tokens
        if num_targets is None or uncounted is None:
            return losses.mean()
        if dx is not None:
            dx.masked_fill_(uncounted, 0)
        ctx.num_targets = max(num_targets, 1)
        return losses.masked_fill_(uncounted[:, 0], 0).sum() / ctx.num_targets

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the loss was differentiated twice, and its gradients are kept for once"
        dx, dw = ctx.gradients
        ctx.gradients = None
        scale = grad_outputs[0].to(torch.float32) / ctx.num_targets
        dx, dw = dx.to(torch.float32).mul_(scale).to(ctx.dtype), gradient_of(dw.mul_(scale), ctx.spec)
        return dx, dw, None, None, None, None, None, None, None


def over_ranks(maximum: Tensor, total: Tensor, target: Tensor, mesh: ParallelMesh) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum) and target logit (0 where not held) over the whole vocabulary."""
    if mesh.tp_size == 1:
        return maximum, total, target
    overall = maximum.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=mesh.tp_group)
    sums = torch.stack((total * (maximum - overall).exp(), target))
    dist.all_reduce(sums, group=mesh.tp_group)
    return overall, sums[0], sums[1]
