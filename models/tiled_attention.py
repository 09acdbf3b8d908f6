"""Causal attention whose gradients are the same in every run, faster than FlashAttention's deterministic backward pass.

cuDNN's backward pass, the fastest from Hopper on, adds dq up in memory in the order in which its parts finish. So in a
deterministic run whole rows take cuDNN's forward pass and the backward pass of models/attention_triton.py, and masked
documents, which PyTorch's interface to cuDNN does not know, both passes of the latter, deterministic or not. Nothing is
looked up, timed or compiled for a shape of the batch, and nothing waits for the GPU.

Shapes: b batch, s sequence, h query heads, g KV heads of this rank, d head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_fp4.config.schema import ModelConfig
from models.attention_tiles import HEAD_DIMS, SHARED_MEMORY_KIB
from models.documents import Documents
from models.sdpa import attend_fused


def refusal(model: ModelConfig, tensor_parallel: int) -> str | None:
    """Why the kernels do not take a model on this machine's GPU, or None. Without a GPU only the model counts."""
    if model.head_dim not in HEAD_DIMS:
        return f"needs model.head_dim to be one of {', '.join(map(str, HEAD_DIMS))}, and it is {model.head_dim}"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        if gpu.shared_memory_per_block_optin < SHARED_MEMORY_KIB * 1024:
            return f"needs {SHARED_MEMORY_KIB} KiB of shared memory, and a {gpu.name} has less"
    return None


def attend_in_tiles(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, documents: Documents | None = None) -> Tensor:
    """`attend` (models/sdpa.py) in BF16 on CUDA; deterministic within documents, and where that is asked for."""
    if documents is not None:
        return _TiledAttention.apply(q_bshd, k_bsgd, v_bsgd, documents.begins, documents.ends)  # type: ignore[return-value]
    if torch.are_deterministic_algorithms_enabled():
        return _TiledAttention.apply(q_bshd, k_bsgd, v_bsgd, None, None)  # type: ignore[return-value]
    return attend_fused(q_bshd, k_bsgd, v_bsgd)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begins: Tensor | None, ends: Tensor | None) -> Tensor:
        from models import attention_triton

        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if begins is None and _cudnn_takes(q, k, v):
            y, sums = _cudnn_forward(q, k, v)
        else:
            y, sums = attention_triton.forward(q, k, v, begins)
        ctx.save_for_backward(q, k, v, y, sums, begins, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from models import attention_triton

        gradients = attention_triton.backward(grad_outputs[0].contiguous(), *ctx.saved_tensors)
        return *gradients, None, None


def _cudnn_takes(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor) -> bool:
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] > k.shape[1])
    # (Under deterministic algorithms too, as long as they only warn; its forward pass adds nothing up in memory.)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def _cudnn_forward(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor) -> tuple[Tensor, Tensor]:
    """y [b, s, h, d] and the natural logarithm of every row's sum, FP32 [b, h, s]."""
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    # What scaled_dot_product_attention calls, which keeps the second result for itself.
    y, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, is_causal=True)
    return y.transpose(1, 2).contiguous(), sums.reshape(q.shape[:3])
