"""The arithmetic of the 4-bit kernels: tiles of pairs, scales, rounding, and single instructions.

See `fp4.py` beside it for what they make up and for what keeps their bits equal to the PyTorch reference.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B9)
MIX_A = tl.constexpr(0x7FEB352D)
MIX_B = tl.constexpr(0x846CA68B)
# Pairs of BF16: twice 6, 1, 2^-126 and 2^126.
SIXES = tl.constexpr(0x40C040C0)
ONES = tl.constexpr(0x3F803F80)
SMALLEST_PAIR = tl.constexpr(0x00800080)
LARGEST_POWERS = tl.constexpr(0x7E807E80)


# Tiles and pairs.


@triton.jit
def as_long(tile):
    """A tile's number as int64: offsets into large tensors exceed 32 bits."""
    return tl.full((), 1, tl.int64) * tile


@triton.jit
def tiles_of_program(all_tiles, tiles, program):
    """The first tile of a program and how many it has, `tiles` at most, programs counted from the end."""
    last = all_tiles - program * tiles
    count = tl.minimum(tiles, last)
    return last - count, count


@triton.jit
def load_tile(x_ptr, offsets, width, ROWS: tl.constexpr, FP32: tl.constexpr):
    """A tuple of ROWS rows of pairs; FP32 input (loaded as 64-bit pairs) is rounded to BF16 first."""
    rows = ()
    for r in tl.static_range(ROWS):
        both = tl.load(x_ptr + (r * width + offsets))
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
    even = butterflies(even, BLOCK, SIGNS, FACTOR)
    odd = butterflies(odd, BLOCK, SIGNS, FACTOR)
    result = ()
    for r in tl.static_range(BLOCK):
        result += (round_pair(even[r], odd[r]),)
    return result


@triton.jit
def butterflies(values, SIZE: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """The transform in FP32. Bit i of SIGNS: the sign of element i is minus. FACTOR: 1 / sqrt(SIZE).

    A factor that is a power of two goes into the first level with the signs, in FMAs with exact products.
    """
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
    """Two magnitudes on the grid (6 at most counts) times a pair of scales, under the signs of another pair."""
    # Neither magnitudes nor the NaN that FP32 arithmetic makes have a sign.
    return times_pair(min_pair(pack(grid_even, grid_odd), SIXES) | (sign_pair & -2147450880), scales)


@triton.jit
def largest_of(pair):
    """The larger magnitude of a pair of magnitudes, in FP32."""
    return nan_max(even_of(pair), odd_of(pair))


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
        scale = nearest_e4m3(nan_min(largest * sixth, 448.0))
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
def nearest_e4m3(scale):
    """`elements.to_e4m3` of 0 to 448: an FP32 sum with 1.5 * 2^23 spacings, at least that below 2^-6, rounds to one."""
    binade = tl.maximum(scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000).to(tl.float32, bitcast=True)
    return tl.fma(binade, -1572864.0, tl.fma(binade, 1572864.0, scale))


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
def grid_stochastic(magnitude, draw):
    """`round_e2m1_stochastic` of magnitudes; draw: u * 2^-125, from `draws`.

    The spacing is half a binade: times u, it is the draw times 2^124 binades. Of 16 and more (only under a scale of
    zero: a block's largest is 12 at most) that is negative as an integer: they are rounded as if they were below 2.
    """
    bits = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000) + 0x3E000000
    binade = tl.maximum(bits, 0x7D800000).to(tl.float32, bitcast=True)
    raised = tl.fma(draw, binade, magnitude)
    return tl.fma(binade, -1.9721522630525295e-31, fma_down(binade, 1.9721522630525295e-31, raised))


@triton.jit
def draws(mixed):
    """Two of `rounding_draws` from the combined hashes of a row and a pair of columns, times 2^-125.

    u is an odd 16-bit number times 2^-16. Shifted up by 8 bits and read as FP32 it is this number times 2^-141, also
    where the highest bit makes it a normal number.
    """
    x = mixed.to(tl.uint32, bitcast=True) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    x = ((x ^ (x >> 16)) | 0x00010001).to(tl.int32, bitcast=True)
    return low_half(x), high_half(x)


