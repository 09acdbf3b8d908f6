"""The linear layer: one autograd function, three GEMMs, a recipe for each operand.

    fprop  y  = x W^T      x [tokens, in]    W [out, in]       -> y [tokens, out]
    dgrad  dx = dy W       dy [tokens, out]  W^T [in, out]     -> dx [tokens, in]
    wgrad  dW = dy^T x     dy^T [out, tokens] x^T [in, tokens] -> dW [out, in], always FP32

`reference.py` specifies what it computes; `LinearCall` has what one call needs: padding, keys, kept weights.

With sequence parallelism the messages of tensor parallelism are the function's own, beside the GEMMs that do not need
them. A projection in (`context.in_tokens`) has x and dx as slices of the tokens on each rank, a projection out
(`context.out_tokens`) y and dy; what lies inside, every rank has of all tokens:

            projection in                                      projection out
    forward   codes of x gathered  | x quantized for wgrad       fprop
              fprop                                              y reduced, scattered | x quantized for wgrad
    backward  x for wgrad gathered | dy quantized, dgrad         codes of dy for dgrad gathered | dy quantized for wgrad
              dx reduced, scattered | wgrad                      codes of dy for wgrad gathered | dgrad
                                                                 wgrad
              (left of a bar the message, right of it what runs meanwhile)

A slice is quantized before it is gathered, by the maximum of the whole tensor and with the draws of its place in it:
its codes are those of the whole, a quarter of the bytes and each rank's share of the work. x waits for the backward
pass as the rank's own slice. Slices that are no whole blocks, and backends that cannot join operands, gather first.

The function takes the weight as a DTensor and returns its gradient as an FP32 one (precision/fp32_gradients.py). Where
a backend's GEMM can add to a gradient, that of the second and later micro-batches goes into the weight's `.grad` from
inside the function, which then returns None: `.backward()` sees no difference, `torch.autograd.grad` would.

What one linear knows besides its tensors: its recipe, its backend, its shards, and who looks at it.

One call of one linear: how each tensor becomes operands by the recipe.

Every operand is laid out with its dot product along the last dimension and quantized there. x and dy are quantized
twice, once per GEMM that uses them, each time with its own tensor scale and (where rounding is stochastic) its own
draws; 16x16-scaled weights once, since their transposed codes are those of the transposed weight.

Tokens are padded with zeros to what the kernels demand (precision/backend.py), and so are output features, which come
in `num_groups` equal groups (the heads of a packed projection): each group is padded by itself, so that block
boundaries depend on the model alone, not on how many ranks share the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_fp4.precision.backend import (
    Backend,
    BackendOperand,
    MakeOperand,
    OperandRequest,
    RowGroups,
    requantized_by,
)
from megatron_fp4.precision.emulated import EMULATED, EmulatedBackend, codes_of, transform_signs
from megatron_fp4.precision.fp32_gradients import (
    accept_fp32_gradient,
    gradient_of,
    gradient_spec,
    local_part,
    rounding_of,
)
from megatron_fp4.precision.overlapped import start_all_gather, start_reduce_scatter
from megatron_fp4.precision.recipe import (
    BF16,
    DGRAD_GRADIENT,
    DGRAD_WEIGHT,
    FPROP_ACTIVATION,
    FPROP_WEIGHT,
    SLOTS_OF,
    WGRAD_ACTIVATION,
    WGRAD_GRADIENT,
    OperandSlot,
    Recipe,
)
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.elements import E2M1_MAX
from megatron_fp4.quantization.formats import format_of
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
    run's controller (precision/switch.py).

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
    clock: StepState = field(default_factory=lambda: StepState(seed=0))
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


class LinearCall:
    """One forward pass of one linear: its place in the run, and the quantization of each tensor by the recipe.

    weight: parameter [out, in]. x: [tokens, in], this rank's slice of them with `in_tokens`; shape, dtype and device
    are read here. num_tokens: of all slices. slices: of the tensors whose slices are quantized before they are gathered
    (`activation`, `gradient`), the ranks that hold the others.
    """

    def __init__(self, context: LinearContext, weight: Tensor, x: Tensor) -> None:
        self.context, self.recipe, self.backend = context, context.recipe, context.backend
        self.step, self.micro_batch = context.clock.step, context.clock.micro_batch
        self.device, self.dtype = x.device, x.dtype
        self.master, self.gradient_spec = local_part(weight), gradient_spec(weight)
        self.rounding = rounding_of(weight)
        self.gathered = codes_of(weight)  # then the master is without values
        self.group_rows = self.master.shape[0] // context.num_groups
        alignment = self.backend.alignment(self.recipe)
        self.num_tokens = x.shape[0] * (1 if context.in_tokens is None else context.in_tokens.size())
        self.padded_tokens = alignment.padded_tokens(self.num_tokens)
        self.padded_group_rows = alignment.padded_group(self.group_rows, context.num_groups)
        self.out_offset = context.out_group_offset * self.padded_group_rows
        self.slices: dict[str, ProcessGroup] = {}
        for tensor, group in (("activation", context.in_tokens), ("gradient", context.out_tokens)):
            if group is None or not self._sends_operands(tensor):
                continue
            # Whole blocks and tiles; padding then is none.
            if self.num_tokens % (group.size() * alignment.tokens) == 0:
                self.slices[tensor] = group

    @property
    def weight(self) -> Tensor:
        """[out, in], the local part in the compute dtype."""
        return self.master.to(self.dtype)

    # ------------------------------------------------------------------------------------------------------- operands

    def prepare(
        self,
        columns: OperandSlot | None,
        rows: OperandSlot | None,
        x: Tensor,
        *,
        keep_columns: bool = False,
        keep_rows: bool = False,
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """What makes the operand `columns` of the recipe from `x`, and the operand `rows` from its transpose.

        x: all tokens, or this rank's slice of a tensor in `slices`, of which the slice's operands are made, to be sent.
        keep_columns, keep_rows: the first, the second is for the backward pass. x may be FP32 where the compute dtype
        is BF16, and counts as rounded then (weights).
        """
        slot = columns or rows
        tensor = "" if slot is None else slot.tensor
        sliced = tensor in self.slices
        return self.backend.operands(
            x,
            None if columns is None else self.request(columns),
            None if rows is None else self.request(rows),
            dtype=self.dtype,
            keep_columns=keep_columns or sliced,
            keep_rows=keep_rows or sliced,
            amax_group=self.slices.get(tensor) or self.context.amax_group(tensor),
        )

    def wgrad_activation(self, x: Tensor) -> MakeOperand:
        """What makes x [tokens, in], padded, wgrad's operand in the backward pass."""
        reuse, again = self._reuses("activation"), self.requantizes("activation")
        of_fprop = reuse or again
        make, make_rows = self.prepare(
            FPROP_ACTIVATION if of_fprop else None, None if of_fprop else WGRAD_ACTIVATION, x
        )
        if of_fprop:
            assert make is not None
            return self.requantized(make(), WGRAD_ACTIVATION) if again else lambda: self.transposed(make())
        assert make_rows is not None
        return make_rows

    def wgrad_operand(self, tensors: Sequence[Tensor | None], layout: Any) -> BackendOperand:
        """wgrad's operand of what the forward pass saved of x: it itself, or fprop's to be quantized again."""
        operand = self.backend.operand_from_saved(tensors, layout)
        return self.requantized(operand, WGRAD_ACTIVATION)() if self.requantizes("activation") else operand

    def requantizes(self, tensor: str) -> bool:
        """Whether the tensor's operand in the backward pass is made of fprop's codes."""
        return self.recipe[SLOTS_OF[tensor][1]].source == "forward"

    def requantized(self, operand: BackendOperand, slot: OperandSlot) -> MakeOperand:
        """What makes the operand at `slot` of what fprop's operand of the same tensor stands for."""
        return requantized_by(
            self.backend,
            operand,
            self.request(slot),
            dtype=self.dtype,
            keep=slot.tensor in self.slices,
            amax_group=self.slices.get(slot.tensor) or self.context.amax_group(slot.tensor),
        )

    def send(self, make: MakeOperand | None, slot: OperandSlot, beside: bool = True) -> MakeOperand | None:
        """What gives the operand of all tokens.

        Of a tensor in `slices`, `make` makes that of this rank's slice: it is made now, and on its way to the other
        ranks until what is returned waits for theirs. Of other tensors nothing happens now. beside: whether anything
        runs meanwhile.
        """
        if make is None or slot.tensor not in self.slices:
            return make
        gather = functools.partial(start_all_gather, group=self.slices[slot.tensor], beside=beside)
        made: MakeOperand = self.backend.gathered(make(), gather, transposed=slot.transposed)
        return made

    def gathered_unless_sliced(self, x: Tensor, tensor: str) -> Tensor:
        """What `prepare` takes of a tensor [tokens, features] that ranks may hold in slices."""
        return x if tensor in self.slices else self.whole(x, tensor)

    def whole(self, x: Tensor, tensor: str) -> Tensor:
        """All tokens of x (`activation`) or dy (`gradient`), of which this rank may hold a slice."""
        group = self.context.in_tokens if tensor == "activation" else self.context.out_tokens
        return x if group is None else start_all_gather(x, group, beside=False).wait()

    def _sends_operands(self, tensor: str) -> bool:
        """Whether a tensor's operands are gathered, and not itself. dy's are both needed at once: only codes of four
        bits are fewer bytes than dy, once. One of x waits for the backward pass, as a slice."""
        if self._reuses(tensor) or not self.backend.joins(self.recipe):
            return False
        operands = [self.recipe[slot] for slot in SLOTS_OF[tensor]]
        if tensor == "activation":
            return True
        # Along its columns MS-EDEN's kernel makes values, not codes.
        codes = all(operand.quantized and format_of(operand.format).largest == E2M1_MAX for operand in operands)
        return codes and operands[0].rounding != "ms_eden"

    def _reuses(self, tensor: str) -> bool:
        return tensor == "activation" and self.recipe[WGRAD_ACTIVATION].reuse_fprop

    def request(self, slot: OperandSlot) -> OperandRequest:
        """What the backend is asked to make for `slot`."""
        operand, rht = self.recipe[slot], self.recipe.gemms[slot.gemm].rht
        signs_key = self._signs_key(slot.gemm) if rht else None
        group, first_token = self.slices.get(slot.tensor), 0
        if group is not None:
            first_token = group.rank() * (self.num_tokens // group.size())
        key = self.draws(slot, first_token)
        return OperandRequest(operand, rht, self.recipe.rht_signs, key, signs_key, slot)

    def draws(self, slot: OperandSlot, first_token: int = 0) -> RoundingKey | None:
        """The key of an operand's draws, of x or dy from `first_token` on; None where it is rounded to nearest."""
        if not self.recipe[slot].drawn:
            return None
        rows = self.out_offset if slot.tensor == "weight" else first_token
        columns = self.out_offset if slot.tensor == "gradient" else self.context.in_offset
        rows, columns = (columns, rows) if slot.transposed else (rows, columns)
        return self.context.key(self.step, self.micro_batch, slot.name, rows, columns)

    def signs(self, gemm: str) -> Tensor:
        """FP32 [size of the Hadamard transform], of +-1."""
        return transform_signs(self.recipe.gemms[gemm].rht, self.recipe.rht_signs, self._signs_key(gemm), self.device)

    def _signs_key(self, gemm: str) -> RoundingKey | None:
        if self.recipe.rht_signs != "fresh":
            return None
        return self.context.key(self.step, self.micro_batch, f"{gemm}_signs", 0, 0)

    def transposed(self, operand: BackendOperand) -> BackendOperand:
        """The same codes with rows and columns exchanged, for another GEMM."""
        assert self.backend.transposed is not None, f"the backend {self.backend.name} cannot use codes twice"
        made: BackendOperand = self.backend.transposed(operand)
        return made

    # --------------------------------------------------------------------------------------------------------- weight

    @property
    def requantizes_late(self) -> bool:
        """Whether dgrad's weight is made of fprop's codes anew in every micro-batch: then in the backward pass."""
        return self.requantizes("weight") and not self._lasts(DGRAD_WEIGHT)

    def dgrad_weight(self, operand: BackendOperand) -> BackendOperand:
        """dgrad's operand in the backward pass: the second of `weight_operands`, or what is made of it now."""
        return self.requantized(operand, DGRAD_WEIGHT)() if self.requantizes_late else operand

    def weight_operands(self) -> tuple[BackendOperand, BackendOperand]:
        """The weight as fprop's operand and what `dgrad_weight` takes, kept for all micro-batches of a step."""
        context, recipe = self.context, self.recipe
        stamp = (context.clock.weights_version, self.dtype, self.device)
        if context.weight_cache is not None and context.weight_cache[0] == stamp:
            return context.weight_cache[1:]
        if self.gathered is not None:
            assert isinstance(self.backend, EmulatedBackend)
            gathered = self.backend.gathered_weight(self.gathered)
            operands = gathered, gathered.transposed()
            if isinstance(gathered.values, Tensor):  # codes stay where FSDP has them, and are freed there
                context.weight_cache = (stamp, *operands)
            return operands
        once = recipe[DGRAD_WEIGHT].reuse_fprop or self.same_weight_codes
        shared = once and self.backend.transposed is not None
        if shared and self.same_weight_codes and (packed := self._packed_weight()) is not None:
            context.weight_cache = (stamp, packed, self.transposed(packed))
            return context.weight_cache[1:]
        again, late = self.requantizes("weight"), self.requantizes_late
        alone = shared or again
        make_fprop, make_dgrad = self.prepare(
            FPROP_WEIGHT, None if alone else DGRAD_WEIGHT, self.pad_rows(self.master), keep_columns=late
        )
        assert make_fprop is not None
        fprop = make_fprop()
        if again:
            make_dgrad = None if late else self.requantized(fprop, DGRAD_WEIGHT)
            dgrad = fprop if make_dgrad is None else make_dgrad()
        else:
            dgrad = self.transposed(fprop) if make_dgrad is None else make_dgrad()
        # What is not quantized is FSDP's gathered copy itself, which must not outlive its use; or a master, rounded.
        own = self.rounding is not None and self.rounding.kept and self.master.dtype != self.dtype
        own = own and context.keeps_rounded
        if ((fprop.quantized and dgrad.quantized) or own) and self._weight_codes_last():
            context.weight_cache = (stamp, fprop, dgrad)
        return fprop, dgrad

    def fprop_weight(self) -> BackendOperand:
        """fprop's operand of the weight by itself, padded, for whoever wants its values."""
        make, _ = self.prepare(FPROP_WEIGHT, None, self.pad_rows(self.master))
        assert make is not None
        return make()

    def _packed_weight(self) -> BackendOperand | None:
        """fprop's operand as codes, where the backend keeps those; padding comes in when they are unpacked."""
        if self.dtype != torch.bfloat16:
            return None
        packed: BackendOperand | None = self.backend.packed_weight(
            self.master,
            self.request(FPROP_WEIGHT),
            rows=(self.group_rows, self.padded_group_rows),
            amax_group=self.context.amax_group("weight"),
        )
        return packed

    @property
    def same_weight_codes(self) -> bool:
        """See `same_weight_codes`."""
        return same_weight_codes(self.recipe)

    def _weight_codes_last(self) -> bool:
        """Whether the weight's operands as `weight_operands` has them are the same for every micro-batch of a step."""
        return self._lasts(FPROP_WEIGHT) and (self.requantizes_late or self._lasts(DGRAD_WEIGHT))

    def _lasts(self, slot: OperandSlot) -> bool:
        fresh = self.recipe.gemms[slot.gemm].rht and self.recipe.rht_signs == "fresh"
        return not self.recipe[slot].drawn and not fresh

    def running_gradient(self, weight: Tensor) -> Tensor | None:
        """The gradient of earlier micro-batches if wgrad's GEMM can add to it itself: FP32 [out, in], local."""
        if not self.backend.accumulates or not weight.is_leaf or weight.grad is None:
            return None
        total = local_part(weight.grad)
        return total if total.dtype == torch.float32 and total.is_contiguous() else None

    def weight_gradient(self, dy: BackendOperand, x: BackendOperand, total: Tensor | None) -> Tensor:
        """dy^T x of wgrad's operands, FP32 [out, in] without padding; added to `total` where there is one."""
        padded, kept = self.padded_group_rows, self.group_rows
        rows = None if padded == kept else RowGroups(padded, kept)
        product: Tensor = self.backend.gemm(dy, x, torch.float32, total, rows)
        return product

    # -------------------------------------------------------------------------------------------------------- padding

    def pad(self, y: Tensor) -> Tensor:
        """[tokens, out] with tokens and, unless they are, each group of output features padded."""
        is_padded = y.shape[-1] == self.context.num_groups * self.padded_group_rows
        return self.pad_tokens(y if is_padded else self._pad_groups(y))

    def result(self, y: Tensor) -> Tensor:
        """What the caller gets of a padded y: no padded tokens, and no padded features unless it keeps them."""
        y = self.unpad_tokens(y)
        return y if self.context.keep_padding else self._unpad_groups(y)

    def seen(self, y: Tensor) -> Tensor:
        """[tokens, out] of what the caller gets or gives back."""
        return self._unpad_groups(y) if y.shape[-1] != self.context.num_groups * self.group_rows else y

    def pad_tokens(self, x: Tensor) -> Tensor:
        """[tokens, features] with tokens padded."""
        extra = self.padded_tokens - self.num_tokens
        return torch.nn.functional.pad(x, (0, 0, 0, extra)) if extra else x

    def unpad_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `pad_tokens`."""
        return x[: self.num_tokens] if self.padded_tokens != self.num_tokens else x

    def pad_rows(self, w: Tensor) -> Tensor:
        """[out, in] with each group of output features padded."""
        return self._pad_groups(w.t()).t() if self.padded_group_rows != self.group_rows else w

    def unpad_rows(self, w: Tensor) -> Tensor:
        """The inverse of `pad_rows`."""
        return RowGroups(self.padded_group_rows, self.group_rows).of(w)

    def _pad_groups(self, y: Tensor) -> Tensor:
        extra = self.padded_group_rows - self.group_rows
        if extra == 0:
            return y
        return torch.nn.functional.pad(y.unflatten(-1, (-1, self.group_rows)), (0, extra)).flatten(-2)

    def _unpad_groups(self, y: Tensor) -> Tensor:
        if self.padded_group_rows == self.group_rows:
            return y
        return y.unflatten(-1, (-1, self.padded_group_rows))[..., : self.group_rows].flatten(-2)


def quantized_linear(x: Tensor, weight: Tensor, context: LinearContext) -> Tensor:
    """y = x W^T by the recipe in `context`.

    x: [tokens, in], the compute dtype; the rank's slice of the tokens with `context.in_tokens`. weight: parameter
    [out, in] (local part of a DTensor, or a plain tensor).
    Returns [tokens, out] in x's dtype, with `context.keep_padding` perhaps more, with `context.out_tokens` the rank's
    slice of the sum over ranks; the weight's gradient is FP32.
    """
    accept_fp32_gradient(weight)
    # Inside the function gradients are always off, and needs_input_grad does not know about no_grad.
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    return _QuantizedLinear.apply(x, weight, context, needs_wgrad)  # type: ignore[return-value]


def _same(operand: BackendOperand) -> BackendOperand:
    return operand


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, context: LinearContext, needs_wgrad: bool) -> Tensor:
        call = LinearCall(context, weight, x)
        w_fprop, w_dgrad = call.weight_operands()
        reuse, keeps = call.recipe[WGRAD_ACTIVATION].reuse_fprop, needs_wgrad and context.keeps_input
        again = needs_wgrad and not keeps and call.requantizes("activation")
        x_tokens = call.pad_tokens(call.gathered_unless_sliced(x, "activation"))
        make_fprop, make_wgrad = call.prepare(
            FPROP_ACTIVATION,
            WGRAD_ACTIVATION if needs_wgrad and not (reuse or keeps or again) else None,
            x_tokens,
            keep_columns=again,
            keep_rows=True,
        )
        del x_tokens
        x_kept = None
        if again and make_fprop is not None:  # fprop's codes wait for the backward pass, of this rank's tokens
            x_kept = make_fprop()
            make_fprop = functools.partial(_same, x_kept)
        receive_fprop, x_wgrad = call.send(make_fprop, FPROP_ACTIVATION, beside=make_wgrad is not None), None
        assert receive_fprop is not None
        if make_wgrad is not None and "activation" in call.slices:
            x_wgrad = make_wgrad()  # while the codes for fprop travel
        x_fprop = receive_fprop()
        y = call.result(call.backend.gemm(x_fprop, w_fprop, x.dtype))
        if needs_wgrad and reuse and not keeps:
            x_wgrad = call.transposed(x_fprop)
        del x_fprop
        ctx.probed = (
            None if context.probe is None else context.probe.forward(call, call.whole(x, "activation"), call.seen(y))
        )
        scattered = None
        if context.out_tokens is not None:
            scattered = start_reduce_scatter(y, context.out_tokens, beside=make_wgrad is not None)
        if make_wgrad is not None and x_wgrad is None:
            x_wgrad = make_wgrad()  # while y is summed
        x_wgrad = x_kept if x_wgrad is None else x_wgrad
        operands = [w_dgrad] if x_wgrad is None else [w_dgrad, x_wgrad]
        ctx.save_for_backward(*(tensor for operand in operands for tensor in operand.tensors()), *[x] * keeps)
        ctx.call, ctx.layouts, ctx.keeps = call, [operand.layout for operand in operands], keeps
        ctx.weight = weight
        return y if scattered is None else scattered.wait()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        call: LinearCall = ctx.call
        backend, context = call.backend, call.context
        saved = ctx.saved_tensors  # once: a recomputing checkpoint refuses a second time
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        dx = dw = scattered = make_x = None
        # Maxima first: their exchange would wait for larger messages.
        if needs_wgrad and ctx.keeps:
            make_x = call.wgrad_activation(call.pad_tokens(call.gathered_unless_sliced(saved[3], "activation")))
        elif needs_wgrad:
            make_x = functools.partial(call.wgrad_operand, saved[3:6], ctx.layouts[1])
        dy_tokens = call.pad(call.gathered_unless_sliced(grad_outputs[0], "gradient"))
        make_dgrad, make_wgrad = call.prepare(
            DGRAD_GRADIENT if needs_dgrad else None, WGRAD_GRADIENT if needs_wgrad else None, dy_tokens
        )
        del dy_tokens
        receive_x = call.send(make_x, WGRAD_ACTIVATION)
        receive_dgrad, receive_wgrad = call.send(make_dgrad, DGRAD_GRADIENT), call.send(make_wgrad, WGRAD_GRADIENT)
        # Each operand is as large as dy; one at a time.
        if receive_dgrad is not None:
            w_dgrad = call.dgrad_weight(backend.operand_from_saved(saved[:3], ctx.layouts[0]))
            dx = call.unpad_tokens(backend.gemm(receive_dgrad(), w_dgrad, call.dtype))
            del w_dgrad
            if context.in_tokens is not None:
                scattered = start_reduce_scatter(dx, context.in_tokens, beside=receive_wgrad is not None)
        if receive_wgrad is not None and receive_x is not None:
            x_wgrad = receive_x()
            total = call.running_gradient(ctx.weight) if ctx.probed is None else None
            made = call.weight_gradient(receive_wgrad(), x_wgrad, total)
            dw = gradient_of(made, call.gradient_spec) if total is None else None
        if ctx.probed is not None:
            ctx.probed.backward(call.seen(call.whole(grad_outputs[0], "gradient")), dx, dw)
        return dx if scattered is None else scattered.wait(), dw, None, None
