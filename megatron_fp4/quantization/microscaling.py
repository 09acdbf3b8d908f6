"""OCP's MXFP4 and MXFP8: one power-of-two scale (UE8M0) for each block of 1x32 or 32x32 elements.

MXFP4 (paper, appendix B.4):

    scale = block_amax / 6 rounded up to a power of two, so that nothing saturates
    code  = e2m1(x / scale)
    value = code * scale

MXFP8, as Transformer Engine computes it (`cast/mxfp8/quantize_mxfp8.cuh`, `float_to_e8m0` in `util/ptx_arch_spec.cuh`):

    scale = block_amax * (1/448 in FP32) rounded up to a power of two
    code  = e4m3(x / scale), to nearest
    value = code * scale

An all-zero block has the smallest scale, 2^-127, and zero codes. A block with NaN or inf has the scale NaN.

If x is in BF16, every MXFP8 value is exact in BF16: x and the spacing of the codes are multiples of BF16's smallest
number, 2^-133, so values are too, and they have four significant bits. (If x is in FP32, codes of blocks below 1.1e-35
can stand for less than 2^-133.) An element of at least 2^127 * 31/16 = 3.3e38 is rounded to 2^128, which is infinite.

On an NVIDIA GPU, `FusedMXFP8` makes the same codes of BF16 tensors; for MXFP4 `FusedFP4` (`fp4.py`) does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.quantization import rounding
from megatron_fp4.quantization.cuda import Fused, Kernel, launch
from megatron_fp4.quantization.fp8 import quantize_in_tiles
from megatron_fp4.quantization.tensor import QuantizedTensor, block_amax, scale_blocks

MX_BLOCKS = ((1, 32), (32, 32))

_QUANTIZE, _DECODE = Kernel("fp8.quantize_kernel"), Kernel("fp8.decode_mxfp8_kernel")


def encode_mxfp4(
    rows: Tensor, block: tuple[int, int], key: rounding.RoundingKey | None, *, maxima: Tensor | None = None
) -> QuantizedTensor:
    """Quantize FP32 [rows, cols] to MXFP4. key: of the draws; None rounds to nearest.

    maxima: FP32 [rows, cols / 32], the largest magnitude of each row's blocks, if other rows of these blocks are not
        among `rows`; None: the maxima of `rows`.
    """
    amax = block_amax(rows, block) if maxima is None else maxima
    scales = rounding.to_ue8m0_up(amax / torch.full_like(amax, rounding.E2M1_MAX))
    scaled = scale_blocks(rows, rounding.ue8m0_values(scales).reciprocal()).clamp_(
        -rounding.E2M1_MAX, rounding.E2M1_MAX
    )
    return QuantizedTensor(rounding.round_e2m1(scaled, key), scales, block, rows < 0)


def encode_mxfp8(rows: Tensor, block: tuple[int, int], key: None = None) -> QuantizedTensor:
    """Quantize FP32 [rows, cols] to MXFP8. key: always None, because there is no stochastic rounding."""
    assert key is None, "mxfp8 rounds to nearest"
    amax = block_amax(rows, block)
    scales = rounding.to_ue8m0_up(amax * torch.full_like(amax, 1 / rounding.E4M3_MAX))
    codes = rounding.to_e4m3(scale_blocks(rows, rounding.ue8m0_values(scales).reciprocal()))
    return QuantizedTensor(codes, scales, block)


@dataclass(frozen=True)
class PackedMXFP8:
    """The MXFP8 operand along the rows of a tensor [rows, columns].

    codes: E4M3, uint8 [rows, columns]. scales: UE8M0, uint8 [rows / 32, columns].
    """

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """BF16 [columns, k = rows]: `code * scale`."""
        rows, columns = self.codes.shape
        values = torch.empty_like(self.codes, dtype=torch.bfloat16)
        grid = -(-rows // 32), -(-columns // 128)
        launch(_DECODE, grid, (self.codes, self.scales, values, rows, columns), {})
        return values.t()


class FusedMXFP8(Fused):
    """MXFP8 kernels. They need no maximum of the whole tensor, so each operand is made on its own."""

    def operand(self, along: str, *, keep: bool = False) -> Tensor | PackedMXFP8:
        """BF16 values; codes and scales along the rows with `keep`."""
        if keep and along == "rows":
            return PackedMXFP8(*self._codes(along))
        values, _ = quantize_in_tiles(_QUANTIZE, self, along, "e8m0", "values")
        return values if along == "columns" else values.t()

    def code_bytes(self, along: str) -> tuple[Tensor, Tensor]:
        """E4M3 codes [rows, k] and UE8M0 scales [rows, k / 32], both uint8."""
        codes, scales = self._codes(along)
        return (codes, scales) if along == "columns" else (codes.t().contiguous(), scales.t().contiguous())

    def _codes(self, along: str) -> tuple[Tensor, Tensor]:
        """Codes and scales in the tensor's layout; those of square blocks are repeated for the operand's rows."""
        codes, scales = quantize_in_tiles(_QUANTIZE, self, along, "e8m0", "bytes")
        return codes, scales.repeat_interleave(self.sides[along].block[0], dim=0 if along == "columns" else 1)
