"""The emulated backend: exact NVFP4, MXFP4, MXFP8 and FP8 GEMMs on any device.

A block-scaled tensor core computes sum_k (code_a * scale_a) (code_b * scale_b) in FP32 and then multiplies by the FP32
tensor scales. Every product E2M1 x E4M3 (or E2M1 x power of two) has at most six significant bits, so it is exact in
BF16: an ordinary GEMM of these values with FP32 accumulation, followed by the same multiplication, gives the same
result up to the order of accumulation. The tensor scale must *not* be multiplied into the values before they are cast
to BF16; that would round nearly all of them. E4M3 codes with power-of-two scales are exact in BF16 too; with FP32
scales they need FP32 operands, or a GEMM that applies the scales block by block. `sums.py` has Blackwell's order.

On a CPU, PyTorch computes. On an NVIDIA GPU of compute capability 8.0 or more, the kernels of `quantization/kernels`
and cuBLAS compute. PyTorch computes operands that have no kernel (four-over-six in square blocks, unusual transforms,
FP32 activations), and all operands on other GPUs; this is tens of times slower. The codes are the same bits everywhere.
A warning says once why a device does not use the kernels.

On a GPU weights are kept as 4-bit codes, which take 0.56 bytes per parameter; values take 2. Square blocks rounded to
nearest have the same codes along both dimensions (`quantization/square_blocks.py`), so fprop and dgrad use one packed
copy, for all micro-batches of a step. A GEMM unpacks it to BF16 values, which are exact, and frees these afterwards.
`packed_weight` makes the codes from this rank's complete weight, or ranks gather the codes that they made from their
shards (`parallel/gathered_codes.py`); both have the same bits. On a CPU values are kept instead (`keeps_codes`),
because unpacking is slow there compared with the GEMMs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fp4.precision import gemm_cuda
from megatron_fp4.precision.backend import Backend, MakeOperand, OperandRequest, RowGroups, added
from megatron_fp4.precision.grouped_gemm import multiply_rows, multiply_weights
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.precision.sums import blackwell_product
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Fused, Packed, Side
from megatron_fp4.quantization.formats import Format, format_of
from megatron_fp4.quantization.fp4 import PackedColumns, PackedRows
from megatron_fp4.quantization.fp8 import BlockScaled, matmul_fp8
from megatron_fp4.quantization.hadamard import fixed_signs, random_hadamard_transform, random_signs
from megatron_fp4.quantization.rounding import E4M3_MAX, Place, Span
from megatron_fp4.quantization.segments import Segments
from megatron_fp4.quantization.square_blocks import BLOCKS, RowBlocks, block_maxima, quantize_rows, unpack_rows
from megatron_fp4.quantization.tensor import QuantizedTensor, all_reduce_maxima, tensor_decode_scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Starts to gather a tensor over ranks; `wait()` of its result returns the gathered tensor.
Gather = Callable[[Tensor], Any]


@dataclass(frozen=True)
class GemmOperand:
    """One side of a GEMM, with the dot product along the last dimension.

    values: [rows, k]; of a quantized operand `code * block scale` without the tensor scale (FP32 for FP8 with FP32
    scales, otherwise BF16), or the codes and scales of these values; otherwise the tensor itself. scale: the factor
    between `values` and the real values, FP32 0-dim; None: 1. quantized: whether a quantizer made `values`; if it made
    neither side, the GEMM is an ordinary one.
    """

    values: Tensor | Packed
    scale: Tensor | None = None
    quantized: bool = False

    def decoded(self) -> None:
        """None: this backend keeps values, not codes."""

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
        # Tokens must be the first dimension; in MXFP8's packed codes they are.
        tokens_last, plain = transposed and isinstance(values, Tensor | BlockScaled), isinstance(values, Tensor)
        parts = (values,) if isinstance(values, Tensor) else (values.codes, values.scales)
        messages = [gather(part.t() if tokens_last else part) for part in parts]
        packing, is_contiguous = type(values), parts[0].is_contiguous()

        def all_tokens() -> GemmOperand:
            received = [message.wait().t() if tokens_last else message.wait() for message in messages]
            if plain:
                return GemmOperand(received[0].contiguous() if is_contiguous else received[0], scale, quantized)
            return GemmOperand(packing(*received), scale, quantized)  # type: ignore[call-arg]

        return all_tokens

    @property
    def main(self) -> Tensor:
        """Values or codes [rows, k]."""
        assert isinstance(self.values, Tensor | BlockScaled), "packed codes have another shape"
        return self.values if isinstance(self.values, Tensor) else self.values.codes

    def part(self, dim: int, rows: slice, segment: int) -> GemmOperand:
        """Of an operand whose dimension `dim` consists of segments, one segment: its `rows`."""

        def of(tensor: Tensor) -> Tensor:
            per_row = self.main.shape[dim] // tensor.shape[dim]  # rows that share a scale
            return tensor.narrow(dim, rows.start // per_row, (rows.stop - rows.start) // per_row)

        values = self.values
        part = of(values) if isinstance(values, Tensor) else BlockScaled(of(values.codes), of(values.scales))
        return GemmOperand(part, None if self.scale is None else self.scale[segment], self.quantized)

    def unpacked(self) -> Tensor:
        return self.values if isinstance(self.values, Tensor) else self.values.values()


def gather_slices(made: QuantizedTensor, gather: Gather, transposed: bool) -> Callable[[], QuantizedTensor]:
    """Start `gather` for the codes and scales of a slice of the tokens, `made` [rows, k], in one message. Returns a
    function that waits and returns those of all tokens. transposed: rows are features and k runs over tokens."""
    # Flat, because a dimension of size 1 may have any stride.
    parts = [part.flatten().view(torch.uint8).view(part.shape[0], -1) for part in (made.codes, made.scales)]
    if transposed:
        parts = [part.t() for part in parts]
    dim = 0 if transposed else 1
    message, sizes = gather(torch.cat(parts, dim)), [part.shape[dim] for part in parts]

    def joined() -> QuantizedTensor:
        received = message.wait()
        if transposed:
            by_rank = received.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
            codes, scales = (part.flatten(0, 1).t().contiguous() for part in by_rank)
        else:
            codes, scales = (part.contiguous() for part in received.split(sizes, 1))
        return QuantizedTensor(codes.view(made.codes.dtype), scales.view(made.scales.dtype), made.block)

    return joined


# ------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class PackedWeight:
    """A weight without its padding: codes uint8 [out, in / 2], block scales uint8 [out, in / block]; both contiguous.

    blocks: how rows of the padded weight form blocks. exchanged: whether it is transposed. scale: for codes that ranks
    gathered instead of a weight, the factor of their values, FP32 0-dim; None: 1. amax: the weight's, for NVFP4.
    """

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
        """Copies of codes and scales, padded with zeros in every group."""
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
    """The codes that `attach_codes` attached to `weight`; None: it has values."""
    return getattr(_local(weight), "_codes_of_weight", None)


def _local(weight: Tensor) -> Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def keeps_codes(device: torch.device) -> bool:
    """Whether weights are kept as codes on `device`; otherwise they are kept as values."""
    return cuda.gpu.available(device)


def packed_weight(w: Tensor, place: Place, request: OperandRequest, groups: RowGroups) -> GemmOperand:
    """fprop's operand, as codes, of the weight `w` [out, in], which is BF16, or FP32 that counts as rounded to BF16.

    request: of an operand that the backend `packs`. groups: the groups of its rows, with their padding.
    """
    blocks = RowBlocks(request.operand.format, groups.kept, groups.padded, 0, w.shape[0])
    maxima = block_maxima(w, blocks)
    amax = scale = None
    if blocks.format == "nvfp4":
        amax = shared_amax(maxima.view(torch.int32).amax().view(torch.float32), place.amax_groups)
        scale = tensor_decode_scale(amax, E4M3_MAX)
    return GemmOperand(PackedWeight(*quantize_rows(w, blocks, maxima, amax), blocks, amax=amax), scale, quantized=True)


def in_square_blocks(operand: Operand) -> bool:
    """Whether the operand has a format and a block of `quantization/square_blocks.py`, which rounds to nearest."""
    size = BLOCKS.get(operand.format)
    return operand.block == (size, size) and not operand.four_over_six


# ------------------------------------------------------------------------------------------------------------- backend


class EmulatedBackend(Backend):
    """Exact arithmetic in PyTorch, or in the fused kernels if they make the same codes.

    sums: as in `precision.sums`, of GEMMs whose operands are both quantized; `blackwell` only of NVFP4.
    """

    name = "emulated"
    accumulates = transposes = True
    sums = "fp32"

    def __init__(self, sums: str = "fp32") -> None:
        self.sums = sums

    def packs(self, weight: Operand) -> bool:
        return in_square_blocks(weight)

    def weight_of_codes(self, gathered: PackedWeight, operand: Operand) -> tuple[GemmOperand, GemmOperand]:
        """The gathered codes themselves, or their values if the device keeps values."""
        values = gathered if keeps_codes(gathered.codes.device) else gathered.values()
        fprop = GemmOperand(values, gathered.scale, quantized=True)
        return fprop, fprop.transposed()

    def operands(
        self, x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """The fused kernels make the operands that they can, PyTorch the others.

        The kernels compute the maxima of x here. The operands are made in the calls, so that not both are in memory.
        """

        def make(request: OperandRequest, kernels: Fused | None, along: str) -> GemmOperand:
            if kernels is None and place.segments is not None:
                return self._in_segments(x, place, request, along == "rows")
            if kernels is None:
                return quantize_operand(*rows_of(x, place, along == "rows"), request)
            return GemmOperand(kernels.operand(along, keep=request.keep), kernels.scales.get(along), True)

        columns_kernels, rows_kernels = fused_kernels(x, place, as_stored, transposed)
        make_stored = None if as_stored is None else functools.partial(make, as_stored, columns_kernels, "columns")
        if transposed is None:
            return make_stored, None
        if rows_kernels is None and codes_transpose(transposed):
            # The 4-bit kernels make square blocks along the columns only; transposed, they are those along the rows.
            unkept = replace(transposed, keep=False)
            square, _ = fused_kernels(x, place, unkept, None)
            if square is not None:
                return make_stored, lambda: make(unkept, square, "columns").transposed()
        return make_stored, functools.partial(make, transposed, rows_kernels, "rows")

    def gemm(
        self,
        a: GemmOperand,
        b: GemmOperand,
        out_dtype: torch.dtype,
        total: Tensor | None = None,
        groups: RowGroups | None = None,
    ) -> Tensor:
        """a b^T, multiplied by the tensor scales in FP32 before it is rounded to `out_dtype`. On a GPU, cuBLAS itself
        adds to `total` and leaves out the padding of `groups`."""
        if isinstance(a.values, BlockScaled) and isinstance(b.values, BlockScaled):
            return added(matmul_fp8(a.values, b.values, out_dtype), total, groups)
        if self.sums == "blackwell" and a.quantized and b.quantized:
            assert a.scale is not None and b.scale is not None, "only NVFP4's order of sums is published"
            return blackwell_product(a.unpacked(), b.unpacked(), a.scale * b.scale, out_dtype, total, groups)
        left, right = a.unpacked(), b.unpacked().t()
        if not a.quantized and not b.quantized and out_dtype == left.dtype:
            return added(left @ right, total, groups)
        # Transformer Engine's alpha = amaxA * amaxB / (36 * 448^2) is the same factor up to a rounding in FP32.
        alpha = a.scale if b.scale is None else b.scale if a.scale is None else a.scale * b.scale
        if cuda.gpu.multiplies(left) and left.dtype == right.dtype == torch.bfloat16:
            if alpha is not None or (a.quantized and b.quantized) or total is not None or groups is not None:
                return gemm_cuda.scaled_matmul(left, right, alpha, out_dtype, total, groups)
            return torch.mm(left, right, out_dtype=torch.float32).to(out_dtype)
        product = left.to(torch.float32) @ right.to(torch.float32)
        return added((product if alpha is None else product.mul_(alpha)).to(out_dtype), total, groups)

    def _in_segments(self, x: Tensor, place: Place, request: OperandRequest, transposed: bool) -> GemmOperand:
        """The operand of x as it is stored, or transposed. x may have the padding."""
        segments = place.segments
        assert segments is not None
        padded, positions = segments.pad(x) if x.shape[0] == segments.rows else x, segments.padded_positions

        def made(part: Tensor, at: int | Tensor, keep: bool) -> GemmOperand:
            asked = replace(request, keep=keep)
            make = self.operands(
                part, Place(Span(at), place.columns), *((None, asked) if transposed else (asked, None))
            )
            return make[transposed]()  # type: ignore[misc, no-any-return]

        if not request.operand.quantized or not format_of(request.operand.format).scope:
            return made(padded, positions, request.keep)
        dim, one = int(transposed), torch.ones((), device=x.device)
        values, scales, end = list[Tensor](), [one] * len(segments.counts), 0
        for number, (_, rows) in enumerate(segments.sizes):
            if rows.start < rows.stop:
                at = rows.start + positions if isinstance(positions, int) else positions[rows]
                operand, end = made(padded[rows], at, False), rows.stop
                values.append(operand.unpacked())
                scales[number] = one if operand.scale is None else operand.scale
        rest = padded[end:].to(values[0].dtype if values else torch.bfloat16)  # zeros
        return GemmOperand(torch.cat([*values, rest.t() if transposed else rest], dim), torch.stack(scales), True)

    def grouped_gemm(
        self,
        name: str,
        a: GemmOperand,
        b: GemmOperand,
        segments: Segments,
        out_dtype: torch.dtype,
        total: Tensor | None = None,
    ) -> Tensor:
        """As `Backend.grouped_gemm`: by the grouped kernels, or a `gemm` for each segment."""
        sides = [of if isinstance(of.values, BlockScaled) else replace(of, values=of.unpacked()) for of in (a, b)]
        left, right = (side.main for side in sides)
        plain = all(isinstance(side.values, Tensor) and side.values.dtype == torch.bfloat16 for side in sides)
        plain = plain and (self.sums == "fp32" or not a.quantized or not b.quantized)
        by_kernels, num_experts = plain and cuda.gpu.available(left.device), segments.num_experts
        if name == "wgrad":
            if by_kernels:
                return multiply_weights(left, right, a.scale, b.scale, segments, total)
            shape = num_experts, left.shape[0], right.shape[0]
            out = torch.zeros(shape, dtype=out_dtype, device=left.device) if total is None else total
            for number, (_, rows) in enumerate(segments.sizes):
                if rows.start < rows.stop:
                    x, y = (side.part(1, rows, number) for side in sides)
                    self.gemm(x, y, out_dtype, out[number % num_experts])
            return out
        dim = int(name == "dgrad")  # of b: experts share it
        size = right.shape[dim] // num_experts
        n, k = (right.shape[0], size) if dim else (size, right.shape[1])
        if by_kernels:
            return multiply_rows(left, right, a.scale, b.scale, segments, out_dtype, per_expert=(n, k))
        out = torch.zeros(segments.rows, n, dtype=out_dtype, device=left.device)
        for number, (rows, padded) in enumerate(segments.sizes):
            if rows.start < rows.stop:
                expert = number % num_experts
                weight = sides[1].part(dim, slice(expert * size, (expert + 1) * size), expert)
                out[rows] = self.gemm(sides[0].part(0, padded, number), weight, out_dtype)[: rows.stop - rows.start]
        return out


EMULATED = EmulatedBackend()


def fused_kernels(
    x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
) -> tuple[Fused | None, Fused | None]:
    """The fused kernels that make x's operands along its columns and along its rows; None: PyTorch makes it.

    If the same kernels make both, they compute the maxima of x once.
    """
    sides: dict[str, tuple[type[Fused], Side]] = {}
    for along, request in (("columns", as_stored), ("rows", transposed)):
        if request is not None and request.operand.quantized and request.dtype == torch.bfloat16:
            side = side_of(request)
            kernels = format_of(side.format).kernels(side, along) if cuda.gpu.available(x.device) else None
            if kernels is not None and (place.segments is None or kernels.in_segments):
                sides[along] = kernels, side
    if len(sides) == 2 and len({(kernels, side.format) for kernels, side in sides.values()}) == 1:
        (kernels, first), (_, second) = sides.values()
        both = kernels(x, first, second, place)
        return both, both
    made = {along: kernels(x, **{along: side}, place=place) for along, (kernels, side) in sides.items()}
    return made.get("columns"), made.get("rows")


def rows_of(x: Tensor, place: Place, transposed: bool) -> tuple[Tensor, Place]:
    """The rows [rows, k] of x's operand as it is stored, or transposed, and their place."""
    return (x.t(), place.t()) if transposed else (x, place)