@triton.jit
def binade_of(magnitude):
    """The power of two at or below, at least 1: twice the grid's spacing there. Signs are ignored."""
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
def under_sign(magnitude, signed):
    """`magnitude` under the sign of `signed`; a zero that comes in as -0 has none, for -0 + 0 is +0."""
    sign = (signed + 0.0).to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def nibble(code):
    """The E2M1 code, with its sign, of a number on the grid."""
    # Times 2^-126, exponents and subnormals of FP32 are those of E2M1.
    bits = (code * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def pair_of_codes(grid_even, grid_odd):
    """E2M1 codes of two magnitudes on the grid (6 at most counts): bits 6-8 and 22-24."""
    # Times 2^-126, exponents and subnormals of BF16 are those of E2M1.
    return times_pair(min_pair(pack(grid_even, grid_odd), SIXES), SMALLEST_PAIR)


@triton.jit
def signs_of_codes(pair):
    """A pair whose signs are those of the codes of `pair`: a zero that comes in as -0 has none, for -0 + 0 is +0."""
    return fma_pair(pair, ONES, 0)


@triton.jit
def byte_of_codes(codes, signs):
    """The two codes of one row in one byte: the even column in the low nibble."""
    magnitudes = ((codes >> 6) & 0x7) | ((codes >> 18) & 0x70)
    return magnitudes | ((signs >> 12) & 0x8) | ((signs >> 24) & 0x80)


@triton.jit
def word_of_codes(codes_0, codes_1, codes_2, codes_3, signs_0, signs_1, signs_2, signs_3):
    """The codes of four rows in one word: nibbles of a half are rows, halves the columns."""
    low = add_shifted(codes_0, codes_1)
    high = add_shifted(codes_2, codes_3)
    # A byte of ones or zeros for every sign: rows 0 and 2, and 1 and 3, whose nibbles lie above.
    signs = (sign_bytes(signs_0, signs_2) & 0x0F0F0F0F) | (sign_bytes(signs_1, signs_3) & -252645136)
    return ((low >> 6) + high * 4) | (signs & -2004318072)


@triton.jit
def values_of_byte(byte, scales):
    """A pair of values: the codes of `byte_of_codes`, times a pair of scales."""
    magnitudes = times_pair(((byte & 0x7) << 6) | ((byte & 0x70) << 18), LARGEST_POWERS)
    return times_pair(magnitudes | ((byte & 0x8) << 12) | ((byte & 0x80) << 24), scales)


@triton.jit
def values_of_codes(word, row: tl.constexpr, scales):
    """A pair of values: the codes of row 0 to 3 of a word, times a pair of scales."""
    if row < 2:
        magnitudes = word << (6 - 4 * row)
    else:
        magnitudes = word >> (4 * row - 6)
    # Exponents and subnormals of E2M1 are those of BF16, times 2^-126.
    magnitudes = times_pair(magnitudes & 0x01C001C0, LARGEST_POWERS)
    return times_pair(magnitudes | ((word << (12 - 4 * row)) & -2147450880), scales)


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
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_min(a, b):
    """The smaller; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded, subnormals included."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def magnitude(x):
    """|x| as an operand's modifier, which costs nothing; `tl.abs` of an extracted half becomes a mask of its own."""
    return tl.inline_asm_elementwise("abs.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def approximate_reciprocal(x):
    """1 / x to an ulp, subnormals as zero."""
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
def fma_pair(a, b, c):
    """a * b + c of each of two BF16, with subnormals."""
    return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)


@triton.jit
def low_half(x):
    """Bits 0-15 as bits 8-23."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4104;", "=f,r", [x], tl.float32, True, 1)


@triton.jit
def high_half(x):
    """Bits 16-31 as bits 8-23."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4324;", "=f,r", [x], tl.float32, True, 1)


@triton.jit
def times_pair(a, b):
    """a * b of each of two BF16, with subnormals."""
    return fma_pair(a, b, -2147450880)  # plus -0


@triton.jit
def add_shifted(a, b):
    """a + 16 * b, not by the unit that shifts, which has most to do here."""
    return tl.inline_asm_elementwise("mad.lo.s32 $0, $1, 16, $2;", "=r,r,r", [b, a], tl.int32, True, 1)


@triton.jit
def sign_bytes(a, b):
    """Of two pairs, a byte of ones where there is a sign, else of zeros: a's even, b's even, a's odd, b's odd."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0xFBD9;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def abs_pair(a):
    """Two BF16 in 32 bits without their signs."""
    return tl.inline_asm_elementwise("abs.bf16x2 $0, $1;", "=r,r", [a], tl.int32, True, 1)


@triton.jit
def max_pair(a, b):
    """The larger of each of two BF16; NaN if either is."""
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def min_pair(a, b):
    """The smaller of each of two BF16; a NaN on one side gives the other side."""
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
