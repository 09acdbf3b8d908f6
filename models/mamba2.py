"""The Mamba-2 mixer (arXiv:2405.21060), tensor parallel over state groups, and its convolution and norm.

    z, x, B, C, dt = in_proj(input)
    x, B, C        = silu(causal_conv(x, B, C))             y_s = silu(bias + sum_k weight_k x_{s - (width - 1) + k})
    y              = scan(x, dt, A, B, C, D, dt_bias)       models/ssd.py; A = -exp(A_log)
    output         = out_proj(norm(y * silu(z)))

Between the two projections everything is FP32. With fused kernels (models/execution.py) tensors are BF16 there, and
sums, states, dt, A and D are FP32. No fused kernel includes `out_proj`, because it would bypass the precision plan.

The convolution takes x before the sequence and x of another document as zero. In PyTorch it is `width` shifted
multiply-adds over [batch, sequence, channels], on a CPU several times faster than `conv1d`. It saves only its input;
the backward pass recomputes the sum before SiLU.

Shapes: t tokens, b batch, s sequence, c channels of this rank, k taps, g state groups of this rank, h heads of this
rank, p head dimension, n state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.layers import Layout, PackedLinear, RowParallelLinear, sections_of
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import local_parameter, new_parameter
from megatron_fp4.precision.plan import LinearShape
from models.execution import PLAIN, Execution, FusedKernel
from models.initialization import Draws, Rule, ones
from models.mixer import Mixer, RMSNorm, check_multiple, input_projection, output_projection
from models.positions import Documents, NewTokens
from models.published import HuggingFaceBlock, MegatronBlock, Section, Sections, group_major_order, split_rows
from models.ssd import ScanInputs, continued_scan, fused_scan, plain_scan

# mamba-ssm's initial values.
_A_RANGE = (1.0, 16.0)
_DT_RANGE = (1e-3, 1e-1)
_DT_FLOOR = 1e-4


def causal_conv_silu(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """The convolution of the formula above, in the weight's dtype. documents_bs: see `plain_scan`."""
    return _CausalConvSiLU.apply(x_bsc, weight_ck, bias_c, documents_bs)  # type: ignore[return-value]


def fused_conv_silu(x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, documents_bs: Tensor | None = None) -> Tensor:
    """`causal_conv_silu` by causal-conv1d, in the dtype of `x_bsc` with FP32 sums. documents_bs: `Documents.numbers`,
    which has the memory after its end that the kernel reads."""
    from causal_conv1d import causal_conv1d_fn

    y_bcs: Tensor = causal_conv1d_fn(
        conv_aligned(x_bsc).transpose(1, 2), weight_ck, bias_c, seq_idx=documents_bs, activation="silu"
    )
    return y_bcs.transpose(1, 2)


def conv_aligned(x_bsc: Tensor) -> Tensor:
    """x, copied unless it has the layout for causal-conv1d: it reads 16 bytes of consecutive channels at a time."""
    aligned = x_bsc.stride(2) == 1 and all(n % 8 == 0 for n in (*x_bsc.stride()[:2], x_bsc.storage_offset()))
    return x_bsc if aligned else x_bsc.contiguous()


def continued_conv_silu(
    x_bsc: Tensor, weight_ck: Tensor, bias_c: Tensor, before_bkc: Tensor, counts_b: Tensor
) -> tuple[Tensor, Tensor]:
    """`causal_conv_silu` of rows that continue texts: y, and `before_bkc` of the next call. No gradients.

    before_bkc: the width - 1 inputs before the first of `x_bsc`, zeros at a text's beginning. counts_b: int64, how many
    of a row's s columns are tokens; those after them are padding.
    """
    width = weight_ck.shape[1]
    inputs = torch.cat((before_bkc, x_bsc.to(before_bkc.dtype)), 1)
    y = F.silu(_shifted_sum(_shifts(inputs.to(weight_ck.dtype), width), weight_ck.t().contiguous(), bias_c))
    last = counts_b[:, None] + torch.arange(width - 1, device=counts_b.device)
    return y, inputs.gather(1, last[..., None].expand(-1, -1, inputs.shape[2]))


def _shifts(padded: Tensor, width: int, documents: Tensor | None = None, first: int = 0) -> Iterator[Tensor]:
    """The input [b, s, c] of each tap, from an input padded to [b, s + width - 1, c]; zero in other documents.

    documents: padded to the same length, with a number that no document has. first: where the unpadded rows begin.
    """
    length = padded.shape[1] - width + 1
    for k in range(width):
        shift = padded[:, k : k + length]
        if documents is not None:
            same = documents[:, k : k + length] == documents[:, first : first + length]
            shift = shift.where(same[..., None], 0)
        yield shift


