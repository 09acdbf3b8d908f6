"""FP8 in blocks: E4M3 values under FP32 scales, 128x128 for weights and 1x128 for activations and gradients.

The paper's FP8 baseline (appendix A.1, after DeepSeek-V3):

    encode = 448 / block_amax in FP32 (1 for an all-zero block), optionally rounded down to a power of two
    code   = e4m3(x * encode)
    value  = code * (1 / encode)

Transformer Engine's `Float8BlockScaling` forces powers of two by default; here that is a switch, off by default.
A block that holds NaN or inf takes the scale NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization.elements import E4M3_MAX, FP32_MAX, to_e4m3
from megatron_fp4.quantization.rounding import RoundingKey, random_bits
from megatron_fp4.quantization.tensor import Encoded, QuantizedTensor, block_amax, checked, scale_blocks

FP8_BLOCKS = ((1, 128), (128, 128))


def quantize_fp8(
    x: Tensor,
    block: tuple[int, int] = (1, 128),
    rounding: str = "nearest",
    *,
    key: RoundingKey | None = None,
    power_of_two_scales: bool = False,
) -> QuantizedTensor:
    """Quantize `x` ([..., cols], floating point) along its last dimension; arguments as in `quantize_nvfp4`.

    power_of_two_scales: round the encode scale down to a power of two.
    Raises TypeError unless `x` is floating point, ValueError for another block or rounding or if the block does not
    tile `x`.
    """
    rows, key = checked(x, block, FP8_BLOCKS, rounding, key, "quantize_fp8")
    return encode_fp8(rows, block, key, power_of_two_scales=power_of_two_scales).packed(x.shape[:-1])


def encode_fp8(
    rows: Tensor, block: tuple[int, int], key: RoundingKey | None, *, power_of_two_scales: bool = False
) -> Encoded:
    """The numbers of `quantize_fp8` for checked FP32 [rows, cols]. `key` None rounds to nearest."""
    amax = block_amax(rows, block)
    encode = torch.div(torch.full_like(amax, E4M3_MAX), amax).clamp(max=FP32_MAX)
    if power_of_two_scales:
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode = torch.where(amax == 0, torch.ones_like(encode), encode)
    decode = torch.where(torch.isfinite(amax), encode.reciprocal(), float("nan"))
    scaled = scale_blocks(rows, encode)
    if key is not None:
        scaled = _stochastic_e4m3(scaled, random_bits(key, rows.shape[0], rows.shape[1], rows.device))
    # E4M3 times a power of two has four significant bits.
    exact = torch.bfloat16 if power_of_two_scales else torch.float32
    return Encoded(to_e4m3(scaled), decode, block, exact=exact)


def _stochastic_e4m3(scaled: Tensor, bits: Tensor) -> Tensor:
    """FP32 on the E4M3 grid, each element rounded up in magnitude with probability its distance from below."""
    scaled = scaled.clamp(-E4M3_MAX, E4M3_MAX)
    exponent = torch.frexp(scaled).exponent.clamp(min=-5)  # below 2^-6 the grid is that of the subnormals
    spacing = torch.ldexp(torch.ones_like(scaled), exponent - 4)
    position = scaled.abs() / spacing
    below = torch.floor(position)
    uniform = ((bits >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    return torch.copysign((below + (uniform < position - below).to(scaled.dtype)) * spacing, scaled)
