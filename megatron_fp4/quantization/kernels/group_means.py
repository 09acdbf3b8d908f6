"""The kernel of means over groups of tokens, bit for bit `group_means.py`, which says what it makes of what.

Bound by memory: a program has one group of tokens by COLUMNS features, reads it twice, the second time out of the
cache, and writes its means and what is left of it. Sums that round are written as the reference's: 16 lanes, each added
up one token after another, then by halves.
"""

# ruff: noqa: D103 (kernels are documented by their arguments)
# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.kernels.arithmetic import as_long


@triton.jit(do_not_specialize=["share"])
def split_kernel(
    x_ptr,  # BF16 [groups * SIZE, features]
    means_ptr,  # out: BF16 [groups, features]
    rest_ptr,  # out with REST: BF16 [groups * SIZE, features]
    features,  # specialized: of multiples of 16 rows are known to begin where 16 bytes are loaded at a time
    share,  # 1 / SIZE
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    across = tl.cdiv(features, COLUMNS)
    group = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    offsets = tl.arange(0, 16)[:, None] * features + column[None, :]
    mask = (column < features)[None, :]
    start = as_long(group) * SIZE * features
    lanes = tl.load(x_ptr + start + offsets, mask, 0.0).to(tl.float32)
    for i in range(1, SIZE // 16):
        lanes += tl.load(x_ptr + start + as_long(i) * 16 * features + offsets, mask, 0.0).to(tl.float32)
    half = tl.sum(tl.reshape(lanes, [2, 8, COLUMNS]), 0)
    half = tl.sum(tl.reshape(half, [2, 4, COLUMNS]), 0)
    half = tl.sum(tl.reshape(half, [2, 2, COLUMNS]), 0)
    mean = (tl.sum(half, 0) * share).to(tl.bfloat16)
    tl.store(means_ptr + as_long(group) * features + column, mean, column < features)
    if REST:
        taken = mean.to(tl.float32)[None, :]
        for i in range(0, SIZE // 16):
            place = start + as_long(i) * 16 * features + offsets
            rest = tl.load(x_ptr + place, mask, 0.0).to(tl.float32) - taken
            tl.store(rest_ptr + place, rest.to(tl.bfloat16), mask)
