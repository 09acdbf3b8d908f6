"""NVFP4 four over six along the columns as a Triton kernel, bit for bit `encode_nvfp4(..., four_over_six=True)`.

A block, 16 elements of one row, lies within one thread, so that its errors are summed in the reference's order; lanes
next to each other have blocks next to each other, whose 32 bytes share cache lines. Codes of a block are one 64-bit
store. Each block is quantized under both scales, and its error under each decides.
"""

# ruff: noqa: D103 (kernels are documented by their arguments)
# mypy: disable-error-code="assignment, misc, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.triton_arithmetic import (
    as_long,
    even_of,
    grid_nearest,
    nan_max,
    nan_min,
    nearest_e4m3,
    nibble,
    odd_of,
    scale_byte,
    under_sign,
)


@triton.jit
def quantize_kernel(
    x_ptr,  # [blocks, 8] pairs of BF16
    codes_ptr,  # out: int64 [blocks], 16 nibbles, the first element in the lowest
    scales_ptr,  # out: uint8 [blocks]
    amax_ptr,  # FP32 [1]
    decode_ptr,  # out: FP32 [1], amax / 1536
    num_blocks,
    SQUARED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = as_long(tl.program_id(0)) * BLOCKS + tl.arange(0, BLOCKS)
    block = tl.minimum(block, num_blocks - 1)
    amax = tl.load(amax_ptr)
    tensor_scale = nan_min(tl.div_rn(1536.0, amax), 3.4028234663852886e38)
    tensor_scale = tl.where(tensor_scale == 0.0, 1.0, tensor_scale)
    inverse = tl.div_rn(1.0, tensor_scale)
    if tl.program_id(0) == 0:
        tl.store(decode_ptr, tl.div_rn(amax, 1536.0))
    exponent = (amax.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)

    values = ()
    largest = tl.zeros([BLOCKS], tl.float32)
    for pair in tl.static_range(8):
        both = tl.load(x_ptr + (block * 8 + pair))
        values += (even_of(both), odd_of(both))
        largest = nan_max(largest, nan_max(tl.abs(values[2 * pair]), tl.abs(values[2 * pair + 1])))
    base = tl.div_rn(largest, 6.0) * tensor_scale
    scale_6 = nearest_e4m3(nan_min(base, 448.0))
    scale_4 = nearest_e4m3(nan_min(base * 1.5, 448.0))
    encode_6 = nan_min(tl.div_rn(1.0, scale_6 * inverse), 3.4028234663852886e38)
    encode_4 = nan_min(tl.div_rn(1.0, scale_4 * inverse), 3.4028234663852886e38)
    if (amax > 8.673617379884035e-19) & (amax < 1.2676506002282294e30):
        # Brought near 1 by a power of two nothing overflows or loses digits, and both errors keep their order.
        error_6 = error_of(values, scale_6, encode_6, amax * power, power, 1.0, SQUARED, True)
        error_4 = error_of(values, scale_4, encode_4, amax * power, power, 1.0, SQUARED, True)
    else:
        # Where sums would overflow, 2^-12 of them; squares are of errors near 1.
        room = tl.where(amax > 1.2676506002282294e30, 0.000244140625, 1.0)
        error_6 = error_of(values, scale_6, encode_6, amax * room, room, power, SQUARED, False)
        error_4 = error_of(values, scale_4, encode_4, amax * room, room, power, SQUARED, False)
    take_4 = error_4 < error_6
    scale = tl.where(take_4, scale_4, scale_6)
    encode = tl.where(take_4, encode_4, encode_6)
    words = ()
    for half in tl.static_range(2):
        word = tl.zeros([BLOCKS], tl.int32)
        for i in tl.static_range(8):
            value = values[half * 8 + i]
            code = under_sign(grid_nearest(tl.minimum(tl.abs(value) * encode, 6.0)), value)
            word |= nibble(code) << (4 * i)
        words += (word,)
    low = words[0].to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(codes_ptr + block, low | (words[1].to(tl.int64) << 32))
    tl.store(scales_ptr + block, scale_byte(scale, 16).to(tl.uint8))


@triton.jit
def error_of(values, scale, encode, amax, unit, power, SQUARED: tl.constexpr, NEAR_ONE: tl.constexpr):
    """The sum over a block of the absolute or squared errors of rounding to nearest under `scale`, in units of `unit`.

    NEAR_ONE: amax is, and decoded values lie between 2^-10 and 2^13 before the division. 1 / 1536, the remainder of its
    product and one correction give the correctly rounded quotient then (Markstein).
    """
    error = tl.zeros_like(scale)
    for i in tl.static_range(16):
        magnitude = tl.abs(values[i])
        decoded = grid_nearest(tl.minimum(magnitude * encode, 6.0)) * scale * amax
        if NEAR_ONE:
            guess = decoded * 0.0006510416860692203
            decoded = tl.fma(tl.fma(guess, -1536.0, decoded), 0.0006510416860692203, guess)
        else:
            decoded = tl.div_rn(decoded, 1536.0)
        difference = tl.abs(decoded - magnitude * unit)
        if SQUARED:
            if not NEAR_ONE:
                difference = difference * power
            difference = difference * difference
        error = error + difference
    return error
