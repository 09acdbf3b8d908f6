"""MXFP8 on an NVIDIA GPU: operands as BF16 values, or as codes: to wait for the backward pass, or for tensor cores.

The codes are those of `quantize_mxfp8` on a CPU, bit for bit, of BF16 tensors, whose values are exact in BF16. Kernels
are in `triton_mxfp8.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Fused, launch


@dataclass(frozen=True)
class PackedMXFP8:
    """The operand along the rows of a tensor [rows, columns].

    codes: E4M3, uint8 [rows, columns]. scales: UE8M0, uint8 [rows / 32, columns].
    """

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """BF16 [columns, k = rows]: `code * scale`."""
        rows, columns = self.codes.shape
        values = torch.empty_like(self.codes, dtype=torch.bfloat16)
        launch(
            "triton_mxfp8.decode_mxfp8_kernel",
            _grid(rows, columns),
            (self.codes, self.scales, values, rows, columns),
            {
                "num_warps": 4,
                "enable_fp_fusion": False,
            },
        )
        return values.t()


class FusedMXFP8(Fused):
    """Nothing is measured beforehand: each operand is made by itself, by `quantize_mxfp8_fused`."""

    def along_columns(self, *, keep: bool = False) -> Tensor | PackedMXFP8:
        """BF16 values [n, k = m] in any case."""
        assert self.columns is not None
        return quantize_mxfp8_fused(self.x, self.columns.block[0], along_rows=False, keep=False)

    def along_rows(self, *, keep: bool = False) -> Tensor | PackedMXFP8:
        """BF16 values [m, k = n], or with `keep` their codes."""
        assert self.rows is not None
        return quantize_mxfp8_fused(self.x, self.rows.block[0], along_rows=True, keep=keep)

    def code_bytes(self, along: str) -> tuple[Tensor, Tensor]:
        """E4M3 codes [rows, k] and UE8M0 scales [rows, k / 32], both uint8."""
        side = self.columns if along == "columns" else self.rows
        assert side is not None
        return mxfp8_bytes(self.x, side.block[0], along_rows=along == "rows")


def quantize_mxfp8_fused(x: Tensor, block_rows: int, *, along_rows: bool, keep: bool) -> Tensor | PackedMXFP8:
    """`x` [n, m] as an operand [n, k = m], or transposed (`along_rows`) as an operand [m, k = n].

    x: BF16, or FP32 that counts as rounded to BF16. block_rows: 1 or 32. keep: the operand along the rows as codes.
    Returns BF16 values [n, k] or [m, k], or `PackedMXFP8` [k, m].
    Raises ValueError for sizes that do not divide.
    """
    if keep and along_rows:
        return PackedMXFP8(*_quantized(x, block_rows, along_rows=True, codes=True))
    values, _ = _quantized(x, block_rows, along_rows=along_rows, codes=False)
    return values.t() if along_rows else values


def mxfp8_bytes(x: Tensor, block_rows: int, *, along_rows: bool) -> tuple[Tensor, Tensor]:
    """The same operand as E4M3 codes uint8 [n, k] (or [m, k]) and UE8M0 scales uint8 [n, k / 32] (or [m, k / 32])."""
    codes, scales = _quantized(x, block_rows, along_rows=along_rows, codes=True)
    if along_rows:
        return codes.t().contiguous(), scales.t().contiguous()
    if block_rows == 32:  # the kernel writes the scale of a square block for each of its columns
        scales = scales[:, ::32].repeat_interleave(32, dim=0)
    return codes, scales


def _quantized(x: Tensor, block_rows: int, *, along_rows: bool, codes: bool) -> tuple[Tensor, Tensor]:
    """Values and nothing in particular, or codes and scales in the kernel's layout."""
    num_rows, num_columns = x.shape
    rows, columns = (32, block_rows) if along_rows else (block_rows, 32)
    if num_rows % rows or num_columns % columns:
        raise ValueError(f"mxfp8: shape {tuple(x.shape)} is not a multiple of the block {rows}x{columns}")
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.uint8 if codes else torch.bfloat16)
    scales = out  # without codes the kernel writes no scales
    if codes:
        size = (num_rows, num_columns // 32) if rows == 1 else (num_rows // 32, num_columns)
        scales = torch.empty(size, dtype=torch.uint8, device=x.device)
    launch(
        "triton_mxfp8.quantize_mxfp8_kernel",
        _grid(num_rows, num_columns),
        (x, out, scales, num_rows, num_columns),
        {
            "BLOCK_ROWS": rows,
            "BLOCK_COLUMNS": columns,
            "CODES": codes,
            "num_warps": 4,
            "enable_fp_fusion": False,
        },
    )
    return out, scales


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 32), -(-columns // 128)
