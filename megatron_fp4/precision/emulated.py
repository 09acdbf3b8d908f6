"""The emulated backend: exact NVFP4, MXFP4, MXFP8 and FP8 GEMMs on any device.

A block-scaled tensor core computes  sum_k (code_a * scale_a) (code_b * scale_b)  in FP32 and multiplies the FP32 tensor
scales on afterwards. Every product E2M1 x E4M3 (or E2M1 x power of two) has at most six significant bits, so it is
exact in BF16: an ordinary GEMM of those values with FP32 accumulation, followed by the same multiplication, computes
the same thing up to the order of accumulation. The tensor scale must *not* be folded into the values before they are
cast to BF16; that would round nearly all of them. E4M3 codes under power-of-two scales are exact in BF16 as well; under
FP32 scales they need FP32 operands, or a GEMM that applies the scales block by block.

On a CPU, PyTorch computes. On an NVIDIA GPU of compute capability 8.0 or more, the kernels of `quantization/kernels`
and cuBLAS do; for operands that those do not make (four-over-six in square blocks, unusual transforms, FP32
activations), and on other GPUs, PyTorch on that device, slower by tens of times. The codes are the same bits
everywhere; a warning says once why a device does without the kernels.

On a GPU weights are kept as 4-bit codes: 0.56 bytes a parameter where values take 2. Square blocks rounded to nearest
have the same codes along both dimensions (`quantization/square_blocks.py`), so one packed copy serves fprop and dgrad,
for all micro-batches of a step. A GEMM unpacks it to BF16 values, which are exact and gone after it. `packed_weight`
makes the codes from the whole weight of this rank, or FSDP gathers those that ranks made of their shards
(`parallel/gathered_codes.py`); both are the same bits. On a CPU values are kept instead (`keeps_codes`): unpacking is
slow there in relation to the products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fp4.precision import gemm_cuda
from megatron_fp4.precision.backend import Backend, MakeOperand, OperandRequest, RowGroups, added
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Fused, Packed, Side
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.fp4 import PackedColumns, PackedRows
from megatron_fp4.quantization.fp8 import BlockScaled, matmul_fp8
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform, random_signs
from megatron_fp4.quantization.rounding import E4M3_MAX
from megatron_fp4.quantization.square_blocks import BLOCKS, RowBlocks, block_maxima, quantize_rows, unpack_rows
from megatron_fp4.quantization.tensor import QuantizedTensor, all_reduce_maxima, tensor_decode_scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Starts a message to other ranks; `wait()` of what it returns gives what came back.
Gather = Callable[[Tensor], Any]


@dataclass(frozen=True)
class GemmOperand:
    """One side of a GEMM, the dot product along the last dimension.

    values: [rows, k]. For a quantized operand `code * block scale` without the tensor scale (FP32 for FP8 under FP32
    scales, else BF16), or codes of such values with their scales; otherwise the tensor itself.
    scale: FP32 0-dim factor from `values` to real values, or None for 1.
    quantized: whether `values` came out of a quantizer; two unquantized sides are an ordinary GEMM.
    """

    values: Tensor | Packed
    scale: Tensor | None = None
    quantized: bool = False

    def decoded(self) -> None:
        """Nothing: values are compared."""

    def transposed(self) -> GemmOperand:
        """The same codes with rows and columns exchanged."""
        assert isinstance(self.values, Tensor | BlockScaled | PackedWeight)
        return GemmOperand(self.values.t(), self.scale, self.quantized)

    def tensors(self) -> tuple[Tensor | None, ...]:
        if isinstance(self.values, Tensor):
            return self.values, None, self.scale
        return self.values.codes, self.values.scales, self.scale

    @property
    def rebuild(self) -> Callable[..., GemmOperand]:
        values, quantized = self.values, self.quantized
        if isinstance(values, Tensor):
            return lambda plain, _, scale: GemmOperand(plain, scale, quantized)
        pack: Callable[[Tensor, Tensor], Packed] = type(values)
        if isinstance(values, PackedWeight):
            pack = functools.partial(PackedWeight, blocks=values.blocks, exchanged=values.exchanged)
        return lambda codes, scales, scale: GemmOperand(pack(codes, scales), scale, quantized)

    def gathered(self, gather: Gather, *, transposed: bool) -> Callable[[], GemmOperand]:
        values, scale, quantized = self.values, self.scale, self.quantized
        if isinstance(values, PackedRows | PackedColumns):
            message, joined = gather(values.message()), values.joined()
            return lambda: GemmOperand(joined(message.wait()), scale, quantized)
        # Tokens go first, as they lie in MXFP8's packed codes.
        turned, plain = transposed and isinstance(values, Tensor | BlockScaled), isinstance(values, Tensor)
        parts = (values,) if isinstance(values, Tensor) else (values.codes, values.scales)
        messages = [gather(part.t() if turned else part) for part in parts]
        packing, in_one_piece = type(values), parts[0].is_contiguous()

        def whole() -> GemmOperand:
            made = [message.wait().t() if turned else message.wait() for message in messages]
            if plain:
                return GemmOperand(made[0].contiguous() if in_one_piece else made[0], scale, quantized)
            return GemmOperand(packing(*made), scale, quantized)  # type: ignore[call-arg]

        return whole

    def unpacked(self) -> Tensor:
        """The values as a tensor [rows, k]."""
        return self.values if isinstance(self.values, Tensor) else self.values.values()


def gather_slices(made: QuantizedTensor, gather: Gather, transposed: bool) -> Callable[[], QuantizedTensor]:
    """From codes and scales of a slice of the tokens: starts `gather`; what is returned waits, and gives those of all.

    made: [rows, k]. transposed: the rows are features and k runs over tokens. One message, tokens first.
    """
    # Flat, because a dimension of size 1 may have any stride.
    parts = [part.flatten().view(torch.uint8).view(part.shape[0], -1) for part in (made.codes, made.scales)]
    if transposed:
        parts = [part.t() for part in parts]
    dim = 0 if transposed else 1
    message, sizes = gather(torch.cat(parts, dim)), [part.shape[dim] for part in parts]

    def joined() -> QuantizedTensor:
        whole = message.wait()
        if transposed:
            of_ranks = whole.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
            codes, scales = (part.flatten(0, 1).t().contiguous() for part in of_ranks)
        else:
            codes, scales = (part.contiguous() for part in whole.split(sizes, 1))
        return QuantizedTensor(codes.view(made.codes.dtype), scales.view(made.scales.dtype), made.block)

    return joined


# ------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class PackedWeight:
    """Codes uint8 [out, in / 2] and scales uint8 [out, in / block] of a weight without its padding, contiguous, to be
    read as `blocks` of the whole weight say. exchanged: transposed. scale: of codes that FSDP gathered instead of a
    weight, FP32 0-dim the factor of their values (None: 1). amax: of NVFP4, what that was made of."""

    codes: Tensor
    scales: Tensor
    blocks: RowBlocks
    exchanged: bool = False
    scale: Tensor | None = None
    amax: Tensor | None = None

    def values(self) -> Tensor:
        """BF16 `code * scale` [padded out, in], or exchanged [in, padded out]."""
        values = unpack_rows(self.codes, self.scales, self.blocks)
        return values.t() if self.exchanged else values

    def padded(self) -> QuantizedTensor:
        """Copies of codes and scales with the padding, zeros, in every group."""
        blocks = self.blocks
        extra = (0, 0, 0, blocks.padded_group_rows - blocks.group_rows)
        codes, scales = (
            torch.nn.functional.pad(part.unflatten(0, (-1, blocks.group_rows)), extra).flatten(0, 1)
            for part in (self.codes, self.scales)
        )
        return QuantizedTensor(codes, scales.view(format_of(blocks.format).scales), (blocks.block, blocks.block))

    def t(self) -> PackedWeight:
        """The same codes with rows and columns exchanged."""
        return replace(self, exchanged=not self.exchanged)


def attach_codes(weight: Tensor, codes: PackedWeight) -> None:
    """Attach gathered codes to `weight`, which has no values."""
    _local(weight)._codes_of_weight = codes  # type: ignore[attr-defined]


def codes_of(weight: Tensor) -> PackedWeight | None:
    """What `attach_codes` attached to `weight`; None: it has values."""
    return getattr(_local(weight), "_codes_of_weight", None)


def _local(weight: Tensor) -> Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def keeps_codes(device: torch.device) -> bool:
    """Whether weights are kept on `device` as codes; else as values."""
    return cuda.gpu.available(device)


def packed_weight(w: Tensor, request: OperandRequest, group_rows: int, padded_group_rows: int) -> GemmOperand:
    """The weight `w` [out, in], BF16 or FP32 that counts as rounded to BF16, as fprop's operand: its codes.

    request: one that the backend `packs`. group_rows, padded_group_rows: of its groups of rows, see `RowBlocks`.
    """
    blocks = RowBlocks(request.operand.format, group_rows, padded_group_rows, 0, w.shape[0])
    maxima = block_maxima(w, blocks)
    amax = scale = None
    if blocks.format == "nvfp4":
        amax = shared_amax(maxima.view(torch.int32).amax().view(torch.float32), request.amax_group)
        scale = tensor_decode_scale(amax, E4M3_MAX)
    return GemmOperand(PackedWeight(*quantize_rows(w, blocks, maxima, amax), blocks, amax=amax), scale, quantized=True)


def in_square_blocks(request: OperandRequest) -> bool:
    """Whether `quantization/square_blocks.py` makes this operand."""
    operand, size = request.operand, BLOCKS.get(request.operand.format)
    plain = not request.rht and request.key is None and not operand.four_over_six
    return plain and operand.rounding == "nearest" and operand.block == (size, size)


# ------------------------------------------------------------------------------------------------------------- backend


class EmulatedBackend(Backend):
    """Exact arithmetic in PyTorch, or by the fused kernels where these make the same codes."""

    name = "emulated"
    accumulates = transposes = True

    def packs(self, request: OperandRequest) -> bool:
        """4-bit square blocks."""
        return in_square_blocks(request)

    def weight_of_codes(self, gathered: PackedWeight, operand: Operand) -> tuple[GemmOperand, GemmOperand]:
        """The codes as they are, or their values where these are kept."""
        values = gathered if keeps_codes(gathered.codes.device) else gathered.values()
        fprop = GemmOperand(values, gathered.scale, quantized=True)
        return fprop, fprop.transposed()

    def operands(
        self, x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """By the fused kernels what they can make, the rest by PyTorch.

        The kernels measure x at once; the operands are made when they are asked for, so that the two need not be in
        memory together.
        """

        def made(request: OperandRequest, kernels: Fused | None, along: str) -> GemmOperand:
            if kernels is None:
                return quantize_operand(x, request, transposed=along == "rows")
            return GemmOperand(kernels.operand(along, keep=request.keep), kernels.scales.get(along), True)

        of_columns, of_rows = fused_kernels(x, columns, rows)
        along_columns = None if columns is None else functools.partial(made, columns, of_columns, "columns")
        if rows is None:
            return along_columns, None
        if of_rows is None and codes_transpose(rows):
            # The 4-bit kernels make square blocks only along the columns. Transposed these are those along the rows.
            unkept = replace(rows, keep=False)
            square, _ = fused_kernels(x, unkept, None)
            if square is not None:
                return along_columns, lambda: made(unkept, square, "columns").transposed()
        return along_columns, functools.partial(made, rows, of_rows, "rows")

    def gemm(
        self,
        a: GemmOperand,
        b: GemmOperand,
        out_dtype: torch.dtype,
        total: Tensor | None = None,
        rows: RowGroups | None = None,
    ) -> Tensor:
        """a b^T, the tensor scales applied in FP32 before `out_dtype`; on a GPU cuBLAS adds to `total` and leaves the
        padding of `rows` out."""
        if isinstance(a.values, BlockScaled) and isinstance(b.values, BlockScaled):
            return added(matmul_fp8(a.values, b.values, out_dtype), total, rows)
        left, right = a.unpacked(), b.unpacked().t()
        if not a.quantized and not b.quantized and out_dtype == left.dtype:
            return added(left @ right, total, rows)
        # Transformer Engine's alpha = amaxA * amaxB / (36 * 448^2); the two factors are the same to an FP32 rounding.
        alpha = a.scale if b.scale is None else b.scale if a.scale is None else a.scale * b.scale
        if cuda.gpu.multiplies(left) and left.dtype == right.dtype == torch.bfloat16:
            if alpha is not None or (a.quantized and b.quantized) or total is not None or rows is not None:
                return gemm_cuda.scaled_matmul(left, right, alpha, out_dtype, total, rows)
            return torch.mm(left, right, out_dtype=torch.float32).to(out_dtype)
        product = left.to(torch.float32) @ right.to(torch.float32)
        return added((product if alpha is None else product.mul_(alpha)).to(out_dtype), total, rows)


EMULATED = EmulatedBackend()


def fused_kernels(
    x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None
) -> tuple[Fused | None, Fused | None]:
    """The fused kernels that make x's operands along its columns and along its rows; None: PyTorch does.

    Where the same kernels make both, x is measured once.
    """
    found: dict[str, tuple[type[Fused], Side]] = {}
    for along, request in (("columns", columns), ("rows", rows)):
        if request is not None and request.operand.quantized and request.dtype == torch.bfloat16:
            side = side_of(request)
            kernels = format_of(side.format).kernels(side, along) if cuda.gpu.available(x.device) else None
            if kernels is not None:
                found[along] = kernels, side
    group = next((request.amax_group for request in (columns, rows) if request is not None), None)
    if len(found) == 2 and len({(kernels, side.format) for kernels, side in found.values()}) == 1:
        (kernels, first), (_, second) = found.values()
        both = kernels(x, first, second, amax_group=group)
        return both, both
    made = {along: kernels(x, **{along: side}, amax_group=group) for along, (kernels, side) in found.items()}
    return made.get("columns"), made.get("rows")


def codes_transpose(request: OperandRequest) -> bool:
    """Whether the operand's codes are those of the transposed tensor, transposed."""
    operand = request.operand
    square = operand.quantized and operand.block[0] == operand.block[1]
    return square and not request.rht and request.key is None


