"""Rotary position embedding (arXiv:2104.09864), the variant that pairs feature i with feature i + head_dim / 2.

Shapes: b batch, s sequence, h heads, d head dimension.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=4)
def rope_tables(sequence_length: int, head_dim: int, base: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, FP32 [sequence, head_dim / 2].

    angle[position, i] = position * base^(-2 i / head_dim), in radians. Kept for the next call: do not write into them.
    """
    return rope_at(torch.arange(sequence_length, device=device), head_dim, base)


def rope_at(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """The same for `positions`, int64 of any shape: FP32 [*positions, head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = positions.to(torch.float32)[..., None] * base**-exponent
    return angle.cos(), angle.sin()


def apply_rope(x_bshd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) by its position's angle; computed in the tables' dtype, returned in x's.

    cos_sd, sin_sd: [sequence, head_dim / 2] for all rows, or [batch, sequence, head_dim / 2].
    """
    first, second = x_bshd.to(cos_sd.dtype).chunk(2, -1)
    cos, sin = cos_sd.unsqueeze(-2), sin_sd.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_bshd.dtype)
