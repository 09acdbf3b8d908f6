"""NVFP4: E2M1 codes, one E4M3 scale for each block of 1x16 or 16x16 elements, one FP32 scale for the tensor.

The arithmetic is FP32, in exactly the order of Transformer Engine's reference for paper appendix B.1-B.3. The 1/6 is
first folded into the tensor scale; S and 1 / S are true divisions, and so is the encode scale:

    S      = min(6 * 448 / amax, FLT_MAX), or 1 where that is 0 (amax = inf)
    scale  = e4m3(clamp(block_amax * (S * (1/6)), -448, 448))
    encode = min(1 / (scale * (1/S)), FLT_MAX)
    code   = e2m1(clamp(x * encode, -6, 6))
    value  = code * scale * amax / 2688

Edge cases that follow from it: An all-zero tensor has zero codes and zero scales. A nonzero block whose scale rounds to
0 has saturated codes and is decoded to 0. A negative zero in the input gets code 0; a negative value that rounds to
zero gets code 8. If the tensor has NaN or inf, so has amax, and no value is decoded to a finite number.

Divisors are tensors, because on CUDA PyTorch divides by a Python number by multiplying with its reciprocal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.quantization import rounding
from megatron_fp4.quantization.tensor import NVFP4Tensor, block_amax, overflow_guard, scale_blocks

NVFP4_BLOCKS = ((1, 16), (16, 16))
FOUR_OVER_SIX_SCALE_MAX = 256.0


def encode_nvfp4(
    rows: Tensor,
    block: tuple[int, int],
    key: rounding.RoundingKey | None,
    *,
    amax: Tensor | None = None,
    four_over_six: str = "",
    maxima: Tensor | None = None,
) -> NVFP4Tensor:
    """Quantize FP32 [rows, cols] to NVFP4. key: of the draws; None rounds to nearest.

    amax: 0-dim; None: amax of `rows`.
    four_over_six: for each block, also try to map the largest value to 4 instead of 6 (scale x 1.5), and keep the
        choice with the smaller sum of `absolute` or `squared` errors; 6 wins ties (arXiv 2512.02010). The largest block
        scale is then mapped to 256, and the 1/6 is not folded into S, as in Transformer Engine. Empty: only 6. Raises
        ValueError for other words.
    maxima: FP32 [rows, cols / 16], the largest magnitude of each row's blocks, if other rows of these blocks are not
        among `rows` (not with four_over_six); None: the maxima of `rows`.
    """
    if four_over_six not in ("", "absolute", "squared"):
        raise ValueError(f"nvfp4: four_over_six {four_over_six!r} is not 'absolute', 'squared' or ''")
    amax = rows.abs().amax() if amax is None else amax.to(torch.float32)
    scale_max = FOUR_OVER_SIX_SCALE_MAX if four_over_six else rounding.E4M3_MAX
    tensor_scale = encode_tensor_scale(amax, scale_max)
    maxima = block_amax(rows, block) if maxima is None else maxima
    if not four_over_six:
        sixth = tensor_scale * torch.full_like(tensor_scale, rounding.E2M1_MAX).reciprocal()
        scales = rounding.to_e4m3((maxima * sixth).clamp(max=rounding.FP32_MAX))
        scaled = _scaled_to_grid(rows, scales, tensor_scale)
    else:
        unrounded = maxima / torch.full_like(maxima, rounding.E2M1_MAX) * tensor_scale
        scales_6, scales_4 = rounding.to_e4m3(unrounded), rounding.to_e4m3(unrounded * 1.5)
        scaled_6, scaled_4 = (_scaled_to_grid(rows, scales, tensor_scale) for scales in (scales_6, scales_4))
        squared = four_over_six == "squared"
        error_6 = _block_error(rows, scaled_6, scales_6, amax, block, squared)
        error_4 = _block_error(rows, scaled_4, scales_4, amax, block, squared)
        take_4 = error_4 < error_6
        scales = torch.where(take_4, scales_4.view(torch.uint8), scales_6.view(torch.uint8)).view(torch.float8_e4m3fn)
        scaled = torch.where(take_4.repeat_interleave(16, dim=1), scaled_4, scaled_6)
    return NVFP4Tensor(rounding.round_e2m1(scaled, key), scales, block, rows < 0, amax=amax, scale_max=scale_max)


def encode_tensor_scale(
    amax: Tensor, scale_max: float = rounding.E4M3_MAX, code_max: float = rounding.E2M1_MAX
) -> Tensor:
    """S, the FP32 factor that maps the largest block scale to `scale_max` (paper eq. 1); of the shape of `amax`."""
    scale = torch.div(torch.full_like(amax, code_max * scale_max), amax).clamp(max=rounding.FP32_MAX)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _scaled_to_grid(rows: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """FP32 clamp(x * encode, -6, 6) of the formula at the top of this file."""
    encode = (scales.to(torch.float32) * tensor_scale.reciprocal()).reciprocal().clamp(max=rounding.FP32_MAX)
    return scale_blocks(rows, encode).clamp_(-rounding.E2M1_MAX, rounding.E2M1_MAX)


def _block_error(
    rows: Tensor, scaled: Tensor, scales: Tensor, amax: Tensor, block: tuple[int, int], squared: bool
) -> Tensor:
    """The error of rounding to nearest, summed over each block: [rows, cols / 16], repeated for the block's rows.

    The order of the sum is Transformer Engine's: the columns of a block one after another, then its rows by halves.
    Rounding decides between two choices whose exact errors are equal, so every implementation needs the same order.
    Where sums could overflow, `overflow_guard` scales all errors down, so that the smaller one is found there too.
    squared: errors are first multiplied by a power of two that brings amax near 1, so that squares do not underflow.
    """
    guard = overflow_guard(amax)
    decoded = rounding.round_e2m1_nearest(scaled).unflatten(-1, (-1, 16)) * scales.to(torch.float32)[..., None]
    decoded = decoded * (amax * guard) / torch.full_like(amax, rounding.E2M1_MAX * FOUR_OVER_SIX_SCALE_MAX)
    difference = (decoded - rows.unflatten(-1, (-1, 16)) * guard).abs()
    if squared:
        difference = difference * _inverse_power_of_two(amax)
        difference = difference * difference
    error = torch.zeros_like(difference[..., 0])
    for column in range(16):
        error = error + difference[..., column]
    if block[0] > 1:
        error = error.unflatten(0, (-1, block[0]))
        while error.shape[1] > 1:
            half = error.shape[1] // 2
            error = error[:, :half] + error[:, half:]
        error = error[:, 0].repeat_interleave(block[0], dim=0)
    return error


def _inverse_power_of_two(amax: Tensor) -> Tensor:
    """FP32 2^-e for 2^e <= `amax` < 2^(e + 1), limited to FP32's normal numbers."""
    exponent = ((amax.view(torch.int32) >> 23) & 0xFF).clamp(1, 253)
    return ((254 - exponent) << 23).to(torch.int32).view(torch.float32)
