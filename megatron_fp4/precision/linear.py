"""The linear layer: one autograd function, three GEMMs, a recipe for each operand.

    fprop  y  = x W^T      x [tokens, in]     W [out, in]      -> y [tokens, out]
    dgrad  dx = dy W       dy [tokens, out]   W^T [in, out]    -> dx [tokens, in]
    wgrad  dW = dy^T x     dy^T [out, tokens] x^T [in, tokens] -> dW [out, in], always FP32

`reference.py` specifies what it computes. Tokens are padded with zeros to what the kernels demand
(`backend.Alignment`), and so are output features, which come in `num_groups` equal groups (the heads of a packed
projection): each group is padded by itself, so that block boundaries depend on the model alone, not on how many ranks
share the weight.

The function takes the weight as a DTensor and returns its gradient as an FP32 one (fp32_gradients.py). Where a
backend's GEMM can add to a gradient, that of the second and later micro-batches goes into the weight's `.grad` from
inside the function, which then returns None: `.backward()` sees no difference, `torch.autograd.grad` would.

With sequence parallelism a projection in (`context.in_tokens`) has x and dx as slices of the tokens on each rank, a
projection out (`context.out_tokens`) y and dy; what lies inside, every rank has of all tokens. Messages run beside what
does not need them:

            projection in                                      projection out
    forward   codes of x gathered  | x quantized for wgrad       fprop
              fprop                                              y reduced, scattered | x quantized for wgrad
    backward  x for wgrad gathered | dy quantized, dgrad         codes of dy for dgrad gathered | dy quantized for wgrad
              dx reduced, scattered | wgrad                      codes of dy for wgrad gathered | dgrad
                                                                 wgrad
              (left of a bar the message, right of it what runs meanwhile)

A slice is quantized before it is gathered, by the maximum of the whole tensor and with the draws of its place in it:
its codes are those of the whole, a quarter of the bytes and each rank's share of the work. x waits for the backward
pass as the rank's own slice. Slices that are no whole blocks are gathered first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_fp4.precision import emulated
from megatron_fp4.precision.backend import Backend, BackendOperand, MakeOperand, OperandRequest, RowGroups
from megatron_fp4.precision.emulated import EMULATED, codes_of
from megatron_fp4.precision.fp32_gradients import (
    accept_fp32_gradient,
    gradient_of,
    gradient_spec,
    local_part,
    rounding_of,
)
from megatron_fp4.precision.messages import start_all_gather, start_reduce_scatter
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
from megatron_fp4.quantization.rounding import RoundingKey, rounding_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class LinearContext:
    """What one linear needs to know besides its tensors. `name`, `recipe`, `step_state` and `backend` are written by
    the run's controller (plan.py).

    backend: who makes the operands and multiplies them.
    num_groups: equal groups of the local output features, each padded to whole blocks.
    keep_padding: the result and its gradient have the padding of each group, which the caller skips: its zeros are not
        taken out and put in again.
    in_offset, out_group_offset: where the local shard starts in the global tensor: input features, and output groups.
    in_shards, out_shards: ranks among which input or output features are sharded; None: not sharded.
    in_tokens, out_tokens: ranks that each hold a slice of the tokens of x and dx, or of y and dy; None: every rank has
        all tokens.
    keeps_input: keep x itself for the backward pass and make wgrad's operand there, with the same bits: for linears
        whose input is kept anyway, or recomputed. Else the operand is kept.
    weight_cache: (what it was made for, fprop's operand, dgrad's operand); None: nothing is kept.
    keeps_rounded: whether `weight_cache` may have a weight that is only rounded, which takes a StepState that advances.
    probe: its `forward(call, x, y)` sees the forward pass, x [tokens, in] and the local y [tokens, out]; what it
        returns, unless None, sees the backward pass: `backward(dy, dx, dw)`, the local parts, None for what was not
        needed. `reads_weights = False` says that it never asks a call for its weight. (measure/diagnostics.py)
    watcher: sees the operands and products of the backend, and passes them on. (verify.Recheck)
    """

    name: str = ""
    recipe: Recipe = BF16
    step_state: StepState = field(default_factory=lambda: StepState(seed=0))
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
    weight_cache: tuple[Any, Any, Any] | None = None
    keeps_rounded: bool = True
    probe: Any = None
    watcher: Any = None

    @property
    def gathers_codes(self) -> bool:
        """Whether the linear needs nothing of its weight but codes that FSDP can gather."""
        weight = self.recipe[FPROP_WEIGHT]
        reads = self.watcher is not None or (self.probe is not None and getattr(self.probe, "reads_weights", True))
        codes = weight.quantized and same_weight_codes(self.recipe) and self.backend.packs(OperandRequest(weight))
        return codes and not reads

    def amax_group(self, tensor: str) -> ProcessGroup | None:
        """Ranks that share the maximum of a tensor (`activation`, `weight` or `gradient`); None: local amax."""
        if self.recipe.amax != "global":
            return None
        if tensor == "gradient" or (tensor == "weight" and self.in_shards is None):
            return self.out_shards
        return self.in_shards

    def key(self, step: int, micro_batch: int, operand: str, rows: int, columns: int) -> RoundingKey:
        """The draws of one operand; `rows`, `columns` are the offsets of the local tensor in the global one."""
        parts = (self.step_state.seed, step, micro_batch, self.name, operand)
        key, keys = rounding_key(*parts, row_offset=rows, column_offset=columns), self.step_state.keys
        return key if keys is None else keys.of(self.name, operand, key)


def same_weight_codes(recipe: Recipe) -> bool:
    """Whether dgrad's codes are the transposed codes of fprop: square blocks, deterministic, no transform."""
    operand = recipe[FPROP_WEIGHT]
    plain = operand.rounding == "nearest" and not recipe.fprop.rht and not recipe.dgrad.rht
    square = operand.block[0] == operand.block[1] or not operand.quantized
    return operand == recipe[DGRAD_WEIGHT] and plain and square


