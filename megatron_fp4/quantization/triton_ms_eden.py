"""MS-EDEN along the rows of a tensor as Triton kernels, bit for bit the PyTorch functions of `ms_eden.py`.

A group, the 128 elements that one Hadamard transform mixes, lies within one thread: 128 rows of a column, or of two.
Butterflies, maxima, sums and scales are then chains of elementwise operations on one vector of columns per row, in the
reference's order, and nothing is exchanged between threads:

    signs       draw the transform's signs
    rotate      read x -> z = RHT(x^T)^T in BF16, and its amax: FP32 of 128 rows in registers
    quantize    read z -> values, or packed codes, along the rows: codes of 128 pairs in registers until c is known
    transpose   read x -> x^T, for an operand along the columns, which is then one along the rows

Both of the large ones write where they read, if asked to. The unit of `quantize` is the pair of `triton_fp4.py`; values
and packed codes are laid out as there, where kernels unpack these, too, and what keeps bits equal is what it is there.
"""

# ruff: noqa: D103 (kernels are documented by their arguments)
# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.triton_arithmetic import (
    GOLDEN,
    MIX_A,
    MIX_B,
    SMALLEST_PAIR,
    abs_pair,
    as_long,
    even_of,
    grid_nearest,
    largest_of,
    max_pair,
    nan_min,
    odd_of,
    pack,
    round_pair,
    scale_byte,
    signs_of_codes,
    times_pair,
    word_of_codes,
)


@triton.jit(do_not_specialize=["start_row", "start_column"])
def signs_kernel(
    signs_ptr,  # out: int32 [4], bit i of word j: the sign of element 32 j + i is minus
    key_ptr,  # int32 [2]: what is to be added to the two halves
    start_row,  # halves of the key
    start_column,
    DEVICE_KEY: tl.constexpr,
):
    """`hadamard.random_signs` of 128."""
    if DEVICE_KEY:
        start_row += tl.load(key_ptr)
        start_column += tl.load(key_ptr + 1)
    position = tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    bits = mixed(hash_of(start_row, tl.zeros_like(position)) ^ hash_of(start_column, position))
    minus = ((bits >> 16) & 1).to(tl.int32) << (position & 31)
    tl.store(signs_ptr + tl.arange(0, 4), tl.sum(minus, 1))


