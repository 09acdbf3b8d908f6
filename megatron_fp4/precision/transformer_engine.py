"""The native backend: Transformer Engine's quantizers and cuBLAS block-scaled GEMMs, called by our autograd function.

Like a linear of Transformer Engine, it makes two kinds of calls: a quantizer makes both operands of a tensor in one
launch (`rowwise` along its columns, `columnwise` along its rows, after the Hadamard transform if there is one), and
`general_gemm` multiplies them. This file calls these instead of `te.Linear`, so that each GEMM has its own precision,
weight gradients leave the GEMM in FP32 (and the GEMM itself adds them to those of earlier micro-batches), parameters
are DTensors, and weights are quantized once per step.

    our operand                   Transformer Engine's storage
    x, dy  [n, k] along columns   rowwise_data     [n, k],  one scale for 16 (FP8: 128) columns
    x, dy  transposed, [m, n]     columnwise_data  [m, n],  the same of the (transformed) transpose
    W                             both, from 16x16 (FP8: 128x128) blocks

MXFP8's columnwise data is not transposed: it is [n, m] with one scale for 32 rows. Quantizers may write NVFP4 scales in
the order that cuBLAS reads (`optimize_for_gemm`); `NativeOperand.decoded` returns them in their plain order.

Ranks gather weights in 16x16 blocks as codes. The project's own kernels quantize each shard of these, because
Transformer Engine's kernels take only complete blocks and ranks cut between any two rows. The codes are the same (the
self-test compares them). Gathered codes are put into the layout of the table, with scales in cuBLAS's order.

The linears of experts are one call, as in `te.GroupedLinear`: `split_quantize` quantizes the tokens of all experts, and
`general_grouped_gemm` multiplies them. The host waits for the numbers of tokens, once in a block. The tokens that an
expert gets from several ranks have one tensor scale. NVFP4's grouped kernels take multiples of 128: tokens are padded
to these, and experts with other features are emulated (`emulated_experts`).

Two things differ from the emulated backend: the order of accumulation, and the draws of stochastic rounding.
Transformer Engine draws 8 bits for each element from CUDA's default generator. For every tensor this generator gets a
state that is seeded by the emulation's key. So draws depend on seed, step, micro-batch, linear and shard, and a resumed
run repeats them; but unlike the emulation's they change with the mesh. CUDA graphs seed these states before each replay
(precision/rng.py). Not run: NVFP4 and MXFP8 in a CUDA graph; FP8 has no draws.

NaN and inf: Transformer Engine's kernels compute the maximum with instructions that ignore NaN, and convert NaN to the
largest code, so their results do not show it. Therefore this backend reads the tensor again right after the quantizer,
and NaN or inf in it sets its maximum (FP8: its scales; those of all experts) to NaN.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_fp4.precision import emulated
from megatron_fp4.precision.backend import (
    Alignment,
    Backend,
    MakeOperand,
    OperandRequest,
    RowGroups,
    added,
    block_alignment,
    first_line,
)
from megatron_fp4.precision.recipe import WGRAD_GRADIENT, Operand, Recipe
from megatron_fp4.quantization import tensor
from megatron_fp4.quantization.nvfp4 import FOUR_OVER_SIX_SCALE_MAX
from megatron_fp4.quantization.rounding import E4M3_MAX, WHOLE, Place, RoundingKey
from megatron_fp4.quantization.segments import Segments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# GEMMs need rows of a multiple of 16 bytes; MXFP8 needs complete blocks in both directions.
GEMM_MULTIPLES = {"nvfp4": 32, "mxfp8": 32, "fp8": 16}
# All three sizes of an expert in NVFP4, and how many experts one grouped kernel quantizes.
EXPERTS_MULTIPLE, EXPERTS_AT_ONCE = 128, 64
# If this divides a gradient's columns, one kernel transforms and quantizes it (on 10.x); otherwise several do.
FUSED_TRANSFORM_COLUMNS = 128
_NAN_E4M3 = 0x7F
# These variables select faster divisions and roundings, whose codes differ from those of the reference.
FAST_MATH_VARIABLES = ("NVTE_USE_FAST_MATH", "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH")


@functools.cache
def alignment(recipe: Recipe) -> Alignment:
    """Complete blocks, and a multiple of 16 bytes of codes along each GEMM's dot product."""
    multiple = max((GEMM_MULTIPLES[form] for form in recipe.formats if form in GEMM_MULTIPLES), default=1)
    blocks = block_alignment(recipe)
    tokens, inputs, outputs = (math.lcm(multiple, size) for size in (blocks.tokens, blocks.inputs, blocks.outputs))
    transformed = recipe.wgrad.rht > 0 and recipe[WGRAD_GRADIENT].format == "nvfp4"
    fast = FUSED_TRANSFORM_COLUMNS if transformed else 1
    of_experts = EXPERTS_MULTIPLE if "nvfp4" in recipe.formats else 1
    return Alignment(tokens, inputs, outputs, blocks.group_outputs, fast, of_experts)


