"""The order in which Blackwell's tensor cores add the products of an NVFP4 GEMM (`precision.sums=blackwell`).

    p_j     = the exact sum of products 64 j to 64 j + 63, rounded to FP32, to nearest, ties to even
    c_{j+1} = c_j + p_j, rounded to FP32 toward zero; c_0 = 0
    out     = alpha * c in FP32, then rounded to the output's dtype; alpha: the product of both tensor scales
    dW     += alpha * c in one rounding to FP32, to nearest, for the second and later micro-batches

The first two lines are published (arXiv 2609.02846, section "Modeling Observed Native NVFP4 GEMM Outputs"): probes of a
GB200 found them, and they explain 258 of 258 permuted sums. (The report also rounds c to multiples of 1/1024, which
changes none of the 258. Of 512 sums of random codes and scales its own emulation, whose groups are not exact, has 366.)
The last two lines are what CUTLASS's epilogue computes; the report says nothing about additions to an output. alpha is
that of PyTorch's GEMM; Transformer Engine rounds it in another order. Not published, and refused: other formats, and
GEMMs of one NVFP4 and one BF16 operand. Not known: whether a library splits long sums among programs, and the order of
consumer chips (12.x). `scripts/prove_backend.py` reads all this from the card at hand (probes.py).

A rank adds the products of its own slice, beginning with its first. Sums over ranks come afterwards, as for any other
order. The zeros that pad tokens and features are products, too, and change no sum; a last group may be shorter.

Why FP64 holds the sum of a group exactly: an E2M1 code is a multiple of 1/2 and at most 6, an E4M3 scale a multiple of
2^-9 and at most 448. So the products are multiples of 2^-20, and 64 of them add up to less than 2^29: 49 bits.

On an NVIDIA GPU, `kernels/sums.py` computes the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.precision.backend import RowGroups
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Kernel, launch

GROUP = 64
_KERNEL = Kernel("sums.blackwell_kernel")
_BLOCK_M, _BLOCK_N = 64, 64


def blackwell_product(
    a: Tensor,
    b: Tensor,
    alpha: Tensor,
    out_dtype: torch.dtype,
    total: Tensor | None = None,
    groups: RowGroups | None = None,
) -> Tensor:
    """alpha * (a b^T) in Blackwell's order: [m, k] x [n, k] -> [m, n] in `out_dtype`.

    a, b: `code * block scale` of NVFP4, BF16, in blocks of 16 along k. alpha, total, groups: as in `scaled_matmul`.
    """
    (m, k), n = a.shape, b.shape[0]
    kept = m if groups is None else m // groups.padded * groups.kept
    if not cuda.gpu.available(a.device):
        product = sums(a, b)
        product = product if groups is None else groups.unpadded(product)
        if total is None:
            return (alpha * product).to(out_dtype)
        return total.copy_(fma(alpha, product, total))
    assert a.dtype == b.dtype == torch.bfloat16 and m % 16 == n % 16 == k % 16 == 0, "complete blocks of NVFP4"
    out = a.new_empty(kept, n, dtype=out_dtype) if total is None else total
    assert out.shape == (kept, n) and out.is_contiguous() and out.dtype == out_dtype
    padded, of_group = (m, m) if groups is None else (groups.padded, groups.kept)
    launch(
        _KERNEL,
        (-(-m // _BLOCK_M) * -(-n // _BLOCK_N),),
        (a, b, alpha, out, m, n, k, *a.stride(), *b.stride(), padded, of_group),
        {"ADD": total is not None, "BLOCK_M": _BLOCK_M, "BLOCK_N": _BLOCK_N},
    )
    return out


def sums(a: Tensor, b: Tensor) -> Tensor:
    """c of a b^T, [m, k] x [n, k] -> FP32 [m, n], on any device."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for left, right in zip(a.split(GROUP, 1), b.split(GROUP, 1), strict=True):
        group = left.to(torch.float64) @ right.to(torch.float64).t()  # exact in any order
        total = add_toward_zero(total, group.to(torch.float32))
    return total


def add_toward_zero(a: Tensor, b: Tensor) -> Tensor:
    """a + b of FP32 tensors, rounded to FP32 toward zero."""
    total = a + b
    error = _error_of_sum(a, b, total)
    return torch.where(_rounded_away(total, error), torch.nextafter(total, torch.zeros_like(total)), total)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of FP32 tensors, rounded once to FP32, to nearest: first to FP64 and to odd, which makes the second
    rounding harmless (Boldo and Melquiond, IEEE Trans. Computers 57, 2008)."""
    product, c = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)  # 48 bits: exact
    total = product + c
    error = _error_of_sum(product, c, total)
    bits = total.view(torch.int64)
    toward_zero = bits - _rounded_away(total, error).to(torch.int64)
    odd = torch.where((error != 0) & total.isfinite(), toward_zero | 1, bits)
    return odd.view(torch.float64).to(torch.float32)


def _rounded_away(total: Tensor, error: Tensor) -> Tensor:
    """Where rounding moved `total` away from zero. error: `_error_of_sum`."""
    return ((error < 0) & (total > 0)) | ((error > 0) & (total < 0))


def _error_of_sum(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """a + b - total, exactly, where `total` is a + b, rounded to nearest (Knuth's TwoSum)."""
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)
