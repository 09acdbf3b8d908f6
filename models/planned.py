"""Stand-ins for the fused kernels of a model that only allocate, for runs on fake tensors.

Each saves for the backward pass what its kernel saves, and allocates the same temporaries (none, unless said below).
Nearly all of these kernels save their inputs and recompute the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.cross_entropy import CudaLossKernels, head_cross_entropy, reduce_stats
from megatron_fp4.parallel.expert_parallel import Exchange
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.quantization.segments import Segments
from models.attention import TILES, split_heads
from models.execution import Execution
from models.mamba2 import conv_aligned, split_sections
from models.positions import Documents
from models.ssd import ScanInputs

# Linear functions: their backward pass needs none of their inputs, except RoPE's tables.
_LINEAR = (split_heads, split_sections)
_MULTIPROCESSORS = 132  # of an H100 or H200


def planned_execution(config: Config) -> Execution:
    """Stand-ins for the kernels of the run on a GPU that has every package, unless `train.kernels=torch`."""
    fused = config.train.kernels != "torch" and config.precision.compute_dtype == "bfloat16"
    tiled = fused and config.model.head_dim in TILES
    kernels: dict[str, Callable[..., Any]] = {"attention": attention(config.run.deterministic, tiled), "loss": loss}
    kernels |= {"segments": EvenSegments.of_experts, "exchange": EvenExchange, "held_rows": even_rows}
    if fused:
        kernels |= {"scan": scan, "conv": conv}
    return Execution(kernels, one_kernel if fused else None, config.train.activation_checkpointing)


class _Kernel(torch.autograd.Function):
    """A kernel for each pass. forward: allocates, and returns results and the tensors to save. backward: allocates the
    temporaries of the backward pass, and returns those that exist until gradients are allocated; it holds no tensor."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[], Any], backward: Callable[[], Any], *arguments: Any) -> Any:
        results, saved = forward()
        ctx.save_for_backward(*saved)
        ctx.allocate_temporaries, ctx.like = backward, [_meta(a) for a in arguments]
        ctx.device = next(a.device for a in arguments if isinstance(a, Tensor))
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Reading saved tensors recomputes them with selective checkpointing, so they are read before the allocations.
        assert all(tensor is not None for tensor in ctx.saved_tensors[:1])
        temporaries = ctx.allocate_temporaries()
        pairs = zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        gradients = [_empty(like, ctx.device) if needed else None for like, needed in pairs]
        del temporaries
        return None, None, *gradients


def _meta(argument: Any) -> Any:
    """A copy on the meta device, which the memory ledger does not count."""
    return argument.detach().to("meta") if isinstance(argument, Tensor) else argument


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled by torch.compile: one kernel for each pass, which saves its inputs."""

    def compiled(*arguments: Any) -> Any:
        def forward() -> tuple[Any, Sequence[Tensor]]:
            like = function(*map(_meta, arguments))
            tensors = [a for a in arguments if isinstance(a, Tensor)]
            saved = [t for t in tensors if function not in _LINEAR or not t.requires_grad]
            device = tensors[0].device
            results = tuple(_empty(t, device) for t in like) if isinstance(like, tuple) else _empty(like, device)
            return results, saved

        return _Kernel.apply(forward, lambda: None, *arguments)

    return compiled


def conv(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """The kernel of causal-conv1d."""
    inputs = [t for t in (conv_aligned(x_bsc), weight_ck, bias_c, documents_bs) if t is not None]
    return _Kernel.apply(lambda: (_empty(inputs[0], inputs[0].device), inputs), lambda: None, *inputs)  # type: ignore[return-value]


def scan(inputs: ScanInputs, chunk_size: int, documents_bs: Tensor | None = None) -> Tensor:
    """The kernels of mamba-ssm. They save their inputs, their output and the running sums of dt A (FP32), and compute
    the states at chunk boundaries and C B^T of every chunk (FP32) in both passes."""
    x, dt, _, b, *_ = inputs
    device, dtype, (batch, length, heads, dim), (groups, state) = x.device, x.dtype, x.shape, b.shape[2:]
    num_chunks, num_steps = batch * -(-length // chunk_size), dt.numel()
    num_states, num_products = num_chunks * heads * dim * state, num_chunks * groups * chunk_size**2

    def fp32(size: int) -> Tensor:
        return torch.empty(size, device=device)

    def forward() -> tuple[Tensor, Sequence[Tensor | None]]:
        sums, steps = fp32(num_steps), fp32(num_steps)
        states = fp32(num_states)
        states = torch.empty(num_states, dtype=dtype, device=device)  # passed from chunk to chunk, in the dtype of x
        products, y = fp32(num_products), _empty(x, device)
        del steps, states, products
        return y, (y, sums, documents_bs, *inputs)

    def backward() -> list[Tensor]:
        remaining = [fp32(num_steps), fp32(num_steps), fp32(num_products)]
        # The states after passing from chunk to chunk and their gradient, in FP32 and then in the dtype of x.
        passed, gradient = fp32(num_states), fp32(num_states)
        remaining += [torch.empty(num_states, dtype=dtype, device=device) for _ in range(2)]
        del passed, gradient
        return remaining

    return _Kernel.apply(forward, backward, *inputs)  # type: ignore[return-value]


class EvenSegments(Segments):
    """All experts have as many tokens, because fake tensors have no counts."""

    def counts_on_host(self) -> list[int]:
        count, rest = divmod(self.rows, len(self.counts))
        return [count + (number < rest) for number in range(len(self.counts))]


class EvenExchange(Exchange):
    """All ranks send each other as many rows, for the same reason."""

    @cached_property
    def sent_and_received(self) -> tuple[list[int], list[int]]:
        count, rest = divmod(len(self._position_n), self.ranks.size)
        rows = [count + (number < rest) for number in range(self.ranks.size)]
        return rows, rows


def even_rows(counts_e: Tensor, total: int, parts: int) -> int:
    """Each tensor-parallel rank's experts have as many rows, for the same reason."""
    return total // parts