def emulated_experts(recipe: Recipe, inputs: int, outputs: int) -> str:
    """Why experts of this size are emulated; empty: they are not."""
    multiple = alignment(recipe).of_experts
    for size, what in ((inputs, "inputs"), (outputs, "outputs")):
        if size % multiple:
            return f"{size} {what} are not a multiple of {multiple}"
    return ""


def not_installed() -> str | None:
    """Why Transformer Engine cannot be imported here; None if it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (pip install --no-build-isolation transformer-engine[pytorch])"
    try:
        _library()
    except Exception as error:  # its own checks are assertions, and other releases may have other names
        return f"Transformer Engine is installed, but its import fails: {first_line(error)}"
    return None


def fast_math_variable() -> str | None:
    """The environment variable that makes codes differ from the reference; None if none is set."""
    return next((name for name in FAST_MATH_VARIABLES if os.environ.get(name, "0") not in ("", "0")), None)


@functools.cache
def _library() -> SimpleNamespace:
    """The names of Transformer Engine that this file uses; imported at the first use."""
    # The package must be imported before its compiled module.
    from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm  # isort: skip
    import transformer_engine_torch as tex  # isort: skip
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    return SimpleNamespace(
        e4m3=tex.DType.kFloat8E4M3,
        general_gemm=general_gemm,
        general_grouped_gemm=general_grouped_gemm,
        split_quantize=tex.split_quantize,
        Float8BlockQuantizer=Float8BlockQuantizer,
        MXFP8Quantizer=MXFP8Quantizer,
        NVFP4Quantizer=NVFP4Quantizer,
    )


@dataclass(frozen=True)
class NativeLayout:
    """How a native operand is stored: everything about it but its tensors.

    along: `columns` for rowwise data, `rows` for columnwise data. storage, settings: Transformer Engine's class of its
    storage, and the arguments of that class that are not tensors; only a GEMM needs them.
    """

    operand: Operand
    along: str
    storage: type = object
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class NativeOperand:
    """One direction of a tensor that Transformer Engine quantized: [rows, k], with the dot product along k.

    data: uint8 [rows, k / 2] or E4M3 bytes [rows, k] (MXFP8 along the rows: [k, rows]). scales: in Transformer Engine's
    layout, padded. amax: the maximum of the tensor, FP32 [1], for NVFP4; otherwise None.
    """

    data: Tensor
    scales: Tensor
    amax: Tensor | None
    layout: NativeLayout
    quantized: bool = True

    @property
    def scale(self) -> Tensor | None:
        """The tensor scale, FP32 0-dim, of NVFP4; otherwise None."""
        decoded = self.decoded()
        return decoded.decode_scale() if isinstance(decoded, tensor.NVFP4Tensor) else None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.data, self.scales, self.amax

    @property
    def rebuild(self) -> Callable[..., NativeOperand]:
        return functools.partial(NativeOperand, layout=self.layout)

    @property
    def num_rows(self) -> int:
        """MXFP8's data along the rows of a tensor is [k, rows]."""
        exchanged = self.layout.operand.format == "mxfp8" and self.layout.along == "rows"
        return self.data.shape[1 if exchanged else 0]

    def storage(self) -> Any:
        """The operand as Transformer Engine's GEMM takes it."""
        name, other = ("rowwise", "columnwise") if self.layout.along == "columns" else ("columnwise", "rowwise")
        parts: dict[str, Any] = {f"{name}_data": self.data, f"{name}_scale_inv": self.scales}
        parts |= {f"{other}_data": None, f"{other}_scale_inv": None}
        if self.layout.operand.format == "nvfp4":
            parts |= {f"amax_{name}": self.amax, f"amax_{other}": None}
        return self.layout.storage(**parts, **dict(self.layout.settings))

    @staticmethod
    def of(made: tensor.QuantizedTensor, amax: Tensor | None, layout: NativeLayout) -> NativeOperand:
        """Make an operand from codes [rows, k] (NVFP4: packed) and scales [rows, k / block], one row of scales per row.
        NVFP4's scales are put in the order that cuBLAS reads."""
        codes, scales, form = made.codes.view(torch.uint8), made.scales, layout.operand.format
        rows, columns = scales.shape
        padded = rows + -rows % tensor.TILE_ROWS, columns + -columns % tensor.TILE_COLUMNS
        if form == "nvfp4":
            scales = tensor.swizzle_scales(scales).view(torch.uint8).view(padded)
            settings = {**dict(layout.settings), "with_gemm_swizzled_scales": True}
            layout = replace(layout, settings=tuple(settings.items()))
        elif form == "mxfp8":
            scales = pad(scales.view(torch.uint8), (0, padded[1] - columns, 0, padded[0] - rows))
            if layout.along == "rows":
                codes, scales = codes.t(), scales.t()
        else:
            scales = pad(scales.t(), (0, -rows % 4))
        return NativeOperand(codes.contiguous(), scales.contiguous(), amax, layout)

    def gathered(self, gather: emulated.Gather, *, transposed: bool) -> Callable[[], NativeOperand]:
        decoded = self.decoded()
        if self.amax is not None:  # the amax of other ranks may be finite, so the scales must show a NaN
            scales = decoded.scales.view(torch.uint8).masked_fill(~self.amax.isfinite(), _NAN_E4M3)
            decoded = replace(decoded, scales=scales.view(decoded.scales.dtype))
        joined = emulated.gather_slices(decoded, gather, transposed)
        return lambda: NativeOperand.of(joined(), self.amax, self.layout)

    def unpacked(self) -> Tensor:
        """FP32 [rows, k]: `code * block scale`."""
        return self.decoded().block_values()

    def decoded(self) -> tensor.QuantizedTensor:
        """Codes and scales in the layout of `QuantizedTensor`."""
        operand, rows = self.layout.operand, self.data.shape[0]
        if operand.format == "mxfp8":
            codes, scales = self.data.view(torch.float8_e4m3fn), self.scales.view(torch.uint8)
            if self.layout.along == "rows":
                codes, scales = codes.t(), scales.t()
            return tensor.QuantizedTensor(codes, scales[: codes.shape[0], : codes.shape[1] // 32], operand.block)
        if operand.format == "nvfp4":
            assert self.amax is not None
            swizzled = dict(self.layout.settings).get("with_gemm_swizzled_scales", False)
            scales = tensor.unswizzle_scales(self.scales.flatten(), *self.scales.shape) if swizzled else self.scales
            scales = scales[:rows, : self.data.shape[1] // 8].view(torch.float8_e4m3fn)
            scale_max = FOUR_OVER_SIX_SCALE_MAX if operand.four_over_six else E4M3_MAX
            return tensor.NVFP4Tensor(
                self.data.view(torch.uint8), scales, operand.block, amax=self.amax[0], scale_max=scale_max
            )
        num_blocks = self.data.shape[1] // 128
        if operand.block[0] == 1:
            scales = self.scales[:num_blocks, :rows].t()
        else:
            scales = self.scales[:, :num_blocks].repeat_interleave(128, dim=0)[:rows]
        return tensor.QuantizedTensor(self.data.view(torch.float8_e4m3fn), scales, operand.block)


@dataclass(frozen=True)
class ExpertOperands:
    """One direction of a tensor [rows, features] of several experts. parts: by expert, of those that have rows."""

    parts: dict[int, NativeOperand]
    features: int
    quantized: bool = True

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(tensor for part in self.parts.values() for tensor in part.tensors())

    @property
    def rebuild(self) -> Callable[..., ExpertOperands]:
        rebuilds, features = {expert: part.rebuild for expert, part in self.parts.items()}, self.features

        def rebuilt(*tensors: Tensor | None) -> ExpertOperands:
            parts = {expert: one(*tensors[3 * i : 3 * i + 3]) for i, (expert, one) in enumerate(rebuilds.items())}
            return ExpertOperands(parts, features)

        return rebuilt


class TransformerEngineBackend(Backend):
    """Transformer Engine's quantizers, which are kept, and its GEMM. Raises ImportError without the package."""

    name = "transformer_engine"
    accumulates = True
    draws_ours = False

    def __init__(self) -> None:
        _library()
        self._quantizers: dict[tuple[Any, ...], Any] = {}
        self._weight_layouts: dict[Operand, tuple[NativeLayout, NativeLayout]] = {}

    def alignment(self, recipe: Recipe) -> Alignment:
        return alignment(recipe)

    def of_experts(self, recipe: Recipe, inputs: int, outputs: int) -> Backend:
        return emulated.EMULATED if emulated_experts(recipe, inputs, outputs) else self

    def padded(self, segments: Segments, recipe: Recipe) -> Segments:
        needs = alignment(recipe)
        return segments.by_expert.padded_to(math.lcm(needs.tokens, needs.of_experts))

    def packs(self, weight: Operand) -> bool:
        return emulated.in_square_blocks(weight) and weight.format == "nvfp4"

    def weight_of_codes(self, gathered: emulated.PackedWeight, operand: Operand) -> tuple[NativeOperand, NativeOperand]:
        """Copies of the codes in Transformer Engine's layout, along both dimensions; a linear keeps them for a step."""
        assert gathered.amax is not None
        if operand not in self._weight_layouts:  # taken from a small tensor that the quantizer made
            block = torch.zeros(tensor.TILE_ROWS, tensor.TILE_ROWS, dtype=torch.bfloat16, device=gathered.codes.device)
            fprop, dgrad = self.quantize(block, WHOLE, OperandRequest(operand), OperandRequest(operand))
            assert dgrad is not None
            self._weight_layouts[operand] = fprop.layout, dgrad.layout
        weight, amax = gathered.padded(), gathered.amax.view(1)
        fprop_layout, dgrad_layout = self._weight_layouts[operand]
        fprop = NativeOperand.of(weight, amax, fprop_layout)
        return fprop, NativeOperand.of(weight.transposed(), amax, dgrad_layout)

    def operands(
        self, x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """One quantizer makes both operands if they are of one kind; otherwise each has its own."""
        both = as_stored is not None and transposed is not None and as_stored.operand == transposed.operand
        if both and as_stored is not None and as_stored.operand.quantized:
            made = self.quantize(x, place, as_stored, transposed)
            return lambda: made[0], lambda: made[1]
        return self._maker(x, place, as_stored, None), self._maker(x, place, None, transposed)

    def _maker(
        self, x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
    ) -> MakeOperand | None:
        request = as_stored or transposed
        if request is None:
            return None
        if not request.operand.quantized:
            return emulated.EMULATED.operands(x, place, as_stored, transposed)[as_stored is None]
        return lambda: self.quantize(x, place, as_stored, transposed)[as_stored is None]

    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, groups: RowGroups | None = None
    ) -> Tensor:
        """a b^T: native if both sides are quantized, else an ordinary GEMM (support.py refuses mixtures)."""
        if isinstance(a, emulated.GemmOperand) and isinstance(b, emulated.GemmOperand):
            return emulated.EMULATED.gemm(a, b, out_dtype, total, groups)
        if groups is not None:
            return added(self.gemm(a, b, out_dtype), total, groups)
        assert isinstance(a, NativeOperand) and isinstance(b, NativeOperand), "one side of a GEMM is not quantized"
        out = _library().general_gemm(
            b.storage(), a.storage(), out_dtype=out_dtype, out=total, accumulate=total is not None, **_settings(a, b)
        )
        return out[0]

    def grouped_gemm(
        self, name: str, a: Any, b: Any, segments: Segments, out_dtype: torch.dtype, total: Tensor | None = None
    ) -> Tensor:
        """As `Backend.grouped_gemm`: native if both sides are quantized."""
        if isinstance(a, emulated.GemmOperand) and isinstance(b, emulated.GemmOperand):
            return emulated.EMULATED.grouped_gemm(name, a, b, segments, out_dtype, total)
        assert isinstance(a, ExpertOperands) and isinstance(b, ExpertOperands), "one side of a GEMM is not quantized"
        pairs, device = [(of_a, b.parts[expert]) for expert, of_a in a.parts.items()], segments.counts.device
        if name == "wgrad":
            shape = segments.num_experts, a.features, b.features
            out = torch.zeros(shape, dtype=out_dtype, device=device) if total is None else total
            self.multiply(pairs, [out[expert] for expert in a.parts], accumulate=total is not None)
            return out
        padded = [of_a.num_rows for of_a, _ in pairs]
        columns = next(iter(b.parts.values())).num_rows
        products = torch.empty(sum(padded), columns, dtype=out_dtype, device=device).split(padded)
        self.multiply(pairs, list(products), accumulate=False)
        counts = [rows.stop - rows.start for rows, _ in segments.sizes]
        kept = [product[: counts[expert]] for expert, product in zip(a.parts, products, strict=True)]
        rest = torch.zeros(segments.rows - sum(counts), columns, dtype=out_dtype, device=device)
        return torch.cat([*kept, rest])

    def multiply(self, pairs: list[tuple[NativeOperand, NativeOperand]], outs: list[Tensor], accumulate: bool) -> None:
        """Write a b^T of each pair into its tensor of `outs`, or add it."""
        if pairs:
            _library().general_grouped_gemm(
                [b.storage() for _, b in pairs],
                [a.storage() for a, _ in pairs],
                outs,
                [None] * len(pairs),
                outs[0].dtype,
                m_splits=[len(out) for out in outs],
                accumulate=accumulate,
                **_settings(*pairs[0]),
            )

    def quantize(
        self, x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
    ) -> tuple[Any, Any]:
        """Operands of one kind from x [n, m], or from the rows of each expert if the place has segments: along its
        columns, even without a request, and along its rows (None without a request)."""
        if (segments := place.segments) is None:
            return self.quantize_parts(x, [len(x)], place, as_stored, transposed)[0]
        x = segments.pad(x) if len(x) == segments.rows else x
        rows = {expert: of.stop - of.start for expert, (_, of) in enumerate(segments.sizes) if of.stop > of.start}
        parts = x[: sum(rows.values())], list(rows.values())
        made = self.quantize_parts(*parts, WHOLE, as_stored, transposed) if rows else []
        along_columns, along_rows = (
            ExpertOperands({expert: of[side] for expert, of in zip(rows, made, strict=True)}, x.shape[1])
            for side in (0, 1)
        )
        return along_columns, None if transposed is None else along_rows

    def quantize_parts(
        self,
        x: Tensor,
        rows: list[int],
        place: Place,
        as_stored: OperandRequest | None,
        transposed: OperandRequest | None,
    ) -> list[tuple[NativeOperand, Any]]:
        """As `quantize`, for each part of x by itself. rows: the number of rows of each part, in order. place: of x."""
        request = as_stored or transposed
        assert request is not None
        hadamard, signs = transposed is not None and transposed.rht > 0, request.signs == "fixed"
        options = (request.operand, transposed is not None, hadamard, signs, place.amax_groups)
        key = (*options, x.device.index)
        if key not in self._quantizers:
            self._quantizers[key] = _new_quantizer(*options)
        x = x.to(request.dtype).contiguous()
        drawn_at = place if as_stored is not None else place.t()
        draws = nullcontext() if request.key is None else _seeded(request.key.at(drawn_at), x.device)
        with torch.cuda.device(x.device), draws:
            storages = _quantized(self._quantizers[key], x, rows, one_by_one=request.operand.block[0] > 1)
        # The kernels ignore NaN, this norm does not. Below, 0 * largest is added: it is 0, or NaN for NaN and inf.
        largest = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)

        def operand(storage: Any, name: str, along: str) -> NativeOperand:
            parts = storage.get_metadata()
            settings = tuple((k, None if k == "quantizer" else v) for k, v in parts.items() if k not in _TENSORS)
            scales, amax = parts[f"{name}_scale_inv"], parts.get(f"amax_{name}")
            if request.operand.format == "mxfp8":
                scales.masked_fill_(~largest.isfinite(), 255)  # an addition cannot set a byte to NaN
            else:
                (scales if amax is None else amax).add_(largest, alpha=0)
            layout = NativeLayout(request.operand, along, type(storage), settings)
            return NativeOperand(parts[f"{name}_data"], scales, amax, layout)

        return [
            (operand(of, "rowwise", "columns"), None if transposed is None else operand(of, "columnwise", "rows"))
            for of in storages
        ]


def _settings(a: NativeOperand, b: NativeOperand) -> dict[str, Any]:
    """Of the GEMM a b^T. Its A is our b, its B our a. The layout names A first. A: T if its dot product lies along
    stored columns; B: N if so."""
    layout = ("T" if b.layout.along == "columns" else "N") + ("N" if a.layout.along == "columns" else "T")
    return {"layout": layout, "grad": layout != "TN", "use_split_accumulator": True}


def _quantized(quantizer: Any, x: Tensor, rows: list[int], one_by_one: bool) -> list[Any]:
    """The quantized parts of x. rows: the number of rows of each part. one_by_one: no grouped kernel has this block."""
    if one_by_one or len(rows) == 1:
        return [quantizer(part) for part in x.split(rows)]
    groups = [rows[i : i + EXPERTS_AT_ONCE] for i in range(0, len(rows), EXPERTS_AT_ONCE)]
    parts = zip(x.split([sum(group) for group in groups]), groups, strict=True)
    return [s for part, group in parts for s in _library().split_quantize(part, group, [quantizer] * len(group))]


class LoneExpert(TransformerEngineBackend):
    """The kernels for experts behind the interface for a lone linear, for tests: it is the second of two experts."""

    def alignment(self, recipe: Recipe) -> Alignment:
        needs = alignment(recipe)
        tokens = math.lcm(needs.tokens, needs.of_experts)
        return Alignment(tokens, needs.inputs, needs.outputs, needs.group_outputs)

    def packs(self, weight: Operand) -> bool:
        return False

    def quantize(
        self, x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
    ) -> tuple[Any, Any]:
        both, rows = torch.cat((2 * x.flip(0), x)), [len(x), len(x)]
        return self.quantize_parts(both, rows, place, as_stored, transposed)[1]

    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, groups: RowGroups | None = None
    ) -> Tensor:
        if groups is not None or not isinstance(a, NativeOperand):
            return super().gemm(a, b, out_dtype, total, groups)
        shape = a.num_rows, b.num_rows
        out = torch.empty(shape, dtype=out_dtype, device=a.data.device) if total is None else total
        self.multiply([(a, b), (a, b)], [torch.zeros_like(out), out], accumulate=total is not None)
        return out


_TENSORS = (
    *("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"),
    *("amax_rowwise", "amax_columnwise"),
)


def _new_quantizer(
    operand: Operand, rows: bool, hadamard: bool, signs: bool, amax_groups: tuple[ProcessGroup, ...]
) -> Any:
    assert len(amax_groups) <= 1, "Transformer Engine reduces a maximum over one group"
    library, square, flags = _library(), operand.block[0] > 1, dict[str, Any]()
    if operand.format == "fp8":
        quantizer = library.Float8BlockQuantizer(
            library.e4m3,
            rowwise=True,
            columnwise=rows,
            force_pow_2_scales=operand.power_of_two_scales,
            block_scaling_dim=2 if square else 1,
        )
    elif operand.format == "mxfp8":
        quantizer = library.MXFP8Quantizer(library.e4m3, rowwise=True, columnwise=rows)
    else:
        if operand.four_over_six:
            mode = {"absolute": "MAE", "squared": "MSE"}[operand.four_over_six]
            largest = int(FOUR_OVER_SIX_SCALE_MAX)
            flags = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": largest, "nvfp4_4over6_err_mode": mode}
        quantizer = library.NVFP4Quantizer(
            rowwise=True,
            columnwise=rows,
            with_amax_reduction=bool(amax_groups),
            amax_reduction_group=next(iter(amax_groups), None),
            with_rht=hadamard,
            with_post_rht_amax=hadamard,
            with_2d_quantization=square,
            stochastic_rounding=operand.rounding == "stochastic",
            with_random_sign_mask=signs,
            **flags,
        )
        quantizer.optimize_for_gemm = True
    quantizer.internal = True  # it returns a plain container, not a subclass of Tensor
    return quantizer


@contextmanager
def _seeded(key: RoundingKey, device: torch.device) -> Iterator[None]:
    """Give CUDA's default generator, which Transformer Engine draws from, a state seeded by `key`, offsets included; by
    `graphsafe` calls, because the others copy states, which a capture does not allow."""
    default = torch.cuda.default_generators[device.index or 0]
    of_graph = key.graph_generator
    seeded = torch.Generator(device).manual_seed(key.seed) if of_graph is None else of_graph(key.place)
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(seeded)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)
