"""RMS normalization, plain and gated. Computed in FP32, returned in the compute dtype.

Shapes: t tokens, d features (of this rank), g norm groups (of this rank).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import local_parameter, new_parameter
from models.execution import PLAIN, Execution
from models.initialization import Rule, ones


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of `x` (arXiv:1910.07467, eq. 4)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def gated_rms_norm(y_td: Tensor, z_td: Tensor, weight_d: Tensor, num_groups: int, eps: float) -> Tensor:
    """RMS norm of `y * silu(z)` inside each of `num_groups` equal groups of channels, then the weight.

    The gate comes first, as in mamba-ssm's `RMSNormGated(norm_before_gate=False, group_size=d // num_groups)`.
    All in the dtype of `y_td`, into which `z_td` is converted.
    """
    gated_tgd = (y_td * F.silu(z_td.to(y_td.dtype))).unflatten(-1, (num_groups, -1))
    return F.rms_norm(gated_tgd, gated_tgd.shape[-1:], None, eps).flatten(-2) * weight_d


class RMSNorm(nn.Module):
    """RMS norm with a weight that every tensor-parallel rank holds whole.

    With sequence parallelism each rank sees its own tokens only, so the weight's gradient is a partial sum.
    """

    def __init__(
        self, dim: int, eps: float, mesh: ParallelMesh, execution: Execution = PLAIN, shard_dim: int | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter((dim,), mesh, shard_dim)
        self._norm = execution.pure(_rms_norm_in_fp32 if shard_dim is None else _gated_rms_norm_in_fp32)

    def initial_values(self) -> dict[str, Rule]:
        """Ones."""
        return {"weight": ones}

    def local_weight(self) -> Tensor:
        """FP32 [dim] of this rank, for `function`."""
        return local_parameter(self.weight, torch.float32)

    def function(self, *tensors: Tensor) -> Tensor:
        """`forward` as a function of tensors alone: its own, then the weight."""
        return self._norm(*tensors, self.eps)

    def forward(self, *tensors: Tensor) -> Tensor:
        """x [tokens, dim] -> [tokens, dim] in the dtype of the input."""
        return self.function(*tensors, self.local_weight())


class GatedRMSNorm(RMSNorm):
    """The norm after the Mamba-2 scan; channels are sharded over tensor-parallel ranks by whole groups.

    y [batch, sequence, heads, p] and z [batch, sequence, groups, c], heads * p = groups * c = dim / tp, both of this
    rank -> [tokens, dim / tp] in the dtype of z; y may be FP32.
    """

    def __init__(self, dim: int, eps: float, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(dim, eps, mesh, execution, shard_dim=0)


def _rms_norm_in_fp32(x_td: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    return rms_norm(x_td.to(torch.float32), weight_d, eps).to(x_td.dtype)


def _gated_rms_norm_in_fp32(y_bshp: Tensor, z_bsgc: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    y_td, z_td = (t.flatten(2).flatten(0, 1) for t in (y_bshp, z_bsgc))
    return gated_rms_norm(y_td.to(torch.float32), z_td, weight_d, z_bsgc.shape[2], eps).to(z_bsgc.dtype)
