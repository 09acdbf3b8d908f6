"""A loaded model's weights as another precision has them: the compute dtype, or quantized as they were trained."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.recipe import FPROP_WEIGHT, Gemm, Operand, Recipe
from models.hybrid import HybridModel


def lower_weights(model: HybridModel, dtype: torch.dtype) -> None:
    """Every weight of a model that one process loaded in `dtype`, as the run's forward pass sees them, except those
    that must stay FP32. In FP32 nothing changes; in BF16 they take half the memory."""
    kept = {id(p) for unit in model.fp32_units() for p in unit.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in kept and parameter.dtype != dtype:
                assert isinstance(parameter, DTensor)
                local = DTensor.from_local(
                    parameter.to_local().detach().to(dtype), parameter.device_mesh, parameter.placements
                )
                module.register_parameter(name, nn.Parameter(local, requires_grad=False))


def weights_as_trained(model: HybridModel, plan: Plan, trained_in: torch.dtype, shards: int) -> int:
    """Let the linears whose weights the plan quantizes in fprop multiply with exactly these codes and scales, and with
    activations that are not quantized, since an activation's maximum ties a token to the batch that it is in.

    trained_in: the run's compute dtype, to which it rounded the masters first. shards: its tensor-parallel size.
    Returns how many linears that are. Raises ValueError, in one line, where the codes do not follow from a checkpoint.
    """
    if trained_in == torch.float32 != model.embedding.dtype:
        raise ValueError("the weights were quantized from FP32: compute in FP32 to have them as they were trained")
    recipes = {row.linear.name: row.recipe for row in plan.rows if row.recipe[FPROP_WEIGHT].quantized}
    for name, recipe in recipes.items():
        _check_known(name, recipe, shards)
    for name, linear in model.linears():
        if name in recipes:
            recipe, weight = recipes[name], recipes[name][FPROP_WEIGHT]
            gemm = Gemm(Operand(), weight, recipe.fprop.rht)
            # The same for dgrad, which nobody runs: what is quantized for both is kept from call to call.
            linear.context.recipe = replace(recipe, fprop=gemm, dgrad=gemm, wgrad=Gemm())
            linear.context.weight_cache = None
            with torch.no_grad():
                local = linear.weight.to_local()  # type: ignore[operator]
                local.copy_(local.to(trained_in))
    return len(recipes)


def _check_known(name: str, recipe: Recipe, shards: int) -> None:
    if recipe[FPROP_WEIGHT].rounding == "stochastic":
        raise ValueError(f"{name} was trained with weights rounded stochastically, anew each step: take the masters")
    if recipe.fprop.rht and recipe.rht_signs == "fresh":
        raise ValueError(f"{name} was trained with weights transformed with the signs of a step: take the masters")
    if recipe.amax == "shard" and shards > 1:
        raise ValueError(
            f"{name} was trained with a tensor scale for each of {shards} shards (precision.amax=shard), which one "
            "process does not repeat: take the masters"
        )
