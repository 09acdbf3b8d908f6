"""Grouped-query causal attention (arXiv:2305.13245), tensor parallel over KV heads.

Shapes: t tokens, b batch, s sequence, g KV heads of this rank, r query heads per KV head, d head dimension.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from models.execution import PLAIN, Execution
from models.recompute import Recompute
from models.rope import apply_rope, rope_tables


class Attention(nn.Module):
    """Query head i attends through KV head i // (query heads / KV heads).

    `qkv_proj` packs `[q heads of the group | k | v]` for each KV head (models/packing.py).
    Raises ValueError if query heads do not divide by KV heads, or KV heads by the tensor-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__()
        query_heads, kv_heads = config.num_query_heads, config.num_kv_heads
        if query_heads % kv_heads != 0:
            raise ValueError(f"model.num_query_heads={query_heads} must be a multiple of model.num_kv_heads={kv_heads}")
        if kv_heads % mesh.tp_size != 0:
            raise ValueError(
                f"model.num_kv_heads={kv_heads} must be a multiple of parallel.tensor={mesh.tp_size}: lower the latter"
            )
        self.heads_per_group, self.head_dim = query_heads // kv_heads, config.head_dim
        self.rope_base = config.rope_base if config.rope else None
        self.recompute = Recompute(execution.recompute == "selective")
        self._split = execution.pure(split_heads)
        self._attend = attend_fused if execution.compiled else attend
        qkv_dim = (query_heads + 2 * kv_heads) * config.head_dim
        self.qkv_proj = ColumnParallelLinear(config.hidden_dim, qkv_dim, mesh, num_groups=kv_heads)
        self.out_proj = RowParallelLinear(query_heads * config.head_dim, config.hidden_dim, mesh)

    def forward(self, x_td: Tensor, sequence_length: int) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], each sequence on its own."""
        qkv_td = self.recompute.expensive(self.qkv_proj, x_td)
        tables: tuple[Tensor, ...] = ()
        if self.rope_base is not None:
            tables = rope_tables(sequence_length, self.head_dim, self.rope_base, qkv_td.device)

        def split(qkv: Tensor, *cos_and_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._split(qkv, sequence_length, self.heads_per_group, self.head_dim, *cos_and_sin)

        q, k, v = self.recompute.cheap(split, qkv_td, *tables)
        y_bshd = self.recompute.expensive(self._attend, q, k, v)
        return self.recompute.expensive(self.out_proj, y_bshd.flatten(2).flatten(0, 1))


def split_heads(
    qkv_td: Tensor, sequence_length: int, heads_per_group: int, head_dim: int, *cos_and_sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [b, s, r g, d], k and v [b, s, g, d], contiguous, out of packed projections; with tables, q and k rotated."""
    qkv = qkv_td.unflatten(0, (-1, sequence_length)).unflatten(-1, (-1, (heads_per_group + 2) * head_dim))
    q, k, v = qkv.split([heads_per_group * head_dim, head_dim, head_dim], -1)
    q = q.unflatten(-1, (heads_per_group, head_dim)).flatten(2, 3)
    if cos_and_sin:
        q, k = apply_rope(q, *cos_and_sin), apply_rope(k, *cos_and_sin)
    return q, k.contiguous(), v.contiguous()


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
