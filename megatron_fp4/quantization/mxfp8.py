"""MXFP8 (OCP microscaling): E4M3 codes, one power-of-two scale for 32 (or 32x32) elements, no tensor scale.

As Transformer Engine computes it (`cast/mxfp8/quantize_mxfp8.cuh`, `float_to_e8m0` in `util/ptx_arch_spec.cuh`):

    scale = block_amax * (1/448 in FP32) rounded up to a power of two (UE8M0), so that nothing saturates
    code  = e4m3(x / scale), to nearest
    value = code * scale

An all-zero block takes the smallest scale, 2^-127, and zero codes. A block that holds NaN or inf takes the scale NaN.

Of BF16 tensors every value is exact in BF16: x and the spacing of the codes are multiples of BF16's smallest number,
2^-133, so a value is one too, and it has four significant bits. (In FP32 tensors, blocks below 1.1e-35 can have codes
that stand for less than 2^-133.) An element of at least 2^127 * 31/16 = 3.3e38 is rounded to 2^128, which is infinite.

On an NVIDIA GPU `FusedMXFP8` makes the same codes of BF16 tensors by the kernels of `kernels/fp8.py`: as BF16 values,
or as codes, to wait for the backward pass or for tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp4.quantization.cuda import Fused, Kernel, launch
from megatron_fp4.quantization.elements import E4M3_MAX, to_e4m3, to_ue8m0_up, ue8m0_values
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.quantization.tensor import Encoded, QuantizedTensor, block_amax, checked, scale_blocks

MXFP8_BLOCKS = ((1, 32), (32, 32))

_QUANTIZE, _DECODE = Kernel("fp8.quantize_mxfp8_kernel"), Kernel("fp8.decode_mxfp8_kernel")


def quantize_mxfp8(x: Tensor, block: tuple[int, int] = (1, 32)) -> QuantizedTensor:
    """Quantize `x` ([..., cols], floating point) along its last dimension, rounding to nearest.

    block: elements that share a scale, (1, 32) or (32, 32); rows are all leading dimensions flattened.
    Raises TypeError unless `x` is floating point, ValueError for another block or if the block does not tile `x`.
    """
    rows, _ = checked(x, block, MXFP8_BLOCKS, "nearest", None, "quantize_mxfp8")
    return encode_mxfp8(rows, block).packed(x.shape[:-1])


def encode_mxfp8(rows: Tensor, block: tuple[int, int], key: RoundingKey | None = None) -> Encoded:
    """The numbers of `quantize_mxfp8` for checked FP32 [rows, cols]. key: None, there is no stochastic rounding."""
    assert key is None, "mxfp8 rounds to nearest"
    amax = block_amax(rows, block)
    scales = to_ue8m0_up(amax * torch.full_like(amax, 1 / E4M3_MAX))
    codes = to_e4m3(scale_blocks(rows, ue8m0_values(scales).reciprocal()))
    return Encoded(codes, scales, block)


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
        launch(_DECODE, _grid(rows, columns), (self.codes, self.scales, values, rows, columns), {})
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
        _QUANTIZE,
        _grid(num_rows, num_columns),
        (x, out, scales, num_rows, num_columns),
        {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "CODES": codes},
    )
    return out, scales


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 32), -(-columns // 128)
