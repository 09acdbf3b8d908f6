"""The 4-bit quantizers as Triton kernels, bit for bit the PyTorch functions of `nvfp4.py`, `mxfp4.py`, `hadamard.py`.

A tensor [rows, columns] in memory is one operand of two GEMMs: along its columns (fprop's x, dgrad's dy) and along its
rows (both sides of wgrad, whose dot product runs over tokens):

    measure            read x -> amax of x and of RHT(x^T) at once, hashes of the positions for stochastic rounding
    quantize_columns   read x -> values along the columns
    quantize_rows      read x -> values, or packed codes, along the rows
    unpack             read packed codes -> values along the rows

One kernel for both operands was slower than two, although it reads x once: what limits them is instructions, and the
registers of the one leave too few warps for the other. Two also let the first GEMM free its operand before the second
operand is made.

"Values" are `code * block scale` in BF16, which is exact, in the layout of x: a GEMM reads either orientation as it
lies, so nothing is ever transposed. A block along the rows is 16 (32) rows of one column and lies within one thread,
like the Hadamard transform's tile: each is a chain of elementwise operations on one vector per row.

The unit of all data is a *pair*: the BF16 values of an even and the following odd column in one int32, so that loads
are wide and half of the logic handles two elements an instruction. A program works on `[GROUPS, PAIRS]` pairs at a
time, PAIRS being half a block.

Packed along rows (`COLUMN_PACKED`): int32 words [rows / BLOCK, BLOCK / 4, columns / 2]; nibble 2 r + (0 even, 1 odd
column) of a word is the code of row r of four. Scale bytes, even column first, are [rows / BLOCK, columns].

What keeps bits equal to the reference:
- IEEE division and reciprocal, no flushing of subnormals, no contraction into FMA (`enable_fp_fusion=False` at every
  launch). The FMAs written below have exact products, so they are the reference's additions.
- The clamp to +-6 is applied after rounding, as a minimum with 6 * scale on two packed values at once. Up to 6 nothing
  exceeds 6, and beyond 6 every rounding gives 6 or more.
- Stochastic rounding adds u * spacing to the value where the reference adds u to value / spacing: spacings are powers
  of two, so both round alike.
- Only the sign of zeros in values may differ, and no GEMM shows it; the sign in packed codes is the reference's.

Not here, and left to the reference: four-over-six, transforms of other sizes than the block's, transforms along the
columns, signs drawn per call, FP8.
"""

# ruff: noqa: D103, SIM102 (kernels are documented by their arguments; conditions on constants are kept apart)
# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B9)
MIX_A = tl.constexpr(0x7FEB352D)
MIX_B = tl.constexpr(0x846CA68B)


