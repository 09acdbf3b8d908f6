"""The linear layer: one autograd function, three GEMMs, a recipe for each operand.

    fprop  y  = x W^T      x [tokens, in]     W [out, in]      -> y [tokens, out]
    dgrad  dx = dy W       dy [tokens, out]   W^T [in, out]    -> dx [tokens, in]
    wgrad  dW = dy^T x     dy^T [out, tokens] x^T [in, tokens] -> dW [out, in], always FP32

`reference.py` specifies what it computes. Tokens are padded with zeros to the multiple that the kernels require
(`backend.Alignment`). So are output features, which consist of `num_groups` equal groups (the heads of a packed
projection): each group is padded by itself, so that block boundaries depend on the model alone, not on how many ranks
share the weight.

The function takes the weight as a DTensor and returns its gradient as an FP32 DTensor (fp32_gradients.py). If the
backend's GEMM can add to a gradient, the function itself adds that of the second and later micro-batches to the
weight's `.grad` and returns None: `.backward()` gives the same result, `torch.autograd.grad` would not.

With sequence parallelism each rank has a slice of the tokens of x and dx in an input projection (`Sharding.in_tokens`),
and of y and dy in an output projection (`Sharding.out_tokens`). Between the two, every rank has all tokens. Collectives
overlap with work that does not need their results:

            input projection                                   output projection
    forward   codes of x gathered  | x quantized for wgrad       fprop
              fprop                                              y reduced, scattered | x quantized for wgrad
    backward  x for wgrad gathered | dy quantized, dgrad         codes of dy for dgrad gathered | dy quantized for wgrad
              dx reduced, scattered | wgrad                      codes of dy for wgrad gathered | dgrad
                                                                 wgrad
              (left of a bar is the collective, right of it the work that overlaps with it)

A slice is quantized before it is gathered, with the maximum of the complete tensor and with the draws for its position
in it. So its codes are those of the complete tensor, and each rank sends a quarter of the bytes and does its share of
the work. For the backward pass a rank keeps only its own slice of x. Slices that do not consist of complete blocks are
gathered before they are quantized.
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
from megatron_fp4.quantization.rounding import ALL, Place, RoundingKey, Span, rounding_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Sharding:
    """How ranks share one linear.

    inputs, outputs: this rank's features in the global tensors.
    num_groups: equal groups of the local output features, each padded to complete blocks.
    keep_padding: y and dy keep the padding of each group, which the caller skips, so it is not removed and added again.
    in_tokens, out_tokens: ranks that each hold a slice of the tokens of x and dx, or of y and dy; None: every rank has
        all tokens.
    """

    inputs: Span = ALL
    outputs: Span = ALL
    num_groups: int = 1
    keep_padding: bool = False
    in_tokens: ProcessGroup | None = None
    out_tokens: ProcessGroup | None = None


@dataclass
class LinearContext:
    """The recipe, backend and place in the mesh of one linear.

    name, recipe, step_state, backend: set by the run's controller (plan.py).
    sharding: set by its layer.
    keeps_input: keep x itself for the backward pass and make wgrad's operand there, with the same bits: for linears
        whose input is kept anyway, or recomputed. If False, wgrad's operand is kept.
    weight_cache: (the state that it was made for, fprop's operand, dgrad's operand); None: nothing is kept.
    keeps_rounded: whether `weight_cache` may keep a weight that is only rounded; this requires a StepState that
        advances when weights change.
    probe: the linear calls its `forward(call, x, y)` with x [tokens, in] and the local y [tokens, out]. If that returns
        an object, the linear calls its `backward(dy, dx, dw)` with the local parts; None: not needed. A probe with
        `reads_weights = False` never reads a call's weight. (measure/diagnostics.py)
    watcher: gets the backend's operands and products, and returns them unchanged. (verify.Recheck)
    """

    name: str = ""
    recipe: Recipe = BF16
    step_state: StepState = field(default_factory=lambda: StepState(seed=0))
    backend: Backend = EMULATED
    sharding: Sharding = Sharding()
    keeps_input: bool = False
    weight_cache: tuple[Any, Any, Any] | None = None
    keeps_rounded: bool = True
    probe: Any = None
    watcher: Any = None

    @property
    def gathers_codes(self) -> bool:
        """Whether FSDP can gather the weight as codes, and nothing needs its values."""
        probe_reads = self.probe is not None and getattr(self.probe, "reads_weights", True)
        packs = same_weight_codes(self.recipe) and self.backend.packs(self.recipe[FPROP_WEIGHT])
        return packs and self.watcher is None and not probe_reads

    def place(self, tensor: str, tokens: Span = ALL, groups: RowGroups | None = None) -> Place:
        """Where this rank's part of `activation` [tokens, in], `weight` [out, in] or `gradient` [tokens, out] lies.

        tokens: those that are here. groups: how output features are padded; None: not at all. With the recipe's amax
        `shard`, ranks that share features do not share a maximum.
        """
        inputs, outputs = self.sharding.inputs, self.sharding.outputs
        if groups is not None:
            outputs = replace(outputs, at=groups.padded_indices(outputs.at))
        if self.recipe.amax != "global":
            inputs, outputs = replace(inputs, ranks=None), replace(outputs, ranks=None)
        dims = {"activation": (tokens, inputs), "weight": (outputs, inputs), "gradient": (tokens, outputs)}
        return Place(*dims[tensor])

    def key(self, step: int, micro_batch: int, operand: str) -> RoundingKey:
        """The key for one operand's draws."""
        key, keys = rounding_key(self.step_state.seed, step, micro_batch, self.name, operand), self.step_state.keys
        return key if keys is None else keys.of(self.name, operand, key)


