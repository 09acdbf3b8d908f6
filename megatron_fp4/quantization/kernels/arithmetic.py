"""Functions of the 4-bit kernels: tiles of pairs, scales, rounding, single instructions.

A *pair* is the BF16 values of an even and the next odd column in one int32. `fp4.py` says what the kernels compute, and
why their bits are those of the PyTorch reference.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B9)
MIX_A = tl.constexpr(0x7FEB352D)
MIX_B = tl.constexpr(0x846CA68B)
# Pairs of two equal BF16 numbers: 6, 1, 2^-126, 2^126.
SIXES = tl.constexpr(0x40C040C0)
ONES = tl.constexpr(0x3F803F80)
SMALLEST_PAIR = tl.constexpr(0x00800080)
LARGEST_POWERS = tl.constexpr(0x7E807E80)
# Masks below are signed int32: -2147483648 is 0x80000000, -2147450880 0x80008000, -65536 0xFFFF0000, -252645136
# 0xF0F0F0F0, -2004318072 0x88888888.


# Tiles and pairs.


@triton.jit
def as_long(tile):
    """`tile` as int64, because offsets into large tensors exceed 32 bits."""
    return tl.full((), 1, tl.int64) * tile


@triton.jit
def tiles_of_program(num_tiles, tiles_per_program, program):
    """The first tile of a program and the number of its tiles. Program 0 has the last tiles."""
    end = num_tiles - program * tiles_per_program
    count = tl.minimum(tiles_per_program, end)
    return end - count, count


@triton.jit
def load_tile(x_ptr, offsets, width, source_ptr, ROWS: tl.constexpr, FP32: tl.constexpr, SEGMENTED: tl.constexpr):
    """A tuple of ROWS rows of pairs. FP32 input, which is loaded as pairs in 64 bits, is rounded to BF16. With
    SEGMENTED, `source_ptr` has the number of each row; that of zeros is negative."""
    rows = ()
    for r in tl.static_range(ROWS):
        if SEGMENTED:
            source = tl.load(source_ptr + r)
            pair = tl.load(x_ptr + source * width + offsets, source >= 0, 0)
        else:
            pair = tl.load(x_ptr + (r * width + offsets))
        if FP32:
            pair = rounded_pair(pair)
        rows += (pair,)
    return rows


@triton.jit
def rounded_pair(pair):
    """A pair from two FP32 numbers in 64 bits."""
    return round_pair(
        pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    )


@triton.jit
def hadamard_tile(pairs, BLOCK: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """The random Hadamard transform along the rows of a tile of pairs, rounded to BF16."""
    even = ()
    odd = ()
    for r in tl.static_range(BLOCK):
        even += (even_of(pairs[r]),)
        odd += (odd_of(pairs[r]),)
    even = butterflies(even, BLOCK, SIGNS, FACTOR)
    odd = butterflies(odd, BLOCK, SIGNS, FACTOR)
    result = ()
    for r in tl.static_range(BLOCK):
        result += (round_pair(even[r], odd[r]),)
    return result


@triton.jit
def butterflies(values, SIZE: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """The random Hadamard transform of a tuple of FP32 values. Sign i is minus if bit i of SIGNS is set. FACTOR:
    1 / sqrt(SIZE). If it is a power of two, the first level applies it and the signs, in FMAs with exact products."""
    EXACT: tl.constexpr = SIZE == 16
    FIRST: tl.constexpr = FACTOR if EXACT else 1.0
    summed = ()
    for i in tl.static_range(0, SIZE, 2):
        low = values[i]
        if (SIGNS >> i) & 1:
            low = low * -FIRST
        elif EXACT:
            low = low * FIRST
        high = values[i + 1]
        if (SIGNS >> (i + 1)) & 1:
            summed += (tl.fma(high, -FIRST, low), tl.fma(high, FIRST, low))
        else:
            summed += (tl.fma(high, FIRST, low), tl.fma(high, -FIRST, low))
    values = summed
    for level in tl.static_range(1, 5):
        if (1 << level) < SIZE:
            summed = ()
            for i in tl.static_range(SIZE):
                if (i >> level) & 1:
                    summed += (values[i - (1 << level)] - values[i],)
                else:
                    summed += (values[i] + values[i + (1 << level)],)
            values = summed
    if not EXACT:
        scaled = ()
        for i in tl.static_range(SIZE):
            scaled += (values[i] * FACTOR,)
        values = scaled
    return values


@triton.jit
def even_of(pair):
    """FP32 value of a pair's even column, the low half."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def odd_of(pair):
    """FP32 value of a pair's odd column, the high half."""
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def signed_values(grid_even, grid_odd, scales, sign_pair):
    """A pair of magnitudes on the grid, limited to 6, times a pair of scales, with the signs of `sign_pair`."""
    # The sign bits can be set by OR: magnitudes have none, nor has the NaN that FP32 arithmetic makes.
    return times_pair(min_pair(pack(grid_even, grid_odd), SIXES) | (sign_pair & -2147450880), scales)


