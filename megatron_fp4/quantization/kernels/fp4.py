"""The 4-bit quantizers as Triton kernels, bit for bit the functions of `nvfp4.py`, `microscaling.py`, `hadamard.py`.

A tensor [rows, columns] in memory is one operand of two GEMMs: along its columns (fprop's x, dgrad's dy) and along its
rows (both sides of wgrad, whose dot product runs over tokens):

    measure            read x -> amax of x and of RHT(x^T) at once, hashes of the positions for stochastic rounding
    quantize_columns   read x -> values, or packed codes, along the columns
    quantize_rows      read x -> values, or packed codes, along the rows
    unpack             read packed codes -> values along the rows

What limits the two in the middle is instructions: for sm_90 some 12 (18 with stochastic rounding) an element along the
columns, and 19 (23, of which the transform is 7) along the rows. So what can be done to both halves of a pair at once
is (maxima, clamp, scale, sign, codes), and a multiplication stands in for a shift, whose unit issues every other cycle.
Two kernels are faster than one for both operands, whose registers leave too few warps, and let the first GEMM free its
operand before the second is made.

No load or store has a mask: a program that reaches beyond the last column works on the last block again, and writes
there what others write. CUDA allows 2^31 programs along the first axis and 65535 along the others, so the kernels that
go over all tiles have one axis.

"Values" are `code * block scale` in BF16, which is exact, in the layout of x: a GEMM reads either orientation as it
lies, so nothing is ever transposed. A block along the rows is 16 (32) rows of one column and lies within one thread,
like the Hadamard transform's tile: each is a chain of elementwise operations on one vector per row. The unit of all
data is a *pair*: the BF16 values of an even and the following odd column in one int32. A program works on
`[GROUPS, PAIRS]` pairs at a time, PAIRS being half a block.

Packed along columns (`PACKED`): code bytes [rows, columns / 2], the even column in the low nibble, and scale bytes
[rows, columns / BLOCK], those of square blocks in each of their rows. Packed along rows: int32 words
[rows / BLOCK, BLOCK / 4, columns / 2]; nibble r of a word's low half is the code of row r of four in the even column,
of its high half in the odd one. Scale bytes, even column first, are [rows / BLOCK, columns].

What keeps bits equal to the reference:
- IEEE division and reciprocal, no flushing of subnormals, no contraction into FMA (`enable_fp_fusion=False` at every
  launch). The FMAs that are written have exact products, so they are the reference's additions.
- The clamp to 6 is applied after rounding. Up to 6 nothing exceeds 6, and beyond 6 every rounding gives 6 or more, or
  NaN where it overflows, which the minimum with 6 drops.
- Stochastic rounding adds u * spacing to the value where the reference adds u to value / spacing: spacings are powers
  of two, so both round alike.
- Only the sign of zeros in values may differ, and no GEMM shows it; the sign in packed codes is the reference's.
"""

# ruff: noqa: SIM102 (conditions on constants are kept apart)
# mypy: disable-error-code="assignment, misc, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.kernels.arithmetic import (
    abs_pair,
    as_long,
    block_scale,
    butterflies,
    byte_of_codes,
    draws,
    even_of,
    grid_nearest,
    grid_stochastic,
    hadamard_tile,
    largest_of,
    load_tile,
    magnitude,
    max_pair,
    nan_max,
    nan_min,
    nearest_e4m3,
    nibble,
    odd_of,
    pack,
    pair_of_codes,
    position_hash,
    round_pair,
    scale_byte,
    scale_from_byte,
    signed_values,
    signs_of_codes,
    tensor_scale,
    tiles_of_program,
    under_sign,
    values_of_codes,
    word_of_codes,
)


