"""What one linear knows besides its tensors: its recipe, its backend, its shards, and who looks at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from megatron_fp4.precision.backend import Backend, BackendOperand, OperandRequest
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.recipe import BF16, DGRAD_WEIGHT, FPROP_WEIGHT, Recipe
from megatron_fp4.quantization.rounding import RoundingKey, rounding_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Observer(Protocol):
    """Looks at the calls of linears that it is attached to (measure/probe.py has one)."""

    def forward(self, call: Any, x: Tensor, y: Tensor) -> ObservedCall | None:
        """Sees a `LinearCall`, x [tokens, in] and the local result y [tokens, out]; returns who is to see the backward
        pass, if any."""


class ObservedCall(Protocol):
    """Sees the backward pass of one call."""

    def backward(self, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        """dy [tokens, out], dx [tokens, in], dw [out, in], the local parts; None for what nobody needed."""


@dataclass
class LinearContext:
    """What one linear needs to know besides its tensors. `name`, `recipe`, `clock` and `backend` are written by the
    run's controller (precision/controller.py).

    backend: who makes the operands and multiplies them.
    num_groups: equal groups of the local output features, each padded to whole blocks.
    keep_padding: whoever takes the result passes over the padding of each group, and so does the gradient come back:
        its zeros need not be taken out and put in again.
    in_offset, out_group_offset: where the local shard starts in the global tensor: input features, and output groups.
    in_shards, out_shards: ranks among which input or output features are sharded; None: not sharded.
    in_tokens, out_tokens: ranks that each hold a slice of the tokens of x and dx, or of y and dy; None: every rank has
    all tokens.
    keeps_input: keep x itself for the backward pass and make wgrad's operand of it there, the same bits again. For
    linears whose input somebody else keeps in any case, or can compute again. Else they keep the operand.
    weight_cache: (what it was made for, fprop's operand, dgrad's operand); None: nothing is kept.
    keeps_rounded: whether a weight that is only rounded may be kept as well, which asks for a clock that advances.
    probe: sees the calls of this linear; None: nobody looks. One that says `reads_weights = False` never asks a call
        for its weight.
    """

    name: str = ""
    recipe: Recipe = BF16
    clock: RunClock = field(default_factory=lambda: RunClock(seed=0))
    backend: Backend = EMULATED
    num_groups: int = 1
    keep_padding: bool = False
    in_offset: int = 0
    out_group_offset: int = 0
    in_shards: ProcessGroup | None = None
    out_shards: ProcessGroup | None = None
    in_tokens: ProcessGroup | None = None
    out_tokens: ProcessGroup | None = None
    keeps_input: bool = False
    weight_cache: tuple[Any, BackendOperand, BackendOperand] | None = None
    keeps_rounded: bool = True
    probe: Observer | None = None

    @property
    def gathers_codes(self) -> bool:
        """Whether the linear needs nothing of its weight but codes that FSDP can gather."""
        looks = self.probe is not None and getattr(self.probe, "reads_weights", True)
        if looks or not same_weight_codes(self.recipe) or not self.recipe[FPROP_WEIGHT].quantized:
            return False
        return self.backend.packs_shards(OperandRequest(self.recipe[FPROP_WEIGHT]))

    def amax_group(self, tensor: str) -> ProcessGroup | None:
        """Ranks that share the maximum of a tensor (`activation`, `weight` or `gradient`); None: local amax."""
        if self.recipe.amax != "global":
            return None
        if tensor == "gradient" or (tensor == "weight" and self.in_shards is None):
            return self.out_shards
        return self.in_shards

    def key(self, step: int, micro_batch: int, operand: str, rows: int, columns: int) -> RoundingKey:
        """The draws of one operand; `rows`, `columns` are the offsets of the local tensor in the global one."""
        parts = (self.clock.seed, step, micro_batch, self.name, operand)
        key, keys = rounding_key(*parts, row_offset=rows, column_offset=columns), self.clock.keys
        return key if keys is None else keys.of(self.name, operand, key)


def same_weight_codes(recipe: Recipe) -> bool:
    """Whether dgrad's codes are the transposed codes of fprop: square blocks, deterministic, no transform."""
    operand = recipe[FPROP_WEIGHT]
    plain = operand.rounding == "nearest" and not recipe.fprop.rht and not recipe.dgrad.rht
    square = operand.block[0] == operand.block[1] or not operand.quantized
    return operand == recipe[DGRAD_WEIGHT] and plain and square