@triton.jit
def largest_of(pair):
    """The larger magnitude of a pair of magnitudes, in FP32."""
    return nan_max(even_of(pair), odd_of(pair))


# Scales and grids.


@triton.jit
def tensor_scale(amax_ptr, decode_ptr, BLOCK: tl.constexpr, STORES: tl.constexpr):
    """S / 6 and 1 / S for NVFP4's tensor scale S; MXFP4 has none: 1, 1. STORES: one program stores amax / 2688."""
    if BLOCK != 16:
        return 1.0, 1.0
    else:
        amax = tl.load(amax_ptr)
        scale = nan_min(tl.div_rn(2688.0, amax), 3.4028234663852886e38)
        scale = tl.where(scale == 0.0, 1.0, scale)
        if STORES:  # noqa: SIM102 (a condition on a constant)
            if tl.program_id(0) + tl.program_id(1) == 0:
                tl.store(decode_ptr, tl.div_rn(amax, 2688.0))
        return scale * 0.1666666716337204, reciprocal(scale)


@triton.jit
def block_scale(largest, sixth, inverse, BLOCK: tl.constexpr):
    """FP32 block scales and encode factors for the blocks' maxima `largest`. sixth, inverse: from `tensor_scale`."""
    if BLOCK == 16:
        scale = nearest_e4m3(nan_min(largest * sixth, 448.0))
        encode = block_encode(scale * inverse, inverse)
    else:
        # largest / 6, rounded up to a power of two. 6 is 1.5 * 2^2, so 2 is subtracted from the exponent, or 1 if the
        # mantissa is larger than that of 6. Exponent field 0 is 2^-127, a subnormal. NaN if the block is not finite.
        bits = largest.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32), 0)
        encode = (0x7F000000 - (exponent << 23)).to(tl.float32, bitcast=True)
        exponent = tl.where(exponent == 0, 0x400000, exponent << 23)
        scale = tl.where(bits >= 0x7F800000, 0x7FC00000, exponent).to(tl.float32, bitcast=True)
    return scale, encode


@triton.jit
def nearest_e4m3(scale):
    """`rounding.to_e4m3` of FP32 0..448, in FP32: adding 1.5 * 2^23 spacings (1.5 * 2^20 binades) rounds to a multiple
    of the spacing. Below 2^-6, in E4M3's subnormals, the spacing stays the same."""
    binade = tl.maximum(scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000).to(tl.float32, bitcast=True)
    return tl.fma(binade, -1572864.0, tl.fma(binade, 1572864.0, scale))


@triton.jit
def block_encode(x, inverse):
    """min(1 / x, FLT_MAX), correctly rounded, by CUDA's own sequence without its branch for extreme numbers.

    At x = 0 the estimate is infinite and its correction NaN, which the minimum drops. x is 0 or at least
    2^-9 * inverse; if it could be subnormal (inverse < 2^-60), it is scaled up by 2^64.
    """
    scale_up = tl.where(inverse < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)
    x = x * scale_up
    estimate = approximate_reciprocal(x)
    return tl.minimum(tl.fma(estimate, tl.fma(-x, estimate, 1.0), estimate) * scale_up, 3.4028234663852886e38)


@triton.jit
def grid_nearest(magnitude):
    """`rounding.round_e2m1_nearest` of magnitudes."""
    binade = binade_of(magnitude)
    return tl.fma(binade, -6291456.0, tl.fma(binade, 6291456.0, magnitude))