def same_weight_codes(recipe: Recipe) -> bool:
    """Whether dgrad's weight has fprop's codes, transposed, or both are not quantized."""
    operand = recipe[FPROP_WEIGHT]
    plain = operand.rounding == "nearest" and not recipe.fprop.rht and not recipe.dgrad.rht
    square = operand.block[0] == operand.block[1] or not operand.quantized
    return operand == recipe[DGRAD_WEIGHT] and plain and square


def quantized_linear(x: Tensor, weight: Tensor, context: LinearContext) -> Tensor:
    """y = x W^T with the recipe in `context`.

    x: [tokens, in] in the compute dtype; with `in_tokens`, this rank's slice of the tokens. weight: parameter [out, in]
    (a DTensor, whose local part is used, or a plain tensor). Returns [tokens, out] in x's dtype, with `keep_padding`
    including the padding of groups; with `out_tokens`, this rank's slice of the sum over ranks. The weight's gradient
    is FP32.
    """
    accept_fp32_gradient(weight)
    # Inside the function gradients are always off, and needs_input_grad ignores no_grad.
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    return _QuantizedLinear.apply(x, weight, context, needs_wgrad)  # type: ignore[no-any-return, no-untyped-call]


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, context: LinearContext, needs_wgrad: bool) -> Tensor:
        call, kept, scattered = LinearCall(context, weight, x), None, None
        w_fprop, w_dgrad = call.weight_operands()
        make_fprop, make_kept = call.activation_operands(x, needs_wgrad)
        overlaps = make_kept is not None and make_kept is not make_fprop  # otherwise fprop's operand is kept
        receive_fprop = call.send(make_fprop, FPROP_ACTIVATION, async_op=overlaps)
        if make_kept is not None and "activation" in call.slices:
            kept = make_kept()  # while fprop's codes are gathered
        y = call.result(call.product("fprop", receive_fprop(), w_fprop, call.dtype))
        ctx.observed = call.observe(x, y)
        if call.sharding.out_tokens is not None:
            scattered = start_reduce_scatter(y, call.sharding.out_tokens, async_op=overlaps)
        if make_kept is not None and kept is None:
            kept = make_kept()  # while y is reduced
        call.save(ctx, weight, w_dgrad, kept, x if needs_wgrad else None)
        return y if scattered is None else scattered.wait()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy,), call = grad_outputs, ctx.call
        (w_dgrad, kept), dx, dw, scattered = call.saved(ctx), None, None, None
        # First what exchanges maxima, which would otherwise wait for larger collectives.
        make_x = call.wgrad_activation(kept)
        make_dgrad, make_wgrad = call.gradient_operands(dy, *ctx.needs_input_grad[:2])
        receive_x = call.send(make_x, WGRAD_ACTIVATION)
        receive_dgrad, receive_wgrad = call.send(make_dgrad, DGRAD_GRADIENT), call.send(make_wgrad, WGRAD_GRADIENT)
        if receive_dgrad is not None:  # before wgrad's operand is made: each is as large as dy
            dx = call.unpad_tokens(call.product("dgrad", receive_dgrad(), call.dgrad_weight(w_dgrad), call.dtype))
            if call.sharding.in_tokens is not None:
                scattered = start_reduce_scatter(dx, call.sharding.in_tokens, async_op=receive_wgrad is not None)
        if receive_wgrad is not None:
            x_wgrad = receive_x()
            dw = call.weight_gradient(receive_wgrad(), x_wgrad, ctx)
        call.observe_backward(ctx, dy, dx, dw)
        return dx if scattered is None else scattered.wait(), dw, None, None