@triton.jit(
    do_not_specialize=["num_rows", "num_groups", "start_row_0", "start_column_0", "start_row_1", "start_column_1"]
)
def measure_kernel(
    x_ptr,  # [rows, columns] as pairs
    amax_ptr,  # int32 [2], zero: bits of the largest magnitude of x and of the transformed x
    hash_ptr,  # int32 [2 * (rows + columns)]: for each operand, of its positions: rows, even columns, odd columns
    num_rows,
    num_groups,  # columns / BLOCK
    start_row_0,  # of operand 0 (along columns): first argument of the row hash, ...
    start_column_0,
    start_row_1,
    start_column_1,
    BLOCK: tl.constexpr,
    AMAX: tl.constexpr,  # whether to measure at all; MXFP4 has no tensor scale
    HADAMARD: tl.constexpr,
    SIGNS: tl.constexpr,
    FACTOR: tl.constexpr,
    HASH_0: tl.constexpr,
    HASH_1: tl.constexpr,
    FP32: tl.constexpr,
    GROUPS: tl.constexpr,
):
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    mask = (group < num_groups)[:, None]
    width = num_groups * PAIRS
    plain = tl.zeros([GROUPS, PAIRS], tl.float32)
    transformed = tl.zeros([GROUPS, PAIRS], tl.float32)
    for tile in range(tl.program_id(1), num_rows // BLOCK, tl.num_programs(1)):
        if AMAX:
            pairs = _load_tile(x_ptr, tile, offsets, mask, width, BLOCK, FP32)
            even = ()
            odd = ()
            for r in tl.static_range(BLOCK):
                even += (_even(pairs[r]),)
                odd += (_odd(pairs[r]),)
                plain = _nan_max(plain, _nan_max(tl.abs(even[r]), tl.abs(odd[r])))
            if HADAMARD:
                even = _butterflies(even, BLOCK, SIGNS)
                odd = _butterflies(odd, BLOCK, SIGNS)
                for r in tl.static_range(BLOCK):
                    transformed = _nan_max(transformed, _nan_max(tl.abs(even[r]), tl.abs(odd[r])))
        if HASH_0 or HASH_1:
            if tl.program_id(0) == 0:
                rows = tile * BLOCK + tl.arange(0, BLOCK)
                if HASH_0:
                    tl.store(hash_ptr + rows, _position_hash(start_row_0, rows))
                if HASH_1:
                    tl.store(hash_ptr + num_rows + 2 * width + rows, _position_hash(start_row_1, rows))
    if HASH_0 or HASH_1:
        if tl.program_id(1) == 0:
            columns_ptr = hash_ptr + num_rows + offsets
            if HASH_0:
                tl.store(columns_ptr, _position_hash(start_column_0, 2 * offsets), mask)
                tl.store(columns_ptr + width, _position_hash(start_column_0, 2 * offsets + 1), mask)
            if HASH_1:
                columns_ptr += num_rows + 2 * width
                tl.store(columns_ptr, _position_hash(start_column_1, 2 * offsets), mask)
                tl.store(columns_ptr + width, _position_hash(start_column_1, 2 * offsets + 1), mask)
    if AMAX:
        # Bits of non-negative floats compare as integers do, and NaN above infinity.
        tl.atomic_max(amax_ptr, tl.max(tl.max(plain.to(tl.int32, bitcast=True), 1), 0))
        if HADAMARD:
            # Rounding is monotone: the largest rounded magnitude is the rounded largest magnitude.
            transformed = _even(_round_pair(transformed * FACTOR, transformed))
            tl.atomic_max(amax_ptr + 1, tl.max(tl.max(transformed.to(tl.int32, bitcast=True), 1), 0))


@triton.jit(do_not_specialize=["num_rows", "num_groups", "tiles"])
def quantize_columns_kernel(
    x_ptr,  # [rows, columns] as pairs
    values_ptr,  # out: values along the columns, as pairs
    amax_ptr,  # FP32 [2]
    decode_ptr,  # out: FP32 [1], amax / (6 * 448)
    hash_ptr,  # from measure_kernel
    num_rows,
    num_groups,
    tiles,  # of BLOCK rows that one program does
    BLOCK: tl.constexpr,  # 16: NVFP4, 32: MXFP4
    BLOCK_ROWS: tl.constexpr,  # 1 or BLOCK
    STOCHASTIC: tl.constexpr,
    FP32: tl.constexpr,
    GROUPS: tl.constexpr,
):
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    # From the end backwards: the last rows that measure_kernel read are still in the cache.
    group = (tl.num_programs(0) - 1 - tl.program_id(0)) * GROUPS + tl.arange(0, GROUPS)
    last = num_rows // BLOCK - tl.program_id(1) * tiles
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    mask = (group < num_groups)[:, None]
    width = num_groups * PAIRS
    sixth, inverse = _tensor_scale(amax_ptr, decode_ptr, BLOCK)
    if STOCHASTIC:
        hash_even = tl.load(hash_ptr + num_rows + offsets, mask, 0)
        hash_odd = tl.load(hash_ptr + num_rows + width + offsets, mask, 0)
    for step in range(0, tl.minimum(tiles, last)):
        tile = last - 1 - step
        pairs = _load_tile(x_ptr, tile, offsets, mask, width, BLOCK, FP32)
        out_ptr = values_ptr + _long(tile) * BLOCK * width
        largest = tl.zeros([GROUPS], tl.float32)
        if BLOCK_ROWS > 1:
            for r in tl.static_range(BLOCK):
                of_row = _nan_max(tl.abs(_even(pairs[r])), tl.abs(_odd(pairs[r])))
                largest = _nan_max(largest, tl.reduce(of_row, 1, _nan_max))
        for r in tl.static_range(BLOCK):
            even = tl.abs(_even(pairs[r]))
            odd = tl.abs(_odd(pairs[r]))
            if BLOCK_ROWS == 1:
                largest = tl.reduce(_nan_max(even, odd), 1, _nan_max)
            scale, encode = _block_scale(largest, sixth, inverse, BLOCK)
            limit = _pack(6.0 * scale, 6.0 * scale)[:, None]
            scale = scale[:, None]
            encode = encode[:, None]
            if STOCHASTIC:
                row_hash = tl.load(hash_ptr + tile * BLOCK + r)
                even = _grid_stochastic(even * encode, row_hash ^ hash_even)
                odd = _grid_stochastic(odd * encode, row_hash ^ hash_odd)
            else:
                even = _grid_nearest(even * encode)
                odd = _grid_nearest(odd * encode)
            tl.store(out_ptr + r * width + offsets, _signed_values(even * scale, odd * scale, limit, pairs[r]), mask)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "tiles"])