@triton.jit
def grid_stochastic(magnitude, draw):
    """`rounding.round_e2m1_stochastic` of magnitudes. draw: u * 2^-125, from `draws`.

    `binade` is 2^124 times that of the number, so draw * binade is u times the spacing, which is half a binade. From 16
    on it overflows: it is infinite, and the result NaN; from 32 on the integer is negative, and the number is rounded
    as if it were below 2. The caller's minimum with 6 gives 6 for both. Such numbers occur only in blocks with a scale
    of zero; elsewhere the largest is 12 at most. 1.97e-31 is 2^-102: 2^23 spacings are 2^-102 of the scaled `binade`.
    """
    bits = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000) + 0x3E000000
    binade = tl.maximum(bits, 0x7D800000).to(tl.float32, bitcast=True)
    raised = tl.fma(draw, binade, magnitude)
    return tl.fma(binade, -1.9721522630525295e-31, fma_down(binade, 1.9721522630525295e-31, raised))


@triton.jit
def draws(mixed):
    """Two of `rounding.rounding_draws`, times 2^-125. mixed: hash of a row, exclusive-or hash of a pair of columns.

    A draw is an odd 16-bit number n times 2^-16. Shifted up by 8 bits and read as FP32, n becomes n * 2^-141, also if
    its highest bit makes that a normal number instead of a subnormal one.
    """
    x = mixed.to(tl.uint32, bitcast=True) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    x = ((x ^ (x >> 16)) | 0x00010001).to(tl.int32, bitcast=True)
    return low_half(x), high_half(x)