class LinearCall:
    """One forward pass of one linear and its backward pass: its position in the run, and how the recipe turns each
    tensor into operands.

    weight: parameter [out, in]. x: [tokens, in], with `in_tokens` this rank's slice; only its shape, dtype and device
    are used. num_tokens: of all slices together. slices: the tensors (`activation`, `gradient`) whose slices are
    quantized before they are gathered, with the ranks that gather them.
    """

    def __init__(self, context: LinearContext, weight: Tensor, x: Tensor) -> None:
        self.context, self.sharding = context, context.sharding
        self.recipe, self.backend = context.recipe, context.backend
        self.step, self.micro_batch = context.step_state.step, context.step_state.micro_batch
        self.device, self.dtype = x.device, x.dtype
        self.master, self.gradient_spec = local_part(weight), gradient_spec(weight)
        self.rounding = rounding_of(weight)
        self.weight_codes = codes_of(weight)  # if FSDP gathered codes, the master has no values
        self.group_rows = self.master.shape[0] // self.sharding.num_groups
        self.token_groups = {"activation": self.sharding.in_tokens, "gradient": self.sharding.out_tokens}
        self.num_tokens = x.shape[0] * (1 if self.sharding.in_tokens is None else self.sharding.in_tokens.size())
        self.alignment = self.backend.alignment(self.recipe)
        self.padded_tokens = self.alignment.padded_tokens(self.num_tokens)
        self.padded_group_rows = self.alignment.padded_group(self.group_rows, self.sharding.num_groups)
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
        """Functions that make fprop's operand of x [tokens, in] and the operand that is kept for the backward pass
        (None: x itself is kept, or nothing). Call them in this order."""
        source, keeps = self.recipe[WGRAD_ACTIVATION].source, needs_wgrad and not self.context.keeps_input
        wgrad = WGRAD_ACTIVATION if keeps and source == "tensor" else None
        x = self.pad_tokens(self.tokens_to_quantize(x, "activation"))
        make_fprop, make_wgrad = self.prepare(FPROP_ACTIVATION, wgrad, x, keeps and source == "forward", True)
        assert make_fprop is not None
        if keeps and source != "tensor":
            make_fprop = make_wgrad = functools.cache(make_fprop)
        return make_fprop, make_wgrad

    def wgrad_activation(self, kept: Tensor | BackendOperand | None) -> MakeOperand | None:
        """A function that makes wgrad's operand from what the forward pass kept: x, fprop's operand, or wgrad's."""
        if kept is None:
            return None
        from_fprop = self.recipe[WGRAD_ACTIVATION].source != "tensor"
        if not isinstance(kept, Tensor):
            if from_fprop:
                return lambda: self.derived(kept, WGRAD_ACTIVATION)()
            return lambda: kept
        x = self.pad_tokens(self.tokens_to_quantize(kept, "activation"))
        if not from_fprop:
            return self.prepare(None, WGRAD_ACTIVATION, x)[1]
        make_fprop, _ = self.prepare(FPROP_ACTIVATION, None, x)
        assert make_fprop is not None
        return self.derived(make_fprop(), WGRAD_ACTIVATION)

    def gradient_operands(
        self, dy: Tensor, needs_dgrad: bool, needs_wgrad: bool
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """Functions that make dgrad's and wgrad's operand of dy [tokens, out]; None: not needed."""
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
        """Functions that make the recipe's operand `columns` from `x` and its operand `rows` from the transposed `x`.

        x: all tokens, or this rank's slice of a tensor in `slices`. keep_columns, keep_rows: whether the operand is
        kept for the backward pass.
        """
        columns_request = None if columns is None else self.request(columns, keep_columns)
        rows_request = None if rows is None else self.request(rows, keep_rows)
        slot = columns or rows
        assert slot is not None
        place = self.place(slot.tensor)
        make_columns, make_rows = self.backend.operands(x, place, columns_request, rows_request)
        if (watcher := self.context.watcher) is None:
            return make_columns, make_rows
        return (
            make_columns and functools.partial(watcher.operand, make_columns, x, place, columns_request),
            make_rows and functools.partial(watcher.operand, make_rows, x.t(), place.t(), rows_request),
        )

    def place(self, tensor: str, all_tokens: bool = False) -> Place:
        """Where the padded part of a tensor that this rank quantizes lies: its slice of the tokens, or all."""
        tokens, group = ALL, None if all_tokens else self.slices.get(tensor)
        if group is not None:
            tokens = Span(group.rank() * (self.num_tokens // group.size()), group)
        return self.context.place(tensor, tokens, RowGroups(self.padded_group_rows, self.group_rows))

    def request(self, slot: OperandSlot, keep: bool = False) -> OperandRequest:
        """The request to the backend for `slot`. keep: whether the operand is kept for the backward pass."""
        rht, signs_key = self.recipe.gemms[slot.gemm].rht, None
        if rht and self.recipe.rht_signs == "fresh":
            signs_key = self.context.key(self.step, self.micro_batch, f"{slot.gemm}_signs")
        return OperandRequest(
            self.recipe[slot],
            rht,
            signs=self.recipe.rht_signs,
            key=self.rounding_key_of(slot),
            signs_key=signs_key,
            slot=slot,
            dtype=self.dtype,
            keep=keep or slot.tensor in self.slices,
        )

    def rounding_key_of(self, slot: OperandSlot) -> RoundingKey | None:
        """The key for an operand's draws; None: it has none."""
        return self.context.key(self.step, self.micro_batch, slot.name) if self.recipe[slot].drawn else None

    def derived(self, operand: Any, slot: OperandSlot) -> MakeOperand:
        """A function that makes the operand at `slot` from the tensor's operand in fprop: it transposes the codes,
        or with the source `forward` quantizes their transposed `code * block scale` and multiplies tensor scales."""
        if self.recipe[slot].source != "forward":
            assert self.backend.transposes, f"operands of the backend {self.backend.name} cannot be transposed"
            return operand.transposed  # type: ignore[no-any-return]
        _, make = self.prepare(None, slot, operand.unpacked().to(torch.bfloat16))
        assert make is not None

        def make_scaled() -> Any:
            made, fprop_scale = make(), operand.scale
            if fprop_scale is None:
                return made
            return replace(made, scale=fprop_scale if made.scale is None else made.scale * fprop_scale)

        return make_scaled

    # ------------------------------------------------------------------------------------------------ slices of tokens

    def sends_operands(self, tensor: str, group: ProcessGroup) -> bool:
        """Whether the ranks of `group` gather operands of slices of a tensor, and not the tensor itself. dy needs both
        operands at once, and only in 4 bits are they fewer bytes than dy; x needs one operand per pass."""
        if self.num_tokens % (group.size() * self.alignment.tokens):  # a slice has incomplete blocks or padding
            return False
        if tensor == "activation":
            return self.recipe[WGRAD_ACTIVATION].source != "codes"
        operands = [self.recipe[slot] for slot in SLOTS_OF[tensor]]
        # MS-EDEN's kernel makes values, not codes, along the columns.
        return all(operand.in_4_bits for operand in operands) and operands[0].rounding != "ms_eden"

    def tokens_to_quantize(self, x: Tensor, tensor: str) -> Tensor:
        """The tokens of x (`activation`) or dy (`gradient`) that this rank quantizes: its slice, or all."""
        return x if tensor in self.slices else self.all_tokens(x, tensor)

    def all_tokens(self, x: Tensor, tensor: str) -> Tensor:
        """All tokens of x or dy; gathered if this rank holds a slice."""
        group = self.token_groups[tensor]
        return x if group is None else start_all_gather(x, group, async_op=False).wait()

    def send(self, make: MakeOperand | None, slot: OperandSlot, async_op: bool = True) -> Any:
        """A function that returns the operand of all tokens; None if `make` is None.

        For a tensor in `slices` this makes the operand of the rank's slice and starts to gather all slices; the
        returned function waits. For other tensors it returns `make`. async_op: as in `start_all_gather`.
        """
        if make is None or slot.tensor not in self.slices:
            return make
        gather = functools.partial(start_all_gather, group=self.slices[slot.tensor], async_op=async_op)
        return make().gathered(gather, transposed=slot.transposed)

    # --------------------------------------------------------------------------------------------------------- weight

    @property
    def weight(self) -> Tensor:
        """The local part in the compute dtype, [out, in]."""
        return self.master.to(self.dtype)

    def weight_operands(self) -> tuple[Any, Any]:
        """The weight as fprop's operand and as `dgrad_weight` takes it; kept for all micro-batches of a step."""
        context = self.context
        stamp = (context.step_state.weights_version, self.dtype, self.device)
        if context.weight_cache is None or context.weight_cache[0] != stamp:
            fprop, dgrad, keeps = self._weight_operands()
            if not keeps:
                return fprop, dgrad
            context.weight_cache = (stamp, fprop, dgrad)
        return context.weight_cache[1:]

    def _weight_operands(self) -> tuple[Any, Any, bool]:
        """Both results of `weight_operands`, and whether they can be kept for a step."""
        if self.weight_codes is not None:
            fprop, dgrad = self.backend.weight_of_codes(self.weight_codes, self.recipe[FPROP_WEIGHT])
            # FSDP's own tensors are not kept here: it frees them.
            return fprop, dgrad, fprop.tensors()[0] is not self.weight_codes.codes
        reuse = self.backend.transposes and same_weight_codes(self.recipe)
        as_codes = reuse and self.backend.packs(self.recipe[FPROP_WEIGHT]) and emulated.keeps_codes(self.device)
        if as_codes and self.dtype == torch.bfloat16:
            request = self.request(FPROP_WEIGHT)
            # The codes are kept without padding; unpacking adds it.
            place, sizes = self.place("weight"), (self.group_rows, self.padded_group_rows)
            make_packed: MakeOperand = functools.partial(emulated.packed_weight, self.master, place, request, *sizes)
            if (watcher := self.context.watcher) is not None:
                make_packed = functools.partial(
                    watcher.operand, make_packed, self.pad_rows(self.master), place, request
                )
            fprop = make_packed()
            return fprop, fprop.transposed(), True
        in_backward = self._makes_dgrad_weight_in_backward
        from_fprop = reuse or self.recipe[DGRAD_WEIGHT].source != "tensor"
        slots = FPROP_WEIGHT, None if from_fprop else DGRAD_WEIGHT
        make_fprop, make_dgrad = self.prepare(*slots, self.pad_rows(self.master), keep_columns=in_backward)
        assert make_fprop is not None
        dgrad = fprop = make_fprop()
        if not in_backward:
            dgrad = (self.derived(fprop, DGRAD_WEIGHT) if make_dgrad is None else make_dgrad)()
        # An operand that is not quantized is FSDP's gathered copy, which must not be kept, or a rounded master weight.
        rounded = self.rounding is not None and self.rounding.kept and self.master.dtype != self.dtype
        copied = (fprop.quantized and dgrad.quantized) or (rounded and self.context.keeps_rounded)
        same = self._same_all_step(FPROP_WEIGHT) and (in_backward or self._same_all_step(DGRAD_WEIGHT))
        return fprop, dgrad, copied and same

    @property
    def _makes_dgrad_weight_in_backward(self) -> bool:
        """Whether every backward pass makes dgrad's weight from fprop's codes, because its draws or signs change."""
        return self.recipe[DGRAD_WEIGHT].source == "forward" and not self._same_all_step(DGRAD_WEIGHT)

    def dgrad_weight(self, operand: Any) -> Any:
        """dgrad's operand in the backward pass. operand: the second result of `weight_operands`."""
        return self.derived(operand, DGRAD_WEIGHT)() if self._makes_dgrad_weight_in_backward else operand

    def _same_all_step(self, slot: OperandSlot) -> bool:
        """Whether the weight's operand at `slot` is the same for every micro-batch of a step."""
        fresh_signs = self.recipe.gemms[slot.gemm].rht and self.recipe.rht_signs == "fresh"
        return not self.recipe[slot].drawn and not fresh_signs

    def weight_gradient(self, dy: Any, x: Any, ctx: Any) -> Tensor | None:
        """dy^T x of wgrad's operands, the FP32 gradient [out, in] of `ctx.weight`; None if the GEMM added it to that of
        earlier micro-batches, which it does if it can and no probe needs it."""
        weight, total = ctx.weight, None
        if ctx.observed is None and self.backend.accumulates and weight.is_leaf and weight.grad is not None:
            earlier = local_part(weight.grad)
            total = earlier if earlier.dtype == torch.float32 and earlier.is_contiguous() else None
        product = self.product("wgrad", dy, x, torch.float32, total, self.row_groups)
        return gradient_of(product, self.gradient_spec) if total is None else None

    # ------------------------------------------------------------------------------------------------- for the backward

    def save(self, ctx: Any, weight: Tensor, w_dgrad: Any, kept: Any, x: Tensor | None) -> None:
        """Save dgrad's weight for the backward pass and, for wgrad, the operand `kept`, or `x` if that is None."""
        operands = [w_dgrad] if kept is None else [w_dgrad, kept]
        tensors = [tensor for operand in operands for tensor in operand.tensors()]
        ctx.save_for_backward(*tensors, *([x] if kept is None and x is not None else []))
        ctx.call, ctx.weight, ctx.rebuild = self, weight, [operand.rebuild for operand in operands]

    def saved(self, ctx: Any) -> tuple[Any, Any]:
        """What `save` saved: dgrad's weight, and wgrad's operand or x (None: neither)."""
        tensors = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        operands = [rebuild(*tensors[3 * i : 3 * i + 3]) for i, rebuild in enumerate(ctx.rebuild)]
        w_dgrad, *kept = operands + list(tensors[3 * len(operands) :])
        return w_dgrad, kept[0] if kept else None

    def observe(self, x: Tensor, y: Tensor) -> Any:
        """Pass x and y to the probe; returns the object that observes the backward pass, or None."""
        probe = self.context.probe
        return None if probe is None else probe.forward(self, self.all_tokens(x, "activation"), self.unpad_groups(y))

    def observe_backward(self, ctx: Any, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        """Pass the gradients to the object that `observe` returned."""
        if ctx.observed is not None:
            ctx.observed.backward(self.unpad_groups(self.all_tokens(dy, "gradient")), dx, dw)

    # -------------------------------------------------------------------------------------------------------- padding

    @property
    def row_groups(self) -> RowGroups | None:
        """The groups of padded output features; None: they have no padding."""
        padded = self.padded_group_rows
        return None if padded == self.group_rows else RowGroups(padded, self.group_rows)

    def pad(self, y: Tensor) -> Tensor:
        """[tokens, out] with padded tokens and padded groups of output features; y may have the latter already."""
        is_padded = y.shape[-1] == self.sharding.num_groups * self.padded_group_rows
        return self.pad_tokens(y if is_padded else self._pad_groups(y))

    def result(self, y: Tensor) -> Tensor:
        """y without padded tokens, and without padded features unless the caller keeps these."""
        y = self.unpad_tokens(y)
        return y if self.sharding.keep_padding else self.unpad_groups(y)

    def pad_tokens(self, x: Tensor) -> Tensor:
        """[tokens, features] with padded tokens."""
        extra = self.padded_tokens - self.num_tokens
        return pad(x, (0, 0, 0, extra)) if extra else x

    def unpad_tokens(self, x: Tensor) -> Tensor:
        return x[: self.num_tokens] if self.padded_tokens != self.num_tokens else x

    def pad_rows(self, w: Tensor) -> Tensor:
        """[out, in] with padded groups of output features."""
        return self._pad_groups(w.t()).t()

    def unpad_rows(self, w: Tensor) -> Tensor:
        return RowGroups(self.padded_group_rows, self.group_rows).unpadded(w)

    def _pad_groups(self, y: Tensor) -> Tensor:
        extra = self.padded_group_rows - self.group_rows
        return pad(y.unflatten(-1, (-1, self.group_rows)), (0, extra)).flatten(-2) if extra else y

    def unpad_groups(self, y: Tensor) -> Tensor:
        """[tokens, out] without the padding of groups."""
        if y.shape[-1] == self.sharding.num_groups * self.group_rows:
            return y
        return y.unflatten(-1, (-1, self.padded_group_rows))[..., : self.group_rows].flatten(-2)