def _shifted_sum(shifts: Iterable[Tensor], taps_kc: Tensor, start: Tensor) -> Tensor:
    """start + sum_k taps_k shifts[k], a correlation along the sequence."""
    total = None
    for shift, tap in zip(shifts, taps_kc, strict=True):
        total = torch.addcmul(start, shift, tap) if total is None else total.addcmul_(shift, tap)
    assert total is not None
    return total


class _CausalConvSiLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, documents)
        return F.silu(_shifted_sum(_tap_inputs(x, weight, documents), weight.t().contiguous(), bias), inplace=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, documents = ctx.saved_tensors
        width, taps = weight.shape[1], weight.t().contiguous()
        total = _shifted_sum(_tap_inputs(x, weight, documents), taps, bias)
        dtotal = torch.ops.aten.silu_backward(grad_outputs[0], total)
        # dx_s gets dtotal of s and the width - 1 positions after it, with the taps in reverse order.
        padded_documents = None if documents is None else F.pad(documents, (0, width - 1), value=-1)
        shifts = _shifts(F.pad(dtotal, (0, 0, 0, width - 1)), width, padded_documents)
        dx = _shifted_sum(shifts, taps.flip(0), torch.zeros_like(bias))
        dweight = [(shift * dtotal).sum((0, 1)) for shift in _tap_inputs(x, weight, documents)]
        return dx.to(x.dtype), torch.stack(dweight, 1), dtotal.sum((0, 1)), None


def _tap_inputs(x: Tensor, weight: Tensor, documents: Tensor | None) -> Iterator[Tensor]:
    before = weight.shape[1] - 1
    padded_documents = None if documents is None else F.pad(documents, (before, 0), value=-1)
    return _shifts(F.pad(x.to(weight.dtype), (0, 0, before, 0)), before + 1, padded_documents, before)


class CausalConv(nn.Module):
    """Weight [channels, width] and bias [channels] of the convolution, sharded over channels."""

    def __init__(self, channels: int, width: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.weight = new_parameter((channels, width), mesh, shard_dim=0)
        self.bias = new_parameter((channels,), mesh, shard_dim=0)

    def initial_values(self) -> dict[str, Rule]:
        """The default of `nn.Conv1d`."""
        bound = self.weight.shape[1] ** -0.5
        return dict.fromkeys(("weight", "bias"), lambda draws: draws.uniform(-bound, bound))

    def local_parameters(self) -> tuple[Tensor, Tensor]:
        return local_parameter(self.weight), local_parameter(self.bias)


def gated_rms_norm(y_bshp: Tensor, z_bsgc: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """RMS norm of `y * silu(z)` within each state group, times the weight: [tokens, d = h p = g c].

    The gate is applied before the norm, as in mamba-ssm's `RMSNormGated(norm_before_gate=False, group_size=c)`.
    Computed in the dtype of the weight (FP32), returned in the dtype of z.
    """
    y_td, z_td = (t.flatten(2).flatten(0, 1) for t in (y_bshp, z_bsgc))
    gated_td = y_td.to(weight_d.dtype) * F.silu(z_td.to(weight_d.dtype))
    gated_tgc = gated_td.unflatten(-1, (z_bsgc.shape[2], -1))
    return (F.rms_norm(gated_tgc, gated_tgc.shape[-1:], None, eps).flatten(-2) * weight_d).to(z_bsgc.dtype)


class SSMParameters(nn.Module):
    """A_log, D and dt_bias: one number per head each, which must never be rounded."""

    def __init__(self, num_heads: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.A_log = new_parameter((num_heads,), mesh, shard_dim=0)
        self.D = new_parameter((num_heads,), mesh, shard_dim=0)
        self.dt_bias = new_parameter((num_heads,), mesh, shard_dim=0)

    def local_parameters(self) -> tuple[Tensor, ...]:
        """A_log, D and dt_bias of this rank's heads, FP32 [heads / tp] each."""
        return tuple(local_parameter(parameter) for parameter in (self.A_log, self.D, self.dt_bias))

    def initial_values(self) -> dict[str, Rule]:
        """mamba-ssm's: -A in U(1, 16), dt log-uniform."""
        return {"A_log": lambda draws: draws.uniform(*_A_RANGE).log_(), "D": ones, "dt_bias": _initial_dt_bias}


def _initial_dt_bias(draws: Draws) -> Tensor:
    """softplus^-1(dt)."""
    low, high = (math.log(bound) for bound in _DT_RANGE)
    dt = draws.uniform(low, high).exp_().clamp_(min=_DT_FLOOR)
    return dt + (-torch.expm1(-dt)).log_()


def _scan_refusal(config: ModelConfig, tensor_parallel: int) -> str | None:
    size = config.mamba_chunk_size
    if size < 16 or size & (size - 1):
        return f"needs model.mamba_chunk_size to be a power of two of at least 16, but it is {size}"
    return None


def _conv_refusal(config: ModelConfig, tensor_parallel: int) -> str | None:
    if not 2 <= config.mamba_conv_width <= 4:
        return f"needs model.mamba_conv_width to be 2, 3 or 4, but it is {config.mamba_conv_width}"
    channels = _conv_channels(config) // tensor_parallel
    if channels % 8:
        return f"needs a multiple of 8 channels per rank in the convolution, but this model has {channels}"
    return None


def _conv_channels(config: ModelConfig) -> int:
    return config.mamba_inner_dim + 2 * config.mamba_num_groups * config.mamba_state_dim


def split_sections(
    layout: Layout, sequence_length: int, groups: int, conv_weight_ck: Tensor, conv_bias_c: Tensor, *parts_td: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From groups `[z | x | B | C | dt]` to sections: z [b, s, g, c]; [x | B | C] [b, s, channels], the convolution's
    input; dt [b, s, h]; and the convolution's weight [channels, width] and bias [channels] in the order of its input.

    In this order the scan needs no copies of its inputs. layout, parts_td: `in_proj`'s. One group already has this
    order, so all results are views, unless x, B and C are in several parts.
    """
    parts_bsf = [part.unflatten(0, (-1, sequence_length)) for part in parts_td]
    if groups == 1:
        z, xbc, dt = sections_of(parts_bsf, layout, groups, "z", (*"xBC",), "dt")
        return z, xbc.flatten(2), dt.flatten(2), conv_weight_ck, conv_bias_c
    z, *x_b_c, dt = sections_of(parts_bsf, layout, groups, "z", *"xBC", "dt")
    widths = [section.shape[-1] for section in x_b_c]
    rows = conv_weight_ck.unflatten(0, (groups, -1)).split(widths, 1)
    biases = conv_bias_c.unflatten(0, (groups, -1)).split(widths, 1)
    return (
        z.contiguous(),
        torch.cat([section.flatten(2) for section in x_b_c], -1),
        dt.flatten(2),
        torch.cat([section.flatten(0, 1) for section in rows]),
        torch.cat([section.flatten() for section in biases]),
    )


def _rows(config: ModelConfig) -> dict[str, int]:
    """The rows of each section of a published in_proj; the convolution has those of x, B and C."""
    inner, state = config.mamba_inner_dim, config.mamba_num_groups * config.mamba_state_dim
    return {"z": inner, "x": inner, "B": state, "C": state, "dt": config.mamba_num_heads}


def mamba_in_proj_order(config: ModelConfig) -> Tensor:
    """`group_major_order` of `in_proj`: published checkpoints have `[z | x | B | C | dt]`; groups are state groups."""
    return group_major_order([*_rows(config).values()], config.mamba_num_groups)


def mamba_conv_order(config: ModelConfig) -> Tensor:
    """`group_major_order` of the convolution's channels: published checkpoints have `[x | B | C]`."""
    return group_major_order([*_rows(config).values()][1:4], config.mamba_num_groups)


def _unpacked(config: ModelConfig) -> dict[str, list[Section]]:
    """The published tensors that both formats have."""
    hidden, inner = config.hidden_dim, config.mamba_inner_dim
    return {
        **{f"ssm.{n}": [Section(n, (config.mamba_num_heads,), fp32=True)] for n in ("A_log", "D", "dt_bias")},
        "norm.weight": [Section("norm.weight", (inner,))],
        "out_proj.weight": [Section("out_proj.weight", (hidden, inner))],
    }


def _hugging_face(config: ModelConfig) -> Sections:
    in_proj, conv = mamba_in_proj_order(config).argsort(), mamba_conv_order(config).argsort()
    return {
        "in_proj.weight": [Section("in_proj.weight", (len(in_proj), config.hidden_dim), in_proj)],
        "conv.weight": [Section("conv1d.weight", (len(conv), 1, config.mamba_conv_width), conv)],
        "conv.bias": [Section("conv1d.bias", (len(conv),), conv)],
        **_unpacked(config),
    }


def _megatron(config: ModelConfig) -> Sections:
    """Sections are separate tensors, because each tensor-parallel rank has a part of each section."""
    rows, conv = _rows(config), mamba_conv_order(config)

    def sections(name: str, parts: Sequence[str], order: Tensor, *columns: int) -> list[Section]:
        return split_rows([f"{name}.{part}" for part in parts], [rows[part] for part in parts], order, *columns)

    return {
        "in_proj.weight": sections("in_proj.weight", [*rows], mamba_in_proj_order(config), config.hidden_dim),
        "conv.weight": sections("conv1d.weight", "xBC", conv, 1, config.mamba_conv_width),
        "conv.bias": sections("conv1d.bias", "xBC", conv),
        **_unpacked(config),
    }


def _megatron_sizes(shape: Callable[[str], tuple[int, ...]], known: Mapping[str, Any]) -> dict[str, Any]:
    (heads,), inner = shape("A_log"), shape("in_proj.weight.z")[0]
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "mamba_state_dim": shape("in_proj.weight.B")[0] // known["mamba_num_groups"],
        "mamba_conv_width": shape("conv1d.weight.x")[2],
        "mamba_chunk_size": 128,  # Megatron's; it affects only rounding
    }


class Mamba2(Mixer):
    """`in_proj` packs `[z | x | B | C | dt]` of one state group after the other, and `conv` packs `[x | B | C]` in the
    same way (`mamba_in_proj_order`, `mamba_conv_order`). Head i uses group i // (heads / groups).
    """

    name = "Mamba-2"
    fused = (
        FusedKernel("scan", "scan", "mamba-ssm", fused_scan, _scan_refusal),
        FusedKernel("conv", "convolution", "causal-conv1d", fused_conv_silu, _conv_refusal),
    )
    hugging_face = HuggingFaceBlock(
        types=("linear_attention", "mamba"),
        sections=_hugging_face,
        settings={
            "mamba_num_heads": ("mamba_num_heads", 128),
            "mamba_head_dim": ("mamba_head_dim", 64),
            "mamba_num_groups": ("n_groups", 8),
            "mamba_state_dim": ("ssm_state_size", 128),
            "mamba_conv_width": ("conv_kernel", 4),
            "mamba_chunk_size": ("chunk_size", 128),
        },
        fixed={"mamba_hidden_act": "silu", "use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True},
    )
    megatron = MegatronBlock(
        module="mixer",
        linears=("in_proj", "out_proj"),
        sections=_megatron,
        sizes=_megatron_sizes,
        told=("mamba_num_groups",),
        fixed=lambda config: {"norm_eps": 1e-5, "mamba_conv_width": 4},
        arguments={
            f"mamba_{name}": (f"mamba_{name}", None) for name in ("num_heads", "head_dim", "num_groups", "state_dim")
        },
    )

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(config, mesh, execution)
        heads, groups = config.mamba_num_heads, config.mamba_num_groups
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.chunk_size = config.mamba_chunk_size
        self.heads_per_group, self.num_local_groups = heads // groups, groups // mesh.tensor.size
        # Of x and B in a group.
        self._widths = self.heads_per_group * self.head_dim, self.state_dim
        into, out = self.linears(config)
        # `split_sections` reads the result group by group, so it can skip each group's padding.
        self.in_proj = PackedLinear(into.in_features, into.sections, mesh, into.groups, keep_padding=True)
        self.conv = CausalConv(_conv_channels(config), config.mamba_conv_width, mesh)
        self.ssm = SSMParameters(heads, mesh)
        self.norm = RMSNorm(config.mamba_inner_dim, config.norm_eps, mesh, execution, gated_rms_norm, shard_dim=0)
        self.out_proj = RowParallelLinear(out.in_features, out.out_features, mesh)
        self._conv = execution.kernel("conv", causal_conv_silu)
        self._scan = execution.kernel("scan", plain_scan)
        self._split_sections = execution.pure(split_sections) if self.num_local_groups > 1 else split_sections

    def forward(self, x_td: Tensor, sequence_length: int, documents: Documents | None = None) -> Tensor:
        parts_td = self.in_proj(x_td)
        parameters = (*self.conv.local_parameters(), self.norm.local_weight(), *self.ssm.local_parameters())
        between = self.execution.recomputed(self._between_projections)
        numbers = None if documents is None else documents.numbers
        return self.out_proj(between(sequence_length, numbers, *parameters, *parts_td))

    def _between_projections(
        self,
        sequence_length: int,
        documents_bs: Tensor | None,
        conv_weight_ck: Tensor,
        conv_bias_c: Tensor,
        norm_weight_d: Tensor,
        a_log_h: Tensor,
        d_h: Tensor,
        dt_bias_h: Tensor,
        *parts_td: Tensor,
    ) -> Tensor:
        """[tokens, in_proj's features] -> [tokens, out_proj's features]. It depends only on its arguments."""
        z, xbc, dt, weight, bias = self._split_sections(
            self.in_proj.layout, sequence_length, self.num_local_groups, conv_weight_ck, conv_bias_c, *parts_td
        )
        inputs = self._scan_inputs(self._conv(xbc, weight, bias, documents_bs), dt, a_log_h, d_h, dt_bias_h)
        return self.norm.function(self._scan(inputs, self.chunk_size, documents_bs), z, norm_weight_d)

    def _scan_inputs(self, xbc_bsc: Tensor, dt_bsh: Tensor, a_log_h: Tensor, d_h: Tensor, bias_h: Tensor) -> ScanInputs:
        """The scan's inputs, from the result of the convolution and the local parameters."""
        groups, (inner, state) = self.num_local_groups, self._widths
        x, b, c = xbc_bsc.split([groups * inner, groups * state, groups * state], -1)
        x_bshp = x.unflatten(-1, (-1, self.head_dim))
        b_bsgn, c_bsgn = (t.unflatten(-1, (groups, -1)) for t in (b, c))
        return ScanInputs(x_bshp, dt_bsh, -a_log_h.exp(), b_bsgn, c_bsgn, d_h, bias_h)

    def new_cache(self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype) -> SimpleNamespace:
        """A cache with `before`, the last width - 1 inputs of the convolution, and `state`, the scan's state (FP32)."""
        groups, (inner, state), heads = self.num_local_groups, self._widths, self.heads_per_group
        shape = batch, self.conv.weight.shape[1] - 1, groups * (inner + 2 * state)
        return SimpleNamespace(
            before=torch.zeros(shape, device=device, dtype=dtype),
            state=torch.zeros(batch, groups, state, heads, self.head_dim, device=device),
        )

    def decode(self, x_td: Tensor, cache: SimpleNamespace, new: NewTokens) -> Tensor:
        z, xbc, dt, weight_ck, bias_c = self._split_sections(
            self.in_proj.layout, new.length, self.num_local_groups, *self.conv.local_parameters(), *self.in_proj(x_td)
        )
        xbc, cache.before = continued_conv_silu(xbc, weight_ck, bias_c, cache.before, new.counts)
        inputs = self._scan_inputs(xbc, dt, *self.ssm.local_parameters())
        y_bshp, cache.state = continued_scan(inputs, self.chunk_size, cache.state, new.valid)
        return self.out_proj(self.norm(y_bshp, z))

    def fp32_units(self) -> list[nn.Module]:
        return [self.ssm]

    @property
    def autotuned(self) -> bool:
        return self._scan is not plain_scan

    def rehearse(
        self, batch: int, sequence_length: int, compute_dtype: torch.dtype, device: torch.device, masked: bool = False
    ) -> None:
        groups, rows = self.num_local_groups, (batch, sequence_length)
        heads = groups * self.heads_per_group
        conv_dtype = torch.float32 if self._conv is causal_conv_silu else compute_dtype

        def constant(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device, requires_grad=True)

        inputs = ScanInputs(
            x_bshp=constant(0.5, *rows, heads, self.head_dim, dtype=conv_dtype),
            dt_bsh=constant(0.5, *rows, heads, dtype=compute_dtype),
            a_h=constant(-1.0, heads),
            b_bsgn=constant(0.5, *rows, groups, self.state_dim, dtype=conv_dtype),
            c_bsgn=constant(0.5, *rows, groups, self.state_dim, dtype=conv_dtype),
            d_h=constant(1.0, heads),
            dt_bias_h=constant(-4.0, heads),
        )
        # With documents other kernels run, with other autotuning keys.
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
            input_projection("in_proj", config, _rows(config), groups),
            output_projection("out_proj", config, inner, key, title),
        )

    @classmethod
    def flops_per_token(cls, config: ModelConfig, sequence_length: int) -> int:
        """FLOPs of the recurrence; the chunked scan does more arithmetic."""
        return 7 * config.mamba_inner_dim * config.mamba_state_dim

    @classmethod
    def other_parameters(cls, config: ModelConfig) -> int:
        """Of the convolution, A_log, D, dt_bias and the norm."""
        conv = _conv_channels(config) * (config.mamba_conv_width + 1)
        return conv + 3 * config.mamba_num_heads + config.mamba_inner_dim
