"""MS-EDEN along the rows of a tensor as Triton kernels, bit for bit as the PyTorch functions of `ms_eden.py`.

A group, the 128 elements that one Hadamard transform mixes, is 128 rows of a column and belongs to one thread. So
butterflies, maxima, sums and scales are chains of elementwise operations on one vector of columns per row, in the
reference's order, and threads exchange nothing.

Measuring takes about 9 instructions an element, quantizing 25; the 128 numbers of a thread stay in registers. The
transform is computed twice, which takes less time than writing and reading its result. Values and packed codes have the
layout of the kernels of `fp4.py`, which also unpack these codes; that file says what keeps the bits equal.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.kernels.arithmetic import (
    GOLDEN,
    MIX_A,
    MIX_B,
    as_long,
    grid_nearest,
    nan_max,
    nan_min,
    nearest_e4m3,
    nibble,
    scale_byte,
    under_sign,
)


@triton.jit(do_not_specialize=["start_row", "start_column"])
def signs_kernel(
    signs_ptr,  # out: int32 [4], bit i of word j: the sign of element 32 j + i is minus
    key_ptr,  # int32 [2]: to be added to start_row and start_column, with DEVICE_KEY
    start_row,  # first arguments of the hashes of row and columns
    start_column,
    DEVICE_KEY: tl.constexpr,
):
    """`hadamard.random_signs` for a size of 128."""
    if DEVICE_KEY:
        start_row += tl.load(key_ptr)
        start_column += tl.load(key_ptr + 1)
    position = tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    bits = mixed(hash_of(start_row, tl.zeros_like(position)) ^ hash_of(start_column, position))
    minus = ((bits >> 16) & 1).to(tl.int32) << (position & 31)
    tl.store(signs_ptr + tl.arange(0, 4), tl.sum(minus, 1))


@triton.jit
def measure_kernel(
    x_ptr,  # BF16 as int16 [tiles * 128, columns]
    signs_ptr,  # int32 [4], from signs_kernel
    amax_ptr,  # out: int32 [1], zero at the start: bits of amax of the transformed x
    num_columns,
    num_tiles,
    FACTOR: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Measures amax of x [tiles * 128, columns] after the transform along its rows."""
    column = tl.minimum(tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), num_columns - 1)
    largest = tl.zeros([COLUMNS], tl.float32)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        z = rotated(x_ptr + as_long(tile) * 128 * num_columns, column, num_columns, signs_ptr, FACTOR)
        for r in tl.static_range(128):
            largest = nan_max(largest, tl.abs(z[r]))
    # Rounding is monotonic: the largest rounded magnitude is the rounded largest magnitude.
    bits = to_bf16(largest).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr, tl.max(bits, 0))


