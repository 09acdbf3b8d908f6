"""What a model calls fused, as functions that allocate: for runs on fake tensors.

Each keeps for the backward pass what the kernel that it stands for keeps, and has the same temporaries: none but where
said below. Nearly all of these kernels keep their inputs and compute the rest again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.cross_entropy import CudaLossKernels, head_cross_entropy, over_ranks
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.planning.backend import MULTIPROCESSORS
from models.attention import split_heads
from models.conv import readable
from models.execution import Execution
from models.mamba2 import sections
from models.pattern import choose_execution
from models.positions import Documents
from models.sdpa import HEAD_DIMS
from models.ssd import ScanInputs


def planned_execution(config: Config) -> Execution:
    """The run's kernels on a GPU that has every package, unless `train.kernels=torch`, as functions that allocate."""
    train = config.train if config.train.kernels != "fused" else replace(config.train, kernels="auto")
    plain = choose_execution(train, config.model, config.parallel.tensor, "cpu", config.precision.compute_dtype)
    kernels: dict[str, Callable[..., Tensor]] = {"attention": attention(config.run.deterministic), "loss": loss}
    if train.kernels == "torch" or config.precision.compute_dtype != "bfloat16":
        return replace(plain, kernels=kernels)
    if config.model.head_dim in HEAD_DIMS:
        kernels["attention"] = tiled_attention(config.run.deterministic)
    return replace(plain, kernels={**kernels, "scan": scan, "conv": conv}, compile=one_kernel)


class _OneKernel(torch.autograd.Function):
    """A function as one kernel each way, without temporaries; it keeps its inputs, or with `keeps` off only those that
    have no gradient."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], keeps: bool, *arguments: Any) -> Any:
        # On the meta device, which the ledger does not count.
        meta = [a.detach().to("meta") if isinstance(a, Tensor) else a for a in arguments]
        made = function(*meta)
        device = next(a.device for a in arguments if isinstance(a, Tensor))
        kept = zip(arguments, ctx.needs_input_grad[2:], strict=True)
        ctx.save_for_backward(*(a for a, needed in kept if isinstance(a, Tensor) and (keeps or not needed)))
        ctx.inputs, ctx.device = meta, device
        outputs = [_empty(t, device) for t in (made if isinstance(made, tuple) else [made])]
        return tuple(outputs) if isinstance(made, tuple) else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        assert all(tensor is not None for tensor in ctx.saved_tensors)  # where they are computed again, now
        wanted = zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(_empty(t, ctx.device) if needed else None for t, needed in wanted)


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as torch.compile makes it."""
    return lambda *arguments: _OneKernel.apply(function, function not in _MOVES, *arguments)


# They move numbers about, and turn some: the backward pass needs none of them, only the angles.
_MOVES = (split_heads, sections)


