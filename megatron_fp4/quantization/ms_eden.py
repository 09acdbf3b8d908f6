"""MS-EDEN: unbiased NVFP4 whose elements are rounded to nearest and whose block scales carry the randomness.

Quartet II (arXiv 2601.22813). Rounding to nearest shrinks what it rounds; stochastic rounding of the elements does not,
and doubles the error. MS-EDEN rounds to nearest what a *random* rotation made of the tensor, measures for each rotated
group by how much it shrank, and corrects that in the group's block scales: E4M3 numbers, rounded stochastically, so
that the correction arrives in the mean. z [rows, cols] below is already rotated, by a 128-point Hadamard transform with
random signs (`hadamard.py`) along the dot product; blocks are 1x16, and a *group* is the 128 elements, eight blocks,
that were mixed by one transform. In FP32, in this order:

    S       = min(M * 256 / amax, FLT_MAX), or 1 where that is 0        M = 6 / (17/16 * 0.93) = 6.0721
    scale   = e4m3(block_amax * (S * (1/M)))                            to nearest
    encode  = min(1 / (scale * (1/S)), FLT_MAX), or 0 where scale is 0
    u       = z * encode
    code    = e2m1(clamp(u, -6, 6))                                     to nearest, ties to the even code
    c       = sum(u * u) / sum(u * code), or 1 where the divisor is 0   both sums over the group
    scale'  = e4m3(scale * c)                                           stochastically, a draw for each block
    value   = code * scale' * amax / (M * 256)

A sum over a group: over the 16 elements of each block one after another, then of the eight blocks by halves (first
half plus second half, three times). A block's largest element lands near M and not at 6: that is where the error after
the correction is smallest, and beyond 6 it saturates, which c makes up for. 256 leaves room below E4M3's 448 for the
corrected scale: |u| / code is at most 1.53, and more than 1.24 only in blocks whose scales are subnormal.

Edges: zeros, and blocks whose scale underflows, have zero codes and a zero scale. NaN or inf anywhere makes amax NaN or
inf, and then nothing decodes to a finite number. Where amax lies below M * 256 / FLT_MAX = 4.6e-36 the edges of
`nvfp4.py` hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from megatron_fp4.quantization.elements import (
    E2M1_MAX,
    E4M3_MAX,
    FP32_MAX,
    round_e2m1_nearest,
    round_e4m3_stochastic,
    to_e4m3,
)
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.rounding import RoundingKey, fresh_rounding_key, rounding_draws
from megatron_fp4.quantization.tensor import Encoded, NVFP4Tensor, as_rows, block_amax, scale_blocks

BLOCK, GROUP = 16, 128
GRID_LARGEST = 6.0 / (17 / 16 * 0.93)
# M * 256 as FP32 has it, in units of the largest code, which is what a tensor scale is told.
SCALE_MAX = float(torch.tensor(256.0 * GRID_LARGEST, dtype=torch.float32)) / E2M1_MAX


def quantize_ms_eden(z: Tensor, *, key: RoundingKey | None = None, amax: Tensor | None = None) -> NVFP4Tensor:
    """Quantize `z` ([..., cols], floating point, rotated) along its last dimension, a multiple of 128.

    key: of the draws; without one, one is drawn from torch's default generator. amax: FP32 0-dim largest magnitude to
    scale by, where it is that of a larger tensor of which `z` is a shard.
    Raises TypeError unless `z` is floating point, ValueError for a last dimension that is no multiple of 128.
    """
    rows = as_rows(z, (1, GROUP), "quantize_ms_eden")
    encoded = encode_ms_eden(rows, fresh_rounding_key() if key is None else key, amax=amax)
    return cast(NVFP4Tensor, encoded.packed(z.shape[:-1]))


def encode_ms_eden(rows: Tensor, key: RoundingKey | None, *, amax: Tensor | None = None) -> Encoded:
    """The numbers of `quantize_ms_eden` for FP32 [rows, cols], unpacked.

    key: of the draws, a row's blocks being its columns; None rounds the corrected scales to nearest. amax: 0-dim, or
    [rows, 1] where rows are of several tensors.
    """
    amax = rows.abs().amax() if amax is None else amax.to(torch.float32)
    tensor_scale = encode_tensor_scale(amax, SCALE_MAX)
    reach = tensor_scale * torch.full_like(tensor_scale, GRID_LARGEST).reciprocal()
    scales = to_e4m3((block_amax(rows, (1, BLOCK)) * reach).clamp(max=FP32_MAX)).to(torch.float32)
    encode = (scales * tensor_scale.reciprocal()).reciprocal().clamp(max=FP32_MAX)
    scaled = scale_blocks(rows, torch.where(scales == 0, torch.zeros_like(encode), encode))
    codes = round_e2m1_nearest(scaled.clamp(-E2M1_MAX, E2M1_MAX))
    corrected = scales * _correction(scaled, codes).repeat_interleave(GROUP // BLOCK, dim=1)
    return Encoded(codes, _rounded(corrected, key), (1, BLOCK), rows < 0, amax, SCALE_MAX)


def _correction(scaled: Tensor, codes: Tensor) -> Tensor:
    """FP32 [rows, groups]: what makes up for what rounding to nearest took from each group."""
    divisor = _group_sums(scaled * codes)
    correction = _group_sums(scaled * scaled) / divisor
    return torch.where(divisor == 0, torch.ones_like(correction), correction)


def _group_sums(values: Tensor) -> Tensor:
    blocks = values.unflatten(-1, (-1, GROUP // BLOCK, BLOCK))
    total = blocks[..., 0]
    for column in range(1, BLOCK):
        total = total + blocks[..., column]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _rounded(scales: Tensor, key: RoundingKey | None) -> Tensor:
    """float8_e4m3fn [rows, blocks]."""
    if key is None:
        return to_e4m3(scales)
    of_blocks = replace(key, column_offset=key.column_offset // BLOCK)
    uniform = rounding_draws(of_blocks, scales.shape[0], scales.shape[1], scales.device)
    return round_e4m3_stochastic(scales.clamp(max=E4M3_MAX), uniform).to(torch.float8_e4m3fn)
