"""GEMMs of BF16 operands on an NVIDIA GPU with a scale in device memory, applied in FP32 before rounding.

    out = (alpha * (a b)) in BF16 or FP32,    alpha = amax_a * amax_b / (36 * 448^2) for NVFP4
    total += alpha * (a b) in FP32,           rounded once: the weight gradient of later micro-batches

The quantizers return alpha as a scalar on the device. Reading it on the host would stall the GPU at every GEMM, and
multiplying by it after the GEMM would take another pass over the output in FP32. cuBLAS can read it from device memory
(`CUBLAS_POINTER_MODE_DEVICE`), but PyTorch does not offer this. So this file calls `cublasGemmEx` with PyTorch's own
handle, and thus its stream, workspace and library. Partial sums are kept in FP32 (PyTorch's default allows BF16 partial
sums in split-k kernels). If cuBLAS cannot be called in this way, the same arithmetic is done by `torch.mm` with FP32
output, a multiplication by alpha and a rounding; a warning says so once.

If equal groups of rows of `a` end in padding, a batched GEMM with one matrix per group leaves it out and writes where
the gradient is, without a copy. For groups of a number of rows that 8 does not divide (the 12B's 2836), cuBLAS uses
kernels for old tensor cores (25 ms for 16,384 tokens; 5 at the rate of other GEMMs); then padding is computed too.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.precision.backend import RowGroups, added
from megatron_fp4.quantization import cuda

log = logging.getLogger(__name__)

# From cublas_api.h and library_types.h.
_OP_N, _OP_T = 0, 1
_POINTER_MODE_HOST, _POINTER_MODE_DEVICE = 0, 1
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_R_32F, _R_16BF = 0, 14
_COMPUTE_32F, _GEMM_DEFAULT = 68, -1

Matrix = tuple[Tensor, int, int]  # the tensor, cuBLAS's operation, the leading dimension


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    alpha: Tensor | None,
    out_dtype: torch.dtype,
    total: Tensor | None = None,
    groups: RowGroups | None = None,
) -> Tensor:
    """alpha * (a b): BF16 [m, k] x [k, n] -> [m, n] in `out_dtype` (BF16 or FP32), accumulated in FP32.

    a, b: contiguous along one of their dimensions. alpha: FP32 0-dim on the device; None: 1. total: contiguous [m, n]
    in `out_dtype`, to which the product is added in place. groups: those of a's rows; the product leaves their padding
    out, and m counts the other rows. Raises RuntimeError if cuBLAS returns an error.
    """
    if groups is not None:
        if groups.kept % 8:  # computed with the padding
            return added(scaled_matmul(a, b, alpha, out_dtype), total, groups)
        a = a.unflatten(0, (-1, groups.padded))[:, : groups.kept]
    shape = a.shape[:-1].numel(), b.shape[1]
    out = a.new_empty(shape, dtype=out_dtype) if total is None else total
    assert out.shape == shape and out.is_contiguous() and out.dtype == out_dtype
    multiply_into(out.view(*a.shape[:-1], -1), a, b, alpha, accumulate=total is not None)
    return out


def multiply_into(out: Tensor, a: Tensor, b: Tensor, alpha: Tensor | None, accumulate: bool = False) -> None:
    """out = alpha * (a b), or out += alpha * (a b), as `scaled_matmul`. a: [m, k], or [batch, m, k]. out: [m, n], or
    [batch, m, n], whose rows lie one after the other in each [m, n]."""
    assert out.stride(-1) == 1 and out.stride(-2) == out.shape[-1]
    cuda.gpu.call(_multiply, out, _layout(a), _layout(b), alpha, accumulate)


def _multiply(out: Tensor, left: Matrix, right: Matrix, alpha: Tensor | None, accumulate: bool) -> None:
    (a, op_a, stride_a), (b, op_b, stride_b), library = left, right, _cublas()
    if library is None or not a.numel() or not b.numel():
        product = torch.mm(a.reshape(-1, a.shape[-1]), b, out_dtype=torch.float32)
        product = (product if alpha is None else product.mul_(alpha)).to(out.dtype).view(out.shape)
        out.add_(product) if accumulate else out.copy_(product)
        return
    # cuBLAS is column-major and reads a row-major matrix as its transpose: it computes out^T = b^T a^T.
    (num_rows, inner), columns = a.shape[-2:], b.shape[1]
    one, zero = _constants(a.device)
    kind = _R_16BF if out.dtype == torch.bfloat16 else _R_32F
    factors = (one if alpha is None else alpha).data_ptr(), (one if accumulate else zero).data_ptr()
    handle = torch.cuda.current_blas_handle()
    _check(library.cublasSetPointerMode_v2(handle, _POINTER_MODE_DEVICE), "cublasSetPointerMode")
    try:
        # PyTorch sets the math mode again each time that it uses the handle.
        _check(library.cublasSetMathMode(handle, _DISALLOW_REDUCED_PRECISION_REDUCTION), "cublasSetMathMode")
        if a.dim() == 2:
            status = library.cublasGemmEx(
                handle, op_b, op_a, columns, num_rows, inner, factors[0],
                b.data_ptr(), _R_16BF, stride_b, a.data_ptr(), _R_16BF, stride_a,
                factors[1], out.data_ptr(), kind, columns, _COMPUTE_32F, _GEMM_DEFAULT,
            )  # fmt: skip
        else:
            status = library.cublasGemmStridedBatchedEx(
                handle, op_b, op_a, columns, num_rows, inner, factors[0],
                b.data_ptr(), _R_16BF, stride_b, 0, a.data_ptr(), _R_16BF, stride_a, a.stride(0),
                factors[1], out.data_ptr(), kind, columns, out.stride(0), len(a), _COMPUTE_32F, _GEMM_DEFAULT,
            )  # fmt: skip
        _check(status, "cublasGemmEx" if a.dim() == 2 else "cublasGemmStridedBatchedEx")
    finally:
        library.cublasSetPointerMode_v2(handle, _POINTER_MODE_HOST)


def _layout(x: Tensor) -> Matrix:
    """`x` as a row-major matrix, or a batch of them, for cuBLAS; a copy if neither dimension is contiguous."""
    rows, columns = x.shape[-2:]
    if x.stride(-1) == 1 and x.stride(-2) >= columns:
        return x, _OP_N, x.stride(-2)
    if x.stride(-2) == 1 and x.stride(-1) >= rows:
        return x, _OP_T, x.stride(-1)
    return x.contiguous(), _OP_N, columns


def _check(status: int, call: str) -> None:
    if status != 0:
        raise RuntimeError(f"{call} failed with cuBLAS status {status}")


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.ones((), device=device), torch.zeros((), device=device)


@functools.cache
def _cublas() -> ctypes.CDLL | None:
    """The cuBLAS library that PyTorch has loaded; None, with a warning, if it cannot be called."""
    name = f"libcublas.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        torch.cuda.current_blas_handle()  # loads it
        library = ctypes.CDLL(name)
        number: Any = ctypes.c_int
        pointer: Any = ctypes.c_void_p
        library.cublasSetPointerMode_v2.argtypes = library.cublasSetMathMode.argtypes = [pointer, number]
        matrix = [pointer, number, number]
        library.cublasGemmEx.argtypes = [pointer, *[number] * 5, pointer, *matrix * 2, pointer, *matrix, number, number]
        matrices = [*matrix, ctypes.c_longlong]
        library.cublasGemmStridedBatchedEx.argtypes = [
            pointer, *[number] * 5, pointer, *matrices * 2, pointer, *matrices, number, number, number
        ]  # fmt: skip
    except (OSError, AttributeError) as error:
        log.warning("%s cannot be called (%s): GEMMs scale their output in a second pass; same result", name, error)
        return None
    return library
