"""Scaled dot product attention by PyTorch's kernels, deterministic where that is asked for.

Shapes: b batch, s sequence, g KV heads of this rank, d head dimension.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attend(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor) -> Tensor:
    """Causal attention [b, s, heads, d] by the kernel that PyTorch chooses; query heads share KV heads in order."""
    return _attend(q_bshd, k_bsgd, v_bsgd, ())


def attend_fused(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor) -> Tensor:
    """`attend` by cuDNN's kernel, the fastest from Hopper on, where it can."""
    return _attend(q_bshd, k_bsgd, v_bsgd, (SDPBackend.CUDNN_ATTENTION, *_DETERMINISTIC))


# cuDNN's backward pass is not among them.
_DETERMINISTIC = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def _attend(q_bshd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, order: tuple[SDPBackend, ...]) -> Tensor:
    """order: kernels to try in turn; none: PyTorch's choice. Where it was asked for determinism, that goes first."""
    deterministic = q_bshd.is_cuda and torch.are_deterministic_algorithms_enabled()
    order = _DETERMINISTIC if deterministic else order
    q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bsgd, v_bsgd))
    with sdpa_kernel(list(order), set_priority=True) if order else contextlib.nullcontext():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])
    if deterministic and torch.is_deterministic_algorithms_warn_only_enabled():
        _make_deterministic(y)
    return y.transpose(1, 2)


def _make_deterministic(y: Tensor) -> None:
    """Under `warn_only`, attention's backward passes warn and go on as they were; make that of `y` deterministic."""
    node = y.grad_fn
    for _ in range(3):  # some kernels' results are sliced
        if node is None:
            return
        if "ScaledDotProduct" in node.name():
            node.register_prehook(lambda _: torch.use_deterministic_algorithms(True, warn_only=False))
            node.register_hook(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
            return
        node = node.next_functions[0][0] if node.next_functions else None
