"""Data parallelism by FSDP2: sharded FP32 masters, compute in BF16, gradients summed in FP32.

FSDP2's settings: `param_dtype` is the dtype of the parameters in the forward pass; `reduce_dtype` (FP32) is the dtype
in which gradients are summed over ranks and micro-batches; `cast_forward_inputs` is off, because token ids and FP32
losses must not be cast. Parameters that must stay FP32 (Mamba-2's A, D and dt bias) are gathered in FP32 with their
block. Weights of quantized linears are gathered as 4-bit codes if nothing reads more of them (gathered_codes.py).

With one data-parallel rank FSDP2 is not used: for a small model its hooks would take more host time than everything
else. The parameters stay FP32 masters, and each one says how the forward pass rounds it (`Rounding`).

Gradients are summed, not averaged: the loss of every micro-batch is divided by the number of micro-batches of the
global batch before its backward pass, so this pass is the same on any number of ranks.
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
    """Shard `model` over the data-parallel axis, in place. Gradients are summed over its ranks.

    units: modules that are each gathered as a whole, in order of execution (the blocks). ends: modules at the model's
    ends (embedding and head), also gathered one by one, so that their messages overlap with the rest of a step, and
    kept until their backward pass. Other parameters (of the final norm) are gathered first, with the model itself.
    fp32_units: small modules, inside units or not, whose own parameters must never be rounded.
    reshard: free the gathered parameters after the forward pass and gather them again for the backward pass; with one
    rank: keep no rounded copies between micro-batches.
    """
    if mesh.batch.size == 1:
        _set_rounding_at_first_forward(model, Rounding(compute_dtype, kept=not reshard), fp32_units)
    else:
        shard(model, mesh, units, fp32_units, compute_dtype, reshard, ends)
    model._gradient_tree = GradientTree(model, mesh) if mesh.reproducible else None  # type: ignore[assignment]


def gradient_tree(model: nn.Module) -> GradientTree | None:
    """The tree that sums the gradients of `model` over micro-batches with `mesh.reproducible`; None: autograd sums."""
    return getattr(model, "_gradient_tree", None)


def shard(
    model: nn.Module, mesh: ParallelMesh, units: list[nn.Module], fp32_units: list[nn.Module],
    compute_dtype: torch.dtype, reshard: bool, ends: Sequence[nn.Module] = (),
) -> None:  # fmt: skip
    """`apply_data_parallel` with FSDP2, also for one rank."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    specs, fsdp_hooks = weight_specs(units), list[tuple[dict[int, Any], list[int]]]()
    for module in (*units, *ends, model):
        hooks_before = [(hooks, set(hooks)) for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard and module in units)
        assert isinstance(module, FSDPModule)
        gather_in_fp32(module, fp32_units)
        if module is model and mesh.shards.size() > 1:
            gather_codes(model, units, specs, mesh.shards, compute_dtype, reshard)
        # A module does not record who registered a hook: the new ones are FSDP2's.
        fsdp_hooks += [(hooks, [key for key in hooks if key not in old_keys]) for hooks, old_keys in hooks_before]
        module.set_gradient_divide_factor(1.0)
        # Otherwise FSDP2 reduces with premultiplication by the factor, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)
        if mesh.reproducible:
            module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]
            if mesh.replica is not None:
                module.set_all_reduce_hook(partial(tree_all_reduce, group=mesh.replica.group))
    model._fsdp_hooks = fsdp_hooks  # type: ignore[assignment]


@contextmanager
def without_fsdp_hooks(model: nn.Module) -> Iterator[None]:
    """A context without FSDP2's forward hooks, for a micro-batch between the first and the last of a step.

    The parameters of `model` must stay gathered. Autograd sums gradients in the gathered parameters, so FSDP2's hooks
    have nothing to gather or reduce, but take a tenth of a second of host time for a small model. Other hooks stay; no
    hook may be added or removed inside.
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


def _set_rounding_at_first_forward(model: nn.Module, rounding: Rounding, fp32_units: list[nn.Module]) -> None:
    """Let the forward pass round the parameters of `model`, except those of `fp32_units`."""

    def set_roundings(*_: Any) -> None:
        hook.remove()
        exempt = {id(parameter) for unit in fp32_units for parameter in unit.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in exempt:
                set_rounding(parameter, rounding)

    # Not earlier, because initialization replaces the parameters.
    hook = model.register_forward_pre_hook(set_roundings)