def quantized_linear(x: Tensor, weight: Tensor, context: LinearContext) -> Tensor:
    """y = x W^T by the recipe in `context`.

    x: [tokens, in], the compute dtype; with `context.in_tokens` the rank's slice of the tokens. weight: parameter
    [out, in] (local part of a DTensor, or a plain tensor).
    Returns [tokens, out] in x's dtype, with `context.keep_padding` perhaps more; with `context.out_tokens` the rank's
    slice of the sum over ranks. The weight's gradient is FP32.
    """
    accept_fp32_gradient(weight)
    # Inside the function gradients are always off, and needs_input_grad does not know about no_grad.
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    return _QuantizedLinear.apply(x, weight, context, needs_wgrad)  # type: ignore[no-any-return, no-untyped-call]


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, context: LinearContext, needs_wgrad: bool) -> Tensor:
        call, kept, scattered = LinearCall(context, weight, x), None, None
        w_fprop, w_dgrad = call.weight_operands()
        make_fprop, make_kept = call.activation_operands(x, needs_wgrad)
        more_to_do = make_kept is not None and make_kept is not make_fprop  # else fprop's operand is what is kept
        receive_fprop = call.send(make_fprop, FPROP_ACTIVATION, beside=more_to_do)
        if make_kept is not None and "activation" in call.slices:
            kept = make_kept()  # while the codes for fprop travel
        y = call.result(call.product("fprop", receive_fprop(), w_fprop, call.dtype))
        ctx.observed = call.observe(x, y)
        if context.out_tokens is not None:
            scattered = start_reduce_scatter(y, context.out_tokens, beside=more_to_do)
        if make_kept is not None and kept is None:
            kept = make_kept()  # while y is summed
        call.save(ctx, weight, w_dgrad, kept, x if needs_wgrad else None)
        return y if scattered is None else scattered.wait()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy,), call = grad_outputs, ctx.call
        (w_dgrad, kept), dx, dw, scattered = call.saved(ctx), None, None, None
        # Maxima first: their exchange would wait for larger messages.
        make_x = call.wgrad_activation(kept)
        make_dgrad, make_wgrad = call.gradient_operands(dy, *ctx.needs_input_grad[:2])
        receive_x = call.send(make_x, WGRAD_ACTIVATION)
        receive_dgrad, receive_wgrad = call.send(make_dgrad, DGRAD_GRADIENT), call.send(make_wgrad, WGRAD_GRADIENT)
        if receive_dgrad is not None:  # each operand is as large as dy: one at a time
            dx = call.unpad_tokens(call.product("dgrad", receive_dgrad(), call.dgrad_weight(w_dgrad), call.dtype))
            if call.context.in_tokens is not None:
                scattered = start_reduce_scatter(dx, call.context.in_tokens, beside=receive_wgrad is not None)
        if receive_wgrad is not None:
            x_wgrad = receive_x()
            dw = call.weight_gradient(receive_wgrad(), x_wgrad, ctx)
        call.observe_backward(ctx, dy, dx, dw)
        return dx if scattered is None else scattered.wait(), dw, None, None


