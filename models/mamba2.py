"""The Mamba-2 mixer (arXiv:2405.21060), tensor parallel over state groups, and its convolution and norm.

    z, x, B, C, dt = in_proj(input)
    x, B, C        = silu(causal_conv(x, B, C))             y_s = silu(bias + sum_k weight_k x_{s - (width - 1) + k})
    y              = scan(x, dt, A, B, C, D, dt_bias)       models/ssd.py; A = -exp(A_log)
    output         = out_proj(norm(y * silu(z)))

Between the two projections everything is FP32; with fused kernels (models/execution.py) tensors are BF16 there, and
sums, states, dt, A and D FP32. `out_proj` is a layer of its own and runs as such: fused kernels that swallow it would
leave it out of the precision plan.

In the convolution, x before the sequence and x of another document count as zero. It is written as `width` shifted
multiply-adds over [batch, sequence, channels], on a CPU several times faster than `conv1d`. Only the input is kept for
the backward pass, which computes the sum before SiLU again.

Shapes: t tokens, b batch, s sequence, c channels of this rank, k taps, g state groups of this rank, h heads of this
rank, p head dimension, n state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import local_parameter, new_parameter
from megatron_fp4.precision.plan import LinearShape
from models.execution import PLAIN, Execution, FusedKernel
from models.initialization import Draws, Rule, ones, uniform
from models.mixer import Mixer, RMSNorm, check_multiple, group_major_order, input_projection, output_projection
from models.positions import Documents, NewTokens
from models.ssd import ScanInputs, continued_scan, fused_scan, plain_scan

# mamba-ssm's initial values.
_A_RANGE = (1.0, 16.0)
_DT_RANGE = (1e-3, 1e-1)
_DT_FLOOR = 1e-4


def causal_conv_silu(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """The convolution at the top of this file, in the weight's dtype. documents_bs: as of `plain_scan`."""
    return _CausalConvSiLU.apply(x_bsc, weight_ck, bias_c, documents_bs)  # type: ignore[return-value]


