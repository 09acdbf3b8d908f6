"""The linear layer: one autograd function, three GEMMs, a recipe for each operand.

    fprop  y  = x W^T      x [tokens, in]    W [out, in]       -> y [tokens, out]
    dgrad  dx = dy W       dy [tokens, out]  W^T [in, out]     -> dx [tokens, in]
    wgrad  dW = dy^T x     dy^T [out, tokens] x^T [in, tokens] -> dW [out, in], always FP32

`reference.py` specifies what it computes; `linear_call.py` has what one call needs: padding, keys, kept weights.

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
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.precision.backend import BackendOperand
from megatron_fp4.precision.fp32_gradients import accept_fp32_gradient, gradient_of
from megatron_fp4.precision.linear_call import LinearCall
from megatron_fp4.precision.linear_context import LinearContext
from megatron_fp4.precision.recipe import (
    DGRAD_GRADIENT,
    FPROP_ACTIVATION,
    WGRAD_ACTIVATION,
    WGRAD_GRADIENT,
)
from megatron_fp4.precision.token_messages import start_reduce_scatter


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
