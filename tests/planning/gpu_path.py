"""The fused kernels' own Python code on a machine without a GPU: everything but the launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_fp4.precision import emulated, gemm_cuda
from megatron_fp4.quantization import cuda, fp8_cuda, mxfp8_cuda


@contextmanager
def without_launches() -> Iterator[None]:
    """Inside, every tensor says that it is on CUDA, and what would launch a kernel does nothing."""
    with ExitStack() as stack:
        for module, name, replacement in (
            (torch.Tensor, "is_cuda", property(lambda _: True)),
            (torch.Tensor, "data_ptr", lambda _: 0),  # aligned
            (torch.cuda, "device", lambda _: nullcontext()),
            (emulated, "_kernels_available", lambda _: True),
            (cuda, "_start", lambda *_: None),
            (cuda, "_processors", lambda _: 132),
            (cuda, "_sign_bits", lambda _: 0),
            (fp8_cuda, "_kernels", _NoKernels),
            (mxfp8_cuda, "_kernels", _NoKernels),
            (gemm_cuda, "scaled_matmul", _scaled_matmul),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


class _NoKernels:
    """A module of Triton kernels: `_NoKernels().any_name[grid](...)` does nothing."""

    def __getattr__(self, name: str) -> _NoKernels:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: None


def _scaled_matmul(a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Any:
    """As `gemm_cuda.scaled_matmul` by cuBLAS."""
    (a, *_), (b, *_) = gemm_cuda._layout(a), gemm_cuda._layout(b)
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
