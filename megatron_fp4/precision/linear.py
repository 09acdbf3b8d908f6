"""The linear layer: one autograd function, three GEMMs, a recipe for each operand.

    fprop  y  = x W^T      x [tokens, in]    W [out, in]       -> y [tokens, out]
    dgrad  dx = dy W       dy [tokens, out]  W^T [in, out]     -> dx [tokens, in]
    wgrad  dW = dy^T x     dy^T [out, tokens] x^T [in, tokens] -> dW [out, in], always FP32

Every operand is laid out with its dot product along the last dimension and quantized there. x and dy are quantized
twice, once per GEMM that uses them, each time with its own tensor scale and (where rounding is stochastic) its own
draws; 16x16-scaled weights once, since their transposed codes are those of the transposed weight.

The function takes the weight as a DTensor and returns its gradient as an FP32 one (precision/fp32_gradients.py). Where
a backend's GEMM can add to a gradient, that of the second and later micro-batches goes into the weight's `.grad` from
inside the function, which then returns None: `.backward()` sees no difference, `torch.autograd.grad` would.

Tokens are padded with zeros to what the kernels demand (precision/demands.py), and so are output features, which come
in `num_groups` equal groups (the heads of a packed projection): each group is padded by itself, so that block
boundaries depend on the model alone, not on how many ranks share the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_fp4.precision.backend import Backend, BackendOperand, Maker
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.emulated import EMULATED, OperandRequest, transform_signs
from megatron_fp4.precision.fp32_gradients import accept_fp32_gradient, gradient_of, gradient_spec, local_part
from megatron_fp4.precision.recipe import BF16, Operand, Recipe
from megatron_fp4.quantization.rounding import RoundingKey, rounding_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Observer(Protocol):
    """Looks at the calls of linears that it is attached to (measure/probe.py has one)."""

    def forward(self, call: _Call, x: Tensor, y: Tensor) -> ObservedCall | None:
        """Sees x [tokens, in] and the local result y [tokens, out]; returns who is to see the backward pass, if any."""


class ObservedCall(Protocol):
    """Sees the backward pass of one call."""

    def backward(self, dy: Tensor, dx: Tensor | None, dw: Tensor | None) -> None:
        """dy [tokens, out], dx [tokens, in], dw [out, in], the local parts; None for what nobody needed."""


@dataclass
class LinearNumerics:
    """What one linear needs to know besides its tensors. The plan writes `name`, `recipe`, `clock` and `backend`.

    backend: who makes the operands and multiplies them.
    num_groups: equal groups of the local output features, each padded to whole blocks.
    in_offset, out_group_offset: where the local shard starts in the global tensor: input features, and output groups.
    in_shards, out_shards: ranks among which input or output features are sharded; None: not sharded.
    probe: sees the calls of this linear; None: nobody looks.
    """

    name: str = ""
    recipe: Recipe = BF16
    clock: RunClock = field(default_factory=lambda: RunClock(seed=0))
    backend: Backend = EMULATED
    num_groups: int = 1
    in_offset: int = 0
    out_group_offset: int = 0
    in_shards: ProcessGroup | None = None
    out_shards: ProcessGroup | None = None
    weight_cache: tuple[Any, BackendOperand, BackendOperand] | None = None
    probe: Observer | None = None

    @property
    def in_group(self) -> ProcessGroup | None:
        """Ranks that share the maximum of a tensor that is sharded over input features; None: its own counts."""
        return self.in_shards if self.recipe.amax == "global" else None

    @property
    def out_group(self) -> ProcessGroup | None:
        """Ranks that share the maximum of a tensor that is sharded over output features; None: its own counts."""
        return self.out_shards if self.recipe.amax == "global" else None

    @property
    def weight_group(self) -> ProcessGroup | None:
        """Ranks that share the weight's maximum; None: its own counts."""
        return self.in_group if self.in_group is not None else self.out_group

    def key(self, step: int, micro_batch: int, operand: str, rows: int, columns: int) -> RoundingKey:
        """The draws of one operand; `rows`, `columns` are the offsets of the local tensor in the global one."""
        parts = (self.clock.seed, step, micro_batch, self.name, operand)
        return rounding_key(*parts, row_offset=rows, column_offset=columns)


