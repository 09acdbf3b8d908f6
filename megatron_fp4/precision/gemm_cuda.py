"""GEMMs of BF16 operands on an NVIDIA GPU with a scale that lives on the device, applied in FP32 before rounding.

    out = (alpha * (a b)) in BF16 or FP32,    alpha = amax_a * amax_b / (36 * 448^2) for NVFP4

alpha comes out of the quantizers as a device scalar: reading it on the host would stall the GPU at every GEMM, and
multiplying it on afterwards costs another pass over the output in FP32. cuBLAS takes it from device memory
(`CUBLAS_POINTER_MODE_DEVICE`), which PyTorch does not offer, so `cublasGemmEx` is called here through PyTorch's own
handle: its stream, its workspace, its library. Partial sums are kept in FP32 (PyTorch's default allows BF16 partial
sums in split-k kernels).

Where cuBLAS cannot be reached this way, `torch.mm` with FP32 output and one scale-and-round pass do the same
arithmetic; a warning says so once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.quantization.fp4_cuda import scale_and_cast

log = logging.getLogger(__name__)

# From cublas_api.h and library_types.h.
_OP_N, _OP_T = 0, 1
_POINTER_MODE_HOST, _POINTER_MODE_DEVICE = 0, 1
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_R_32F, _R_16BF = 0, 14
_COMPUTE_32F, _GEMM_DEFAULT = 68, -1


def scaled_matmul(a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """alpha * (a b): BF16 [m, k] x [k, n] -> [m, n] in `out_dtype` (BF16 or FP32), accumulated in FP32.

    a, b: contiguous along either dimension. alpha: FP32 0-dim on the device; None is 1.
    """
    library = _cublas()
    if library is not None and a.numel() and b.numel():
        return _gemm_ex(library, a, b, alpha, out_dtype)
    product = torch.mm(a, b, out_dtype=torch.float32)
    if alpha is None:
        return product.to(out_dtype)
    return scale_and_cast(product, alpha, out_dtype)


def _gemm_ex(library: ctypes.CDLL, a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    # cuBLAS is column-major: it computes out^T = b^T a^T, and a row-major matrix is its own transpose there.
    (a, op_a, stride_a), (b, op_b, stride_b) = _layout(a), _layout(b)
    (rows, inner), columns = a.shape, b.shape[1]
    device = a.device
    with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
        out = torch.empty(rows, columns, dtype=out_dtype, device=device)
        one, zero = _constants(device)
        handle = torch.cuda.current_blas_handle()
        _check(library.cublasSetPointerMode_v2(handle, _POINTER_MODE_DEVICE), "cublasSetPointerMode")
        try:
            # PyTorch sets the math mode itself each time that it takes the handle.
            _check(library.cublasSetMathMode(handle, _DISALLOW_REDUCED_PRECISION_REDUCTION), "cublasSetMathMode")
            status = library.cublasGemmEx(
                handle, op_b, op_a, columns, rows, inner,
                (one if alpha is None else alpha).data_ptr(),
                b.data_ptr(), _R_16BF, stride_b, a.data_ptr(), _R_16BF, stride_a,
                zero.data_ptr(), out.data_ptr(), _R_16BF if out_dtype == torch.bfloat16 else _R_32F, columns,
                _COMPUTE_32F, _GEMM_DEFAULT,
            )  # fmt: skip
            _check(status, "cublasGemmEx")
        finally:
            library.cublasSetPointerMode_v2(handle, _POINTER_MODE_HOST)
    return out


def _layout(x: Tensor) -> tuple[Tensor, int, int]:
    """The matrix, its operation and its leading dimension as cuBLAS wants them for a row-major reader."""
    rows, columns = x.shape
    if x.stride(1) == 1 and x.stride(0) >= columns:
        return x, _OP_N, x.stride(0)
    if x.stride(0) == 1 and x.stride(1) >= rows:
        return x, _OP_T, x.stride(1)
    return x.contiguous(), _OP_N, columns


def _check(status: int, call: str) -> None:
    if status != 0:
        raise RuntimeError(f"{call} failed with cuBLAS status {status}")


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.ones((), device=device), torch.zeros((), device=device)


@functools.cache
def _cublas() -> ctypes.CDLL | None:
    """The cuBLAS that PyTorch has loaded, or None (with a warning)."""
    name = f"libcublas.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        torch.cuda.current_blas_handle()  # loads it
        library = ctypes.CDLL(name)
        number: Any = ctypes.c_int
        pointer: Any = ctypes.c_void_p
        library.cublasSetPointerMode_v2.argtypes = library.cublasSetMathMode.argtypes = [pointer, number]
        matrix = [pointer, number, number]
        library.cublasGemmEx.argtypes = [pointer, *[number] * 5, pointer, *matrix * 2, pointer, *matrix, number, number]
    except (OSError, AttributeError) as error:
        log.warning("%s cannot be called (%s): GEMMs scale their output in a second pass, equally", name, error)
        return None
    return library
