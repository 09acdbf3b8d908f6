"""Grouped GEMMs of BF16 operands whose rows lie in segments (`quantization/segments.py`), a segment for each expert or
several: y and dx of all experts in one launch, dW of all experts in another.

Sums are FP32. A tensor scale of the segment and one of the expert's weight multiply a sum in FP32, before the one
rounding. No sum is split between programs and nothing is updated atomically, so results repeat.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.kernels.arithmetic import as_long

# Tiles that are neighbours in both directions run at the same time, so that they find each other's data in the cache.
GROUP_M = tl.constexpr(8)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def rows_kernel(
    a_ptr,  # BF16 [padded rows, K]
    b_ptr,  # BF16, [N, K] for each expert
    out_ptr,  # out: BF16 or FP32 [rows, N]
    scale_a_ptr,  # FP32 [segments], with SCALE_A
    scale_b_ptr,  # FP32 [experts], with SCALE_B
    segment_ptr,  # int64 [tiles]: the segment of BLOCK_M rows; num_segments: rows after all of them, which are zero
    starts_ptr,  # int64 [segments + 1]: first row of each segment, end of the last ...
    padded_starts_ptr,  # ... with padding
    tile_starts_ptr,  # ... if all were padded to tiles
    num_rows,
    num_segments,
    num_tiles,
    N,
    K,
    stride_a,
    stride_expert,
    stride_n,
    stride_k,
    SOURCES: tl.constexpr,  # segments of an expert
    SCALE_A: tl.constexpr,
    SCALE_B: tl.constexpr,
    EVEN_N: tl.constexpr,  # whether BLOCK_N divides N
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = scale * (a b^T) for the rows of each segment with its expert's b."""
    across = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * across)
    group_tiles = tl.minimum(num_tiles - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * across)
    tile = group * GROUP_M + within % group_tiles
    column = (within // group_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    segment = tl.load(segment_ptr + tile)
    row = tile * BLOCK_M - tl.load(tile_starts_ptr + segment) + tl.arange(0, BLOCK_M)
    start = tl.load(starts_ptr + segment)
    count = tl.load(starts_ptr + segment + 1, segment < num_segments, num_rows) - start
    expert = segment % (num_segments // SOURCES)
    inner = tl.arange(0, BLOCK_K)
    a_row = tl.load(padded_starts_ptr + segment) + tl.minimum(row, count - 1)
    a_ptrs = a_ptr + (a_row * stride_a)[:, None] + inner[None, :]
    b_ptrs = b_ptr + expert * stride_expert + as_long(column * stride_n)[None, :] + as_long(inner * stride_k)[:, None]
    column_mask = (column < N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, tl.where(segment < num_segments, K, 0), BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, (inner < K - k)[None, :], 0.0)
        if EVEN_N and EVEN_K:
            b = tl.load(b_ptrs)
        else:
            b = tl.load(b_ptrs, column_mask & (inner < K - k)[:, None], 0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += as_long(BLOCK_K * stride_k)
    if SCALE_A or SCALE_B:
        acc = acc * scale_of(scale_a_ptr, scale_b_ptr, segment, expert, SCALE_A, SCALE_B, segment < num_segments)
    out_ptrs = out_ptr + ((start + row) * N)[:, None] + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), (row < count)[:, None] & column_mask)


@triton.jit
def weights_kernel(
    a_ptr,  # BF16 [padded rows, M]
    b_ptr,  # BF16 [padded rows, N]
    out_ptr,  # out: FP32 [experts, M, N]
    scale_a_ptr,  # FP32 [segments], with SCALE_A
    scale_b_ptr,  # FP32 [segments], with SCALE_B
    padded_starts_ptr,  # int64 [segments + 1]
    M,
    N,
    stride_a,
    stride_b,
    SOURCES: tl.constexpr,
    SCALE_A: tl.constexpr,
    SCALE_B: tl.constexpr,
    ADD: tl.constexpr,  # to what `out` holds
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = the sum of scale * (a^T b) over the segments of each expert, one after another."""
    across = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * across
    expert = as_long(tl.program_id(0) // tiles)
    tile = tl.program_id(0) % tiles
    row = (tile // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tile % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = row < M, column < N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for source in range(SOURCES):
        segment = source * (tl.num_programs(0) // tiles) + expert
        start = tl.load(padded_starts_ptr + segment)
        size = (tl.load(padded_starts_ptr + segment + 1) - start).to(tl.int32)
        inner = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + start * stride_a + as_long(inner * stride_a)[None, :] + row[:, None]
        b_ptrs = b_ptr + start * stride_b + as_long(inner * stride_b)[:, None] + column[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, size, BLOCK_K):
            inner_mask = inner < size - k
            a = tl.load(a_ptrs, row_mask[:, None] & inner_mask[None, :], 0.0)
            b = tl.load(b_ptrs, column_mask[None, :] & inner_mask[:, None], 0.0)
            acc = tl.dot(a, b, acc)
            a_ptrs += as_long(BLOCK_K * stride_a)
            b_ptrs += as_long(BLOCK_K * stride_b)
        if SCALE_A or SCALE_B:  # an empty segment has no scale
            acc = acc * scale_of(scale_a_ptr, scale_b_ptr, segment, segment, SCALE_A, SCALE_B, size > 0)
        total = acc if SOURCES == 1 else total + acc
    out_ptrs = out_ptr + (expert * M + row)[:, None] * N + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    if ADD:
        total += tl.load(out_ptrs, mask, 0.0)
    tl.store(out_ptrs, total, mask)


@triton.jit
def scale_of(a_ptr, b_ptr, a_index, b_index, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, mask):
    """The product of the two scales that are there; 1 without `mask`."""
    if SCALE_A and SCALE_B:
        return tl.load(a_ptr + a_index, mask, 1.0) * tl.load(b_ptr + b_index, mask, 1.0)
    if SCALE_A:
        return tl.load(a_ptr + a_index, mask, 1.0)
    return tl.load(b_ptr + b_index, mask, 1.0)
