"""The formats that are compared, tensors quantized in them, and measures of what that loses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_fp4.measure.statistics import operand_statistics, operand_sums
from megatron_fp4.precision.emulated import encode_operand, quantize_operand
from megatron_fp4.precision.gemm_operand import GemmOperand
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization import rounding_key

FORMATS = {
    "NVFP4 1x16": Operand("nvfp4", (1, 16)),
    "NVFP4 16x16": Operand("nvfp4", (16, 16)),
    "NVFP4 1x16 4/6": Operand("nvfp4", (1, 16), four_over_six=True),
    "MXFP4 1x32": Operand("mxfp4", (1, 32)),
    "MXFP8 1x32": Operand("mxfp8", (1, 32)),
    "FP8 1x128": Operand("fp8", (1, 128)),
    "FP8 128x128": Operand("fp8", (128, 128)),
    "FP8 1x128, 2^k": Operand("fp8", (1, 128), power_of_two_scales=True),
}
UNCOMMON = ("MXFP8 1x32", "FP8 128x128", "FP8 1x128, 2^k")  # in the first table only
NEAREST, STOCHASTIC = Operand("nvfp4", (1, 16)), Operand("nvfp4", (1, 16), "stochastic")
SQUARE = Operand("nvfp4", (16, 16))


def quantized(x: Tensor, operand: Operand, rht: int = 0, draw: int = 0) -> GemmOperand:
    """`x` [rows, k] as the emulated backend's operand; `draw` numbers the draws of stochastic rounding."""
    return quantize_operand(x, operand, rht=rht, key=rounding_key("study", draw))


def decoded(x: Tensor, operand: Operand, draw: int = 0) -> Tensor:
    """FP32 real values of `x` after quantization."""
    key = rounding_key("study", draw) if operand.rounding == "stochastic" else None
    return encode_operand(x.to(torch.float32), operand, key).packed(x.shape[:-1]).dequantize()


def stochastic(operand: Operand) -> Operand:
    """The same with stochastic rounding."""
    return Operand(operand.format, operand.block, "stochastic", operand.four_over_six, operand.power_of_two_scales)


def statistics(x: Tensor, operand: Operand) -> dict[str, float]:
    """SNR in dB, zeroed share and so on (measure/statistics.py) of one quantization of `x`."""
    exact = x.to(torch.float32)
    no_limit = torch.full((x.shape[0], 1), math.inf)
    sums = operand_sums(exact, decoded(x, operand), no_limit).tolist()
    return operand_statistics([*sums, sums[0], x.numel()], [float(exact.abs().max())] * 2, transformed=False)


def relative(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||."""
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def gain(result: Tensor, exact: Tensor) -> float:
    """Slope of the regression of `result` on `exact`: 1 if nothing is lost systematically."""
    result, exact = result.double(), exact.double()
    return float((result * exact).sum() / (exact * exact).sum())
