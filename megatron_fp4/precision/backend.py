"""What a backend is: it makes the operands of GEMMs and multiplies them; the autograd function does the rest.

Three exist: `emulated` (exact arithmetic on any device), `transformer_engine` (native kernels of Blackwell and Hopper)
and `torch` (the emulation's codes, multiplied by Blackwell's tensor cores). The run's
controller (`controller.py`) gives each linear its backend, which alone gets the operands that it made. What each cannot
compute is in `refusals.py`.

What kernels demand of the local sizes of a linear: the one description that padding, configuration and tests read.

A linear multiplies x [tokens, inputs] and W [outputs, inputs]. Each of the three sizes is the dot product of one GEMM
and a row of operands in the others, and a quantized operand comes in whole blocks in both directions: kernels load
tiles of a block's size whichever way its scales lie. So one multiple holds for a format, a Hadamard transform adds its
own along the dot product that it mixes, and tensor cores may want more (each backend says so in `alignment`).

    tokens, outputs    the linear pads them with zeros, which changes no code and no product
    inputs             what a user chose as a model's width; refused at configuration time where they do not divide

The multiples are the same on every device, because the draws of stochastic rounding go by an element's position among
the padded ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_fp4.precision.overlapped import Gather
from megatron_fp4.precision.recipe import Operand, OperandSlot, Recipe
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import RoundingKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_fp4.quantization.tensor import QuantizedTensor


@dataclass(frozen=True)
class Alignment:
    """Multiples of a linear's local sizes.

    tokens, inputs, outputs: of the operands as a whole. group_outputs: of each group of output features (the heads of a
    packed projection), so that blocks never straddle two groups, and with them two ranks. fast_outputs: of output
    features, for a kernel that is faster; groups that are padded anyway are padded to it where that adds 1/16 at most.
    """

    tokens: int = 1
    inputs: int = 1
    outputs: int = 1
    group_outputs: int = 1
    fast_outputs: int = 1

    def padded_tokens(self, tokens: int) -> int:
        """The next multiple."""
        return -(-tokens // self.tokens) * self.tokens

    def padded_group(self, group_rows: int, num_groups: int) -> int:
        """Output features that each of `num_groups` groups of `group_rows` takes, padding included."""
        size, fast = (self._padded(group_rows, num_groups, of) for of in (1, self.fast_outputs))
        return fast if size != group_rows and fast - size <= size // 16 else size

    def _padded(self, group_rows: int, num_groups: int, fast: int) -> int:
        outputs = math.lcm(self.outputs, fast)
        step = math.lcm(self.group_outputs, outputs // math.gcd(outputs, num_groups))
        return -(-group_rows // step) * step


@functools.cache
def block_alignment(recipe: Recipe) -> Alignment:
    """What the blocks and transforms of `recipe` demand, whoever computes: whole ones.

    Raises ValueError for a format that nobody knows.
    """
    tile = max((format_of(name).tile for name in recipe.formats), default=1)
    outputs = max(tile, recipe.dgrad.rht)
    return Alignment(max(tile, recipe.wgrad.rht), max(tile, recipe.fprop.rht), outputs, outputs)


@dataclass(frozen=True)
class OperandRequest:
    """What to make of a tensor for one GEMM.

    operand: format, block and rounding. rht: size of the Hadamard transform before it (input and result in BF16), 0 for
    none, and what its signs are: `fixed`, `none`, or `fresh`, drawn from `signs_key` then. key: of the draws of
    stochastic rounding; None rounds to nearest. place: which operand it is, for whoever watches; requests that ask for
    the same are equal.
    """

    operand: Operand
    rht: int = 0
    signs: str = "fixed"
    key: RoundingKey | None = None
    signs_key: RoundingKey | None = None
    slot: OperandSlot | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RowGroups:
    """Rows that come in groups of `padded`, of which the first `kept` count."""

    padded: int
    kept: int

    def of(self, product: Tensor) -> Tensor:
        """Of [groups * padded, n] the rows that count, [groups * kept, n], contiguous."""
        return self.view(product).flatten(0, 1)

    def view(self, product: Tensor) -> Tensor:
        """The same where they lie, [groups, kept, n]."""
        return product.unflatten(0, (-1, self.padded))[:, : self.kept]

    def padded_indices(self, rows: Tensor) -> Tensor:
        """Where rows that count lie among all."""
        return rows // self.kept * self.padded + rows % self.kept


def added(product: Tensor, total: Tensor | None, rows: RowGroups | None) -> Tensor:
    """The rows of a product [m, n] that count, contiguous; where there is a `total` of them, added to it, in place."""
    if total is None:
        return product if rows is None else rows.of(product)
    if rows is None:
        return total.add_(product)
    total.unflatten(0, (-1, rows.kept)).add_(rows.view(product))
    return total


class BackendOperand(Protocol):
    """One side of a GEMM, the dot product along the last dimension; what it holds is its backend's business."""

    @property
    def quantized(self) -> bool:
        """Whether it came out of a quantizer."""

    @property
    def layout(self) -> Any:
        """Non-tensor metadata: how the tensors are to be read."""

    @property
    def scale(self) -> Tensor | None:
        """FP32 0-dim factor from `unpacked()` to real values; None for 1."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What an autograd function has to save: three tensors, some of them None."""

    def unpacked(self) -> Tensor:
        """[rows, k]: values without the tensor scale."""

    @property
    def decoded(self) -> Callable[[], QuantizedTensor] | None:
        """Of native operands, whose codes and draws are another library's: gives codes and scales in our layout. None
        of others, whose values are compared."""