class LinearCall:
    """One forward pass of one linear and its backward pass: its place in the run, and how each tensor becomes operands
    by the recipe.

    weight: parameter [out, in]. x: [tokens, in], this rank's slice of them with `in_tokens`; shape, dtype and device
    are read here. num_tokens: of all slices. slices: of the tensors whose slices are quantized before they are gathered
    (`activation`, `gradient`), the ranks that hold the others.
    """

    def __init__(self, context: LinearContext, weight: Tensor, x: Tensor) -> None:
        self.context, self.recipe, self.backend = context, context.recipe, context.backend
        self.step, self.micro_batch = context.step_state.step, context.step_state.micro_batch
        self.device, self.dtype = x.device, x.dtype
        self.master, self.gradient_spec = local_part(weight), gradient_spec(weight)
        self.rounding = rounding_of(weight)
        self.weight_codes = codes_of(weight)  # gathered by FSDP; then the master has no values
        self.group_rows = self.master.shape[0] // context.num_groups
        self.token_groups = {"activation": context.in_tokens, "gradient": context.out_tokens}
        self.num_tokens = x.shape[0] * (1 if context.in_tokens is None else context.in_tokens.size())
        self.alignment = self.backend.alignment(self.recipe)
        self.padded_tokens = self.alignment.padded_tokens(self.num_tokens)
        self.padded_group_rows = self.alignment.padded_group(self.group_rows, context.num_groups)
        self.out_offset = context.out_group_offset * self.padded_group_rows
        groups = {tensor: group for tensor, group in self.token_groups.items() if group is not None}
        self.slices = {tensor: group for tensor, group in groups.items() if self.sends_operands(tensor, group)}

    def product(
        self,
        gemm: str,
        a: Any,
        b: Any,
        out_dtype: torch.dtype,
        total: Tensor | None = None,
        rows: RowGroups | None = None,
    ) -> Tensor:
        """The product of a GEMM (`fprop`, `dgrad`, `wgrad`), as `Backend.gemm` computes it."""
        multiply = functools.partial(self.backend.gemm, a, b, out_dtype, total, rows)
        watcher = self.context.watcher
        return multiply() if watcher is None else watcher.product(gemm, multiply, (a, b), total, rows)

    # ------------------------------------------------------------------------------------------------------- operands

    def activation_operands(self, x: Tensor, needs_wgrad: bool) -> tuple[MakeOperand, MakeOperand | None]:
        """What makes fprop's operand of x [tokens, in], and the one that is kept for the backward pass (None: x itself
        is, or nothing). To be called in this order."""
        source, keeps = self.recipe[WGRAD_ACTIVATION].source, needs_wgrad and not self.context.keeps_input
        wgrad = WGRAD_ACTIVATION if keeps and source == "tensor" else None
        x = self.pad_tokens(self.tokens_to_quantize(x, "activation"))
        make_fprop, make_wgrad = self.prepare(FPROP_ACTIVATION, wgrad, x, keeps and source == "forward", True)
        assert make_fprop is not None
        if keeps and source != "tensor":
            make_fprop = make_wgrad = functools.cache(make_fprop)
        return make_fprop, make_wgrad

    def wgrad_activation(self, kept: Tensor | BackendOperand | None) -> MakeOperand | None:
        """What makes wgrad's operand of what the forward pass kept of x: x itself, fprop's operand, or wgrad's."""
        if kept is None:
            return None
        of_fprop = self.recipe[WGRAD_ACTIVATION].source != "tensor"
        if not isinstance(kept, Tensor):
            return (lambda: self.derived(kept, WGRAD_ACTIVATION)()) if of_fprop else lambda: kept
        x = self.pad_tokens(self.tokens_to_quantize(kept, "activation"))
        if not of_fprop:
            return self.prepare(None, WGRAD_ACTIVATION, x)[1]
        make, _ = self.prepare(FPROP_ACTIVATION, None, x)
        assert make is not None
        return self.derived(make(), WGRAD_ACTIVATION)

    def gradient_operands(
        self, dy: Tensor, needs_dgrad: bool, needs_wgrad: bool
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """What makes dy [tokens, out] dgrad's operand and wgrad's; None for what is not needed."""
        slots = DGRAD_GRADIENT if needs_dgrad else None, WGRAD_GRADIENT if needs_wgrad else None
        return self.prepare(*slots, self.pad(self.tokens_to_quantize(dy, "gradient")))

    def prepare(
        self,
        columns: OperandSlot | None,
        rows: OperandSlot | None,
        x: Tensor,
        keep_columns: bool = False,
        keep_rows: bool = False,
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """What makes the operand `columns` of the recipe from `x`, and the operand `rows` from its transpose.

        x: all tokens, or this rank's slice of a tensor in `slices`, whose operands are sent. keep_columns, keep_rows:
        whether the operand waits for the backward pass.
        """
        of_columns = None if columns is None else self.request(columns, keep_columns)
        of_rows = None if rows is None else self.request(rows, keep_rows)
        first, second = self.backend.operands(x, of_columns, of_rows)
        if (watcher := self.context.watcher) is None:
            return first, second
        return (
            first and functools.partial(watcher.operand, first, x, of_columns),
            second and functools.partial(watcher.operand, second, x.t(), of_rows),
        )

    def request(self, slot: OperandSlot, keep: bool = False) -> OperandRequest:
        """What the backend is asked to make for `slot`. keep: for the backward pass."""
        group, first_token = self.slices.get(slot.tensor), 0
        if group is not None:
            first_token = group.rank() * (self.num_tokens // group.size())
        rht, signs_key = self.recipe.gemms[slot.gemm].rht, None
        if rht and self.recipe.rht_signs == "fresh":
            signs_key = self.context.key(self.step, self.micro_batch, f"{slot.gemm}_signs", 0, 0)
        return OperandRequest(
            self.recipe[slot],
            rht,
            self.recipe.rht_signs,
            self.draws(slot, first_token),
            signs_key,
            slot,
            self.dtype,
            group or self.context.amax_group(slot.tensor),
            keep or group is not None,
        )

    def draws(self, slot: OperandSlot, first_token: int = 0) -> RoundingKey | None:
        """The key of an operand's draws, of x or dy from `first_token` on; None where it is rounded to nearest."""
        if not self.recipe[slot].drawn:
            return None
        rows = self.out_offset if slot.tensor == "weight" else first_token
        columns = self.out_offset if slot.tensor == "gradient" else self.context.in_offset
        rows, columns = (columns, rows) if slot.transposed else (rows, columns)
        return self.context.key(self.step, self.micro_batch, slot.name, rows, columns)

    def derived(self, operand: Any, slot: OperandSlot) -> MakeOperand:
        """What makes the operand at `slot` from fprop's `operand` of the same tensor: its codes, transposed; with the
        source `forward` its `code * block scale`, transposed and quantized again, under both tensor scales."""
        if self.recipe[slot].source != "forward":
            assert self.backend.transposes, f"the backend {self.backend.name} cannot use codes twice"
            return operand.transposed  # type: ignore[no-any-return]
        _, make = self.prepare(None, slot, operand.unpacked().to(torch.bfloat16))
        assert make is not None

        def made() -> Any:
            own, factor = make(), operand.scale
            if factor is None:
                return own
            return replace(own, scale=factor if own.scale is None else own.scale * factor)

        return made

    # ------------------------------------------------------------------------------------------------ slices of tokens

    def sends_operands(self, tensor: str, group: ProcessGroup) -> bool:
        """Whether the ranks of `group` gather operands made of slices of a tensor, and not the tensor. Both of dy are
        needed at once, and only in 4 bits are two operands fewer bytes than dy; of x, one waits for the backward pass
        as a slice."""
        if self.num_tokens % (group.size() * self.alignment.tokens):  # slices are whole blocks, and have no padding
            return False
        if tensor == "activation":
            return self.recipe[WGRAD_ACTIVATION].source != "codes"
        operands = [self.recipe[slot] for slot in SLOTS_OF[tensor]]
        # Along its columns MS-EDEN's kernel makes values, not codes.
        return all(operand.in_4_bits for operand in operands) and operands[0].rounding != "ms_eden"

    def tokens_to_quantize(self, x: Tensor, tensor: str) -> Tensor:
        """The tokens of x (`activation`) or dy (`gradient`) that this rank quantizes: its slice, or all."""
        return x if tensor in self.slices else self.all_tokens(x, tensor)

    def all_tokens(self, x: Tensor, tensor: str) -> Tensor:
        """All tokens of x or dy, of which this rank may hold a slice."""
        group = self.token_groups[tensor]
        return x if group is None else start_all_gather(x, group, beside=False).wait()

    def send(self, make: MakeOperand | None, slot: OperandSlot, beside: bool = True) -> Any:
        """What gives the operand of all tokens.

        For a tensor in `slices`: make the operand of this rank's slice and start to gather all slices; what is returned
        waits. Of others it is `make` itself. beside: whether anything runs meanwhile.
        """
        if make is None or slot.tensor not in self.slices:
            return make
        gather = functools.partial(start_all_gather, group=self.slices[slot.tensor], beside=beside)
        return make().gathered(gather, transposed=slot.transposed)

    # --------------------------------------------------------------------------------------------------------- weight

    @property
    def weight(self) -> Tensor:
        """[out, in], the local part in the compute dtype."""
        return self.master.to(self.dtype)

    def weight_operands(self) -> tuple[Any, Any]:
        """The weight as fprop's operand and what `dgrad_weight` takes, kept for all micro-batches of a step."""
        context = self.context
        stamp = (context.step_state.weights_version, self.dtype, self.device)
        if context.weight_cache is None or context.weight_cache[0] != stamp:
            fprop, dgrad, keeps = self._weight_operands()
            if not keeps:
                return fprop, dgrad
            context.weight_cache = (stamp, fprop, dgrad)
        return context.weight_cache[1:]

    def _weight_operands(self) -> tuple[Any, Any, bool]:
        """Both operands of `weight_operands`, and whether they can be kept for a step."""
        if self.weight_codes is not None:
            fprop, dgrad = self.backend.weight_of_codes(self.weight_codes, self.recipe[FPROP_WEIGHT])
            # Codes that are FSDP's own stay where they are, and are freed there.
            return fprop, dgrad, fprop.tensors()[0] is not self.weight_codes.codes
        reuse = self.backend.transposes and same_weight_codes(self.recipe)
        request = self.request(FPROP_WEIGHT)
        if reuse and emulated.keeps_codes(self.device) and self.dtype == torch.bfloat16 and self.backend.packs(request):
            # Codes without padding, which is put in when they are unpacked.
            sizes = self.group_rows, self.padded_group_rows
            packed: MakeOperand = functools.partial(emulated.packed_weight, self.master, request, *sizes)
            if self.context.watcher is not None:
                packed = functools.partial(self.context.watcher.operand, packed, self.pad_rows(self.master), request)
            fprop = packed()
            return fprop, fprop.transposed(), True
        late = self._requantizes_late
        of_fprop = reuse or self.recipe[DGRAD_WEIGHT].source != "tensor"
        slots = FPROP_WEIGHT, None if of_fprop else DGRAD_WEIGHT
        make_fprop, make_dgrad = self.prepare(*slots, self.pad_rows(self.master), keep_columns=late)
        assert make_fprop is not None
        dgrad = fprop = make_fprop()
        if not late:
            dgrad = (self.derived(fprop, DGRAD_WEIGHT) if make_dgrad is None else make_dgrad)()
        # What is not quantized is FSDP's gathered copy itself, which must not outlive its use; or a master, rounded.
        rounded = self.rounding is not None and self.rounding.kept and self.master.dtype != self.dtype
        copied = (fprop.quantized and dgrad.quantized) or (rounded and self.context.keeps_rounded)
        same = self._same_all_step(FPROP_WEIGHT) and (late or self._same_all_step(DGRAD_WEIGHT))
        return fprop, dgrad, copied and same

    @property
    def _requantizes_late(self) -> bool:
        """Whether dgrad's weight is made of fprop's codes anew in every micro-batch: then in the backward pass."""
        return self.recipe[DGRAD_WEIGHT].source == "forward" and not self._same_all_step(DGRAD_WEIGHT)

    def dgrad_weight(self, operand: Any) -> Any:
        """dgrad's operand in the backward pass: the second of `weight_operands`, or what is made of it now."""
        return self.derived(operand, DGRAD_WEIGHT)() if self._requantizes_late else operand

    def _same_all_step(self, slot: OperandSlot) -> bool:
        """Whether the weight's operand at `slot` is the same for every micro-batch of a step."""
        fresh = self.recipe.gemms[slot.gemm].rht and self.recipe.rht_signs == "fresh"
        return not self.recipe[slot].drawn and not fresh

    def weight_gradient(self, dy: Any, x: Any, ctx: Any) -> Tensor | None:
        """dy^T x of wgrad's operands as FP32 gradient [out, in] of `ctx.weight`; None: the GEMM added it to that of
        earlier micro-batches, as it does if it can and no probe is to see it."""
        weight, total = ctx.weight, None
        if ctx.observed is None and self.backend.accumulates and weight.is_leaf and weight.grad is not None:
            earlier = local_part(weight.grad)
            total = earlier if earlier.dtype == torch.float32 and earlier.is_contiguous() else None
        product = self.product("wgrad", dy, x, torch.float32, total, self.row_groups)
        return gradient_of(product, self.gradient_spec) if total is None else None

    # ------------------------------------------------------------------------------------------------- for the backward

    def save(self, ctx: Any, weight: Tensor, w_dgrad: Any, kept: Any, x: Tensor | None) -> None:
        """Save for the backward pass dgrad's weight and, for wgrad, the operand `kept`; or where that is None, `x`; or
        where both are, nothing."""
        operands = [w_dgrad] if kept is None else [w_dgrad, kept]
        tensors = [tensor for operand in operands for tensor in operand.tensors()]
        ctx.save_for_backward(*tensors, *([x] if kept is None and x is not None else []))
        ctx.call, ctx.weight, ctx.rebuild = self, weight, [operand.rebuild for operand in operands]

    def saved(self, ctx: Any) -> tuple[Any, Any]:
        """What `save` was given: dgrad's weight, and the operand or x (None: neither)."""
        tensors = ctx.saved_tensors  # once: a recomputing checkpoint refuses a second time
        w_dgrad, *kept = (rebuild(*tensors[3 * i : 3 * i + 3]) for i, rebuild in enumerate(ctx.rebuild))
        return w_dgrad, next(iter((*kept, *tensors[3 * len(ctx.rebuild) :])), None)

    def observe(self, x: Tensor, y: Tensor) -> Any:
        """Show the forward pass to the probe; returns what is to see the backward pass, if anything."""
        probe = self.context.probe
        return None if probe is None else probe.forward(self, self.all_tokens(x, "activation"), self.unpad_groups(y))

    def observe_backward(self, ctx: Any, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        """Show the backward pass to what `observe` returned."""
        if ctx.observed is not None:
            ctx.observed.backward(self.unpad_groups(self.all_tokens(dy, "gradient")), dx, dw)

    # -------------------------------------------------------------------------------------------------------- padding

    @property
    def row_groups(self) -> RowGroups | None:
        """Of padded output features, those that count; None: all do."""
        padded = self.padded_group_rows
        return None if padded == self.group_rows else RowGroups(padded, self.group_rows)

    def pad(self, y: Tensor) -> Tensor:
        """[tokens, out] with tokens and, unless they are, each group of output features padded."""
        is_padded = y.shape[-1] == self.context.num_groups * self.padded_group_rows
        return self.pad_tokens(y if is_padded else self._pad_groups(y))

    def result(self, y: Tensor) -> Tensor:
        """What the caller gets of a padded y: no padded tokens, and no padded features unless it keeps them."""
        y = self.unpad_tokens(y)
        return y if self.context.keep_padding else self.unpad_groups(y)

    def pad_tokens(self, x: Tensor) -> Tensor:
        """[tokens, features] with tokens padded."""
        extra = self.padded_tokens - self.num_tokens
        return pad(x, (0, 0, 0, extra)) if extra else x

    def unpad_tokens(self, x: Tensor) -> Tensor:
        return x[: self.num_tokens] if self.padded_tokens != self.num_tokens else x

    def pad_rows(self, w: Tensor) -> Tensor:
        """[out, in] with each group of output features padded."""
        return self._pad_groups(w.t()).t()

    def unpad_rows(self, w: Tensor) -> Tensor:
        return RowGroups(self.padded_group_rows, self.group_rows).of(w)

    def _pad_groups(self, y: Tensor) -> Tensor:
        extra = self.padded_group_rows - self.group_rows
        return pad(y.unflatten(-1, (-1, self.group_rows)), (0, extra)).flatten(-2) if extra else y

    def unpad_groups(self, y: Tensor) -> Tensor:
        """[tokens, out] without the padding of groups, if there is any."""
        if y.shape[-1] == self.context.num_groups * self.group_rows:
            return y
        return y.unflatten(-1, (-1, self.padded_group_rows))[..., : self.group_rows].flatten(-2)
