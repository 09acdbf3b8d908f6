"""Grouped-query causal attention (arXiv:2305.13245), tensor parallel over KV heads.

Shapes: t tokens, b batch, s sequence, g KV heads of this rank, r query heads per KV head, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.config.schema import ConfigError, ModelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import LinearShape
from models.execution import PLAIN, Execution, FusedKernel
from models.mixer import Mixer, check_multiple, group_major_order, input_projection, output_projection
from models.positions import Documents, NewTokens, apply_rope, rope_tables
from models.sdpa import attend, attend_fused, attend_in_tiles, attend_to_cache, tiles_refusal


class KeysAndValues:
    """Attention's part of an inference cache: both [batch, max_length + 1, KV heads / tp, head_dim]; padding goes to
    the last place, which is not read."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))

    def add(self, k_bsgd: Tensor, v_bsgd: Tensor, new: NewTokens) -> tuple[Tensor, Tensor]:
        """Keep those of new tokens; returns those of all, [batch, new.end, KV heads / tp, head_dim] each."""
        place = new.positions.where(new.valid, self.keys.shape[1] - 1)
        row = torch.arange(len(place), device=place.device)[:, None]
        self.keys[row, place], self.values[row, place] = k_bsgd, v_bsgd
        return self.keys[:, : new.end], self.values[:, : new.end]


class Attention(Mixer):
    """Query head i attends through KV head i // (query heads / KV heads).

    `qkv_proj` packs `[q heads of the group | k | v]` for each KV head (`qkv_order`).
    """

    name = "attention"
    fused = (FusedKernel("attention", "attention in tiles", "triton", attend_in_tiles, tiles_refusal, optional=True),)

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(config, mesh, execution)
        self.heads_per_group, self.head_dim = config.num_query_heads // config.num_kv_heads, config.head_dim
        self.num_local_groups = config.num_kv_heads // mesh.tp_size
        self.rope_base = config.rope_base if config.rope else None
        self._split = execution.recomputed(execution.pure(split_heads))
        self._attend = execution.kernel("attention", attend_fused if execution.compiled else attend)
        qkv, out = self.linears(config)
        self.qkv_proj = ColumnParallelLinear(qkv.in_features, qkv.out_features, mesh, num_groups=qkv.groups)
        self.out_proj = RowParallelLinear(out.in_features, out.out_features, mesh)

    def forward(
        self, x_td: Tensor, sequence_length: int, fetched: None = None, documents: Documents | None = None
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], each sequence (with `documents`: each document) on its own."""
        qkv_td = self.qkv_proj(x_td)
        tables: tuple[Tensor, ...] = ()
        if self.rope_base is not None and documents is not None:
            tables = documents.rope_tables(self.head_dim, self.rope_base)
        elif self.rope_base is not None:
            tables = rope_tables(sequence_length, self.head_dim, self.rope_base, qkv_td.device)
        q, k, v = self._split(qkv_td, sequence_length, self.heads_per_group, self.head_dim, *tables)
        return self.out_proj(self._attend(q, k, v, documents).flatten(2).flatten(0, 1))

    def new_cache(self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype) -> KeysAndValues:
        """Keys, with RoPE's rotation in them, and values of all tokens."""
        return KeysAndValues((batch, max_length + 1, self.num_local_groups, self.head_dim), device, dtype)

    def decode(self, x_td: Tensor, cache: KeysAndValues, new: NewTokens) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; a token sees those of its text up to itself."""
        tables = () if self.rope_base is None else new.rope_tables(self.head_dim, self.rope_base)
        q, k, v = split_heads(self.qkv_proj(x_td), new.length, self.heads_per_group, self.head_dim, *tables)
        y = attend_to_cache(q, *cache.add(k, v, new), new.positions)
        return self.out_proj(y.flatten(2).flatten(0, 1))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Whole groups of query heads, and pairs for RoPE."""
        check_multiple(config, "num_query_heads", "num_kv_heads", "KV heads")
        if config.rope and config.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={config.head_dim} is odd, and model.rope rotates pairs; use "
                f"{config.head_dim + 1}, or model.rope=false"
            )

    @classmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """Heads."""
        return {f"model.{name}": (getattr(config, name),) * 2 for name in ("num_query_heads", "num_kv_heads")}

    @classmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        """All heads' projections, and the output."""
        q_dim, kv_dim = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
        key, title = "model.num_query_heads x model.head_dim", "the attention's output projection"
        return (
            input_projection("qkv_proj", config, q_dim + 2 * kv_dim, config.num_kv_heads),
            output_projection("out_proj", config, q_dim, key, title),
        )

    @classmethod
    def flops_per_token(cls, config: ModelConfig, sequence_length: int) -> int:
        """The causal half of two products with [S, S] matrices of scores, also where documents are masked."""
        return 2 * sequence_length * config.num_query_heads * config.head_dim

    @classmethod
    def describe_kernels(cls, execution: Execution, masked: bool = False) -> list[str]:
        """Which of PyTorch's, or ours."""
        tiled = "attention" in execution.kernels
        if masked:
            kernel = "Flash of variable length" if execution.compiled else "PyTorch's SDPA with a mask"
            return [f"attention within documents: {'Triton' if tiled else kernel}"]
        kernel = "SDPA by cuDNN, or else Flash" if execution.compiled else "PyTorch's SDPA"
        if torch.are_deterministic_algorithms_enabled() and torch.cuda.is_available():
            kernel = "cuDNN forward, Triton backward (deterministic)" if tiled else "SDPA by Flash (deterministic)"
        return [f"attention: {kernel}"]


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


def qkv_order(config: ModelConfig) -> Tensor:
    """Of `qkv_proj`, see `group_major_order`: published `[q | k | v]`, groups are KV heads."""
    kv_rows = config.num_kv_heads * config.head_dim
    return group_major_order((config.num_query_heads * config.head_dim, kv_rows, kv_rows), config.num_kv_heads)
