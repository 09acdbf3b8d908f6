"""FP8 in blocks: E4M3 codes with FP32 block scales; 128x128 blocks for weights, 1x128 for activations and gradients.

The paper's FP8 baseline (appendix A.1, after DeepSeek-V3):

    encode = 448 / block_amax in FP32 (1 for an all-zero block), optionally rounded down to a power of two
    code   = e4m3(x * encode)
    value  = code * (1 / encode)

Transformer Engine's `Float8BlockScaling` rounds to powers of two by default; here that is an option, off by default.
A block with NaN or inf has the scale NaN.

On an NVIDIA GPU, `FusedFP8` makes the same codes with the kernels of `kernels/fp8.py`. With power-of-two scales the
values are exact in BF16, and an operand is a plain BF16 tensor. Otherwise it is a `BlockScaled`, and `matmul_fp8`
multiplies two of them on the BF16 tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Fused, Kernel, launch
from megatron_fp4.quantization.rounding import E4M3_MAX, FP32_MAX, to_e4m3
from megatron_fp4.quantization.tensor import QuantizedTensor, block_amax, scale_blocks

FP8_BLOCKS = ((1, 128), (128, 128))

_QUANTIZE = Kernel("fp8.quantize_kernel", num_warps=8)
_MATMUL = Kernel("fp8.matmul_fp8_kernel", num_stages=4, enable_fp_fusion=True)


def encode_fp8(
    rows: Tensor, block: tuple[int, int], key: None = None, *, power_of_two_scales: bool = False
) -> QuantizedTensor:
    """Quantize FP32 [rows, cols] to FP8. key: always None, because there is no stochastic rounding.

    power_of_two_scales: round the encode scale down to a power of two.
    """
    assert key is None, "fp8 rounds to nearest"
    amax = block_amax(rows, block)
    encode = torch.div(torch.full_like(amax, E4M3_MAX), amax).clamp(max=FP32_MAX)
    if power_of_two_scales:
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode = torch.where(amax == 0, torch.ones_like(encode), encode)
    decode = torch.where(torch.isfinite(amax), encode.reciprocal(), float("nan"))
    # An E4M3 code times a power of two has four significant bits; BF16 holds eight.
    exact = torch.bfloat16 if power_of_two_scales else torch.float32
    return QuantizedTensor(to_e4m3(scale_blocks(rows, encode)), decode, block, exact=exact)


@dataclass(frozen=True)
class BlockScaled:
    """E4M3 codes [rows, k] and their FP32 scales [rows / block_rows, k / 128], both of any strides.

    codes: BF16, or `float8_e4m3fn` if they are kept for later.
    """

    codes: Tensor
    scales: Tensor

    @property
    def block_rows(self) -> int:
        """Rows that share a scale: 1 or 128."""
        return self.codes.shape[0] // self.scales.shape[0]

    def t(self) -> BlockScaled:
        """The transpose (square blocks only)."""
        assert self.block_rows == 128
        return BlockScaled(self.codes.t(), self.scales.t())

    def values(self) -> Tensor:
        """FP32 [rows, k]: `code * scale`."""
        return scale_blocks(self.codes.to(torch.float32), self.scales.repeat_interleave(self.block_rows, 0))


class FusedFP8(Fused):
    """FP8 kernels. They need no maximum of the whole tensor, so each operand is made on its own."""

    def operand(self, along: str, *, keep: bool = False) -> Tensor | BlockScaled:
        """With power-of-two scales BF16 values; otherwise codes in BF16 (with `keep` in one byte) and their scales."""
        if self.sides[along].power_of_two_scales:
            values, _ = quantize_in_tiles(_QUANTIZE, self, along, "power of two", "values")
            return values if along == "columns" else values.t()
        codes, scales = quantize_in_tiles(_QUANTIZE, self, along, "fp32", "bytes" if keep else "codes")
        codes = codes.view(torch.float8_e4m3fn) if keep else codes
        return BlockScaled(codes, scales) if along == "columns" else BlockScaled(codes.t(), scales.t())


def quantize_in_tiles(kernel: Kernel, fused: Fused, along: str, scales: str, out: str) -> tuple[Tensor, Tensor]:
    """Quantize the tensor of `fused` to E4M3 for its operand `along` columns or rows: FP8 and MXFP8.

    scales: `fp32`, `power of two` or `e8m0`. out: BF16 `values` (then the second result has no meaning), or `codes` in
    BF16 or in `bytes` and the scales of their blocks. All in the layout of the tensor.
    """
    side = fused.sides[along]
    x, (num_rows, num_columns), size = fused.x.contiguous(), fused.x.shape, side.block[1]
    rows, columns = side.block if along == "columns" else reversed(side.block)
    what = f"{side.format}: {tuple(x.shape)} in blocks of {rows}x{columns}"
    assert num_rows % rows == num_columns % columns == 0, what
    made = torch.empty_like(x, dtype=torch.uint8 if out == "bytes" else torch.bfloat16)
    block_scales = made
    if out != "values":
        dtype = torch.uint8 if scales == "e8m0" else torch.float32
        block_scales = torch.empty(num_rows // rows, num_columns // columns, dtype=dtype, device=x.device)
    launch(
        kernel,
        (-(-num_rows // size), -(-num_columns // 128)),
        (x, made, block_scales, num_rows, num_columns),
        {"BLOCK": size, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "SCALES": scales, "OUT": out},
    )
    return made, block_scales


def matmul_fp8(a: BlockScaled, b: BlockScaled, out_dtype: torch.dtype) -> Tensor:
    """a b^T: [m, k] x [n, k] -> [m, n] in `out_dtype`, accumulated in FP32. k is a multiple of 128, m and n of 8."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    assert k % 128 == m % 8 == n % 8 == 0, f"fp8: a product of [{m}, {k}] and [{n}, {k}]^T"
    codes_a, codes_b = a.codes.to(torch.bfloat16), b.codes.to(torch.bfloat16)
    out = torch.empty(m, n, dtype=out_dtype, device=codes_a.device)
    # Fastest on an H200: the first if in both operands the elements of a dot product are contiguous.
    block_m, block_n = (64, 128) if codes_a.stride(1) == codes_b.stride(1) == 1 else (128, 64)
    strides = (*codes_a.stride(), *codes_b.stride(), *a.scales.stride(), *b.scales.stride())
    launch(
        _MATMUL,
        (-(-m // block_m) * -(-n // block_n),),
        (codes_a, codes_b, a.scales, b.scales, out, m, n, k, *strides),
        {"A_ROWS": a.block_rows, "B_ROWS": b.block_rows, "BLOCK_M": block_m, "BLOCK_N": block_n},
    )
    return out
