"""Scaled dot product attention by PyTorch's kernels and by ours, deterministic where that is asked for.

Where documents are masked, a query sees the keys of its own document up to itself:

    attend          a mask of the whole [s, s] matrix, of which all is computed: the reference
    attend_fused    cuDNN, the fastest from Hopper on, for whole rows. Within documents FlashAttention-2 of variable
                    length, which takes documents of all rows as rows of their own, so short documents cost less.
    attend_in_tiles the same gradients in every run, faster than FlashAttention's deterministic backward pass, for the
                    sizes that its Triton kernels (models/attention_triton.py) take. cuDNN's backward pass adds dq up in
                    memory in the order in which its parts finish. So in a deterministic run whole rows take cuDNN's
                    forward pass and the kernels' backward pass, and masked documents, which PyTorch's interface to
                    cuDNN does not know, both passes of the kernels, deterministic or not.

Shapes: b batch, s sequence, t = b s tokens, h query heads, g KV heads of this rank, d head dimension, n documents.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_fp4.config.schema import ModelConfig
from models.positions import Documents

# What FlashAttention-2 takes: a head dimension that is a multiple of the first number (others are padded), and at most
# the second.
FLASH_HEAD_MULTIPLE, FLASH_HEAD_LIMIT = 8, 256


class Kernels(NamedTuple):
    """Of each of the Triton kernels: queries and keys of one tile, warps and stages of a program. In `dkdv`, keys are a
    multiple of queries."""

    forward: tuple[int, int, int, int]
    dq: tuple[int, int, int, int]
    dkdv: tuple[int, int, int, int]


# What the Triton kernels take: one of these head dimensions, and as much memory for a program as Hopper's and
# Blackwell's data-center GPUs have. No timing decides between tiles, which decide the order of sums. Those for 128 are
# measured on an H200, the others follow FlexAttention's.
_SMALL = Kernels((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3))
KERNELS = {
    16: _SMALL,
    32: _SMALL,
    64: Kernels((128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 3)),
    128: Kernels((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
    256: Kernels((64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
}
HEAD_DIMS = tuple(KERNELS)
_SHARED_MEMORY_KIB = 227


def attend(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None) -> Tensor:
    """Causal attention [b, s, heads, d] by the kernel that PyTorch chooses; query heads share KV heads in order."""
    return _attend(q_bshd, k_bsgd, v_bsgd, (), documents)


def attend_fused(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None) -> Tensor:
    """`attend` by cuDNN's kernel, the fastest from Hopper on, where it can; by FlashAttention's within documents."""
    if documents is not None and q_bshd.shape[-1] <= FLASH_HEAD_LIMIT:
        return _attend_within_documents(q_bshd, k_bsgd, v_bsgd, documents)
    return _attend(q_bshd, k_bsgd, v_bsgd, (SDPBackend.CUDNN_ATTENTION, *_DETERMINISTIC), documents)


def attend_to_cache(q_bshd: Tensor, k_blgd: Tensor, v_blgd: Tensor, positions_bs: Tensor) -> Tensor:
    """Attention [b, s, heads, d] of a text's new tokens to all of its tokens: each to those up to its own position.

    k, v: of l tokens from the text's beginning, whatever comes after its end. positions_bs: int64, of the queries.
    """
    length, groups = q_bshd.shape[1], k_blgd.shape[2]
    # The query heads of a KV head as if they were queries: keys and values, which are long, need not be repeated.
    q_bgrsd = q_bshd.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    seen_bsl = torch.arange(k_blgd.shape[1], device=positions_bs.device) <= positions_bs[..., None]
    mask = seen_bsl[:, None, None].expand(-1, 1, q_bgrsd.shape[2], -1, -1).flatten(2, 3)
    y = F.scaled_dot_product_attention(
        q_bgrsd.flatten(2, 3), k_blgd.transpose(1, 2), v_blgd.transpose(1, 2), attn_mask=mask
    )
    return y.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


# cuDNN's backward pass is not among them.
_DETERMINISTIC = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def _attend(
    q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, order: tuple[SDPBackend, ...], documents: Documents | None
) -> Tensor:
    """order: kernels to try in turn; none: PyTorch's choice. Where it was asked for determinism, that goes first."""
    deterministic = q_bshd.is_cuda and torch.are_deterministic_algorithms_enabled()
    order = _DETERMINISTIC if deterministic else order
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    grouped, mask = q.shape[1] > k.shape[1], None if documents is None else documents.mask
    if mask is not None and q.is_cuda and grouped:  # kernels that take a mask know no groups there
        k, v, grouped = *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)), False
    with sdpa_kernel(list(order), set_priority=True) if order else contextlib.nullcontext():
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    if deterministic and torch.is_deterministic_algorithms_warn_only_enabled():
        _make_deterministic(y)
    return y.transpose(1, 2)


