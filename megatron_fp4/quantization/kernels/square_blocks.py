"""The kernels of 4-bit weights in square blocks, bit for bit `square_blocks.py`, which says what they make of what.

    maxima     a part's rows -> the largest magnitude of each block, [blocks, columns / BLOCK]
    quantize   a part's rows and the maxima -> codes and scales
    unpack     codes and scales -> values in BF16, with padding between groups of rows

All are bound by memory. The unit of data is a pair of neighbouring columns, a byte of codes; a program of the first two
works on one block of rows, cut off where the part or its group of rows ends, by GROUPS blocks of columns. Rows of x may
be FP32, and count as rounded to BF16 then. `unpack` sees codes and scales as flat: a block's columns are PAIRS bytes of
codes and one scale, whichever row they are in.

As in `fp4.py`: IEEE division, no flushing of subnormals, no contraction into FMA; sums that round are written as
the reference's.
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
    nan_min,
    nearest_e4m3,
    odd_of,
    pack,
    scale_byte,
    scale_from_byte,
    values_of_byte,
)


@triton.jit(
    do_not_specialize=["num_groups", "first", "end", "group_rows", "blocks_per_group", "first_block", "num_blocks"]
)
def maxima_kernel(
    x_ptr,  # [rows, columns] as pairs: the part's rows
    maxima_ptr,  # out: FP32 [blocks, columns / BLOCK]
    num_groups,  # columns / BLOCK
    first,  # the part's first row in the weight, and the one after its last
    end,
    group_rows,
    blocks_per_group,
    first_block,
    num_blocks,
    BLOCK: tl.constexpr,
    FP32: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A part's rows of x [rows, columns] and the blocks that they belong to."""
    PAIRS: tl.constexpr = BLOCK // 2
    across = tl.cdiv(num_groups, GROUPS)
    group = (tl.program_id(0) % across) * GROUPS + tl.arange(0, GROUPS)
    block = tl.program_id(0) // across
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    mask = (group < num_groups)[:, None]
    begin, stop = rows_of(first_block + block, first, end, group_rows, blocks_per_group, BLOCK)
    largest = tl.zeros([GROUPS, PAIRS], tl.float32)
    for r in tl.static_range(BLOCK):
        even, odd = load_pairs(x_ptr, begin + r - first, offsets, mask & (begin + r < stop), num_groups * PAIRS, FP32)
        largest = nan_max(largest, nan_max(tl.abs(even), tl.abs(odd)))
    tl.store(maxima_ptr + as_long(block) * num_groups + group, tl.reduce(largest, 1, nan_max), group < num_groups)


