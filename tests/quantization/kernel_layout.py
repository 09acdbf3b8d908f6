"""Substitutes for the NVFP4 kernels on a CPU. They make the kernels' bytes from the reference's codes: the documented
order is implemented here a second time."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.quantization.cuda import Kernel, NvidiaGPU, Side
from megatron_fp4.quantization.formats import quantize_nvfp4
from megatron_fp4.quantization.fp4 import FusedFP4, PackedColumns, PackedRows
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.rounding import WHOLE, Place, unpack_codes
from megatron_fp4.quantization.tensor import QuantizedTensor


def packed_columns(codes: Tensor, scales: Tensor) -> PackedColumns:
    """The output of `quantize_rows_kernel` for codes uint8 [rows, columns] and scale bytes [rows / 16, columns]."""
    wide_codes, wide_scales = codes.to(torch.int64), scales.to(torch.int64)
    pairs = (wide_codes[:, 0::2] << 6) | (wide_codes[:, 1::2] << 22)  # pair_of_codes: bits 6-9 and 22-25
    first, second, third, fourth = pairs.unflatten(0, (-1, 4)).unbind(1)
    words = (first >> 6) | (second >> 2) | (third << 2) | (fourth << 6)  # word_of_codes
    scale_pairs = wide_scales[:, 0::2] | (wide_scales[:, 1::2] << 8)
    codes = ((words ^ 2**31) - 2**31).to(torch.int32).contiguous().unflatten(0, (-1, 4))
    return PackedColumns(codes, ((scale_pairs ^ 2**15) - 2**15).to(torch.int16).contiguous())


class PackedFP4(FusedFP4):
    """`FusedFP4` for NVFP4 on a CPU."""

    def __init__(self, x: Tensor, columns: Side | None = None, rows: Side | None = None, place: Place = WHOLE) -> None:
        sides = {"columns": columns, "rows": rows}
        self.x, self.place = x.to(torch.bfloat16), place
        self.sides = {along: side for along, side in sides.items() if side is not None}
        self.scales = {along: torch.empty(()) for along in self.sides}
        transformed = self.x.t() if rows is None else _transformed(self.x.t(), rows)
        self.maxima = {"columns": self.x.abs().amax().float(), "rows": transformed.abs().amax().float()}
        for amax, group in itertools.product(self.maxima.values(), place.amax_groups):
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)

    def operand(self, along: str, *, keep: bool = False) -> Tensor | PackedRows | PackedColumns:
        side = self.sides[along]
        assert self.makes(side, along)
        x = self.x if along == "columns" else _transformed(self.x.t(), side)
        rounding = "stochastic" if side.key else "nearest"
        key = side.key and side.key.at(self.place if along == "columns" else self.place.t())
        quantized = quantize_nvfp4(x, side.block, rounding, key=key, amax=self.maxima[along])
        self.scales[along].copy_(quantized.decode_scale())
        if not keep:
            return quantized.block_values().bfloat16()
        scales = quantized.scales.view(torch.uint8)
        if along == "columns":
            return PackedRows(quantized.codes, scales)
        return packed_columns(unpack_codes(quantized.codes).t(), scales.t())


class UnpackingKernels(NvidiaGPU):
    """A substitute for the GPU, on a CPU, that runs the kernels that unpack NVFP4. launched: names of those it ran."""

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
            codes, scales = PackedColumns(codes, scales).transposed()
            scales = scales.contiguous().view(torch.float8_e4m3fn)
            values.copy_(QuantizedTensor(codes, scales, (1, 16)).block_values().t())


def _transformed(x: Tensor, side: Side) -> Tensor:
    if not side.hadamard:
        return x
    return random_hadamard_transform(x, 16, None if side.signs == "fixed" else torch.ones(16))