def side_of(request: OperandRequest) -> Side:
    """A quantized operand's request as kernels take it."""
    operand = request.operand
    return Side(
        operand.format,
        operand.block,
        request.rht,
        request.signs,
        request.key,
        four_over_six=operand.four_over_six,
        power_of_two_scales=operand.power_of_two_scales,
        signs_key=request.signs_key if request.rht else None,
        ms_eden=operand.rounding == "ms_eden",
    )


# ---------------------------------------------------------------------------------------------------------- in PyTorch


def quantize_operand(x: Tensor, request: OperandRequest, transposed: bool = False) -> GemmOperand:
    """`x` [rows, k], or if `transposed` [k, rows], as a GEMM operand, in PyTorch on any device."""
    if not request.operand.quantized:
        return GemmOperand(operand_rows(x, request, transposed))
    encoded = encode_operand(x, request, transposed)
    return GemmOperand(encoded.block_values().to(encoded.exact), encoded.decode_scale(), True)


def encode_operand(x: Tensor, request: OperandRequest, transposed: bool = False) -> QuantizedTensor:
    """`x`, as `quantize_operand` takes it, in a quantized operand's format, scaled by the maximum of all shards."""
    rows, amax = operand_rows(x, request, transposed).to(torch.float32), None
    if format_of(request.operand.format).tensor_scale:
        amax = shared_amax(rows.abs().amax(), request.amax_group)
    return request.operand.encode(rows, request.key, amax)


def operand_rows(x: Tensor, request: OperandRequest, transposed: bool = False) -> Tensor:
    """What of `x`, as `quantize_operand` takes it, is quantized: [rows, k] in the compute dtype, transformed BF16."""
    rows = x.to(request.dtype)
    rows = rows.t() if transposed else rows
    if not request.rht:
        return rows
    return random_hadamard_transform(rows.to(torch.bfloat16), request.rht, transform_signs(request, x.device))


def transform_signs(request: OperandRequest, device: torch.device) -> Tensor:
    """FP32 [size of the request's transform] of +-1."""
    if request.signs == "fixed":
        return fixed_signs(request.rht, device)
    if request.signs == "none":
        return torch.ones(request.rht, device=device)
    assert request.signs_key is not None, "fresh signs come from a key"
    return random_signs(request.rht, request.signs_key, device)


def shared_amax(amax: Tensor, group: ProcessGroup | None) -> Tensor:
    """The largest of the FP32 0-dim maxima of `group`'s ranks; its own without a group."""
    if group is None:
        return amax
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    all_reduce_maxima(bits, group)
    return bits.view(torch.float32)
