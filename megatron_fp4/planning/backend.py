"""The emulated backend as an NVIDIA GPU runs it, for runs on fake tensors: it allocates and computes nothing.

Operands go through the fused quantizers' own code, on a GPU whose kernels do nothing. What those do not make
(four-over-six, unusual transforms, FP32 activations) goes through PyTorch, as it does on a GPU.
tests/planning/test_backend.py compares it with the emulated backend on tensors that say they are on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.backend import OperandRequest, RowGroups
from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand, MakeOperand, gemm
from megatron_fp4.precision.gemm_cuda import computed_alone
from megatron_fp4.precision.packed_weight import CodesOfWeight
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.square_blocks import RowBlocks

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

    def start(self, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Nothing."""


_GPU = AllocatingGPU()


class PlanningBackend(EmulatedBackend):
    """Operands and products that are allocated as on a GPU."""

    def operands(
        self,
        x: Tensor,
        columns: OperandRequest | None,
        rows: OperandRequest | None,
        *,
        dtype: torch.dtype,
        keep_columns: bool = False,
        keep_rows: bool = False,
        amax_group: dist.ProcessGroup | None = None,
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """Those that the fused kernels make are allocated, the others are made by PyTorch."""
        with cuda.on(_GPU):
            makers = super().operands(
                x,
                columns,
                rows,
                dtype=dtype,
                keep_columns=keep_columns,
                keep_rows=keep_rows,
                amax_group=amax_group,
            )
        first, second = (None if make is None else _on_gpu(make) for make in makers)
        return first, second

    def requantized(
        self,
        operand: GemmOperand,
        request: OperandRequest,
        *,
        dtype: torch.dtype,
        keep: bool = False,
        amax_group: dist.ProcessGroup | None = None,
    ) -> MakeOperand:
        """As the emulation on a GPU."""
        with cuda.on(_GPU):
            return super().requantized(operand, request, dtype=dtype, keep=keep, amax_group=amax_group)

    def packed_weight(
        self, w: Tensor, request: OperandRequest, *, rows: tuple[int, int], amax_group: dist.ProcessGroup | None = None
    ) -> GemmOperand | None:
        """As the emulation on a GPU."""
        with cuda.on(_GPU):
            return super().packed_weight(w, request, rows=rows, amax_group=amax_group)

    def rows_maxima(self, x: Tensor, blocks: RowBlocks, out: Tensor | None, *, dtype: torch.dtype) -> Tensor:
        """As the emulation on a GPU."""
        with cuda.on(_GPU):
            return super().rows_maxima(x, blocks, out, dtype=dtype)

    def pack_rows(
        self,
        x: Tensor,
        blocks: RowBlocks,
        maxima: Tensor,
        amax: Tensor | None,
        out: tuple[Tensor, Tensor],
        *,
        dtype: torch.dtype,
    ) -> None:
        """As the emulation on a GPU."""
        with cuda.on(_GPU):
            super().pack_rows(x, blocks, maxima, amax, out, dtype=dtype)

    def gathered_weight(self, gathered: CodesOfWeight) -> GemmOperand:
        """Codes."""
        with cuda.on(_GPU):
            return super().gathered_weight(gathered)

    def gemm(
        self,
        a: GemmOperand,
        b: GemmOperand,
        out_dtype: torch.dtype,
        total: Tensor | None = None,
        rows: RowGroups | None = None,
    ) -> Tensor:
        """Codes become values, as for cuBLAS; then the product is allocated."""
        with cuda.on(_GPU):
            return gemm(a, b, out_dtype, total, rows, scaled_matmul=_allocated)


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


def _on_gpu(make: MakeOperand) -> MakeOperand:
    def made() -> GemmOperand:
        with cuda.on(_GPU):
            return make()

    return made
