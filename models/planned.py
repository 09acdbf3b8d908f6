"""What a model calls fused, as functions that allocate: for runs on fake tensors.

Each keeps for the backward pass what the kernel that it stands for keeps, and has the same temporaries: none but where
said below. Nearly all of these kernels keep their inputs and compute the rest again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.cross_entropy import CudaLossKernels, head_cross_entropy, reduce_over_ranks
from megatron_fp4.parallel.mesh import ParallelMesh
from models.attention import KERNELS, split_heads
from models.execution import Execution
from models.mamba2 import readable, sections
from models.pattern import choose_execution
from models.positions import Documents
from models.ssd import ScanInputs

# They move numbers about, and turn some: the backward pass needs none of their inputs but the angles.
_MOVES = (split_heads, sections)
_MULTIPROCESSORS = 132  # of an H100 or H200


def planned_execution(config: Config) -> Execution:
    """The run's kernels on a GPU that has every package, unless `train.kernels=torch`, as functions that allocate."""
    train = config.train if config.train.kernels != "fused" else replace(config.train, kernels="auto")
    plain = choose_execution(replace(config, train=train), "cpu")
    fused = train.kernels != "torch" and config.precision.compute_dtype == "bfloat16"
    tiled = fused and config.model.head_dim in KERNELS
    kernels: dict[str, Callable[..., Tensor]] = {"attention": attention(config.run.deterministic, tiled), "loss": loss}
    if not fused:
        return replace(plain, kernels=kernels)
    return replace(plain, kernels={**kernels, "scan": scan, "conv": conv}, compile=one_kernel)


class _Kernel(torch.autograd.Function):
    """A kernel each way. forward: allocates; returns results and what the backward pass keeps. backward: allocates the
    temporaries of the backward pass and returns those that are there when gradients are made; it holds no tensor."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[], Any], backward: Callable[[], Any], *arguments: Any) -> Any:
        results, kept = forward()
        ctx.save_for_backward(*kept)
        ctx.temporaries, ctx.like = backward, [_meta(a) for a in arguments]
        ctx.device = next(a.device for a in arguments if isinstance(a, Tensor))
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        assert all(tensor is not None for tensor in ctx.saved_tensors[:1])  # where they are computed again, now
        temporaries = ctx.temporaries()
        wanted = zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        gradients = [_empty(t, ctx.device) if needed else None for t, needed in wanted]
        del temporaries
        return None, None, *gradients


def _meta(argument: Any) -> Any:
    """On the meta device, which the ledger does not count."""
    return argument.detach().to("meta") if isinstance(argument, Tensor) else argument


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as torch.compile makes it: one kernel each way, which keeps its inputs."""

    def compiled(*arguments: Any) -> Any:
        def forward() -> tuple[Any, Sequence[Tensor]]:
            made = function(*map(_meta, arguments))
            tensors = [a for a in arguments if isinstance(a, Tensor)]
            kept = [t for t in tensors if function not in _MOVES or not t.requires_grad]
            device = tensors[0].device
            results = tuple(_empty(t, device) for t in made) if isinstance(made, tuple) else _empty(made, device)
            return results, kept

        return _Kernel.apply(forward, lambda: None, *arguments)

    return compiled


