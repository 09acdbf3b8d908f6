"""FP8 in blocks on an NVIDIA GPU: operands [rows, k] as codes and scales, and their product.

The codes are those of `quantize_fp8` on a CPU, bit for bit (rounding to nearest only). With power-of-two scales the
values themselves are exact in BF16, and an operand is a plain BF16 tensor. Otherwise it is `BlockScaled`, and
`matmul_fp8` multiplies two of those on the BF16 tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Fused, launch
from megatron_fp4.quantization.tensor import scale_blocks


@dataclass(frozen=True)
class BlockScaled:
    """E4M3 codes [rows, k] under FP32 scales [rows / block_rows, k / 128], both in any layout.

    codes: BF16, or `float8_e4m3fn` where they are kept for later.
    """

    codes: Tensor
    scales: Tensor

    @property
    def block_rows(self) -> int:
        """Rows that share a scale: 1 or 128."""
        return self.codes.shape[0] // self.scales.shape[0]

    def t(self) -> BlockScaled:
        """The same codes with rows and columns exchanged (square blocks only)."""
        assert self.block_rows == 128
        return BlockScaled(self.codes.t(), self.scales.t())

    def values(self) -> Tensor:
        """FP32 [rows, k]: `code * scale`."""
        scales = self.scales.repeat_interleave(self.block_rows, 0) if self.block_rows > 1 else self.scales
        return scale_blocks(self.codes.to(torch.float32), scales)


class FusedFP8(Fused):
    """Nothing is measured beforehand: each operand is made by itself, by `quantize_fp8_fused`."""

    def along_columns(self, *, keep: bool = False) -> Tensor | BlockScaled:
        """The operand [n, k = m]: BF16 values with power-of-two scales, else codes in BF16 and their scales; keep:
        codes of one byte."""
        assert self.columns is not None
        power_of_two = self.columns.power_of_two_scales
        return quantize_fp8_fused(
            self.x, self.columns.block[0], along_rows=False, power_of_two_scales=power_of_two, keep=keep
        )

    def along_rows(self, *, keep: bool = False) -> Tensor | BlockScaled:
        """The operand [m, k = n], likewise; keep: codes of one byte."""
        assert self.rows is not None
        power_of_two = self.rows.power_of_two_scales
        return quantize_fp8_fused(
            self.x, self.rows.block[0], along_rows=True, power_of_two_scales=power_of_two, keep=keep
        )


def quantize_fp8_fused(
    x: Tensor, block_rows: int, *, along_rows: bool, power_of_two_scales: bool, keep: bool
) -> Tensor | BlockScaled:
    """`x` [n, m] as an operand [n, k = m], or transposed (`along_rows`) as an operand [m, k = n].

    x: BF16, or FP32 that counts as rounded to BF16. block_rows: 1 or 128. keep: codes of one byte, not two.
    Returns `BlockScaled`, or with `power_of_two_scales` BF16 values.
    Raises ValueError for sizes that do not divide.
    """
    num_rows, num_columns = x.shape
    rows, columns = (128, block_rows) if along_rows else (block_rows, 128)
    if num_rows % rows or num_columns % columns:
        raise ValueError(f"fp8: shape {tuple(x.shape)} is not a multiple of the block {rows}x{columns}")
    kind = "values" if power_of_two_scales else "bytes" if keep else "codes"
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.uint8 if kind == "bytes" else torch.bfloat16)
    scales = torch.empty(num_rows // rows, num_columns // columns, dtype=torch.float32, device=x.device)
    launch(
        "triton_fp8.quantize_fp8_kernel",
        (-(-num_columns // 128), -(-num_rows // 128)),
        (x, out, scales, num_rows, num_columns),
        {
            "BLOCK_ROWS": rows,
            "BLOCK_COLUMNS": columns,
            "POWER_OF_TWO": power_of_two_scales,
            "OUT": kind,
            "num_warps": 8,
            "enable_fp_fusion": False,
        },
    )
    if kind == "values":
        return out.t() if along_rows else out
    codes = out.view(torch.float8_e4m3fn) if kind == "bytes" else out
    return BlockScaled(codes.t(), scales.t()) if along_rows else BlockScaled(codes, scales)


def matmul_fp8(a: BlockScaled, b: BlockScaled, out_dtype: torch.dtype) -> Tensor:
    """a b^T: [m, k] x [n, k] -> [m, n] in `out_dtype`, accumulated in FP32.

    Raises ValueError unless k is a multiple of 128, m and n of 8.
    """
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if k % 128 or m % 8 or n % 8:
        raise ValueError(f"fp8: a product of [{m}, {k}] and [{n}, {k}]^T needs multiples of 8, 128 and 8")
    codes_a, codes_b = a.codes.to(torch.bfloat16), b.codes.to(torch.bfloat16)
    out = torch.empty(m, n, dtype=out_dtype, device=codes_a.device)
    # Found on an H200, by whether both codes have their dot products in one piece.
    block_m, block_n = (64, 128) if codes_a.stride(1) == codes_b.stride(1) == 1 else (128, 64)
    strides = (*codes_a.stride(), *codes_b.stride(), *a.scales.stride(), *b.scales.stride())
    launch(
        "triton_fp8.matmul_fp8_kernel",
        (-(-m // block_m) * -(-n // block_n),),
        (codes_a, codes_b, a.scales, b.scales, out, m, n, k, *strides),
        {
            "A_ROWS": a.block_rows,
            "B_ROWS": b.block_rows,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": 4,
            "num_stages": 4,
        },
    )
    return out
