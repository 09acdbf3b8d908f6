"""The shapes of what the CUDA kernels return, without the kernels: for runs on fake tensors.

Inside `with shapes_only():` linears and loss allocate what they allocate on a GPU (fused quantizers, GEMMs with FP32
results, 4-bit codes kept for wgrad, softmax in place) and compute nothing. What has no kernel of its own there (FP8,
unusual transforms) goes its way through PyTorch, as it does on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_fp4.parallel import cross_entropy
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision import emulated
from megatron_fp4.precision.emulated import GemmOperand, Maker, OperandRequest
from megatron_fp4.quantization.cuda import BLOCKS, PackedColumns, Side


@contextmanager
def shapes_only() -> Iterator[None]:
    """Replace the kernels inside."""
    with ExitStack() as stack:
        for module, name, replacement in (
            (emulated, "fused_operands", _fused_operands),
            (emulated, "gemm", _gemm_like(emulated.gemm)),
            (cross_entropy, "_product", _product),
            (cross_entropy, "_add_product", _add_product),
            (cross_entropy, "_loss_and_gradient", _loss_like(cross_entropy._loss_and_gradient)),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def _fused_operands(
    x: Tensor,
    columns: OperandRequest | None,
    rows: OperandRequest | None,
    *,
    pack_rows: bool = False,
    amax_group: ProcessGroup | None = None,
) -> tuple[Maker | None, Maker | None]:
    """As `emulated.fused_operands`."""
    column_side, row_side = _side(columns, "columns"), _side(rows, "rows")
    if column_side is None and row_side is None:
        return None, None
    x = x.contiguous()
    along_columns = along_rows = None
    for side in {s.format for s in (column_side, row_side) if s is not None}:
        if side == "nvfp4" and amax_group is not None:
            dist.all_reduce(x.new_empty(2, dtype=torch.int32), op=dist.ReduceOp.MAX, group=amax_group)
    scale = x.new_empty(2, dtype=torch.float32)
    if column_side is not None:
        values = torch.empty_like(x, dtype=torch.bfloat16)
        along_columns = GemmOperand(values, scale[0] if column_side.format == "nvfp4" else None, True)
    if row_side is not None:
        made: Tensor | PackedColumns
        if pack_rows:
            block = BLOCKS[row_side.format]
            codes = x.new_empty(x.shape[0] // block, block // 4, x.shape[1] // 2, dtype=torch.int32)
            made = PackedColumns(
                codes, codes.new_empty(codes.shape[0], codes.shape[2], dtype=torch.int16), row_side.format
            )
        else:
            made = torch.empty_like(x, dtype=torch.bfloat16).t()
        along_rows = GemmOperand(made, scale[1] if row_side.format == "nvfp4" else None, True)
    makers = [None if made is None else functools.partial(lambda of: of, made) for made in (along_columns, along_rows)]
    return makers[0], makers[1]


def _side(request: OperandRequest | None, along: str) -> Side | None:
    if request is None or not request.operand.quantized or request.operand.four_over_six:
        return None
    side = Side(request.operand.format, request.operand.block[0], request.rht, request.signs, request.key)
    return side if side.fused(along) else None


def _values(operand: GemmOperand) -> Tensor:
    if isinstance(operand.values, PackedColumns):
        return operand.values.codes.new_empty(operand.values.shape, dtype=torch.bfloat16).t()
    assert isinstance(operand.values, Tensor), "FP8 goes its way through PyTorch on fake tensors"
    return operand.values


def _gemm_like(gemm: object) -> object:
    def shapes_gemm(a: GemmOperand, b: GemmOperand, out_dtype: torch.dtype) -> Tensor:
        left, right = _values(a), _values(b)
        if left.dtype == right.dtype == torch.bfloat16:
            return left.new_empty(left.shape[0], right.shape[0], dtype=out_dtype)
        return gemm(a, b, out_dtype)  # type: ignore[operator]

    return shapes_gemm


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b) if total is None else total


def _loss_like(loss_and_gradient: object) -> object:
    def shapes_loss(logits_tv: Tensor, index_t: Tensor, mesh: ParallelMesh, fused: bool) -> Tensor:
        if not fused:
            return loss_and_gradient(logits_tv, index_t, mesh, fused)  # type: ignore[operator]
        maximum, total, target = (index_t.new_empty(index_t.shape, dtype=torch.float32) for _ in range(3))
        return cross_entropy._over_ranks(maximum, total, target, mesh)[1]

    return shapes_loss
