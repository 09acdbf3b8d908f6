"""The bytes that the fused kernels write, made on a CPU from the reference's codes: the documented order, restated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.quantization.cuda import Kernel, NvidiaGPU, Side
from megatron_fp4.quantization.formats import quantize_nvfp4
from megatron_fp4.quantization.fp4 import FusedFP4, PackedColumns, PackedRows
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.rounding import unpack_codes
from megatron_fp4.quantization.tensor import NVFP4Tensor, QuantizedTensor


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
    """`FusedFP4` of NVFP4 on a CPU."""

    def __init__(
        self, x: Tensor, columns: Side | None = None, rows: Side | None = None, amax_group: Any = None
    ) -> None:
        self.x, self.sides = x.to(torch.bfloat16), {"columns": columns, "rows": rows}
        self.scales = {along: torch.empty(()) for along, side in self.sides.items() if side is not None}
        turned = self.x.t() if rows is None else _transformed(self.x.t(), rows)
        self.maxima = {"columns": self.x.abs().amax().float(), "rows": turned.abs().amax().float()}
        for amax in self.maxima.values() if amax_group is not None else ():
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=amax_group)

    def operand(self, along: str, *, keep: bool = False) -> Tensor | PackedRows | PackedColumns:
        side = self.sides[along]
        assert side is not None and self.makes(side, along)
        made = _quantized(self.x if along == "columns" else _transformed(self.x.t(), side), side, self.maxima[along])
        self.scales[along].copy_(made.decode_scale())
        if not keep:
            return made.block_values().bfloat16()
        scales = made.scales.view(torch.uint8)
        return PackedRows(made.codes, scales) if along == "columns" else words(unpack_codes(made.codes).t(), scales.t())


class UnpackingKernels(NvidiaGPU):
    """A GPU that is a CPU, with the kernels that unpack NVFP4; `launched` are their names."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def available(self, device: torch.device) -> bool:
        return True

    def start(self, kernel: Kernel, grid: tuple[int, ...], arguments: Any, constants: dict[str, Any]) -> None:
        codes, scales, values, *_ = arguments
        self.launched.append(kernel.name)
        assert codes[0].is_contiguous() and scales[0].is_contiguous() and constants["BLOCK"] == 16
        if kernel.name == "square_blocks.unpack_kernel":
            codes, scales = codes.flatten(0, 1), scales.flatten(0, 1)
            values.copy_(QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), (1, 16)).block_values())
        else:
            assert kernel.name == "fp4.unpack_kernel"
            along_rows = PackedColumns(codes, scales).transposed()
            scales = along_rows[1].contiguous().view(torch.float8_e4m3fn)
            values.copy_(QuantizedTensor(along_rows[0], scales, (1, 16)).block_values().t())


def _transformed(x: Tensor, side: Side) -> Tensor:
    if not side.hadamard:
        return x
    return random_hadamard_transform(x, 16, None if side.signs == "fixed" else torch.ones(16))


def _quantized(x: Tensor, side: Side, amax: Tensor) -> NVFP4Tensor:
    return quantize_nvfp4(x, side.block, "stochastic" if side.key else "nearest", key=side.key, amax=amax)
