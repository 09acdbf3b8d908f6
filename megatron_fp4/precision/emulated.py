"""The emulated backend: exact NVFP4, MXFP4, MXFP8 and FP8 GEMMs on any device.

A block-scaled tensor core computes  sum_k (code_a * scale_a) (code_b * scale_b)  in FP32 and multiplies the FP32 tensor
scales on afterwards. Every product E2M1 x E4M3 (or E2M1 x power of two) has at most six significant bits, so it is
exact in BF16: an ordinary GEMM of those values with FP32 accumulation, followed by the same multiplication, computes
the same thing up to the order of accumulation. The tensor scale must *not* be folded into the values before they are
cast to BF16; that would round nearly all of them. E4M3 codes under power-of-two scales are exact in BF16 as well; under
FP32 scales they need FP32 operands, or a GEMM that applies the scales block by block.

Who computes: on a CPU, PyTorch. On an NVIDIA GPU of compute capability 8.0 or more, the kernels of
`quantization/` (`cuda.py`, `fp8_cuda.py`, `mxfp8_cuda.py`) and cuBLAS; for operands that those do not make
(four-over-six, unusual transforms, stochastic FP8, FP32 activations), and on other GPUs, PyTorch on that device, slower
by tens of times. The codes are the same bits everywhere; a warning says once why a device does without the kernels.

What it chooses not to do: imitate a tensor core's accumulation order.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.backend import OperandRequest
from megatron_fp4.precision.demands import Demands, block_demands
from megatron_fp4.precision.recipe import Operand, Recipe
from megatron_fp4.quantization.cuda import Measured, PackedColumns, Side, kernels_unavailable
from megatron_fp4.quantization.formats import E2M1_MAX, ue8m0_values
from megatron_fp4.quantization.fp8 import encode_fp8
from megatron_fp4.quantization.fp8_cuda import BlockScaled, matmul_fp8, quantize_fp8_fused
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform, random_signs
from megatron_fp4.quantization.mxfp4 import encode_mxfp4
from megatron_fp4.quantization.mxfp8 import encode_mxfp8
from megatron_fp4.quantization.mxfp8_cuda import PackedMXFP8, quantize_mxfp8_fused
from megatron_fp4.quantization.nvfp4 import EncodedNVFP4, encode_nvfp4
from megatron_fp4.quantization.rounding import RoundingKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

_EIGHT_BITS = ("fp8", "mxfp8")

MakeOperand = Callable[[], "GemmOperand"]


@dataclass(frozen=True)
class GemmOperand:
    """One side of a GEMM, the dot product along the last dimension.

    values: [rows, k]. For a quantized operand `code * block scale` without the tensor scale (FP32 for FP8 under FP32
    scales, else BF16), otherwise the tensor itself. `PackedColumns` and `PackedMXFP8` [k, rows]: codes of such values,
    and `BlockScaled` [rows, k]: FP8 codes with their scales; `unpacked` decodes all three.
    scale: FP32 0-dim factor from `values` to real values, or None for 1.
    quantized: whether `values` came out of a quantizer; two unquantized sides are an ordinary GEMM.
    """

    values: Tensor | PackedColumns | PackedMXFP8 | BlockScaled
    scale: Tensor | None = None
    quantized: bool = False

    def transposed(self) -> GemmOperand:
        """The same codes with rows and columns exchanged."""
        assert not isinstance(self.values, PackedColumns | PackedMXFP8)
        return GemmOperand(self.values.t(), self.scale, self.quantized)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What an autograd function has to save: three tensors, some of them None."""
        if isinstance(self.values, Tensor):
            return self.values, None, self.scale
        return self.values.codes, self.values.scales, self.scale

    @property
    def layout(self) -> tuple[str | int | None, bool]:
        """Non-tensor metadata: the format of packed codes, the block rows of FP8 codes, or None for plain values; and
        `quantized`.
        """
        values = self.values
        packing = values.format if isinstance(values, PackedColumns | PackedMXFP8) else None
        return values.block_rows if isinstance(values, BlockScaled) else packing, self.quantized

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor | None], layout: tuple[str | int | None, bool]) -> GemmOperand:
        """The operand again from its `tensors()` and its `layout`."""
        (values, scales, scale), (packing, quantized) = tensors, layout
        assert values is not None
        if packing is None or scales is None:
            return GemmOperand(values, scale, quantized)
        if isinstance(packing, int):
            return GemmOperand(BlockScaled(values, scales, packing), scale, quantized)
        if packing == "mxfp8":
            return GemmOperand(PackedMXFP8(values, scales), scale, quantized)
        return GemmOperand(PackedColumns(values, scales, packing), scale, quantized)

    def unpacked(self) -> Tensor:
        """The values as a tensor [rows, k]."""
        if isinstance(self.values, PackedColumns | PackedMXFP8):
            return self.values.values().t()
        return self.values.values() if isinstance(self.values, BlockScaled) else self.values


