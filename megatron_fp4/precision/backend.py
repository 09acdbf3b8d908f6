"""What a backend is: it makes the operands of GEMMs and multiplies them; the linear does the rest.

Three exist: `emulated` (exact arithmetic on any device), `transformer_engine` (native kernels of Blackwell and Hopper)
and `torch` (the emulation's codes, multiplied by Blackwell's tensor cores). The run's controller (plan.py) gives each
linear its backend, which alone gets the operands that it made. support.py says what each cannot compute.

What kernels demand of a linear's sizes is in `Alignment`, which padding, `--check` and tests read. A linear multiplies
x [tokens, inputs] and W [outputs, inputs]. Each of the three sizes is the dot product of one GEMM and a row of operands
in the others, and a quantized operand comes in whole blocks in both directions: kernels load tiles of a block's size
whichever way its scales lie. So one multiple holds for a format, a Hadamard transform adds its own along the dot
product that it mixes, and tensor cores may want more (`Backend.alignment`).

    tokens, outputs    the linear pads them with zeros, which changes no code and no product
    inputs             what a user chose as a model's width; refused at configuration time where they do not divide

The multiples are the same on every device, because the draws of stochastic rounding go by an element's position among
the padded ones.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

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
        return -(-tokens // self.tokens) * self.tokens

    def padded_group(self, group_rows: int, num_groups: int) -> int:
        """Output features that each of `num_groups` groups of `group_rows` takes, padding included."""

        def padded(outputs: int) -> int:  # so that all groups together are a multiple of `outputs`
            step = math.lcm(self.group_outputs, outputs // math.gcd(outputs, num_groups))
            return -(-group_rows // step) * step

        size, fast = padded(self.outputs), padded(math.lcm(self.outputs, self.fast_outputs))
        return fast if size != group_rows and fast - size <= size // 16 else size


@functools.cache
def block_alignment(recipe: Recipe) -> Alignment:
    """What the blocks and transforms of `recipe` demand of every backend: whole ones.

    Raises ValueError for an unknown format.
    """
    tile = max((format_of(name).tile for name in recipe.formats), default=1)
    outputs = max(tile, recipe.dgrad.rht)
    tokens, inputs = max(tile, recipe.wgrad.rht), max(tile, recipe.fprop.rht)
    return Alignment(tokens=tokens, inputs=inputs, outputs=outputs, group_outputs=outputs)


@dataclass(frozen=True)
class OperandRequest:
    """What to make of a tensor for one GEMM. Requests that ask for the same are equal.

    operand: format, block and rounding. rht: size of the Hadamard transform before it (input and result in BF16), 0 for
    none. signs: of the transform, `fixed`, `none` or `fresh`, which are drawn from `signs_key`. key: of the draws of
    stochastic rounding; None rounds to nearest. slot: which operand of the recipe it is, for probes and watchers.
    dtype: the compute dtype; an FP32 tensor (a weight) counts as rounded to it.
    amax_group: ranks that hold the other shards and share the maximum. keep: make the operand as small as possible,
    because it is sent to other ranks or waits for the backward pass.
    """

    operand: Operand
    rht: int = 0
    signs: str = "fixed"
    key: RoundingKey | None = None
    signs_key: RoundingKey | None = None
    slot: OperandSlot | None = field(default=None, compare=False)
    dtype: torch.dtype = torch.bfloat16
    amax_group: ProcessGroup | None = None
    keep: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class RowGroups:
    """Rows that come in groups of `padded`, of which the first `kept` count."""

    padded: int
    kept: int

    def of(self, product: Tensor) -> Tensor:
        """Of [groups * padded, n] the rows that count, [groups * kept, n], contiguous."""
        return self.view(product).flatten(0, 1)

    def view(self, product: Tensor) -> Tensor:
        """The same as a view, [groups, kept, n]."""
        return product.unflatten(0, (-1, self.padded))[:, : self.kept]

    def padded_indices(self, rows: Tensor) -> Tensor:
        """The places among all rows of `rows`, which are counted without padding."""
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
    def scale(self) -> Tensor | None:
        """FP32 0-dim factor from `unpacked()` to real values; None for 1."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What an autograd function has to save: three tensors, some of them None."""

    @property
    def rebuild(self) -> Callable[..., Any]:
        """What makes the operand again from its three tensors; it holds none of them."""

    def unpacked(self) -> Tensor:
        """[rows, k]: values without the tensor scale."""

    def decoded(self) -> QuantizedTensor | None:
        """Codes and scales in our layout; None where the operand holds no codes to compare, only values."""

    def gathered(self, gather: Any, *, transposed: bool) -> Any:
        """Of an operand of a slice of the tokens: starts `gather`; what is returned waits, and gives that of all.

        transposed: the dot product runs over tokens.
        """


MakeOperand = Callable[[], Any]


class Backend(ABC):
    """What a linear asks of a backend.

    name: as in `precision.backend`. accumulates: wgrad's GEMM itself adds to the gradient of earlier micro-batches,
    which rounds once where a GEMM and an addition round twice. transposes: operands have `transposed()`, which
    exchanges rows and columns, so that codes made along one dimension serve a GEMM along the other; those of tensor
    cores do not, whose scales lie along the dot product. draws_ours: stochastic rounding draws from our keys.
    """

    name: str
    accumulates = False
    transposes = False
    draws_ours = True

    def alignment(self, recipe: Recipe) -> Alignment:
        """What its kernels demand of a linear's local sizes under `recipe`."""
        return block_alignment(recipe)

    def packs(self, request: OperandRequest) -> bool:
        """Whether FSDP can gather fprop's weight as codes that are dgrad's too (`quantization/square_blocks.py`)."""
        return False

    def weight_of_codes(self, gathered: Any, operand: Operand) -> tuple[Any, Any]:
        """fprop's and dgrad's operand of a weight that was gathered as codes, an `emulated.PackedWeight`."""
        raise NotImplementedError

    @abstractmethod
    def operands(
        self, x: Tensor, columns: OperandRequest | None, rows: OperandRequest | None
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """What makes `x` [n, m] an operand [n, k = m] (`columns`), and transposed an operand [m, k = n] (`rows`).

        Each is to be called once, the first before the second; what need not be made at once can wait for that.
        """

    @abstractmethod
    def gemm(
        self, a: Any, b: Any, out_dtype: torch.dtype, total: Tensor | None = None, rows: RowGroups | None = None
    ) -> Tensor:
        """a b^T: [m, k] x [n, k] -> [m, n] with FP32 accumulation, rounded once to `out_dtype`.

        total: contiguous [m, n] in `out_dtype`, to add the product to and to return. rows: those of a that count; m
        is their number, what is returned is contiguous.
        """


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its text, for a fault or a refusal."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