@triton.jit(
    do_not_specialize=["num_rows", "num_groups", "start_row_0", "start_column_0", "start_row_1", "start_column_1"]
)
def measure_kernel(
    x_ptr,  # [rows, columns] as pairs
    amax_ptr,  # int32 [2], zero: bits of the largest magnitude of x and of the transformed x
    hash_ptr,  # int32: of operand 0: rows, pairs of columns; of operand 1: pairs of rows, even columns, odd columns
    num_rows,
    num_groups,  # columns / BLOCK
    start_row_0,  # of operand 0 (along columns): first argument of the row hash, ...
    start_column_0,
    start_row_1,
    start_column_1,
    key_0_ptr,  # int32 [2]: what is to be added to the starts of operand 0's rows and columns
    key_1_ptr,
    BLOCK: tl.constexpr,
    AMAX: tl.constexpr,  # whether to measure at all; MXFP4 has no tensor scale
    HADAMARD: tl.constexpr,
    SIGNS: tl.constexpr,
    FACTOR: tl.constexpr,
    HASH_0: tl.constexpr,
    HASH_1: tl.constexpr,
    DEVICE_KEY_0: tl.constexpr,
    DEVICE_KEY_1: tl.constexpr,
    FP32: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """x [rows, columns] measured, and the transformed x; positions hashed for stochastic rounding."""
    if DEVICE_KEY_0:
        start_row_0 += tl.load(key_0_ptr)
        start_column_0 += tl.load(key_0_ptr + 1)
    if DEVICE_KEY_1:  # the operand's rows are the tensor's columns
        start_column_1 += tl.load(key_1_ptr)
        start_row_1 += tl.load(key_1_ptr + 1)
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    group = tl.minimum(tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), num_groups - 1)
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    width = num_groups * PAIRS
    plain = tl.zeros([GROUPS, PAIRS], tl.int32)
    transformed = tl.zeros([GROUPS, PAIRS], tl.float32)
    for tile in range(tl.program_id(1), num_rows // BLOCK, tl.num_programs(1)):
        if AMAX:
            pairs = load_tile(x_ptr + as_long(tile) * BLOCK * width, offsets, width, BLOCK, FP32)
            for r in tl.static_range(BLOCK):
                plain = max_pair(plain, abs_pair(pairs[r]))
            if HADAMARD:
                even = ()
                odd = ()
                for r in tl.static_range(BLOCK):
                    even += (even_of(pairs[r]),)
                    odd += (odd_of(pairs[r]),)
                even = butterflies(even, BLOCK, SIGNS, FACTOR)
                odd = butterflies(odd, BLOCK, SIGNS, FACTOR)
                for r in tl.static_range(BLOCK):
                    transformed = nan_max(transformed, nan_max(tl.abs(even[r]), tl.abs(odd[r])))
        if HASH_0:
            if tl.program_id(0) == 0:
                rows = tile * BLOCK + tl.arange(0, BLOCK)
                tl.store(hash_ptr + rows, position_hash(start_row_0, rows))
        if HASH_1:
            if tl.program_id(0) == 0:
                pairs_of_rows = tile * PAIRS + tl.arange(0, PAIRS)
                tl.store(hash_ptr + num_rows + width + pairs_of_rows, position_hash(start_row_1, pairs_of_rows))
    if HASH_0:
        if tl.program_id(1) == 0:
            tl.store(hash_ptr + num_rows + offsets, position_hash(start_column_0, offsets))
    if HASH_1:
        if tl.program_id(1) == 0:
            columns_ptr = hash_ptr + num_rows + width + num_rows // 2 + offsets
            tl.store(columns_ptr, position_hash(start_column_1, 2 * offsets))
            tl.store(columns_ptr + width, position_hash(start_column_1, 2 * offsets + 1))
    if AMAX:
        # Bits of non-negative floats compare as integers do, and NaN above infinity.
        tl.atomic_max(amax_ptr, tl.max(tl.max(largest_of(plain).to(tl.int32, bitcast=True), 1), 0))
        if HADAMARD:
            # Rounding is monotone: the largest rounded magnitude is the rounded largest magnitude.
            transformed = even_of(round_pair(transformed, transformed))
            tl.atomic_max(amax_ptr + 1, tl.max(tl.max(transformed.to(tl.int32, bitcast=True), 1), 0))


@triton.jit(do_not_specialize=["num_rows", "num_groups", "tiles"])
def quantize_columns_kernel(
    x_ptr,  # [rows, columns] as pairs
    values_ptr,  # out: values along the columns, as pairs, unless packed
    codes_ptr,  # out, packed: a byte for a pair
    scales_ptr,  # out, packed: a byte for a block of a row
    amax_ptr,  # FP32 [2]
    decode_ptr,  # out: FP32 [1], amax / (6 * 448)
    hash_ptr,  # from measure_kernel
    num_rows,
    num_groups,
    tiles,  # of ROWS rows that one program does
    BLOCK: tl.constexpr,  # 16: NVFP4, 32: MXFP4
    BLOCK_ROWS: tl.constexpr,  # 1 or BLOCK
    ROWS: tl.constexpr,  # of a tile; BLOCK where a block has as many
    STOCHASTIC: tl.constexpr,
    PACKED: tl.constexpr,
    FP32: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """x [rows, columns] quantized along its columns, in blocks of 1 or BLOCK rows."""
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    # From the end backwards: the last rows that measure_kernel read are still in the cache.
    across = tl.cdiv(num_groups, GROUPS)
    group = tl.minimum((across - 1 - tl.program_id(0) % across) * GROUPS + tl.arange(0, GROUPS), num_groups - 1)
    first, count = tiles_of_program(num_rows // ROWS, tiles, tl.program_id(0) // across)
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    width = num_groups * PAIRS
    sixth, inverse = tensor_scale(amax_ptr, decode_ptr, BLOCK)
    if STOCHASTIC:
        hash_columns = tl.load(hash_ptr + num_rows + offsets)
    x_ptr += as_long(first) * ROWS * width
    out_ptr = (codes_ptr if PACKED else values_ptr) + as_long(first) * ROWS * width
    scales_ptr += as_long(first) * ROWS * num_groups
    for step in range(0, count):
        tile = count - 1 - step
        here = tile * ROWS * width + offsets
        pairs = load_tile(x_ptr, here, width, ROWS, FP32)
        if BLOCK_ROWS > 1:
            largest = abs_pair(pairs[0])
            for r in tl.static_range(1, ROWS):
                largest = max_pair(largest, abs_pair(pairs[r]))
            largest = tl.reduce(largest, 1, max_pair)
            scale, encode = block_scale(largest_of(largest), sixth, inverse, BLOCK)
        for r in tl.static_range(ROWS):
            if BLOCK_ROWS == 1:
                largest = tl.reduce(abs_pair(pairs[r]), 1, max_pair)
                scale, encode = block_scale(largest_of(largest), sixth, inverse, BLOCK)
            even = magnitude(even_of(pairs[r])) * encode[:, None]
            odd = tl.abs(odd_of(pairs[r])) * encode[:, None]
            if STOCHASTIC:
                draw_even, draw_odd = draws(tl.load(hash_ptr + (first + tile) * ROWS + r) ^ hash_columns)
                even = grid_stochastic(even, draw_even)
                odd = grid_stochastic(odd, draw_odd)
            else:
                even = grid_nearest(even)
                odd = grid_nearest(odd)
            if PACKED:
                tl.store(scales_ptr + ((tile * ROWS + r) * num_groups + group), scale_byte(scale, BLOCK).to(tl.uint8))
                out = byte_of_codes(pair_of_codes(even, odd), signs_of_codes(pairs[r])).to(tl.uint8)
            else:
                out = signed_values(even, odd, pack(scale, scale)[:, None], pairs[r])
            tl.store(out_ptr + (r * width + here), out)


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
    """x [rows, columns], perhaps transformed, quantized along its rows."""
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    across = tl.cdiv(num_groups, GROUPS)
    group = tl.minimum((across - 1 - tl.program_id(0) % across) * GROUPS + tl.arange(0, GROUPS), num_groups - 1)
    first, count = tiles_of_program(num_rows // BLOCK, tiles, tl.program_id(0) // across)
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    width = num_groups * PAIRS
    sixth, inverse = tensor_scale(amax_ptr + (1 if HADAMARD else 0), decode_ptr, BLOCK)
    if STOCHASTIC:
        hash_ptr += num_rows + width
        hash_even = tl.load(hash_ptr + num_rows // 2 + offsets)
        hash_odd = tl.load(hash_ptr + num_rows // 2 + width + offsets)
    x_ptr += as_long(first) * BLOCK * width
    values_ptr += as_long(first) * (BLOCK // 4 if PACKED else BLOCK) * width
    scales_ptr += as_long(first) * width
    for step in range(0, count):
        tile = count - 1 - step
        pairs = load_tile(x_ptr, tile * BLOCK * width + offsets, width, BLOCK, FP32)
        if HADAMARD:
            pairs = hadamard_tile(pairs, BLOCK, SIGNS, FACTOR)
        largest = abs_pair(pairs[0])
        for r in tl.static_range(1, BLOCK):
            largest = max_pair(largest, abs_pair(pairs[r]))
        scale_even, encode_even = block_scale(even_of(largest), sixth, inverse, BLOCK)
        scale_odd, encode_odd = block_scale(odd_of(largest), sixth, inverse, BLOCK)
        if PACKED:
            both = scale_byte(scale_even, BLOCK) | (scale_byte(scale_odd, BLOCK) << 8)
            tl.store(scales_ptr + (tile * width + offsets), both.to(tl.int16))
        out = tile * (BLOCK // 4 if PACKED else BLOCK) * width + offsets
        scales = pack(scale_even, scale_odd)
        drawn = ()
        if STOCHASTIC:
            for r in tl.static_range(0, BLOCK, 2):
                row_hash = tl.load(hash_ptr + (first + tile) * PAIRS + r // 2)
                drawn_even = draws(row_hash ^ hash_even)
                drawn_odd = draws(row_hash ^ hash_odd)
                drawn += ((drawn_even[0], drawn_odd[0]), (drawn_even[1], drawn_odd[1]))
        codes = ()
        signs = ()
        for r in tl.static_range(BLOCK):
            even = magnitude(even_of(pairs[r])) * encode_even
            odd = tl.abs(odd_of(pairs[r])) * encode_odd
            if STOCHASTIC:
                even = grid_stochastic(even, drawn[r][0])
                odd = grid_stochastic(odd, drawn[r][1])
            else:
                even = grid_nearest(even)
                odd = grid_nearest(odd)
            if PACKED:
                codes += (pair_of_codes(even, odd),)
                signs += (signs_of_codes(pairs[r]),)
            else:
                tl.store(values_ptr + (r * width + out), signed_values(even, odd, scales, pairs[r]))
        if PACKED:
            for quarter in tl.static_range(BLOCK // 4):
                word = word_of_codes(
                    codes[4 * quarter], codes[4 * quarter + 1], codes[4 * quarter + 2], codes[4 * quarter + 3],
                    signs[4 * quarter], signs[4 * quarter + 1], signs[4 * quarter + 2], signs[4 * quarter + 3],
                )  # fmt: skip
                tl.store(values_ptr + (quarter * width + out), word)


@triton.jit(do_not_specialize=["num_groups", "tiles", "codes_stride", "scales_stride"])
def unpack_kernel(
    codes_ptr,  # int32 [parts, tiles, BLOCK / 4, columns / 2], a part in one piece
    scales_ptr,  # int16 [parts, tiles, columns / 2], likewise
    values_ptr,  # out: [rows, columns] as pairs
    num_groups,
    tiles,  # of a part
    codes_stride,  # from part to part, in words
    scales_stride,  # in pairs of scales
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Words of codes and pairs of scales, as quantize_rows_kernel packs them, of one or several parts."""
    PAIRS: tl.constexpr = BLOCK // 2
    across = tl.cdiv(num_groups, GROUPS)
    group = tl.minimum((tl.program_id(0) % across) * GROUPS + tl.arange(0, GROUPS), num_groups - 1)
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    width = num_groups * PAIRS
    tile = tl.program_id(0) // across
    # A tile's codes and scales are whole 16 bytes: so much can be loaded at once.
    part = as_long(tile // tiles)
    of_part = as_long(tile % tiles)
    codes_ptr += tl.multiple_of(part * codes_stride, 4) + of_part * (BLOCK // 4) * width
    scales_ptr += tl.multiple_of(part * scales_stride, 8) + of_part * width
    values_ptr += as_long(tile) * BLOCK * width
    both = tl.load(scales_ptr + offsets).to(tl.int32)
    scales = pack(scale_from_byte(both & 0xFF, BLOCK), scale_from_byte((both >> 8) & 0xFF, BLOCK))
    for quarter in tl.static_range(BLOCK // 4):
        word = tl.load(codes_ptr + (quarter * width + offsets))
        for r in tl.static_range(4):
            tl.store(values_ptr + ((quarter * 4 + r) * width + offsets), values_of_codes(word, r, scales))


@triton.jit
def four_over_six_kernel(
    x_ptr,  # [blocks, 8] pairs of BF16
    codes_ptr,  # out: int64 [blocks], 16 nibbles, the first element in the lowest
    scales_ptr,  # out: uint8 [blocks]
    amax_ptr,  # FP32 [1]
    decode_ptr,  # out: FP32 [1], amax / 1536
    num_blocks,
    SQUARED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Blocks of one row along the columns, bit for bit `encode_nvfp4(..., four_over_six=...)`.

    A block, 16 elements of one row, lies within one thread, so that its errors are summed in the reference's order;
    lanes next to each other have blocks next to each other, whose 32 bytes share cache lines. Codes of a block are one
    64-bit store. Each block is quantized under both scales, and its error under each decides.
    """
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
