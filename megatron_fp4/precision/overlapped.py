"""The linear of sequence parallelism, whose messages run beside the GEMMs that do not need them.

A projection in (`context.in_tokens`) has x and dx as slices of the tokens on each rank, a projection out
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
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.precision.backend import MakeOperand
from megatron_fp4.precision.linear import LinearCall, LinearContext, apply_linear
from megatron_fp4.precision.recipe import (
    DGRAD_GRADIENT,
    FPROP_ACTIVATION,
    SLOTS_OF,
    WGRAD_ACTIVATION,
    WGRAD_GRADIENT,
    OperandSlot,
)
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import E2M1_MAX

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def overlapped_linear(x: Tensor, weight: Tensor, context: LinearContext) -> Tensor:
    """As `linear.quantized_linear`, of slices of the tokens: x [tokens, in] is the rank's slice with
    `context.in_tokens`; with `context.out_tokens` the result is the rank's slice of the sum over ranks."""
    return apply_linear(_OverlappedLinear, x, weight, context)


class _OverlappedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, context: LinearContext, needs_wgrad: bool) -> Tensor:
        call, kept, scattered = OverlappedCall(context, weight, x), None, None
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


class OverlappedCall(LinearCall):
    """A call whose tensors are slices of the tokens: quantized as slices where that is less to send."""

    def __init__(self, context: LinearContext, weight: Tensor, x: Tensor) -> None:
        super().__init__(context, weight, x)
        for tensor, group in (("activation", context.in_tokens), ("gradient", context.out_tokens)):
            if group is None or not self._sends_operands(tensor):
                continue
            # Slices of whole blocks, and so no padding.
            if self.num_tokens % (group.size() * self.alignment.tokens) == 0:
                self.slices[tensor] = group

    def _sends_operands(self, tensor: str) -> bool:
        """Whether ranks gather operands made of slices of a tensor, and not the tensor. Both of dy are needed at once,
        and only in 4 bits are two operands fewer bytes than dy; of x, one waits for the backward pass as a slice."""
        if self.recipe.quantized and not self.backend.joins:
            return False
        if tensor == "activation":
            return self.recipe[WGRAD_ACTIVATION].source != "codes"
        operands = [self.recipe[slot] for slot in SLOTS_OF[tensor]]
        # Along its columns MS-EDEN's kernel makes values, not codes.
        codes = all(operand.quantized and format_of(operand.format).largest == E2M1_MAX for operand in operands)
        return codes and operands[0].rounding != "ms_eden"

    def tokens_to_quantize(self, x: Tensor, tensor: str) -> Tensor:
        """The rank's slice where slices are quantized, else all tokens."""
        return x if tensor in self.slices else self.all_tokens(x, tensor)

    def all_tokens(self, x: Tensor, tensor: str) -> Tensor:
        """All tokens of x (`activation`) or dy (`gradient`), of which this rank may hold a slice."""
        group = self.context.in_tokens if tensor == "activation" else self.context.out_tokens
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


# ------------------------------------------------------------------------------------------------------------ messages


class Pending:
    """A message under way; `wait` gives its result, once. work: None if it has been waited for already.

    On a GPU a message that was started runs on a stream of its own beside what is launched after it. This holds
    what it reads and writes until then: the allocator must not give it away.
    """

    def __init__(self, work: dist.Work | None, sent: Tensor, received: Tensor) -> None:
        self._under_way: tuple[dist.Work | None, Tensor, Tensor] | None = (work, sent, received)

    def wait(self) -> Tensor:
        """What was received; on a GPU the current stream waits, not the host."""
        assert self._under_way is not None, "a message is waited for once"
        work, _, received = self._under_way
        if work is not None:
            work.wait()
        self._under_way = None
        return received


def start_all_gather(x: Tensor, group: ProcessGroup, beside: bool = True) -> Pending:
    """[n, ...] of each rank -> [ranks n, ...], ranks in order; of any dtype, sent as bytes.

    beside: whether anything is to run meanwhile; else it is waited for at once, which is cheaper.
    """
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    # Flat, because a dimension of size 1 may have any stride.
    sent, received = (part.view(-1).view(torch.uint8) for part in (x, out))
    work = dist.all_gather_into_tensor(received, sent, group=group, async_op=beside)
    return Pending(work, x, out)


def start_reduce_scatter(y: Tensor, group: ProcessGroup, beside: bool = True) -> Pending:
    """[ranks n, ...] partial sums -> [n, ...] sums in y's dtype, of this rank's slice. beside: as above."""
    y = y.contiguous()
    out = y.new_empty((y.shape[0] // group.size(), *y.shape[1:]))
    return Pending(dist.reduce_scatter_tensor(out, y, group=group, async_op=beside), y, out)