@triton.jit(do_not_specialize=["start_row", "start_column"])
def quantize_kernel(
    x_ptr,  # BF16 as int16 [tiles * 128, columns]
    signs_ptr,  # int32 [4], from signs_kernel
    values_ptr,  # out, unless packed: BF16 [tiles * 128, columns]
    codes_ptr,  # out, packed: int16 [tiles * 8, 4, columns], a nibble for each of four rows
    scales_ptr,  # out, packed: uint8 [tiles * 8, columns]
    amax_ptr,  # FP32 [1], from measure_kernel
    decode_ptr,  # out: FP32 [1], amax / TOP
    key_ptr,  # int32 [2]: to be added to start_row and start_column, with DEVICE_KEY
    start_row,  # the operand's rows are the columns of x: first argument of the hash of its rows ...
    start_column,  # ... and of the hash of its pairs of blocks
    num_columns,
    index_ptr,  # int64: positions of the operand's rows or columns in the global tensor, with INDEX
    FACTOR: tl.constexpr,
    TOP: tl.constexpr,  # M * 256
    SHARE: tl.constexpr,  # 1 / M
    PACKED: tl.constexpr,
    DEVICE_KEY: tl.constexpr,
    INDEX: tl.constexpr,  # "rows" or "columns"; empty: positions follow each other
    COLUMNS: tl.constexpr,
):
    """Transforms x [tiles * 128, columns] along its rows and quantizes it by MS-EDEN."""
    if DEVICE_KEY:
        start_row += tl.load(key_ptr)
        start_column += tl.load(key_ptr + 1)
    across = tl.cdiv(num_columns, COLUMNS)
    tile = tl.program_id(0) // across
    column = tl.minimum((tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS), num_columns - 1)
    amax = tl.load(amax_ptr)
    tensor_scale = nan_min(tl.div_rn(TOP, amax), 3.4028234663852886e38)
    tensor_scale = tl.where(tensor_scale == 0.0, 1.0, tensor_scale)
    scale_factor = tensor_scale * SHARE
    inverse = tl.div_rn(1.0, tensor_scale)
    if tl.program_id(0) == 0:
        tl.store(decode_ptr, tl.div_rn(amax, TOP))

    z = rotated(x_ptr + as_long(tile) * 128 * num_columns, column, num_columns, signs_ptr, FACTOR)
    codes = ()  # FP32 numbers on the grid, with the signs of z
    scales = ()
    squares = ()
    crosses = ()
    for block in tl.static_range(8):
        block_values = ()
        largest = tl.zeros([COLUMNS], tl.float32)
        for r in tl.static_range(16):
            block_values += (to_bf16(z[block * 16 + r]),)
            largest = nan_max(largest, tl.abs(block_values[r]))
        scale = nearest_e4m3(nan_min(largest * scale_factor, 448.0))
        encode = nan_min(tl.div_rn(1.0, scale * inverse), 3.4028234663852886e38)
        encode = tl.where(scale == 0.0, 0.0, encode)
        for r in tl.static_range(16):
            scaled = tl.abs(block_values[r]) * encode
            code = grid_nearest(tl.minimum(scaled, 6.0))
            if r == 0:
                square = scaled * scaled
                cross = scaled * code
            else:
                square = square + scaled * scaled
                cross = cross + scaled * code
            codes += (under_sign(code, block_values[r]),)
        scales += (scale,)
        squares += (square,)
        crosses += (cross,)
    divisor = by_halves(crosses)
    correction = tl.where(divisor == 0.0, 1.0, tl.div_rn(by_halves(squares), divisor))

    row_hash = hash_of(start_row, tl.load(index_ptr + column) if INDEX == "rows" else column)
    if PACKED:
        out_ptr = codes_ptr + as_long(tile) * 32 * num_columns + column
        scales_ptr += as_long(tile) * 8 * num_columns + column
    else:
        out_ptr = values_ptr + as_long(tile) * 128 * num_columns + column
    for pair in tl.static_range(4):
        draws = mixed(row_hash ^ hash_of(start_column, tile * 4 + pair))
        for half in tl.static_range(2):
            if INDEX == "columns":
                block = tl.load(index_ptr + as_long(tile) * 128 + pair * 32 + half * 16) // 16
                own_draws = mixed(row_hash ^ hash_of(start_column, block // 2))
                bits = own_draws >> (block % 2 * 16).to(tl.uint32)
            else:
                bits = draws >> (16 * half)
            uniform = ((bits & 0xFFFF) | 1).to(tl.float32) * 1.52587890625e-05
            scale = stochastic_e4m3(nan_min(scales[2 * pair + half] * correction, 448.0), uniform)
            if PACKED:
                store_byte(scales_ptr, scale_byte(scale, 16))
                scales_ptr += num_columns
                for r in tl.static_range(pair * 32 + half * 16, pair * 32 + half * 16 + 16, 4):
                    word = nibble(codes[r]) | (nibble(codes[r + 1]) << 4)
                    word |= (nibble(codes[r + 2]) << 8) | (nibble(codes[r + 3]) << 12)
                    store_lower(out_ptr, word)
                    out_ptr += num_columns
            else:
                for r in tl.static_range(pair * 32 + half * 16, pair * 32 + half * 16 + 16):
                    store_upper(out_ptr, codes[r] * scale)
                    out_ptr += num_columns


@triton.jit
def rotated(x_ptr, column, width, signs_ptr, FACTOR: tl.constexpr):
    """The random Hadamard transform of 128 rows in FP32: a tuple of vectors over columns, not yet rounded to BF16."""
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


# Loads and stores of single rows, in assembly: for each of its own, Triton analyses the whole program for minutes.


@triton.jit
def load_upper(ptr):
    """32 bits: the upper 16 loaded from `ptr`, the lower 16 zero."""
    asm: tl.constexpr = "{ .reg .b16 h; ld.global.b16 h, [$1]; mov.b32 $0, {0, h}; }"
    return tl.inline_asm_elementwise(asm, "=r,l", [ptr.to(tl.int64)], tl.int32, True, 1)


@triton.jit
def store_byte(ptr, word):
    """Store the lowest 8 of 32 bits."""
    asm: tl.constexpr = "st.global.b8 [$1], $2; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,r", [ptr.to(tl.int64), word], tl.int32, False, 1)


@triton.jit
def store_lower(ptr, word):
    """Store the lower 16 of 32 bits."""
    asm: tl.constexpr = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; st.global.b16 [$1], l; mov.b32 $0, 0; }"
    tl.inline_asm_elementwise(asm, "=r,l,r", [ptr.to(tl.int64), word], tl.int32, False, 1)


@triton.jit
def store_upper(ptr, value):
    """Store an FP32 number that BF16 holds exactly, as BF16."""
    asm: tl.constexpr = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; st.global.b16 [$1], h; mov.b32 $0, 0; }"
    tl.inline_asm_elementwise(asm, "=r,l,f", [ptr.to(tl.int64), value], tl.int32, False, 1)


@triton.jit
def by_halves(values):
    """The sum of eight numbers by halves: first half plus second half, three times."""
    first = values[0] + values[4]
    second = values[1] + values[5]
    return (first + (values[2] + values[6])) + (second + (values[3] + values[7]))


@triton.jit
def to_bf16(x):
    """FP32, rounded to BF16."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def stochastic_e4m3(scale, uniform):
    """`Grid.round` of E4M3 (`family.py`) by a draw."""
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
    """`rounding._mix`, unsigned."""
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 15)) * MIX_B
    return x ^ (x >> 16)
