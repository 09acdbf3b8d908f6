"""The fused kernels' own Python code on a machine without a GPU: everything but the launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_fp4.planning.dry_run import AllocatingGPU
from megatron_fp4.precision import gemm_cuda
from megatron_fp4.precision.backend import RowGroups
from megatron_fp4.quantization import cuda


@contextmanager
def without_launches() -> Iterator[None]:
    """Inside, every tensor says that it is on CUDA, and what would launch a kernel does nothing."""
    with (
        cuda.other_gpu(AllocatingGPU()),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
        mock.patch.object(gemm_cuda, "_cublas", lambda: "a library"),
        mock.patch.object(gemm_cuda, "_gemm_ex", _gemm_ex),
    ):
        yield


def _gemm_ex(
    library: Any,
    a: Tensor,
    b: Tensor,
    alpha: Tensor | None,
    out_dtype: torch.dtype,
    total: Tensor | None,
    groups: RowGroups | None,
) -> Any:
    """As cuBLAS."""
    (a, *_), (b, *_) = gemm_cuda._layout(a), gemm_cuda._layout(b)
    if total is not None:
        return total
    kept = a.shape[0] if groups is None else a.shape[0] // groups.padded * groups.kept
    return a.new_empty(kept, b.shape[1], dtype=out_dtype)