def _attend_within_documents(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents) -> Tensor:
    (batch, length, _, dim), extra = q_bshd.shape, -q_bshd.shape[-1] % FLASH_HEAD_MULTIPLE
    q, k, v = (F.pad(t, (0, extra)) if extra else t for t in (q_bshd, k_bsgd, v_bsgd))
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    y = flash_of_variable_length(q, k, v, documents.boundaries, length, dim**-0.5)
    if torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled():
        _make_deterministic(y)
    return y[..., :dim].unflatten(0, (batch, length))


def flash_of_variable_length(
    q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor, boundaries: Tensor, longest: int, scale: float
) -> Tensor:
    """Causal attention [t, heads, d] within each span between two `boundaries`, by PyTorch's FlashAttention-2 (CUDA).

    q, k, v: BF16 or FP16, a contiguous head dimension as `FLASH_HEAD_MULTIPLE` and `FLASH_HEAD_LIMIT` say. boundaries:
    int32 [n + 1], contiguous, on the same device, ascending from 0 to t. longest: no span is longer. scale: of scores.
    """
    # What torch.nn.attention.varlen calls, whose own arguments change from version to version.
    flash = torch.ops.aten._flash_attention_forward
    return flash(q_thd, k_tgd, v_tgd, boundaries, boundaries, longest, longest, 0.0, True, False, scale=scale)[0]


def _make_deterministic(y: Tensor) -> None:
    """Under `warn_only`, attention's backward passes warn and stay as they were; make that of `y` deterministic."""
    node = y.grad_fn
    for _ in range(3):  # some kernels' results are sliced
        if node is None:
            return
        if "ScaledDotProduct" in node.name() or "FlashAttention" in node.name():
            node.register_prehook(lambda _: torch.use_deterministic_algorithms(True, warn_only=False))
            node.register_hook(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
            return
        node = node.next_functions[0][0] if node.next_functions else None


def tiles_refusal(model: ModelConfig, tensor_parallel: int) -> str | None:
    """Why the Triton kernels do not take a model here, or None. Without a GPU only the model counts."""
    if model.head_dim not in HEAD_DIMS:
        return f"needs model.head_dim to be one of {', '.join(map(str, HEAD_DIMS))}, and it is {model.head_dim}"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        if gpu.shared_memory_per_block_optin < _SHARED_MEMORY_KIB * 1024:
            return f"needs {_SHARED_MEMORY_KIB} KiB of shared memory, and a {gpu.name} has less"
    return None


def attend_in_tiles(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None) -> Tensor:
    """`attend` in BF16 on CUDA; deterministic within documents, and where that is asked for."""
    if documents is None and not torch.are_deterministic_algorithms_enabled():
        return attend_fused(q_bshd, k_bsgd, v_bsgd)
    bounds = (None, None) if documents is None else (documents.begins, documents.ends)
    return _TiledAttention.apply(q_bshd, k_bsgd, v_bsgd, *bounds)  # type: ignore[return-value]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begins: Tensor | None, ends: Tensor | None) -> Tensor:
        from models import attention_triton

        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if begins is None and _cudnn_takes(q, k, v):
            # What scaled_dot_product_attention calls, which keeps the second result for itself.
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
            y, sums, *_ = cudnn(*(t.transpose(1, 2) for t in (q, k, v)), None, True, is_causal=True)
            y, sums = y.transpose(1, 2).contiguous(), sums.reshape(sums.shape[:3])
        else:
            y, sums = attention_triton.forward(q, k, v, KERNELS[q.shape[-1]].forward, begins)
        ctx.save_for_backward(q, k, v, y, sums, begins, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from models import attention_triton

        q, k, v, y, sums, begins, ends = ctx.saved_tensors
        _, of_dq, of_keys = KERNELS[q.shape[-1]]
        dy = grad_outputs[0].contiguous()
        gradients = attention_triton.backward(dy, q, k, v, y, sums, of_dq, of_keys, begins, ends)
        return *gradients, None, None


def _cudnn_takes(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor) -> bool:
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] > k.shape[1])
    # (Under deterministic algorithms too, as long as they only warn; its forward pass adds nothing up in memory.)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)