class EmulatedBackend:
    """Exact arithmetic in PyTorch, or by the fused kernels where these make the same codes."""

    name = "emulated"
    accumulates = False

    def demands(self, recipe: Recipe) -> Demands:
        """Whole blocks are enough."""
        return block_demands(recipe)

    def operands(
        self,
        x: Tensor,
        columns: OperandRequest | None,
        rows: OperandRequest | None,
        *,
        dtype: torch.dtype,
        keep_rows: bool = False,
        amax_group: ProcessGroup | None = None,
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """By the fused kernels as far as they go, by PyTorch what is left."""
        fused: tuple[MakeOperand | None, MakeOperand | None] = (None, None)
        if dtype == torch.bfloat16:
            fused = fused_operands(x, columns, rows, pack_rows=keep_rows, amax_group=amax_group)

        def plain(request: OperandRequest, transposed: bool) -> GemmOperand:
            rounded = x.to(dtype)
            return quantize_operand(
                rounded.t() if transposed else rounded,
                request.operand,
                rht=request.rht,
                signs=transform_signs(request.rht, request.signs, request.signs_key, x.device) if request.rht else None,
                key=request.key,
                amax_group=amax_group,
            )

        makers: list[MakeOperand | None] = list(fused)
        for i, request in enumerate((columns, rows)):
            if request is not None and fused[i] is None:
                makers[i] = functools.partial(plain, request, i == 1)
        return makers[0], makers[1]

    def gemm(self, a: GemmOperand, b: GemmOperand, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        """a b^T, see `gemm`."""
        product = gemm(a, b, out_dtype)
        return product if total is None else total.add_(product)

    def transposed(self, operand: GemmOperand) -> GemmOperand:
        """The same codes with rows and columns exchanged."""
        return operand.transposed()

    def operand_from_saved(
        self, tensors: Sequence[Tensor | None], layout: tuple[str | int | None, bool]
    ) -> GemmOperand:
        """An operand again from its `tensors()` and its `layout`."""
        return GemmOperand.from_tensors(tensors, layout)


EMULATED = EmulatedBackend()


def transform_signs(size: int, signs: str, key: RoundingKey | None, device: torch.device) -> Tensor:
    """FP32 [size] of +-1: the `fixed` ones, `none` (all +1), or `fresh` ones drawn from `key`."""
    if signs == "fixed":
        return fixed_signs(size, device)
    if signs == "none":
        return torch.ones(size, device=device)
    assert key is not None, "fresh signs come from a key"
    return random_signs(size, key, device)


def fused_operands(
    x: Tensor,
    columns: OperandRequest | None,
    rows: OperandRequest | None,
    *,
    pack_rows: bool = False,
    amax_group: ProcessGroup | None = None,
) -> tuple[MakeOperand | None, MakeOperand | None]:
    """What makes `x` [n, m] an operand [n, k = m] (`columns`), and transposed an operand [m, k = n] (`rows`).

    Measures x at once; the operands are made when they are asked for, so that the first need not live beside the
    second. What the fused kernels do not make, on this device or at all, comes back as None: `quantize_operand` does.

    x: BF16, or FP32 that is to count as rounded to BF16. pack_rows: keep the second as codes until its GEMM.
    """
    eight = (_eight_bit_maker(x, columns, False, False), _eight_bit_maker(x, rows, True, pack_rows))
    if eight != (None, None):
        columns, rows = (None if eight[0] else columns), (None if eight[1] else rows)
        others = fused_operands(x, columns, rows, pack_rows=pack_rows, amax_group=amax_group)
        return eight[0] or others[0], eight[1] or others[1]
    if rows is not None and codes_transpose(rows):
        # The kernels make square blocks along the columns.
        square = fused_operands(x, rows, None, amax_group=amax_group)[0]
        along_columns_alone = fused_operands(x, columns, None, amax_group=amax_group)[0]
        return along_columns_alone, None if square is None else lambda: square().transposed()
    sides = (fused_side(x, columns, "columns"), fused_side(x, rows, "rows"))
    if sides[0] is not None and sides[1] is not None and sides[0].format != sides[1].format:
        return (
            fused_operands(x, columns, None, amax_group=amax_group)[0],
            fused_operands(x, None, rows, pack_rows=pack_rows, amax_group=amax_group)[1],
        )
    if sides == (None, None):
        return None, None
    measured = Measured(x, *sides, amax_group=amax_group)

    def along_columns() -> GemmOperand:
        return GemmOperand(measured.along_columns(), measured.columns_scale, True)

    def along_rows() -> GemmOperand:
        values = measured.packed_rows() if pack_rows else measured.along_rows().t()
        return GemmOperand(values, measured.rows_scale, True)

    return along_columns if sides[0] is not None else None, along_rows if sides[1] is not None else None


def codes_transpose(request: OperandRequest) -> bool:
    """Whether the operand's codes are those of the transposed tensor, transposed."""
    operand = request.operand
    square = operand.quantized and operand.block[0] == operand.block[1]
    return square and not request.rht and request.key is None


def _eight_bit_maker(x: Tensor, request: OperandRequest | None, along_rows: bool, keep: bool) -> MakeOperand | None:
    """What makes an FP8 or MXFP8 operand by the kernels, or None if PyTorch has to do it or it is neither."""
    if request is None or not fused_eight_bits(x, request):
        return None
    operand = request.operand

    def make() -> GemmOperand:
        if operand.format == "mxfp8":
            made = quantize_mxfp8_fused(x, operand.block[0], along_rows=along_rows, keep=keep)
            return GemmOperand(made, None, True)
        power_of_two = operand.power_of_two_scales
        values = quantize_fp8_fused(
            x, operand.block[0], along_rows=along_rows, power_of_two_scales=power_of_two, keep=keep
        )
        return GemmOperand(values, None, True)

    return make


def fused_eight_bits(x: Tensor, request: OperandRequest) -> bool:
    """Whether the request is for FP8 or MXFP8 and the kernels make it."""
    if request.rht or request.key is not None or request.operand.format not in _EIGHT_BITS:
        return False
    return x.is_cuda and _kernels_available(x.device)


def fused_side(x: Tensor, request: OperandRequest | None, along: str) -> Side | None:
    """The request as the fused kernels take it, or None if PyTorch has to do it."""
    if request is None or not x.is_cuda or not request.operand.quantized or request.operand.four_over_six:
        return None
    side = Side(request.operand.format, request.operand.block[0], request.rht, request.signs, request.key)
    return side if side.fused(along) and _kernels_available(x.device) else None


@functools.cache
def _kernels_available(device: torch.device) -> bool:
    reason = kernels_unavailable(device)
    if reason is not None:
        log.warning("%s: quantization runs in plain PyTorch, with the same numbers but slowly: %s", device, reason)
    return reason is None


def quantize_operand(
    x: Tensor,
    operand: Operand,
    *,
    rht: int = 0,
    signs: Tensor | None = None,
    key: RoundingKey | None = None,
    amax_group: ProcessGroup | None = None,
) -> GemmOperand:
    """`x` [rows, k] as a GEMM operand, in PyTorch on any device: the reference.

    rht, signs: size and FP32 signs of the Hadamard transform applied first (input and result in BF16), 0 for none.
    key: of the draws of stochastic rounding; required if the operand rounds stochastically.
    amax_group: ranks that hold the other shards of the tensor and share its maximum (nvfp4).
    """
    if rht:
        x = random_hadamard_transform(x.to(torch.bfloat16), rht, signs)
    if not operand.quantized:
        return GemmOperand(x)
    rows = x.to(torch.float32)
    key = key if operand.rounding == "stochastic" else None
    if operand.format == "nvfp4":
        nvfp4, scale = encode_with_scale(rows, operand, key, amax_group)
        return GemmOperand(nvfp4.block_values().to(torch.bfloat16), scale, True)
    if operand.format == "mxfp4":
        values, _, scales = encode_mxfp4(rows, operand.block, key)
        values = (values.unflatten(-1, (-1, 32)) * ue8m0_values(scales)[..., None]).flatten(-2)
        return GemmOperand(values.to(torch.bfloat16), None, True)
    if operand.format == "mxfp8":
        codes, scales = encode_mxfp8(rows, operand.block)
        values = (codes.to(torch.float32).unflatten(-1, (-1, 32)) * ue8m0_values(scales)[..., None]).flatten(-2)
        return GemmOperand(values.to(torch.bfloat16), None, True)
    if operand.format == "fp8":
        codes, scales = encode_fp8(rows, operand.block, key, operand.power_of_two_scales)
        values = (codes.to(torch.float32).unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)
        # E4M3 times a power of two has four significant bits: exact in BF16.
        return GemmOperand(values.to(torch.bfloat16) if operand.power_of_two_scales else values, None, True)
    raise ValueError(f"operand format {operand.format!r} is not one of bf16, nvfp4, mxfp4, mxfp8, fp8")


def encode_with_scale(
    rows: Tensor, operand: Operand, key: RoundingKey | None, amax_group: ProcessGroup | None
) -> tuple[EncodedNVFP4, Tensor]:
    """FP32 `rows` [rows, k] in NVFP4, and the FP32 0-dim factor from `code * block scale` to real values."""
    amax = shared_amax(rows.abs().amax(), amax_group)
    nvfp4 = encode_nvfp4(rows, operand.block, key, amax, operand.four_over_six)
    # Division by a Python number would be a multiplication by its reciprocal on CUDA.
    return nvfp4, torch.div(amax, torch.full_like(amax, E2M1_MAX * nvfp4.scale_max))


def shared_amax(amax: Tensor, group: ProcessGroup | None) -> Tensor:
    """The largest of the FP32 0-dim maxima of `group`'s ranks; its own without a group."""
    if group is None:
        return amax
    # As integers NaN is the largest of all; as floats a reduction may lose it.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def gemm(a: GemmOperand, b: GemmOperand, out_dtype: torch.dtype) -> Tensor:
    """a b^T: [m, k] x [n, k] -> [m, n] with FP32 accumulation, the tensor scales applied in FP32 before `out_dtype`."""
    if isinstance(a.values, BlockScaled) and isinstance(b.values, BlockScaled):
        return matmul_fp8(a.values, b.values, out_dtype)
    left, right = a.unpacked(), b.unpacked().t()
    if not a.quantized and not b.quantized and out_dtype == left.dtype:
        return left @ right
    # Transformer Engine's alpha = amaxA * amaxB / (36 * 448^2); the two factors are the same to an FP32 rounding.
    alpha = a.scale if b.scale is None else b.scale if a.scale is None else a.scale * b.scale
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        if alpha is not None or (a.quantized and b.quantized):
            from megatron_fp4.precision.gemm_cuda import scaled_matmul

            return scaled_matmul(left, right, alpha, out_dtype)
        return torch.mm(left, right, out_dtype=torch.float32).to(out_dtype)
    product = left.to(torch.float32) @ right.to(torch.float32)
    return (product if alpha is None else product.mul_(alpha)).to(out_dtype)