def quantized_linear(x: Tensor, weight: Tensor, numerics: LinearNumerics) -> Tensor:
    """y = x W^T by the recipe in `numerics`.

    x: [tokens, in], the compute dtype. weight: parameter [out, in] (local part of a DTensor, or a plain tensor).
    Returns [tokens, out] in x's dtype; the weight's gradient is FP32.
    """
    accept_fp32_gradient(weight)
    # Inside the function gradients are always off, and needs_input_grad does not know about no_grad.
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    return _QuantizedLinear.apply(x, weight, numerics, needs_wgrad)  # type: ignore[return-value]


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, numerics: LinearNumerics, needs_wgrad: bool) -> Tensor:
        call = _Call(numerics, weight, x)
        padded = call.pad_tokens(x)
        w_fprop, w_dgrad = call.weight_operands()
        reuse = call.recipe.wgrad_activation.reuse_fprop
        make_fprop, make_wgrad = call.prepare(
            "fprop_activation",
            "wgrad_activation" if needs_wgrad and not reuse else None,
            padded,
            (0, numerics.in_offset),
            numerics.in_group,
            keep_rows=True,
        )
        assert make_fprop is not None
        x_fprop = make_fprop()
        y = call.unpad(call.backend.gemm(x_fprop, w_fprop, x.dtype))
        x_wgrad = x_fprop.transposed() if needs_wgrad and reuse else None
        del x_fprop
        if make_wgrad is not None:
            x_wgrad = make_wgrad()
        saved = [w_dgrad] if x_wgrad is None else [w_dgrad, x_wgrad]
        ctx.save_for_backward(*(tensor for operand in saved for tensor in operand.tensors()))
        ctx.call, ctx.kinds = call, [operand.kind for operand in saved]
        ctx.weight = weight
        ctx.probed = None if numerics.probe is None else numerics.probe.forward(call, x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        call: _Call = ctx.call
        saved = ctx.saved_tensors  # once: a recomputing checkpoint refuses a second time
        dy = call.pad(grad_outputs[0])
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        dx = dw = None
        make_dgrad, make_wgrad = call.prepare(
            "dgrad_gradient" if needs_dgrad else None,
            "wgrad_gradient" if needs_wgrad else None,
            dy,
            (0, call.out_offset),
            call.numerics.out_group,
        )
        # Each operand is as large as dy; one at a time.
        if make_dgrad is not None:
            dx = call.backend.gemm(make_dgrad(), call.backend.restored(saved[:3], ctx.kinds[0]), dy.dtype)
            dx = call.unpad_tokens(dx)
        if make_wgrad is not None:
            x_wgrad = call.backend.restored(saved[3:], ctx.kinds[1])
            total = call.running_gradient(ctx.weight) if ctx.probed is None else None
            if total is None:
                dw = call.backend.gemm(make_wgrad(), x_wgrad, torch.float32)
                dw = gradient_of(call.unpad_rows(dw).contiguous(), call.gradient_spec)
            else:
                call.backend.gemm(make_wgrad(), x_wgrad, torch.float32, total)
        if ctx.probed is not None:
            ctx.probed.backward(grad_outputs[0], dx, dw)
        return dx, dw, None, None


class _Call:
    """One forward pass of one linear: its place in the run, and the quantization of each tensor by the recipe."""

    def __init__(self, numerics: LinearNumerics, weight: Tensor, x: Tensor) -> None:
        self.numerics, self.recipe, self.backend = numerics, numerics.recipe, numerics.backend
        self.step, self.micro_batch = numerics.clock.step, numerics.clock.micro_batch
        self.device, self.dtype = x.device, x.dtype
        self.master, self.gradient_spec = local_part(weight), gradient_spec(weight)
        self.group_rows = self.master.shape[0] // numerics.num_groups
        demands = self.backend.demands(self.recipe)
        self.num_tokens, self.padded_tokens = x.shape[0], demands.padded_tokens(x.shape[0])
        self.padded_group_rows = demands.padded_group(self.group_rows, numerics.num_groups)
        self.out_offset = numerics.out_group_offset * self.padded_group_rows

    @property
    def weight(self) -> Tensor:
        """[out, in], the local part in the compute dtype."""
        return self.master.to(self.dtype)

    def prepare(
        self,
        columns: str | None,
        rows: str | None,
        x: Tensor,
        offsets: tuple[int, int],
        group: ProcessGroup | None,
        *,
        keep_rows: bool = False,
    ) -> tuple[Maker | None, Maker | None]:
        """What makes the operand `columns` of the recipe from `x`, and the operand `rows` from its transpose.

        offsets: row and column of the global tensor at which x starts. keep_rows: the second is for the backward pass.
        x may be FP32 where the compute dtype is BF16, and counts as rounded then (weights).
        """
        requests = (self._request(columns, offsets), self._request(rows, (offsets[1], offsets[0])))
        return self.backend.operands(x, *requests, dtype=self.dtype, keep_rows=keep_rows, amax_group=group)

    def _request(self, name: str | None, offsets: tuple[int, int]) -> OperandRequest | None:
        if name is None:
            return None
        operand: Operand = getattr(self.recipe, name)
        gemm_name = name.split("_")[0]
        rht: int = getattr(self.recipe, f"{gemm_name}_rht")
        key = None
        if operand.rounding == "stochastic":
            key = self.numerics.key(self.step, self.micro_batch, name, *offsets)
        signs_key = self._signs_key(gemm_name) if rht else None
        return OperandRequest(operand, rht, self.recipe.rht_signs, key, signs_key, name)

    def weight_operands(self) -> tuple[BackendOperand, BackendOperand]:
        """The weight as fprop's and as dgrad's operand, kept for all micro-batches of a step."""
        numerics, recipe = self.numerics, self.recipe
        stamp = (numerics.clock.weights_version, self.dtype, self.device)
        if numerics.weight_cache is not None and numerics.weight_cache[0] == stamp:
            return numerics.weight_cache[1:]
        borrows = self.backend.borrows_codes and (recipe.dgrad_weight.reuse_fprop or self._weight_codes_transpose())
        make_fprop, make_dgrad = self.prepare(
            "fprop_weight",
            None if borrows else "dgrad_weight",
            self.pad_rows(self.master),
            (self.out_offset, numerics.in_offset),
            numerics.weight_group,
        )
        assert make_fprop is not None
        fprop = make_fprop()
        dgrad = fprop.transposed() if make_dgrad is None else make_dgrad()
        # What is not quantized is FSDP's gathered copy itself, which must not outlive its use.
        if fprop.quantized and dgrad.quantized and self._weight_codes_last():
            numerics.weight_cache = (stamp, fprop, dgrad)
        return fprop, dgrad

    def _weight_codes_transpose(self) -> bool:
        """Whether dgrad's codes are the transposed codes of fprop: square blocks, deterministic, no transform."""
        recipe, operand = self.recipe, self.recipe.fprop_weight
        plain = operand.rounding == "nearest" and not recipe.fprop_rht and not recipe.dgrad_rht
        square = operand.block[0] == operand.block[1] or not operand.quantized
        return operand == recipe.dgrad_weight and plain and square

    def _weight_codes_last(self) -> bool:
        """Whether the weight's codes are the same for every micro-batch of a step."""
        recipe = self.recipe
        stochastic = "stochastic" in (recipe.fprop_weight.rounding, recipe.dgrad_weight.rounding)
        return not stochastic and not ((recipe.fprop_rht or recipe.dgrad_rht) and recipe.rht_signs == "fresh")

    def running_gradient(self, weight: Tensor) -> Tensor | None:
        """The gradient of earlier micro-batches if wgrad's GEMM can add to it itself: FP32 [out, in], local."""
        if not self.backend.accumulates or not weight.is_leaf or weight.grad is None:
            return None
        total = local_part(weight.grad)
        plain = total.dtype == torch.float32 and total.is_contiguous()
        return total if plain and self.padded_group_rows == self.group_rows else None

    def _signs(self, size: int, gemm_name: str) -> Tensor:
        return transform_signs(size, self.recipe.rht_signs, self._signs_key(gemm_name), self.device)

    def _signs_key(self, gemm_name: str) -> RoundingKey | None:
        if self.recipe.rht_signs != "fresh":
            return None
        return self.numerics.key(self.step, self.micro_batch, f"{gemm_name}_signs", 0, 0)

    def pad(self, y: Tensor) -> Tensor:
        """[tokens, out] with tokens and each group of output features padded."""
        return self.pad_tokens(self._pad_groups(y))

    def unpad(self, y: Tensor) -> Tensor:
        """The inverse of `pad`."""
        return self._unpad_groups(self.unpad_tokens(y))

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
        return self._unpad_groups(w.t()).t() if self.padded_group_rows != self.group_rows else w

    def _pad_groups(self, y: Tensor) -> Tensor:
        extra = self.padded_group_rows - self.group_rows
        if extra == 0:
            return y
        return torch.nn.functional.pad(y.unflatten(-1, (-1, self.group_rows)), (0, extra)).flatten(-2)

    def _unpad_groups(self, y: Tensor) -> Tensor:
        if self.padded_group_rows == self.group_rows:
            return y
        return y.unflatten(-1, (-1, self.padded_group_rows))[..., : self.group_rows].flatten(-2)
