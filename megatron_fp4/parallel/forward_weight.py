"""What a linear's weight is to fprop, element by element: of this rank's rows of the FP32 master, on any mesh.

Codes do not depend on the mesh, but they depend on more than one rank's rows: blocks and the maximum of the tensor
reach over them. So the rows of all shards come together, rounded as the forward pass has them, and are quantized as a
call of the linear quantizes them, with its format, its padding and the maximum that tensor-parallel ranks share; each
rank keeps its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.linear_call import LinearCall
from megatron_fp4.precision.recipe import FPROP_WEIGHT, Recipe


@dataclass(frozen=True)
class ForwardWeight:
    """Rows of a weight as fprop multiplies by them.

    values: [rows, in], `code * block scale`, exact in its dtype (BF16; FP32 for FP8 under FP32 scales).
    scale: FP32 0-dim, the tensor scale; None: 1.
    """

    values: Tensor
    scale: Tensor | None

    def real(self) -> Tensor:
        """FP32 [rows, in], in memory of its own."""
        values = self.values.to(torch.float32, copy=True)
        return values if self.scale is None else values.mul_(self.scale)


def has_values(recipe: Recipe) -> bool:
    """Whether fprop's quantized weight stands for the weight itself, one value for each element and the same in every
    micro-batch: quantized to nearest, without a transform."""
    weight = recipe[FPROP_WEIGHT]
    return weight.quantized and not weight.drawn and not recipe.fprop.rht


@torch.no_grad()
def forward_weight(linear: QuantizedLinear, dtype: torch.dtype) -> ForwardWeight:
    """This rank's rows of the weight of `linear`, whose recipe `has_values`. A collective over the ranks that share it.

    dtype: the compute dtype. The parameter is in its sharded state.
    """
    context, master = linear.context, local_part(linear.weight)
    assert has_values(context.recipe), f"the quantized weight of {context.name} does not stand for the weight"
    num_rows = linear.out_features // (1 if context.out_shards is None else context.out_shards.size())
    whole, first = _whole(linear, master, num_rows, dtype)
    alone = replace(context, backend=EMULATED, in_tokens=None, out_tokens=None, weight_cache=None, probe=None)
    call = LinearCall(alone, whole, whole.new_empty(0, whole.shape[1], dtype=dtype))
    operand = call.fprop_weight()
    values = call.unpad_rows(operand.unpacked())
    return ForwardWeight(values[first : first + len(master)].contiguous(), operand.scale)


def _whole(linear: QuantizedLinear, master: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The weight of all FSDP shards as the forward pass sees it, [num_rows, in], and where this rank's rows begin."""
    shards = linear.mesh.device_mesh["dp"]
    if shards.size() == 1:
        return master, 0
    chunk = -(-num_rows // shards.size())  # FSDP2's rows of a rank, of which the last have fewer
    mine = torch.zeros(chunk, master.shape[1], dtype=dtype, device=master.device)
    mine[: len(master)].copy_(master)
    gathered = torch.empty(chunk * shards.size(), master.shape[1], dtype=dtype, device=master.device)
    dist.all_gather_into_tensor(gathered, mine, group=shards.get_group())
    return gathered[:num_rows], min(chunk * shards.get_local_rank(), num_rows)
