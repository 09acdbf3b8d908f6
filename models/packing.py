"""Row orders of packed projections: ours by group, published checkpoints by section.

Published weights stack their sections: `[q | k | v]`, Mamba-2's `[z | x | B | C | dt]`. Ours put together what belongs
to one group (a KV head with its query heads; a state group with its heads), as `[q_0 | k_0 | v_0 | q_1 | k_1 | ...]`:
an even split over tensor-parallel ranks then gives every rank whole groups, at any tensor-parallel size.

exchange/ converts checkpoints by them; tests also compare the mixers, by these orders, with the published formulas.

Each function returns `order`, int64 [rows], with

    ours = published[order]             published = ours[order.argsort()]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp4.config.schema import ModelConfig


def group_major_order(section_rows: Sequence[int], num_groups: int) -> Tensor:
    """Section-major row number of every group-major row; each section splits evenly into `num_groups` pieces.

    Raises ValueError if a section does not divide.
    """
    for rows in section_rows:
        if rows % num_groups != 0:
            raise ValueError(f"a section of {rows} rows does not divide into {num_groups} groups")
    sections = torch.arange(sum(section_rows)).split(list(section_rows))
    return torch.cat([section.view(num_groups, -1) for section in sections], 1).flatten()


def qkv_order(config: ModelConfig) -> Tensor:
    """Of `qkv_proj`: published `[q | k | v]`, groups are KV heads."""
    kv_rows = config.num_kv_heads * config.head_dim
    return group_major_order((config.num_query_heads * config.head_dim, kv_rows, kv_rows), config.num_kv_heads)


def mamba_in_proj_order(config: ModelConfig) -> Tensor:
    """Of Mamba-2's `in_proj`: published `[z | x | B | C | dt]`, groups are state groups."""
    inner, state = config.mamba_inner_dim, config.mamba_num_groups * config.mamba_state_dim
    return group_major_order((inner, inner, state, state, config.mamba_num_heads), config.mamba_num_groups)


def mamba_conv_order(config: ModelConfig) -> Tensor:
    """Of the convolution's channels: published `[x | B | C]`, groups are state groups."""
    state = config.mamba_num_groups * config.mamba_state_dim
    return group_major_order((config.mamba_inner_dim, state, state), config.mamba_num_groups)
