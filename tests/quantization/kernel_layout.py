"""The bytes that the fused kernels write, made on a CPU from the reference's codes: the documented order, restated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import NvidiaGPU, Side
from megatron_fp4.quantization.elements import unpack_codes
from megatron_fp4.quantization.fp4_cuda import FusedFP4, PackedColumns
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.mxfp8 import quantize_mxfp8
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from megatron_fp4.quantization.tensor import NVFP4Tensor


def words(codes: Tensor, scales: Tensor) -> PackedColumns:
    """`quantize_rows_kernel`'s output for the codes uint8 [rows, columns] and scale bytes [rows / 16, columns]."""
    rows = codes.to(torch.int64)
    pairs = (rows[:, 0::2] << 6) | (rows[:, 1::2] << 22)  # pair_of_codes: bits 6-9 and 22-25
    first, second, third, fourth = pairs.unflatten(0, (-1, 4)).unbind(1)
    word = (first >> 6) | (second >> 2) | (third << 2) | (fourth << 6)  # word_of_codes
    both = scales[:, 0::2].to(torch.int64) | (scales[:, 1::2].to(torch.int64) << 8)
    codes = ((word ^ 2**31) - 2**31).to(torch.int32).contiguous().unflatten(0, (-1, 4))
    return PackedColumns(codes, ((both ^ 2**15) - 2**15).to(torch.int16).contiguous())


class PackedFP4(FusedFP4):
    """`FusedFP4` of NVFP4 with its packed outputs alone, on a CPU."""

    def __init__(self, x: Tensor, columns: Side | None, rows: Side | None, *, amax_group: None = None) -> None:
        assert amax_group is None
        self.x, self.columns, self.rows = x.to(torch.bfloat16), columns, rows
        self.columns_scale, self.rows_scale = (None if side is None else torch.empty(()) for side in (columns, rows))

    def packed_columns(self) -> tuple[Tensor, Tensor]:
        assert self.columns is not None and self.makes(self.columns, "columns")
        quantized = _quantized(self.x, self.columns)
        self.columns_scale.copy_(quantized.decode_scale())
        return quantized.codes, quantized.scales.view(torch.uint8)

    def packed_rows(self) -> PackedColumns:
        assert self.rows is not None and self.makes(self.rows, "rows")
        quantized = _quantized(self.x.t(), self.rows)
        self.rows_scale.copy_(quantized.decode_scale())
        return words(unpack_codes(quantized.codes).t(), quantized.scales.view(torch.uint8).t())


class MXFP8Kernels(NvidiaGPU):
    """A GPU whose kernels are those of MXFP8 with codes alone, on a CPU; `launched` are the blocks they were for."""

    def __init__(self, launched: list[Any]) -> None:
        self.launched = launched

    def start(self, kernel: str, grid: tuple[int, ...], arguments: Any, constants: dict[str, Any]) -> None:
        assert kernel == "triton_mxfp8.quantize_mxfp8_kernel"
        x, out, scales, *size = arguments
        block = constants["BLOCK_ROWS"], constants["BLOCK_COLUMNS"]
        assert constants["CODES"] and tuple(size) == tuple(x.shape) and x.is_contiguous() and out.shape == x.shape
        self.launched.append(block)
        x = x.to(torch.bfloat16)
        if block[0] == 1:
            made = quantize_mxfp8(x)
            codes, expected = made.codes, made.scales
        else:
            made = quantize_mxfp8(x.t(), (block[1], 32))
            codes, expected = made.codes.t(), made.scales.t()
        out.copy_(codes.view(torch.uint8))
        assert scales.shape == expected.shape
        scales.copy_(expected)


def _quantized(x: Tensor, side: Side) -> NVFP4Tensor:
    if side.hadamard:
        x = random_hadamard_transform(x, 16, None if side.signs == "fixed" else torch.ones(16))
    return quantize_nvfp4(x, side.block, "stochastic" if side.key else "nearest", key=side.key)
