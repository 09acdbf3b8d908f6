"""The interface of a backend: it makes the operands of GEMMs and multiplies them; the linear does the rest.

There are three backends: `emulated` (exact arithmetic on any device), `transformer_engine` (native kernels on Blackwell
and Hopper) and `torch` (the emulation's codes, multiplied by Blackwell's tensor cores). The run's controller (plan.py)
gives each linear its backend. A backend multiplies only operands that it made itself.

`Alignment` describes what kernels require of a linear's sizes; padding, `--check` and tests read it. A linear
multiplies x [tokens, inputs] and W [outputs, inputs]. Each of the three sizes is the dot product of one GEMM and a
number of rows in the other two. A quantized operand needs complete blocks in both directions, because kernels load
square tiles of the block's size, whichever dimension the scales lie along. So a format has one multiple for all three
sizes. A Hadamard transform requires a multiple of its size, and tensor cores may require more (`Backend.alignment`).

    tokens, outputs    the linear pads them with zeros, which changes no code and no product
    inputs             the user chose them as a width of the model; the configuration check refuses other widths

The multiples are the same on every device, because draws depend on positions in the padded tensor.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_fp4.precision.recipe import Operand, OperandSlot, Recipe
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import Place, RoundingKey
from megatron_fp4.quantization.segments import Segments

if TYPE_CHECKING:
    from megatron_fp4.quantization.tensor import QuantizedTensor


@dataclass(frozen=True)
class Alignment:
    """The multiples that a linear's sizes on one rank must have.

    tokens, inputs, outputs: for the whole operands. group_outputs: for each group of output features (the heads of a
    packed projection), so that no block contains rows of two groups, and hence of two ranks. fast_outputs: for the
    output features, to get a faster kernel; groups that need padding are padded to it if that adds at most 1/16.
    of_experts: what all three of an expert's linear must be in addition.
    """

    tokens: int = 1
    inputs: int = 1
    outputs: int = 1
    group_outputs: int = 1
    fast_outputs: int = 1
    of_experts: int = 1

    def padded_tokens(self, tokens: int) -> int:
        return -(-tokens // self.tokens) * self.tokens

    def padded_group(self, group_rows: int, num_groups: int) -> int:
        """Output features of one of `num_groups` groups of `group_rows`, padding included."""

        def padded(outputs: int) -> int:  # such that all groups together are a multiple of `outputs`
            multiple = math.lcm(self.group_outputs, outputs // math.gcd(outputs, num_groups))
            return -(-group_rows // multiple) * multiple

        size, fast = padded(self.outputs), padded(math.lcm(self.outputs, self.fast_outputs))
        return fast if size != group_rows and fast - size <= size // 16 else size


@functools.cache
def block_alignment(recipe: Recipe) -> Alignment:
    """What the blocks and transforms of `recipe` require with every backend: sizes that they divide.

    Raises ValueError for an unknown format.
    """
    quantized = (operand for operand in recipe.operands.values() if operand.quantized)
    tile = max((format_of(operand.format).multiple(operand.block) for operand in quantized), default=1)
    outputs = max(tile, recipe.dgrad.rht)
    tokens, inputs = max(tile, recipe.wgrad.rht), max(tile, recipe.fprop.rht)
    return Alignment(tokens=tokens, inputs=inputs, outputs=outputs, group_outputs=outputs)


@dataclass(frozen=True)
class OperandRequest:
    """How to turn a tensor into an operand of one GEMM. Requests for the same operand are equal.

    operand: format, block and rounding. rht: the size of the Hadamard transform before quantization (its input and
    output are BF16); 0: none. signs: the signs of the transform: `fixed`, `none`, or `fresh`, drawn with `signs_key`.
    key: for the draws of stochastic rounding; None rounds to nearest. slot: which operand of the recipe it is; probes
    and watchers read it. dtype: the compute dtype; an FP32 tensor (a weight) counts as rounded to it. keep: make the
    operand as small as possible, because it is sent to other ranks or kept for the backward pass.
    """

    operand: Operand
    rht: int = 0
    signs: str = "fixed"
    key: RoundingKey | None = None
    signs_key: RoundingKey | None = None
    slot: OperandSlot | None = field(default=None, compare=False)
    dtype: torch.dtype = torch.bfloat16
    keep: bool = field(default=False, compare=False)


Rows = TypeVar("Rows", int, Tensor, int | Tensor)


@dataclass(frozen=True)
class RowGroups:
    """Rows in equal groups of `padded` rows, of which the first `kept` are rows of the tensor and the rest padding."""

    padded: int
    kept: int

    def unpadded(self, product: Tensor) -> Tensor:
        """[groups * padded, n] -> [groups * kept, n], contiguous."""
        return self.unpadded_view(product).flatten(0, 1)

    def unpadded_view(self, product: Tensor) -> Tensor:
        """[groups * padded, n] -> a view [groups, kept, n]."""
        return product.unflatten(0, (-1, self.padded))[:, : self.kept]

    def padded_indices(self, rows: Rows) -> Rows:
        """An index or indices of rows without the padding -> those of the same rows with it."""
        return rows // self.kept * self.padded + rows % self.kept


def added(product: Tensor, total: Tensor | None, groups: RowGroups | None) -> Tensor:
    """The product [m, n] without the padding of `groups`, contiguous; if there is a `total`, added to it in place."""
    if total is None:
        return product if groups is None else groups.unpadded(product)
    if groups is None:
        return total.add_(product)
    total.unflatten(0, (-1, groups.kept)).add_(groups.unpadded_view(product))
    return total


class BackendOperand(Protocol):
    """One side of a GEMM, with the dot product along the last dimension. Only its backend knows what it holds."""

    @property
    def quantized(self) -> bool:
        """Whether a quantizer made it."""

    @property
    def scale(self) -> Tensor | None:
        """The factor between `unpacked()` and the real values, FP32 0-dim; None: 1."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors, some of them None, which an autograd function saves."""

    @property
    def rebuild(self) -> Callable[..., Any]:
        """A function that makes the operand from its `tensors()`; it holds none of them."""

    def unpacked(self) -> Tensor:
        """The values [rows, k] without the tensor scale."""

    def decoded(self) -> QuantizedTensor | None:
        """Codes and scales in the layout of `QuantizedTensor`; None if the operand holds values instead of codes."""

    def gathered(self, gather: Any, *, transposed: bool) -> Any:
        """Start `gather` for this operand of a slice of the tokens. Returns a function that waits and returns that of
        all tokens. transposed: the dot product runs over tokens."""


