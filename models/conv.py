"""Mamba-2's causal depthwise convolution over time, then SiLU.

    y_s = silu(bias + sum_k weight_k x_{s - (width - 1) + k})        x before the sequence is zero

Written as `width` shifted multiply-adds over [batch, sequence, channels]: the channels stay innermost, as the
projections before and after want them, and on a CPU this is several times faster than `conv1d`. Everything is FP32,
whatever the input's dtype; only the input is kept for the backward pass, which computes the sum before SiLU again.
On CUDA causal-conv1d has a kernel for the whole.

Given the number of every token's document (models/positions.py), x of another document counts as zero too.

Shapes: b batch, s sequence, c channels of this rank, k taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import local_parameter, new_parameter
from models.initialization import Rule, uniform


def causal_conv_silu(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """The formula at the top of this file: [batch, sequence, channels] -> the same shape, in the weight's dtype.

    documents_bs: int32, the number of each token's document, ascending in a row; None: a row is one document.
    """
    return _CausalConvSiLU.apply(x_bsc, weight_ck, bias_c, documents_bs)  # type: ignore[return-value]


def fused_conv_silu(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """The same by causal-conv1d: in the dtype of `x_bsc`, with FP32 sums.

    It takes documents with the channels innermost only, as they are here: int32, contiguous, never negative, with
    memory after them to the end of a chunk (models/positions.py).
    """
    from causal_conv1d import causal_conv1d_fn

    y_bcs: Tensor = causal_conv1d_fn(
        readable(x_bsc).transpose(1, 2), weight_ck, bias_c, seq_idx=documents_bs, activation="silu"
    )
    return y_bcs.transpose(1, 2)


def readable(x_bsc: Tensor) -> Tensor:
    """What causal-conv1d reads, 16 bytes at a time: the tensor itself, or where it does not lie so, a copy."""
    lies_so = x_bsc.stride(2) == 1 and all(n % 8 == 0 for n in (*x_bsc.stride()[:2], x_bsc.storage_offset()))
    return x_bsc if lies_so else x_bsc.contiguous()


def continued_conv_silu(
    x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, before_bkc: Tensor, counts_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for rows that continue: y, and what is to be `before` in the next call. No gradients.

    before_bkc: the width - 1 inputs before the first of `x_bsc`, zeros at a text's beginning. counts_b: int64, how many
    of a row's s tokens count; what follows them is padding.
    """
    width = weight_ck.shape[1]
    inputs = torch.cat((before_bkc, x_bsc.to(before_bkc.dtype)), 1)
    shifts = _Shifts(inputs.to(weight_ck.dtype), width, None, width - 1)
    kept = counts_b[:, None] + torch.arange(width - 1, device=counts_b.device)
    before = inputs.gather(1, kept[..., None].expand(-1, -1, inputs.shape[2]))
    return F.silu(_shifted_sum(shifts, weight_ck.t().contiguous(), bias_c), inplace=True), before


class CausalConv(nn.Module):
    """Weight [channels, width] and bias [channels], sharded over channels.

    `function` is the convolution as a function of tensors, `local_parameters` what it takes besides the input.
    """

    def __init__(
        self, channels: int, width: int, mesh: ParallelMesh, function: Callable[..., Tensor] = causal_conv_silu
    ) -> None:
        super().__init__()
        self.weight = new_parameter((channels, width), mesh, shard_dim=0)
        self.bias = new_parameter((channels,), mesh, shard_dim=0)
        self.function = function

    def initial_values(self) -> dict[str, Rule]:
        """`nn.Conv1d`'s default."""
        bound = self.weight.shape[1] ** -0.5
        return {"weight": uniform(-bound, bound), "bias": uniform(-bound, bound)}

    def local_parameters(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of this rank's channels, FP32."""
        return local_parameter(self.weight, torch.float32), local_parameter(self.bias, torch.float32)

    def forward(self, x_bsc: Tensor, documents_bs: Tensor | None = None) -> Tensor:
        """[batch, sequence, channels / tp], any dtype -> the same shape, FP32 (causal-conv1d: the input's dtype)."""
        return self.function(x_bsc, *self.local_parameters(), documents_bs)


class _Shifts:
    """A padded input [b, s + width - 1, c] as each tap sees it: [b, s, c], zero where that is another document.

    documents_bs: padded likewise, with a number that no document has; None: a row is one document. of: the index, in
    the padded rows, of the first token of the unpadded ones.
    """

    def __init__(self, padded: Tensor, width: int, documents: Tensor | None, of: int) -> None:
        self.padded, self.length, self.documents, self.of = padded, padded.shape[1] - width + 1, documents, of

    def __getitem__(self, k: int) -> Tensor:
        part = self.padded[:, k : k + self.length]
        if self.documents is None:
            return part
        there, here = (self.documents[:, place : place + self.length] for place in (k, self.of))
        return part.where((there == here)[..., None], 0)


def _shifted_sum(shifts: _Shifts, taps_kc: Tensor, start: Tensor) -> Tensor:
    """start + sum_k taps_k shifts[k]: a correlation along the sequence."""
    total = torch.addcmul(start, shifts[0], taps_kc[0])
    for k in range(1, taps_kc.shape[0]):
        total.addcmul_(shifts[k], taps_kc[k])
    return total


class _CausalConvSiLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, documents)
        shifts = _past(x, weight, documents)
        return F.silu(_shifted_sum(shifts, weight.t().contiguous(), bias), inplace=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, documents = ctx.saved_tensors
        width = weight.shape[1]
        taps = weight.t().contiguous()
        shifts = _past(x, weight, documents)
        total = _shifted_sum(shifts, taps, bias)
        gradient = torch.ops.aten.silu_backward(grad_outputs[0], total)
        # The gradient runs back in time: the last tap meets the newest input.
        documents_after = None if documents is None else F.pad(documents, (0, width - 1), value=-1)
        future = _Shifts(F.pad(gradient, (0, 0, 0, width - 1)), width, documents_after, 0)
        dx = _shifted_sum(future, taps.flip(0), torch.zeros_like(bias))
        dweight = [(shifts[k] * gradient).sum((0, 1)) for k in range(width)]
        return dx.to(x.dtype), torch.stack(dweight, 1), gradient.sum((0, 1)), None


def _past(x: Tensor, weight: Tensor, documents: Tensor | None) -> _Shifts:
    """The input as each tap sees it, in the weight's dtype."""
    before = weight.shape[1] - 1
    documents_before = None if documents is None else F.pad(documents, (before, 0), value=-1)
    return _Shifts(F.pad(x.to(weight.dtype), (0, 0, before, 0)), before + 1, documents_before, before)
