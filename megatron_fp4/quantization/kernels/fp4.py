"""The NVFP4 and MXFP4 quantizers as Triton kernels, bit for bit as `nvfp4.py`, `microscaling.py` and `hadamard.py`.

A tensor [rows, columns] in memory is an operand of two GEMMs: along its columns (fprop's x, dgrad's dy), and along its
rows (both operands of wgrad, whose dot product runs over tokens):

    measure            reads x; makes amax of x and of RHT(x^T), and hashes of positions for stochastic rounding
    quantize_columns   reads x; makes values, or packed codes, along the columns
    quantize_rows      reads x; makes values, or packed codes, along the rows
    unpack             reads packed codes along the rows; makes values
    four_over_six      reads x; makes packed codes along the columns, by four over six

Instructions limit the two quantizers: on sm_90 about 12 an element (18 with stochastic rounding) along the columns, and
19 (23), of which the transform takes 7, along the rows. So both halves of a pair are computed at once where possible
(maxima, clamp, scale, sign, codes), and multiplications replace shifts, whose unit issues only every other cycle. Two
kernels are faster than one for both operands, which would need so many registers that too few warps run. They also let
the first GEMM free its operand before the second operand is made.

No load or store has a mask: a program that reaches beyond the last column works on the last block again, and writes the
same values as another program. CUDA allows 2^31 programs along the first axis of a grid and 65535 along the others, so
the kernels that go over all tiles have one axis.

With SEGMENTED, x consists of segments (`quantization/segments.py`) with a tensor scale each, and x has not got the
padding of their operands: rows of x are loaded by their numbers, and amax is one for each segment. A tile of BLOCK rows
belongs to one segment. Rows after all segments count as one more.

"Values" are `code * block scale` in BF16, which is exact, in the layout of x: a GEMM reads either orientation, so
nothing is transposed. A block along the rows, which is 16 (32) rows of one column, belongs to one thread, and so does a
tile of the Hadamard transform: both are chains of elementwise operations on one vector per row. The unit of all data is
a *pair*: the BF16 values of an even and the next odd column in one int32. A program works on `[BLOCKS, PAIRS]` pairs at
a time, blocks that are neighbours along the columns; PAIRS is half a block.

Packed along columns (`PACKED`): code bytes [rows, columns / 2], the even column in the low nibble, and scale bytes
[rows, columns / BLOCK]; those of square blocks are repeated in each of their rows. Packed along rows: int32 words
[rows / BLOCK, BLOCK / 4, columns / 2]. Nibble r of a word's low half is the code of row r (of four) in the even column,
nibble r of its high half that in the odd column. Scale bytes are [rows / BLOCK, columns].

Why the bits equal the reference's:
- Divisions and reciprocals are IEEE's, subnormals are not flushed, and nothing is contracted into FMA
  (`enable_fp_fusion=False` at every launch). The products in explicit FMAs are exact, so these are the reference's
  additions.
- The clamp to 6 comes after rounding. A number up to 6 is not rounded above 6; a number beyond 6 is rounded to 6 or
  more, or to NaN if it overflows, which the minimum with 6 drops.
- Stochastic rounding adds u * spacing to the value, and the reference adds u to value / spacing: spacings are powers of
  two, so both round alike.
- Only signs of zeros may differ in values, which no GEMM shows; the signs of packed codes are the reference's.
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
    do_not_specialize=["num_rows", "num_blocks", "start_row_0", "start_column_0", "start_row_1", "start_column_1"]
)
def measure_kernel(
    x_ptr,  # [rows, columns] as pairs
    amax_ptr,  # out: int32 [2], zeros at the start: bits of amax of x and of the transformed x; see SEGMENTED
    hash_ptr,  # out: int32, hashes of operand 0: rows, column pairs; of operand 1: row pairs, even columns, odd columns
    num_rows,
    num_blocks,  # columns / BLOCK
    start_row_0,  # operand 0 is along the columns: first argument of its row hash ...
    start_column_0,  # ... and of its hash of pairs of columns; operand 1 is along the rows
    start_row_1,
    start_column_1,
    key_0_ptr,  # int32 [2]: to be added to start_row_0 and start_column_0, with DEVICE_KEY_0
    key_1_ptr,
    index_ptr,  # int64 [rows]: positions of rows in the global tensor, with INDEXED; row pairs are then single rows
    source_ptr,  # int64 [rows]: the row in x, or -1: zeros; with SEGMENTED
    segment_ptr,  # int64 [rows]: the row's segment; with SEGMENTED
    BLOCK: tl.constexpr,
    SEGMENTED: tl.constexpr,
    AMAX: tl.constexpr,  # whether to measure amax; MXFP4 has no tensor scale
    HADAMARD: tl.constexpr,
    SIGNS: tl.constexpr,
    FACTOR: tl.constexpr,
    HASH_0: tl.constexpr,
    HASH_1: tl.constexpr,
    DEVICE_KEY_0: tl.constexpr,
    DEVICE_KEY_1: tl.constexpr,
    INDEXED: tl.constexpr,
    FP32: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Measures amax of x [rows, columns] and of the transformed x, and hashes positions for stochastic rounding."""
    if DEVICE_KEY_0:
        start_row_0 += tl.load(key_0_ptr)
        start_column_0 += tl.load(key_0_ptr + 1)
    if DEVICE_KEY_1:  # the operand's rows are the tensor's columns
        start_column_1 += tl.load(key_1_ptr)
        start_row_1 += tl.load(key_1_ptr + 1)
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    block = tl.minimum(tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), num_blocks - 1)
    offsets = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    width = num_blocks * PAIRS
    largest = tl.zeros([BLOCKS, PAIRS], tl.int32)
    largest_transformed = tl.zeros([BLOCKS, PAIRS], tl.float32)
    for tile in range(tl.program_id(1), num_rows // BLOCK, tl.num_programs(1)):
        if AMAX:
            tile_ptr = x_ptr if SEGMENTED else x_ptr + as_long(tile) * BLOCK * width
            pairs = load_tile(tile_ptr, offsets, width, source_ptr + tile * BLOCK, BLOCK, FP32, SEGMENTED)
            if SEGMENTED:
                largest = tl.zeros([BLOCKS, PAIRS], tl.int32)
                largest_transformed = tl.zeros([BLOCKS, PAIRS], tl.float32)
            for r in tl.static_range(BLOCK):
                largest = max_pair(largest, abs_pair(pairs[r]))
            if HADAMARD:
                even = ()
                odd = ()
                for r in tl.static_range(BLOCK):
                    even += (even_of(pairs[r]),)
                    odd += (odd_of(pairs[r]),)
                even = butterflies(even, BLOCK, SIGNS, FACTOR)
                odd = butterflies(odd, BLOCK, SIGNS, FACTOR)
                for r in tl.static_range(BLOCK):
                    largest_transformed = nan_max(largest_transformed, nan_max(tl.abs(even[r]), tl.abs(odd[r])))
            if SEGMENTED:
                update_maxima(
                    amax_ptr + 2 * tl.load(segment_ptr + tile * BLOCK), largest, largest_transformed, HADAMARD
                )
        if HASH_0:
            if tl.program_id(0) == 0:
                rows = tile * BLOCK + tl.arange(0, BLOCK)
                position = tl.load(index_ptr + rows) if INDEXED else rows
                tl.store(hash_ptr + rows, position_hash(start_row_0, position))
        if HASH_1:
            if tl.program_id(0) == 0:
                if INDEXED:
                    rows = tile * BLOCK + tl.arange(0, BLOCK)
                    hashes = position_hash(start_row_1, tl.load(index_ptr + rows) >> 1)
                    tl.store(hash_ptr + num_rows + width + rows, hashes)
                else:
                    row_pairs = tile * PAIRS + tl.arange(0, PAIRS)
                    tl.store(hash_ptr + num_rows + width + row_pairs, position_hash(start_row_1, row_pairs))
    if HASH_0:
        if tl.program_id(1) == 0:
            tl.store(hash_ptr + num_rows + offsets, position_hash(start_column_0, offsets))
    if HASH_1:
        if tl.program_id(1) == 0:
            columns_ptr = hash_ptr + num_rows + width + (num_rows if INDEXED else num_rows // 2) + offsets
            tl.store(columns_ptr, position_hash(start_column_1, 2 * offsets))
            tl.store(columns_ptr + width, position_hash(start_column_1, 2 * offsets + 1))
    if AMAX and not SEGMENTED:
        update_maxima(amax_ptr, largest, largest_transformed, HADAMARD)


@triton.jit
def update_maxima(amax_ptr, largest, largest_transformed, HADAMARD: tl.constexpr):
    """Update the bits of amax and of the transformed amax by pairs of magnitudes, and by transformed magnitudes."""
    # As integers, the bits of non-negative floats compare like the floats, and NaN is larger than infinity.
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest_of(largest).to(tl.int32, bitcast=True), 1), 0))
    if HADAMARD:
        # Rounding is monotonic: the largest rounded magnitude is the rounded largest magnitude.
        largest_transformed = even_of(round_pair(largest_transformed, largest_transformed))
        tl.atomic_max(amax_ptr + 1, tl.max(tl.max(largest_transformed.to(tl.int32, bitcast=True), 1), 0))


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "tiles_per_program"])
def quantize_columns_kernel(
    x_ptr,  # [rows, columns] as pairs
    values_ptr,  # out: values along the columns, as pairs, unless packed
    codes_ptr,  # out, packed: a byte for each pair
    scales_ptr,  # out, packed: a byte for each block of a row
    amax_ptr,  # FP32 [2], with SEGMENTED of each segment, from measure_kernel
    decode_ptr,  # out: FP32 [1], amax / (6 * 448); not with SEGMENTED
    hash_ptr,  # from measure_kernel
    num_rows,
    num_blocks,
    tiles_per_program,  # at most; tiles of ROWS rows
    source_ptr,  # as in measure_kernel
    segment_ptr,
    BLOCK: tl.constexpr,  # 16: NVFP4, 32: MXFP4
    SEGMENTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # 1 or BLOCK
    ROWS: tl.constexpr,  # of a tile; BLOCK for square blocks
    STOCHASTIC: tl.constexpr,
    PACKED: tl.constexpr,
    FP32: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantizes x [rows, columns] along its columns, in blocks of 1 or BLOCK rows."""
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    # Tiles are done from the last to the first, because the last ones that measure_kernel read are still in the cache.
    across = tl.cdiv(num_blocks, BLOCKS)  # programs along the columns
    block = tl.minimum((across - 1 - tl.program_id(0) % across) * BLOCKS + tl.arange(0, BLOCKS), num_blocks - 1)
    first, count = tiles_of_program(num_rows // ROWS, tiles_per_program, tl.program_id(0) // across)
    offsets = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    width = num_blocks * PAIRS
    sixth, inverse = tensor_scale(amax_ptr, decode_ptr, BLOCK, not SEGMENTED)
    if STOCHASTIC:
        hash_columns = tl.load(hash_ptr + num_rows + offsets)
    if not SEGMENTED:
        x_ptr += as_long(first) * ROWS * width
    out_ptr = (codes_ptr if PACKED else values_ptr) + as_long(first) * ROWS * width
    scales_ptr += as_long(first) * ROWS * num_blocks
    for i in range(0, count):
        tile = count - 1 - i
        tile_offsets = tile * ROWS * width + offsets
        x_offsets = offsets if SEGMENTED else tile_offsets
        pairs = load_tile(x_ptr, x_offsets, width, source_ptr + (first + tile) * ROWS, ROWS, FP32, SEGMENTED)
        if SEGMENTED:
            segment = tl.load(segment_ptr + (first + tile) * ROWS)
            sixth, inverse = tensor_scale(amax_ptr + 2 * segment, decode_ptr, BLOCK, False)
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
                tl.store(scales_ptr + ((tile * ROWS + r) * num_blocks + block), scale_byte(scale, BLOCK).to(tl.uint8))
                out = byte_of_codes(pair_of_codes(even, odd), signs_of_codes(pairs[r])).to(tl.uint8)
            else:
                out = signed_values(even, odd, pack(scale, scale)[:, None], pairs[r])
            tl.store(out_ptr + (r * width + tile_offsets), out)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "tiles_per_program"])
def quantize_rows_kernel(
    x_ptr,  # [rows, columns] as pairs
    values_ptr,  # out: values along the rows, as pairs, or packed codes
    scales_ptr,  # out, packed: int16, the scale bytes of both columns of a pair
    amax_ptr,  # FP32 [2], with SEGMENTED of each segment, from measure_kernel
    decode_ptr,  # out: FP32 [1], amax / (6 * 448); not with SEGMENTED
    hash_ptr,  # from measure_kernel
    num_rows,
    num_blocks,
    tiles_per_program,  # at most; tiles of BLOCK rows
    index_ptr,  # these three as in measure_kernel
    source_ptr,
    segment_ptr,
    BLOCK: tl.constexpr,
    SEGMENTED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    INDEXED: tl.constexpr,
    PACKED: tl.constexpr,
    HADAMARD: tl.constexpr,
    SIGNS: tl.constexpr,
    FACTOR: tl.constexpr,
    FP32: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantizes x [rows, columns], with HADAMARD its transform, along its rows."""
    num_rows = tl.multiple_of(num_rows, BLOCK)
    PAIRS: tl.constexpr = BLOCK // 2
    across = tl.cdiv(num_blocks, BLOCKS)  # programs along the columns
    block = tl.minimum((across - 1 - tl.program_id(0) % across) * BLOCKS + tl.arange(0, BLOCKS), num_blocks - 1)
    first, count = tiles_of_program(num_rows // BLOCK, tiles_per_program, tl.program_id(0) // across)
    offsets = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    width = num_blocks * PAIRS
    amax_ptr += 1 if HADAMARD else 0
    sixth, inverse = tensor_scale(amax_ptr, decode_ptr, BLOCK, not SEGMENTED)
    if STOCHASTIC:
        hash_ptr += num_rows + width
        row_hashes = num_rows if INDEXED else num_rows // 2
        hash_even = tl.load(hash_ptr + row_hashes + offsets)
        hash_odd = tl.load(hash_ptr + row_hashes + width + offsets)
    if not SEGMENTED:
        x_ptr += as_long(first) * BLOCK * width
    values_ptr += as_long(first) * (BLOCK // 4 if PACKED else BLOCK) * width
    scales_ptr += as_long(first) * width
    for i in range(0, count):
        tile = count - 1 - i
        x_offsets = offsets if SEGMENTED else tile * BLOCK * width + offsets
        pairs = load_tile(x_ptr, x_offsets, width, source_ptr + (first + tile) * BLOCK, BLOCK, FP32, SEGMENTED)
        if SEGMENTED:
            segment = tl.load(segment_ptr + (first + tile) * BLOCK)
            sixth, inverse = tensor_scale(amax_ptr + 2 * segment, decode_ptr, BLOCK, False)
        if HADAMARD:
            pairs = hadamard_tile(pairs, BLOCK, SIGNS, FACTOR)
        largest = abs_pair(pairs[0])
        for r in tl.static_range(1, BLOCK):
            largest = max_pair(largest, abs_pair(pairs[r]))
        scale_even, encode_even = block_scale(even_of(largest), sixth, inverse, BLOCK)
        scale_odd, encode_odd = block_scale(odd_of(largest), sixth, inverse, BLOCK)
        if PACKED:
            scale_bytes = scale_byte(scale_even, BLOCK) | (scale_byte(scale_odd, BLOCK) << 8)
            tl.store(scales_ptr + (tile * width + offsets), scale_bytes.to(tl.int16))
        out_offsets = tile * (BLOCK // 4 if PACKED else BLOCK) * width + offsets
        scales = pack(scale_even, scale_odd)
        row_draws = ()
        if STOCHASTIC:
            if INDEXED:
                for r in tl.static_range(BLOCK):
                    row = (first + tile) * BLOCK + r
                    row_hash = tl.load(hash_ptr + row)
                    is_second = tl.load(index_ptr + row) % 2 == 1  # of its pair
                    draws_even = draws(row_hash ^ hash_even)
                    draws_odd = draws(row_hash ^ hash_odd)
                    draw_even = tl.where(is_second, draws_even[1], draws_even[0])
                    row_draws += ((draw_even, tl.where(is_second, draws_odd[1], draws_odd[0])),)
            else:
                for r in tl.static_range(0, BLOCK, 2):
                    row_hash = tl.load(hash_ptr + (first + tile) * PAIRS + r // 2)
                    draws_even = draws(row_hash ^ hash_even)
                    draws_odd = draws(row_hash ^ hash_odd)
                    row_draws += ((draws_even[0], draws_odd[0]), (draws_even[1], draws_odd[1]))
        codes = ()
        signs = ()
        for r in tl.static_range(BLOCK):
            even = magnitude(even_of(pairs[r])) * encode_even
            odd = tl.abs(odd_of(pairs[r])) * encode_odd
            if STOCHASTIC:
                even = grid_stochastic(even, row_draws[r][0])
                odd = grid_stochastic(odd, row_draws[r][1])
            else:
                even = grid_nearest(even)
                odd = grid_nearest(odd)
            if PACKED:
                codes += (pair_of_codes(even, odd),)
                signs += (signs_of_codes(pairs[r]),)
            else:
                tl.store(values_ptr + (r * width + out_offsets), signed_values(even, odd, scales, pairs[r]))
        if PACKED:
            for quarter in tl.static_range(BLOCK // 4):
                word = word_of_codes(
                    codes[4 * quarter], codes[4 * quarter + 1], codes[4 * quarter + 2], codes[4 * quarter + 3],
                    signs[4 * quarter], signs[4 * quarter + 1], signs[4 * quarter + 2], signs[4 * quarter + 3],
                )  # fmt: skip
                tl.store(values_ptr + (quarter * width + out_offsets), word)


@triton.jit(do_not_specialize=["num_blocks", "tiles_per_part", "codes_stride", "scales_stride"])
def unpack_kernel(
    codes_ptr,  # int32 [parts, tiles, BLOCK / 4, columns / 2], each part contiguous
    scales_ptr,  # int16 [parts, tiles, columns / 2], each part contiguous
    values_ptr,  # out: [rows, columns] as pairs
    num_blocks,
    tiles_per_part,
    codes_stride,  # from part to part, in words
    scales_stride,  # from part to part, in pairs of scales
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Unpacks words of codes and pairs of scales from quantize_rows_kernel, in one or several parts."""
    PAIRS: tl.constexpr = BLOCK // 2
    across = tl.cdiv(num_blocks, BLOCKS)  # programs along the columns
    block = tl.minimum((tl.program_id(0) % across) * BLOCKS + tl.arange(0, BLOCKS), num_blocks - 1)
    offsets = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    width = num_blocks * PAIRS
    tile = tl.program_id(0) // across
    # The codes and the scales of a tile are multiples of 16 bytes, so 16 bytes can be loaded at once.
    part = as_long(tile // tiles_per_part)
    tile_of_part = as_long(tile % tiles_per_part)
    codes_ptr += tl.multiple_of(part * codes_stride, 4) + tile_of_part * (BLOCK // 4) * width
    scales_ptr += tl.multiple_of(part * scales_stride, 8) + tile_of_part * width
    values_ptr += as_long(tile) * BLOCK * width
    scale_bytes = tl.load(scales_ptr + offsets).to(tl.int32)
    scales = pack(scale_from_byte(scale_bytes & 0xFF, BLOCK), scale_from_byte((scale_bytes >> 8) & 0xFF, BLOCK))
    for quarter in tl.static_range(BLOCK // 4):
        word = tl.load(codes_ptr + (quarter * width + offsets))
        for r in tl.static_range(4):
            tl.store(values_ptr + ((quarter * 4 + r) * width + offsets), values_of_codes(word, r, scales))


@triton.jit
def four_over_six_kernel(
    x_ptr,  # [blocks, 8] pairs of BF16
    codes_ptr,  # out: int64 [blocks], 16 nibbles, the first element in the lowest one
    scales_ptr,  # out: uint8 [blocks]
    amax_ptr,  # FP32 [1], with SEGMENTED [2] of each segment
    decode_ptr,  # out: FP32 [1], amax / 1536; not with SEGMENTED
    num_blocks,  # with SEGMENTED those of a row
    source_ptr,  # as in measure_kernel
    segment_ptr,
    SEGMENTED: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantizes blocks of one row along the columns, bit for bit as `encode_nvfp4(..., four_over_six=...)`.

    A block, 16 elements of one row, belongs to one thread, so that its errors are summed in the reference's order.
    Neighbouring lanes have neighbouring blocks, of 32 bytes, which share cache lines. The codes of a block are one
    64-bit store. Each block is quantized with both scales; the scale with the smaller error is kept.
    """
    if SEGMENTED:  # the blocks of a program are of one row
        across = tl.cdiv(num_blocks, BLOCKS)
        row = as_long(tl.program_id(0) // across)
        of_row = tl.minimum((tl.program_id(0) % across) * BLOCKS + tl.arange(0, BLOCKS), num_blocks - 1)
        block = row * num_blocks + of_row
        source = tl.load(source_ptr + row)
        x_ptr += (source * num_blocks + of_row) * 8
        amax_ptr += 2 * tl.load(segment_ptr + row)
    else:
        block = as_long(tl.program_id(0)) * BLOCKS + tl.arange(0, BLOCKS)
        block = tl.minimum(block, num_blocks - 1)
        x_ptr += block * 8
    amax = tl.load(amax_ptr)
    tensor_scale = nan_min(tl.div_rn(1536.0, amax), 3.4028234663852886e38)
    tensor_scale = tl.where(tensor_scale == 0.0, 1.0, tensor_scale)
    inverse = tl.div_rn(1.0, tensor_scale)
    if not SEGMENTED:
        if tl.program_id(0) == 0:
            tl.store(decode_ptr, tl.div_rn(amax, 1536.0))
    exponent = (amax.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)

    values = ()
    largest = tl.zeros([BLOCKS], tl.float32)
    for column_pair in tl.static_range(8):
        pair = tl.load(x_ptr + column_pair, source >= 0, 0) if SEGMENTED else tl.load(x_ptr + column_pair)
        values += (even_of(pair), odd_of(pair))
        largest = nan_max(largest, nan_max(tl.abs(values[2 * column_pair]), tl.abs(values[2 * column_pair + 1])))
    base = tl.div_rn(largest, 6.0) * tensor_scale
    scale_6 = nearest_e4m3(nan_min(base, 448.0))
    scale_4 = nearest_e4m3(nan_min(base * 1.5, 448.0))
    encode_6 = nan_min(tl.div_rn(1.0, scale_6 * inverse), 3.4028234663852886e38)
    encode_4 = nan_min(tl.div_rn(1.0, scale_4 * inverse), 3.4028234663852886e38)
    if (amax > 8.673617379884035e-19) & (amax < 1.2676506002282294e30):
        # Multiplied by a power of two that brings amax near 1, no number overflows or loses digits.
        error_6 = error_of(values, scale_6, encode_6, amax * power, power, 1.0, SQUARED, True)
        error_4 = error_of(values, scale_4, encode_4, amax * power, power, 1.0, SQUARED, True)
    else:
        # If sums could overflow, errors are multiplied by 2^-12. Before squaring, `power` brings them near 1.
        guard = tl.where(amax > 1.2676506002282294e30, 0.000244140625, 1.0)
        error_6 = error_of(values, scale_6, encode_6, amax * guard, guard, power, SQUARED, False)
        error_4 = error_of(values, scale_4, encode_4, amax * guard, guard, power, SQUARED, False)
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
def error_of(values, scale, encode, amax, factor, power, SQUARED: tl.constexpr, NEAR_ONE: tl.constexpr):
    """The sum over a block of absolute or squared errors of rounding to nearest with `scale`, multiplied by `factor`.

    NEAR_ONE: amax is near 1, so decoded values are between 2^-10 and 2^13 before the division. Then a product with
    1 / 1536 and one correction by its remainder give the correctly rounded quotient (Markstein).
    """
    error = tl.zeros_like(scale)
    for i in tl.static_range(16):
        magnitude = tl.abs(values[i])
        decoded = grid_nearest(tl.minimum(magnitude * encode, 6.0)) * scale * amax
        if NEAR_ONE:
            estimate = decoded * 0.0006510416860692203
            decoded = tl.fma(tl.fma(estimate, -1536.0, decoded), 0.0006510416860692203, estimate)
        else:
            decoded = tl.div_rn(decoded, 1536.0)
        difference = tl.abs(decoded - magnitude * factor)
        if SQUARED:
            if not NEAR_ONE:
                difference = difference * power
            difference = difference * difference
        error = error + difference
    return error