MakeOperand = Callable[[], Any]


class Backend(ABC):
    """The interface that a linear uses.

    name: as in `precision.backend`. accumulates: wgrad's GEMM itself adds to the gradient of earlier micro-batches,
    which rounds once; a GEMM and an addition round twice. transposes: all operands have `transposed()`, which exchanges
    rows and columns, so a GEMM along one dimension can use codes made along the other; not so for tensor cores, whose
    scales lie along the dot product. draws_ours: stochastic rounding uses the project's own keys. multiplies_chunks:
    whether it has `gemm_of_chunk`.
    """

    name: str
    accumulates = False
    transposes = False
    draws_ours = True
    multiplies_chunks = False

    def alignment(self, recipe: Recipe) -> Alignment:
        """What its kernels require of a linear's sizes on one rank with `recipe`."""
        return block_alignment(recipe)

    def of_experts(self, recipe: Recipe, inputs: int, outputs: int) -> Backend:
        """The backend of experts' linears of this size: this one, or the emulation."""
        return self

    def padded(self, segments: Segments, recipe: Recipe) -> Segments:
        """The segments as this backend computes them, with the padding that `recipe` needs."""
        return segments.padded_to(self.alignment(recipe).tokens)

    @abstractmethod
    def packs(self, weight: Operand) -> bool:
        """Whether ranks can gather this weight, whose codes are the same in fprop and dgrad, as codes."""

    @abstractmethod
    def weight_of_codes(self, gathered: Any, operand: Operand) -> tuple[Any, Any]:
        """The operands of fprop and dgrad from a weight gathered as codes, an `emulated.PackedWeight`."""

    @abstractmethod
    def operands(
        self, x: Tensor, place: Place, as_stored: OperandRequest | None, transposed: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """Functions that make the requested operands of `x` [n, m]: as it is stored, [n, k = m], and transposed,
        [m, k = n]. place: of x in the global tensor. If it has segments, operands have their padding.

        The caller calls each once, the first before the second; a backend may quantize here or only in these calls.
        """

    @abstractmethod
    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, groups: RowGroups | None = None
    ) -> Tensor:
        """a b^T: [m, k] x [n, k] -> [m, n] with FP32 accumulation, rounded once to `out_dtype`.

        total: contiguous [m, n] in `out_dtype`; the product is added to it in place, and it is returned. groups: those
        of a's rows; the product leaves their padding out (m counts the other rows) and is contiguous.
        """

    def gemm_of_chunk(self, a: Any, b: Any, out: Tensor) -> None:
        """out = a b^T with the bits of `gemm`; both sides are quantized to 4 bits, or neither is quantized.

        a: with values [ranks * rows, k] or [ranks, rows, k]. out: [ranks, rows, n], contiguous for each rank.
        """
        raise NotImplementedError(f"the backend {self.name} has no GEMM for chunks")

    def grouped_gemm(
        self, name: str, a: Any, b: Any, segments: Segments, out_dtype: torch.dtype, total: Tensor | None = None
    ) -> Tensor:
        """`gemm` of each segment with its expert's weight. name: `fprop`, `dgrad`, `wgrad`. total: as in `gemm`.

        fprop  a [padded tokens, in], b [experts * out, in] -> [tokens, out]
        dgrad  a [padded tokens, out], b [in, experts * out] -> [tokens, in]
        wgrad  a [out, padded tokens], b [in, padded tokens] -> [experts, out, in], the sum over an expert's segments
        """
        raise NotImplementedError(f"the backend {self.name} has no GEMM for experts")


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