@triton.jit
def binade_of(magnitude):
    """The largest power of two up to |magnitude|, but at least 1: twice the spacing of the grid there."""
    return tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def position_hash(start, position):
    """`rounding._hash_positions`, and the first xor-shift of the element's `_mix`: a xor-shift is linear, so it may
    come before the exclusive-or of two hashes."""
    x = start.to(tl.uint32, bitcast=True) + position.to(tl.uint32) * GOLDEN
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    x = x ^ (x >> 16)
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def under_sign(magnitude, signed):
    """`magnitude` with the sign of `signed`. The sign of -0 is dropped: -0 + 0 is +0."""
    sign = (signed + 0.0).to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def nibble(code):
    """The E2M1 code, with its sign, of an FP32 number on the grid."""
    # Multiplied by 2^-126, FP32 numbers have the exponents and subnormals of E2M1.
    bits = (code * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def pair_of_codes(grid_even, grid_odd):
    """E2M1 codes of two magnitudes on the grid, limited to 6, in bits 6-8 and 22-24."""
    # Multiplied by 2^-126, BF16 numbers have the exponents and subnormals of E2M1.
    return times_pair(min_pair(pack(grid_even, grid_odd), SIXES), SMALLEST_PAIR)


@triton.jit
def signs_of_codes(pair):
    """A pair with the signs of the codes of `pair`. The sign of -0 is dropped: -0 + 0 is +0."""
    return fma_pair(pair, ONES, 0)


@triton.jit
def byte_of_codes(codes, signs):
    """The two codes of a pair in one byte, the even column in the low nibble."""
    magnitudes = ((codes >> 6) & 0x7) | ((codes >> 18) & 0x70)
    return magnitudes | ((signs >> 12) & 0x8) | ((signs >> 24) & 0x80)


@triton.jit
def word_of_codes(codes_0, codes_1, codes_2, codes_3, signs_0, signs_1, signs_2, signs_3):
    """The codes of a pair of columns in four rows as one word: the even column in the low half, a nibble per row."""
    low = add_shifted(codes_0, codes_1)
    high = add_shifted(codes_2, codes_3)
    # Of the bytes of ones or zeros, rows 0 and 2 take the low nibbles, rows 1 and 3 the high ones.
    signs = (sign_bytes(signs_0, signs_2) & 0x0F0F0F0F) | (sign_bytes(signs_1, signs_3) & -252645136)
    return ((low >> 6) + high * 4) | (signs & -2004318072)


@triton.jit
def values_of_byte(byte, scales):
    """The pair of values of a byte of `byte_of_codes`, times a pair of scales."""
    magnitudes = times_pair(((byte & 0x7) << 6) | ((byte & 0x70) << 18), LARGEST_POWERS)
    return times_pair(magnitudes | ((byte & 0x8) << 12) | ((byte & 0x80) << 24), scales)


@triton.jit
def values_of_codes(word, row: tl.constexpr, scales):
    """The pair of values of row 0, 1, 2 or 3 of a word of `word_of_codes`, times a pair of scales."""
    if row < 2:
        magnitudes = word << (6 - 4 * row)
    else:
        magnitudes = word >> (4 * row - 6)
    # Read as BF16, E2M1 codes in these bits are 2^-126 times their value.
    magnitudes = times_pair(magnitudes & 0x01C001C0, LARGEST_POWERS)
    return times_pair(magnitudes | ((word << (12 - 4 * row)) & -2147450880), scales)


@triton.jit
def scale_byte(scale, BLOCK: tl.constexpr):
    """The E4M3 byte (MXFP4: UE8M0) of an FP32 scale that the format holds exactly."""
    if BLOCK == 16:  # multiplied by 2^-120, FP32 numbers have the exponents and subnormals of E4M3
        byte = (scale * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20
        byte = tl.where(scale != scale, 0x7F, byte)
    else:
        byte = tl.where(scale != scale, 0xFF, scale.to(tl.int32, bitcast=True) >> 23)
    return byte


@triton.jit
def scale_from_byte(byte, BLOCK: tl.constexpr):
    """The inverse of `scale_byte`."""
    if BLOCK == 16:
        scale = (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        bits = tl.where(byte == 0x7F, 0x7FC00000, scale.to(tl.int32, bitcast=True))
    else:
        bits = tl.where(byte == 0, 0x400000, tl.where(byte == 0xFF, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


# Single instructions.


@triton.jit
def nan_max(a, b):
    """The larger number; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_min(a, b):
    """The smaller number; NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded, subnormals included."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def magnitude(x):
    """|x| as a modifier of an instruction's operand, which is free; `tl.abs` of an extracted half costs an AND."""
    return tl.inline_asm_elementwise("abs.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def approximate_reciprocal(x):
    """1 / x with an error of up to one ulp; subnormal numbers count as zero."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def fma_down(a, b, c):
    """a * b + c rounded towards minus infinity."""
    return tl.inline_asm_elementwise("fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)


@triton.jit
def pack(even, odd):
    """A pair from two FP32 numbers that BF16 holds exactly."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,f,f", [even, odd], tl.int32, True, 1)


@triton.jit
def round_pair(even, odd):
    """A pair from two FP32 numbers, rounded to nearest, ties to even."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], tl.int32, True, 1)


@triton.jit
def fma_pair(a, b, c):
    """a * b + c of pairs, elementwise, subnormals included."""
    return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)


@triton.jit
def low_half(x):
    """FP32 with bits 0-15 of x as its bits 8-23, all others zero."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4104;", "=f,r", [x], tl.float32, True, 1)


@triton.jit
def high_half(x):
    """FP32 with bits 16-31 of x as its bits 8-23, all others zero."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4324;", "=f,r", [x], tl.float32, True, 1)


@triton.jit
def times_pair(a, b):
    """a * b of pairs, elementwise, subnormals included."""
    return fma_pair(a, b, -2147450880)  # adds -0, which changes no product


@triton.jit
def add_shifted(a, b):
    """a + 16 * b by a multiply-add: the shift unit is the busiest one here."""
    return tl.inline_asm_elementwise("mad.lo.s32 $0, $1, 16, $2;", "=r,r,r", [b, a], tl.int32, True, 1)


@triton.jit
def sign_bytes(a, b):
    """A byte of ones for each minus in two pairs, of zeros for each plus: a's even, b's even, a's odd, b's odd."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0xFBD9;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def abs_pair(a):
    """The magnitudes of a pair."""
    return tl.inline_asm_elementwise("abs.bf16x2 $0, $1;", "=r,r", [a], tl.int32, True, 1)


@triton.jit
def max_pair(a, b):
    """The maximum of pairs, elementwise; NaN if either is NaN."""
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def min_pair(a, b):
    """The minimum of pairs, elementwise; the other number if one is NaN."""
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
