"""Data parallelism by FSDP2: sharded FP32 masters, compute in BF16, gradients summed in FP32.

What each setting is for: `param_dtype` is what the forward pass sees, `reduce_dtype` FP32 what gradients are added
up in over ranks and micro-batches, `cast_forward_inputs` is off because token ids and FP32 losses must stay what
they are. Parameters that must stay FP32 (Mamba-2's A, D and dt bias) are gathered as they are, with their block, and
weights of quantized linears as 4-bit codes where nobody reads more (gathered_codes.py).

Gradients are summed, not averaged: every micro-batch's loss is divided by the number of micro-batches of the global
batch before its backward pass, so that this pass is the same whichever rank computes it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_fp4.parallel.gathered_codes import WholeWeight, gather_codes, gather_in_fp32
from megatron_fp4.parallel.mesh import ParallelMesh


def apply_data_parallel(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    units: list[nn.Module],
    fp32_units: list[nn.Module],
    compute_dtype: torch.dtype,
    reshard: bool,
) -> None:
    """Shard `model` over the data-parallel axis, in place. Gradients of ranks add up.

    units: modules gathered as a whole, in order of execution (the blocks). What belongs to none of them (embedding,
    final norm, head) is gathered with the model itself.
    fp32_units: small modules, inside units or not, whose own parameters must never be rounded.
    reshard: free the gathered parameters after the forward pass and gather them again for the backward pass.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    weights = WholeWeight.all_of(units)
    for module in units:
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    for module in (*units, model):
        assert isinstance(module, FSDPModule)
        gather_in_fp32(module, fp32_units)
    shards = mesh.device_mesh["dp"]
    if shards.size() > 1:
        gather_codes(model, units, weights, shards, compute_dtype, reshard)
    if mesh.dp_size > 1:  # alone nothing is reduced, and a factor would cost a pass over the gradients
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # Otherwise a factor becomes a reduction with premultiplication, which gloo does not know.
                module.set_force_sum_reduction_for_comms(True)
