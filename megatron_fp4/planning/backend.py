"""The emulated backend as an NVIDIA GPU runs it, for runs on fake tensors: it allocates and computes nothing.

Every tensor that `quantization/cuda.py`, `fp8_cuda.py` and `mxfp8_cuda.py` allocate around their kernels is allocated
here, of the same shape and dtype and for as long; tests/planning/test_backend.py compares the two byte by byte. What
those do not make (four-over-six, unusual transforms, FP32 activations) goes through PyTorch, as it does on a GPU.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand, MakeOperand, codes_transpose
from megatron_fp4.quantization.cuda import BLOCKS, PackedColumns, Side
from megatron_fp4.quantization.fp8_cuda import BlockScaled
from megatron_fp4.quantization.mxfp8_cuda import PackedMXFP8

_BF16 = torch.bfloat16


class PlanningBackend(EmulatedBackend):
    """Operands and products that are allocated as on a GPU."""

    def operands(
        self,
        x: Tensor,
        columns: OperandRequest | None,
        rows: OperandRequest | None,
        *,
        dtype: torch.dtype,
        keep_rows: bool = False,
        amax_group: dist.ProcessGroup | None = None,
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """Those that the fused kernels make are allocated, the others are made by PyTorch."""
        plain = super().operands(x, columns, rows, dtype=dtype, keep_rows=keep_rows, amax_group=amax_group)
        if dtype != _BF16:
            return plain
        along_columns, along_rows = _eight_bits(x, columns, False, False), _eight_bits(x, rows, True, keep_rows)
        columns = columns if _in_four_bits(columns, "columns") else None
        if rows is not None and codes_transpose(rows) and _in_four_bits(rows, "columns"):
            # The kernels make square blocks along the columns.
            square = _Measured(x, rows, None, amax_group)
            along_rows, rows = lambda: square.along_columns().transposed(), None
        rows = rows if _in_four_bits(rows, "rows") else None
        if columns is not None and rows is not None and columns.operand.format == rows.operand.format:
            measured = _Measured(x, columns, rows, amax_group)
            along_columns, along_rows = measured.along_columns, functools.partial(measured.along_rows, keep_rows)
        else:
            if columns is not None:
                along_columns = _Measured(x, columns, None, amax_group).along_columns
            if rows is not None:
                along_rows = functools.partial(_Measured(x, None, rows, amax_group).along_rows, keep_rows)
        return along_columns or plain[0], along_rows or plain[1]

    def gemm(self, a: GemmOperand, b: GemmOperand, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        """Codes become values, as for cuBLAS; then the product is allocated."""
        assert total is None, "this backend does not add to gradients"
        if isinstance(a.values, BlockScaled) and isinstance(b.values, BlockScaled):
            codes_a, codes_b = a.values.codes.to(_BF16), b.values.codes.to(_BF16)
            return codes_a.new_empty(codes_a.shape[0], codes_b.shape[0], dtype=out_dtype)
        left, right = _values(a), _values(b).t()
        if not a.quantized and not b.quantized and out_dtype == left.dtype:
            return left @ right
        alpha = a.scale if b.scale is None else b.scale if a.scale is None else a.scale * b.scale
        if not left.dtype == right.dtype == _BF16:
            return (left.to(torch.float32) @ right.to(torch.float32)).to(out_dtype)
        if alpha is None and not (a.quantized and b.quantized):
            return torch.mm(left, right, out_dtype=torch.float32).to(out_dtype)
        # cuBLAS, with alpha on the device; it reads rows or columns that are in one piece.
        left, right = (x if 1 in x.stride() else x.contiguous() for x in (left, right))
        return left.new_empty(left.shape[0], right.shape[1], dtype=out_dtype)


class _Measured:
    """What `quantization.cuda.Measured` allocates for `x` [rows, columns] whose operands are to be made."""

    def __init__(
        self, x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None, group: dist.ProcessGroup | None
    ) -> None:
        requests = [request for request in (columns, rows) if request is not None]
        self.x, self.format = x.contiguous(), requests[0].operand.format
        nvfp4 = self.format == "nvfp4"
        self.columns_scale = torch.empty((), device=x.device) if nvfp4 and columns is not None else None
        self.rows_scale = torch.empty((), device=x.device) if nvfp4 and rows is not None else None
        self.maxima = torch.zeros(2, dtype=torch.int32, device=x.device) if nvfp4 else None
        if any(request.key is not None for request in requests):
            self.hashes = torch.empty(3 * sum(x.shape) // 2, dtype=torch.int32, device=x.device)
        if self.maxima is not None and group is not None:
            dist.all_reduce(self.maxima, op=dist.ReduceOp.MAX, group=group)

    def along_columns(self) -> GemmOperand:
        return GemmOperand(torch.empty_like(self.x, dtype=_BF16), self.columns_scale, True)

    def along_rows(self, keep: bool) -> GemmOperand:
        """keep: as codes of 4 bits."""
        if not keep:
            return GemmOperand(torch.empty_like(self.x, dtype=_BF16).t(), self.rows_scale, True)
        block = BLOCKS[self.format]
        tiles, pairs = self.x.shape[0] // block, self.x.shape[1] // 2
        codes = self.x.new_empty(tiles, block // 4, pairs, dtype=torch.int32)
        scales = self.x.new_empty(tiles, pairs, dtype=torch.int16)
        return GemmOperand(PackedColumns(codes, scales, self.format), self.rows_scale, True)


def _in_four_bits(request: OperandRequest | None, along: str) -> bool:
    """Whether the fused kernels make this operand in NVFP4 or MXFP4."""
    if request is None or not request.operand.quantized or request.operand.four_over_six:
        return False
    return Side(request.operand.format, request.operand.block[0], request.rht, request.signs, request.key).fused(along)


def _eight_bits(x: Tensor, request: OperandRequest | None, along_rows: bool, keep: bool) -> MakeOperand | None:
    """What makes the operand in FP8 or MXFP8, if that is its format and the fused kernels make it."""
    if request is None or request.rht or request.key is not None:
        return None
    make = {"fp8": _fp8, "mxfp8": _mxfp8}.get(request.operand.format)
    return None if make is None else functools.partial(make, x, request, along_rows, keep)


def _fp8(x: Tensor, request: OperandRequest, along_rows: bool, keep: bool) -> GemmOperand:
    """As `quantize_fp8_fused`."""
    operand, x = request.operand, x.contiguous()
    one_byte = keep and not operand.power_of_two_scales
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn if one_byte else _BF16)
    rows, columns = (128, operand.block[0]) if along_rows else (operand.block[0], 128)
    scales = x.new_empty(x.shape[0] // rows, x.shape[1] // columns, dtype=torch.float32)
    if along_rows:
        out, scales = out.t(), scales.t()
    return GemmOperand(out if operand.power_of_two_scales else BlockScaled(out, scales, operand.block[0]), None, True)


def _mxfp8(x: Tensor, request: OperandRequest, along_rows: bool, keep: bool) -> GemmOperand:
    """As `quantize_mxfp8_fused`."""
    x = x.contiguous()
    if keep and along_rows:
        codes = torch.empty_like(x, dtype=torch.uint8)
        return GemmOperand(PackedMXFP8(codes, x.new_empty(x.shape[0] // 32, x.shape[1], dtype=torch.uint8)), None, True)
    values = torch.empty_like(x, dtype=_BF16)
    return GemmOperand(values.t() if along_rows else values, None, True)


def _values(operand: GemmOperand) -> Tensor:
    """`operand.unpacked()`, of packed codes only its allocation."""
    if isinstance(operand.values, PackedColumns):
        return operand.values.codes.new_empty(operand.values.shape, dtype=_BF16).t()
    if isinstance(operand.values, PackedMXFP8):
        return torch.empty_like(operand.values.codes, dtype=_BF16).t()
    return operand.unpacked()