def attention(deterministic: bool, tiled: bool) -> Callable[..., Tensor]:
    """The attention kernel for q [b, s, h, d], k and v. tiled: as `attend_in_tiles` chooses, else FlashAttention.

    All save q, k, v, their output and the log of each row's sum (FP32). Attention in tiles also saves where documents
    begin and end, and allocates one FP32 number per row in its backward pass. FlashAttention's backward pass sums dq in
    FP32 (in a deterministic run in as many parts as keep all multiprocessors busy), and computes dk and dv of every
    query head. cuDNN's workspace is assumed to be that of FlashAttention without determinism. (FlashAttention within
    documents needs 128 more rows of dq per document, which are not counted.)
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        in_tiles = tiled and (deterministic or documents is not None)
        (batch, length, heads, dim), grouped, dtype, device = q.shape, k.shape[2] < q.shape[2], q.dtype, q.device
        bounds = [] if documents is None or not in_tiles else [documents.begins, documents.ends]

        def forward() -> tuple[Tensor, Sequence[Tensor]]:
            y, log_sums = _empty(q, device), torch.empty(batch, heads, length, device=device)
            return y, (q, k, v, y, log_sums, *bounds)

        def backward() -> list[Tensor]:
            if in_tiles:
                return [torch.empty(batch, heads, length, device=device)]
            parts = -(-_MULTIPROCESSORS // (batch * heads)) if deterministic else 1
            padded = -(-length // 128) * 128
            rows = torch.empty(batch, heads, padded, device=device)
            dq = torch.empty(parts, batch, padded, heads, -(-dim // 32) * 32, device=device)
            dk_dv = [torch.empty(batch, length, heads, dim, dtype=dtype, device=device) for _ in range(2 * grouped)]
            return [rows, dq, *dk_dv]

        return _Kernel.apply(forward, backward, q, k, v)  # type: ignore[return-value]

    return attend


def loss(*inputs: Any, fused: bool, **settings: Any) -> Tensor:
    """`head_cross_entropy` with the allocations of CUDA's kernels."""
    return head_cross_entropy(*inputs, **settings, kernels=_LossKernels(fused))


class _LossKernels(CudaLossKernels):
    """Triton's softmax only allocates its statistics. `add_product` changes nothing, because with fake tensors torch
    would allocate its result instead of working in place."""

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        return super().add_product(None, a, b) if total is None else total

    def losses(self, logits_tv: Tensor, index_t: Tensor, mesh: ParallelMesh) -> Tensor:
        if not self.fused:
            return super().losses(logits_tv, index_t, mesh)
        maximum, total, target = logits_tv.new_empty(3, *index_t.shape, dtype=torch.float32)
        maximum, total, target = reduce_stats(maximum, total, target, mesh)
        return total.log_().add_(maximum).sub_(target)
