"""The linear layer: one autograd function, three GEMMs, a recipe for each operand.

`reference.py` specifies what it computes. `operands.py` says what is quantized, and how; this file has the flow: the
GEMMs, the messages between ranks, and what autograd keeps.

The parts of a packed projection that the plan splits are linears of their own, with one weight (`split_linear`).

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
the work. For the backward pass a rank keeps only its own slice of x. Slices of incomplete blocks are gathered first.

The linears of several experts (`grouped_linear`) are one call: weight [experts, out, in], tokens in segments
(quantization/segments.py), a tensor scale for each segment and each expert's weight, and a grouped GEMM.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.precision.backend import BackendOperand, MakeOperand, RowGroups
from megatron_fp4.precision.fp32_gradients import accept_fp32_gradient, gradient_of, gradient_spec, local_part
from megatron_fp4.precision.messages import start_all_gather, start_reduce_scatter
from megatron_fp4.precision.operands import GroupedCall, LinearCall, LinearContext
from megatron_fp4.precision.recipe import (
    DGRAD_GRADIENT,
    FPROP_ACTIVATION,
    WGRAD_ACTIVATION,
    WGRAD_GRADIENT,
    OperandSlot,
)
from megatron_fp4.quantization.segments import Segments


def quantized_linear(x: Tensor, weight: Tensor, context: LinearContext) -> Tensor:
    """y = x W^T with the recipe in `context`.

    x: [tokens, in] in the compute dtype; with `in_tokens`, this rank's slice of the tokens. weight: parameter [out, in]
    (a DTensor, whose local part is used, or a plain tensor). Returns [tokens, out] in x's dtype, with `keep_padding`
    including the padding of groups; with `out_tokens`, this rank's slice of the sum over ranks.
    """
    return _QuantizedLinear.apply(x, weight, context, _needs_wgrad(weight), None)  # type: ignore[no-any-return, no-untyped-call]


def grouped_linear(x: Tensor, weight: Tensor, context: LinearContext, segments: Segments) -> Tensor:
    """y = x W^T of each expert's tokens with its weight: codes and y are those of a `quantized_linear` for each
    segment, with the positions of its tokens.

    x: [tokens, in] in the compute dtype, in segments. weight: parameter [experts, out, in]. Returns [tokens, out]. The
    weight's gradient is FP32, and zero for experts without tokens.
    """
    return _QuantizedLinear.apply(x, weight, context, _needs_wgrad(weight), segments)  # type: ignore[no-any-return, no-untyped-call]


def split_linear(x: Tensor, weight: Tensor, context: LinearContext) -> tuple[Tensor, ...]:
    """The results of the context's parts, as of separate linears that each have their rows of `weight`; dx is the sum
    of theirs. Arguments as for `quantized_linear`."""
    return _SplitLinear.apply(x, weight, context, _needs_wgrad(weight))  # type: ignore[return-value, no-untyped-call]


def _needs_wgrad(weight: Tensor) -> bool:
    """Let the weight have an FP32 gradient; returns whether it needs one."""
    accept_fp32_gradient(weight)
    # Inside the autograd functions gradients are always off, and needs_input_grad ignores no_grad.
    return torch.is_grad_enabled() and weight.requires_grad


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, context: LinearContext, needs_wgrad: bool, segments: Segments | None
    ) -> Tensor:
        call = LinearCall(context, weight, x) if segments is None else GroupedCall(context, weight, x, segments)
        kept = scattered = None
        w_fprop, w_dgrad = call.weight_operands()
        make_fprop, make_kept = call.activation_operands(x, needs_wgrad)
        overlaps = make_kept is not None and make_kept is not make_fprop  # otherwise fprop's operand is kept
        receive_x = _send(call, make_fprop, FPROP_ACTIVATION, async_op=overlaps)
        if make_kept is not None and "activation" in call.slices:
            kept = make_kept()  # while fprop's codes are gathered
        y = call.padding.unpad_tokens(_product(call, "fprop", receive_x(), w_fprop, call.dtype))
        y = y if context.sharding.keep_padding else call.padding.unpad_outputs(y)
        ctx.observed = None
        if (probe := context.probe) is not None:
            ctx.observed = probe.forward(call, call.all_tokens(x, "activation"), call.padding.unpad_outputs(y))
        if (group := context.sharding.out_tokens) is not None:
            scattered = start_reduce_scatter(y, group, async_op=overlaps)
        if make_kept is not None and kept is None:
            kept = make_kept()  # while y is reduced
        _save(ctx, call, weight, w_dgrad, kept, x if needs_wgrad else None)
        return y if scattered is None else scattered.wait()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (dy,), call = grad_outputs, ctx.call
        (w_dgrad, kept), dx, dw, scattered = _saved(ctx), None, None, None
        # First what exchanges maxima, which would otherwise wait for larger collectives.
        make_x = call.wgrad_activation(kept)
        make_dgrad, make_wgrad = call.gradient_operands(dy, *ctx.needs_input_grad[:2])
        receive_x = _send(call, make_x, WGRAD_ACTIVATION)
        receive_dgrad, receive_wgrad = _send(call, make_dgrad, DGRAD_GRADIENT), _send(call, make_wgrad, WGRAD_GRADIENT)
        if receive_dgrad is not None:  # before wgrad's operand is made: each is as large as dy
            product = _product(call, "dgrad", receive_dgrad(), call.dgrad_weight(w_dgrad), call.dtype)
            dx = call.padding.unpad_tokens(product)
            if (group := call.context.sharding.in_tokens) is not None:
                scattered = start_reduce_scatter(dx, group, async_op=receive_wgrad is not None)
        if receive_wgrad is not None:
            x_wgrad = receive_x()
            dw = _weight_gradient(ctx, receive_wgrad(), x_wgrad)
        if ctx.observed is not None:
            ctx.observed.backward(call.padding.unpad_outputs(call.all_tokens(dy, "gradient")), dx, dw)
        return dx if scattered is None else scattered.wait(), dw, None, None, None


class _PartContext:
    """What autograd's ctx is for `_QuantizedLinear`, for one part of a split linear."""

    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, context: LinearContext, needs_wgrad: bool) -> tuple[Tensor, ...]:
        parts, ctx.weight = [_PartContext() for _ in context.parts], weight
        ys = [
            _QuantizedLinear.forward(part, x, weight, of_part, needs_wgrad, None)
            for part, of_part in zip(parts, context.parts, strict=True)
        ]
        ctx.save_for_backward(*(tensor for part in parts for tensor in part.saved_tensors))
        ctx.parts = [(part, len(part.saved_tensors)) for part in parts]
        for part in parts:
            del part.saved_tensors  # autograd keeps them now
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        saved, dx, dw, adds = iter(ctx.saved_tensors), None, None, False
        if ctx.needs_input_grad[1]:
            dw = _earlier_gradient(ctx.weight)
            adds = dw is not None
            dw = torch.empty_like(local_part(ctx.weight), dtype=torch.float32) if dw is None else dw
        for (part, count), dy in zip(ctx.parts, grad_outputs, strict=True):
            part.saved_tensors, part.needs_input_grad = tuple(itertools.islice(saved, count)), ctx.needs_input_grad
            part_dx, part_dw, *_ = _QuantizedLinear.backward(part, dy)
            del part.saved_tensors
            if part_dx is not None:
                dx = part_dx if dx is None else dx.add_(part_dx)
            if dw is not None and part_dw is not None:
                sharding = part.call.context.sharding
                strips = sharding.strips_of(dw)
                rows = part_dw.unflatten(0, (sharding.num_groups, -1)).split([strip.shape[1] for strip in strips], 1)
                for strip, of_strip in zip(strips, rows, strict=True):
                    strip.add_(of_strip) if adds else strip.copy_(of_strip)
        return dx, None if adds or dw is None else gradient_of(dw, gradient_spec(ctx.weight)), None, None