def conv(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """causal-conv1d's kernel."""
    return _OneKernel.apply(lambda x, *_: x, True, readable(x_bsc), weight_ck, bias_c, documents_bs)  # type: ignore[return-value]


def scan(inputs: ScanInputs, chunk_size: int, documents_bs: Tensor | None = None) -> Tensor:
    """mamba-ssm's kernels."""
    return _Scan.apply(chunk_size, documents_bs, *inputs)  # type: ignore[return-value]


class _Scan(torch.autograd.Function):
    """It keeps its inputs, its output and the running sums of dt A (FP32), and makes the states at chunk boundaries and
    C B^T of every chunk (FP32) in both passes."""

    @staticmethod
    def forward(ctx: Any, chunk_size: int, documents: Tensor | None, *inputs: Tensor) -> Tensor:
        x, dt, _, b, *_ = inputs
        chunks = x.shape[0] * -(-x.shape[1] // chunk_size)
        ctx.states, ctx.products = chunks * x.shape[2] * x.shape[3] * b.shape[3], chunks * b.shape[2] * chunk_size**2
        sums, steps = (torch.empty_like(dt, dtype=torch.float32) for _ in range(2))
        states = x.new_empty(ctx.states, dtype=torch.float32)
        states = x.new_empty(ctx.states)  # passed on from chunk to chunk, in the dtype of x
        products = x.new_empty(ctx.products, dtype=torch.float32)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        del steps, states, products
        ctx.save_for_backward(y, sums, documents, *inputs)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        y, sums, _, *inputs = ctx.saved_tensors
        again = [torch.empty_like(sums) for _ in range(2)]
        products = sums.new_empty(ctx.products)
        # The states, the same passed on, and their gradient; then the latter two in the dtype of x as well.
        passed, gradient = sums.new_empty(ctx.states), sums.new_empty(ctx.states)
        rounded = [y.new_empty(ctx.states) for _ in range(2)]
        del passed, gradient
        gradients = [
            _empty(t, t.device) if needed else None for t, needed in zip(inputs, ctx.needs_input_grad[2:], strict=True)
        ]
        del again, products, rounded
        return None, None, *gradients


def attention(deterministic: bool) -> Callable[..., Tensor]:
    """FlashAttention of q [b, s, heads, d], k and v. deterministic: costs its backward pass memory.

    Within documents it needs 128 rows of dq more for each document, which are not counted.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        return _Attention.apply(q, k, v, deterministic)  # type: ignore[return-value]

    return attend


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, its output and the logarithm of every row's sum (FP32).

    Its backward pass adds up dq in FP32, deterministically in as many parts as keep all multiprocessors busy, and makes
    dk and dv for every query head. (cuDNN's workspace is taken to be the same as without determinism.)
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> Tensor:
        y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sums = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.parts = -(-MULTIPROCESSORS // (q.shape[0] * q.shape[2])) if deterministic else 1
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, sums = ctx.saved_tensors
        batch, length, heads, dim = q.shape
        padded = -(-length // 128) * 128
        gradients = [_empty(t, t.device) for t in (q, k, v)]
        rows = sums.new_empty(batch, heads, padded)
        dq = sums.new_empty(ctx.parts, batch, padded, heads, -(-dim // 32) * 32)
        expanded = [_empty(q, q.device) for _ in range(2 if k.shape[2] < heads else 0)]
        del rows, dq, expanded
        return *gradients, None


def tiled_attention(deterministic: bool) -> Callable[..., Tensor]:
    """What models/sdpa.py chooses for q [b, s, heads, d], k and v."""

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is not None:
            return _TiledAttention.apply(q, k, v, documents.begins, documents.ends)  # type: ignore[return-value]
        if deterministic:
            return _TiledAttention.apply(q, k, v, None, None)  # type: ignore[return-value]
        return _Attention.apply(q, k, v, False)  # type: ignore[return-value]

    return attend


class _TiledAttention(torch.autograd.Function):
    """Keeps q, k, v, its output, the logarithm of every row's sum (FP32) and where documents begin and end.

    Its backward pass makes the three gradients and a number for every row (FP32), and nothing else.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begins: Tensor | None, ends: Tensor | None) -> Tensor:
        y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sums = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, y, sums, begins, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, sums, *_ = ctx.saved_tensors
        gradients = [_empty(t, t.device) for t in (q, k, v)]
        rows = torch.empty_like(sums)
        del rows
        return *gradients, None, None


def loss(*inputs: Any, fused: bool, **settings: Any) -> Tensor:
    """`head_cross_entropy` as on CUDA."""
    return head_cross_entropy(*inputs, **settings, kernels=_LossKernels(fused))


class _LossKernels(CudaLossKernels):
    """Triton's softmax as the allocation of its statistics; sums of products in place (torch copies fake tensors)."""

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        """As on CUDA."""
        return super().add_product(None, a, b) if total is None else total

    def losses(self, logits_tv: Tensor, index_t: Tensor, mesh: ParallelMesh) -> Tensor:
        """As on CUDA."""
        if not self.fused:
            return super().losses(logits_tv, index_t, mesh)
        maximum, total, target = logits_tv.new_empty(3, *index_t.shape, dtype=torch.float32)
        maximum, total, target = over_ranks(maximum, total, target, mesh)
        return total.log_().add_(maximum).sub_(target)
