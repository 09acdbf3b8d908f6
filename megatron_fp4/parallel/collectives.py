"""The collectives of tensor parallelism, as autograd functions on token-major tensors [tokens, dim].

Between layers a tensor-parallel rank holds either all tokens, or with sequence parallelism a contiguous slice of them.

    enter_tensor_parallel   in front of a column-parallel layer: all tokens, whole features
    leave_tensor_parallel   behind a row-parallel layer: partial sums are added up over the ranks

Linears with sequence parallelism do both themselves (precision/linear.py).

Sums are taken in the tensor's dtype (BF16 in training, as the paper has it).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.token_messages import start_all_gather, start_reduce_scatter


def enter_tensor_parallel(x_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """All tokens on every rank.

    With sequence parallelism: all-gather over tokens, and reduce-scatter of the gradient. Without: the tensor itself,
    and all-reduce of the gradient.
    """
    if mesh.tp_size == 1:
        return x_td
    return _GatherTokens.apply(x_td, mesh) if mesh.sequence_parallel else _SumGradient.apply(x_td, mesh)  # type: ignore[return-value]


def leave_tensor_parallel(y_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """The sum of the ranks' partial results.

    With sequence parallelism: reduce-scatter over tokens, and all-gather of the gradient. Without: all-reduce, and
    the gradient as it is.
    """
    if mesh.tp_size == 1:
        return y_td
    return _ScatterSum.apply(y_td, mesh) if mesh.sequence_parallel else _Sum.apply(y_td, mesh)  # type: ignore[return-value]


def all_gather_tokens(x_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """[tokens / tp, dim] -> [tokens, dim], ranks in order."""
    return start_all_gather(x_td, mesh.tp_group, beside=False).wait()


def reduce_scatter_tokens(y_td: Tensor, mesh: ParallelMesh) -> Tensor:
    """[tokens, dim] partial sums -> [tokens / tp, dim] sums."""
    return start_reduce_scatter(y_td, mesh.tp_group, beside=False).wait()


def all_reduce_sum(x: Tensor, mesh: ParallelMesh) -> Tensor:
    """The sum over tensor-parallel ranks, in a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=mesh.tp_group)
    return out


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: ParallelMesh) -> Tensor:
        ctx.mesh = mesh
        return all_gather_tokens(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(grad_outputs[0], ctx.mesh), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, mesh: ParallelMesh) -> Tensor:
        ctx.mesh = mesh
        return reduce_scatter_tokens(y, mesh)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_gather_tokens(grad_outputs[0], ctx.mesh), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: ParallelMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad_outputs[0], ctx.mesh), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, mesh: ParallelMesh) -> Tensor:
        return all_reduce_sum(y, mesh)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None