@triton.jit(
    do_not_specialize=["num_groups", "first", "end", "group_rows", "blocks_per_group", "first_block", "num_blocks"]
)
def quantize_kernel(
    x_ptr,  # [rows, columns] as pairs: the part's rows
    maxima_ptr,  # FP32 [blocks, columns / BLOCK]
    amax_ptr,  # FP32 [1], of the tensor; not read for MXFP4
    codes_ptr,  # out: uint8 [rows, columns / 2]
    scales_ptr,  # out: uint8 [rows, columns / BLOCK]
    num_groups,
    first,
    end,
    group_rows,
    blocks_per_group,
    first_block,
    num_blocks,
    BLOCK: tl.constexpr,
    FP32: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A part's rows of x [rows, columns], quantized under the maxima of their blocks."""
    PAIRS: tl.constexpr = BLOCK // 2
    across = tl.cdiv(num_groups, GROUPS)
    group = (tl.program_id(0) % across) * GROUPS + tl.arange(0, GROUPS)
    block = tl.program_id(0) // across
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    there = group < num_groups
    width = num_groups * PAIRS
    begin, stop = rows_of(first_block + block, first, end, group_rows, blocks_per_group, BLOCK)
    largest = tl.load(maxima_ptr + as_long(block) * num_groups + group, there, 0)
    if BLOCK == 16:
        tensor_scale = nan_min(tl.div_rn(2688.0, tl.load(amax_ptr)), 3.4028234663852886e38)
        tensor_scale = tl.where(tensor_scale == 0.0, 1.0, tensor_scale)
        scale = nearest_e4m3(nan_min(largest * (tensor_scale * 0.1666666716337204), 448.0))
        encode = nan_min(tl.div_rn(1.0, scale * tl.div_rn(1.0, tensor_scale)), 3.4028234663852886e38)
    else:
        scale, encode = block_scale(largest, 1.0, 1.0, BLOCK)
    byte = scale_byte(scale, BLOCK).to(tl.uint8)
    encode = encode[:, None]
    for r in tl.static_range(BLOCK):
        row, valid = begin + r - first, begin + r < stop
        mask = there[:, None] & valid
        even, odd = load_pairs(x_ptr, row, offsets, mask, width, FP32)
        codes = code_of(even, encode) | (code_of(odd, encode) << 4)
        tl.store(codes_ptr + as_long(row) * width + offsets, codes.to(tl.uint8), mask)
        tl.store(scales_ptr + as_long(row) * num_groups + group, byte, there & valid)


@triton.jit(do_not_specialize=["group_blocks", "padded_blocks", "codes_stride", "scales_stride"])
def unpack_kernel(
    codes_ptr,  # uint8: a byte for a pair
    scales_ptr,  # uint8: a byte for a block of a row
    values_ptr,  # out: as pairs
    group_blocks,  # blocks of all rows of a group without padding
    padded_blocks,  # and with it
    codes_stride,  # from group to group, in bytes / PAIRS
    scales_stride,  # in bytes
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Codes and scales of groups of rows, each group in one piece."""
    # Sizes in whole blocks: loads and stores are as wide as they can be.
    PAIRS: tl.constexpr = BLOCK // 2
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    offsets = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    codes_ptr += as_long(tl.program_id(1)) * codes_stride * PAIRS
    scales_ptr += as_long(tl.program_id(1)) * scales_stride
    values_ptr += as_long(tl.program_id(1)) * padded_blocks * PAIRS
    there, stored = (group < group_blocks)[:, None], (group < padded_blocks)[:, None]
    byte = tl.load(codes_ptr + offsets, there, 0).to(tl.int32)
    scale = tl.load(scales_ptr + group, group < group_blocks, 0).to(tl.int32)
    scale = scale_from_byte(scale, BLOCK)
    tl.store(values_ptr + offsets, values_of_byte(byte, pack(scale, scale)[:, None]), stored)


@triton.jit
def rows_of(block, first, end, group_rows, blocks_per_group, BLOCK: tl.constexpr):
    """The rows of the part that are in a block: the first, and the one after the last."""
    start = (block // blocks_per_group) * group_rows
    begin = start + (block % blocks_per_group) * BLOCK
    stop = tl.minimum(tl.minimum(begin + BLOCK, start + group_rows), end)
    return tl.maximum(begin, first), stop


@triton.jit
def load_pairs(x_ptr, row, offsets, mask, width, FP32: tl.constexpr):
    """Even and odd columns of a row, FP32 numbers that BF16 holds."""
    both = tl.load(x_ptr + as_long(row) * width + offsets, mask, 0)
    if FP32:
        even = both.to(tl.int32).to(tl.float32, bitcast=True).to(tl.bfloat16).to(tl.float32)
        odd = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True).to(tl.bfloat16).to(tl.float32)
    else:
        even = even_of(both)
        odd = odd_of(both)
    return even, odd


@triton.jit
def code_of(value, encode):
    """The E2M1 code of a number; a negative zero has no sign, and a negative number that becomes zero has one."""
    grid = tl.minimum(grid_nearest(tl.abs(value) * encode), 6.0)
    code = tl.where(grid < 2.0, grid * 2.0, tl.where(grid < 4.0, grid + 2.0, grid * 0.5 + 4.0)).to(tl.int32)
    return code | tl.where(value < 0.0, 8, 0)