def fused_conv_silu(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """The same by causal-conv1d: in the dtype of `x_bsc`, with FP32 sums. documents_bs: as `Documents.numbers` lies."""
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
    y = F.silu(_shifted_sum(_shifts(inputs.to(weight_ck.dtype), width), weight_ck.t().contiguous(), bias_c))
    kept = counts_b[:, None] + torch.arange(width - 1, device=counts_b.device)
    return y, inputs.gather(1, kept[..., None].expand(-1, -1, inputs.shape[2]))


def _shifts(padded: Tensor, width: int, documents: Tensor | None = None, first: int = 0) -> Iterator[Tensor]:
    """A padded input [b, s + width - 1, c] as each tap sees it: [b, s, c], zero where that is another document.

    documents: padded likewise, with a number that no document has. first: where the unpadded rows begin.
    """
    length = padded.shape[1] - width + 1
    for k in range(width):
        part = padded[:, k : k + length]
        if documents is not None:
            same = documents[:, k : k + length] == documents[:, first : first + length]
            part = part.where(same[..., None], 0)
        yield part


def _shifted_sum(shifts: Iterable[Tensor], taps_kc: Tensor, start: Tensor) -> Tensor:
    """start + sum_k taps_k shifts[k]: a correlation along the sequence."""
    total = None
    for shift, tap in zip(shifts, taps_kc, strict=True):
        total = torch.addcmul(start, shift, tap) if total is None else total.addcmul_(shift, tap)
    assert total is not None
    return total


class _CausalConvSiLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, documents)
        return F.silu(_shifted_sum(_past(x, weight, documents), weight.t().contiguous(), bias), inplace=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, documents = ctx.saved_tensors
        width, taps = weight.shape[1], weight.t().contiguous()
        total = _shifted_sum(_past(x, weight, documents), taps, bias)
        gradient = torch.ops.aten.silu_backward(grad_outputs[0], total)
        # The gradient runs back in time: the last tap meets the newest input.
        documents_after = None if documents is None else F.pad(documents, (0, width - 1), value=-1)
        future = _shifts(F.pad(gradient, (0, 0, 0, width - 1)), width, documents_after)
        dx = _shifted_sum(future, taps.flip(0), torch.zeros_like(bias))
        dweight = [(shift * gradient).sum((0, 1)) for shift in _past(x, weight, documents)]
        return dx.to(x.dtype), torch.stack(dweight, 1), gradient.sum((0, 1)), None


def _past(x: Tensor, weight: Tensor, documents: Tensor | None) -> Iterator[Tensor]:
    """The input as each tap sees it, in the weight's dtype."""
    before = weight.shape[1] - 1
    documents_before = None if documents is None else F.pad(documents, (before, 0), value=-1)
    return _shifts(F.pad(x.to(weight.dtype), (0, 0, before, 0)), before + 1, documents_before, before)


class CausalConv(nn.Module):
    """Weight [channels, width] and bias [channels] of the convolution, sharded over channels."""

    def __init__(self, channels: int, width: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.weight = new_parameter((channels, width), mesh, shard_dim=0)
        self.bias = new_parameter((channels,), mesh, shard_dim=0)

    def initial_values(self) -> dict[str, Rule]:
        """`nn.Conv1d`'s default."""
        bound = self.weight.shape[1] ** -0.5
        return {"weight": uniform(-bound, bound), "bias": uniform(-bound, bound)}

    def local_parameters(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of this rank's channels, FP32."""
        return local_parameter(self.weight), local_parameter(self.bias)


def gated_rms_norm(y_bshp: Tensor, z_bsgc: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """RMS norm of `y * silu(z)` inside each state group, then the weight: [tokens, d = h p = g c].

    The gate comes first, as in mamba-ssm's `RMSNormGated(norm_before_gate=False, group_size=c)`. Computed in the dtype
    of the weight (FP32), returned in that of z.
    """
    y_td, z_td = (t.flatten(2).flatten(0, 1) for t in (y_bshp, z_bsgc))
    gated_td = y_td.to(weight_d.dtype) * F.silu(z_td.to(weight_d.dtype))
    gated_tgc = gated_td.unflatten(-1, (z_bsgc.shape[2], -1))
    return (F.rms_norm(gated_tgc, gated_tgc.shape[-1:], None, eps).flatten(-2) * weight_d).to(z_bsgc.dtype)


class SSMParameters(nn.Module):
    """A_log, D and dt_bias, one number per head, which must never be rounded."""

    def __init__(self, num_heads: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.A_log = new_parameter((num_heads,), mesh, shard_dim=0)
        self.D = new_parameter((num_heads,), mesh, shard_dim=0)
        self.dt_bias = new_parameter((num_heads,), mesh, shard_dim=0)

    def local_parameters(self) -> tuple[Tensor, ...]:
        """A_log, D and dt_bias of this rank's heads, FP32 [heads / tp] each."""
        return tuple(local_parameter(parameter) for parameter in (self.A_log, self.D, self.dt_bias))

    def initial_values(self) -> dict[str, Rule]:
        """mamba-ssm's: A in U(1, 16), dt log-uniform."""
        return {"A_log": lambda draws: draws.uniform(*_A_RANGE).log_(), "D": ones, "dt_bias": _initial_dt_bias}


def _initial_dt_bias(draws: Draws) -> Tensor:
    """softplus^-1(dt)."""
    low, high = (math.log(bound) for bound in _DT_RANGE)
    dt = draws.uniform(low, high).exp_().clamp_(min=_DT_FLOOR)
    return dt + (-torch.expm1(-dt)).log_()


def _scan_refusal(config: ModelConfig, tensor_parallel: int) -> str | None:
    size = config.mamba_chunk_size
    if size < 16 or size & (size - 1):
        return f"needs model.mamba_chunk_size to be a power of two from 16 on, and it is {size}"
    return None


def _conv_refusal(config: ModelConfig, tensor_parallel: int) -> str | None:
    if not 2 <= config.mamba_conv_width <= 4:
        return f"needs model.mamba_conv_width to be 2, 3 or 4, and it is {config.mamba_conv_width}"
    channels = _conv_channels(config) // tensor_parallel
    if channels % 8:
        return f"needs a multiple of 8 channels a rank in the convolution, and this model has {channels}"
    return None


def _conv_channels(config: ModelConfig) -> int:
    return config.mamba_inner_dim + 2 * config.mamba_num_groups * config.mamba_state_dim


def sections(
    projected_td: Tensor,
    conv_weight_ck: Tensor,
    conv_bias_c: Tensor,
    sequence_length: int,
    groups: int,
    widths: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From groups `[z | x | B | C | dt]` to sections: z [b, s, g, c]; x, B and C as the convolution takes them, [b, s,
    channels]; dt [b, s, h]; and the convolution's weight [channels, width] and bias [channels] in the same order.

    After it the scan takes its inputs where they lie. widths: of a group's x, its B, and its dt; more than these,
    after them, is padding. One group is in this order already, and all is views.
    """
    inner, state, heads = widths
    projected = projected_td.unflatten(0, (-1, sequence_length)).unflatten(-1, (groups, -1))
    padding = projected.shape[-1] - 2 * inner - 2 * state - heads
    z, xbc, dt, _ = projected.split([inner, inner + 2 * state, heads, padding], -1)
    if groups == 1:
        return z, xbc.flatten(2), dt.flatten(2), conv_weight_ck, conv_bias_c
    x_b_c = xbc.split([inner, state, state], -1)
    rows = conv_weight_ck.unflatten(0, (groups, -1)).split([inner, state, state], 1)
    biases = conv_bias_c.unflatten(0, (groups, -1)).split([inner, state, state], 1)
    return (
        z.contiguous(),
        torch.cat([section.flatten(2) for section in x_b_c], -1),
        dt.flatten(2),
        torch.cat([section.flatten(0, 1) for section in rows]),
        torch.cat([section.flatten() for section in biases]),
    )


class Mamba2(Mixer):
    """`in_proj` packs `[z | x | B | C | dt]` of one state group after the other, `conv` `[x | B | C]` likewise
    (`mamba_in_proj_order`). Head i uses group i // (heads / groups).
    """

    name = "Mamba-2"
    fused = (
        FusedKernel("scan", "scan", "mamba-ssm", fused_scan, _scan_refusal),
        FusedKernel("conv", "convolution", "causal-conv1d", fused_conv_silu, _conv_refusal),
    )

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(config, mesh, execution)
        heads, groups = config.mamba_num_heads, config.mamba_num_groups
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.chunk_size = config.mamba_chunk_size
        self.heads_per_group, self.num_local_groups = heads // groups, groups // mesh.tp_size
        # Of a group's x, its B, and its dt.
        self._widths = self.heads_per_group * self.head_dim, self.state_dim, self.heads_per_group
        into, out = self.linears(config)
        # What follows reads its rows group by group anyway, and passes over a group's padding.
        self.in_proj = ColumnParallelLinear(
            into.in_features, into.out_features, mesh, num_groups=into.groups, keep_padding=True
        )
        self.conv = CausalConv(_conv_channels(config), config.mamba_conv_width, mesh)
        self.ssm = SSMParameters(heads, mesh)
        self.norm = RMSNorm(config.mamba_inner_dim, config.norm_eps, mesh, execution, gated_rms_norm, shard_dim=0)
        self.out_proj = RowParallelLinear(out.in_features, out.out_features, mesh)
        self._conv = execution.kernel("conv", causal_conv_silu)
        self._scan = execution.kernel("scan", plain_scan)
        self._sections = execution.pure(sections) if self.num_local_groups > 1 else sections

    def forward(self, x_td: Tensor, sequence_length: int, documents: Documents | None = None) -> Tensor:
        projected_td = self.in_proj(x_td)
        parameters = (*self.conv.local_parameters(), self.norm.local_weight(), *self.ssm.local_parameters())
        between = self.execution.recomputed(self._between_projections)
        numbers = None if documents is None else documents.numbers
        return self.out_proj(between(projected_td, sequence_length, numbers, *parameters))

    def _between_projections(
        self,
        projected_td: Tensor,
        sequence_length: int,
        documents_bs: Tensor | None,
        conv_weight_ck: Tensor,
        conv_bias_c: Tensor,
        norm_weight_d: Tensor,
        *ssm_tensors: Tensor,
    ) -> Tensor:
        """[tokens, in_proj's features] -> [tokens, out_proj's features], a function of tensors alone."""
        z, xbc, dt, weight, bias = self._sections(
            projected_td, conv_weight_ck, conv_bias_c, sequence_length, self.num_local_groups, self._widths
        )
        inputs = self._scan_inputs(self._conv(xbc, weight, bias, documents_bs), dt, *ssm_tensors)
        return self.norm.function(self._scan(inputs, self.chunk_size, documents_bs), z, norm_weight_d)

    def _scan_inputs(self, xbc_bsc: Tensor, dt_bsh: Tensor, a_log_h: Tensor, d_h: Tensor, bias_h: Tensor) -> ScanInputs:
        """Of what the convolution returned."""
        groups, (inner, state, _) = self.num_local_groups, self._widths
        x, b, c = xbc_bsc.split([groups * inner, groups * state, groups * state], -1)
        x_bshp = x.unflatten(-1, (-1, self.head_dim))
        b_bsgn, c_bsgn = (t.unflatten(-1, (groups, -1)) for t in (b, c))
        return ScanInputs(x_bshp, dt_bsh, -a_log_h.exp(), b_bsgn, c_bsgn, d_h, bias_h)

    def new_cache(self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype) -> SimpleNamespace:
        """before: the last width - 1 inputs of the convolution. state: the scan's, FP32."""
        groups, (inner, state, heads) = self.num_local_groups, self._widths
        shape = batch, self.conv.weight.shape[1] - 1, groups * (inner + 2 * state)
        return SimpleNamespace(
            before=torch.zeros(shape, device=device, dtype=dtype),
            state=torch.zeros(batch, groups, state, heads, self.head_dim, device=device),
        )

    def decode(self, x_td: Tensor, cache: SimpleNamespace, new: NewTokens) -> Tensor:
        z, xbc, dt, weight_ck, bias_c = self._sections(
            self.in_proj(x_td), *self.conv.local_parameters(), new.length, self.num_local_groups, self._widths
        )
        xbc, cache.before = continued_conv_silu(xbc, weight_ck, bias_c, cache.before, new.counts)
        inputs = self._scan_inputs(xbc, dt, *self.ssm.local_parameters())
        y_bshp, cache.state = continued_scan(inputs, self.chunk_size, cache.state, new.valid)
        return self.out_proj(self.norm(y_bshp, z))

    def fp32_units(self) -> list[nn.Module]:
        return [self.ssm]

    @property
    def autotuned(self) -> bool:
        """mamba-ssm's scan is."""
        return self._scan is not plain_scan

    def rehearse(
        self, batch: int, sequence_length: int, compute_dtype: torch.dtype, device: torch.device, masked: bool = False
    ) -> None:
        groups, rows = self.num_local_groups, (batch, sequence_length)
        heads = groups * self.heads_per_group
        from_conv = torch.float32 if self._conv is causal_conv_silu else compute_dtype

        def constant(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device, requires_grad=True)

        inputs = ScanInputs(
            x_bshp=constant(0.5, *rows, heads, self.head_dim, dtype=from_conv),
            dt_bsh=constant(0.5, *rows, heads, dtype=compute_dtype),
            a_h=constant(-1.0, heads),
            b_bsgn=constant(0.5, *rows, groups, self.state_dim, dtype=from_conv),
            c_bsgn=constant(0.5, *rows, groups, self.state_dim, dtype=from_conv),
            d_h=constant(1.0, heads),
            dt_bias_h=constant(-4.0, heads),
        )
        # With documents the kernels are others, and Triton's keys too.
        documents_bs = torch.zeros(rows, dtype=torch.int32, device=device) if masked else None
        with torch.enable_grad():
            y_bshp = self._scan(inputs, self.chunk_size, documents_bs)
            torch.autograd.grad(y_bshp, inputs, torch.ones_like(y_bshp))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        check_multiple(config, "mamba_num_heads", "mamba_num_groups")

    @classmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        return {f"model.{name}": (getattr(config, name),) * 2 for name in ("mamba_num_heads", "mamba_num_groups")}

    @classmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        inner, groups = config.mamba_inner_dim, config.mamba_num_groups
        key, title = "model.mamba_num_heads x model.mamba_head_dim", "the Mamba output projection"
        return (
            input_projection("in_proj", config, inner + _conv_channels(config) + config.mamba_num_heads, groups),
            output_projection("out_proj", config, inner, key, title),
        )

    @classmethod
    def flops_per_token(cls, config: ModelConfig, sequence_length: int) -> int:
        """The recurrence's; the chunked scan does more arithmetic."""
        return 7 * config.mamba_inner_dim * config.mamba_state_dim

    @classmethod
    def other_parameters(cls, config: ModelConfig) -> int:
        """The convolution's, A_log, D and dt_bias, the norm's."""
        conv = _conv_channels(config) * (config.mamba_conv_width + 1)
        return conv + 3 * config.mamba_num_heads + config.mamba_inner_dim


def mamba_in_proj_order(config: ModelConfig) -> Tensor:
    """Of `in_proj`, see `group_major_order`: published `[z | x | B | C | dt]`, groups are state groups."""
    inner, state = config.mamba_inner_dim, config.mamba_num_groups * config.mamba_state_dim
    return group_major_order((inner, inner, state, state, config.mamba_num_heads), config.mamba_num_groups)


def mamba_conv_order(config: ModelConfig) -> Tensor:
    """Of the convolution's channels: published `[x | B | C]`, groups are state groups."""
    state = config.mamba_num_groups * config.mamba_state_dim
    return group_major_order((config.mamba_inner_dim, state, state), config.mamba_num_groups)
