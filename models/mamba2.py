"""The Mamba-2 mixer (arXiv:2405.21060), tensor parallel over state groups.

    z, x, B, C, dt = in_proj(input)
    x, B, C        = silu(causal_conv(x, B, C))
    dt             = softplus(dt + dt_bias)         not clamped, as mamba-ssm's default
    y              = scan(x, dt, A, B, C) + D x     A = -exp(A_log)
    output         = out_proj(norm(y * silu(z)))

Between the two projections everything is FP32; with fused kernels (models/execution.py) tensors are BF16 there, and
sums, states, dt, A and D FP32. `out_proj` is a layer of its own and runs as such: fused kernels that swallow it would
leave it out of the precision plan.

Shapes: t tokens, b batch, s sequence, g state groups of this rank, h heads of this rank, p head dimension, n state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import local_parameter, new_parameter
from models.conv import CausalConv, fused_conv_silu
from models.execution import PLAIN, Execution
from models.norm import GatedRMSNorm
from models.recompute import Recompute
from models.ssd import ssd_scan


class SSMParameters(nn.Module):
    """A_log, D and dt_bias, one number per head, which must never be rounded.

    A module of its own because FSDP2's precision is a module's: this one is wrapped with an FP32 policy. It has to be
    called, not read, for FSDP2 to gather its parameters.
    """

    def __init__(self, num_heads: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.A_log = new_parameter((num_heads,), mesh, shard_dim=0)
        self.D = new_parameter((num_heads,), mesh, shard_dim=0)
        self.dt_bias = new_parameter((num_heads,), mesh, shard_dim=0)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """(A_log, D, dt_bias) of this rank's heads, FP32 [heads / tp] each."""
        # Copies: FSDP2 may free the gathered parameters as soon as this module is left.
        a_log, d, dt_bias = (local_parameter(p, copy=True) for p in (self.A_log, self.D, self.dt_bias))
        return a_log, d, dt_bias