def quantize_rows_kernel(
    x_ptr,  # [rows, columns] as pairs
    values_ptr,  # out: values along the rows, as pairs, or packed codes
    scales_ptr,  # out, packed: scale bytes of both columns of a pair, int16
    amax_ptr,  # FP32 [2]
    decode_ptr,  # out: FP32 [1]
    hash_ptr,  # from measure_kernel
    num_rows,
    num_groups,
    tiles,  # of BLOCK rows that one program does
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PACKED: tl.constexpr,
    HADAMARD: tl.constexpr,
    SIGNS: tl.constexpr,
    FACTOR: tl.constexpr,
    FP32: tl.constexpr,
    GROUPS: tl.constexpr,
):
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    group = (tl.num_programs(0) - 1 - tl.program_id(0)) * GROUPS + tl.arange(0, GROUPS)
    last = num_rows // BLOCK - tl.program_id(1) * tiles
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    mask = (group < num_groups)[:, None]
    width = num_groups * PAIRS
    sixth, inverse = _tensor_scale(amax_ptr + (1 if HADAMARD else 0), decode_ptr, BLOCK)
    if STOCHASTIC:
        hash_ptr += num_rows + 2 * width
        hash_even = tl.load(hash_ptr + num_rows + offsets, mask, 0)
        hash_odd = tl.load(hash_ptr + num_rows + width + offsets, mask, 0)
    for step in range(0, tl.minimum(tiles, last)):
        tile = last - 1 - step
        pairs = _load_tile(x_ptr, tile, offsets, mask, width, BLOCK, FP32)
        if HADAMARD:
            pairs = _hadamard_tile(pairs, BLOCK, SIGNS, FACTOR)
        largest_even = tl.zeros([GROUPS, PAIRS], tl.float32)
        largest_odd = tl.zeros([GROUPS, PAIRS], tl.float32)
        for r in tl.static_range(BLOCK):
            largest_even = _nan_max(largest_even, tl.abs(_even(pairs[r])))
            largest_odd = _nan_max(largest_odd, tl.abs(_odd(pairs[r])))
        scale_even, encode_even = _block_scale(largest_even, sixth, inverse, BLOCK)
        scale_odd, encode_odd = _block_scale(largest_odd, sixth, inverse, BLOCK)
        if PACKED:
            both = _scale_byte(scale_even, BLOCK) | (_scale_byte(scale_odd, BLOCK) << 8)
            tl.store(scales_ptr + _long(tile) * width + offsets, both.to(tl.int16), mask)
            out_ptr = values_ptr + _long(tile) * (BLOCK // 4) * width
        else:
            out_ptr = values_ptr + _long(tile) * BLOCK * width
        limit = _pack(6.0 * scale_even, 6.0 * scale_odd)
        word = tl.zeros([GROUPS, PAIRS], tl.int32)
        for r in tl.static_range(BLOCK):
            even = _even(pairs[r]) * encode_even
            odd = _odd(pairs[r]) * encode_odd
            if STOCHASTIC:
                row_hash = tl.load(hash_ptr + tile * BLOCK + r)
                grid_even = _grid_stochastic(tl.abs(even), row_hash ^ hash_even)
                grid_odd = _grid_stochastic(tl.abs(odd), row_hash ^ hash_odd)
            else:
                grid_even = _grid_nearest(tl.abs(even))
                grid_odd = _grid_nearest(tl.abs(odd))
            if PACKED:
                word = _insert_code(word, grid_even, even, 8 * (r % 4))
                word = _insert_code(word, grid_odd, odd, 8 * (r % 4) + 4)
                if r % 4 == 3:
                    tl.store(out_ptr + (r // 4) * width + offsets, word, mask)
                    word = tl.zeros([GROUPS, PAIRS], tl.int32)
            else:
                values = _signed_values(grid_even * scale_even, grid_odd * scale_odd, limit, pairs[r])
                tl.store(out_ptr + r * width + offsets, values, mask)


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def unpack_kernel(
    codes_ptr,  # int32 [rows / BLOCK, BLOCK / 4, columns / 2]
    scales_ptr,  # int16 [rows / BLOCK, columns / 2]
    values_ptr,  # out: [rows, columns] as pairs
    num_rows,
    num_groups,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    PAIRS: tl.constexpr = BLOCK // 2
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    mask = (group < num_groups)[:, None]
    width = num_groups * PAIRS
    tile = tl.program_id(1)
    codes_ptr += _long(tile) * (BLOCK // 4) * width
    values_ptr += _long(tile) * BLOCK * width
    both = tl.load(scales_ptr + _long(tile) * width + offsets, mask, 0).to(tl.int32)
    scale_even = _scale_from_byte(both & 0xFF, BLOCK)
    scale_odd = _scale_from_byte((both >> 8) & 0xFF, BLOCK)
    for quarter in tl.static_range(BLOCK // 4):
        word = tl.load(codes_ptr + quarter * width + offsets, mask, 0)
        for r in tl.static_range(4):
            even = _code_value(word >> (8 * r)) * scale_even
            odd = _code_value(word >> (8 * r + 4)) * scale_odd
            tl.store(values_ptr + (quarter * 4 + r) * width + offsets, _pack(even, odd), mask)


@triton.jit
def scale_cast_kernel(x_ptr, alpha_ptr, out_ptr, count, SIZE: tl.constexpr):
    """out = (x * alpha) in out's dtype, x FP32."""
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < count
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask) * tl.load(alpha_ptr), mask)


# Tiles and pairs.


@triton.jit
def _long(tile):
    return tl.full((), 1, tl.int64) * tile


@triton.jit
def _load_tile(x_ptr, tile, offsets, mask, width, BLOCK: tl.constexpr, FP32: tl.constexpr):
    """A tuple of BLOCK rows of pairs; FP32 input (loaded as 64-bit pairs) is rounded to BF16 first."""
    x_ptr += _long(tile) * BLOCK * width
    rows = ()
    for r in tl.static_range(BLOCK):
        both = tl.load(x_ptr + r * width + offsets, mask, 0)
        if FP32:
            low = both.to(tl.int32).to(tl.float32, bitcast=True)
            high = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            both = _round_pair(low, high)
        rows += (both,)
    return rows


@triton.jit
def _hadamard_tile(pairs, BLOCK: tl.constexpr, SIGNS: tl.constexpr, FACTOR: tl.constexpr):
    """The random Hadamard transform over the rows of a tile of pairs, rounded to BF16."""
    even = ()
    odd = ()
    for r in tl.static_range(BLOCK):
        even += (_even(pairs[r]),)
        odd += (_odd(pairs[r]),)
    even = _butterflies(even, BLOCK, SIGNS)
    odd = _butterflies(odd, BLOCK, SIGNS)
    result = ()
    for r in tl.static_range(BLOCK):
        result += (_round_pair(even[r] * FACTOR, odd[r] * FACTOR),)
    return result


@triton.jit
def _butterflies(values, SIZE: tl.constexpr, SIGNS: tl.constexpr):
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
def _even(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _odd(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _signed_values(even, odd, limit, sign_pair):
    """Magnitudes that are exact in BF16, up to `limit`, under the signs of another pair."""
    return (_min_pair(_pack(even, odd), limit) & 0x7FFF7FFF) | (sign_pair & -2147450880)


# Scales and grids.


@triton.jit
def _tensor_scale(amax_ptr, decode_ptr, BLOCK: tl.constexpr):
    """S / 6 and 1 / S of NVFP4's tensor scale S; one program writes amax / 2688. MXFP4 has none."""
    if BLOCK != 16:
        return 1.0, 1.0
    else:
        amax = tl.load(amax_ptr)
        scale = _nan_min(tl.div_rn(2688.0, amax), 3.4028234663852886e38)
        scale = tl.where(scale == 0.0, 1.0, scale)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(decode_ptr, tl.div_rn(amax, 2688.0))
        return scale * 0.1666666716337204, _reciprocal(scale)


@triton.jit
def _block_scale(largest, sixth, inverse, BLOCK: tl.constexpr):
    """FP32 decode scale and encode factor of blocks with these largest magnitudes."""
    if BLOCK == 16:
        scale = _nan_min(largest * sixth, 448.0)
        # To E4M3: an FP32 sum with 1.5 * 2^23 spacings rounds to the spacing, at least that below 2^-6.
        binade = tl.maximum(scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000).to(tl.float32, bitcast=True)
        scale = tl.fma(binade, -1572864.0, tl.fma(binade, 1572864.0, scale))
        encode = _block_encode(scale * inverse, inverse)
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
def _block_encode(x, inverse):
    """min(1 / x, FLT_MAX), correctly rounded: CUDA's own sequence without its branch for the ends of the range.

    The approximation is infinite at 0 and the step after it NaN, which the minimum drops; what could be subnormal
    (x is at least 2^-9 * inverse, or 0) is scaled up first.
    """
    unit = tl.where(inverse < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)
    x = x * unit
    guess = _approximate_reciprocal(x)
    return tl.minimum(tl.fma(guess, tl.fma(-x, guess, 1.0), guess) * unit, 3.4028234663852886e38)


@triton.jit
def _grid_nearest(magnitude):
    """`round_e2m1_nearest` of magnitudes."""
    binade = _binade(magnitude)
    return tl.fma(binade, -6291456.0, tl.fma(binade, 6291456.0, magnitude))


@triton.jit
def _grid_stochastic(magnitude, mixed):
    """`round_e2m1_stochastic` of magnitudes, the draws from the combined hashes of row and column."""
    x = mixed.to(tl.uint32, bitcast=True) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    # The highest 22 bits of x ^ (x >> 16), k = 2^22 u, read as the subnormal number k * 2^-148. The spacing is half a
    # binade: times u, it is this number times 2^125 binades.
    draw = (((x >> 9) ^ (x >> 25)) & 0x7FFFFE).to(tl.float32, bitcast=True)
    binade = _binade(magnitude)
    raised = tl.fma(draw, binade * 4.2535295865117308e37, magnitude)
    return tl.fma(binade, -4194304.0, _fma_down(binade, 4194304.0, raised))


@triton.jit
def _binade(magnitude):
    return tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _position_hash(start, position):
    """`rounding._hash_positions` with the first xor-shift of the element's mix already done (it is linear)."""
    x = start.to(tl.uint32, bitcast=True) + position.to(tl.uint32) * GOLDEN
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    x = x ^ (x >> 16)
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def _insert_code(word, grid, scaled, BIT: tl.constexpr):
    """Put the E2M1 code of a magnitude on the grid (6 at most counts) with the sign of `scaled` at a bit of a word."""
    # Times 2^-126, exponents and subnormals of FP32 are those of E2M1: the code is then the bits from 22 on.
    code = (tl.minimum(grid, 6.0) * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    code = code >> (22 - BIT) if BIT <= 22 else code << (BIT - 22)
    sign = (scaled + 0.0).to(tl.int32, bitcast=True)  # a zero that comes in as -0 has no sign
    sign = sign >> (28 - BIT)
    SIGN: tl.constexpr = 8 << BIT if BIT < 28 else -2147483648
    return word | (code & (7 << BIT)) | (sign & SIGN)


@triton.jit
def _code_value(code):
    """FP32 value of the E2M1 code in the lowest four bits."""
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (magnitude.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _scale_byte(scale, BLOCK: tl.constexpr):
    """The byte of an FP32 scale that E4M3 (or UE8M0) holds."""
    if BLOCK == 16:
        byte = (scale * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20
        byte = tl.where(scale != scale, 0x7F, byte)
    else:
        byte = tl.where(scale != scale, 0xFF, scale.to(tl.int32, bitcast=True) >> 23)
    return byte


@triton.jit
def _scale_from_byte(byte, BLOCK: tl.constexpr):
    if BLOCK == 16:
        scale = (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        bits = tl.where(byte == 0x7F, 0x7FC00000, scale.to(tl.int32, bitcast=True))
    else:
        bits = tl.where(byte == 0, 0x400000, tl.where(byte == 0xFF, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


# Single instructions.


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _approximate_reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _fma_down(a, b, c):
    """a * b + c rounded towards minus infinity."""
    return tl.inline_asm_elementwise("fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)


@triton.jit
def _pack(even, odd):
    """A pair from two FP32 numbers that BF16 holds."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,f,f", [even, odd], tl.int32, True, 1)


@triton.jit
def _round_pair(even, odd):
    """A pair from two FP32 numbers, rounded to nearest even."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], tl.int32, True, 1)


@triton.jit
def _min_pair(a, b):
    """The smaller of each of two BF16; a NaN on one side gives the other side."""
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