def _send(call: LinearCall, make: MakeOperand | None, slot: OperandSlot, async_op: bool = True) -> Any:
    """A function that returns the operand of all tokens; None if `make` is None.

    For a tensor in `call.slices` this makes the operand of the rank's slice and starts to gather all slices; the
    returned function waits. For other tensors it returns `make`. async_op: as in `start_all_gather`.
    """
    if make is None or slot.tensor not in call.slices:
        return make
    gather = functools.partial(start_all_gather, group=call.slices[slot.tensor], async_op=async_op)
    return make().gathered(gather, transposed=slot.transposed)


def _product(
    call: LinearCall,
    gemm: str,
    a: BackendOperand,
    b: BackendOperand,
    out_dtype: torch.dtype,
    total: Tensor | None = None,
    groups: RowGroups | None = None,
) -> Tensor:
    """The product of a GEMM (`fprop`, `dgrad`, `wgrad`), as `Backend.gemm` computes it."""
    if call.segments is not None:
        product = call.backend.grouped_gemm(gemm, a, b, call.segments, out_dtype, total)
        return product if gemm == "wgrad" else call.segments.unsort(product)
    multiply = functools.partial(call.backend.gemm, a, b, out_dtype, total, groups)
    watcher = call.context.watcher
    return multiply() if watcher is None else watcher.product(gemm, multiply, (a, b), total, groups)


def _weight_gradient(ctx: Any, dy: BackendOperand, x: BackendOperand) -> Tensor | None:
    """dy^T x of wgrad's operands, the FP32 gradient [out, in] of `ctx.weight`, of a part of a linear that of its rows;
    None if the GEMM added it to that of earlier micro-batches, which it does if it can and no probe needs it."""
    call, total, is_part = ctx.call, None, ctx.call.context.sharding.section is not None
    if ctx.observed is None and call.backend.accumulates and not is_part:
        total = _earlier_gradient(ctx.weight)
    product = _product(call, "wgrad", dy, x, torch.float32, total, call.padding.row_groups)
    if is_part:
        return product
    return gradient_of(product, call.gradient_spec) if total is None else None


def _earlier_gradient(weight: Tensor) -> Tensor | None:
    """The local gradient of earlier micro-batches, to which another can be added in place; None: there is none."""
    if not weight.is_leaf or weight.grad is None:
        return None
    earlier = local_part(weight.grad)
    return earlier if earlier.dtype == torch.float32 and earlier.is_contiguous() else None


def _save(ctx: Any, call: LinearCall, weight: Tensor, w_dgrad: Any, kept: Any, x: Tensor | None) -> None:
    """Save dgrad's weight for the backward pass and, for wgrad, the operand `kept`, or `x` if that is None."""
    operands = [w_dgrad] if kept is None else [w_dgrad, kept]
    tensors = [tensor for operand in operands for tensor in operand.tensors()]
    ctx.save_for_backward(*tensors, *([x] if kept is None and x is not None else []))
    ctx.call, ctx.weight = call, weight
    ctx.rebuild = [(operand.rebuild, len(operand.tensors())) for operand in operands]


def _saved(ctx: Any) -> tuple[Any, Any]:
    """What `_save` saved: dgrad's weight, and wgrad's operand or x (None: neither)."""
    tensors = iter(ctx.saved_tensors)  # read once: activation checkpointing refuses a second time
    w_dgrad, *kept = [rebuild(*itertools.islice(tensors, count)) for rebuild, count in ctx.rebuild] + list(tensors)
    return w_dgrad, kept[0] if kept else None
