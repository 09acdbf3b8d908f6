"""The linear layer: one autograd function, three GEMMs, a recipe for each operand.

    fprop  y  = x W^T      x [tokens, in]    W [out, in]       -> y [tokens, out]
    dgrad  dx = dy W       dy [tokens, out]  W^T [in, out]     -> dx [tokens, in]
    wgrad  dW = dy^T x     dy^T [out, tokens] x^T [in, tokens] -> dW [out, in], always FP32

`reference.py` specifies what it computes; `linear_call.py` has what one call needs: padding, keys, kept weights.

The function takes the weight as a DTensor and returns its gradient as an FP32 one (precision/fp32_gradients.py). Where
a backend's GEMM can add to a gradient, that of the second and later micro-batches goes into the weight's `.grad` from
inside the function, which then returns None: `.backward()` sees no difference, `torch.autograd.grad` would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_fp4.precision.fp32_gradients import accept_fp32_gradient, gradient_of
from megatron_fp4.precision.linear_call import LinearCall, LinearContext
from megatron_fp4.precision.recipe import (
    DGRAD_GRADIENT,
    FPROP_ACTIVATION,
    WGRAD_ACTIVATION,
    WGRAD_GRADIENT,
)


def quantized_linear(x: Tensor, weight: Tensor, context: LinearContext) -> Tensor:
    """y = x W^T by the recipe in `context`.

    x: [tokens, in], the compute dtype. weight: parameter [out, in] (local part of a DTensor, or a plain tensor).
    Returns [tokens, out] in x's dtype; the weight's gradient is FP32.
    """
    accept_fp32_gradient(weight)
    # Inside the function gradients are always off, and needs_input_grad does not know about no_grad.
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    return _QuantizedLinear.apply(x, weight, context, needs_wgrad)  # type: ignore[return-value]


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, context: LinearContext, needs_wgrad: bool) -> Tensor:
        call = LinearCall(context, weight, x)
        padded = call.pad_tokens(x)
        w_fprop, w_dgrad = call.weight_operands()
        reuse = call.recipe[WGRAD_ACTIVATION].reuse_fprop
        make_fprop, make_wgrad = call.prepare(
            FPROP_ACTIVATION, WGRAD_ACTIVATION if needs_wgrad and not reuse else None, padded, keep_rows=True
        )
        assert make_fprop is not None
        x_fprop = make_fprop()
        y = call.unpad(call.backend.gemm(x_fprop, w_fprop, x.dtype))
        x_wgrad = call.transposed(x_fprop) if needs_wgrad and reuse else None
        del x_fprop
        if make_wgrad is not None:
            x_wgrad = make_wgrad()
        saved = [w_dgrad] if x_wgrad is None else [w_dgrad, x_wgrad]
        ctx.save_for_backward(*(tensor for operand in saved for tensor in operand.tensors()))
        ctx.call, ctx.layouts = call, [operand.layout for operand in saved]
        ctx.weight = weight
        ctx.probed = None if context.probe is None else context.probe.forward(call, x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        call: LinearCall = ctx.call
        backend = call.backend
        saved = ctx.saved_tensors  # once: a recomputing checkpoint refuses a second time
        dy = call.pad(grad_outputs[0])
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        dx = dw = None
        make_dgrad, make_wgrad = call.prepare(
            DGRAD_GRADIENT if needs_dgrad else None, WGRAD_GRADIENT if needs_wgrad else None, dy
        )
        # Each operand is as large as dy; one at a time.
        if make_dgrad is not None:
            dx = backend.gemm(make_dgrad(), backend.operand_from_saved(saved[:3], ctx.layouts[0]), dy.dtype)
            dx = call.unpad_tokens(dx)
        if make_wgrad is not None:
            x_wgrad = backend.operand_from_saved(saved[3:], ctx.layouts[1])
            total = call.running_gradient(ctx.weight) if ctx.probed is None else None
            made = call.weight_gradient(make_wgrad(), x_wgrad, total)
            dw = gradient_of(made, call.gradient_spec) if total is None else None
        if ctx.probed is not None:
            ctx.probed.backward(grad_outputs[0], dx, dw)
        return dx, dw, None, None
