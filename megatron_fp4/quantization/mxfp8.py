"""MXFP8 (OCP microscaling): E4M3 codes, one power-of-two scale for 32 (or 32x32) elements, no tensor scale.

As Transformer Engine computes it (`cast/mxfp8/quantize_mxfp8.cuh`, `float_to_e8m0` in `util/ptx_arch_spec.cuh`):

    scale = block_amax * (1/448 in FP32) rounded up to a power of two (UE8M0), so that nothing saturates
    code  = e4m3(x / scale), to nearest
    value = code * scale

An all-zero block takes the smallest scale, 2^-127, and zero codes. A block that holds NaN or inf takes the scale NaN.

Of BF16 tensors every value is exact in BF16: x and the spacing of the codes are multiples of BF16's smallest number,
2^-133, so a value is one too, and it has four significant bits. (In FP32 tensors, blocks below 1.1e-35 can have codes
that stand for less than 2^-133.) An element of at least 2^127 * 31/16 = 3.3e38 is rounded to 2^128, which is infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization.elements import E4M3_MAX, to_e4m3, to_ue8m0_up, ue8m0_values
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.quantization.tensor import Encoded, QuantizedTensor, block_amax, checked, scale_blocks

MXFP8_BLOCKS = ((1, 32), (32, 32))


def quantize_mxfp8(x: Tensor, block: tuple[int, int] = (1, 32)) -> QuantizedTensor:
    """Quantize `x` ([..., cols], floating point) along its last dimension, rounding to nearest.

    block: elements that share a scale, (1, 32) or (32, 32); rows are all leading dimensions flattened.
    Raises TypeError unless `x` is floating point, ValueError for another block or if the block does not tile `x`.
    """
    rows, _ = checked(x, block, MXFP8_BLOCKS, "nearest", None, "quantize_mxfp8")
    return encode_mxfp8(rows, block).packed(x.shape[:-1])


def encode_mxfp8(rows: Tensor, block: tuple[int, int], key: RoundingKey | None = None) -> Encoded:
    """The numbers of `quantize_mxfp8` for checked FP32 [rows, cols]. key: None, there is no stochastic rounding."""
    assert key is None, "mxfp8 rounds to nearest"
    amax = block_amax(rows, block)
    scales = to_ue8m0_up(amax * torch.full_like(amax, 1 / E4M3_MAX))
    codes = to_e4m3(scale_blocks(rows, ue8m0_values(scales).reciprocal()))
    return Encoded(codes, scales, block)
