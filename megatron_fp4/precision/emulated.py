"""The emulated backend: exact NVFP4, MXFP4 and FP8 GEMMs on any device.

A block-scaled tensor core computes  sum_k (code_a * scale_a) (code_b * scale_b)  in FP32 and multiplies the FP32 tensor
scales on afterwards. Every product E2M1 x E4M3 (or E2M1 x power of two) has at most six significant bits, so it is
exact in BF16: an ordinary GEMM of those values with FP32 accumulation, followed by the same multiplication, computes
the same thing up to the order of accumulation. The tensor scale must *not* be folded into the values before they are
cast to BF16; that would round nearly all of them. FP8 values under FP32 scales need FP32 operands.

What it chooses not to do: imitate a tensor core's accumulation order, or keep packed codes; the values are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization.formats import E2M1_MAX, ue8m0_values
from megatron_fp4.quantization.fp8 import encode_fp8
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.mxfp4 import encode_mxfp4
from megatron_fp4.quantization.nvfp4 import encode_nvfp4
from megatron_fp4.quantization.rounding import RoundingKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class GemmOperand:
    """One side of a GEMM, the dot product along the last dimension.

    values: [rows, k]. For a quantized operand `code * block scale` without the tensor scale (BF16 for the 4-bit
    formats, FP32 for FP8), otherwise the tensor itself.
    scale: FP32 0-dim factor from `values` to real values, or None for 1.
    quantized: whether `values` came out of a quantizer; two unquantized sides are an ordinary GEMM.
    """

    values: Tensor
    scale: Tensor | None = None
    quantized: bool = False

    def transposed(self) -> GemmOperand:
        """The same codes with rows and columns exchanged."""
        return GemmOperand(self.values.t(), self.scale, self.quantized)


def quantize_operand(
    x: Tensor,
    operand: Operand,
    *,
    rht: int = 0,
    signs: Tensor | None = None,
    key: RoundingKey | None = None,
    amax_group: ProcessGroup | None = None,
) -> GemmOperand:
    """`x` [rows, k] as a GEMM operand.

    rht, signs: size and FP32 signs of the Hadamard transform applied first (input and result in BF16), 0 for none.
    key: of the draws of stochastic rounding; required if the operand rounds stochastically.
    amax_group: ranks that hold the other shards of the tensor and share its maximum (nvfp4).
    Sizes have to fit the blocks (`megatron_fp4.validate` sees to that before a run).
    """
    if rht:
        x = random_hadamard_transform(x.to(torch.bfloat16), rht, signs)
    if not operand.quantized:
        return GemmOperand(x)
    rows = x.to(torch.float32)
    key = key if operand.rounding == "stochastic" else None
    if operand.format == "nvfp4":
        amax = rows.abs().amax()
        if amax_group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=amax_group)
        nvfp4 = encode_nvfp4(rows, operand.block, key, amax, operand.four_over_six)
        scale = amax / (E2M1_MAX * nvfp4.scale_max)
        return GemmOperand(nvfp4.block_values().to(torch.bfloat16), scale, True)
    if operand.format == "mxfp4":
        values, _, scales = encode_mxfp4(rows, operand.block, key)
        values = (values.unflatten(-1, (-1, 32)) * ue8m0_values(scales)[..., None]).flatten(-2)
        return GemmOperand(values.to(torch.bfloat16), None, True)
    if operand.format == "fp8":
        codes, scales = encode_fp8(rows, operand.block, key, operand.power_of_two_scales)
        values = (codes.to(torch.float32).unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)
        return GemmOperand(values, None, True)
    raise ValueError(f"operand format {operand.format!r} is not one of bf16, nvfp4, mxfp4, fp8")


def gemm(a: GemmOperand, b: GemmOperand, out_dtype: torch.dtype) -> Tensor:
    """a b^T: [m, k] x [n, k] -> [m, n] with FP32 accumulation, the tensor scales applied in FP32 before `out_dtype`."""
    if not a.quantized and not b.quantized and out_dtype == a.values.dtype:
        return a.values @ b.values.t()
    product = _matmul_fp32(a.values, b.values.t())
    if a.scale is not None and b.scale is not None:
        # Transformer Engine's alpha = amaxA * amaxB / (36 * 448^2); the two factors are the same to an FP32 rounding.
        product.mul_(a.scale * b.scale)
    elif (scale := a.scale if a.scale is not None else b.scale) is not None:
        product.mul_(scale)
    return product.to(out_dtype)


def _matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32)