def conv(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """causal-conv1d's kernel."""
    inputs = [t for t in (readable(x_bsc), weight_ck, bias_c, documents_bs) if t is not None]
    return _Kernel.apply(lambda: (_empty(inputs[0], inputs[0].device), inputs), lambda: None, *inputs)  # type: ignore[return-value]


def scan(inputs: ScanInputs, chunk_size: int, documents_bs: Tensor | None = None) -> Tensor:
    """mamba-ssm's kernels. They keep their inputs, their output and the running sums of dt A (FP32), and make the
    states at chunk boundaries and C B^T of every chunk (FP32) in both passes."""
    x, dt, _, b, *_ = inputs
    chunks, device, dtype = x.shape[0] * -(-x.shape[1] // chunk_size), x.device, x.dtype
    states, products = chunks * x.shape[2] * x.shape[3] * b.shape[3], chunks * b.shape[2] * chunk_size**2
    steps = dt.numel()

    def fp32(size: int) -> Tensor:
        return torch.empty(size, device=device)

    def forward() -> tuple[Tensor, Sequence[Tensor | None]]:
        sums, of_steps = fp32(steps), fp32(steps)
        of_states = fp32(states)
        of_states = torch.empty(states, dtype=dtype, device=device)  # passed on from chunk to chunk, in the dtype of x
        of_products, y = fp32(products), _empty(x, device)
        del of_steps, of_states, of_products
        return y, (y, sums, documents_bs, *inputs)

    def backward() -> list[Tensor]:
        left = [fp32(steps), fp32(steps), fp32(products)]
        # The states, the same passed on, and their gradient; then the latter two in the dtype of x as well.
        passed, gradient = fp32(states), fp32(states)
        left += [torch.empty(states, dtype=dtype, device=device) for _ in range(2)]
        del passed, gradient
        return left

    return _Kernel.apply(forward, backward, *inputs)  # type: ignore[return-value]


def attention(deterministic: bool, tiled: bool) -> Callable[..., Tensor]:
    """What computes q [b, s, heads, d], k and v: tiled, what models/attention.py chooses, else FlashAttention.

    All keep q, k, v, their output and the logarithm of every row's sum (FP32). Attention in tiles also keeps where
    documents begin and end, and makes a number for every row (FP32) in its backward pass. FlashAttention's adds up dq
    in FP32, deterministically in as many parts as keep all multiprocessors busy, and makes dk and dv for every query
    head. (cuDNN's workspace is taken to be the same as without determinism. Within documents it needs 128 rows of dq
    more for each document, which are not counted.)
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        in_tiles = tiled and (deterministic or documents is not None)
        (batch, length, heads, dim), shared, dtype, device = q.shape, k.shape[2] < q.shape[2], q.dtype, q.device
        bounds = [] if documents is None or not in_tiles else [documents.begins, documents.ends]

        def forward() -> tuple[Tensor, Sequence[Tensor]]:
            y, sums = _empty(q, device), torch.empty(batch, heads, length, device=device)
            return y, (q, k, v, y, sums, *bounds)

        def backward() -> list[Tensor]:
            if in_tiles:
                return [torch.empty(batch, heads, length, device=device)]
            parts = -(-_MULTIPROCESSORS // (batch * heads)) if deterministic else 1
            padded = -(-length // 128) * 128
            rows = torch.empty(batch, heads, padded, device=device)
            dq = torch.empty(parts, batch, padded, heads, -(-dim // 32) * 32, device=device)
            expanded = [torch.empty(batch, length, heads, dim, dtype=dtype, device=device) for _ in range(2 * shared)]
            return [rows, dq, *expanded]

        return _Kernel.apply(forward, backward, q, k, v)  # type: ignore[return-value]

    return attend


def loss(*inputs: Any, fused: bool, **settings: Any) -> Tensor:
    """`head_cross_entropy` as on CUDA."""
    return head_cross_entropy(*inputs, **settings, kernels=_LossKernels(fused))


class _LossKernels(CudaLossKernels):
    """Triton's softmax as the allocation of its statistics; sums of products in place (torch copies fake tensors)."""

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        return super().add_product(None, a, b) if total is None else total

    def losses(self, logits_tv: Tensor, index_t: Tensor, mesh: ParallelMesh) -> Tensor:
        if not self.fused:
            return super().losses(logits_tv, index_t, mesh)
        maximum, total, target = logits_tv.new_empty(3, *index_t.shape, dtype=torch.float32)
        maximum, total, target = reduce_over_ranks(maximum, total, target, mesh)
        return total.log_().add_(maximum).sub_(target)