MakeOperand = Callable[[], BackendOperand]


class Backend(Protocol):
    """What a linear asks of a backend.

    name: as in `precision.backend`. accumulates: whether wgrad's GEMM adds to the gradient of earlier micro-batches
    itself; that rounds once where a GEMM and an addition round twice. transposed: exchanges rows and columns of an
    operand, so that codes made along one dimension serve a GEMM along the other; None where they cannot, because tensor
    cores want scales along the dot product.
    """

    @property
    def name(self) -> str: ...

    @property
    def accumulates(self) -> bool: ...

    @property
    def transposed(self) -> Callable[[Any], Any] | None: ...

    def alignment(self, recipe: Recipe) -> Alignment:
        """What its kernels demand of a linear's local sizes under `recipe`."""

    def operands(
        self,
        x: Tensor,
        columns: OperandRequest | None,
        rows: OperandRequest | None,
        *,
        dtype: torch.dtype,
        keep_columns: bool = False,
        keep_rows: bool = False,
        amax_group: ProcessGroup | None = None,
    ) -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
        """What makes `x` [n, m] an operand [n, k = m] (`columns`), and transposed an operand [m, k = n] (`rows`).

        Each is to be called once, the first before the second; what need not be made at once can wait for that.

        dtype: the compute dtype; x may be FP32 where it is BF16, and counts as rounded then (weights). keep_columns,
        keep_rows: the first, the second is to be sent or to wait for the backward pass, and so as small as it can be.
        amax_group: ranks that hold the other shards and share the maximum.
        """

    def joins(self, recipe: Recipe) -> bool:
        """Whether operands of x and dy under `recipe`, made of slices of the tokens, can be joined (`gathered`)."""

    def gathered(self, operand: Any, gather: Gather, *, transposed: bool) -> Callable[[], Any]:
        """Starts to gather an operand that was made of this rank's slice of the tokens; what is returned waits, and
        gives that of all tokens. transposed: the dot product runs over tokens. Only where it `joins`.
        """

    def packed_weight(
        self, w: Tensor, request: OperandRequest, *, rows: tuple[int, int], amax_group: ProcessGroup | None = None
    ) -> Any | None:
        """The weight `w` [out, in] as fprop's operand that `transposed` makes dgrad's too, as small as it can be; None
        where this backend has no such thing for `request`, and `operands` makes both.

        w: as x of `operands`, without padding. rows: of each group of its rows without and with padding; what comes
        back counts as padded.
        """

    def packs_shards(self, request: OperandRequest) -> bool:
        """Whether FSDP may gather codes of fprop's weight, which then are dgrad's too; `EmulatedBackend` has what that
        takes: `rows_maxima`, `pack_rows`, `gathered_weight`."""

    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, rows: RowGroups | None = None
    ) -> Tensor:
        """a b^T: [m, k] x [n, k] -> [m, n] with FP32 accumulation, rounded once to `out_dtype`.

        total: contiguous [m, n] in `out_dtype`, to add the product to and to return. rows: those of a that count; m
        is their number, what is returned is contiguous.
        """

    def operand_from_saved(self, tensors: Sequence[Tensor | None], layout: Any) -> Any:
        """An operand again from its `tensors()` and its `layout`."""


def requantized_by(
    backend: Backend,
    operand: BackendOperand,
    request: OperandRequest,
    *,
    dtype: torch.dtype,
    keep: bool = False,
    amax_group: ProcessGroup | None = None,
) -> MakeOperand:
    """What makes by `backend` the operand [m, k = n] of what another one [n, m] stands for: of its transposed
    `code * block scale`, which are exact in BF16; the other's tensor scale is multiplied on.

    keep: as `keep_rows` of `Backend.operands`. Both are dataclasses with a `scale`.
    """
    values = operand.unpacked().to(torch.bfloat16)
    _, make = backend.operands(values, None, request, dtype=dtype, keep_rows=keep, amax_group=amax_group)
    assert make is not None

    def made() -> Any:
        own, factor = make(), operand.scale
        if factor is None:
            return own
        return replace(own, scale=factor if own.scale is None else own.scale * factor)

    return made
