"""The kernels of 4-bit weights in square blocks, bit for bit as `quantization/square_blocks.py`, which has the passes.

Memory bandwidth limits all of them. The unit of data is a pair of neighbouring columns, whose codes are a byte. A
program of the first two works on BLOCKS blocks side by side; it leaves out rows beyond the end of the part or of the
group. Rows of x may be FP32; they are then rounded to BF16. `unpack` takes codes and scales as flat: a row of a block
is PAIRS bytes of codes and one scale, whichever row it is.

As in `fp4.py`, divisions are IEEE's, subnormals are not flushed, and nothing is contracted into FMA.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.kernels.arithmetic import (
    as_long,
    block_scale,
    even_of,
    grid_nearest,
    nan_max,
    nibble,
    odd_of,
    pack,
    rounded_pair,
    scale_byte,
    scale_from_byte,
    tensor_scale,
    under_sign,
    values_of_byte,
)


@triton.jit(do_not_specialize=["num_blocks", "first", "end", "group_rows", "blocks_per_group", "first_block"])
def maxima_kernel(
    x_ptr,  # [rows, columns] as pairs: the part's rows
    maxima_ptr,  # out: FP32 [row blocks, columns / BLOCK]
    num_blocks,  # columns / BLOCK
    first,  # these five are those of `RowBlocks`
    end,
    group_rows,
    blocks_per_group,
    first_block,
    BLOCK: tl.constexpr,
    FP32: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The largest magnitude of each block among the rows of the part, [row blocks, columns / BLOCK]."""
    PAIRS: tl.constexpr = BLOCK // 2
    across = tl.cdiv(num_blocks, BLOCKS)
    block = (tl.program_id(0) % across) * BLOCKS + tl.arange(0, BLOCKS)
    row_block = tl.program_id(0) // across
    offsets = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    mask = (block < num_blocks)[:, None]
    begin, stop = rows_of(first_block + row_block, first, end, group_rows, blocks_per_group, BLOCK)
    largest = tl.zeros([BLOCKS, PAIRS], tl.float32)
    for r in tl.static_range(BLOCK):
        even, odd = load_pairs(x_ptr, begin + r - first, offsets, mask & (begin + r < stop), num_blocks * PAIRS, FP32)
        largest = nan_max(largest, nan_max(tl.abs(even), tl.abs(odd)))
    tl.store(maxima_ptr + as_long(row_block) * num_blocks + block, tl.reduce(largest, 1, nan_max), block < num_blocks)


@triton.jit(do_not_specialize=["num_blocks", "first", "end", "group_rows", "blocks_per_group", "first_block"])
def quantize_kernel(
    x_ptr,  # [rows, columns] as pairs: the part's rows
    maxima_ptr,  # FP32 [row blocks, columns / BLOCK]
    amax_ptr,  # FP32 [1], of the whole weight; not read for MXFP4
    codes_ptr,  # out: uint8 [rows, columns / 2]
    scales_ptr,  # out: uint8 [rows, columns / BLOCK]
    num_blocks,
    first,
    end,
    group_rows,
    blocks_per_group,
    first_block,
    BLOCK: tl.constexpr,
    FP32: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantizes the rows of the part, given the maxima of their blocks."""
    PAIRS: tl.constexpr = BLOCK // 2
    across = tl.cdiv(num_blocks, BLOCKS)
    block = (tl.program_id(0) % across) * BLOCKS + tl.arange(0, BLOCKS)
    row_block = tl.program_id(0) // across
    offsets = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    column_mask = block < num_blocks
    width = num_blocks * PAIRS
    begin, stop = rows_of(first_block + row_block, first, end, group_rows, blocks_per_group, BLOCK)
    largest = tl.load(maxima_ptr + as_long(row_block) * num_blocks + block, column_mask, 0)
    sixth, inverse = tensor_scale(amax_ptr, amax_ptr, BLOCK, False)
    scale, encode = block_scale(largest, sixth, inverse, BLOCK)
    byte = scale_byte(scale, BLOCK).to(tl.uint8)
    encode = encode[:, None]
    for r in tl.static_range(BLOCK):
        row, row_mask = begin + r - first, begin + r < stop
        mask = column_mask[:, None] & row_mask
        even, odd = load_pairs(x_ptr, row, offsets, mask, width, FP32)
        codes = code_of(even, encode) | (code_of(odd, encode) << 4)
        tl.store(codes_ptr + as_long(row) * width + offsets, codes.to(tl.uint8), mask)
        tl.store(scales_ptr + as_long(row) * num_blocks + block, byte, column_mask & row_mask)


@triton.jit(do_not_specialize=["group_blocks", "padded_blocks", "codes_stride", "scales_stride"])
def unpack_kernel(
    codes_ptr,  # uint8: a byte for each pair
    scales_ptr,  # uint8: a byte for each block of a row
    values_ptr,  # out: as pairs
    group_blocks,  # scales of a group of rows without padding
    padded_blocks,  # scales of a group of rows with padding
    codes_stride,  # from group to group, in bytes / PAIRS
    scales_stride,  # from group to group, in bytes
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Unpacks codes and scales of groups of rows, each group contiguous, and adds the padding."""
    # Sizes and strides are in blocks: so Triton knows their divisors, and loads and stores are as wide as possible.
    PAIRS: tl.constexpr = BLOCK // 2
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    codes_ptr += as_long(tl.program_id(1)) * codes_stride * PAIRS
    scales_ptr += as_long(tl.program_id(1)) * scales_stride
    values_ptr += as_long(tl.program_id(1)) * padded_blocks * PAIRS
    load_mask, store_mask = (block < group_blocks)[:, None], (block < padded_blocks)[:, None]
    byte = tl.load(codes_ptr + offsets, load_mask, 0).to(tl.int32)
    scale = tl.load(scales_ptr + block, block < group_blocks, 0).to(tl.int32)
    scale = scale_from_byte(scale, BLOCK)
    tl.store(values_ptr + offsets, values_of_byte(byte, pack(scale, scale)[:, None]), store_mask)


@triton.jit
def rows_of(row_block, first, end, group_rows, blocks_per_group, BLOCK: tl.constexpr):
    """The rows of the part that are in `row_block`: the first, and the one after the last."""
    group_start = (row_block // blocks_per_group) * group_rows
    begin = group_start + (row_block % blocks_per_group) * BLOCK
    stop = tl.minimum(tl.minimum(begin + BLOCK, group_start + group_rows), end)
    return tl.maximum(begin, first), stop


@triton.jit
def load_pairs(x_ptr, row, offsets, mask, width, FP32: tl.constexpr):
    """Even and odd columns of a row, in FP32, rounded to BF16."""
    pair = tl.load(x_ptr + as_long(row) * width + offsets, mask, 0)
    if FP32:
        pair = rounded_pair(pair)
    return even_of(pair), odd_of(pair)


@triton.jit
def code_of(value, encode):
    """The E2M1 code of value * encode. -0 has code 0; a negative number that is rounded to zero has code 8."""
    return nibble(under_sign(tl.minimum(grid_nearest(tl.abs(value) * encode), 6.0), value))
