"""The emulated backend as an NVIDIA GPU runs it, for runs on fake tensors: it allocates and computes nothing.

Operands go through the fused quantizers' own code, on a GPU whose kernels do nothing. What those do not make
(four-over-six, unusual transforms, FP32 activations) goes through PyTorch, as it does on a GPU.
tests/planning/test_backend.py compares it with the emulated backend on tensors that say they are on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.precision.backend import RowGroups
from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand, gemm
from megatron_fp4.precision.gemm_cuda import computed_alone
from megatron_fp4.quantization import cuda

MULTIPROCESSORS = 132  # of an H100 or H200


class AllocatingGPU(cuda.NvidiaGPU):
    """An H100 or H200 whose quantization kernels do nothing."""

    def available(self, device: torch.device) -> bool:
        """They all are."""
        return True

    def aligned(self, x: Tensor) -> bool:
        """As new tensors are."""
        return True

    def multiprocessors(self, device: torch.device) -> int:
        """Some kernels' grids depend on it."""
        return MULTIPROCESSORS

    def zeros(self, device: torch.device) -> Tensor:
        """By themselves: of many made at once, the rest would outlive a fake tensor's mode."""
        return torch.zeros(2, dtype=torch.int32, device=device)

    def start(
        self, kernel: cuda.Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Nothing."""


class PlanningBackend(EmulatedBackend):
    """Products that are allocated as on a GPU."""

    def gemm(
        self,
        a: GemmOperand,
        b: GemmOperand,
        out_dtype: torch.dtype,
        total: Tensor | None = None,
        rows: RowGroups | None = None,
    ) -> Tensor:
        """Codes become values, as for cuBLAS; then the product is allocated."""
        return gemm(a, b, out_dtype, total, rows, scaled_matmul=_allocated)


@contextmanager
def planned_gpu() -> Iterator[PlanningBackend]:
    """Inside, tensors are on an H100 or H200 that allocates and computes nothing; a linear's backend there."""
    with cuda.on(AllocatingGPU()):
        yield PlanningBackend()


def _allocated(
    left: Tensor,
    right: Tensor,
    alpha: Tensor | None,
    out_dtype: torch.dtype,
    total: Tensor | None,
    rows: RowGroups | None,
) -> Tensor:
    """As `gemm_cuda.scaled_matmul`: cuBLAS, which reads rows or columns that are in one piece."""
    left, right = (x if 1 in x.stride() else x.contiguous() for x in (left, right))
    if rows is not None and not computed_alone(rows):
        product = left.new_empty(left.shape[0], right.shape[1], dtype=out_dtype)
        return rows.of(product) if total is None else total
    if total is not None:
        return total
    size = left.shape[0] if rows is None else left.shape[0] // rows.padded * rows.kept
    return left.new_empty(size, right.shape[1], dtype=out_dtype)
