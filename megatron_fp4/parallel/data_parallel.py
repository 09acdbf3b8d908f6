"""Data parallelism by FSDP2: sharded FP32 masters, compute in BF16, gradients summed in FP32.

What each setting is for: `param_dtype` is what the forward pass sees, `reduce_dtype` FP32 what gradients are added
up in over ranks and micro-batches, `cast_forward_inputs` is off because token ids and FP32 losses must stay what
they are. Parameters that must stay FP32 (Mamba-2's A, D and dt bias) are gathered as they are, with their block, and
weights of quantized linears as 4-bit codes where no more is read (gathered_codes.py).

A model that one data-parallel rank has alone needs none of this, and FSDP2's hooks would take more of the host's time
than all the rest of a small model: its parameters stay as they are, and say how the forward pass is to round them.

Gradients are summed, not averaged: every micro-batch's loss is divided by the number of micro-batches of the global
batch before its backward pass, so that this pass is the same whichever rank computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_fp4.parallel.gathered_codes import gather_codes, gather_in_fp32, weight_specs
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.reproducible import GradientTree, TreeReduceScatter, tree_all_reduce
from megatron_fp4.precision.fp32_gradients import Rounding, set_rounding


def apply_data_parallel(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    units: list[nn.Module],
    fp32_units: list[nn.Module],
    compute_dtype: torch.dtype,
    reshard: bool,
    ends: Sequence[nn.Module] = (),
) -> None:
    """Shard `model` over the data-parallel axis, in place. Gradients of ranks add up.

    units: modules gathered as a whole, in order of execution (the blocks). ends: those at the model's ends (embedding
    and head), gathered by themselves too, so that the rest of a step hides their messages, and kept until their
    backward pass. What belongs to none of them (the final norm) is gathered with the model itself, before all.
    fp32_units: small modules, inside units or not, whose own parameters must never be rounded.
    reshard: free the gathered parameters after the forward pass and gather them again for the backward pass; with one
    rank, keep no rounded copies between micro-batches.
    """
    if mesh.dp_size == 1:
        alone(model, Rounding(compute_dtype, kept=not reshard), fp32_units)
    else:
        shard(model, mesh, units, fp32_units, compute_dtype, reshard, ends)
    model._gradient_tree = GradientTree(model, mesh) if mesh.reproducible else None  # type: ignore[assignment]


def gradient_tree(model: nn.Module) -> GradientTree | None:
    """What sums the gradients of `model` over micro-batches with `mesh.reproducible`; else None: autograd does."""
    return getattr(model, "_gradient_tree", None)


def shard(
    model: nn.Module, mesh: ParallelMesh, units: list[nn.Module], fp32_units: list[nn.Module],
    compute_dtype: torch.dtype, reshard: bool, ends: Sequence[nn.Module] = (),
) -> None:  # fmt: skip
    """`apply_data_parallel` by FSDP2, whatever the number of ranks."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    specs, fsdp_hooks = weight_specs(units), list[tuple[dict[int, Any], list[int]]]()
    for module in (*units, *ends, model):
        freed = reshard and module in units
        before = [(hooks, set(hooks)) for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=freed)
        assert isinstance(module, FSDPModule)
        gather_in_fp32(module, fp32_units)
        shards = mesh.device_mesh["dp"]
        if module is model and shards.size() > 1:
            gather_codes(model, units, specs, shards, compute_dtype, reshard)
        # A module does not know whose a hook is: those that are new are FSDP2's.
        fsdp_hooks += [(hooks, [key for key in hooks if key not in others]) for hooks, others in before]
        module.set_gradient_divide_factor(1.0)
        # Otherwise a factor becomes a reduction with premultiplication, which gloo does not know.
        module.set_force_sum_reduction_for_comms(True)
        if mesh.reproducible:
            module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]
            if mesh.num_replicas > 1:
                replicas = mesh.device_mesh.get_group("replicate")
                module.set_all_reduce_hook(partial(tree_all_reduce, group=replicas))
    model._fsdp_hooks = fsdp_hooks  # type: ignore[assignment]


@contextmanager
def without_fsdp_hooks(model: nn.Module) -> Iterator[None]:
    """A context for a micro-batch between the first and the last of a step, of a model whose parameters stay gathered.

    Gradients collect in the gathered parameters by themselves: the hooks with which FSDP2 gathers and reduces find
    nothing to do, and take a tenth of a second of the host's time for a small model. Others' hooks stay; none may come
    or go.
    """
    fsdp_hooks: list[tuple[dict[int, Any], list[int]]] = getattr(model, "_fsdp_hooks", [])
    copies = [hooks.copy() for hooks, _ in fsdp_hooks]
    for hooks, keys in fsdp_hooks:
        for key in keys:
            del hooks[key]
    try:
        yield
    finally:
        for (hooks, _), copy in zip(fsdp_hooks, copies, strict=True):
            hooks.clear()
            hooks.update(copy)


def alone(model: nn.Module, rounding: Rounding, never_rounded: list[nn.Module]) -> None:
    """Let the forward pass of `model` see its parameters rounded, except those of `never_rounded`."""

    def tell_parameters(*_: Any) -> None:
        first_forward.remove()
        exempt = {id(parameter) for unit in never_rounded for parameter in unit.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in exempt:
                set_rounding(parameter, rounding)

    # Not before: initialization puts others in their places.
    first_forward = model.register_forward_pre_hook(tell_parameters)
