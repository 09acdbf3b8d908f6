"""MXFP4 (OCP microscaling): E2M1 codes, one power-of-two scale for 32 (or 32x32) elements, no tensor scale.

    scale = block_amax / 6 rounded up to a power of two (UE8M0), so that nothing saturates (paper, appendix B.4)
    code  = e2m1(x / scale)
    value = code * scale

An all-zero block takes the smallest scale, 2^-127, and zero codes. A block that holds NaN or inf takes the scale NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization.formats import (
    E2M1_MAX,
    e2m1_codes,
    pack_codes,
    round_e2m1_nearest,
    round_e2m1_stochastic,
    to_ue8m0_up,
    ue8m0_values,
)
from megatron_fp4.quantization.nvfp4 import check_rounding
from megatron_fp4.quantization.rounding import RoundingKey, fresh_rounding_key, rounding_draws
from megatron_fp4.quantization.tensor import MXFP4Tensor, as_rows, block_amax

MXFP4_BLOCKS = ((1, 32), (32, 32))


def quantize_mxfp4(
    x: Tensor,
    block: tuple[int, int] = (1, 32),
    rounding: str = "nearest",
    *,
    key: RoundingKey | None = None,
) -> MXFP4Tensor:
    """Quantize `x` ([..., cols], floating point) along its last dimension; arguments as in `quantize_nvfp4`.

    Raises TypeError unless `x` is floating point, ValueError for another block or rounding or if the block does not
    tile `x`.
    """
    if tuple(block) not in MXFP4_BLOCKS:
        raise ValueError(f"quantize_mxfp4: block {tuple(block)} is not one of {MXFP4_BLOCKS}")
    check_rounding(rounding, "quantize_mxfp4")
    rows = as_rows(x, block, "quantize_mxfp4")
    if rounding == "stochastic" and key is None:
        key = fresh_rounding_key()
    values, negative, scales = encode_mxfp4(rows, block, key if rounding == "stochastic" else None)
    lead = x.shape[:-1]
    codes = pack_codes(e2m1_codes(values, negative)).reshape(*lead, -1)
    return MXFP4Tensor(codes, scales.reshape(*lead, -1), (block[0], block[1]))


def encode_mxfp4(rows: Tensor, block: tuple[int, int], key: RoundingKey | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of checked FP32 rows: grid values [rows, cols], where the sign bit is set, UE8M0 codes [rows, cols / 32]."""
    amax = block_amax(rows, block)
    scales = to_ue8m0_up(amax / torch.full_like(amax, E2M1_MAX))
    inverse = ue8m0_values(scales).reciprocal()
    scaled = (rows.unflatten(-1, (-1, 32)) * inverse[..., None]).flatten(-2).clamp_(-E2M1_MAX, E2M1_MAX)
    if key is None:
        return round_e2m1_nearest(scaled), rows < 0, scales
    uniform = rounding_draws(key, rows.shape[0], rows.shape[1], rows.device)
    return round_e2m1_stochastic(scaled, uniform), rows < 0, scales
