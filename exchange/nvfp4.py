"""The weights of linears that were trained in NVFP4, as the codes and scales that training multiplied with.

Training keeps FP32 masters, and fprop's GEMM multiplies by what the recipe makes of them: the master rounded to the
compute dtype, each group of output rows padded to whole blocks, one maximum over the whole packed weight, 16x16 or 1x16
blocks (precision/linear.py, quantization/nvfp4.py). The same is done here, on one process: blocks are cut by the
model's own groups and the maximum is that of all ranks, so neither depends on the mesh that trained.

Every serving format stores one scale for 1x16 elements. A scale of 16x16 elements is repeated on its 16 rows; after
that rows are independent of each other and may be reordered and cut (models/packing.py: q, k and v, one amax for the
three), and padding rows dropped, without moving a bit.

What cannot be written like this is refused: `refusal` says why and what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exchange.checkpoint import Checkpoint
from megatron_fp4.precision.emulated import encode_operand
from megatron_fp4.precision.linear import LinearCall, LinearContext
from megatron_fp4.precision.plan import LinearShape, Plan, PlannedLinear, plan_in_effect
from megatron_fp4.precision.recipe import FPROP_ACTIVATION, FPROP_WEIGHT, Recipe
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.tensor import NVFP4Tensor, tensor_decode_scale

_BLOCK = 16
# Of a weight that are quantized together: its temporaries are several FP32 copies.
_CHUNK_ELEMENTS = 2**24
PLANS = ("now", "before")
_PLAIN = "or export BF16 weights (--format hf)"


@dataclass(frozen=True)
class TrainedPlan:
    """Which recipe each linear of a checkpoint has, and how its run computed.

    plan: that in effect in the checkpoint, or the one before the precision switch (`choose_plan`). compute_dtype: of
    the run. tensor: its tensor-parallel ranks. before_switch: whether the plan is one that the checkpoint has left.
    """

    plan: Plan
    compute_dtype: torch.dtype
    tensor: int = 1
    before_switch: bool = False

    def fp4(self) -> dict[str, PlannedLinear]:
        """The linears whose weight fprop multiplies in NVFP4, by name."""
        return {row.linear.name: row for row in self.plan.rows if row.recipe[FPROP_WEIGHT].format == "nvfp4"}

    def others(self) -> dict[str, str]:
        """The linears whose forward pass is quantized, but not in NVFP4: name -> format of the weight."""
        formats = {row.linear.name: row.recipe[FPROP_WEIGHT].format for row in self.plan.rows}
        return {name: form for name, form in formats.items() if form not in ("nvfp4", "bf16")}


def trained_plan(checkpoint: Checkpoint, plans: tuple[Plan, Plan | None], which: str = "now") -> TrainedPlan:
    """`choose_plan` for a checkpoint; plans: of its configuration, before and after the precision switch.

    Raises ValueError, one line with the remedy, where nothing can be exported as trained, and if the plan is not the
    one that was saved with the checkpoint (a plan file has changed since).
    """
    if checkpoint.weights_only:
        raise ValueError(
            f"{checkpoint.folder} has imported weights, which no run has trained in NVFP4; {_PLAIN[3:]}, or train them"
        )
    config, switched_at = checkpoint.config, checkpoint.trainer["switch"]["switched_at"]
    now = plan_in_effect(plans, switched_at)
    saved = _written_out(checkpoint.trainer["plan"])
    for name, lines in _written_out(now.as_dict()).items():
        if saved.get(name) != lines:
            raise ValueError(
                f"{name} was trained otherwise than the configuration of {checkpoint.folder} says now; restore its "
                f"precision.bf16_blocks.file, or use the version that trained it"
            )
    dtype = getattr(torch, config.precision.compute_dtype)
    return choose_plan(plans, switched_at, dtype, config.parallel.tensor, which)


def _written_out(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Linear -> its recipe's lines, of a plan as checkpoints have it."""
    return {name: plan["recipes"][linear["recipe"]] for name, linear in plan["linears"].items()}


def choose_plan(
    plans: tuple[Plan, Plan | None],
    switched_at: int | None,
    compute_dtype: torch.dtype,
    tensor: int,
    which: str = "now",
) -> TrainedPlan:
    """The plan by which weights are to be quantized, checked: `refusal` has nothing to say about it.

    plans: before and after the precision switch. switched_at: the step from which the second holds, None if it does not
    yet. which: `now`, the plan in effect; `before`, behind a switch, the one before it.

    Raises ValueError, one line with the remedy, where nothing can be exported as trained.
    """
    if which not in PLANS:
        raise ValueError(f"--plan {which} is not one of {', '.join(PLANS)}")
    before, after = plans
    switched = switched_at is not None and after is not None
    if which == "before" and not switched:
        raise ValueError("--plan before: this checkpoint is not behind a precision switch; leave it out")
    plan = plan_in_effect(plans, switched_at) if which == "now" else before
    chosen = TrainedPlan(plan, compute_dtype, tensor, before_switch=which == "before")
    if switched_at is not None and plan is after and not chosen.fp4() and TrainedPlan(before, compute_dtype).fp4():
        raise ValueError(
            f"this checkpoint is behind the precision switch (before step {switched_at + 1}), and its forward pass has "
            f"no NVFP4 weights any more; give a checkpoint of before the switch, or quantize these weights by the plan "
            f"before it (--plan before; not what the last steps multiplied with), {_PLAIN}"
        )
    if problem := refusal(chosen):
        raise ValueError(problem)
    return chosen


