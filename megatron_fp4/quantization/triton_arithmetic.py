"""The arithmetic of the 4-bit kernels: tiles of pairs, scales, rounding, and single instructions.

See `triton_kernels.py` for what they make up and for what keeps their bits equal to the PyTorch reference.
"""

# ruff: noqa: D103
# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B9)
MIX_A = tl.constexpr(0x7FEB352D)
MIX_B = tl.constexpr(0x846CA68B)


# Tiles and pairs.


@triton.jit
def as_long(tile):
    return tl.full((), 1, tl.int64) * tile


@triton.jit
def load_tile(x_ptr, tile, offsets, mask, width, BLOCK: tl.constexpr, FP32: tl.constexpr):
    """A tuple of BLOCK rows of pairs; FP32 input (loaded as 64-bit pairs) is rounded to BF16 first."""
    x_ptr += as_long(tile) * BLOCK * width
    rows = ()
    for r in tl.static_range(BLOCK):
        both = tl.load(x_ptr + r * width + offsets, mask, 0)
        if FP32:
            low = both.to(tl.int32).to(tl.float32, bitcast=True)
            high = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            both = round_pair(low, high)
        rows += (both,)
    return rows


@triton.jit
def hadamard_tile(pairs, BLOCK: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """The random Hadamard transform over the rows of a tile of pairs, rounded to BF16."""
    even = ()
    odd = ()
    for r in tl.static_range(BLOCK):
        even += (even_of(pairs[r]),)
        odd += (odd_of(pairs[r]),)
    even = butterflies(even, BLOCK, SIGNS)
    odd = butterflies(odd, BLOCK, SIGNS)
    result = ()
    for r in tl.static_range(BLOCK):
        result += (round_pair(even[r] * FACTOR, odd[r] * FACTOR),)
    return result


@triton.jit
def butterflies(values, SIZE: tl.constexpr, SIGNS: tl.constexpr):
    """Bit i of SIGNS: the sign of element i is minus."""
    signed = ()
    for i in tl.static_range(SIZE):
        if (SIGNS >> i) & 1:
            signed += (-values[i],)
        else:
            signed += (values[i],)
    values = signed
    for level in tl.static_range(5):
        if (1 << level) < SIZE:
            summed = ()
            for i in tl.static_range(SIZE):
                if (i >> level) & 1:
                    summed += (values[i - (1 << level)] - values[i],)
                else:
                    summed += (values[i] + values[i + (1 << level)],)
            values = summed
    return values


@triton.jit
def even_of(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def odd_of(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def signed_values(even, odd, limit, sign_pair):
    """Magnitudes that are exact in BF16, up to `limit`, under the signs of another pair."""
    return (min_pair(pack(even, odd), limit) & 0x7FFF7FFF) | (sign_pair & -2147450880)


# Scales and grids.


@triton.jit
def tensor_scale(amax_ptr, decode_ptr, BLOCK: tl.constexpr):
    """S / 6 and 1 / S of NVFP4's tensor scale S; one program writes amax / 2688. MXFP4 has none."""
    if BLOCK != 16:
        return 1.0, 1.0
    else:
        amax = tl.load(amax_ptr)
        scale = nan_min(tl.div_rn(2688.0, amax), 3.4028234663852886e38)
        scale = tl.where(scale == 0.0, 1.0, scale)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(decode_ptr, tl.div_rn(amax, 2688.0))
        return scale * 0.1666666716337204, reciprocal(scale)


@triton.jit
def block_scale(largest, sixth, inverse, BLOCK: tl.constexpr):
    """FP32 decode scale and encode factor of blocks with these largest magnitudes."""
    if BLOCK == 16:
        scale = nan_min(largest * sixth, 448.0)
        # To E4M3: an FP32 sum with 1.5 * 2^23 spacings rounds to the spacing, at least that below 2^-6.
        binade = tl.maximum(scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000).to(tl.float32, bitcast=True)
        scale = tl.fma(binade, -1572864.0, tl.fma(binade, 1572864.0, scale))
        encode = block_encode(scale * inverse, inverse)
    else:
        # A sixth, rounded up to a power of two: the exponent less two, or less one beyond the mantissa of 6. Code 0 is
        # 2^-127, a subnormal. NaN where the block was not finite.
        bits = largest.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32), 0)
        encode = (0x7F000000 - (exponent << 23)).to(tl.float32, bitcast=True)
        exponent = tl.where(exponent == 0, 0x400000, exponent << 23)
        scale = tl.where(bits >= 0x7F800000, 0x7FC00000, exponent).to(tl.float32, bitcast=True)
    return scale, encode


@triton.jit
def block_encode(x, inverse):
    """min(1 / x, FLT_MAX), correctly rounded: CUDA's own sequence without its branch for the ends of the range.

    The approximation is infinite at 0 and the step after it NaN, which the minimum drops; what could be subnormal
    (x is at least 2^-9 * inverse, or 0) is scaled up first.
    """
    unit = tl.where(inverse < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)
    x = x * unit
    guess = approximate_reciprocal(x)
    return tl.minimum(tl.fma(guess, tl.fma(-x, guess, 1.0), guess) * unit, 3.4028234663852886e38)


@triton.jit
def grid_nearest(magnitude):
    """`round_e2m1_nearest` of magnitudes."""
    binade = binade_of(magnitude)
    return tl.fma(binade, -6291456.0, tl.fma(binade, 6291456.0, magnitude))


@triton.jit
def grid_stochastic(magnitude, mixed):
    """`round_e2m1_stochastic` of magnitudes, the draws from the combined hashes of row and column."""
    x = mixed.to(tl.uint32, bitcast=True) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    # The highest 22 bits of x ^ (x >> 16), k = 2^22 u, read as the subnormal number k * 2^-148. The spacing is half a
    # binade: times u, it is this number times 2^125 binades.
    draw = (((x >> 9) ^ (x >> 25)) & 0x7FFFFE).to(tl.float32, bitcast=True)
    binade = binade_of(magnitude)
    raised = tl.fma(draw, binade * 4.2535295865117308e37, magnitude)
    return tl.fma(binade, -4194304.0, fma_down(binade, 4194304.0, raised))


@triton.jit
def binade_of(magnitude):
    return tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def position_hash(start, position):
    """`rounding._hash_positions` with the first xor-shift of the element's mix already done (it is linear)."""
    x = start.to(tl.uint32, bitcast=True) + position.to(tl.uint32) * GOLDEN
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    x = x ^ (x >> 16)
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def insert_code(word, grid, scaled, BIT: tl.constexpr):
    """Put the E2M1 code of a magnitude on the grid (6 at most counts) with the sign of `scaled` at a bit of a word."""
    # Times 2^-126, exponents and subnormals of FP32 are those of E2M1: the code is then the bits from 22 on.
    code = (tl.minimum(grid, 6.0) * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    code = code >> (22 - BIT) if BIT <= 22 else code << (BIT - 22)
    sign = (scaled + 0.0).to(tl.int32, bitcast=True)  # a zero that comes in as -0 has no sign
    sign = sign >> (28 - BIT)
    SIGN: tl.constexpr = 8 << BIT if BIT < 28 else -2147483648
    return word | (code & (7 << BIT)) | (sign & SIGN)


@triton.jit
def code_value(code):
    """FP32 value of the E2M1 code in the lowest four bits."""
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (magnitude.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def scale_byte(scale, BLOCK: tl.constexpr):
    """The byte of an FP32 scale that E4M3 (or UE8M0) holds."""
    if BLOCK == 16:
        byte = (scale * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20
        byte = tl.where(scale != scale, 0x7F, byte)
    else:
        byte = tl.where(scale != scale, 0xFF, scale.to(tl.int32, bitcast=True) >> 23)
    return byte


@triton.jit
def scale_from_byte(byte, BLOCK: tl.constexpr):
    if BLOCK == 16:
        scale = (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        bits = tl.where(byte == 0x7F, 0x7FC00000, scale.to(tl.int32, bitcast=True))
    else:
        bits = tl.where(byte == 0, 0x400000, tl.where(byte == 0xFF, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


# Single instructions.


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal(x):
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def approximate_reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def fma_down(a, b, c):
    """a * b + c rounded towards minus infinity."""
    return tl.inline_asm_elementwise("fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)


@triton.jit
def pack(even, odd):
    """A pair from two FP32 numbers that BF16 holds."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,f,f", [even, odd], tl.int32, True, 1)


@triton.jit
def round_pair(even, odd):
    """A pair from two FP32 numbers, rounded to nearest even."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], tl.int32, True, 1)


@triton.jit
def min_pair(a, b):
    """The smaller of each of two BF16; a NaN on one side gives the other side."""
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
