"""Grouped-query causal attention (arXiv:2305.13245), tensor parallel over KV heads.

Shapes: t tokens, b batch, s sequence, g KV heads of this rank, r query heads per KV head, d head dimension.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fp4.config import ModelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from models.rope import apply_rope, rope_tables


class Attention(nn.Module):
    """Query head i attends through KV head i // (query heads / KV heads).

    `qkv_proj` packs `[q heads of the group | k | v]` for each KV head (models/packing.py).
    Raises ValueError if query heads do not divide by KV heads, or KV heads by the tensor-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
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
        qkv_dim = (query_heads + 2 * kv_heads) * config.head_dim
        self.qkv_proj = ColumnParallelLinear(config.hidden_dim, qkv_dim, mesh, num_groups=kv_heads)
        self.out_proj = RowParallelLinear(query_heads * config.head_dim, config.hidden_dim, mesh)

    def forward(self, x_td: Tensor, sequence_length: int) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], each sequence on its own."""
        qkv = self.qkv_proj(x_td)
        qkv = qkv.view(-1, sequence_length, qkv.shape[-1] // self._group_width, self._group_width)
        q, k, v = qkv.split([self.heads_per_group * self.head_dim, self.head_dim, self.head_dim], -1)
        q = q.unflatten(-1, (self.heads_per_group, self.head_dim)).flatten(2, 3)
        if self.rope_base is not None:
            cos, sin = rope_tables(sequence_length, self.head_dim, self.rope_base, q.device)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads_per_group > 1)
        return self.out_proj(y.transpose(1, 2).flatten(2).flatten(0, 1))

    @property
    def _group_width(self) -> int:
        return (self.heads_per_group + 2) * self.head_dim