@triton.jit
def rotate_kernel(
    x_ptr,  # BF16 as int16 [tiles * 128, columns]
    z_ptr,  # out: the transformed x, likewise; may be x
    signs_ptr,  # int32 [4], from signs_kernel
    amax_ptr,  # int32 [1], zero: bits of the largest magnitude of z
    num_columns,
    num_tiles,
    FACTOR: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides num_columns
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.zeros([COLUMNS], tl.int32)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        start = as_long(tile) * 128 * num_columns
        z = rotated(x_ptr + start, column, num_columns, signs_ptr, FACTOR)
        out_ptr = z_ptr + start + column
        for r in tl.static_range(0, 128, 2):
            both = round_pair(z[r], z[r + 1])
            largest = max_pair(largest, abs_pair(both))
            store_lower(out_ptr, both)
            out_ptr += num_columns
            store_upper(out_ptr, both)
            out_ptr += num_columns
    tl.atomic_max(amax_ptr, tl.max(largest_of(largest).to(tl.int32, bitcast=True), 0))


@triton.jit(do_not_specialize=["start_row", "start_column"])
def quantize_kernel(
    z_ptr,  # pairs of columns, int32 [tiles * 128, columns / 2], from rotate_kernel
    values_ptr,  # out, unless packed: likewise; may be z
    codes_ptr,  # out, packed: int32 [tiles * 8, 4, columns / 2]
    scales_ptr,  # out, packed: int16 [tiles * 8, columns / 2]
    amax_ptr,  # FP32 [1]
    decode_ptr,  # out: FP32 [1], amax / TOP
    key_ptr,  # int32 [2]: what is to be added to the starts
    start_row,  # of the operand, whose rows are the columns of z: first argument of the row hash, ...
    start_column,  # ... and of that of pairs of blocks
    num_pairs,
    TOP: tl.constexpr,  # M * 256
    SHARE: tl.constexpr,  # 1 / M
    PACKED: tl.constexpr,
    DEVICE_KEY: tl.constexpr,
    PAIRS: tl.constexpr,  # divides num_pairs
):
    if DEVICE_KEY:
        start_row += tl.load(key_ptr)
        start_column += tl.load(key_ptr + 1)
    across = num_pairs // PAIRS
    tile = tl.program_id(0) // across
    pair = (tl.program_id(0) % across) * PAIRS + tl.arange(0, PAIRS)
    amax = tl.load(amax_ptr)
    tensor_scale = nan_min(tl.div_rn(TOP, amax), 3.4028234663852886e38)
    tensor_scale = tl.where(tensor_scale == 0.0, 1.0, tensor_scale)
    reach = tensor_scale * SHARE
    inverse = tl.div_rn(1.0, tensor_scale)
    if tl.program_id(0) == 0:
        tl.store(decode_ptr, tl.div_rn(amax, TOP))

    in_ptr = z_ptr + as_long(tile) * 128 * num_pairs + pair
    codes = ()  # pairs on the grid, under the signs of z
    scales = ()
    squares = ()
    crosses = ()
    for _ in tl.static_range(8):
        rows = ()
        largest = tl.zeros([PAIRS], tl.int32)
        for r in tl.static_range(16):
            rows += (load_word(in_ptr),)
            in_ptr += num_pairs
            largest = max_pair(largest, abs_pair(rows[r]))
        scale_even, encode_even = scale_of(even_of(largest), reach, inverse)
        scale_odd, encode_odd = scale_of(odd_of(largest), reach, inverse)
        for r in tl.static_range(16):
            even = tl.abs(even_of(rows[r])) * encode_even
            odd = tl.abs(odd_of(rows[r])) * encode_odd
            code_even = grid_nearest(tl.minimum(even, 6.0))
            code_odd = grid_nearest(tl.minimum(odd, 6.0))
            if r == 0:
                square_even = even * even
                square_odd = odd * odd
                cross_even = even * code_even
                cross_odd = odd * code_odd
            else:
                square_even = square_even + even * even
                square_odd = square_odd + odd * odd
                cross_even = cross_even + even * code_even
                cross_odd = cross_odd + odd * code_odd
            signs = signs_of_codes(rows[r]) if PACKED else rows[r]
            codes += (pack(code_even, code_odd) | (signs & -2147450880),)
        scales += (scale_even, scale_odd)
        squares += (square_even, square_odd)
        crosses += (cross_even, cross_odd)
    correction_even = correction_of(squares, crosses, 0)
    correction_odd = correction_of(squares, crosses, 1)

    hash_even = hash_of(start_row, 2 * pair)
    hash_odd = hash_of(start_row, 2 * pair + 1)
    if PACKED:
        out_ptr = codes_ptr + as_long(tile) * 32 * num_pairs + pair
        scales_ptr += as_long(tile) * 8 * num_pairs + pair
    else:
        out_ptr = values_ptr + as_long(tile) * 128 * num_pairs + pair
    for two in tl.static_range(4):
        of_blocks = hash_of(start_column, tile * 4 + two)
        draws_even = mixed(hash_even ^ of_blocks)
        draws_odd = mixed(hash_odd ^ of_blocks)
        for half in tl.static_range(2):
            even = stochastic_e4m3(scales[4 * two + 2 * half] * correction_even, (draws_even >> (16 * half)) & 0xFFFF)
            odd = stochastic_e4m3(scales[4 * two + 2 * half + 1] * correction_odd, (draws_odd >> (16 * half)) & 0xFFFF)
            if PACKED:
                store_lower(scales_ptr, scale_byte(even, 16) | (scale_byte(odd, 16) << 8))
                scales_ptr += num_pairs
                for r in tl.static_range(two * 32 + half * 16, two * 32 + half * 16 + 16, 4):
                    word = word_of_codes(
                        bits_of(codes[r]), bits_of(codes[r + 1]), bits_of(codes[r + 2]), bits_of(codes[r + 3]),
                        codes[r], codes[r + 1], codes[r + 2], codes[r + 3],
                    )  # fmt: skip
                    store_word(out_ptr, word)
                    out_ptr += num_pairs
            else:
                both = pack(even, odd)
                for r in tl.static_range(two * 32 + half * 16, two * 32 + half * 16 + 16):
                    store_word(out_ptr, times_pair(codes[r], both))
                    out_ptr += num_pairs


@triton.jit
def transpose_kernel(
    x_ptr,  # int16 [rows, columns]
    out_ptr,  # out: int16 [columns, rows]
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = tl.cdiv(num_columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tile = tl.load(x_ptr + as_long(row)[:, None] * num_columns + column[None, :], inside)
    out = out_ptr + as_long(column)[:, None] * num_rows + row[None, :]
    tl.store(out, tl.trans(tile), tl.trans(inside))


@triton.jit
def rotated(x_ptr, column, width, signs_ptr, FACTOR: tl.constexpr):
    """The random Hadamard transform of 128 rows in FP32: a tuple of vectors of columns, not yet rounded to BF16."""
    values = ()
    x_ptr += column
    for word in tl.static_range(4):
        signs = tl.load(signs_ptr + word)
        for r in tl.static_range(32):
            bits = load_upper(x_ptr)
            values += ((bits ^ ((signs << (31 - r)) & -2147483648)).to(tl.float32, bitcast=True),)
            x_ptr += width
    for level in tl.static_range(7):
        summed = ()
        for i in tl.static_range(128):
            if (i >> level) & 1:
                summed += (values[i - (1 << level)] - values[i],)
            else:
                summed += (values[i] + values[i + (1 << level)],)
        values = summed
    scaled = ()
    for i in tl.static_range(128):
        scaled += (values[i] * FACTOR,)
    return scaled


# Loads and stores of single rows. With its own Triton compiles for minutes: for each it goes over the whole program.


@triton.jit
def load_upper(ptr):
    """32 bits, the upper 16 from `ptr`."""
    asm: tl.constexpr = "{ .reg .b16 h; ld.global.b16 h, [$1]; mov.b32 $0, {0, h}; }"
    return tl.inline_asm_elementwise(asm, "=r,l", [ptr.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def load_word(ptr):
    """32 bits."""
    return tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [ptr.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def store_lower(ptr, word):
    """The lower 16 of 32 bits."""
    asm: tl.constexpr = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; st.global.b16 [$1], l; mov.b32 $0, 0; }"
    tl.inline_asm_elementwise(asm, "=r,l,r", [ptr.to(tl.int64), word], tl.int32, False, 1)


@triton.jit
def store_upper(ptr, word):
    """The upper 16 of 32 bits."""
    asm: tl.constexpr = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; st.global.b16 [$1], h; mov.b32 $0, 0; }"
    tl.inline_asm_elementwise(asm, "=r,l,r", [ptr.to(tl.int64), word], tl.int32, False, 1)


@triton.jit
def store_word(ptr, word):
    """32 bits."""
    asm: tl.constexpr = "st.global.b32 [$1], $2; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,r", [ptr.to(tl.int64), word], tl.int32, False, 1)


@triton.jit
def bits_of(pair):
    """Codes without signs as `word_of_codes` takes them."""
    return times_pair(pair & 0x7FFF7FFF, SMALLEST_PAIR)


@triton.jit
def scale_of(largest, reach, inverse):
    """FP32 block scale and encode factor of blocks with these largest magnitudes."""
    scale = nearest_e4m3(nan_min(largest * reach, 448.0))
    encode = nan_min(tl.div_rn(1.0, scale * inverse), 3.4028234663852886e38)
    return scale, tl.where(scale == 0.0, 0.0, encode)


@triton.jit
def correction_of(squares, crosses, ODD: tl.constexpr):
    """c, of the even or odd columns' sums over eight blocks."""
    divisor = by_halves(crosses, ODD)
    return tl.where(divisor == 0.0, 1.0, tl.div_rn(by_halves(squares, ODD), divisor))


@triton.jit
def by_halves(values, ODD: tl.constexpr):
    """The sum of every second of 16, first half plus second half."""
    first = values[ODD] + values[8 + ODD]
    second = values[2 + ODD] + values[10 + ODD]
    return (first + (values[4 + ODD] + values[12 + ODD])) + (second + (values[6 + ODD] + values[14 + ODD]))


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
def nearest_e4m3(scale):
    """`elements.to_e4m3` of 0 to 448: an FP32 sum with 1.5 * 2^23 spacings rounds to the spacing."""
    binade = tl.maximum(scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000).to(tl.float32, bitcast=True)
    return tl.fma(binade, -1572864.0, tl.fma(binade, 1572864.0, scale))


@triton.jit
def stochastic_e4m3(scale, bits):
    """`elements.round_e4m3_stochastic`, the draw being 16 bits of which the last counts as 1; 448 at most."""
    scale = nan_min(scale, 448.0)
    uniform = (bits | 1).to(tl.float32) * 1.52587890625e-05
    exponent = tl.maximum(scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
    spacing = exponent.to(tl.float32, bitcast=True) * 0.125
    per_spacing = (0x7F000000 - exponent).to(tl.float32, bitcast=True) * 8.0  # exact
    return tl.floor(scale * per_spacing + uniform) * spacing


@triton.jit
def hash_of(start, position):
    """`rounding._hash_positions`, unsigned."""
    return mixed(start.to(tl.uint32, bitcast=True) + position.to(tl.uint32) * GOLDEN)


@triton.jit
def mixed(x):
    """`rounding._mix` of 32 unsigned bits."""
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    return x ^ (x >> 16)