class Mamba2(nn.Module):
    """`in_proj` packs `[z | x | B | C | dt]` of one state group after the other, `conv` `[x | B | C]` likewise
    (models/packing.py). Head i uses group i // (heads / groups).

    Raises ValueError if heads do not divide by groups, or groups by the tensor-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__()
        heads, groups, inner = config.mamba_num_heads, config.mamba_num_groups, config.mamba_inner_dim
        if heads % groups != 0:
            raise ValueError(f"model.mamba_num_heads={heads} must be a multiple of model.mamba_num_groups={groups}")
        if groups % mesh.tp_size != 0:
            raise ValueError(
                f"model.mamba_num_groups={groups} must be a multiple of parallel.tensor={mesh.tp_size}: "
                "lower the latter"
            )
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.chunk_size = config.mamba_chunk_size
        self.heads_per_group, self.num_local_groups = heads // groups, groups // mesh.tp_size
        conv_channels = inner + 2 * groups * config.mamba_state_dim
        self.in_proj = ColumnParallelLinear(config.hidden_dim, inner + conv_channels + heads, mesh, num_groups=groups)
        self.conv = CausalConv(conv_channels, config.mamba_conv_width, mesh, fused=execution.conv)
        self.ssm = SSMParameters(heads, mesh)
        self.norm = GatedRMSNorm(inner, config.norm_eps, mesh, execution)
        self.out_proj = RowParallelLinear(inner, config.hidden_dim, mesh)
        self.recompute = Recompute(execution.recompute == "selective")
        self._scan = fused_scan if execution.scan else plain_scan

    def forward(self, x_td: Tensor, sequence_length: int, ssm: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], each sequence on its own. ssm: what `self.ssm()` returned, if it was
        called already (where this function runs a second time, that must not)."""
        projected = self.recompute.expensive(self.in_proj, x_td)

        def between(projected_td: Tensor, *parameters: Tensor) -> Tensor:
            return self._between_projections(projected_td, sequence_length, *parameters)

        parameters = (*self.conv.local_parameters(), *(self.ssm() if ssm is None else ssm), self.norm.local_weight())
        return self.recompute.expensive(self.out_proj, self.recompute.cheap(between, projected, *parameters))

    def _between_projections(
        self,
        projected_td: Tensor,
        sequence_length: int,
        conv_weight_ck: Tensor,
        conv_bias_c: Tensor,
        a_log_h: Tensor,
        d_h: Tensor,
        dt_bias_h: Tensor,
        norm_weight_d: Tensor,
    ) -> Tensor:
        """[tokens, in_proj's features] -> [tokens, out_proj's features], a function of tensors alone."""
        groups, inner, state = self.num_local_groups, self.heads_per_group * self.head_dim, self.state_dim
        projected = projected_td.unflatten(0, (-1, sequence_length)).unflatten(-1, (groups, -1))
        z, xbc, dt = projected.split([inner, inner + 2 * state, self.heads_per_group], -1)
        xbc = self.conv.function(xbc.flatten(2), conv_weight_ck, conv_bias_c).unflatten(-1, (groups, -1))
        x, b_bsgn, c_bsgn = xbc.split([inner, state, state], -1)
        x_bshp = x.reshape(*x.shape[:2], -1, self.head_dim)
        y_bshp = self._scan(x_bshp, dt.flatten(2), -a_log_h.exp(), b_bsgn, c_bsgn, d_h, dt_bias_h, self.chunk_size)
        # A copy of z is kept for the backward pass, not all of `projected` with z in it.
        return self.norm.function(y_bshp, z.contiguous(), norm_weight_d)

    def rehearse_scan(self, batch: int, sequence_length: int, compute_dtype: torch.dtype, device: torch.device) -> None:
        """Run the scan forward and backward on constants, in the shapes and dtypes that the run will give it.

        Needs no parameters, changes nothing, draws nothing: it is for kernels to be compiled and tuned.
        """
        groups, heads = self.num_local_groups, self.num_local_groups * self.heads_per_group
        from_conv = compute_dtype if self.conv.function is fused_conv_silu else torch.float32
        rows = (batch, sequence_length)

        def constant(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device, requires_grad=True)

        inputs = {
            "x_bshp": constant(0.5, *rows, heads, self.head_dim, dtype=from_conv),
            "dt_bsh": constant(0.5, *rows, heads, dtype=compute_dtype),
            "a_h": constant(-1.0, heads),
            "b_bsgn": constant(0.5, *rows, groups, self.state_dim, dtype=from_conv),
            "c_bsgn": constant(0.5, *rows, groups, self.state_dim, dtype=from_conv),
            "d_h": constant(1.0, heads),
            "dt_bias_h": constant(-4.0, heads),
        }
        with torch.enable_grad():
            y_bshp = self._scan(**inputs, chunk_size=self.chunk_size)
            torch.autograd.grad(y_bshp, list(inputs.values()), torch.ones_like(y_bshp))


def plain_scan(
    x_bshp: Tensor,
    dt_bsh: Tensor,
    a_h: Tensor,
    b_bsgn: Tensor,
    c_bsgn: Tensor,
    d_h: Tensor,
    dt_bias_h: Tensor,
    chunk_size: int,
) -> Tensor:
    """scan(x, softplus(dt + dt_bias), A, B, C) + D x in plain PyTorch; all FP32 but `dt_bsh`, which may be BF16."""
    dt_bsh = F.softplus(dt_bsh.to(torch.float32) + dt_bias_h)
    return torch.addcmul(ssd_scan(x_bshp, dt_bsh, a_h, b_bsgn, c_bsgn, chunk_size), x_bshp, d_h[:, None])


def fused_scan(
    x_bshp: Tensor,
    dt_bsh: Tensor,
    a_h: Tensor,
    b_bsgn: Tensor,
    c_bsgn: Tensor,
    d_h: Tensor,
    dt_bias_h: Tensor,
    chunk_size: int,
) -> Tensor:
    """The same by mamba-ssm's Triton kernels: x, dt, B and C in BF16, the rest in FP32; BF16 out."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined(
        x_bshp, dt_bsh, a_h, b_bsgn, c_bsgn, chunk_size, D=d_h, dt_bias=dt_bias_h, dt_softplus=True
    )