def refusal(trained: TrainedPlan) -> str | None:
    """Why the weights cannot be written as they were multiplied, with the remedy; None if they can."""
    rows = trained.fp4()
    if not rows:
        formats = sorted(set(trained.others().values()))
        what = f"its weights are in {' and '.join(formats)}" if formats else "all its linears are in BF16"
        return (
            f"no linear of this checkpoint was trained with NVFP4 weights ({what}); export BF16 weights (--format hf)"
        )
    for name, row in rows.items():
        operand, rht = row.recipe[FPROP_WEIGHT], row.recipe.fprop.rht
        if operand.rounding == "stochastic":
            return (
                f"{name}: {row.key}.fprop.weight.rounding=stochastic draws other codes in every step, so that no "
                f"weight is the one that training multiplied with; train with nearest, {_PLAIN}"
            )
        if rht:
            return (
                f"{name}: {row.key}.fprop.rht={rht} multiplies transformed weights by transformed activations, which "
                f"no serving engine does; train with 0, {_PLAIN}"
            )
        if row.recipe.amax != "global" and trained.tensor > 1:
            return (
                f"{name}: {row.key}.amax={row.recipe.amax} gave each of {trained.tensor} tensor-parallel ranks a "
                f"tensor scale of its own, and the format has one for the weight; train with amax=global, {_PLAIN}"
            )
        if row.linear.in_features % _BLOCK:
            return f"{name} has {row.linear.in_features} input features, no multiple of {_BLOCK}; {_PLAIN[3:]}"
    return None


def trained_weight(weight: Tensor, row: PlannedLinear, compute_dtype: torch.dtype) -> NVFP4Tensor:
    """What fprop's GEMM multiplies for the FP32 master `weight` [out, in], in its own row order, without padding.

    Codes and scales as `NVFP4Tensor` has them in blocks of 1x16. Raises ValueError for NaN or inf.
    """
    call = _call(row.linear, row.recipe, weight, compute_dtype)
    padded = call.pad_rows(call.weight).contiguous()
    amax = padded.abs().amax().to(torch.float32)
    if not amax.isfinite():
        raise ValueError(f"{row.linear.name} has NaN or inf in its weight; give an earlier checkpoint")
    codes, scales = [], []
    for part in padded.split(max(_BLOCK, _CHUNK_ELEMENTS // padded.shape[1] // _BLOCK * _BLOCK)):
        encoded = encode_operand(part.to(torch.float32), row.recipe[FPROP_WEIGHT], None, amax=amax)
        codes.append(encoded.codes())
        scales.append(encoded.scales.view(torch.uint8))
    own, stored = (call.unpad_rows(torch.cat(parts)).contiguous() for parts in (codes, scales))
    return NVFP4Tensor(own, stored.view(torch.float8_e4m3fn), (1, _BLOCK), amax, encoded.scale_max)


def multiplied_weight(weight: Tensor, row: PlannedLinear, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Asks the linear's own backend: FP32 `code * block scale` [out, in] and the FP32 0-dim tensor scale of the operand
    that it hands to fprop's GEMM. Arguments as of `trained_weight`."""
    call = _call(row.linear, row.recipe, weight, compute_dtype)
    operand, _ = call.weight_operands()
    assert operand.quantized and operand.scale is not None
    return call.unpad_rows(operand.unpacked()).to(torch.float32), operand.scale


def _call(linear: LinearShape, recipe: Recipe, weight: Tensor, compute_dtype: torch.dtype) -> LinearCall:
    """A call of the linear as one rank that holds all of it makes it, with no tokens."""
    context = LinearContext(linear.name, recipe, num_groups=linear.groups)
    return LinearCall(context, weight, weight.new_empty(0, weight.shape[1], dtype=compute_dtype))


def reordered(tensor: NVFP4Tensor, rows: Tensor) -> NVFP4Tensor:
    """Its rows `rows` (int64), under the amax of the whole."""
    scales = tensor.scales.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    return NVFP4Tensor(tensor.codes[rows], scales, tensor.block, tensor.amax, tensor.scale_max)


def tensor_scale(tensor: NVFP4Tensor) -> Tensor:
    """FP32 0-dim factor on code * block scale, the bits that the GEMM applies: amax / (6 * scale_max)."""
    return tensor_decode_scale(tensor.amax, tensor.scale_max)


def inverse_tensor_scale(tensor: NVFP4Tensor) -> Tensor:
    """FP32 0-dim (6 * scale_max) / amax, rounded once. The inverse of `tensor_scale` may be one ulp off it."""
    return encode_tensor_scale(tensor.amax, tensor.scale_max)


def activations_in_fp4(trained: TrainedPlan) -> bool:
    """Whether fprop multiplies NVFP4 activations by every NVFP4 weight."""
    return all(row.recipe[FPROP_ACTIVATION].format == "nvfp4" for row in trained.fp4().values())
