"""The backend `torch`: our quantizers' codes, multiplied on Blackwell by `torch.nn.functional.scaled_mm`.

Transformer Engine is not needed. Codes, block scales and tensor scales are those of the emulated backend bit for bit,
draws of stochastic rounding included: one run has the same codes on a CPU, on Hopper and on Blackwell, at any mesh.
Only the order of accumulation is the chip's.

    operand [rows, k]    nvfp4                                        mxfp8
    codes                uint8 [rows, k / 2], even column in the      E4M3 bytes [rows, k]
                         low nibble
    block scales         E4M3, k / 16 columns                         UE8M0, k / 32 columns
    tensor scale         FP32 0-dim, amax / 2688                      none

k is along the dot product; block scales lie in cuBLAS's tiles (quantization/tensor.py); cuBLAS multiplies both tensor
scales into the FP32 sum. Such a GEMM reads both sides along the dot product ("TN"). An operand along the rows of a
tensor is therefore quantized there, as ever, and its bytes are transposed. Square blocks have the same codes along both
dimensions: these are made once and exchanged. cuBLAS wants whole 16 of output columns, which whole blocks are, and
whole 32 along the dot product: codes are filled up to them here, with zeros. What is gathered (weights in square
blocks, slices of the tokens) travels as codes and scales in their plain order.

What has no packed kernel (four-over-six in square blocks, transforms of other sizes, fresh signs but MS-EDEN's) is
quantized in PyTorch, as in the emulated backend.

Not run: no Blackwell chip was at hand. The self-test compares codes, products and poison before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from megatron_fp4.precision.backend import Backend, MakeOperand, OperandRequest, RowGroups, added
from megatron_fp4.precision.emulated import (
    EMULATED,
    Gather,
    GemmOperand,
    PackedWeight,
    codes_transpose,
    encode_operand,
    fused_kernels,
    gather_slices,
    in_square_blocks,
    quantize_operand,
)
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization.cuda import Fused
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.tensor import QuantizedTensor, swizzle_scales, unswizzle_scales

_DOT_MULTIPLE = 32  # 16 bytes of E2M1 codes


@dataclass(frozen=True)
class _Format:
    """How `scaled_mm` takes a format: codes a byte, their dtype, what its scales are and how they lie."""

    per_byte: int
    codes: torch.dtype
    recipe: list[ScalingType]
    swizzle: list[SwizzleType]


_NVFP4_SCALES, _TILES = [ScalingType.BlockWise1x16, ScalingType.TensorWise], SwizzleType.SWIZZLE_32_4_4
FORMATS = {
    "nvfp4": _Format(2, torch.float4_e2m1fn_x2, _NVFP4_SCALES, [_TILES, SwizzleType.NO_SWIZZLE]),
    "mxfp8": _Format(1, torch.float8_e4m3fn, [ScalingType.BlockWise1x32], [_TILES]),
}


@dataclass(frozen=True)
class PackedOperand:
    """One side of a GEMM of codes, [rows, k] with the dot product along k.

    codes: uint8 [rows, bytes of k codes, in nvfp4 filled up to whole 16]. scales: E4M3 or UE8M0 in tiles, flat. scale:
    FP32 0-dim factor from `code * block scale` to real values, None for 1 (mxfp8). layout: (how it was quantized, k).
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor | None
    layout: tuple[Operand, int]
    quantized: bool = True

    @staticmethod
    def of(made: QuantizedTensor, scale: Tensor | None, operand: Operand) -> PackedOperand:
        """From codes, and block scales of each row in their plain order."""
        codes, per_byte = made.codes.view(torch.uint8), FORMATS[operand.format].per_byte
        size = codes.shape[1] * per_byte
        codes = torch.nn.functional.pad(codes, (0, -size % _DOT_MULTIPLE // per_byte))
        scales = swizzle_scales(made.scales).view(format_of(operand.format).scales)
        return PackedOperand(codes.contiguous(), scales, scale, (operand, size))

    @property
    def form(self) -> _Format:
        """How `scaled_mm` takes it."""
        return FORMATS[self.layout[0].format]

    def decoded(self) -> QuantizedTensor:
        """Codes, uint8 [rows, k / 2] or E4M3 [rows, k], and block scales [rows, k / block] in their plain order."""
        (operand, size), form = self.layout, self.form
        codes = self.codes[:, : size // form.per_byte]
        codes = codes if form.per_byte == 2 else codes.view(form.codes)
        scales = unswizzle_scales(self.scales, self.codes.shape[0], size // format_of(operand.format).tile)
        return QuantizedTensor(codes, scales, operand.block)

    def unpacked(self) -> Tensor:
        """FP32 [rows, k]: `code * block scale`."""
        return self.decoded().block_values()

    def transposed(self) -> PackedOperand:
        """Rows and columns exchanged: of square blocks alone, whose codes are the same along both dimensions."""
        return PackedOperand.of(self.decoded().transposed(), self.scale, self.layout[0])

    def gathered(self, gather: Gather, *, transposed: bool) -> Callable[[], PackedOperand]:
        joined, scale, operand = gather_slices(self.decoded(), gather, transposed), self.scale, self.layout[0]
        return lambda: PackedOperand.of(joined(), scale, operand)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.scales, self.scale

    @property
    def rebuild(self) -> Callable[..., PackedOperand]:
        return functools.partial(PackedOperand, layout=self.layout)


class TorchBackend(Backend):
    """The emulation's codes in `scaled_mm`'s layout, and its products, to which it cannot add (no beta). Whole blocks
    are enough, as for the emulation: with other padding the draws would be others."""

    name = "torch"

    def packs(self, request: OperandRequest) -> bool:
        """NVFP4's square blocks."""
        return in_square_blocks(request) and request.operand.format in FORMATS

    def weight_of_codes(self, gathered: PackedWeight, operand: Operand) -> tuple[PackedOperand, PackedOperand]:
        """Copies of the codes in cuBLAS's layout, of both directions, which a step keeps."""
        fprop = PackedOperand.of(gathered.padded(), gathered.scale, operand)
        return fprop, fprop.transposed()

    def operands(
        self, x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """By the fused kernels as far as they go, by PyTorch what is left."""
        # Four-over-six sums errors over a block in an order of its own along each dimension: its codes are exchanged
        # only if the operand along the columns is the same, which the emulation exchanges as well.
        if rows is None or not codes_transpose(rows) or (rows.operand.four_over_six and columns != rows):
            return _makers(x, columns, rows)
        source, _ = _makers(x, rows, None)
        assert source is not None
        along_columns = functools.cache(source)
        first = along_columns if columns == rows else _makers(x, columns, None)[0]
        return first, lambda: along_columns().transposed()

    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, rows: RowGroups | None = None
    ) -> Tensor:
        """a b^T: of codes where both are quantized, else an ordinary GEMM (mixtures are refused beforehand)."""
        if isinstance(a, GemmOperand) and isinstance(b, GemmOperand):
            return added(EMULATED.gemm(a, b, out_dtype), total, rows)
        assert isinstance(a, PackedOperand) and isinstance(b, PackedOperand), "one side of a GEMM is not quantized"
        assert a.form == b.form, "two formats in one GEMM"
        product = scaled_mm(
            a.codes.view(a.form.codes),
            b.codes.view(b.form.codes).t(),
            scale_a=[a.scales] if a.scale is None else [a.scales, a.scale],
            scale_recipe_a=a.form.recipe,
            scale_b=[b.scales] if b.scale is None else [b.scales, b.scale],
            scale_recipe_b=b.form.recipe,
            swizzle_a=a.form.swizzle,
            swizzle_b=b.form.swizzle,
            output_dtype=out_dtype,
        )
        return added(product, total, rows)


def _makers(
    x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None
) -> tuple[MakeOperand | None, MakeOperand | None]:
    """As `TorchBackend.operands`, each operand quantized by itself."""

    def made(request: OperandRequest, fused: Fused | None, along: str) -> PackedOperand | GemmOperand:
        operand, transposed = request.operand, along == "rows"
        if fused is not None:
            encoded = QuantizedTensor(*fused.code_bytes(along), operand.block)
            return PackedOperand.of(encoded, fused.scales.get(along), operand)
        if not operand.quantized:
            return quantize_operand(x, request, transposed)
        encoded = encode_operand(x, request, transposed)
        return PackedOperand.of(encoded, encoded.decode_scale(), operand)

    of_columns, of_rows = fused_kernels(x, columns, rows)
    return (
        None if columns is None else functools.partial(made, columns, of_columns, "columns"),
        None if rows is None else functools.partial(made, rows, of_rows, "rows"),
    )
