"""MXFP4 (OCP microscaling): E2M1 codes, one power-of-two scale for 32 (or 32x32) elements, no tensor scale.

    scale = block_amax / 6 rounded up to a power of two (UE8M0), so that nothing saturates (paper, appendix B.4)
    code  = e2m1(x / scale)
    value = code * scale

An all-zero block takes the smallest scale, 2^-127, and zero codes. A block that holds NaN or inf takes the scale NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization.elements import (
    E2M1_MAX,
    round_e2m1_nearest,
    round_e2m1_stochastic,
    to_ue8m0_up,
    ue8m0_values,
)
from megatron_fp4.quantization.rounding import RoundingKey, rounding_draws
from megatron_fp4.quantization.tensor import Encoded, QuantizedTensor, block_amax, checked, scale_blocks

MXFP4_BLOCKS = ((1, 32), (32, 32))


def quantize_mxfp4(
    x: Tensor,
    block: tuple[int, int] = (1, 32),
    rounding: str = "nearest",
    *,
    key: RoundingKey | None = None,
) -> QuantizedTensor:
    """Quantize `x` ([..., cols], floating point) along its last dimension; arguments as in `quantize_nvfp4`.

    Raises TypeError unless `x` is floating point, ValueError for another block or rounding or if the block does not
    tile `x`.
    """
    rows, key = checked(x, block, MXFP4_BLOCKS, rounding, key, "quantize_mxfp4")
    return encode_mxfp4(rows, block, key).packed(x.shape[:-1])


def encode_mxfp4(
    rows: Tensor, block: tuple[int, int], key: RoundingKey | None, *, maxima: Tensor | None = None
) -> Encoded:
    """The numbers of `quantize_mxfp4` for checked FP32 [rows, cols], unpacked. `key` None rounds to nearest.

    maxima: FP32 [rows, cols / 32], the largest magnitude of each row's blocks, where other rows of these are elsewhere;
    None: of `rows`.
    """
    amax = block_amax(rows, block) if maxima is None else maxima
    scales = to_ue8m0_up(amax / torch.full_like(amax, E2M1_MAX))
    scaled = scale_blocks(rows, ue8m0_values(scales).reciprocal()).clamp_(-E2M1_MAX, E2M1_MAX)
    if key is None:
        values = round_e2m1_nearest(scaled)
    else:
        values = round_e2m1_stochastic(scaled, rounding_draws(key, rows.shape[0], rows.shape[1], rows.device))
    return Encoded(values, scales, block, rows < 0)
