"""The backend `torch`: the project's own quantizers, and GEMMs on Blackwell by `torch.nn.functional.scaled_mm`.

It does not need Transformer Engine. Codes, block scales and tensor scales are those of the emulated backend bit for
bit, including the draws of stochastic rounding: a run has the same codes on a CPU, on Hopper and on Blackwell, on any
mesh. Only the order of accumulation depends on the chip.

    operand [rows, k]    nvfp4                                        mxfp8
    codes                uint8 [rows, k / 2], even column in the      E4M3 bytes [rows, k]
                         low nibble
    block scales         E4M3, k / 16 columns                         UE8M0, k / 32 columns
    tensor scale         FP32 0-dim, amax / 2688                      none

k runs along the dot product. Block scales are in cuBLAS's tiled layout (quantization/tensor.py). cuBLAS multiplies the
FP32 sum by both tensor scales. Such a GEMM reads both sides along the dot product ("TN"). So an operand along the rows
of a tensor is quantized along the rows, and its bytes are stored transposed. Square blocks have the same codes along
both dimensions: they are quantized once and transposed. cuBLAS requires a multiple of 16 output columns, which complete
blocks have, and a multiple of 32 elements along the dot product, to which codes are padded here with zeros. Operands
that ranks gather (weights in square blocks, slices of the tokens) are sent as codes and scales in their plain order.

Operands that have no packed kernel (four-over-six in square blocks, transforms of other sizes, fresh signs except
MS-EDEN's) are quantized in PyTorch, as in the emulated backend.

Not run: no Blackwell chip was available. The self-test checks codes, products, NaN and inf before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from megatron_fp4.precision import emulated
from megatron_fp4.precision.backend import Backend, MakeOperand, OperandRequest, RowGroups, added
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization.cuda import Fused
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import Place
from megatron_fp4.quantization.tensor import QuantizedTensor, swizzle_scales, unswizzle_scales

_DOT_MULTIPLE = 32  # 16 bytes of E2M1 codes


@dataclass(frozen=True)
class _Format:
    """A format's arguments for `scaled_mm`. per_byte: codes in a byte. codes: their dtype."""

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

    codes: uint8 [rows, bytes of k codes padded to a multiple of 32]. scales: E4M3 or UE8M0 in cuBLAS's tiles, 1-dim.
    scale: tensor scale, FP32 0-dim; None: 1 (mxfp8). layout: (how it was quantized, k).
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor | None
    layout: tuple[Operand, int]
    quantized: bool = True

    @staticmethod
    def of(made: QuantizedTensor, scale: Tensor | None, operand: Operand) -> PackedOperand:
        """Make an operand from codes and from block scales in their plain order, one row of scales per row."""
        codes, per_byte = made.codes.view(torch.uint8), FORMATS[operand.format].per_byte
        size = codes.shape[1] * per_byte
        codes = torch.nn.functional.pad(codes, (0, -size % _DOT_MULTIPLE // per_byte))
        scales = swizzle_scales(made.scales).view(format_of(operand.format).scales)
        return PackedOperand(codes.contiguous(), scales, scale, (operand, size))

    @property
    def form(self) -> _Format:
        return FORMATS[self.layout[0].format]

    def decoded(self) -> QuantizedTensor:
        """Codes, uint8 [rows, k / 2] or E4M3 [rows, k], and block scales [rows, k / block] in their plain order."""
        (operand, size), form = self.layout, self.form
        codes = self.codes[:, : size // form.per_byte]
        codes = codes if form.per_byte == 2 else codes.view(form.codes)
        scales = unswizzle_scales(self.scales, self.codes.shape[0], size // operand.block[1])
        return QuantizedTensor(codes, scales, operand.block)

    def unpacked(self) -> Tensor:
        """FP32 [rows, k]: `code * block scale`."""
        return self.decoded().block_values()

    def transposed(self) -> PackedOperand:
        """The operand with rows and columns exchanged; only square blocks have the same codes along both."""
        return PackedOperand.of(self.decoded().transposed(), self.scale, self.layout[0])

    def gathered(self, gather: emulated.Gather, *, transposed: bool) -> Callable[[], PackedOperand]:
        joined, scale, operand = emulated.gather_slices(self.decoded(), gather, transposed), self.scale, self.layout[0]
        return lambda: PackedOperand.of(joined(), scale, operand)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.scales, self.scale

    @property
    def rebuild(self) -> Callable[..., PackedOperand]:
        return functools.partial(PackedOperand, layout=self.layout)


class TorchBackend(Backend):
    """The emulation's codes in the layout of `scaled_mm`, which cannot add to a result (it has no beta). The padding is
    the emulation's, to complete blocks, because draws depend on it."""

    name = "torch"

    def packs(self, weight: Operand) -> bool:
        return emulated.in_square_blocks(weight) and weight.format in FORMATS

    def weight_of_codes(self, gathered: emulated.PackedWeight, operand: Operand) -> tuple[PackedOperand, PackedOperand]:
        """Copies of the codes in cuBLAS's layout, along both dimensions; the linear keeps them for a step."""
        fprop = PackedOperand.of(gathered.padded(), gathered.scale, operand)
        return fprop, fprop.transposed()

    def operands(
        self, x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """The fused kernels make the operands that they can, PyTorch the others."""
        # Along each dimension, four-over-six sums the errors of a block in another order, so codes may differ. They are
        # transposed only if both requests are equal; then the emulation transposes them too.
        same = as_stored == transposed
        if (
            transposed is None
            or not emulated.codes_transpose(transposed)
            or (transposed.operand.four_over_six and not same)
        ):
            return _makers(x, place, as_stored, transposed)
        make, _ = _makers(x, place, transposed, None)
        assert make is not None
        make_once = functools.cache(make)
        make_stored = make_once if same else _makers(x, place, as_stored, None)[0]
        return make_stored, lambda: make_once().transposed()

    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, groups: RowGroups | None = None
    ) -> Tensor:
        """a b^T: a GEMM of codes if both sides are quantized, else an ordinary one (support.py refuses mixtures)."""
        if isinstance(a, emulated.GemmOperand) and isinstance(b, emulated.GemmOperand):
            return added(emulated.EMULATED.gemm(a, b, out_dtype), total, groups)
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
        return added(product, total, groups)


def _makers(
    x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
) -> tuple[MakeOperand | None, MakeOperand | None]:
    def make(request: OperandRequest, fused: Fused | None, along: str) -> PackedOperand | emulated.GemmOperand:
        operand, rows = request.operand, emulated.rows_of(x, place, along == "rows")
        if fused is not None:
            encoded = QuantizedTensor(*fused.code_bytes(along), operand.block)
            return PackedOperand.of(encoded, fused.scales.get(along), operand)
        if not operand.quantized:
            return emulated.quantize_operand(*rows, request)
        encoded = emulated.encode_operand(*rows, request)
        return PackedOperand.of(encoded, encoded.decode_scale(), operand)

    columns_kernels, rows_kernels = emulated.fused_kernels(x, place, as_stored, transposed)
    return (
        None if as_stored is None else functools.partial(make, as_stored, columns_kernels, "columns"),
        None if transposed is None else functools.partial(make, transposed, rows_kernels, "rows"),
    )
