"""A GEMM of NVFP4 values in the order of Blackwell's tensor cores, which `precision/sums.py` defines.

A dot product of 16 values in BF16 is one block's: the sum of products of E2M1 codes, times both scales. It has at most
20 bits, so tensor cores of any generation compute it exactly in FP32. Its magnitude is at most 576 * 448^2 < 2^26.8.
It is a multiple of a unit u, a quarter of the units of both scales.

Four of them are added in FP32 with their errors (TwoSum). If the errors e add up exactly, the last addition rounds the
exact sum once. They do: they are multiples of the smallest u and add up to 2^5 at most, so FP32 holds their sums if
u >= 2^-19. Otherwise u = 2^-20, one block's scales are at most 15 * 2^-9, and its product is below 1/2, so its pair's
error is, too. Then |e| <= 16, which is 2^24 u:

    a sum of four from 2^28 on   the other three are above 2^25 and multiples of 2^6: only the small product is an error
    a smaller sum                its error is at most 8; that of the other pair is at most 4, or 0 if the pair is 2^27
                                 or more, because both are multiples of 2^4 then
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.quantization.kernels.fp8 import tile_of_program


@triton.jit
def blackwell_kernel(
    a_ptr,  # BF16 values [m, k]
    b_ptr,  # BF16 values [n, k]
    alpha_ptr,  # FP32, one number
    out_ptr,  # in, with ADD, and out: [rows of a without padding, n], BF16 or FP32
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    padded,  # of each `padded` rows of a the first `kept` are in `out`
    kept,
    ADD: tl.constexpr,  # whether to add to `out`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """a [m, k] times the transpose of b [n, k]."""
    rows, columns, a_rows, b_rows = tile_of_program(m, n, BLOCK_M, BLOCK_N)
    a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * stride_am
    b_ptrs = b_ptr + b_rows.to(tl.int64)[None, :] * stride_bn
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, 64):
        first = block_product(a_ptrs, b_ptrs, start, k, stride_ak, stride_bk)
        second = block_product(a_ptrs, b_ptrs, start + 16, k, stride_ak, stride_bk)
        third = block_product(a_ptrs, b_ptrs, start + 32, k, stride_ak, stride_bk)
        fourth = block_product(a_ptrs, b_ptrs, start + 48, k, stride_ak, stride_bk)
        left, left_error = two_sum(first, second)
        right, right_error = two_sum(third, fourth)
        group, error = two_sum(left, right)
        total = add_toward_zero(total, group + (error + (left_error + right_error)))
    mask = ((rows < m) & (rows % padded < kept))[:, None] & (columns < n)[None, :]
    out_rows = rows // padded * kept + rows % padded
    out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * n + columns[None, :]
    alpha = tl.load(alpha_ptr)
    if ADD:
        result = tl.fma(total, alpha, tl.load(out_ptrs, mask, 0.0).to(tl.float32))
    else:
        result = total * alpha
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def block_product(a_ptrs, b_ptrs, start, k, stride_ak, stride_bk):
    """The dot products of 16 values from `start` on, exact; zeros beyond k."""
    place = start + tl.arange(0, 16)
    left = tl.load(a_ptrs + place[None, :] * stride_ak, (place < k)[None, :], 0.0)
    right = tl.load(b_ptrs + place[:, None] * stride_bk, (place < k)[:, None], 0.0)
    return tl.dot(left, right)


@triton.jit
def two_sum(a, b):
    """a + b, rounded to nearest, and its error, which is exact (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


@triton.jit
def add_toward_zero(a, b):
    """a + b in FP32, rounded toward zero."""
    return tl.inline_asm_elementwise("add.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)