def codes_transpose(request: OperandRequest) -> bool:
    """Whether the tensor and its transpose have the same codes, transposed."""
    operand = request.operand
    square = operand.quantized and operand.block[0] == operand.block[1]
    return square and not request.rht and request.key is None


def side_of(request: OperandRequest) -> Side:
    """The request for a quantized operand in the form that kernels take."""
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


def quantize_operand(rows: Tensor, place: Place, request: OperandRequest) -> GemmOperand:
    """Make a GEMM operand from `rows` [rows, k] at `place`, in PyTorch on any device."""
    if not request.operand.quantized:
        return GemmOperand(operand_rows(rows, request))
    encoded = encode_operand(rows, place, request)
    return GemmOperand(encoded.block_values().to(encoded.exact), encoded.decode_scale(), True)


def encode_operand(rows: Tensor, place: Place, request: OperandRequest) -> QuantizedTensor:
    """Codes and scales of `rows` (as in `quantize_operand`), scaled by the maximum of all ranks of the place."""
    rows = operand_rows(rows, request).to(torch.float32)
    amax = amax_of(rows, place, format_of(request.operand.format))
    return request.operand.encode(rows, request.key and request.key.at(place), amax)


def amax_of(rows: Tensor, place: Place, form: Format) -> Tensor | None:
    """`form.amax` of FP32 [rows, k] at `place`, of all ranks that share it."""
    amax = form.amax(rows)
    return None if amax is None else shared_amax(amax, form.amax_groups(place))


def operand_rows(rows: Tensor, request: OperandRequest) -> Tensor:
    """`rows` [rows, k] before quantization: in the compute dtype, or in BF16 after the transform."""
    rows = rows.to(request.dtype)
    if not request.rht:
        return rows
    return random_hadamard_transform(rows.to(torch.bfloat16), request.rht, transform_signs(request, rows.device))


def transform_signs(request: OperandRequest, device: torch.device) -> Tensor:
    """The signs of the request's transform, +-1, FP32 [request.rht]."""
    if request.signs == "fixed":
        return fixed_signs(request.rht, device)
    if request.signs == "none":
        return torch.ones(request.rht, device=device)
    assert request.signs_key is not None, "fresh signs need a key"
    return random_signs(request.rht, request.signs_key, device)


def shared_amax(amax: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """The largest FP32 `amax`, elementwise, of the ranks of `groups`; without groups, `amax` itself."""
    if not groups:
        return amax
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    all_reduce_maxima(bits, groups)
    return bits.view(torch.float32)
